"""Messages between the trainer ranks and the controller, and the trainers' client.

ZeroMQ DEALER (trainer) to ROUTER (controller), encrypted by CURVE, with which both sides also prove to hold the
incarnation's keys before a message is passed on; every request gets exactly one reply. A frame is the msgpack encoding
of `Envelope` or `ReplyEnvelope`. Arrays travel as raw buffers (data/trajectory.py). "Rank 0" is the first of all
trainer ranks.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from areal_megatron.config import ConfigError
from areal_megatron.data.trajectory import BatchPart, LossPart, Trajectory, decoder, encoder
from areal_megatron.reshard.session import LinkRef
from areal_megatron.run.folder import SecretKeys
from areal_megatron.run.zeromq import open_socket

PROTOCOL = 13
_LOOK_S = 1.0
LONGEST_BYTES = 2**30
"""The longest message of a run that a program drives, which may hold all samples of a batch; else MESSAGE_BYTES of
zeromq.py."""


class Hello(msgspec.Struct, tag=True):
    """The first message of each trainer rank."""

    rank: int
    protocol: int = PROTOCOL


class NextBatch(msgspec.Struct, tag=True):
    """Asks for a replica's part of a batch; sent by the first rank of each data-parallel replica.

    Answered with BatchReply as soon as the batch has been formed, or with NotYet, PublishAgain or Stop.
    """

    replica: int
    number: int
    """How many batches the run has trained before this one. Above `version` once an update was not applied: then the
    next batch has the same version, and only the number tells a replica that is ahead from one behind."""
    version: int


class Trained(msgspec.Struct, tag=True):
    """Rank 0 reports that the optimizer steps of batch `number` are done."""

    number: int
    version: int
    """The version that the batch was formed for (i); the policy is i+1 now if `applied`."""
    applied: bool
    """False if every step was skipped (non-finite gradients); the policy version stays as it is."""
    metrics: dict[str, float]
    probe: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [BatchPart.probe_tokens]: their log-probabilities under `version`, at temperature 1."""


class Publish(msgspec.Struct, tag=True):
    """Rank 0 is about to send the weights of `version`. Answered with Links to the engines that lack them, or with
    NotYet."""

    version: int
    store: str
    """host:port of the torch TCPStore on which links meet."""


class Delivered(msgspec.Struct, tag=True):
    """Rank 0 reports that one engine has all its boxes of `version` in staging, or that the link failed."""

    engine: int
    generation: int
    version: int
    seconds: float
    bytes: int
    error: str = ""
    changed: float = 1.0
    """The share of elements that were sent, alone or in a whole message."""


class Sending(msgspec.Struct, tag=True):
    """Rank 0 names the links with a version on its way, now and then. Answered with the Links among them that are cut:
    their engine will never commit the version."""

    links: list[LinkRef]


class CheckpointBegin(msgspec.Struct, tag=True):
    """Rank 0 begins a checkpoint, after Trained and before any replica asks for the next batch.

    Answered with Ok once the controller has set its own state aside.
    """

    version: int
    batches: int


class CheckpointWritten(msgspec.Struct, tag=True):
    """Rank 0 waits for the controller's part of a checkpoint. Answered with Ok once it is in the version's folder, or
    with NotWritten."""

    version: int


class CheckpointDone(msgspec.Struct, tag=True):
    """Rank 0 reports that a checkpoint is complete, or has failed."""

    version: int
    stall_s: float
    """How long training was paused for it."""
    seconds: float
    """How long it took from its beginning to its completion."""
    error: str = ""
    """Why there is none."""
    warning: str = ""
    """Why the next one may fail."""

    @property
    def figures(self) -> dict[str, float | str]:
        figures = {"stall_s": self.stall_s, "seconds": self.seconds, "failed": int(bool(self.error))}
        said = {"error": self.error, "warning": self.warning}
        return figures | {name: text for name, text in said.items() if text}


class Bye(msgspec.Struct, tag=True):
    """Rank 0 says that every update is trained and delivered, or that a checkpoint is saved after Stop."""


class NextOrder(msgspec.Struct, tag=True):
    """Asks what a program wants done (mode=driven); sent by the first rank of each replica. Answered with a
    LossReply, TakeStep, PublishVersion, SaveVersion, LoadVersion, Stop or NotYet."""

    replica: int
    number: int
    """How many orders this incarnation has carried out before this one."""


class OrderDone(msgspec.Struct, tag=True):
    """Rank 0 reports that order `number` is carried out."""

    number: int
    applied: bool = True
    """False for a step whose gradient was not finite: the weights have not changed."""
    metrics: dict[str, float] = {}
    logprobs: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    """float32: of the trained tokens of all samples."""


class TakeStep(msgspec.Struct, tag=True):
    """An order: take an optimizer step, with the schedule's learning rate unless `rate` is another."""

    rate: float | None = None


class PublishVersion(msgspec.Struct, tag=True):
    """An order: send the present weights to the engines, as `version`."""

    version: int = -1
    """A program leaves it to the controller."""


class SaveVersion(msgspec.Struct, tag=True):
    """An order: save a checkpoint of `version`."""

    version: int = -1
    """As in PublishVersion."""


class LoadVersion(msgspec.Struct, tag=True):
    """An order: load a checkpoint, and forget the gradient."""

    folder: str


class TurnTo(msgspec.Struct, tag=True):
    """An order: train another of lora.adapters adapters, as it was left or, with `new`, from the beginning."""

    adapter: int
    new: bool
    has_gradient: bool = False
    """Whether the present one has a gradient to be kept. A program leaves it to the controller."""


class SaveAdapter(msgspec.Struct, tag=True):
    """An order: write the adapter as PEFT's folder."""

    folder: str


class GiveSamples(msgspec.Struct, tag=True, kw_only=True):
    """A program asks for the loss of samples, and for its gradient if `learns`."""

    samples: list[Trajectory]
    loss: str
    advantages: list[np.ndarray]
    """As in LossPart; so are `weights`."""
    weights: list[np.ndarray]
    settings: dict[str, float | str] = {}
    """Other values for keys of the config's section `ppo`."""
    learns: bool = True


class GivePrompt(msgspec.Struct, tag=True, kw_only=True):
    """A program asks for answers to a prompt."""

    tokens: list[int]
    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_tokens: list[int]
    seed: int
    adapter: str = ""
    """PEFT's folder of the one to answer with; "": what was published last."""


class ScoreText(msgspec.Struct, tag=True):
    """A program asks how likely the engines find each token of a text but the first, and which `top_k` they find
    likeliest in its place."""

    tokens: list[int]
    top_k: int
    adapter: str = ""
    """As in GivePrompt."""


class GetReady(msgspec.Struct, tag=True):
    """A program asks to be told when trainers and engines are ready."""


class Finish(msgspec.Struct, tag=True):
    """A program has finished: the run is to end."""


class Await(msgspec.Struct, tag=True):
    """A program waits for what it has asked for. Answered with ProgramReply, once, or with NotYet."""

    ticket: int


class Welcome(msgspec.Struct, tag=True):
    protocol: int = PROTOCOL


class BatchReply(msgspec.Struct, tag=True):
    part: BatchPart


class EncodedBatch(msgspec.Struct, tag="BatchReply"):
    """A BatchReply whose part the controller has encoded already."""

    part: msgspec.Raw


class NotYet(msgspec.Struct, tag=True):
    """Tells a trainer to ask again: there is no batch yet, or engines may not have another version yet. Sent now and
    then, so that a controller that waits long for answers is not taken for a silent one."""


class NotWritten(msgspec.Struct, tag=True):
    """The controller's file system did not take its part of a checkpoint."""

    reason: str


class Stop(msgspec.Struct, tag=True):
    """Tells every replica, instead of a batch, that the run is to save a checkpoint and end."""


class PublishAgain(msgspec.Struct, tag=True):
    """Tells every replica once, instead of a batch, that an engine that was started again needs the current weights."""


class Links(msgspec.Struct, tag=True):
    links: list[LinkRef]


class LossReply(msgspec.Struct, tag=True):
    """An order: compute a loss, and its gradient if it `learns`, which with `more` is added to the one before."""

    part: LossPart
    settings: dict[str, float | str]
    learns: bool
    more: bool


class EncodedLoss(msgspec.Struct, tag="LossReply"):
    """A LossReply whose part the controller has encoded already."""

    part: msgspec.Raw
    settings: dict[str, float | str]
    learns: bool
    more: bool


class Ticket(msgspec.Struct, tag=True):
    """The number under which a program is to wait."""

    number: int


class SampledAnswer(msgspec.Struct):
    """An answer of R tokens; the arrays are [R], as in engine/client.py's Completion."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    routes: np.ndarray


class ProgramReply(msgspec.Struct, tag=True, kw_only=True):
    """What came of what a program has asked for."""

    version: int
    """The version that the trainers have."""
    metrics: dict[str, float] = {}
    logprobs: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    likely_tokens: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [tokens · k], flat; so are `likely_logprobs`. As in engine/client.py's ScoredText."""
    likely_logprobs: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    answers: list[SampledAnswer] = []
    folder: str = ""
    """The checkpoint's."""
    wrong: str = ""
    """What is wrong with the input, for which nothing was done."""
    failed: str = ""
    """What has failed."""


class Ok(msgspec.Struct, tag=True):
    pass


class Refused(msgspec.Struct, tag=True):
    reason: str


ProgramRequest = (
    GiveSamples
    | GivePrompt
    | ScoreText
    | TakeStep
    | PublishVersion
    | SaveVersion
    | LoadVersion
    | TurnTo
    | SaveAdapter
    | GetReady
    | Finish
    | Await
)
"""What a program may ask for (api/policy.py)."""
Request = (
    Hello
    | NextBatch
    | Trained
    | Publish
    | Delivered
    | Sending
    | CheckpointBegin
    | CheckpointWritten
    | CheckpointDone
    | Bye
    | NextOrder
    | OrderDone
    | ProgramRequest
)
Order = LossReply | TakeStep | PublishVersion | SaveVersion | LoadVersion | TurnTo | SaveAdapter
Reply = (
    Welcome
    | Order
    | Ticket
    | ProgramReply
    | BatchReply
    | NotYet
    | NotWritten
    | Stop
    | PublishAgain
    | Links
    | Ok
    | Refused
)


class Envelope(msgspec.Struct):
    sender: str
    number: int
    body: Request


class ReplyEnvelope(msgspec.Struct):
    number: int
    body: Reply


_encode = encoder().encode
decode_envelope = decoder(Envelope).decode
_decode_answer = decoder(ReplyEnvelope).decode


def encode_batch(part: BatchPart) -> EncodedBatch:
    return EncodedBatch(msgspec.Raw(_encode(part)))


def encode_loss(reply: LossReply) -> EncodedLoss:
    return EncodedLoss(msgspec.Raw(_encode(reply.part)), reply.settings, reply.learns, reply.more)


Answer = Reply | EncodedBatch | EncodedLoss
"""A Reply as the controller sends it."""


def encode_answer(number: int, body: Answer) -> bytes:
    return _encode(ReplyEnvelope(number, cast(Reply, body)))  # what is encoded already reads the same


def public_key(secret: bytes) -> bytes:
    """Returns the Curve25519 public key of a secret key, in the text form of ZeroMQ (Z85)."""
    return zmq.curve_public(z85.encode(secret))


class ControllerError(RuntimeError):
    """The controller refused a message or did not answer in time."""


class ControllerClient:
    """A trainer rank's connection to the controller. Not thread-safe: one per thread.

    Whoever else listens at the endpoint learns nothing and is not believed.
    """

    def __init__(
        self,
        endpoint: str,
        keys: SecretKeys,
        sender: str,
        timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ):
        """`look` is called every second while a reply is awaited; what it raises ends the wait."""
        self.endpoint, self.sender, self.timeout_s, self._look = endpoint, sender, timeout_s, look
        self._numbers = itertools.count(1)
        self._socket = open_socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # ZeroMQ gives a connection up whose other end is no controller; sending would wait for another for ever.
        self._socket.setsockopt(zmq.SNDTIMEO, math.ceil(1000 * timeout_s))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, public_key(keys.controller))
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key(keys.trainers))
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.trainers))
        self._socket.connect(endpoint)

    def request(self, body: Request) -> Reply:
        """Returns the controller's reply. Raises ControllerError on a refusal or after timeout_s without a reply, and
        ConfigError for what is too long to be sent."""
        number = next(self._numbers)
        deadline = time.monotonic() + self.timeout_s
        data = _encode(Envelope(self.sender, number, body))
        if len(data) > LONGEST_BYTES:
            most, size = LONGEST_BYTES // 2**20, len(data) / 2**20
            raise ConfigError(f"{type(body).__name__}: {size:.0f} MiB at once, and {most} are the most: give fewer")
        with suppress(zmq.Again):
            self._socket.send(data)
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(int(min(left, _LOOK_S) * 1000)):
                self._look()
                continue
            answer = _decode_answer(self._socket.recv())
            if answer.number != number:  # a late reply to a request that has timed out
                continue
            if isinstance(answer.body, Refused):
                raise ControllerError(
                    f"controller at {self.endpoint} refused {type(body).__name__}: {answer.body.reason}"
                )
            return answer.body
        raise ControllerError(
            f"controller at {self.endpoint} did not answer {type(body).__name__} of {self.sender} "
            f"within {self.timeout_s:.0f} s"
        )

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> ControllerClient:
        return self

    def __exit__(self, *_) -> None:
        self.close()

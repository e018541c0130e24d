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
from contextlib import suppress

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from areal_megatron.data.trajectory import BatchPart, decoder, encoder
from areal_megatron.reshard.session import LinkRef
from areal_megatron.run.folder import SecretKeys
from areal_megatron.run.zeromq import open_socket

PROTOCOL = 11


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


class Ok(msgspec.Struct, tag=True):
    pass


class Refused(msgspec.Struct, tag=True):
    reason: str


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
)
Reply = Welcome | BatchReply | NotYet | NotWritten | Stop | PublishAgain | Links | Ok | Refused


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


def encode_answer(number: int, body: Reply | EncodedBatch) -> bytes:
    return _encode(ReplyEnvelope(number, body))


def public_key(secret: bytes) -> bytes:
    """Returns the Curve25519 public key of a secret key, in the text form of ZeroMQ (Z85)."""
    return zmq.curve_public(z85.encode(secret))


class ControllerError(RuntimeError):
    """The controller refused a message or did not answer in time."""


class ControllerClient:
    """A trainer rank's connection to the controller. Not thread-safe: one per thread.

    Whoever else listens at the endpoint learns nothing and is not believed.
    """

    def __init__(self, endpoint: str, keys: SecretKeys, sender: str, timeout_s: float):
        self.endpoint, self.sender, self.timeout_s = endpoint, sender, timeout_s
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
        """Returns the controller's reply. Raises ControllerError on a refusal or after timeout_s without a reply."""
        number = next(self._numbers)
        deadline = time.monotonic() + self.timeout_s
        with suppress(zmq.Again):
            self._socket.send(_encode(Envelope(self.sender, number, body)))
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(left * 1000):
                break
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

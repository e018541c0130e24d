"""Messages between the trainer ranks and the controller, and the trainers' client.

ZeroMQ DEALER (trainer) to ROUTER (controller); every request gets exactly one reply. A frame is the
msgpack encoding of `Envelope`; it carries the run's secret token, and the controller refuses and counts
what lacks it. Arrays travel as raw buffers (data/trajectory.py).
"""

from __future__ import annotations

import hmac
import itertools
import time

import msgspec
import zmq

from areal_megatron.data.trajectory import BatchPart, decoder, encoder

PROTOCOL = 5


class LinkRef(msgspec.Struct):
    """One engine as a destination of weights; a new generation means a new process group."""

    engine: int
    generation: int


class Hello(msgspec.Struct, tag=True):
    """First message of each trainer rank."""

    rank: int
    protocol: int = PROTOCOL


class NextBatch(msgspec.Struct, tag=True):
    """From rank 0 of a data-parallel replica; answered by Part as soon as the batch has been formed, by
    Stop or by PublishAgain."""

    replica: int
    number: int
    """Batches that the run has trained before this one. Above `version` once an update was not applied: then
    the next batch has the same version, and only the number tells a replica that is ahead from one behind."""
    version: int


class Trained(msgspec.Struct, tag=True):
    """From global rank 0, once the optimizer steps of batch `number` are done."""

    number: int
    version: int
    """The version that was trained (i); the policy is i+1 now if `applied`."""
    applied: bool
    """False: every step was skipped (non-finite gradients); the policy version stays as it is."""
    metrics: dict[str, float]


class Publish(msgspec.Struct, tag=True):
    """From global rank 0: the weights of `version` are about to be sent. Answered with Links to those who lack them, or
    with NotYet."""

    version: int
    store: str
    """host:port of the torch TCPStore on which links meet."""


class Delivered(msgspec.Struct, tag=True):
    """From global rank 0: one engine has all its boxes of `version` in staging, or the link failed."""

    engine: int
    generation: int
    version: int
    seconds: float
    bytes: int
    error: str = ""


class Sending(msgspec.Struct, tag=True):
    """From global rank 0, now and then while versions are on their way. Answered with Links, those of them that are
    cut: their engine will never have what is on its way."""

    links: list[LinkRef]


class CheckpointBegin(msgspec.Struct, tag=True):
    """From global rank 0, after Trained and before any replica asks for the next batch: the trainers save their state.

    Answered with Ok once the controller has set its own state aside.
    """

    version: int
    batches: int


class CheckpointWritten(msgspec.Struct, tag=True):
    """From global rank 0: answered with Ok once the controller's state is in the folder of this version."""

    version: int


class CheckpointDone(msgspec.Struct, tag=True):
    """From global rank 0: a checkpoint is complete, or has failed."""

    version: int
    stall_s: float
    """How long training stood still for it."""
    seconds: float
    """From its begin to its completion."""
    error: str = ""

    @property
    def figures(self) -> dict[str, float]:
        return {"stall_s": self.stall_s, "seconds": self.seconds, "failed": int(bool(self.error))}


class Bye(msgspec.Struct, tag=True):
    """From global rank 0: every update is trained and delivered, or a checkpoint is saved after Stop."""


class Welcome(msgspec.Struct, tag=True):
    protocol: int = PROTOCOL


class BatchReply(msgspec.Struct, tag=True):
    part: BatchPart


class EncodedBatch(msgspec.Struct, tag="BatchReply"):
    """A BatchReply as the controller holds it: encoded already."""

    part: msgspec.Raw


class NotYet(msgspec.Struct, tag=True):
    """No batch yet, or no version to engines yet; ask again: sent now and then, so that a long wait for answers is no
    silent controller."""


class Stop(msgspec.Struct, tag=True):
    """Instead of a batch, the same to every replica: the run is to save a checkpoint and end."""


class PublishAgain(msgspec.Struct, tag=True):
    """Instead of a batch, once to every replica: an engine that was started again needs the current weights."""


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
Reply = Welcome | BatchReply | NotYet | Stop | PublishAgain | Links | Ok | Refused


class Envelope(msgspec.Struct):
    token: str
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


def authentic(envelope: Envelope, token: str) -> bool:
    return hmac.compare_digest(envelope.token.encode(), token.encode())


class ControllerError(RuntimeError):
    """The controller refused a message or did not answer in time."""


class ControllerClient:
    """A trainer rank's connection to the controller. Not thread-safe: one per thread."""

    def __init__(self, endpoint: str, token: str, sender: str, timeout_s: float):
        self.endpoint, self.token, self.sender, self.timeout_s = endpoint, token, sender, timeout_s
        self._numbers = itertools.count(1)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def request(self, body: Request) -> Reply:
        """The controller's reply. Raises ControllerError on a refusal or after timeout_s without one."""
        number = next(self._numbers)
        self._socket.send(_encode(Envelope(self.token, self.sender, number, body)))
        deadline = time.monotonic() + self.timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(left * 1000):
                break
            answer = _decode_answer(self._socket.recv())
            if answer.number != number:  # a late reply to a request that timed out
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

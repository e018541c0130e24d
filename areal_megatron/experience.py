"""Where a trainer rank's batches come from: the controller, through the first rank of each replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart, decoder, encoder
from areal_megatron.protocol import (
    Bye,
    CheckpointBegin,
    CheckpointDone,
    CheckpointWritten,
    ControllerClient,
    Hello,
    LinkRef,
    NextBatch,
    NotYet,
    Publish,
    PublishAgain,
    Reply,
    Request,
    Sending,
    Stop,
    Trained,
)
from areal_megatron.run import Run
from areal_megatron.trainer.trainer import BatchResult, Trainer

_encode = encoder().encode
_PUBLISH_AGAIN = b"publish"
_decode_part = decoder(BatchPart | None).decode
_decode_links = decoder(list[LinkRef]).decode


class Experience:
    """Asks the controller on behalf of a replica; every rank of the replica gets the same answer."""

    def __init__(self, config: Config, run: Run, trainer: Trainer):
        self._run, self._trainer, self._timeout_s = run, trainer, config.machine.peer_timeout_s
        self._endpoint = run.endpoint("controller", self._timeout_s)
        self._controller = ControllerClient(self._endpoint, run.token, f"trainer-{trainer.rank}", self._timeout_s)
        self._controller.request(Hello(trainer.rank))

    def take(self, number: int, version: int, publish: Callable[[int], None]) -> BatchPart | None:
        """This replica's part of batch `number`; waits as long as the controller says that it is coming.

        Meanwhile publishes `version` again when an engine needs it. None, on all replicas alike: the run is to save a
        checkpoint and end. Raises ControllerError if the controller falls silent.
        """
        while True:
            data = None
            if self._trainer.is_leader:
                reply = self._controller.request(NextBatch(self._trainer.replica, number, version))
                data = _packed(reply)
            data = self._trainer.share(data)
            if data == _PUBLISH_AGAIN:
                publish(version)
            elif data:
                return _decode_part(data)

    def trained(self, number: int, result: BatchResult) -> None:
        """Tells the controller that batch `number` is done."""
        if self._trainer.is_first:
            self._controller.request(Trained(number, result.version, result.applied, result.metrics))

    def links(self, version: int, store: str) -> list[tuple[int, int]]:
        """(engine, generation) of every engine that is to receive `version`, the same on all ranks.

        Waits as long as the controller says that engines need the version that they have.
        """
        while True:
            data = None
            if self._trainer.is_first:
                reply = self._controller.request(Publish(version, store))
                data = b"" if isinstance(reply, NotYet) else _encode(reply.links)
            if data := self._trainer.share_all(data):
                return [(link.engine, link.generation) for link in _decode_links(data)]

    def cut(self, sending: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the links (engine, generation) whose engine is lost; from any thread."""
        reply = self.report(Sending([LinkRef(*link) for link in sending]), f"trainer-{self._trainer.rank}-links")
        return [(link.engine, link.generation) for link in reply.links]

    def checkpoint(self, version: int, batches: int) -> None:
        """Returns on the first rank when the controller has set its part of the checkpoint of `version` aside."""
        if self._trainer.is_first:
            self._controller.request(CheckpointBegin(version, batches))

    def wait_for_checkpoint(self, version: int) -> None:
        """Returns when that part is in the folder of the checkpoint; from any thread."""
        self.report(CheckpointWritten(version), f"trainer-{self._trainer.rank}-checkpoint")

    def saved(self, version: int, stall_s: float, seconds: float, error: str = "") -> None:
        """Tells the controller how the checkpoint of `version` went; from any thread."""
        self.report(CheckpointDone(version, stall_s, seconds, error), f"trainer-{self._trainer.rank}-checkpoint")

    def report(self, message: Request, sender: str) -> Reply:
        """Sends it over a connection of its own, as threads have to, which may outlive a main loop that failed."""
        with ControllerClient(self._endpoint, self._run.token, sender, self._timeout_s) as controller:
            return controller.request(message)

    def finish(self) -> None:
        if self._trainer.is_first:
            self._controller.request(Bye())

    def __enter__(self) -> Experience:
        return self

    def __exit__(self, *_) -> None:
        self._controller.close()


def _packed(reply: Reply) -> bytes:
    """For the other ranks of the replica."""
    match reply:
        case NotYet():
            return b""
        case PublishAgain():
            return _PUBLISH_AGAIN
        case Stop():
            return _encode(None)
    return _encode(reply.part)

"""Where a trainer rank's batches come from: the controller, through the first rank of each replica."""

from __future__ import annotations

from collections.abc import Callable

from areal_megatron.data.trajectory import BatchPart, decoder, encoder
from areal_megatron.protocol import BatchReply, Bye, NextBatch, NotYet, PublishAgain, Reply, Stop, Trained
from areal_megatron.rank.controller_port import ControllerPort
from areal_megatron.trainer.ppo import BatchResult
from areal_megatron.trainer.trainer import Trainer

_encode = encoder().encode
_PUBLISH_AGAIN = b"publish"
_decode_part = decoder(BatchPart | None).decode


class Experience:
    """Asks the controller on behalf of a replica; every rank of the replica gets the same answer."""

    def __init__(self, trainer: Trainer, controller: ControllerPort):
        self._parallel, self._controller = trainer.parallel, controller

    def take(self, number: int, version: int, publish: Callable[[int], None]) -> BatchPart | None:
        """Returns this replica's part of batch `number`; waits as long as the controller says that it is coming.

        Meanwhile publishes `version` again when an engine needs it. Returns None, on all replicas alike, if the run is
        to save a checkpoint and end. Raises ControllerError if the controller falls silent.
        """
        while True:
            data = None
            if self._parallel.is_leader:
                data = _encoded(self._controller.request(NextBatch(self._parallel.replica, number, version)))
            data = self._parallel.share(data)
            if data == _PUBLISH_AGAIN:
                publish(version)
            elif data:
                return _decode_part(data)

    def trained(self, number: int, result: BatchResult) -> None:
        """Tells the controller that batch `number` is done."""
        if self._parallel.is_first:
            self._controller.request(Trained(number, result.version, result.applied, result.metrics, result.probe))

    def finish(self) -> None:
        """Tells the controller that there is nothing more to train, deliver or save."""
        if self._parallel.is_first:
            self._controller.request(Bye())


def _encoded(reply: Reply) -> bytes:
    """The reply as the first rank shares it with the replica; empty: ask again."""
    match reply:
        case NotYet():
            return b""
        case PublishAgain():
            return _PUBLISH_AGAIN
        case Stop():
            return _encode(None)
    assert isinstance(reply, BatchReply)
    return _encode(reply.part)

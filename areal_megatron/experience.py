"""Where a trainer rank's batches come from: the controller, through the first rank of each replica."""

from __future__ import annotations

from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart, decoder, encoder
from areal_megatron.rollout.protocol import (
    Bye,
    Checkpoint,
    ControllerClient,
    Hello,
    Link,
    NextBatch,
    NotYet,
    Publish,
    Saved,
    Trained,
)
from areal_megatron.run import Run
from areal_megatron.trainer.step import BatchResult, Trainer

_encode = encoder().encode
_decode_part = decoder(BatchPart).decode
_decode_links = decoder(list[Link]).decode


class Experience:
    """Asks the controller on behalf of a replica; every rank of the replica gets the same answer."""

    def __init__(self, config: Config, run: Run, trainer: Trainer):
        timeout_s = config.machine.timeout_s
        self._trainer = trainer
        self._controller = ControllerClient(
            run.endpoint("controller", timeout_s), run.token, f"trainer-{trainer.rank}", timeout_s
        )
        self._controller.request(Hello(trainer.rank))

    def take(self, number: int, version: int) -> BatchPart:
        """This replica's part of batch `number`; waits as long as the controller says that it is coming.

        Raises ControllerError if the controller falls silent.
        """
        while True:
            data = None
            if self._trainer.is_leader:
                reply = self._controller.request(NextBatch(self._trainer.replica, number, version))
                data = b"" if isinstance(reply, NotYet) else _encode(reply.part)
            if data := self._trainer.share(data):
                return _decode_part(data)

    def trained(self, number: int, result: BatchResult) -> None:
        """Tells the controller that batch `number` is done."""
        if self._trainer.is_first:
            self._controller.request(Trained(number, result.version, result.applied, result.metrics))

    def links(self, version: int, store: str) -> list[tuple[int, int]]:
        """(engine, epoch) of every engine that is to receive `version`, the same on all ranks."""
        data = None
        if self._trainer.is_first:
            data = _encode(self._controller.request(Publish(version, store)).links)
        return [(link.engine, link.epoch) for link in _decode_links(self._trainer.share_all(data))]

    def checkpoint(self, version: int, batches: int) -> None:
        """Returns on the first rank when the controller has written its part of the checkpoint of `version`."""
        if self._trainer.is_first:
            self._controller.request(Checkpoint(version, batches))

    def saved(self, version: int, stall_s: float, seconds: float, error: str = "") -> None:
        """Tells the controller how the checkpoint of `version` went."""
        if self._trainer.is_first:
            self._controller.request(Saved(version, stall_s, seconds, error))

    def finish(self) -> None:
        if self._trainer.is_first:
            self._controller.request(Bye())

    def __enter__(self) -> Experience:
        return self

    def __exit__(self, *_) -> None:
        self._controller.close()

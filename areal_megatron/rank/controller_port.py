"""A trainer rank's connection to the controller, and the messages about links and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from areal_megatron.config import Config
from areal_megatron.data.trajectory import decoder, encoder
from areal_megatron.protocol import (
    CheckpointBegin,
    CheckpointDone,
    CheckpointWritten,
    ControllerClient,
    Hello,
    Links,
    NotWritten,
    NotYet,
    Publish,
    Reply,
    Request,
    Sending,
)
from areal_megatron.reshard.session import LinkRef
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.process_names import CONTROLLER, trainer_name

_encode = encoder().encode
_decode_links = decoder(list[LinkRef]).decode


class Ranks(Protocol):
    """What the port has to know of the trainer pool: a part of trainer/parallel.py's Parallel."""

    @property
    def rank(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    def share_all(self, value: bytes | None) -> bytes: ...


class ControllerPort:
    """Connects on construction. Raises ControllerError if the controller refuses a message or falls silent.

    Example:
        with ControllerPort(config, run, trainer.parallel) as controller:
            experience = Experience(trainer, controller)
            weights = Weights(config, run, trainer, controller)
    """

    def __init__(self, config: Config, run: RunFolder, ranks: Ranks):
        self._ranks, self._keys, self._timeout_s = ranks, run.keys, config.machine.peer_timeout_s
        self._name = trainer_name(ranks.rank)
        self._endpoint = run.endpoint(CONTROLLER, self._timeout_s)
        self._client = ControllerClient(self._endpoint, self._keys, self._name, self._timeout_s)
        self._client.request(Hello(ranks.rank))

    def request(self, message: Request) -> Reply:
        """Sends a message from the main thread and returns the reply."""
        return self._client.request(message)

    def report(self, message: Request, thread: str) -> Reply:
        """Sends a message from any thread, over a connection of its own, which may outlive a main loop that failed.

        `thread` tells the controller's log who sends it.
        """
        with ControllerClient(self._endpoint, self._keys, f"{self._name}-{thread}", self._timeout_s) as client:
            return client.request(message)

    def links(self, version: int, store: str) -> list[LinkRef]:
        """Returns the links to every engine that is to receive `version`, the same on all ranks.

        Waits as long as the controller says that engines need the version that they have.
        """
        while True:
            data = None
            if self._ranks.is_first:
                reply = self.request(Publish(version, store))
                assert isinstance(reply, Links | NotYet)
                data = b"" if isinstance(reply, NotYet) else _encode(reply.links)
            if data := self._ranks.share_all(data):
                return _decode_links(data)

    def cut(self, sending: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the links (engine, generation) whose engine is lost; from any thread."""
        reply = self.report(Sending([LinkRef(*link) for link in sending]), "links")
        assert isinstance(reply, Links)
        return [(link.engine, link.generation) for link in reply.links]

    def checkpoint(self, version: int, batches: int) -> None:
        """Returns on the first rank when the controller has set its part of the checkpoint of `version` aside."""
        if self._ranks.is_first:
            self.request(CheckpointBegin(version, batches))

    def wait_for_checkpoint(self, version: int) -> None:
        """Returns when the controller's part is in the folder of the checkpoint; from any thread.

        Raises OSError if the controller could not write it.
        """
        reply = self.report(CheckpointWritten(version), "checkpoint")
        if isinstance(reply, NotWritten):
            raise OSError(f"the controller's state cannot be written: {reply.reason}")

    def saved(self, version: int, stall_s: float, seconds: float, error: str = "", warning: str = "") -> None:
        """Tells the controller how the checkpoint of `version` went; from any thread."""
        self.report(CheckpointDone(version, stall_s, seconds, error, warning), "checkpoint")

    def __enter__(self) -> ControllerPort:
        return self

    def __exit__(self, *_) -> None:
        self._client.close()

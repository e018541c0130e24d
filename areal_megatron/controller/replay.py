"""The controller of a replay: gives trainers the batches that another run has dumped (data/dumps.py), in their order.

There is no engine, no reward worker and no prompt. With the same layout, seed and initial weights the trainers compute
the same as in that run, bit for bit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config
from areal_megatron.controller.batches import Batches
from areal_megatron.controller.service import Refusal, Service
from areal_megatron.data.dumps import REPLAYED, Dump, Replayed, check_same, check_tokens, read, recorded, with_crc
from areal_megatron.data.trajectory import Trajectory, store
from areal_megatron.models.architecture import read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.observe.background import close_all
from areal_megatron.observe.metrics import MetricsWriter, StatusWriter
from areal_megatron.observe.status import Status
from areal_megatron.protocol import (
    Answer,
    Bye,
    CheckpointBegin,
    CheckpointDone,
    CheckpointWritten,
    Links,
    NextBatch,
    NotWritten,
    Ok,
    Publish,
    Reply,
    Request,
    Trained,
)
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.network import address
from areal_megatron.run.process_names import CONTROLLER

_STATUS_S = 0.5


class Recording:
    """Stands in for a schedule: the only group of a batch is its dump."""

    held_up_by = None
    """No answers are waited for."""

    def __init__(self, files: Sequence[Path], version: int, vocabulary: float = math.inf):
        self.version, self._vocabulary = version, vocabulary
        self.left = deque(files)
        self._formed: Replayed | None = None
        self.trained: Replayed | None = None

    def form_batch(self) -> list[Dump] | None:
        """Returns the next dump. Raises ConfigError for a file that holds no batch, or a token that the model does not
        have; RunError for another version than the trainers'."""
        if not self.left:
            return None
        dump, crc = read(path := self.left.popleft(), with_crc)
        check_tokens(dump, path, self._vocabulary)
        self._formed = Replayed(number=dump.number, crc=crc)
        if dump.version != self.version:
            raise RunError(
                f"{path} trained version {dump.version}, but the replay is at version {self.version}: an update "
                "was applied in one of them only (see skipped_steps in metrics.jsonl)"
            )
        return [dump]

    def applied(self) -> None:
        self.version, self.trained = self.version + 1, self._formed

    def rejected(self, reason: str) -> None:
        """The version stays."""
        self.trained = self._formed


def _trajectories(dump: Dump) -> list[Trajectory]:
    return dump.trajectories


class Replay:
    """Runs until the trainers have trained config.updates batches; where fewer are left they save a checkpoint and end.

    Raises ConfigError for a folder without the batches that are asked for.
    """

    def __init__(self, config: Config, run: RunFolder):
        self.config, self.run = config, run
        start = run.start
        if start.after is not None:
            check_same(Path(config.data.train), Path(start.checkpoint))
        files = recorded(Path(config.data.train), start.batches, config.batch_size)
        described = read_config(config.model.path)
        self._recording = Recording(files, start.version, described["vocab_size"])
        flops = SequenceFlops.of(described)
        self._batches = Batches(config, self._recording, _trajectories, flops, start.batches)
        self._service = Service(address(config.machine.host), run.keys, self._handle)
        self._metrics, self._status = MetricsWriter(run), StatusWriter(run)
        if start.incarnation:
            version = start.version if start.checkpoint else -1
            self._metrics.write("resume", version, {"incarnation": start.incarnation})
        self._started_at, self._bye = time.monotonic(), asyncio.Event()
        self._saved: Replayed | None = None

    async def live(self) -> None:
        """Runs until the trainers' Bye. Raises RunError or ConfigError."""
        self.run.announce(CONTROLLER, self._service.endpoint)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._service.run()), tasks.create_task(self._keep_status())]
            await self._bye.wait()
            for task in background:
                task.cancel()
        self._write_status("stopped" if self._batches.stopping else "done")

    async def close(self) -> None:
        self._service.close()
        await asyncio.to_thread(close_all, [self._status, self._metrics])

    async def _handle(self, message: Request) -> Answer:
        match message:
            case NextBatch():
                return await self._batches.next(message)
            case Trained():
                return self._trained(message)
            case Publish():
                return Links([])
            case CheckpointBegin():
                self._saved = self._recording.trained
                return Ok()
            case CheckpointWritten():
                return await self._written(message)
            case CheckpointDone():
                self._metrics.write("checkpoint", message.version, message.figures)
                return Ok()
            case Bye():
                self._bye.set()
                return Ok()
        raise Refusal(f"{type(message).__name__} is not for a replay")

    async def _written(self, message: CheckpointWritten) -> Reply:
        """Writes which batch was trained last, the replay's own part of a checkpoint."""
        if self._saved:
            path = checkpoint_folder.partial(self.run, message.version) / REPLAYED
            try:
                await asyncio.to_thread(store, self._saved, path)
            except OSError as e:
                return NotWritten(e.strerror or str(e))
        return Ok()

    def _trained(self, message: Trained) -> Reply:
        account = self._batches.trained(message)
        self._metrics.write("update", self._recording.version, account)
        if not self._recording.left and self._batches.number < self.config.updates:
            self._batches.stop()
        return Ok()

    async def _keep_status(self) -> None:
        while True:
            if await asyncio.to_thread(self.run.is_to_stop):
                self._batches.stop()
            self._write_status("stopping" if self._batches.stopping else "training")
            await asyncio.sleep(_STATUS_S)

    def _write_status(self, phase: str) -> None:
        self._status.write(
            Status(
                phase=phase,
                version=self._recording.version,
                updates=self.config.updates,
                elapsed_s=time.monotonic() - self._started_at,
            )
        )

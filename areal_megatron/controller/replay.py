"""The controller of a replay: gives trainers the batches that another run has dumped (data/dumps.py), in their order.

There is no engine, no reward worker and no prompt. Under the same layout, seed and first weights the trainers compute
what they did in that run, bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_megatron.config import Config
from areal_megatron.controller.batches import Batches
from areal_megatron.controller.service import Service
from areal_megatron.data.dumps import Dump, read, recorded
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.models.architecture import read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.network import address
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.protocol import (
    Bye,
    CheckpointBegin,
    CheckpointDone,
    CheckpointWritten,
    Links,
    NextBatch,
    Ok,
    Publish,
    Refused,
    Reply,
    Request,
    Trained,
)
from areal_megatron.run import Run, RunError

_STATUS_S = 0.5


class Recording:
    """In the place of both schedule and generation: a batch is what was dumped, and its only group."""

    def __init__(self, files: Sequence[Path], version: int):
        self.version = version
        self.left = deque(files)

    def form_batch(self) -> list[Dump] | None:
        """Raises ConfigError for a file that holds no batch, RunError for one of another version than the trainers'."""
        if not self.left:
            return None
        dump = read(path := self.left.popleft())
        if dump.version != self.version:
            raise RunError(
                f"{path} trained version {dump.version}, but the replay is at version {self.version}: an update "
                "was applied in one of them only (see skipped_steps in metrics.jsonl)"
            )
        return [dump]

    def take(self, dump: Dump) -> list[Trajectory]:
        return dump.trajectories

    def stragglers(self) -> int:
        return 0

    def applied(self) -> None:
        self.version += 1

    def rejected(self, reason: str) -> None:
        """The version stays."""


class Replay:
    """Lives until the trainers have trained config.updates batches; where fewer are left they save a checkpoint and
    end.

    Raises ConfigError for a folder without the batches that are asked for.
    """

    def __init__(self, config: Config, run: Run):
        self.config, self.run = config, run
        start = run.start
        files = recorded(Path(config.data.train), start.batches, config.batch_size)
        self._recording = Recording(files, start.version)
        self._batches = Batches(
            config, self._recording, self._recording, SequenceFlops.of(read_config(config.model.path)), start.batches
        )
        self._service = Service(address(config.machine.host), run.token, self._handle)
        self._metrics = MetricsWriter(run)
        if start.incarnation:
            version = start.version if start.checkpoint else -1
            self._metrics.write("resume", version, {"incarnation": start.incarnation})
        self._begun, self._last, self._bye = time.monotonic(), {}, asyncio.Event()

    async def live(self) -> None:
        """Raises RunError or ConfigError."""
        self.run.announce("controller", self._service.endpoint)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._service.run()), tasks.create_task(self._keep_status())]
            await self._bye.wait()
            for task in background:
                task.cancel()
        self._write_status("stopped" if self._batches.stopping else "done")

    async def close(self) -> None:
        self._service.close()
        self._metrics.close()

    async def _handle(self, message: Request) -> Reply:
        match message:
            case NextBatch():
                return await self._batches.next(message)
            case Trained():
                return self._trained(message)
            case Publish():
                return Links([])
            case CheckpointBegin() | CheckpointWritten():  # the trainers' part is all there is
                return Ok()
            case CheckpointDone():
                self._metrics.write("checkpoint", message.version, message.figures)
                return Ok()
            case Bye():
                self._bye.set()
                return Ok()
        return Refused(f"{type(message).__name__} is not for a replay")

    def _trained(self, message: Trained) -> Reply:
        account: dict[str, Any] | Refused = self._batches.trained(message)
        if isinstance(account, Refused):
            return account
        self._last = account
        self._metrics.write("update", self._recording.version, account)
        if not self._recording.left and self._batches.number < self.config.updates:
            self._batches.stop()
        return Ok()

    async def _keep_status(self) -> None:
        while True:
            if self.run.stop.exists():
                self._batches.stop()
            self._write_status("stopping" if self._batches.stopping else "training")
            await asyncio.sleep(_STATUS_S)

    def _write_status(self, phase: str) -> None:
        write_status(
            self.run,
            {
                "phase": phase,
                "version": self._recording.version,
                "updates": self.config.updates,
                "elapsed_s": time.monotonic() - self._begun,
                "engines": [],
                "last": self._last,
            },
        )

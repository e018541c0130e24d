"""What a supervised run tells of itself, and its own part of checkpoints: what the controller does in others."""

from __future__ import annotations

import threading
import time
from typing import Any

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config
from areal_megatron.data.drawing import Drawing
from areal_megatron.data.supervised import SupervisedData, write
from areal_megatron.observe.metrics import MetricsWriter, StatusWriter
from areal_megatron.observe.status import Status
from areal_megatron.protocol import CheckpointDone
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.parallel import Parallel


class Progress:
    """Writes metrics and status, and which rows come next into checkpoints; every rank has one and calls it alike, the
    first rank writes."""

    def __init__(self, config: Config, run: RunFolder, parallel: Parallel, data: SupervisedData):
        self._config, self._run, self._parallel, self._data = config, run, parallel, data
        self._started_at = time.monotonic()
        self._phase, self._step = "training", run.start.version
        self._drawing: Drawing | None = None
        self._lock = threading.Lock()
        """Guards the metrics: checkpoints are reported by a thread of their own."""
        if parallel.is_first:
            self._metrics, self._status = MetricsWriter(run), StatusWriter(run)
            if run.start.incarnation:  # what came before counts up to this step; without a checkpoint, nothing does
                counts = run.start.version if run.start.checkpoint else -1
                self._write("resume", counts, {"incarnation": run.start.incarnation})
            self._show()

    def trained(self, step: int, values: dict[str, float]) -> None:
        """Records step `step`, counted from 1."""
        self._step = step
        if self._parallel.is_first:
            self._write(self._config.mode, step, values)
            self._show()

    def evaluated(self, step: int, figures: dict[str, Any]) -> None:
        """Records the figures of held-out items after `step` steps."""
        if self._parallel.is_first:
            self._write("eval", step, figures)

    def is_to_stop(self) -> bool:
        """Whether the run is to save a checkpoint and end, the same on all ranks. Collective."""
        asked = (b"stop" if self._run.is_to_stop() else b"") if self._parallel.is_first else None
        return bool(self._parallel.share_all(asked))

    def finish(self, stopped: bool) -> None:
        """Writes what is left, and that the run is done, or stopped before its last step."""
        if self._parallel.is_first:
            self._phase = "stopped" if stopped else "done"
            self._show()
            self._status.close()
            self._metrics.close()

    def checkpoint(self, version: int, batches: int) -> None:
        """Sets aside which rows come next."""
        self._drawing = self._data.drawing

    def wait_for_checkpoint(self, version: int) -> None:
        """Writes it into the folder of the checkpoint of `version`, from any thread. Raises OSError."""
        assert self._drawing is not None  # set aside by `checkpoint`
        write(self._drawing, checkpoint_folder.partial(self._run, version))
        self._metrics.flush()  # a resumed run has the line of every step before its checkpoint

    def saved(self, version: int, stall_s: float, seconds: float, error: str = "", warning: str = "") -> None:
        """Records how the checkpoint of `version` went; from any thread."""
        self._write("checkpoint", version, CheckpointDone(version, stall_s, seconds, error, warning).figures)

    def _write(self, kind: str, version: int, values: dict[str, Any]) -> None:
        with self._lock:
            self._metrics.write(kind, version, values)

    def _show(self) -> None:
        self._status.write(
            Status(
                phase=self._phase,
                version=self._step,
                updates=self._config.updates,
                elapsed_s=time.monotonic() - self._started_at,
            )
        )

"""A trainer rank's part in checkpoints: where a run goes on, and saving beside training."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint.hf_folder import copy_description
from areal_megatron.config import Config
from areal_megatron.controller_port import ControllerPort
from areal_megatron.protocol import ControllerError
from areal_megatron.run import Run, RunError
from areal_megatron.trainer import checkpoint
from areal_megatron.trainer.trainer import Trainer

log = logging.getLogger(__name__)
_EXPORT = """
import sys
from pathlib import Path
from areal_megatron.checkpoint.convert import to_hf
to_hf(Path(sys.argv[1]), Path(sys.argv[2]))
"""


class Checkpoints:
    """Saves every checkpoint.every versions; every rank calls it alike."""

    def __init__(self, config: Config, run: Run, trainer: Trainer, controller: ControllerPort):
        self._settings, self._model, self._run = config.checkpoint, config.model, run
        self._trainer, self._controller = trainer, controller
        self._saver = checkpoint.Saver(trainer)
        self._version = 0
        """Of the checkpoint that is being saved, or was saved last."""
        self._stall_s = 0.0
        self._export: subprocess.Popen | None = None
        self.wait_until_read = self._saver.wait_until_read
        """Returns when parameters may change."""

    def resume(self) -> tuple[int, int]:
        """Version and number of batches with which this incarnation of the run begins; loads them first."""
        start = self._run.start
        if self._trainer.is_first:
            checkpoint_folder.remove_unfinished(self._run)
        if start.checkpoint:
            with self._trainer.timeline.span("resume", version=start.version):
                checkpoint.load(self._trainer, Path(start.checkpoint) / "trainer")
        self._version = start.version
        return start.version, start.batches

    def after_update(self, version: int, batches: int, last: bool) -> None:
        """Saves `version` if it is its turn or the last; to be called before the next batch is asked for.

        Raises RunError if the one before could not be saved.
        """
        with self._removed_if_it_fails():
            self._saver.done()
        every = self._settings.every
        if every and version != self._version and (version % every == 0 or last):
            self._begin(version, batches)

    def stop(self, version: int, batches: int) -> None:
        """Saves `version`, whatever checkpoint.every is: the run is to end before its last update.

        Where that was done, the controller's part alone is written again: it has the answers that are broken off now.
        """
        with self._removed_if_it_fails():
            self._saver.wait()
        if version != self._version:
            self._begin(version, batches)
        elif self._trainer.is_first:
            self._write_again(version, batches)

    def finish(self) -> None:
        """Returns when what was begun is saved and exported. Raises RunError if it cannot be saved."""
        with self._removed_if_it_fails():
            self._saver.wait()
        self._finish_export()

    def _begin(self, version: int, batches: int) -> None:
        begun, path = time.monotonic(), checkpoint_folder.partial(self._run, version)
        with self._removed_if_it_fails():
            self._saver.wait()  # one at a time
        self._version = version
        with self._trainer.timeline.span("checkpoint", version=version), self._removed_if_it_fails():
            self._controller.checkpoint(version, batches)
            self._saver.begin(path / "trainer", partial(self._seal, version, batches, begun))
        self._stall_s = time.monotonic() - begun

    def _write_again(self, version: int, batches: int) -> None:
        self._finish_export()  # it may be reading what is replaced
        try:
            if checkpoint_folder.again(self._run, version):
                self._controller.checkpoint(version, batches)
                self._controller.wait_for_checkpoint(version)
                checkpoint_folder.seal(self._run, version, batches)
        except (OSError, ControllerError) as e:
            shutil.rmtree(checkpoint_folder.partial(self._run, version), ignore_errors=True)
            log.warning("answers that were running will be generated again: %s", e)

    def _seal(self, version: int, batches: int, begun: float) -> None:
        """Rank 0, on the saver's thread: all ranks' files are there."""
        folder = checkpoint_folder.partial(self._run, version)
        self._controller.wait_for_checkpoint(version)
        (folder / "hf").mkdir()
        copy_description(Path(self._model.path), folder / "hf", self._model.dtype)
        sealed = checkpoint_folder.seal(self._run, version, batches)
        if not self._export or self._export.poll() is not None:  # else it may read the oldest one
            checkpoint_folder.tidy(self._run, self._settings)
        if self._settings.hf_every and version % self._settings.hf_every == 0:
            self._start_export(sealed.folder)
        self._controller.saved(version, self._stall_s, time.monotonic() - begun)

    @contextlib.contextmanager
    def _removed_if_it_fails(self) -> Iterator[None]:
        """Nothing half-written stays."""
        try:
            yield
        except (RunError, ControllerError):
            if self._trainer.is_first:
                shutil.rmtree(checkpoint_folder.partial(self._run, self._version), ignore_errors=True)
            raise

    def _start_export(self, folder: Path) -> None:
        """Hugging Face format beside training, by a process of its own."""
        out = self._run.exports / folder.name
        if out.exists():  # this version was exported before the run was resumed
            shutil.rmtree(out)
        out.parent.mkdir(exist_ok=True)
        self._finish_export()
        self._export = subprocess.Popen([sys.executable, "-c", _EXPORT, str(folder), str(out)])

    def _finish_export(self) -> None:
        if not self._export:
            return
        try:
            failed = self._export.wait(self._trainer.config.machine.timeout_s)
        except subprocess.TimeoutExpired:
            self._export.kill()
            failed = True
        if failed:
            log.error("the export of a checkpoint failed, see above; python -m areal_megatron.convert repeats it")
        self._export = None

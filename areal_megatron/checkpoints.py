"""A trainer rank's part in checkpoints: where a run goes on, and saving beside training."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from areal_megatron import checkpoint_folder
from areal_megatron.config import Config
from areal_megatron.experience import Experience
from areal_megatron.reshard import hf
from areal_megatron.run import Run
from areal_megatron.trainer import checkpoint
from areal_megatron.trainer.step import Trainer


class Checkpoints:
    """Saves every checkpoint.every versions; every rank calls it alike."""

    def __init__(self, config: Config, run: Run, trainer: Trainer, experience: Experience):
        self._settings, self._model, self._run = config.checkpoint, config.model, run
        self._trainer, self._experience = trainer, experience
        self._saving: checkpoint.Saving | None = None
        self._version = self._batches = 0
        """Of the checkpoint that is being saved, or was saved last."""
        self._begun = self._stall_s = 0.0

    def resume(self) -> tuple[int, int]:
        """Version and number of batches with which this incarnation of the run begins; loads them first."""
        start = self._run.start
        if start.checkpoint:
            with self._trainer.timeline.span("resume", version=start.version):
                checkpoint.load(self._trainer, Path(start.checkpoint) / "trainer")
        self._version, self._batches = start.version, start.batches
        return start.version, start.batches

    def after_update(self, version: int, batches: int, last: bool) -> None:
        """Saves `version` if it is its turn or the last; to be called before the next batch is asked for."""
        if self._saving and self._saving.done():
            self._complete()
        every = self._settings.every
        if every and version != self._version and (version % every == 0 or last):
            self._begin(version, batches)

    def finish(self) -> None:
        """Returns when what was begun is saved, or has failed."""
        if self._saving:
            self._saving.wait()
            self._complete()

    def _begin(self, version: int, batches: int) -> None:
        self.finish()  # one at a time
        self._begun, self._version, self._batches = time.monotonic(), version, batches
        path = checkpoint_folder.partial(self._run, version)
        with self._trainer.timeline.span("checkpoint", version=version):
            if self._trainer.is_first:
                shutil.rmtree(path, ignore_errors=True)
                (path / "trainer").mkdir(parents=True)
                (path / "hf").mkdir()
                hf.copy_description(Path(self._model.path), path / "hf", self._model.dtype)
            self._experience.checkpoint(version, batches)
            self._trainer.parallel.barrier()
            self._saving = checkpoint.Saving(self._trainer, path / "trainer")
        self._stall_s = time.monotonic() - self._begun

    def _complete(self) -> None:
        self._saving = None
        if self._trainer.is_first:
            checkpoint_folder.seal(self._run, self._version, self._batches)
            checkpoint_folder.tidy(self._run, self._settings)
        self._experience.saved(self._version, self._stall_s, time.monotonic() - self._begun)

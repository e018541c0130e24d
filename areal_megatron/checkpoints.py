"""A trainer rank's part in checkpoints: resuming a run, and saving and exporting beside training."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint.folder import Written
from areal_megatron.checkpoint.hf_folder import copy_description
from areal_megatron.config import Config, ConfigError
from areal_megatron.protocol import ControllerError
from areal_megatron.run import Run, RunError
from areal_megatron.trainer import checkpoint
from areal_megatron.trainer.trainer import Trainer

log = logging.getLogger(__name__)
_PROGRESS_S = 60.0


class Export(threading.Thread):
    """Converts a checkpoint into a Hugging Face folder beside training, in a process of its own that may take as long
    as it needs.

    It begins when the export `after` has ended. The process ends with this one: the kernel ends it when the thread that
    started it ends (on Linux), the launcher with all other processes of the trainer's session.
    """

    def __init__(self, checkpoint: Path, out: Path, after: Export | None = None):
        super().__init__(name=f"export-{checkpoint.name}", daemon=True)
        self.checkpoint, self._out, self._after = checkpoint, out, after
        self.start()

    def run(self) -> None:
        if self._after:
            self._after.join()
        try:
            self._export()
        except OSError as e:
            log.error("the export of %s failed: %s", self.checkpoint.name, e)

    def _export(self) -> None:
        self._out.parent.mkdir(exist_ok=True)
        if self._out.exists():  # this version was exported before the run was resumed
            shutil.rmtree(self._out)
        command = [sys.executable, "-m", "areal_megatron.convert", "to-hf", str(self.checkpoint), str(self._out)]
        process = subprocess.Popen([*command, "--parent", str(os.getpid())])
        begun = time.monotonic()
        while True:
            try:
                failed = process.wait(_PROGRESS_S)
                break
            except subprocess.TimeoutExpired:
                minutes, written = (time.monotonic() - begun) / 60, self._written() / 1e9
                log.warning("the export of %s: %.1f GB after %.0f min", self.checkpoint.name, written, minutes)
        if failed:
            log.error("the export of a checkpoint failed, see above; python -m areal_megatron.convert repeats it")

    def _written(self) -> int:
        unfinished = self._out.with_name(f".{self._out.name}.partial")
        with contextlib.suppress(FileNotFoundError):  # it has just been renamed
            return sum(path.stat().st_size for path in unfinished.iterdir())
        return 0


class Companion(Protocol):
    """Who keeps the part of a checkpoint that is not the trainers': the controller, by its port, or in supervised runs
    progress.py. Every rank has one."""

    def checkpoint(self, version: int, batches: int) -> None:
        """Returns on the first rank when that part of the checkpoint of `version` is set aside."""

    def wait_for_checkpoint(self, version: int) -> None:
        """Returns when the part is in the folder of the checkpoint; from any thread. Raises OSError."""

    def saved(self, version: int, stall_s: float, seconds: float, error: str = "", warning: str = "") -> None:
        """Takes note of how the checkpoint of `version` went; from any thread."""


class Checkpoints:
    """Saves every checkpoint.every versions; every rank calls it alike."""

    def __init__(self, config: Config, run: Run, trainer: Trainer, companion: Companion):
        self._settings, self._model, self._run = config.checkpoint, config.model, run
        self._trainer, self._companion = trainer, companion
        self._saver = checkpoint.Saver(trainer)
        self._version = 0
        """Version of the checkpoint that was begun last."""
        self._saved = 0
        """Version of the last one that was saved, or with which this incarnation began; on rank 0."""
        self._folder: Path | None = None
        """Its folder; None: the incarnation began with the model of model.path."""
        self._stall_s = 0.0
        self._exports: list[Export] = []

    def resume(self) -> tuple[int, int]:
        """Loads what this incarnation of the run starts from; returns its version and number of batches.

        Raises RunError if that is damaged or cannot be loaded.
        """
        start = self._run.start
        if self._trainer.parallel.is_first:
            checkpoint_folder.remove_unfinished(self._run)
        if start.checkpoint:
            self._folder = Path(start.checkpoint)
            with self._trainer.timeline.span("resume", version=start.version):
                self._check(self._folder)
                checkpoint.load(self._trainer, self._folder / "trainer")
        self._version = self._saved = start.version
        return start.version, start.batches

    def wait_until_read(self) -> None:
        """Returns when parameters may change."""
        self._saver.wait_until_read()

    def after_update(self, version: int, batches: int, last: bool) -> None:
        """Saves `version` if it is its turn or the last; to be called before the next batch is asked for.

        A checkpoint that the file system does not take, as on a full disk, is reported and given up.
        """
        with self._removed_if_it_fails():
            self._saver.done()
        every = self._settings.every
        if every and version != self._version and (version % every == 0 or last):
            self._begin(version, batches)

    def stop(self, version: int, batches: int) -> None:
        """Saves `version`, whatever checkpoint.every is: the run is to end before its last update.

        If `version` was saved already, only the companion's part is written again, which has the answers that were
        interrupted since.
        """
        with self._removed_if_it_fails():
            self._saver.wait()
        if not self._is_saved(version):
            self._begin(version, batches)
        elif self._trainer.parallel.is_first and self._folder:
            self._write_again(self._folder, version, batches)

    def finish(self) -> None:
        """Returns when what was begun is saved or given up, and exported."""
        with self._removed_if_it_fails():
            self._saver.wait()
        self._wait_for_exports()

    def _begin(self, version: int, batches: int) -> None:
        begun, path = time.monotonic(), checkpoint_folder.partial(self._run, version)
        with self._removed_if_it_fails():
            self._saver.wait()  # one at a time
        self._version = version
        with self._trainer.timeline.span("checkpoint", version=version), self._removed_if_it_fails():
            self._run.check_current()
            self._companion.checkpoint(version, batches)
            seal, lost = partial(self._seal, version, batches, begun), partial(self._lost, version, begun)
            self._saver.begin(path / "trainer", seal, lost)
        self._stall_s = time.monotonic() - begun

    def _write_again(self, folder: Path, version: int, batches: int) -> None:
        self._wait_for_exports()  # one may be reading what is replaced
        try:
            known = checkpoint_folder.again(self._run, version, folder)
            self._companion.checkpoint(version, batches)
            self._companion.wait_for_checkpoint(version)
            checkpoint_folder.seal(self._run, version, batches, known)
        except (OSError, ControllerError, ConfigError) as e:
            self._remove(version)
            log.warning("answers that were running will be generated again: %s", e)

    def _check(self, folder: Path) -> None:
        parallel = self._trainer.parallel
        try:
            checkpoint_folder.check_share(folder, parallel.rank, parallel.world)
        except (OSError, ConfigError) as e:
            raise RunError(f"trainer-{parallel.rank}: {e}; resume=auto takes another one") from None

    def _is_saved(self, version: int) -> bool:
        """Whether there is a checkpoint of `version`, the same on all ranks. Collective."""
        parallel = self._trainer.parallel
        saved = (b"yes" if self._saved == version else b"") if parallel.is_first else None
        return bool(parallel.share_all(saved))

    def _seal(self, version: int, batches: int, begun: float, written: dict[str, Written]) -> None:
        """Completes the checkpoint when all ranks' files are there; rank 0, on the saver's thread. Raises OSError."""
        folder = checkpoint_folder.partial(self._run, version)
        self._companion.wait_for_checkpoint(version)
        (folder / "hf").mkdir()
        copy_description(Path(self._model.path), folder / "hf", self._model.dtype, self._trainer.hf_config)
        known = {f"trainer/{name}": file for name, file in written.items()}
        sealed = checkpoint_folder.seal(self._run, version, batches, known)
        self._saved, self._folder = version, sealed.folder
        warning = self._tidied(sealed.folder)
        if self._settings.hf_every and version % self._settings.hf_every == 0:
            out = self._run.exports / sealed.folder.name
            self._exports.append(Export(sealed.folder, out, after=self._exports[-1] if self._exports else None))
        self._companion.saved(version, self._stall_s, time.monotonic() - begun, warning=warning)

    def _tidied(self, sealed: Path) -> str:
        """Removes what need not be kept; returns a warning if there is no room for the next ones, or ""."""
        self._exports = [export for export in self._exports if export.is_alive()]
        in_use = {sealed, *(export.checkpoint for export in self._exports)}
        try:
            checkpoint_folder.tidy(self._run, self._settings, in_use)
            warning = checkpoint_folder.shortage(self._run, self._settings, checkpoint_folder.size(sealed))
        except (OSError, ConfigError) as e:
            warning = f"older checkpoints could not be removed: {e}"
        if warning:
            log.warning("%s", warning)
        return warning

    def _lost(self, version: int, begun: float, reason: str) -> None:
        """Gives up a checkpoint that the file system does not take; rank 0, on the saver's thread."""
        with contextlib.suppress(OSError, ControllerError):
            self._companion.wait_for_checkpoint(version)  # until then it may write into the folder
        self._remove(version)
        last = f"the last one is {self._folder.name}" if self._folder else "there is none before it"
        error = (
            f"the checkpoint of version {version} is lost and training goes on; {last}: {reason}; one takes "
            f"{self._saver.bytes / 1e9:.1f} GB, {self._free()} in {self._run.checkpoints}: make room or lower "
            "checkpoint.keep before the next one"
        )
        log.error("%s", error)
        self._companion.saved(version, self._stall_s, time.monotonic() - begun, error)

    def _free(self) -> str:
        try:
            return f"{checkpoint_folder.free_bytes(self._run) / 1e9:.1f} GB are free"
        except OSError as e:
            return f"{e.strerror}"

    def _remove(self, version: int) -> None:
        shutil.rmtree(checkpoint_folder.partial(self._run, version), ignore_errors=True)

    @contextlib.contextmanager
    def _removed_if_it_fails(self) -> Iterator[None]:
        """Removes a checkpoint that could not be finished."""
        try:
            yield
        except (RunError, ControllerError):
            if self._trainer.parallel.is_first:
                self._remove(self._version)
            raise

    def _wait_for_exports(self) -> None:
        for export in self._exports:
            export.join()

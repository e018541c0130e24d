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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint import peft, tower
from areal_megatron.checkpoint.convert import to_hf
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.checkpoint.folder import TRAINER, Written
from areal_megatron.checkpoint.hf_folder import copy_description
from areal_megatron.config import Config, ConfigError
from areal_megatron.process.files import set_aside
from areal_megatron.protocol import ControllerError
from areal_megatron.run.folder import Replaced, RunError, RunFolder
from areal_megatron.trainer import checkpoint
from areal_megatron.trainer.trainer import Trainer

log = logging.getLogger(__name__)
_PROGRESS_S = 60.0
_SMALL_BYTES = 64 * 2**20
"""The largest checkpoint that is converted in this process."""
_MOST_PENDING = 2
"""Exports that have not ended, with which no weights are saved for a further one: each keeps a copy on the disk."""


class Export(threading.Thread):
    """Converts a checkpoint into a Hugging Face folder beside training, in a process of its own that may take as long
    as it needs, or, where that would take longer to start, in this one.

    It begins when the export `after` has ended. The process ends with this one: the kernel ends it when the thread that
    started it ends (on Linux), the launcher with all other processes of the trainer's session.
    removed: the checkpoint holds nothing but weights, and is removed then. check_current: called before an export is
    removed or written; raises Replaced if this incarnation of the run may do neither.
    """

    def __init__(
        self,
        checkpoint: Path,
        out: Path,
        after: Export | None = None,
        removed: bool = False,
        check_current: Callable[[], None] = lambda: None,
    ):
        super().__init__(name=f"export-{out.name}", daemon=True)
        self.checkpoint, self._out, self._after, self._removed = checkpoint, out, after, removed
        self._check_current = check_current
        self.start()

    def run(self) -> None:
        if self._after:
            self._after.join()
        try:
            self._export()
        except (OSError, Replaced) as e:
            log.error("the export of %s failed: %s", self._out.name, e)
        finally:
            if self._removed:
                shutil.rmtree(self.checkpoint, ignore_errors=True)

    def _export(self) -> None:
        self._check_current()
        self._out.parent.mkdir(exist_ok=True)
        if self._out.exists():  # this version was exported before the run was resumed
            shutil.rmtree(set_aside(self._out, "removed"), ignore_errors=True)
        convert = self._convert_here if self._size() <= _SMALL_BYTES else self._convert
        if not convert():
            log.error("the export of a checkpoint failed, see above; areal convert repeats it")

    def _size(self) -> int:
        return sum(path.stat().st_size for path in (self.checkpoint / TRAINER).iterdir())

    def _convert_here(self) -> bool:
        """Returns whether there is an export now."""
        try:
            to_hf(self.checkpoint, self._out)
        except (CheckpointError, ConfigError) as e:
            log.error("%s", e)
            return False
        return True

    def _convert(self) -> bool:
        """As _convert_here."""
        command = [
            sys.executable,
            "-m",
            "areal_megatron.programs.convert",
            "to-hf",
            str(self.checkpoint),
            str(self._out),
        ]
        process = subprocess.Popen([*command, "--parent", str(os.getpid())])
        begun = time.monotonic()
        while True:
            try:
                return not process.wait(_PROGRESS_S)
            except subprocess.TimeoutExpired:
                minutes, written = (time.monotonic() - begun) / 60, self._written() / 1e9
                log.warning("the export of %s: %.1f GB after %.0f min", self._out.name, written, minutes)

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
    """Saves every checkpoint.every versions, and exports every checkpoint.hf_every; every rank calls it alike."""

    def __init__(self, config: Config, run: RunFolder, trainer: Trainer, companion: Companion):
        self._settings, self._model, self._run = config.checkpoint, config.model, run
        self._trainer, self._companion = trainer, companion
        self._make_savers()
        self._version = 0
        """Version of the checkpoint that was begun last."""
        self._saved = 0
        """Version of the last one that was saved, or with which this incarnation began; on rank 0."""
        self._folder: Path | None = None
        """Its folder; None: the incarnation began with the model of model.path."""
        self._stall_s = 0.0
        self._exported = 0
        """The last version whose weights were saved for an export alone, or with which this incarnation began."""
        self._exports: list[Export] = []
        """Those that may not have ended; both savers' threads add to it."""
        self._behind = False
        """Whether the last version that was to be exported was not, since too many exports had not ended."""
        self._lock = threading.Lock()

    def _make_savers(self) -> None:
        trainer = self._trainer
        self._saver, self._weights = checkpoint.Saver(trainer), checkpoint.Saver(trainer, weights_only=True)

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
                self.load(self._folder)
        self._version = self._saved = self._exported = start.version
        return start.version, start.batches

    def save(self, version: int) -> None:
        """Returns when `version` is saved, or the companion has been told why it is not."""
        self._begin(version, version)
        self.finish()

    def load(self, folder: Path) -> None:
        """Brings the trainers to a checkpoint; parameters must be allowed to change. Raises RunError if that is damaged
        or cannot be loaded."""
        self._check(folder)
        checkpoint.load(self._trainer, folder / TRAINER)
        self._make_savers()  # moments have another place in memory now

    def wait_until_read(self) -> None:
        """Returns when parameters may change."""
        self._saver.wait_until_read()
        self._weights.wait_until_read()

    def after_update(self, version: int, batches: int, last: bool) -> None:
        """Saves `version` if it is its turn or the last, or its weights alone if it is only to be exported, unless two
        exports have not ended.

        To be called before the next batch is asked for.

        A checkpoint that the file system does not take, as on a full disk, is reported and given up.
        """
        with self._removed_if_it_fails():
            self._saver.done()
            self._weights.done()
        every = self._settings.every
        if every and version != self._version and (version % every == 0 or last):
            self._begin(version, batches)
        elif version != self._version and self._is_to_be_exported(version):
            self._weights.wait()  # one at a time
            if not self._is_behind(version):
                self._begin_export(version)

    def stop(self, version: int, batches: int) -> None:
        """Saves `version`, whatever checkpoint.every is: the run is to end before its last update.

        If `version` was saved already, only the companion's part is written again, which has the answers that were
        interrupted since.
        """
        with self._removed_if_it_fails():
            self._saver.wait()
            self._weights.wait()
        if not self._is_saved(version):
            self._begin(version, batches)
        elif self._trainer.parallel.is_first and self._folder:
            self._write_again(self._folder, version, batches)

    def finish(self) -> None:
        """Returns when what was begun is saved or given up, and exported."""
        with self._removed_if_it_fails():
            self._saver.wait()
            self._weights.wait()
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
            self._saver.begin(path / TRAINER, seal, lost)
        self._stall_s = time.monotonic() - begun

    def _begin_export(self, version: int) -> None:
        folder = checkpoint_folder.weights(self._run, version)

        def seal(_: dict[str, Written]) -> None:
            self._describe(folder)
            self._export(folder, version, removed=True)

        def lost(reason: str) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            log.error("there is no export of version %d, and training goes on: %s", version, reason)

        self._exported = version
        with self._trainer.timeline.span("export", version=version):
            self._run.check_current()
            with contextlib.suppress(OSError):  # the saver meets it again, and gives up this export
                self._run.exports.mkdir(exist_ok=True)
            self._weights.begin(folder / TRAINER, seal, lost)

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

    def _is_behind(self, version: int) -> bool:
        """Whether `version` is to have no export since too many are unfinished, the same on all ranks. Collective."""
        parallel = self._trainer.parallel
        if not parallel.is_first:
            return bool(parallel.share_all(None))
        with self._lock:
            pending = sum(export.is_alive() for export in self._exports)
        behind = pending >= _MOST_PENDING
        if behind and not self._behind:
            log.warning(
                "version %d is not exported, nor are those after it until one of %d exports has ended: an export takes "
                "longer than checkpoint.hf_every=%d updates",
                version,
                pending,
                self._settings.hf_every,
            )
        self._behind = behind
        return bool(parallel.share_all(b"yes" if behind else b""))

    def _seal(self, version: int, batches: int, begun: float, written: dict[str, Written]) -> None:
        """Completes the checkpoint when all ranks' files are there; rank 0, on the saver's thread. Raises OSError."""
        folder = checkpoint_folder.partial(self._run, version)
        self._companion.wait_for_checkpoint(version)
        self._describe(folder)
        known = {f"trainer/{name}": file for name, file in written.items()}
        sealed = checkpoint_folder.seal(self._run, version, batches, known)
        self._saved, self._folder = version, sealed.folder
        warning = self._tidied(sealed.folder)
        if self._is_to_be_exported(version):
            self._export(sealed.folder, version)
        self._companion.saved(version, self._stall_s, time.monotonic() - begun, warning=warning)

    def _describe(self, folder: Path) -> None:
        (folder / "hf").mkdir()
        copy_description(Path(self._model.path), folder / "hf", self._model.dtype, self._trainer.hf_config)
        tower.copy(Path(self._model.path), folder / "hf")
        if adapter := self._trainer.adapter:
            peft.write_description(folder, adapter, self._trainer.hf_config, self._model.path)

    def _is_to_be_exported(self, version: int) -> bool:
        every = self._settings.hf_every
        return bool(every) and version % every == 0 and version != self._exported

    def _export(self, folder: Path, version: int, removed: bool = False) -> None:
        with self._lock:
            self._exports = [export for export in self._exports if export.is_alive()]
            out, after = self._run.exports / f"version-{version:06d}", self._exports[-1] if self._exports else None
            self._exports.append(Export(folder, out, after, removed, self._run.check_current))

    def _tidied(self, sealed: Path) -> str:
        """Removes what need not be kept; returns a warning if there is no room for the next ones, or ""."""
        with self._lock:
            in_use = {sealed, *(export.checkpoint for export in self._exports if export.is_alive())}
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
    def in_place_of_the_model(self) -> Iterator[None]:
        """Completes the last checkpoint, which holds the model too, where the model cannot be written. Raises
        RunError."""
        try:
            yield
        except OSError as e:
            self.finish()
            raise RunError(f"the trained model could not be written: {e}; make room, and resume=auto writes it") from e

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

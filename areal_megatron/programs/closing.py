"""The last lines of a launcher: what a run has kept, and the commands to resume and to inspect it."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint.folder import SavedCheckpoint
from areal_megatron.config import Config, ConfigError
from areal_megatron.models.weight_files import ADAPTER
from areal_megatron.run.folder import RunFolder


def closing(run: RunFolder, config: Config, done: bool, again: str) -> str:
    """Returns three lines, or two where there is nothing to go on with. `done`: the run has made all its updates.
    `again`: the command that started it without `resume`, if it can be given again as it stands."""
    folder, checkpoint = _short(run.folder), None
    with suppress(OSError, ConfigError):  # as of a folder that is away
        checkpoint, _ = checkpoint_folder.resumable(run)
    look = f"look    areal status --web {folder}   or, as one file to pass on, areal report {folder}"
    lines = [f"kept    {_kept(run, checkpoint)}", going_on(config, done, again, bool(checkpoint)), look]
    return "\n".join(filter(None, lines))


def _kept(run: RunFolder, checkpoint: SavedCheckpoint | None) -> str:
    things = [f"checkpoint {_short(checkpoint.folder)}"] if checkpoint else []
    with suppress(OSError):
        if (run.hf / "config.json").exists():
            things.append(f"the model for transformers and vLLM in {_short(run.hf)}")
        if (run.adapter / ADAPTER).exists():
            things.append(f"its adapter for PEFT in {_short(run.adapter)}")
    return ", ".join(things) or f"no checkpoint; metrics and logs in {_short(run.folder)}"


def going_on(config: Config, done: bool, again: str, is_saved: bool) -> str:
    """Returns the line that says how the run goes on, "" if it cannot; the first arguments are as for `closing`.
    `is_saved`: there is a checkpoint."""
    if config.is_driven:  # by the program that has started this launcher
        return "resume  the same program with resume=auto" if is_saved else ""
    if done:
        again = shlex.join(word for word in shlex.split(again) if not word.startswith("updates="))
    command = f"{again} resume=auto" if again else "the same command with resume=auto"
    if not is_saved:
        return f"again   {command}, from the beginning"
    return f"go on   {command} updates={2 * config.updates}" if done else f"resume  {command}"


def _short(path: Path) -> str:
    """Returns a path as a word of a shell's command, from the current folder where it lies below that."""
    here = Path(os.path.abspath("."))
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))

"""Rights that others have on files and folders which are to be their user's alone, and how they are taken back.

`chmod -R`, with which people share their logs, gives such rights, mostly without letting anybody in: a file in a folder
closed to others is out of their reach, whatever its own mode.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from areal_megatron.config import ConfigError

WRITE = 0o022
USE = 0o077


class Rights(IntEnum):
    """What others could do with a path of this user until now."""

    NONE = 0
    HELD = 1
    """They had rights, but could not enter the folder."""
    READ = 2
    WRITTEN = 3


def reach(mode: int, rights: int, folder: int) -> Rights:
    """Returns what others can do with a path of mode `mode` in a folder of mode `folder`, of the bits `rights` that
    they must not have."""
    if not mode & rights:
        return Rights.NONE
    entering = (0o070 if folder & 0o010 else 0) | (0o007 if folder & 0o001 else 0)
    used = mode & rights & entering
    return Rights.WRITTEN if used & WRITE else Rights.READ if used else Rights.HELD


def take_back(paths: Iterable[Path], rights: int) -> None:
    """Takes `rights`, bits of a mode, from all but this user. Raises ConfigError if a file system does not do that."""
    for path in paths:
        try:
            path.chmod(path.stat().st_mode & 0o777 & ~rights)
            why = "its file system forbids nothing" if path.stat().st_mode & rights else ""
        except OSError as e:
            why = e.strerror or str(e)
        if why:
            raise ConfigError(f"others may use {path}, and {why}: choose another runs_dir=…")


def take_back_below(folder: Path, rights: int) -> None:
    """Does so with all that is in a folder, as far as it is this user's and does not vanish meanwhile."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            with suppress(OSError):
                status = path.lstat()
                if status.st_mode & rights and not stat.S_ISLNK(status.st_mode):
                    path.chmod(status.st_mode & 0o777 & ~rights)

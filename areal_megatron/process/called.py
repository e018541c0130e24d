"""By which command a program was called: `areal plan` becomes a program whose usage line then says that."""

from __future__ import annotations

import os

_CALLED = "AREAL_CALLED"


def call(command: str) -> None:
    """Has the program that this process becomes name itself so."""
    os.environ[_CALLED] = command


def program(module: str) -> str:
    """Returns how a program names itself in its usage line: the command that it was called by, or `python -m module`.
    To be asked for once in a process."""
    return os.environ.pop(_CALLED, "") or f"python -m {module}"

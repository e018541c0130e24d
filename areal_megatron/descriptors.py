"""How many files and connections a process may have open."""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """Raises this process's limit of open files as far as the system lets it, and returns it.

    The usual soft limit of 1,024 is kept low for programs that call select(), which none of ours does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

"""Questions about processes that may end at any moment: one that has just ended is not alive, which is no error."""

from collections.abc import Iterable

import psutil


def is_alive(process: psutil.Process | int) -> bool:
    """Returns whether a process exists and is no zombie. `process` may be a pid."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> list[str]:
    """Returns the command line; [] if the process has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def name_of(process: psutil.Process) -> str:
    """Returns the name; "" if the process has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def left_over(processes: Iterable[psutil.Process], timeout_s: float = 5) -> list[psutil.Process]:
    """Waits for the processes to end; returns those that are still alive after timeout_s."""
    _, left = psutil.wait_procs(processes, timeout_s)
    return [process for process in left if is_alive(process)]

"""Processes that may end at any moment: asking one that is just gone is no error here, it is not alive."""

from collections.abc import Iterable

import psutil


def is_alive(process: psutil.Process | int) -> bool:
    """Neither gone nor a zombie. `process` may be a pid."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> list[str]:
    """Empty where it is gone."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def name_of(process: psutil.Process) -> str:
    """Empty where it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def left_over(processes: Iterable[psutil.Process], timeout_s: float = 5) -> list[psutil.Process]:
    """Those of the processes that are still alive after timeout_s."""
    _, left = psutil.wait_procs(processes, timeout_s)
    return [process for process in left if is_alive(process)]

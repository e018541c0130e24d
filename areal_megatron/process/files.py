"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import itertools
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Content = TypeVar("Content")
_AGAIN_S = 0.05


def write_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Writes a file of which readers see the old content or the new, never a part. Raises OSError.

    sync: the content is on the disk before the file appears.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # the disk may be full, and what is there of it is of no use
        raise


def write_once(path: Path, content: str) -> None:
    """Writes a file of a new name, whole and synced: of several writers, on whatever machines, one succeeds.

    Raises FileExistsError if the name is taken, and OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                if os.fstat(file.fileno()).st_nlink < 2:  # NFS may do it and, asked again, say that it is done already
                    raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


def numbered(folder: Path, number: int) -> Path:
    """Returns the path of a numbered file, e.g. `00003.json`."""
    return folder / f"{number:05}.json"


def numbers(folder: Path) -> list[int]:
    """Returns the numbers of the numbered files in a folder, ascending.

    Raises FileNotFoundError if there is no folder: nothing can be concluded from what is not there. An NFS client asks
    its server what the folder holds only when the folder is opened, as it is here. Asked for one name, it may say for a
    minute that there is no such file, because there was none.
    """
    return sorted(int(name[:-5]) for name in os.listdir(folder) if name.endswith(".json") and name[:-5].isdecimal())


def read_replaced(path: Path, decode: Callable[[bytes], Content], patience_s: float = 1.0) -> Content | None:
    """Returns what `decode` makes of a file that its writer replaces again and again; None if there is none, or nothing
    that can be read within patience_s.

    On a shared file system the file that was just replaced may be stale when it is read, and after the crash of its
    writer's machine it may be empty. `decode` raises ValueError for what it cannot read.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            if time.monotonic() >= deadline:
                return None
        time.sleep(_AGAIN_S)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Writes an indented JSON file atomically."""
    write_atomically(path, json.dumps(report, indent=2) + "\n")


def sync_path(path: Path) -> None:
    """Returns when a file's content, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Returns when the folder and everything in it is on the disk. Raises OSError."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)


def set_aside(path: Path, reason: str) -> Path:
    """Renames a folder, if it exists, to `.NAME.REASON` beside it and returns that path, for the caller to remove:
    a folder that is half removed must not look complete. Raises OSError.

    One that was set aside before goes only if there is one to take its place: it may be the last that is whole.
    """
    aside = path.with_name(f".{path.name}.{reason}")
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
    return aside


@contextlib.contextmanager
def whole_folder(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yields a folder to fill, which takes the place of `path` at the end, or is removed if an error is raised.

    sync: everything is on the disk before the folder appears. Raises OSError, also if there is no folder to make it in,
    or if another process fills one for `path`.
    """
    partial = path.with_name(f".{path.name}.partial")
    lock = _made_anew(partial)
    try:
        yield partial
        if sync:
            sync_folder(partial)
        older = set_aside(path, "old")
        os.rename(partial, path)
        if sync:
            sync_path(path.parent)
        shutil.rmtree(older, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _made_anew(folder: Path) -> int:
    """Makes a folder in place of one that was left behind. Returns a descriptor that, where the file system has locks,
    keeps others from doing so too: they would share it, and the first to end would publish what the others lack."""
    with contextlib.suppress(FileNotFoundError):
        os.close(_locked(folder))
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return _locked(folder)


def _locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(errno.EBUSY, "another process is writing it", str(folder)) from None
    except OSError:  # there are no locks
        pass
    return descriptor


def drop_torn_line(path: Path) -> None:
    """Removes an unfinished last line, left by a writer that died, which would spoil the next writer's first line."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def names_like(path: Path) -> list[Path]:
    """Returns what has nearly the name of a path that is not there, the nearest first. If its folder is not there
    either, that may have nearly its name, too."""
    try:
        there = os.listdir(path.parent)
    except FileNotFoundError:
        inside = [folder / path.name for folder in names_like(path.parent)]
        return [like for moved in inside for like in ([moved] if os.path.exists(moved) else names_like(moved))]
    except OSError:
        return []
    near = difflib.get_close_matches(path.name, [name for name in there if name != path.name], 3, 0.7)
    return [path.with_name(name) for name in near]


def new_folder(kind: str, chosen: Path | None = None) -> Path:
    """Makes and returns `chosen`, or the first runs/KIND-N that is not there. Raises OSError."""
    if chosen:
        (folder := chosen.absolute()).mkdir(parents=True)
        return folder
    (runs := Path("runs").absolute()).mkdir(exist_ok=True)
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (folder := runs / f"{kind}-{number}").mkdir()
            return folder
    raise AssertionError

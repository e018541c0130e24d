"""A disk that fails for a while: every call of a process that names a path below a folder returns EIO, as of a file
server that is away. Calls on descriptors that are open already go on."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_FAILING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int fails(const char *path) {
    const char *below = getenv("FAILING_BELOW"), *while_there = getenv("FAILING_WHILE");
    if (!path || !below || strncmp(path, below, strlen(below)))
        return 0;
    int (*really)(const char *, int) = dlsym(RTLD_NEXT, "access");
    if (really(while_there, F_OK))
        return 0;
    errno = EIO;
    return 1;
}

#define FAILING(kind, failed, name, path, parameters, arguments)  \
    kind name parameters {                                        \
        kind (*really) parameters = dlsym(RTLD_NEXT, #name);      \
        return fails(path) ? failed : really arguments;           \
    }

#define OPENING(name, path, parameters, arguments)                \
    int name parameters {                                         \
        va_list more;                                             \
        va_start(more, flags);                                    \
        int mode = va_arg(more, int);                             \
        va_end(more);                                             \
        int (*really) parameters = dlsym(RTLD_NEXT, #name);       \
        return fails(path) ? -1 : really arguments;               \
    }

OPENING(open, a, (const char *a, int flags, ...), (a, flags, mode))
OPENING(open64, a, (const char *a, int flags, ...), (a, flags, mode))
OPENING(openat, a, (int at, const char *a, int flags, ...), (at, a, flags, mode))
OPENING(openat64, a, (int at, const char *a, int flags, ...), (at, a, flags, mode))
FAILING(void *, 0, opendir, a, (const char *a), (a))
FAILING(int, -1, stat, a, (const char *a, struct stat *s), (a, s))
FAILING(int, -1, stat64, a, (const char *a, struct stat64 *s), (a, s))
FAILING(int, -1, lstat, a, (const char *a, struct stat *s), (a, s))
FAILING(int, -1, lstat64, a, (const char *a, struct stat64 *s), (a, s))
FAILING(int, -1, fstatat, a, (int at, const char *a, struct stat *s, int flags), (at, a, s, flags))
FAILING(int, -1, fstatat64, a, (int at, const char *a, struct stat64 *s, int flags), (at, a, s, flags))
FAILING(int, -1, access, a, (const char *a, int mode), (a, mode))
FAILING(int, -1, mkdir, a, (const char *a, mode_t mode), (a, mode))
FAILING(int, -1, rmdir, a, (const char *a), (a))
FAILING(int, -1, unlink, a, (const char *a), (a))
FAILING(int, -1, rename, a, (const char *a, const char *b), (a, b))
FAILING(int, -1, link, a, (const char *a, const char *b), (a, b))
FAILING(int, -1, utimensat, a, (int at, const char *a, const struct timespec *times, int flags), (at, a, times, flags))
"""


@dataclass(frozen=True)
class FailingDisk:
    environment: dict[str, str]
    """For the processes that are to meet it."""
    _switch: Path

    def fail(self) -> None:
        self._switch.touch()

    def mend(self) -> None:
        self._switch.unlink()


@contextlib.contextmanager
def below(work: Path, folder: Path) -> Iterator[FailingDisk]:
    """Yields a disk that fails below `folder`. `work`: where to put the library for that. Skips the test where there is
    no C compiler."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    library, switch = work / "failing_disk.so", work / "failing"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, "-xc", "-", "-ldl"]
    subprocess.run(command, input=_FAILING, text=True, check=True, timeout=60)
    settings = {"LD_PRELOAD": str(library), "FAILING_BELOW": f"{folder}/", "FAILING_WHILE": str(switch)}
    yield FailingDisk(os.environ | settings, switch)

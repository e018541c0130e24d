"""A disk of its own for a test, so small that it is soon full: a tmpfs in a mount namespace."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

_UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def on_small_disk(folder: Path, kib: int, *command: object, **popen) -> subprocess.Popen:
    """Starts a Python program, which sees a disk of `kib` KiB at `folder`; nobody else does. Skips the test where that
    is not permitted."""
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no mount namespace: {tried.stderr.strip()}")
    folder.mkdir(exist_ok=True)
    mount = f"mount -t tmpfs -o size={kib}k tmpfs {shlex.quote(str(folder))} && exec {sys.executable} " + shlex.join(
        map(str, command)
    )
    return subprocess.Popen([*_UNSHARE, "sh", "-c", mount], **popen)


def fill(folder: Path) -> Path:
    """Fills the disk that holds `folder` to its last byte. Returns the file to remove to empty it again."""
    ballast = folder / "ballast"
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 16, 1 << 12, 1):
        try:
            while True:
                os.write(file, b"x" * size)
        except OSError:
            continue
    os.close(file)
    return ballast

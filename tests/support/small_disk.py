"""A disk that is soon full, for a program of a test: a tmpfs in a mount namespace of its own."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def run_on_small_disk(folder: Path, kib: int, program: str, *arguments: object, timeout_s: float = 60):
    """Returns (exit code, stdout, stderr) of a Python program that sees a disk of `kib` KiB at `folder`; nobody else
    does. Ends what it leaves behind. Skips the test where that is not permitted."""
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no mount namespace: {tried.stderr.strip()}")
    folder.mkdir(exist_ok=True)
    python = shlex.join(map(str, (sys.executable, "-c", program, *arguments)))
    mount = f"mount -t tmpfs -o size={kib}k tmpfs {shlex.quote(str(folder))} && exec {python}"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*_UNSHARE, "sh", "-c", mount], stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        out, told = process.communicate(timeout=timeout_s)
        return process.returncode, out, told
    except subprocess.TimeoutExpired as e:
        pytest.fail(f"no end after {timeout_s:g} s: {(e.stderr or b'').decode()}")
    finally:
        with contextlib.suppress(ProcessLookupError):  # it left nothing
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


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

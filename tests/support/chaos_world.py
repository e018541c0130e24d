"""A machine of its own for a run that is to be disturbed: namespaces of Linux, which end with the process.

| what | how | so that a fault can |
|---|---|---|
| a disk | a small tmpfs, which holds the run folder; copied out at the end | fill it |
| a network | interface areal0, with a second machine at its other end | take it away |
| clocks | chaos_clock.c, with a file for each process | set one process's clock |
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "areal0"
_HERE, _FAR = "10.201.0.1/24", "10.201.0.2/24"
_INSIDE = "AREAL_CHAOS_WORLD"
"""Set in the environment of a process that is in the namespaces already."""


def enter() -> None:
    """Puts this program into namespaces of its own, by starting it anew. Returns at once if that was done before."""
    if os.environ.get(_INSIDE):
        return
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "--net", sys.executable, *sys.orig_argv[1:]]
    os.execvpe(command[0], command, os.environ | {_INSIDE: "1"})


class World:
    """The disk, the network and the clocks of a run. A context manager: leaving it keeps the run folder."""

    def __init__(self, folder: Path, disk_mb: int):
        """`folder`: where the run folder is to be in the end. Raises OSError and CalledProcessError."""
        self._kept = folder
        self.disk = folder.with_name(f".{folder.name}.chaos")
        self.folder = self.disk / folder.name
        """The run folder."""
        self.disk.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={disk_mb}m,mode=700", "tmpfs", self.disk)
        self._clocks = Path(tempfile.mkdtemp(prefix="areal-clocks-"))
        self.python = self._python_with_a_clock()
        """A command that runs Python, with a clock of its own if there is a C compiler."""
        self._far = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        _run("ip", "link", "set", "lo", "up")
        while os.stat(f"/proc/{self._far.pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            pass  # until unshare has made the namespace
        _run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", self._far.pid)
        _run("ip", "address", "add", _HERE, "dev", INTERFACE)
        _run("ip", "link", "set", INTERFACE, "up")
        for command in (["link", "set", "lo", "up"], ["address", "add", _FAR, "dev", INTERFACE]):
            _run(*self.far(), "ip", *command)
        _run(*self.far(), "ip", "link", "set", INTERFACE, "up")

    def far(self) -> list[str]:
        """The beginning of a command that is to run on the second machine."""
        return ["nsenter", "--target", str(self._far.pid), "--net"]

    @property
    def has_clocks(self) -> bool:
        return self.python != sys.executable

    def set_clock(self, pid: int, ahead_s: int) -> None:
        """Sets the clock of a process, and of those that it has started, ahead of the machine's, or behind it."""
        clock = self._clocks / str(pid)
        clock.with_suffix(".new").write_text(f"{ahead_s:+d}\n", encoding="utf-8")
        os.replace(clock.with_suffix(".new"), clock)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Inside there is no byte left on the disk."""
        ballast = self.disk / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12, 1):
                    with contextlib.suppress(_NoSpace):
                        while True:
                            _write(file, size)
            yield
        finally:
            ballast.unlink()

    @contextlib.contextmanager
    def no_network(self) -> Iterator[None]:
        """Inside the second machine is cut off."""
        _run("ip", "link", "set", INTERFACE, "down")
        try:
            yield
        finally:
            _run("ip", "link", "set", INTERFACE, "up")

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        self._far.kill()
        self._far.wait()
        shutil.rmtree(self._clocks, ignore_errors=True)
        if self.folder.exists():
            held = self._kept.with_name(f".{self._kept.name}.held")
            shutil.copytree(self.folder, held, symlinks=True)
            for output in self.disk.glob("*.out"):
                shutil.copy(output, held / "logs")
            os.rename(held, self._kept)
        _run("umount", "--lazy", self.disk)
        self.disk.rmdir()

    def _python_with_a_clock(self) -> str:
        compiler = shutil.which("cc")
        if compiler is None:
            return sys.executable
        library, script = self._clocks / "clock.so", self._clocks / "python"
        _run(compiler, "-O2", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("chaos_clock.c"))
        script.write_text(
            "#!/bin/sh\n"
            f"export LD_PRELOAD={shlex.quote(str(library))} CHAOS_CLOCK={shlex.quote(str(self._clocks))}/$$\n"
            f'exec {shlex.quote(sys.executable)} "$@"\n',
            encoding="utf-8",
        )
        script.chmod(0o700)
        return str(script)


class _NoSpace(Exception):
    pass


def _write(file, size: int) -> None:
    try:
        file.write(bytes(size))
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        raise _NoSpace from e


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)

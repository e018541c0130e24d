"""Two network namespaces with a slow link between them, as between two sites: so many Mb/s, so many ms there and back.

    python -m tests.support.slow_link NEAR FAR SECONDS

is the process that delays packets on their way between the namespaces of two processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEVICE = "slow0"
_ADDRESSES = "10.202.0.1", "10.202.0.2"
_MTU = 9000
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_CLONE_NEWNET = 0x40000000


class NoNamespaces(RuntimeError):
    """This process may make no network namespaces, or lacks the programs for that."""


@dataclass(frozen=True)
class Side:
    """One end of the link: a namespace with a loopback interface and the device slow0."""

    address: str
    pid: int
    """A process that lives in the namespace."""

    @property
    def enter(self) -> list[str]:
        """The beginning of a command that is to run here."""
        return ["nsenter", f"--net={self._path}"]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile are on this side."""
        with open("/proc/thread-self/ns/net") as before, open(self._path) as here:
            _set_namespace(here.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing arrives meanwhile, in either direction, and nobody is told."""
        self.run("ip", "link", "set", DEVICE, "down")
        try:
            yield
        finally:
            self.run("ip", "link", "set", DEVICE, "up")

    def run(self, *command: str) -> None:
        _run(*self.enter, *command)

    @property
    def _path(self) -> str:
        return f"/proc/{self.pid}/ns/net"


@dataclass(frozen=True)
class SlowLink:
    near: Side
    far: Side


@contextlib.contextmanager
def slow_link(*, mbps: float, delay_ms: float = 0) -> Iterator[SlowLink]:
    """Yields two namespaces that share nothing but a link of `mbps` each way and `delay_ms` there and back.

    Needs root, or the root of a user namespace (`unshare --user --map-root-user --net`), and iproute2. Raises
    NoNamespaces.

    Example:
        with slow_link(mbps=200, delay_ms=50) as link:
            server = subprocess.Popen([*link.far.enter, "iperf3", "--server"])
            subprocess.run([*link.near.enter, "iperf3", "--client", link.far.address])
    """
    with contextlib.ExitStack() as stack:
        sides = [Side(address, _in_new_namespace(stack)) for address in _ADDRESSES]
        for side in sides:
            side.run("ip", "link", "set", "lo", "up")
        if delay_ms:
            _delayed(stack, sides, delay_ms / 2e3)
        else:
            peer = ["peer", "name", DEVICE, "netns", str(sides[1].pid)]
            sides[0].run("ip", "link", "add", DEVICE, "type", "veth", *peer)
        burst = max(128_000, int(mbps * 1e6 / 8 / 200))
        for side in sides:
            peer = next(other.address for other in sides if other is not side)
            side.run("ip", "address", "add", side.address, "peer", peer, "dev", DEVICE)
            side.run("ip", "link", "set", DEVICE, "mtu", str(_MTU), "txqueuelen", "10000", "up")
            rate = ["rate", f"{mbps:g}mbit", "burst", str(burst), "latency", "200ms"]
            side.run("tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", *rate)
        yield SlowLink(*sides)


def _in_new_namespace(stack: contextlib.ExitStack) -> int:
    try:
        process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stderr=subprocess.PIPE, text=True)
    except OSError as e:
        raise NoNamespaces(f"unshare: {e.strerror}") from None
    stack.callback(_end, process)
    own = os.stat("/proc/self/ns/net").st_ino
    while process.poll() is None:
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process.pid}/ns/net").st_ino != own:
                return process.pid
        time.sleep(0.01)
    raise NoNamespaces(process.stderr.read().strip() or "unshare --net failed")


def _delayed(stack: contextlib.ExitStack, sides: list[Side], seconds: float) -> None:
    command = [sys.executable, "-m", __name__, *(str(side.pid) for side in sides), str(seconds)]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    if process.stdout.readline() != "ready\n":
        raise NoNamespaces((process.stderr.read().strip() or "no tun device").splitlines()[-1])


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as e:
        raise NoNamespaces(f"{e.filename}: no such program") from None
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")


def _set_namespace(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _tun(pid: int) -> int:
    """Returns a new tun device in the namespace of a process."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        _set_namespace(namespace.fileno())
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    return device


def forward(near: int, far: int, delay_s: float) -> None:
    """Moves packets between two tun devices, each `delay_s` after it was sent, for ever."""
    other, under_way = {near: far, far: near}, {near: deque(), far: deque()}
    while True:
        dues = [packets[0][0] for packets in under_way.values() if packets]
        readable, _, _ = select.select([near, far], [], [], max(0.0, min(dues) - time.monotonic()) if dues else None)
        for device in readable:
            with contextlib.suppress(OSError):  # no further packet, or the device is down
                while True:
                    under_way[other[device]].append((time.monotonic() + delay_s, os.read(device, 1 << 16)))
        for device, packets in under_way.items():
            while packets and packets[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # a link that is down loses what arrives
                    os.write(device, packets.popleft()[1])


if __name__ == "__main__":
    devices = [_tun(int(pid)) for pid in sys.argv[1:3]]
    print("ready", flush=True)
    forward(*devices, float(sys.argv[3]))

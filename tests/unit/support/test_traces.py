"""What the tests look for when a run has ended is found where it was left."""

import socket
import subprocess
import sys

import psutil

from tests.support.traces import Traces

LISTENS = (
    "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
    "print(s.getsockname()[1], flush=True); time.sleep(60)"
)


def ports(traces: Traces) -> list[str]:
    """Lock files and the like may be those of tests beside this one."""
    return [left for left in traces.left() if left.startswith("port ")]


def test_a_port_that_is_listened_on_is_found_by_its_socket():
    traces = Traces()
    with subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        traces.watch([psutil.Process(process.pid)])
        (left,) = ports(traces)
        assert left.startswith(f"port {port}, which") and str(process.pid) in left
        process.kill()
    with socket.create_server(("127.0.0.1", port)):  # another socket of the same number
        assert not ports(traces)
    traces.temporary.rmdir()


def test_a_socket_that_is_passed_on_is_found_with_whoever_has_it():
    traces = Traces()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        traces.watch([psutil.Process()])
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        with subprocess.Popen(command, pass_fds=[listening.fileno()]) as heir:
            listening.close()
            assert any(f"pid={heir.pid}," in left for left in ports(traces))
            heir.kill()
    traces.temporary.rmdir()


def test_a_socket_that_listens_on_every_address_is_named():
    for host, family in (("", socket.AF_INET), ("::", socket.AF_INET6), ("127.0.0.1", socket.AF_INET)):
        traces = Traces()
        with socket.create_server((host, 0), family=family) as listening:
            traces.watch([psutil.Process()])
            port = listening.getsockname()[1]
            assert any(name.startswith(f"port {port} of ") for name in traces.wildcards) == (host != "127.0.0.1")
        traces.temporary.rmdir()

"""A supervisor over pipes, as srun connects it, and a launcher whose nodes fall silent."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from areal_megatron.launch.slurm import Srun
from areal_megatron.launch.supervision import hosts
from areal_megatron.launch.supervision.hosts import HostError, Nodes
from areal_megatron.launch.supervision.node import Supervisor, follow
from areal_megatron.launch.supervision.orders import Alive, End, Leave, NodeHello, Present, StartOrder
from areal_megatron.planning.pools import Process
from tests.support.living import is_alive

SLEEPS = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print(p.pid, flush=True); time.sleep(60)"
)


@pytest.fixture
def nodes(monkeypatch):
    """Nodes with one supervisor, that of node n1."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    with Nodes(
        Srun([[sys.executable, "-m", "areal_megatron.launch.supervision.node", "--silence-s=180"]], 180), 180
    ) as nodes:
        assert nodes.gather(["n1"], 20)[0].cpus >= 1
        yield nodes


def start(nodes, tmp_path, code, name="child", node="n1", settings=None, cores=()):
    log = str(tmp_path / f"{name}.log")
    nodes.start(StartOrder(node, name, [sys.executable, "-c", code], settings or {}, log, list(cores)))
    return nodes.by_name[name]


def eventually(condition, refresh=lambda: None, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        refresh()
        time.sleep(0.05)
    return value


def test_a_process_is_started_with_its_settings_and_without_those_of_mpi(nodes, tmp_path):
    code = "import os; print(os.environ['HERE'], os.environ.get('AREAL_CPUS'), len(os.sched_getaffinity(0)))"
    child = start(nodes, tmp_path, code, settings={"HERE": "$(echo $HOME);`id`"}, cores=[len(os.sched_getaffinity(0))])
    eventually(lambda: child.exit_code is not None, nodes.refresh)
    first = min(os.sched_getaffinity(0))
    assert child.exit_code == 0 and child.last_lines() == f"$(echo $HOME);`id` {first} 1"


def test_deaths_are_reported_and_all_end_when_told_to(nodes, tmp_path):
    child, other = start(nodes, tmp_path, SLEEPS), start(nodes, tmp_path, SLEEPS, "other")
    pid, survivor = (int(eventually(c.last_lines)) for c in (child, other))
    psutil.Process(pid).parent().send_signal(signal.SIGKILL)
    assert eventually(lambda: child.exit_code, nodes.refresh) == -signal.SIGKILL
    assert other.exit_code is None
    nodes.end()
    assert not nodes.by_name and not is_alive(pid) and not is_alive(survivor)
    again = start(nodes, tmp_path, "raise SystemExit(3)", "again")
    assert eventually(lambda: again.exit_code, nodes.refresh) == 3


def test_one_that_hangs_is_ended_with_its_descendants(nodes, tmp_path):
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
    child, other = start(nodes, tmp_path, code), start(nodes, tmp_path, SLEEPS, "other")
    pid, survivor = (int(eventually(c.last_lines)) for c in (child, other))
    nodes.kill(Process("child", "rollout", 0, "n1", ()))
    assert eventually(lambda: child.exit_code, nodes.refresh) == -signal.SIGKILL
    assert not is_alive(pid) and is_alive(survivor) and other.exit_code is None


def test_a_supervisor_that_is_terminated_while_it_waits_for_orders_does_not_abort():
    with subprocess.Popen(
        [sys.executable, "-m", "areal_megatron.launch.supervision.node", "--silence-s=180"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as node:
        node.stdout.readline()
        node.terminate()
        assert node.wait(20) == 128 + signal.SIGTERM


@pytest.fixture
def quick_nodes(monkeypatch):
    """As `nodes`, with a silence of two seconds."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    with Nodes(
        Srun([[sys.executable, "-m", "areal_megatron.launch.supervision.node", "--silence-s=2"]], 2), 2
    ) as nodes:
        nodes.gather(["n1"], 20)
        yield nodes


def test_a_supervisor_that_waits_for_its_folder_is_not_lost_and_goes_on(quick_nodes, tmp_path):
    """To open a pipe that nobody reads takes as long as to open a file of a server that does not answer."""
    os.mkfifo(tmp_path / "child.log")
    child = start(quick_nodes, tmp_path, "print('started')")
    begin = time.monotonic()
    while time.monotonic() < begin + 5:  # longer than the supervisor waits for its launcher, too
        quick_nodes.refresh()
        time.sleep(0.05)
    assert child.exit_code is None
    with (tmp_path / "child.log").open() as log:
        eventually(lambda: child.exit_code is not None, quick_nodes.refresh)
        assert child.exit_code == 0 and log.read() == "started\n"


LAUNCHER = """
import sys, time
from areal_megatron.launch.supervision.hosts import HostError, Nodes
from areal_megatron.launch.slurm import Srun
with Nodes(Srun([[sys.executable, "-m", "areal_megatron.launch.supervision.node", "--silence-s=3"]], 3), 3) as nodes:
    nodes.gather(["n1"], 20)
    print("gathered", flush=True)
    try:
        while True:
            nodes.refresh()
            time.sleep(0.05)
    except HostError as e:
        print(e, flush=True)
"""


def test_a_launcher_that_was_stopped_waits_before_it_takes_nodes_for_lost(monkeypatch):
    """As when a machine moves: all of it stands still, and the launcher goes on a moment before the others."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "gathered\n"
        (supervisor,) = psutil.Process(launcher.pid).children()
        try:
            for process in (supervisor, launcher):
                process.send_signal(signal.SIGSTOP)
            time.sleep(4)
            for process in (launcher, supervisor):
                process.send_signal(signal.SIGCONT)
                time.sleep(1)
            supervisor.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            assert launcher.stdout.readline() == "node n1 has said nothing for 3 s\n"
            assert time.monotonic() > begin + 1, "only one that is silent while the launcher listens is lost"
            supervisor.send_signal(signal.SIGCONT)
            assert launcher.wait(20) == 0
        finally:
            launcher.kill()
            with suppress(psutil.NoSuchProcess):
                supervisor.send_signal(signal.SIGCONT)


def test_a_supervisor_knows_whether_it_is_dismissed_or_left_alone():
    with Supervisor("n1") as supervisor:
        for last, dismissed in ((Leave(), True), (None, False)):
            orders = queue.Queue()
            orders.put(Present())
            orders.put(last)
            assert follow(supervisor, orders, 180) is dismissed
        orders = queue.Queue()
        begin = time.monotonic()
        for delay_s in (0.4, 0.8):
            threading.Timer(delay_s, orders.put, [Present()]).start()
        assert follow(supervisor, orders, silence_s=1.2) is False
        assert 2.0 <= time.monotonic() - begin < 8


def test_a_program_that_is_not_there_has_failed(nodes, tmp_path):
    nodes.start(StartOrder("n1", "child", ["/nowhere/python"], {}, str(tmp_path / "log"), []))
    assert eventually(lambda: nodes.by_name["child"].exit_code, nodes.refresh) == 127


def test_processes_end_with_their_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    channel = Srun([[sys.executable, "-m", "areal_megatron.launch.supervision.node", "--silence-s=180"]], 180)
    nodes = Nodes(channel, 180)
    nodes.gather(["n1"], 20)
    pid = int(eventually(start(nodes, tmp_path, SLEEPS).last_lines))
    channel._processes[0].stdin.close()
    eventually(lambda: not is_alive(pid))
    eventually(lambda: channel._processes[0].poll() is not None)
    with pytest.raises(HostError, match="srun, which holds the nodes' supervisors, ended with exit code 0"):
        eventually(lambda: False, nodes.refresh)


class Fixed:
    """A channel that delivers the events that it was given, and keeps the orders."""

    def __init__(self, *events):
        self.events = list(events)
        self.sent = []

    def send(self, order):
        self.sent.append(order)

    def receive(self):
        taken, self.events = self.events, []
        return taken


def test_nodes_that_are_missing_are_named_while_they_are_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(hosts, "_PROGRESS_S", 0.5)
    channel = Fixed(NodeHello("n1", [], 0, 1, "m"))
    nodes = Nodes(channel, 180)
    threading.Timer(1.2, lambda: channel.events.append(NodeHello("n2", [], 0, 1, "m"))).start()
    assert [hello.supervisor for hello in nodes.gather(["n1", "n2"], 20)] == ["n1", "n2"]
    said = capsys.readouterr().err.splitlines()
    assert said == [f"waiting for 1 of 2 nodes, {n} s so far: n2" for n in (1, 1)]


def test_nodes_that_do_not_answer_are_named():
    nodes = Nodes(Fixed(NodeHello("n1", [], 0, 1, "m")), 180)
    with pytest.raises(HostError, match=r"1 of 2 nodes did not answer within 0 s: n2"):
        nodes.gather(["n1", "n2"], 0.2)


@pytest.mark.parametrize(
    ("second", "continues"),
    [
        (["engine-1"], True),
        ([], True),
        (["engine-1.1"], True),
        (["engine-1", "trainer-0"], False),
        (["engine-0", "engine-1"], False),
        (["engine-0", "engine-1.1"], False),
    ],
)
def test_a_node_that_falls_silent_is_lost(capsys, tmp_path, second, continues):
    """The run continues without it if only engines were on it, and other engines are left. Engine 1 may have a part on
    each node."""
    channel = Fixed(NodeHello("n1", [], 0, 1, "m"), NodeHello("n2", [], 0, 1, "m"))
    nodes = Nodes(channel, 0.3)
    nodes.gather(["n1", "n2"], 5)
    for name in ("controller", "trainer-0", "engine-0", "engine-1", "engine-1.1"):
        if name == "engine-1.1" and name not in second:
            continue
        start(nodes, tmp_path, "", name, node="n2" if name in second else "n1")

    def refresh_for_a_while():
        for _ in range(15):  # each counts as a sixth of the silence at most
            time.sleep(0.05)
            channel.events = [Alive("n1")]
            nodes.refresh()

    if continues:
        refresh_for_a_while()
        assert nodes.lost == {*second, *(["engine-1"] if "engine-1.1" in second else [])}
        assert capsys.readouterr().err.count("node n2 has said nothing") == 1
        left = [order.name for order in channel.sent if isinstance(order, End)]
        assert left == ["engine-1"] * ("engine-1.1" in second), "what is left of an engine is ended"
    else:
        with pytest.raises(HostError, match="node n2 has said nothing"):
            refresh_for_a_while()

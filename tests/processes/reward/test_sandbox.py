"""Hostile programs in the sandbox; the tests look for their effects outside."""

import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from areal_megatron.config import ConfigError, RewardConfig
from areal_megatron.reward import sandbox
from areal_megatron.reward.function import load_function
from areal_megatron.reward.sandbox import Limits, SandboxError, check_isolation, run
from areal_megatron.reward.system_calls import ALLOWED
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers
from tests.support.hostile import HARMLESS, PRELUDE, PROGRAMS, WITHOUT_NAMESPACES
from tests.support.judging import scores_of

pytestmark = pytest.mark.usefixtures("isolation")
TOKEN = f"sandbox-test-{os.getpid()}"
SMALL = Limits(memory_mb=256, threads=16, scratch_mb=16, output_mb=1)


class Outside:
    """Files, processes and servers that a program might read, reach or harm."""

    def __init__(self, folder: Path):
        self.folder = folder / "files"
        self.folder.mkdir()
        self._secret = self.folder / "secret"
        self._secret.write_text(f"SECRET-{TOKEN}")
        self.victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self._unix = str(folder / "unix")
        self._servers = [
            self._server(*where)
            for where in (
                (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
                (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
                (socket.AF_UNIX, socket.SOCK_STREAM, self._unix),
                (socket.AF_UNIX, socket.SOCK_STREAM, "\0" + TOKEN),
            )
        ]
        self._before = self._state()

    @staticmethod
    def _server(family, kind, address) -> socket.socket:
        server = socket.socket(family, kind)
        server.bind(address)
        server.setblocking(False)
        if kind == socket.SOCK_STREAM:
            server.listen()
        return server

    def program(self, text: str) -> str:
        tcp, udp, *_ = (server.getsockname()[1] for server in self._servers[:2])
        names = {
            "SECRET_FILE": str(self._secret),
            "FOLDER": str(self.folder),
            "TOKEN": TOKEN,
            "PARENT": os.getpid(),
            "VICTIM": self.victim.pid,
            "TCP": tcp,
            "UDP": udp,
            "UNIX": self._unix,
        }
        return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + PRELUDE + text

    def _state(self) -> dict[str, object]:
        return {
            "files": {path.name: path.read_bytes() for path in self.folder.iterdir()},
            "shared memory": [path for path in Path("/dev/shm").iterdir() if TOKEN in path.name],
            "libraries": (os.stat("/usr/lib").st_mtime_ns, os.stat(os.__file__).st_mtime_ns),
            "root": sorted(os.listdir("/")),
            "victim": self._victim_ended(),
            "mounts": Path("/proc/self/mountinfo").read_text(),
            "host name": platform.node(),
        }

    def _victim_ended(self) -> bool:
        try:
            return bool(self.victim.wait(0.2))
        except subprocess.TimeoutExpired:
            return False

    def harm(self) -> list[str]:
        """Returns the names of what has changed, and of servers that were reached."""
        harmed = [name for name, value in self._state().items() if value != self._before[name]]
        for server in self._servers:
            with contextlib.suppress(BlockingIOError):
                if server.type == socket.SOCK_DGRAM:
                    server.recv(1)
                else:
                    server.accept()[0].close()
                harmed.append(f"server {server.getsockname()}")
        return harmed

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for server in self._servers:
            server.close()
        Path("/dev/shm", TOKEN).unlink(missing_ok=True)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOX_SECRET", TOKEN)
    place = Outside(tmp_path)
    yield place
    place.close()


def sandboxed() -> list[int]:
    """Returns the machine's processes in another pid namespace that run a program of this test."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            place = Path("/proc", str(process.pid))
            foreign = os.readlink(place / "ns/pid") != os.readlink("/proc/self/ns/pid")
            if foreign and TOKEN in (place / "root/program").read_text():
                found.append(process.pid)
    return found


def wait_until(condition, problem: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("program", "ended", "status", "stdout"),
    [
        ("print(input() + '!')", "exit", 0, "naïve ∑!\n"),
        ("import sys; print(len(sys.stdin.read()), flush=True); sys.exit(3)", "exit", 3, "7\n"),
        ("print(1, flush=True); raise ValueError", "exit", 1, "1\n"),
        ("import os; os.write(1, b'a\\xff\\xfeb')", "exit", 0, "a��b"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "signal", -15, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal", -9, ""),
        ("import time; print(1, flush=True); time.sleep(100)", "wall_s", None, "1\n"),
        ("while True: print('x' * 1023)", "output_mb", None, ("x" * 1023 + "\n") * 1024),
        (
            "import os; open('a', 'w').write('x'); print(os.getcwd(), os.listdir(), os.getuid(), os.getpid())",
            "exit",
            0,
            "/tmp ['a'] 1000 2\n",
        ),
        (
            "import os; print(dict(os.environ))",
            "exit",
            0,
            "{'HOME': '/tmp', 'TMPDIR': '/tmp', 'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8'}\n",
        ),
        (
            "import sqlite3, ssl, lzma, decimal, threading, asyncio; asyncio.run(asyncio.sleep(0)); "
            "t = threading.Thread(target=print, args=(1,)); t.start(); t.join()",
            "exit",
            0,
            "1\n",
        ),
    ],
)
def test_a_program_has_input_output_and_an_end(program, ended, status, stdout):
    outcome = run(program, "naïve ∑", Limits(wall_s=3 if ended == "wall_s" else 60, output_mb=1))
    assert (outcome.ended, outcome.status, outcome.stdout) == (ended, status, stdout), outcome.stderr


def test_cpu_time_is_that_of_all_threads():
    spin = "import threading\nfor _ in range(2): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"
    outcome = run(spin, limits=Limits(wall_s=100, cpu_s=1))
    assert (outcome.ended, outcome.status) == ("cpu_s", -signal.SIGXCPU)


def test_a_program_sees_no_more_of_stderr_than_its_first_64_kib_kept():
    outcome = run("import sys; sys.stderr.write('x' * 10**7); print('on')")
    assert (outcome.good, outcome.stdout, outcome.stderr) == (True, "on\n", "x" * 65536)


def test_memory_is_held_below_its_limit():
    """The peak is the kernel's own count for the largest descendant, in KiB."""
    code = """
import resource
from areal_megatron.reward.sandbox import Limits, run
outcome = run("data = []\\nwhile True: data.append(bytearray(1 << 20))", limits=Limits(memory_mb=128))
assert outcome.status == 1 and "MemoryError" in outcome.stderr, outcome
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
    largest_kib = int(subprocess.check_output([sys.executable, "-c", code], timeout=60))
    assert 64 << 10 < largest_kib < 128 << 10


def test_hostile_programs_reach_nothing_and_end_in_time(outside):
    assert len(PROGRAMS) >= 100 and len(set(PROGRAMS.values())) == len(PROGRAMS)

    def attack(name: str):
        for wall_s in (1.5, 3, 6, 12):  # a busy machine may not get as far as the program in the shorter ones
            began = time.monotonic()
            outcome = run(outside.program(PROGRAMS[name]), "input", replace(SMALL, wall_s=wall_s))
            late_s = time.monotonic() - began - wall_s
            if outcome.stdout.startswith("began"):
                break
        return outcome, late_s

    with ThreadPoolExecutor(4) as pool:
        results = dict(zip(PROGRAMS, pool.map(attack, PROGRAMS), strict=True))
    for name in [name for name, (_, late_s) in results.items() if late_s > 1]:
        results[name] = attack(name)  # alone: it was the machine that was late, or it is late again
    for name, (outcome, late_s) in results.items():
        text = outcome.stdout + outcome.stderr
        assert outcome.stdout.startswith("began"), f"{name} never ran: {outcome}"
        assert "ESCAPED" not in text and f"SECRET-{TOKEN}" not in text, f"{name}: {text}"
        assert late_s <= 1, f"{name} lived for {late_s:.2f} s too long"
    assert outside.harm() == []
    assert sandboxed() == []


@pytest.mark.parametrize("name", HARMLESS)
def test_the_same_programs_do_escape_without_a_sandbox(outside, name):
    process = subprocess.run(
        [sys.executable, "-c", outside.program(PROGRAMS[name])],
        cwd=outside.folder,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert "ESCAPED" in process.stdout, process.stdout + process.stderr
    if name.startswith(("write", "signal another", "connect", "datagram", "Unix", "abstract")):
        assert outside.harm()


def test_workers_stay_healthy_under_hostile_programs(outside):
    """Two workers score hostile programs as answers of a policy, with a limit of 4.8 s for each. The last fifth of the
    timeout is for ending them, which takes a second where many processes share a core."""
    names = [
        "fork bomb",
        "thread bomb",
        "memory by doubling",
        "memory in threads",
        "fill the scratch folder",
        "endless output on both",
        "output that is no text",
        "sleep and ignore every signal",
        "kill everything",
        "close all descriptors and stay",
        "exit with a thread that stays",
        "crash",
        "stop itself",
    ]
    tests = json.dumps({"inputs": ["3\n"], "outputs": ["9\n"]})
    bad = [Answer("", f"```python\n{outside.program(PROGRAMS[name])}\n```", tests) for name in names]
    good = Answer("", "```python\nprint(int(input()) ** 2)\n```", tests)

    async def scores():
        pool = RewardWorkers(RewardConfig(function="code", timeout_s=6, workers=2))
        await pool.start()
        try:
            before = {worker._process.pid for worker in pool._workers}
            hostile = await asyncio.gather(*(scores_of(pool, [answer]) for answer in bad))
            pool._config.timeout_s = 60
            after = await scores_of(pool, [good, good])
            return hostile, after, pool.failures, before ^ {worker._process.pid for worker in pool._workers}
        finally:
            await pool.close()

    hostile, after, failures, replaced = asyncio.run(scores())
    assert hostile == [[0.0]] * len(bad)
    assert (after, failures, replaced) == ([1.0, 1.0], 0, set())
    assert sandboxed() == []


@pytest.mark.parametrize("target", ["worker", "guard"])
def test_a_program_dies_with_the_worker_and_with_the_guard(target):
    """The program clears its parent-death signal and ignores every signal that it can."""
    stubborn = PRELUDE + f"# {TOKEN}\nlibc.prctl(1, 0, 0, 0, 0)\nignore_signals()\nforever()"
    code = f"from areal_megatron.reward.sandbox import Limits, run\nrun({stubborn!r}, limits=Limits(wall_s=100))"
    worker = psutil.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    wait_until(lambda: len(sandboxed()) == 2, "the program does not start", 60)
    (worker if target == "worker" else worker.children()[0]).kill()
    assert worker.wait(30) != 0
    wait_until(lambda: not sandboxed(), "the program lives on", 5)


def test_a_sandbox_that_cannot_start_is_no_outcome(monkeypatch):
    monkeypatch.setattr("areal_megatron.reward.sandbox._LIBRARIES", ("/proc/self/status",))
    with pytest.raises(SandboxError, match="No such file"):
        run("print(1)")


TRY = {
    "check": "from areal_megatron.reward.sandbox import check_isolation\ncheck_isolation()",
    "load": "from areal_megatron.reward.function import load_function\nload_function('code')",
    "workers": "import asyncio\nfrom areal_megatron.config import RewardConfig\n"
    "from areal_megatron.reward.workers import RewardWorkers\n"
    "asyncio.run(RewardWorkers(RewardConfig(function='code')).start())",
}


@pytest.mark.parametrize("how", TRY)
def test_code_rewards_refuse_to_start_where_nothing_isolates(how):
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_NAMESPACES + TRY[how]], capture_output=True, text=True, timeout=60
    )
    last = process.stderr.splitlines()[-1]
    assert process.returncode == 1
    assert last.startswith(f"{ConfigError.__module__}.ConfigError: reward.function: programs cannot be isolated"), last
    assert "unshare: No space left on device" in last


@pytest.mark.parametrize("call", ["semget 64 190", "inotify_init1 294 26", "flock 73 32", "unshare 272 97"])
def test_a_filter_that_lets_a_call_through_is_noticed(monkeypatch, call):
    monkeypatch.setattr("areal_megatron.reward.system_calls.ALLOWED", f"{ALLOWED}, {call}")
    sandbox._calls.cache_clear()
    try:
        with pytest.raises(ConfigError, match=f"what failed: a program can call {call.split()[0]}"):
            check_isolation()
    finally:
        sandbox._calls.cache_clear()


def test_this_machine_isolates():
    check_isolation()
    assert load_function("code", 20).keywords == {"limit_s": 16}

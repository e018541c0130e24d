"""What tests of whole runs share: a tiny world, and runs started as a user starts them."""

import atexit
import ctypes
import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from areal_megatron.config import ConfigError
from areal_megatron.reward.sandbox import check_isolation
from areal_megatron.run.folder import RunFolder
from tests.support.living import command_of
from tests.support.traces import Traces
from tools.make_arithmetic import save_model
from tools.smollm2 import installed

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Folder with the demo's untrained model and data. Each worker of pytest-xdist has a copy of what one has made."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-world"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            making = shared.with_suffix(".making")
            subprocess.run([sys.executable, ROOT / "tools" / "make_arithmetic.py", making], check=True, timeout=500)
            making.rename(shared)
    return shutil.copytree(shared, tmp_path_factory.mktemp("world"), dirs_exist_ok=True)


@pytest.fixture(scope="session")
def few_examples(world):
    """Some of the world's supervised examples: each process of a run reads all that its config names."""
    path = world / "few-sft.jsonl"
    path.write_text("".join((world / "sft.jsonl").read_text().splitlines(keepends=True)[:500]))
    return path


@pytest.fixture(scope="session")
def of_family(world):
    """Makes an untrained model of another family for the world's data, and returns its folder."""

    def make(family: str) -> Path:
        import torch

        folder = world / f"model-{family}"
        if not folder.exists():
            with torch.random.fork_rng():
                save_model(folder, 1, family)
        return folder

    return make


@pytest.fixture(scope="session")
def tau2_packages(tmp_path_factory):
    """Folder with τ²-bench's package and what it needs, for PYTHONPATH. It is installed: for soak tests."""
    folder = tmp_path_factory.mktemp("tau2") / "packages"
    assert installed(ROOT / "requirements-tau2.lock", folder) == ""
    return folder


@pytest.fixture(scope="session")
def isolation():
    """Skips the test where programs cannot be isolated: there `code` rewards refuse to start."""
    try:
        check_isolation()
    except ConfigError as e:
        pytest.skip(str(e))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Has no collection of garbage visit what is imported and collected, a million objects and more: a quarter of the
    time of importing it, and half a second of whatever test comes to it later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # nanobind would print what it finds left


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has files of whole runs take turns with those of tests/processes, many of which wait, and of tests/unit.

    Workers of pytest-xdist take files in this order: all at once should neither ask for every core nor for none. The
    longest files are those of tests/parallel and tests/processes/workflows, so they come first, and no worker is left
    alone with one: short ones come last.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    ends = {"processes": 0.9, "unit": 1.0}
    kinds: dict[float, list[Path]] = {}  # by where their last file comes
    for path in files:
        kinds.setdefault(ends.get(path.relative_to(ROOT / "tests").parts[0], 0.8), []).append(path)
    turns = [(end, paths if end == 1.0 else paths[::-1]) for end, paths in kinds.items()]
    places = [(end * number / len(paths), path) for end, paths in turns for number, path in enumerate(paths)]
    items[:] = [item for _, path in sorted(places, key=lambda place: place[0]) for item in files[path]]


def take_interrupts() -> None:
    """In a new process: a shell has its background jobs ignore them, and all that these start. It is terminated when
    the test that has started it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class LocalRun:
    """`areal train` as its own process; output in one file."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        output: Path | None = None,
        enter: Sequence[str] = (),
        config: str = "configs/tiny_cpu.yaml",
    ):
        """`enter`: the beginning of the command, as of support/slow_link.py."""
        self.folder = folder
        self.traces = Traces(folder.parent)
        self._output = output or folder.with_suffix(".out")
        command = [
            *enter,
            sys.executable,
            "-m",
            "areal_megatron.launch.local",
            config,
            f"name={folder.name}",
            f"runs_dir={folder.parent}",
            *overrides,
        ]
        environment = os.environ | {"TMPDIR": str(self.traces.temporary)}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output.open("wb"),
            stderr=subprocess.STDOUT,
            preexec_fn=take_interrupts,
        )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self, timeout_s: float = 400) -> int:
        return self.process.wait(timeout_s)

    def wait_for(self, condition, timeout_s: float = 240):
        """The first true value of condition(); fails if the run ends before or nothing comes in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self.process.poll() is None, f"the run ended early:\n{self.output}"
            assert time.monotonic() < deadline, f"nothing within {timeout_s} s:\n{self.output}"
            time.sleep(0.1)
        if self.process.poll() is None:
            self.traces.watch(self.members())
        return value

    def pid(self, name: str) -> int:
        """Returns the process id of the controller, a trainer rank, or an engine of any model (vLLM's server on its
        port)."""
        role, _, index = name.partition("-")
        sign = {
            "controller": lambda command: "areal_megatron.controller.controller" in command,
            "trainer": lambda command: "areal_megatron.train" in command and command[-1] == index,
        }.get(role, lambda command: RunFolder(self.folder).endpoint(name).rpartition(":")[2] in command)
        return next(p.pid for p in psutil.Process(self.process.pid).children() if sign(command_of(p)))

    def members(self) -> list[psutil.Process]:
        """The launcher and every process below it."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]


@pytest.fixture
def local_run(tmp_path):
    """Starts runs; whatever a failed test leaves running is ended."""
    runs = []

    def start(name: str, *overrides: str, output: str = "", **settings) -> LocalRun:
        """`output`: name of the file for the launcher's output, if the run's own is still needed. `settings`: as of
        LocalRun."""
        runs.append(LocalRun(tmp_path / name, *overrides, output=tmp_path / output if output else None, **settings))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(30)
        run.traces.check()
        assert not run.traces.wildcards, "listened on every address of the machine"


os.environ.setdefault("OMP_NUM_THREADS", "1")

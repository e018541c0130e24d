"""Disturbs a real run in every way that it has to survive, in random order, and then audits it.

    python -m tests.support.chaos runs/NAME --faults 100 --seed 1 configs/tiny_cpu.yaml key=value …

The run begins in namespaces of its own (chaos_world.py), where the disk, the network and the clocks can fail too. It is
started again by the same command whenever it has ended and can be resumed, and goes on to its end after the last fault.

A line for each fault says how long it took until a batch was trained again; RUN/chaos.jsonl keeps them. Exit code 0:
the run survived everything and the audit is clean; 1: it did not; 2: wrong input.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from areal_megatron.config import ConfigError
from areal_megatron.launch.supervision.start import POOLS
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.process.shown import speak_utf8
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.process_names import CONTROLLER, is_engine
from tests.support import chaos_world
from tests.support.chaos_world import INTERFACE, World

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCHER = "launcher"
STOP_S = (5.0, 60.0)
"""How long a process is stopped, or a machine cut off."""
GONE_S = (5.0, 20.0)
"""How long the disk stays full, or the service of rewards away."""
_CLOCK_S = 3600
_PAUSE_S = (0.0, 5.0)
_RECOVERY_S = 900.0
_RESUMABLE = {3, 75, -signal.SIGKILL}
"""Exit codes of a launcher whose run the same command resumes."""


class NotSurvived(Exception):
    """The run did not do what it should have."""


class NotNow(Exception):
    """This fault cannot be made at the moment, or in this run."""


class Ended(Exception):
    """The run has done all its updates."""


class Victim:
    """A run, and what can be done to it; `command` starts or resumes it."""

    def __init__(self, world: World, command: list[str], service: list[str]):
        self.run, self.world, self.command, self._service_command = RunFolder(world.folder), world, command, service
        self._service: subprocess.Popen | None = None
        self._launcher: subprocess.Popen | None = None
        self._adding: subprocess.Popen | None = None
        self.output, self._added_output = world.disk / "launcher.out", world.disk / "engines.out"

    def start(self) -> None:
        """Starts or resumes the run, and the service of its rewards if that does not run."""
        if self._service_command and self._service is None:
            self._service = self._begin_service()
        self._launcher = _begin(self.command, self.output)

    def keep_alive(self) -> None:
        """Resumes the run if its launcher has ended. Raises Ended if all is done, NotSurvived if it cannot resume."""
        if (code := self._launcher.poll()) == 0:
            raise Ended
        if code in _RESUMABLE:
            self.start()
        elif code is not None:
            last = self.output.read_text(encoding="utf-8").splitlines()[-1:]
            raise NotSurvived(f"the launcher ended with exit code {code}: {''.join(last)}")

    def wait_for_batch(self) -> None:
        """Returns when another batch has been trained. Raises NotSurvived after _RECOVERY_S."""
        trained, deadline = self.batches(), time.monotonic() + _RECOVERY_S
        while self.batches() <= trained:
            self.keep_alive()
            if time.monotonic() > deadline:
                raise NotSurvived(f"no batch was trained within {_RECOVERY_S:.0f} s; see {self.run.folder}")
            time.sleep(0.2)

    def batches(self) -> int:
        """Returns the number of batches trained so far, also those that were done again."""
        return sum(line["kind"] == "update" for line in read_metrics(self.run)) if self.run.metrics.exists() else 0

    def launcher(self) -> psutil.Process | None:
        return psutil.Process(self._launcher.pid) if self._launcher.poll() is None else None

    def process(self, name: str) -> psutil.Process | None:
        """Returns the process of the run with this name, None if it has none now."""
        if name == LAUNCHER:
            return self.launcher()
        if is_engine(name):  # vLLM's server, which knows nothing of a run
            try:
                words = ("--port", self.run.endpoint(name).rpartition(":")[2])
            except (RunError, OSError):
                return None
            return _find(lambda command: _has(command, *words))
        module = "areal_megatron.controller.controller" if name == CONTROLLER else "areal_megatron.train"
        index = None if name == CONTROLLER else name.rpartition("-")[2]
        return _find(
            lambda command: (
                module in command
                and _has(command, "--run", str(self.run.folder))
                and (index is None or _has(command, "--index", index))
            )
        )

    def living(self) -> dict[str, list[str]]:
        """Returns the names of the run's processes that live, by role."""
        logs = sorted(path.stem for path in (self.run.folder / "logs").glob("*.log"))
        roles = {
            "engine": [name for name in self.run.announced_engines() if self.process(name)],
            "trainer": [name for name in logs if re.fullmatch(r"trainer-\d+", name) and self.process(name)],
            CONTROLLER: [CONTROLLER] if self.process(CONTROLLER) else [],
            LAUNCHER: [LAUNCHER] if self.launcher() else [],
        }
        return {role: names for role, names in roles.items() if names}

    @contextlib.contextmanager
    def no_service(self) -> Iterator[None]:
        """Inside the service of rewards is not there; afterwards there is a new one."""
        if self._service is None:
            raise NotNow
        self._service.kill()
        self._service.wait()
        yield
        self._service = self._begin_service()

    def _begin_service(self) -> subprocess.Popen:
        return _begin(self._service_command, self.output.with_name("service.out"))

    def any_of(self, names: list[str], rng: random.Random) -> tuple[str, psutil.Process]:
        """Returns one of the names and its process. Raises NotNow if there is none."""
        name = rng.choice(names) if names else ""
        if not name or (process := self.process(name)) is None:
            raise NotNow
        return name, process

    def anyone(self, rng: random.Random) -> tuple[str, psutil.Process]:
        """Returns the name and the process of any that lives."""
        return self.any_of([name for names in self.living().values() for name in names], rng)

    def kill_all(self) -> None:
        """Kills the launcher and everything that it has started. Raises NotNow if there is none."""
        if (launcher := self.launcher()) is None:
            raise NotNow
        others = launcher.children(recursive=True)
        if guardians := [
            process for process in others if "areal_megatron.launch.supervision.guardian" in _command(process)
        ]:
            folder = _command(guardians[0])[-1]
            others += [
                p for p in psutil.process_iter() if p not in others and _temporary(p) == folder
            ]  # without parents
        for process in (launcher, *others):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(others, 60)
        self._launcher.wait(60)  # psutil would take its exit code

    def add_engine(self) -> None:
        """Starts one more engine, on the second machine."""
        self._added_output.unlink(missing_ok=True)
        python, module = [*self.world.far(), self.world.python], ["-m", "areal_megatron.launch.engines"]
        own = ["add", str(self.run.folder), "--count=1", f"--python=rollout={self.world.python}"]
        self._adding = _begin([*python, *module, *own], self._added_output)

    def added(self) -> str | None:
        """Returns the name of the engine that was added; None if there is none, or none any more."""
        if self._adding is None or self._adding.poll() is not None:
            return None
        found = re.search(r"started (engine-\d+)", self._added_output.read_text(encoding="utf-8"))
        return found and found[1]

    def end(self) -> None:
        """Ends what this program has started."""
        for process in filter(None, (self._adding, self._launcher, self._service)):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(120)
            process.kill()

    def finish(self) -> None:
        """Waits until the run ends. Raises NotSurvived if it does not."""
        with contextlib.suppress(Ended):
            while True:
                self.wait_for_batch()


def kill(victim: Victim, role: str, rng: random.Random) -> str:
    name, process = victim.any_of(victim.living().get(role, []), rng)
    process.kill()
    return name


def kill_launcher(victim: Victim, rng: random.Random) -> str:
    kill(victim, LAUNCHER, rng)
    return "its guardian ends the run; it is started again"


def kill_reward_worker(victim: Victim, rng: random.Random) -> str:
    controller = victim.process(CONTROLLER)
    workers = [p for p in controller.children() if "areal_megatron.reward.worker" in _command(p)] if controller else []
    if not workers:
        raise NotNow
    worker = rng.choice(workers)
    worker.kill()
    return f"process {worker.pid}"


def kill_service(victim: Victim, rng: random.Random) -> str:
    seconds = rng.uniform(*GONE_S)
    with victim.no_service():
        time.sleep(seconds)
    return f"for {seconds:.0f} s"


def stop(victim: Victim, rng: random.Random) -> str:
    """Stops one process and what it has started, as a machine does that is moved or swaps."""
    (name, process), seconds = victim.anyone(rng), rng.uniform(*STOP_S)
    stopped = [process] if name == LAUNCHER else [process, *process.children(recursive=True)]
    for each in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.suspend()
    time.sleep(seconds)
    for each in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.resume()
    return f"{name} for {seconds:.0f} s"


def set_clock(victim: Victim, rng: random.Random) -> str:
    if not victim.world.has_clocks:
        raise NotNow
    (name, process), ahead_s = victim.anyone(rng), rng.choice((-_CLOCK_S, _CLOCK_S))
    victim.world.set_clock(process.pid, ahead_s)
    return f"of {name} by {ahead_s:+d} s"


def fill_disk(victim: Victim, rng: random.Random) -> str:
    seconds = rng.uniform(*GONE_S)
    with victim.world.full_disk():
        time.sleep(seconds)
    return f"for {seconds:.0f} s"


def tear_lines(victim: Victim, rng: random.Random) -> str:
    """Ends everything at once and leaves half a line at the end of every record, as a loss of power does."""
    victim.kill_all()
    torn = 0
    for path in sorted(victim.run.folder.rglob("*.jsonl")):
        if lines := path.read_bytes().splitlines():
            with path.open("ab") as file:
                file.write(lines[-1][: rng.randint(1, max(1, len(lines[-1]) - 1))])
            torn += 1
    return f"in {torn} files, after everything was killed"


def start_twice(victim: Victim, rng: random.Random) -> str:
    begun = time.monotonic()
    done = subprocess.run(
        victim.command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_RECOVERY_S,
        encoding="utf-8",
        errors="replace",
    )
    seconds = time.monotonic() - begun
    if done.returncode != 2:
        raise NotSurvived(f"a second launcher ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return f"refused after {seconds:.1f} s: {done.stderr.splitlines()[-1]}"


def cut_network(victim: Victim, rng: random.Random) -> str:
    if not (name := victim.added()):
        raise NotNow
    seconds = rng.uniform(*STOP_S)
    with victim.world.no_network():
        time.sleep(seconds)
    return f"of {name} for {seconds:.0f} s"


def add_or_drain(victim: Victim, rng: random.Random) -> str:
    name = victim.added()
    if name is None:
        victim.add_engine()
        return "one engine more is started"
    drained = subprocess.run(
        [
            sys.executable,
            "-m",
            "areal_megatron.launch.engines",
            "drain",
            str(victim.run.folder),
            name,
            "--timeout-s=300",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    return f"{name} is to leave: {(drained.stdout + drained.stderr).strip()}"


FAULTS: dict[str, Callable[[Victim, random.Random], str]] = {
    "kill an engine": lambda victim, rng: kill(victim, "engine", rng),
    "kill a trainer": lambda victim, rng: kill(victim, "trainer", rng),
    "kill the controller": lambda victim, rng: kill(victim, CONTROLLER, rng),
    "kill the launcher": kill_launcher,
    "kill a reward worker": kill_reward_worker,
    "kill the reward service": kill_service,
    "stop": stop,
    "clock": set_clock,
    "full disk": fill_disk,
    "torn lines": tear_lines,
    "second launcher": start_twice,
    "network": cut_network,
    "add or drain": add_or_drain,
}


def disturb(victim: Victim, rng: random.Random, faults: int) -> Iterator[dict]:
    """Makes so many faults, each kind as often as the others, and yields what came of each. Raises NotSurvived."""
    number, kinds = 0, []
    victim.wait_for_batch()
    while number < faults:
        kinds = kinds or rng.sample(list(FAULTS), len(FAULTS))
        kind = kinds.pop()
        time.sleep(rng.uniform(*_PAUSE_S))
        victim.keep_alive()
        try:
            what = FAULTS[kind](victim, rng)
        except (NotNow, psutil.NoSuchProcess):
            continue
        begun = time.monotonic()
        victim.wait_for_batch()
        number += 1
        yield {"number": number, "kind": kind, "what": what, "recovery_s": round(time.monotonic() - begun, 1)}


def table(faults: list[dict]) -> str:
    """Returns a line for each kind of fault: how many, and the median and longest time until a batch was trained."""
    by_kind = defaultdict(list)
    for fault in faults:
        by_kind[fault["kind"]].append(fault["recovery_s"])
    lines = [f"{'fault':<22}{'times':>6}{'median s':>10}{'longest s':>11}"]
    lines += [
        f"{kind:<22}{len(times):>6}{statistics.median(times):>10.1f}{max(times):>11.1f}"
        for kind, times in sorted(by_kind.items())
    ]
    return "\n".join(lines)


def _begin(command: list[str], output: Path) -> subprocess.Popen:
    with output.open("ab") as file:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _temporary(process: psutil.Process) -> str:
    """Returns a process's folder for temporary files, which the children of one launcher share."""
    try:
        return process.environ().get("TMPDIR", "")
    except psutil.Error:
        return ""


def _find(is_it: Callable[[list[str]], bool]) -> psutil.Process | None:
    return next((process for process in psutil.process_iter() if is_it(_command(process))), None)


def _has(command: list[str], word: str, following: str) -> bool:
    return (word, following) in itertools.pairwise(command)


def _start_command(world: World, config: str, overrides: list[str]) -> list[str]:
    return [
        world.python,
        "-m",
        "areal_megatron.launch.local",
        config,
        f"name={world.folder.name}",
        f"runs_dir={world.folder.parent}",
        f"machine.host={INTERFACE}",
        *overrides,
        "resume=auto",
        "--restarts=100000",
        *(f"--python={pool}={world.python}" for pool in POOLS),
    ]


def main() -> int:
    speak_utf8()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("config", help="of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--faults", type=int, required=True, help="make so many faults")
    parser.add_argument("--seed", type=int, default=1, help="of the kinds, victims, moments and lengths of the faults")
    parser.add_argument("--disk-mb", type=int, default=512, help="size of the disk; default: 512")
    parser.add_argument("--service", metavar="COMMAND", default="", help="of rewards, which runs beside the run")
    options = parser.parse_intermixed_args()
    folder = options.run.absolute()
    if folder.exists():
        parser.error(f"{folder} exists: choose another name or remove it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        chaos_world.enter()
        with World(folder, options.disk_mb) as world:
            command = _start_command(world, options.config, options.overrides)
            victim = Victim(world, command, shlex.split(options.service))
            victim.start()
            try:
                return _disturb_and_audit(victim, random.Random(options.seed), options.faults)
            finally:
                victim.end()
    except (OSError, subprocess.CalledProcessError) as e:
        print(f"error: this machine gives no namespaces for a run: {e}", file=sys.stderr)
        return 2


def _disturb_and_audit(victim: Victim, rng: random.Random, count: int) -> int:
    faults, problems = [], []
    try:
        for fault in disturb(victim, rng, count):
            faults.append(fault)
            said = "{number:4}  {kind:<21} {what}; a batch after {recovery_s:.1f} s".format(**fault)
            print(said, flush=True)
        victim.finish()
    except Ended:
        print("the run has done all its updates")
    except NotSurvived as e:
        problems.append(str(e))
    print(table(faults))
    try:
        problems += audit(victim.run)
    except ConfigError as e:
        problems.append(str(e))
    with contextlib.suppress(OSError), (victim.run.folder / "chaos.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(fault) + "\n" for fault in faults)
    for problem in problems:
        print(problem)
    print(f"{len(faults)} faults of {len({fault['kind'] for fault in faults})} kinds, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

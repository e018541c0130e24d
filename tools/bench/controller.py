"""The capacity of the controller on one core: requests in flight, trajectories a second, delay of its event loop.

    python tools/bench/controller.py [--in-flight 30000] [--rate 2000] [--tokens 500] [--engines 32] [--batch 4096]
        [--agent-s 0] [--seconds 60] [--json FILE] [--out FOLDER]

The real controller runs alone on core 0. On core 1 are the reward worker, stand-in engines that compute nothing
(standin_engines.py: real HTTP, and the arrays that engines answer with) and a trainer that only takes batches. Answers
are requested in groups of 16, one HTTP request a group, as in a run. The engines' response time makes the offered load
a quarter more than the rate aimed at; what is printed is what the controller processed.

With `--agent-s 1` all trajectories are episodes of an agent that computes in Python, before and after an answer of the
model, until its process has used another second. So these processes compute all the time. They share the controller's
core, as they do at worst.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil

from areal_megatron.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MachineConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from areal_megatron.config.config_file import load, save
from areal_megatron.observe.metrics import read_status
from areal_megatron.observe.status import Status
from areal_megatron.process.files import new_folder, write_json
from areal_megatron.protocol import ControllerClient, Delivered, Hello, NextBatch, NotYet, Publish, Trained
from areal_megatron.run.folder import RunFolder
from areal_megatron.workflows.episode import Episode
from tools.bench import common
from tools.bench.common import ROOT

GROUP = 16
SLEEP_S = 0.01


@dataclass(frozen=True)
class Load:
    """What the controller has to do."""

    in_flight: int
    """Trajectories that engines hold at once."""
    rate: float
    """Trajectories a second that are aimed at."""
    tokens: int
    """Tokens of an answer."""
    engines: int
    batch: int
    """Trajectories of a batch."""
    agent_s: float = 0.0
    """How long an agent computes before and after each answer, in seconds; 0: no agents."""

    @property
    def answer_s(self) -> float:
        """The mean time of a request, in seconds."""
        return 1.0 if self.agent_s else self.in_flight / (1.25 * self.rate)


def reward(prompt: str, response: str, answer: str) -> float:
    return float(len(response) % 2)


async def agent(episode: Episode) -> float:
    """Computes, asks, and computes again."""
    for turn in range(episode.turns):
        end = time.process_time() + float(os.environ["BENCH_AGENT_S"])
        while time.process_time() < end:
            await asyncio.sleep(0)
        if turn == 0:
            await episode.sample()
    return 1.0


def make_run(folder: Path, asked: Load) -> RunFolder:
    subprocess.run([sys.executable, ROOT / "tools" / "make_arithmetic.py", folder / "world"], check=True, timeout=300)
    world = folder / "world"
    model = msgspec.json.decode((world / "model" / "config.json").read_bytes())
    write_json(world / "model" / "config.json", model | {"max_position_embeddings": 64 + asked.tokens})
    each = -(-asked.in_flight // (asked.engines * GROUP)) * GROUP
    config = Config(
        name="run",
        runs_dir=str(folder),
        updates=10**6,
        batch_size=asked.batch,
        model=ModelConfig(str(world / "model"), "float32"),
        data=DataConfig(str(world / "train.jsonl")),
        machine=MachineConfig(device="cpu", peer_timeout_s=max(120, 4 * asked.answer_s)),
        checkpoint=CheckpointConfig(),
        reward=RewardConfig("tools.bench.controller:reward"),
    )
    config.rollout = RolloutConfig(
        engines=asked.engines,
        group_size=GROUP,
        max_staleness=-(-2 * asked.in_flight // asked.batch),
        max_running=each,
        max_new_tokens=asked.tokens,
    )
    if asked.agent_s:
        config.rollout.workflow, config.rollout.turns = "tools.bench.controller:agent", 2
    run = RunFolder(folder / "run")
    run.create()
    save(config, run.config)
    return run


def train(run: RunFolder, over: Callable[[], bool]) -> None:
    """Takes batches as fast as they come and reports every version as delivered at once."""
    with ControllerClient(run.endpoint("controller", 60), run.keys, "trainer-0", 120) as client:
        client.request(Hello(0))
        version = 0
        while not over():
            if isinstance(client.request(NextBatch(0, version, version)), NotYet):
                continue
            client.request(Trained(version, version, True, {}))
            version += 1
            for link in client.request(Publish(version, "127.0.0.1:1")).links:
                client.request(Delivered(link.engine, link.generation, version, 0.1, 0))


class Lateness:
    """Measures how much later than requested the event loop wakes a task."""

    def __init__(self):
        self.seconds: list[float] = []

    async def watch(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(SLEEP_S)
            self.seconds.append(time.perf_counter() - begun - SLEEP_S)


def control(folder: Path) -> None:
    """Runs the real controller with a task beside it that measures lateness; the main function of its process."""
    from areal_megatron.controller.controller import Controller

    run = RunFolder(folder / "run")

    async def live() -> None:
        config = load(run.config)
        controller, late, process = Controller(config, run), Lateness(), psutil.Process()
        life, watch = asyncio.create_task(controller.live()), asyncio.create_task(late.watch())
        samples = []
        while not life.done() and not (folder / "over").exists():
            await asyncio.sleep(1.0)
            engines, schedule = controller.fleet.engines, controller.schedule
            samples.append(
                {
                    "time": time.monotonic(),
                    "in_flight": sum(e.running for e in engines),
                    "groups": schedule.version * config.groups_per_batch
                    + len(schedule.training)
                    + len(schedule.finished),
                    "rss_gb": process.memory_info().rss / 2**30,
                    "cpu_s": sum(process.cpu_times()[:2]),
                    "late": len(late.seconds),
                }
            )
        if life.done():
            life.result()
        watch.cancel()
        (folder / "samples.json").write_bytes(msgspec.json.encode({"samples": samples, "late": late.seconds}))
        life.cancel()
        with suppress(asyncio.CancelledError):
            await life
        await controller.close()

    asyncio.run(live())


def measure(folder: Path, asked: Load, seconds: float) -> dict[str, float]:
    run = make_run(folder, asked)
    first, *_, last = sorted(os.sched_getaffinity(0))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BENCH_AGENT_S": str(asked.agent_s)}
    engines = Path(__file__).with_name("standin_engines.py")

    def start(core: int, *command: object) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            encoding="utf-8",
            errors="replace",
        )

    os.sched_setaffinity(0, {last})
    processes = [start(last, engines, asked.engines, asked.answer_s, asked.tokens, 1 if asked.agent_s else GROUP)]
    try:
        port = processes[0].stdout.readline().strip()
        run.begin()
        for engine in range(asked.engines):
            run.announce(f"engine-{engine}", f"http://127.0.0.1:{port}/{engine}")
        processes.append(start(first, __file__, "--controller", folder))
        trainer = threading.Thread(target=train, args=(run, (folder / "over").exists), daemon=True)
        trainer.start()
        deadline, steady = time.monotonic() + 120 + 10 * asked.answer_s, 2 + asked.in_flight // asked.batch
        while not _is_steady(read_status(run), asked, steady):
            if time.monotonic() > deadline or processes[-1].poll() is not None:
                raise SystemExit(f"error: the controller did not reach a steady state; its folder: {folder}")
            time.sleep(0.2)
        time.sleep(seconds)
        (folder / "over").touch()
        processes[-1].wait(60)
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait(10)
    return figures((folder / "samples.json").read_bytes(), seconds)


def _is_steady(status: Status, asked: Load, version: int) -> bool:
    if asked.agent_s:
        return status.running_groups * GROUP >= asked.in_flight
    return status.version >= version


def figures(report: bytes, seconds: float) -> dict[str, float]:
    """Returns the figures of the last `seconds`."""
    report = msgspec.json.decode(report)
    last = report["samples"][-1]
    window = [sample for sample in report["samples"] if sample["time"] >= last["time"] - seconds]
    first, elapsed = window[0], last["time"] - window[0]["time"]
    late = np.array(report["late"][first["late"] :])
    return {
        "trajectories_per_s": (last["groups"] - first["groups"]) * GROUP / elapsed,
        "in_flight": float(np.median([sample["in_flight"] for sample in window])),
        "late_ms_p50": float(np.percentile(late, 50)) * 1e3,
        "late_ms_p99": float(np.percentile(late, 99)) * 1e3,
        "late_ms_max": float(late.max()) * 1e3,
        "core_share": (last["cpu_s"] - first["cpu_s"]) / elapsed,
        "rss_gb_first": first["rss_gb"],
        "rss_gb_max": max(sample["rss_gb"] for sample in window),
    }


def main() -> None:
    parser = common.parser(__doc__, out="bench-controller")
    parser.add_argument("--in-flight", type=int, default=30000, help="trajectories that the engines hold at once")
    parser.add_argument("--rate", type=float, default=2000, help="trajectories a second that are aimed at")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of an answer")
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4096, help="trajectories of a batch")
    parser.add_argument("--agent-s", type=float, default=0.0, help="how long an agent computes around each answer")
    parser.add_argument("--seconds", type=float, default=60, help="how long to measure, once in a steady state")
    parser.add_argument("--controller", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.controller:
        control(options.controller)
        return
    asked = Load(options.in_flight, options.rate, options.tokens, options.engines, options.batch, options.agent_s)
    measured = measure(new_folder("bench-controller", options.out), asked, options.seconds)
    aims = {
        "trajectories_per_s": "" if options.agent_s else f"at least {options.rate:,.0f}",
        "in_flight": f"at least {options.in_flight:,}",
        "late_ms_p99": "at most 50",
    }
    for name, value in measured.items():
        print(f"{name:<20}{value:>12,.2f}  {aims.get(name, '')}")
    common.keep(options.json, measured)


if __name__ == "__main__":
    main()

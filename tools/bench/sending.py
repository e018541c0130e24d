"""Training speed of a rank whose weights are being sent all the time, over its speed without sending.

    python tools/bench/sending.py [--repetitions 10] [--seconds 3] [--json FILE] [--out runs/bench-sending-N]

One trainer rank (18 million parameters) runs forward and backward passes on one thread, and one engine rank, a process
of its own without vLLM, receives version after version into staging. The computing thread has one core to itself;
packing, sending and receiving share the others, as on a trainer node with more cores than ranks. A repetition measures
--seconds with sending and --seconds without, in alternating order.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from areal_megatron.config import Config, DataConfig, MachineConfig, ModelConfig, OptimizerConfig
from areal_megatron.files import new_folder, write_json
from areal_megatron.launch.orders import ON_CPU
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher, Received
from areal_megatron.reshard.session import LinkInfo
from areal_megatron.reshard.staging import Inlet, Reception, Shard, reserve
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run import Run
from tools.bench.figures import line, spreads
from tools.bench.publish import SIZES
from tools.make_arithmetic import save_model

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENS = 128
"""Tokens of a forward and backward pass, in sequences of 32."""
TIMEOUT_S = 60.0
WARM_UP = 5
CORES = sorted(os.sched_getaffinity(0))


class Engine:
    """The receiving process."""

    def __init__(self, model: Path, store: str):
        command = [sys.executable, __file__, "--receive", str(model), "--store", store]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
            encoding="utf-8",
            errors="replace",
        )

    def start_update(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the receiving process has ended; its error is above")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)


class Sender:
    """Publishes version after version while it is on, on a thread of its own."""

    def __init__(self, publisher_of, engine: Engine):
        self._delivered = threading.Event()
        self._error = ""
        self._publisher, self._engine = publisher_of(self._on_delivered), engine
        self.versions = 0
        self.on, self._stop, self._idle = threading.Event(), False, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _on_delivered(
        self, engine: int, generation: int, version: int, seconds: float, _: Received, error: str
    ) -> None:
        self._error = error
        self._delivered.set()

    def _run(self) -> None:
        os.sched_setaffinity(0, _other_cores())  # for this thread and those that it starts
        while not self._stop:
            if not self.on.wait(0.05):
                self._idle.set()
                continue
            self._idle.clear()
            self._engine.start_update()
            self._delivered.clear()
            self._publisher.publish(self.versions + 1, [(0, 1)])
            if not self._delivered.wait(TIMEOUT_S) or self._error:
                print(
                    f"error: version {self.versions + 1} was not delivered: {self._error or 'timeout'}", file=sys.stderr
                )
                os._exit(1)
            self.versions += 1

    def pause(self) -> None:
        """Returns when nothing is being sent."""
        self.on.clear()
        self._idle.clear()
        self._idle.wait(TIMEOUT_S)

    def close(self) -> None:
        self.pause()
        self._stop = True
        self._thread.join(TIMEOUT_S)
        self._publisher.close()


def receive(model: Path, store: str) -> None:
    """Receives an update for each line of stdin; the main function of the engine rank."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, _other_cores())
    hf_config, sizes = read_config(model), EngineSizes()
    held = {name: torch.zeros(shape) for name, shape in engine_layout.layout(hf_config, sizes, 0).parameters.items()}
    shard = Shard(held, reserve(held), sizes, 0)
    info = LinkInfo(
        engine=0,
        generation=1,
        store=store,
        hf_config=hf_config,
        sizes=asdict(MegatronSizes()),
        engine_sizes=asdict(sizes),
        dtype="float32",
        timeout_s=TIMEOUT_S,
    )
    inlet = Inlet(shard, info)
    update = None
    for _ in sys.stdin:
        update = Reception(inlet, after=update)
        print(flush=True)


def measure(folder: Path, repetitions: int, seconds: float) -> list[dict[str, float]]:
    from areal_megatron.trainer.trainer import Trainer

    config = Config(
        name="run",
        runs_dir=str(folder),
        updates=1,
        batch_size=4,
        mode="sft",
        model=ModelConfig(str(folder / "model"), "float32"),
        data=DataConfig("none"),
        optimizer=OptimizerConfig(),
        machine=MachineConfig(device="cpu", peer_timeout_s=TIMEOUT_S),
    )
    run = Run(folder / "run")
    run.create()
    with Trainer(config, run, 0) as trainer:
        store = run.endpoint("trainer-store")
        engine = Engine(folder / "model", store)
        sender = Sender(lambda told: _publisher(trainer, store, told), engine)
        step = _step(trainer)
        os.sched_setaffinity(0, {CORES[0]})
        sender.on.set()
        for _ in range(WARM_UP):
            step()
        sender.pause()
        result = []
        for repetition in range(repetitions):
            result.append(_compare(step, sender, seconds, sending_first=repetition % 2 == 0))
            print(f"repetition {repetition + 1}: {result[-1]['speed_while_sending_over_undisturbed']:.3f}", flush=True)
        sender.close()
        engine.close()
    return result


def _publisher(trainer, store: str, told) -> Publisher:
    return Publisher(
        parameters=trainer.parameters,
        planner=Planner(trainer.hf_config, trainer.sizes, EngineSizes()),
        rank=0,
        engines=1,
        dtype="float32",
        store=store,
        timeout_s=TIMEOUT_S,
        on_delivered=told,
        timeline=trainer.timeline,
    )


def _step(trainer):
    """Returns a forward and backward pass of TOKENS tokens, without an optimizer step: what is being sent must not
    change."""
    from areal_megatron.trainer import pipeline
    from areal_megatron.trainer.batch import RowPart, pack
    from areal_megatron.trainer.lessons import Sequences
    from areal_megatron.trainer.token_sums import TokenSums

    generator = torch.Generator().manual_seed(0)
    size = trainer.hf_config["vocab_size"]
    rows = [torch.randint(size, (32,), generator=generator, dtype=torch.int32).numpy() for _ in range(TOKENS // 32)]
    places = [torch.arange(8, 32).numpy() for _ in rows]
    microbatch = pack(rows, places, RowPart(trainer.device))
    own = Sequences(microbatch, torch.zeros(microbatch.trained, dtype=torch.int64), len(rows))
    loss = partial(trainer.supervised._lesson.loss, own=own, sums=TokenSums(), held_out=False)
    return lambda: pipeline.forward_backward(trainer.policy.chunks, [(microbatch, loss)])


def _compare(step, sender: Sender, seconds: float, sending_first: bool) -> dict[str, float]:
    speeds, sent = {}, 0
    for sending in (sending_first, not sending_first):
        if sending:
            sent = sender.versions
            sender.on.set()
        speeds[sending] = _speed(step, seconds)
        if sending:
            sent = sender.versions - sent
            sender.pause()
    return {
        "tokens_per_s_while_sending": speeds[True],
        "tokens_per_s_undisturbed": speeds[False],
        "speed_while_sending_over_undisturbed": speeds[True] / speeds[False],
        "versions_per_s": sent / seconds,
    }


def _speed(step, seconds: float) -> float:
    """Runs passes for about `seconds`; returns tokens per second."""
    start, passes = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        step()
        passes += 1
    return passes * TOKENS / elapsed


def _other_cores() -> set[int]:
    """Returns all cores but the one that computes, or that one if there is no other."""
    return set(CORES[1:] or CORES)


def _environment() -> dict[str, str]:
    """Returns the environment that the launcher gives a rank on CPU."""
    return {**os.environ, **ON_CPU, "PYTHONPATH": str(ROOT)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path, help="write the same figures here")
    parser.add_argument("--out", type=Path, help="new folder; default: runs/bench-sending-N")
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(options.receive, options.store)
        return
    if "THP_MEM_ALLOC_ENABLE" not in os.environ:  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], _environment())
    torch.set_num_threads(1)
    out = new_folder("bench-sending", options.out)
    save_model(out / "model", 1, **SIZES)
    report = spreads(measure(out, options.repetitions, options.seconds))
    megabytes = sum(file.stat().st_size for file in (out / "model").glob("*.safetensors")) / 1e6
    print(
        f"{megabytes:.0f} MB a version, {len(CORES)} cores; median (lowest – highest) of "
        f"{options.repetitions} repetitions"
    )
    for key, figure in report.items():
        print(line(key, figure))
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    main()

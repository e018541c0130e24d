"""Updates of what has changed beside updates of all weights: bytes, time and pause, on loopback or on a slow link.

One trainer rank and one engine rank, each a process, without Megatron and vLLM: Publisher and Reception with a model's
parameters. The engine rank holds the model twice; each repetition makes an optimizer step, then updates the one with
whole messages and the other with changes, and compares the bits of both. `reshard.py --update` runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.bench.common import line, spreads
from tools.bench.reshard_pools import ENVIRONMENT, ROOT, SIZES, SMALL

AIMS = {
    "changed_share": "",
    "delta_bytes_over_slice": "aim: at most 0.03 at a rate of 1e-6, compressed 0.015",
    "delta_bytes_over_changes": "aim: at most 1.3, in units of 3 bytes a change",
    "delta_time_over_full": "aim: at most 1 with auto",
    "delta_speedup_at_link": "aim: at least 10 at 3% changed",
    "delta_commit_over_full": "aim: at most 1",
}
FULL, DELTA = 0, 1
"""The engines, one for each kind of update."""
TIMEOUT_S = 600.0
SETTLING = 4
"""Updates before those that are measured: they make connections, measure the link, and try changes."""
STEPS = 8
"""Optimizer steps before the first update: an earlier one changes more than a later one."""


def measure(
    repetitions: int, small: bool, update: str, compression: str, rate: float, changed: float, link_mbps: float
) -> dict[str, Any]:
    """Returns what --json writes. `rate`: learning rate of AdamW; `changed`: in its place the share of weights that
    change, 0: none."""
    sizes = (SMALL if small else SIZES) | {
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    }
    setup = {"config": sizes, "update": update, "compression": compression, "rate": rate, "changed": changed}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        near, far, address = [], [], "127.0.0.1"
        if link_mbps:
            from tests.support.slow_link import slow_link

            link = stack.enter_context(slow_link(mbps=link_mbps))
            near, far, address = link.near.enter, link.far.enter, link.near.address
            setup["interface"] = "slow0"
        setup |= {"address": address, "timeline": str(Path(folder) / "timeline.jsonl")}
        trainer = stack.enter_context(_role("trainer", near, setup))
        setup["store"] = trainer.hear()["store"]
        engine = stack.enter_context(_role("engine", far, setup))
        engine.hear()
        measured = []
        for version in range(1, SETTLING + repetitions + 1):
            trainer.ask(step=version)
            updates = [_update(trainer, engine, number, version) for number in (FULL, DELTA)]
            if not engine.ask(compare=True)["equal"]:
                raise RuntimeError(f"after update {version} the weights of both engines differ")
            if version > SETTLING:
                measured.append(_figures(*updates, bool(link_mbps)))
    figures = spreads(measured)
    return {
        **{key: figures[key]["median"] for key in AIMS if key in figures},
        "repetitions": repetitions,
        "megabytes": updates[FULL]["bytes"] / 1e6,
        "figures": figures,
    }


def _update(trainer: Role, engine: Role, number: int, version: int) -> dict[str, float]:
    engine.ask(start=number)
    begun = time.monotonic()
    received = trainer.ask(publish=version, engine=number)
    if received["error"]:
        raise RuntimeError(received["error"])
    commit_s = engine.ask(commit=number)["seconds"]
    return {**received, "commit_s": commit_s, "seconds": time.monotonic() - begun}


def _figures(full: Mapping[str, float], delta: Mapping[str, float], slow: bool) -> dict[str, float]:
    elements = full["bytes"] / 2
    ratio = delta["seconds"] / full["seconds"]
    return {
        "changed_share": delta["changed"],
        "delta_bytes_over_slice": delta["bytes"] / full["bytes"],
        "delta_bytes_over_changes": delta["bytes"] / (3 * delta["changed"] * elements or 1),
        "delta_time_over_full": ratio,
        **({"delta_speedup_at_link": 1 / ratio} if slow else {}),
        "delta_commit_over_full": delta["commit_s"] / full["commit_s"],
        "full_ms": 1e3 * full["seconds"],
        "delta_ms": 1e3 * delta["seconds"],
        "full_commit_ms": 1e3 * full["commit_s"],
        "delta_commit_ms": 1e3 * delta["commit_s"],
    }


def table(report: Mapping[str, Any]) -> str:
    lines = [
        f"{report['megabytes']:,.0f} MB of weights; median (lowest – highest) of {report['repetitions']} repetitions",
        "",
    ]
    for key, figure in report["figures"].items():
        lines.append(line(key, figure, digits=1 if "_ms" in key else 4) + (f"   {AIMS[key]}" if key in AIMS else ""))
    return "\n".join(lines)


class Role:
    """A process with one side of the link, which gets orders and answers as JSON lines."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def hear(self) -> dict[str, Any]:
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a process of the benchmark has ended with code {self._process.wait()}")
        return json.loads(answer)

    def ask(self, **order: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(order) + "\n")
        return self.hear()


@contextmanager
def _role(name: str, enter: list[str], setup: Mapping[str, Any]) -> Iterator[Role]:
    command = [*enter, sys.executable, "-m", "tools.bench.reshard_delta", name, json.dumps(setup)]
    environment = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": setup.get("interface", "lo"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            yield Role(process)
        finally:
            process.kill()


def trainer_role(setup: Mapping[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from areal_megatron.config import ReshardConfig
    from areal_megatron.observe.timeline import Timeline
    from areal_megatron.reshard.changes import bits
    from areal_megatron.reshard.engine_layout import EngineSizes
    from areal_megatron.reshard.outlet import TrainerRank
    from areal_megatron.reshard.plan import Planner
    from areal_megatron.reshard.publish import Publisher
    from areal_megatron.reshard.session import LinkRef
    from areal_megatron.reshard.trainer_layout import MegatronSizes, layouts

    torch.manual_seed(0)
    shapes = layouts(setup["config"], MegatronSizes())[0].parameters
    masters = {name: torch.nn.Parameter(torch.randn(shape) * 0.02) for name, shape in shapes.items()}
    live = {name: master.detach().bfloat16() for name, master in masters.items()}
    if setup["changed"]:
        masters.clear()
    optimizer = masters and torch.optim.AdamW(masters.values(), lr=setup["rate"], weight_decay=0.0)

    def step() -> None:
        if setup["changed"]:
            for tensor in live.values():
                chosen = torch.randint(tensor.numel(), (int(tensor.numel() * setup["changed"]),))
                bits(tensor).view(-1)[chosen] += 1
            return
        for master in masters.values():
            master.grad = torch.randn_like(master)
        optimizer.step()
        for name, master in masters.items():
            live[name].copy_(master.detach())

    for _ in range(STEPS * bool(masters)):
        step()
    store = dist.TCPStore(setup["address"], 0, None, True, wait_for_workers=False)
    address = f"{setup['address']}:{store.port}"
    answers: list[dict[str, Any]] = []
    arrived = threading.Event()

    def delivered(engine: int, generation: int, version: int, seconds: float, received: Any, error: str) -> None:
        answers.append(received._asdict() | {"error": error})
        arrived.set()

    publishers = [
        Publisher(
            TrainerRank(
                parameters=lambda: live,
                planner=Planner(setup["config"], MegatronSizes(), EngineSizes()),
                rank=0,
                dtype=torch.bfloat16,
                store=address,
                on_delivered=delivered,
                timeline=Timeline(Path(setup["timeline"]), "trainer-0"),
                reshard=ReshardConfig(compression=setup["compression"], timeout_s=TIMEOUT_S, update=update),
            )
        )
        for update in ("full", setup["update"])
    ]
    say(store=address)
    for text in sys.stdin:
        order = json.loads(text)
        if "step" in order:
            step()
            say(stepped=True)
        else:
            arrived.clear()
            publishers[order["engine"]].publish(order["publish"], [LinkRef(order["engine"], 1)])
            arrived.wait(TIMEOUT_S)
            publishers[order["engine"]].wait_until_read()
            say(**answers.pop())


def engine_role(setup: Mapping[str, Any]) -> None:
    import torch

    from areal_megatron.reshard.engine_layout import EngineSizes, layout
    from areal_megatron.reshard.reception import Inlet, Reception
    from areal_megatron.reshard.session import LinkInfo
    from areal_megatron.reshard.staging import Full, Shard

    shapes = layout(setup["config"], EngineSizes(), 0).parameters
    inlets: list[Inlet] = []
    for engine, update in enumerate(("full", setup["update"])):
        live = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        info = LinkInfo(
            engine=engine,
            generation=1,
            store=setup["store"],
            hf_config=setup["config"],
            sizes={},
            engine_sizes=asdict(EngineSizes()),
            dtype="bfloat16",
            timeout_s=TIMEOUT_S,
            engines=1,
            may_send_changes=update != "full",
        )
        inlets.append(Inlet(Shard(live, Full.reserve(live), EngineSizes(), 0), info))
    updates: list[Reception | None] = [None, None]
    say(joined=True)
    for text in sys.stdin:
        order = json.loads(text)
        if "start" in order:
            number = order["start"]
            updates[number] = Reception(inlets[number], updates[number])
            say(started=True)
        elif "commit" in order:
            update = updates[order["commit"]]
            if problem := update.problem():
                raise RuntimeError(problem)
            begun = time.monotonic()
            update.commit()
            say(seconds=time.monotonic() - begun)
        else:
            full, delta = (inlet.shard.parameters for inlet in inlets)
            say(equal=all(torch.equal(full[name], delta[name]) for name in full))


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    {"trainer": trainer_role, "engine": engine_role}[sys.argv[1]](json.loads(sys.argv[2]))

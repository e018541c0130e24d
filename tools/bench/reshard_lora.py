"""Updates of adapters beside updates of all weights of the same engines' model: started by reshard.py --lora.

Each is timed from the order to the trainers until every engine computes with it. What does not depend on bytes is the
same in both: orders, agreements over the store, requests to the engines. Bytes are those that the kernel counts: for
adapters there is nothing else in them, since engines read the model from its folder.
"""

from __future__ import annotations

import time
from pathlib import Path

from tools.bench.common import Figure, line, spreads
from tools.bench.reshard import Bench
from tools.bench.reshard_pools import SIZES, SMALL, pools, prepare

MILLIONS_18 = SIZES | {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 5504,
}
"""A Qwen3 of 18 million parameters."""
AIMS = {"bytes_over_minimum": "aim: 1.000", "speedup_over_all_weights": "aim: at least 20"}
MOST_BYTES = 1.01
"""Bytes that an engine rank may receive over those of its slices: what messages have around them."""
WARM_UPS = 4


async def measure(out: Path, repetitions: int, small: bool, core_each: bool, rank: int) -> dict[str, object]:
    """Returns what --json writes."""
    kinds = {"all": 0, "adapters": rank}
    measured = [await _updates(out / name, repetitions, small, core_each, lora) for name, lora in kinds.items()]
    both = [
        {f"{key}_of_all_weights": value for key, value in whole.items()}
        | adapters
        | {"speedup_over_all_weights": whole["update_ms"] / adapters["update_ms"]}
        for whole, adapters in zip(*measured, strict=True)
    ]
    figures = spreads(both)
    return {**{key: figures[key]["median"] for key in AIMS}, "repetitions": repetitions, "figures": figures}


async def _updates(out: Path, repetitions: int, small: bool, core_each: bool, lora: int) -> list[dict[str, float]]:
    say(f"starting trainers and engines for {f'adapters of rank {lora}' if lora else 'all weights'}")
    out.mkdir()
    run, config = prepare(out, SMALL if small else MILLIONS_18, core_each, "full", lora=lora)
    found = []
    async with pools(run, config) as (trainers, engines):
        bench = Bench(run, config, trainers, engines)
        await bench.begin()
        for _ in range(WARM_UPS):
            await bench.ours()
            await bench.check()
        for _ in range(repetitions):
            before = await bench.received()
            update = await bench.ours()
            after = await bench.received()
            await bench.check()
            received, slices = [b - a for a, b in zip(before, after, strict=True)], bench.slices()
            if max(a / b for a, b in zip(received, slices, strict=True)) > MOST_BYTES:
                raise RuntimeError(f"engine ranks received {received} bytes, their slices have {slices}")
            found.append(
                {
                    "update_ms": 1e3 * update.seconds,
                    "transfer_ms": 1e3 * update.transfer_s,
                    "commit_ms": 1e3 * update.stall_s,
                    "kilobytes_of_a_slice": max(slices) / 1e3,
                    "bytes_over_minimum": max(a / b for a, b in zip(received, slices, strict=True)),
                    "bytes_beyond_the_slices": float(sum(received) - sum(slices)),
                }
            )
            say("an update in {update_ms:.1f} ms".format(**found[-1]))
    return found


def table(report: dict) -> str:
    figures: dict[str, Figure] = report["figures"]
    lines = [f"median (lowest – highest) of {report['repetitions']} repetitions", ""]
    for key, figure in figures.items():
        lines.append(line(key, figure, digits=3 if "over" in key else 2) + (f"   {AIMS[key]}" if key in AIMS else ""))
    return "\n".join(lines)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S ") + text, flush=True)

"""The resharder's weight updates of real engines, compared with gather-and-broadcast and with the raw link.

    python tools/bench/reshard.py [--core-each] [--staging streamed] [--repetitions 5] [--small]
                                  [--json FILE] [--out FOLDER]
    python tools/bench/reshard.py --device cuda|cpu [--repetitions 5] [--json FILE] [--small]
    python tools/bench/reshard.py --update delta|auto [--rate 1e-6 | --changed 0.03] [--compression zstd]
                                  [--link-mbps 1000] [--repetitions 5] [--json FILE] [--small]
    python tools/bench/reshard.py --lora 16 [--core-each] [--repetitions 5] [--json FILE] [--small]

Four Megatron ranks (tp 2 × pp 2) update two vLLM servers of tp 2. Each repetition measures, on the same processes, our
update, the same weights by gather and broadcast, and the bytes of our plan alone (tools/bench/reshard_peers.py has the
last two). First engines are idle, for speed and bytes; then they generate, for the time of their pause. After every
update the checksums that vLLM computes must be those of the weights that were sent.

--core-each: one trainer rank and one engine of tp 1, so that on two cores nobody waits for a core; generation during a
transfer is also measured with the engine's receiving threads on the trainer's core. --device: the cost of packing,
casting and unpacking, in one process and without vLLM (tools/bench/reshard_device.py). --update: updates of what has
changed beside whole ones, after steps of AdamW with this learning rate, or with this share of weights changed, perhaps
over a link of given Mb/s between two network namespaces (tools/bench/reshard_delta.py). --lora: updates of adapters
of this rank on all linear layers of 18 million parameters, beside whole ones (tools/bench/reshard_lora.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from areal_megatron.config import Config
from areal_megatron.models.adapter import served
from areal_megatron.models.architecture import read_config
from areal_megatron.process.files import new_folder
from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.session import init_body
from areal_megatron.run.folder import RunFolder
from tools.bench import common
from tools.bench.common import line, spreads
from tools.bench.reshard_pools import SIZES, SMALL, Engine, Generation, Trainers, pools, prepare

AIMS = {
    "bytes_over_minimum": "aim: 1.000",
    "speedup_over_gather_broadcast": "aim: at least 2.5",
    "time_over_link_floor": "aim: at most 1.3",
    "processor_time_over_raw_link": "aim: at most 1.3",
    "stall_over_baseline": "aim: at most 0.2",
    "commit_ms": "",
    "reprefill_ms": "",
    "generation_during_transfer": "",
    "generation_during_transfer_received_elsewhere": "aim: at least 0.8",
}
"""The figures at the top of what --json writes."""
PAUSE_SLEEPS_S = 0.02
"""vLLM's /pause sleeps this long before it returns, with the engine already paused (vLLM 0.32, async_llm.py)."""
BYTES = 2
"""Bytes of an element of the model, bfloat16."""
LINKS = ("host", "device")
"""The links that are measured (`reshard.link`), one after the other, each in a generation of its own."""
UNDISTURBED_TOKENS = 12
"""Tokens of each answer that are timed before an update."""


@dataclass(frozen=True)
class Commit:
    """The commit of one engine; times are seconds of the monotonic clock, which all processes of a machine share."""

    arrived: float
    """When all its ranks had received the weights."""
    live: float
    """When it could generate with them."""
    stall_s: float
    """Seconds from the end of the engine step that was running until `live`."""


@dataclass(frozen=True)
class Update:
    start: float
    """When the trainers were told."""
    began: float
    """When the first trainer began to publish; for gather and broadcast, the end of gathering."""
    commits: list[Commit]

    @property
    def seconds(self) -> float:
        """Seconds until every rank of every engine computes with the new weights."""
        return max(commit.live for commit in self.commits) - self.start

    @property
    def transfer_s(self) -> float:
        return max(commit.arrived for commit in self.commits) - self.began

    @property
    def stall_s(self) -> float:
        """The longest stall of an engine."""
        return max(commit.stall_s for commit in self.commits)


class Bench:
    """One trainer pool and its engines; each method is one thing to measure."""

    def __init__(self, run: RunFolder, config: Config, trainers: Trainers, engines: list[Engine]):
        self._run, self._config, self._trainers, self.engines = run, config, trainers, engines
        self.hf_config = read_config(config.model.path)
        self._version = 0
        self._checksums: dict[int, list[dict[str, str]]] = {}

    async def join(self) -> None:
        infos = [body["init_info"] for body in await self.use(LINKS[0])]
        workers = len(self.engines) * self._config.rollout.tp
        await asyncio.gather(
            self._trainers.order("join", init_infos=infos),
            *(engine.rpc("bench_join", info, workers) for engine, info in zip(self.engines, infos, strict=True)),
        )
        self._checksums[0] = await self._held()

    async def begin(self) -> None:
        """Makes our links alone, and with adapters an even version, of which engines have none of their own."""
        await self.use(LINKS[1])
        for _ in range(2 * self._config.engines_adapt):
            await self.ours()
        self._checksums[0] = await self._held()

    async def use(self, link: str) -> list[dict]:
        """Begins a generation of our links with this `reshard.link`; returns what the engines were told."""
        self._link = (LINKS.index(link) + 1, link)
        config = replace(self._config, reshard=replace(self._config.reshard, link=link))
        told = {"generation": self._link[0], "store": self._run.endpoint("trainer-store"), "hf_config": self.hf_config}
        bodies = [init_body(config=config, engine=engine.index, **told) for engine in self.engines]
        await asyncio.gather(*(engine.join_link(body) for engine, body in zip(self.engines, bodies, strict=True)))
        return bodies

    async def ours(self, *, clear_cache: bool = False) -> Update:
        """Makes one update in the way of controller/updates.py."""
        version = await self._step()
        start = time.monotonic()
        published = asyncio.create_task(self._trainers.order("publish", version=version, link=self._link))
        commits = await asyncio.gather(*(self._carry_out(engine, version, clear_cache) for engine in self.engines))
        return Update(start, min(await published), commits)

    async def theirs(self) -> Update:
        """Makes one update by gather and broadcast. Engines are paused for the broadcast, not for the gathering."""
        await self._step()
        start = time.monotonic()
        await self._trainers.order("gather")
        gathered = time.monotonic()
        await asyncio.gather(*(engine.pause(clear_cache=False) for engine in self.engines))
        paused = time.monotonic() - PAUSE_SLEEPS_S
        loading = [engine.rpc("bench_load") for engine in self.engines]
        await asyncio.gather(self._trainers.order("broadcast"), *loading)
        arrived = time.monotonic()
        await asyncio.gather(*(engine.resume() for engine in self.engines))
        live = time.monotonic()
        return Update(start, gathered, [Commit(arrived, live, live - paused)] * len(self.engines))

    async def raw(self) -> float:
        """Returns the seconds of the raw link, from the first send to the last byte."""
        await asyncio.gather(*(engine.rpc("bench_receive_raw") for engine in self.engines))
        start = min(await self._trainers.order("send_raw"))
        ends = [worker["at"] for engine in self.engines for worker in await engine.rpc("bench_raw_received")]
        return max(ends) - start

    async def processor_times(self) -> tuple[float, float]:
        """Makes an update and uses the raw link; returns the processor seconds that all ranks need for each, from the
        order to send until everything has arrived."""
        version = await self._step()
        begin = await self._processor_s()
        for engine in self.engines:
            await engine.start_update()
        await self._trainers.order("publish", version=version, link=self._link)
        for engine in self.engines:
            await self._trainers.delivered(engine.index, version)
        ours_s = await self._processor_s() - begin
        for engine in self.engines:
            await engine.commit(version, clear_cache=False)
        begin = await self._processor_s()
        await self.raw()
        return ours_s, await self._processor_s() - begin

    async def _processor_s(self) -> float:
        workers = [worker for engine in self.engines for worker in await engine.rpc("bench_processor")]
        return sum(worker["seconds"] for worker in workers) + sum(await self._trainers.order("processor"))

    async def check(self) -> None:
        """Raises RuntimeError unless the engines hold the version that was sent last.

        Even versions are the checkpoint, which vLLM has loaded by itself; odd ones are twice that.
        """
        held, before = await self._held(), self._checksums[0]
        expected = self._checksums.setdefault(self._version % 2, held)
        wrong = sum(a[name] != b[name] for a, b in zip(held, expected, strict=True) for name in b)
        if self._version % 2:
            wrong += sum(a[name] == b[name] for a, b in zip(held, before, strict=True) for name in b)
        if wrong:
            raise RuntimeError(f"after update {self._version} the engines hold {wrong} wrong parameters")

    async def received(self) -> list[int]:
        """Returns the bytes that each rank of each engine has received so far over TCP."""
        return [worker["bytes"] for engine in self.engines for worker in await engine.rpc("bench_bytes")]

    def slices(self) -> list[int]:
        """Returns the bytes of the slice of each rank of each engine."""
        sizes, adapter = EngineSizes.of(self._config.rollout), served(self._config, self.hf_config)
        layouts = (engine_layout.layout(self.hf_config, sizes, rank, adapter) for rank in range(sizes.ranks))
        return [layout.size * BYTES for layout in layouts] * len(self.engines)

    async def _carry_out(self, engine: Engine, version: int, clear_cache: bool) -> Commit:
        streamed = self._config.reshard.staging == "streamed"
        if streamed:
            await engine.pause(clear_cache=False)
            paused = time.monotonic() - PAUSE_SLEEPS_S
        await engine.start_update()
        arrived = await self._trainers.delivered(engine.index, version)
        stall_s = (await engine.commit(version, clear_cache=clear_cache)).seconds
        live = time.monotonic()
        return Commit(arrived, live, live - paused if streamed else stall_s)

    async def _step(self) -> int:
        self._version += 1
        await self._trainers.order("scale", factor=2.0 if self._version % 2 else 0.5)
        return self._version

    async def _held(self) -> list[dict[str, str]]:
        if not self._config.engines_adapt:
            return [await engine.checksums() for engine in self.engines]
        workers = [await engine.rpc("bench_slot") for engine in self.engines]
        return [{name: sha for worker in own for name, sha in worker.items()} for own in workers]


async def idle_repetition(bench: Bench) -> dict[str, float]:
    """Measures speed and bytes with idle engines."""
    counters = [await bench.received()]
    ours = await bench.ours()
    counters.append(await bench.received())
    await bench.check()
    before = await bench.received()
    theirs = await bench.theirs()
    counters += [before, await bench.received()]
    await bench.check()
    raw_s = await bench.raw()
    our_processor_s, raw_processor_s = await bench.processor_times()
    own, broadcast = (
        max((after - start) / size for start, after, size in zip(*pair, bench.slices(), strict=True))
        for pair in (counters[:2], counters[2:])
    )
    return {
        "bytes_over_minimum": own,
        "bytes_over_minimum_of_gather_broadcast": broadcast,
        "speedup_over_gather_broadcast": theirs.seconds / ours.seconds,
        "time_over_link_floor": ours.transfer_s / raw_s,
        "processor_time_over_raw_link": our_processor_s / raw_processor_s,
        "update_ms": 1e3 * ours.seconds,
        "transfer_ms": 1e3 * ours.transfer_s,
        "raw_link_ms": 1e3 * raw_s,
        "processor_ms_of_transfer": 1e3 * our_processor_s,
        "processor_ms_of_raw_link": 1e3 * raw_processor_s,
        "commit_ms_of_idle_engines": 1e3 * ours.stall_s,
        "gather_broadcast_ms": 1e3 * theirs.seconds,
        "gather_ms": 1e3 * (theirs.began - theirs.start),
        "broadcast_and_load_ms": 1e3 * theirs.transfer_s,
    }


async def host_repetition(bench: Bench) -> dict[str, float]:
    """Measures the transfer to idle engines through the memory of the host, where the links go through it."""
    update = await bench.ours()
    await bench.check()
    raw_s = await bench.raw()
    return {
        "transfer_ms_through_host": 1e3 * update.transfer_s,
        "time_over_link_floor_through_host": update.transfer_s / raw_s,
    }


async def busy_repetition(bench: Bench) -> dict[str, float]:
    """Measures the stall of generation, and its speed during the transfer."""
    keep, kept, next_keep, context = await _while_generating(bench, bench.ours)
    theirs, _, _, _ = await _while_generating(bench, bench.theirs)
    recompute, _, next_recompute, _ = await _while_generating(bench, lambda: bench.ours(clear_cache=True))
    return {
        "stall_over_baseline": keep.stall_s / theirs.stall_s,
        "commit_ms": 1e3 * keep.stall_s,
        "commit_ms_with_recompute": 1e3 * recompute.stall_s,
        "stall_ms_of_gather_broadcast": 1e3 * theirs.stall_s,
        "reprefill_ms": 1e3 * (next_recompute - next_keep),
        "context_tokens_of_an_answer": context,
        "generation_during_transfer": kept,
        "transfer_ms_while_generating": 1e3 * keep.transfer_s,
    }


async def received_elsewhere(bench: Bench) -> dict[str, float]:
    """Measures generation during a transfer while the engine's receiving threads are on the trainer's core."""
    _, kept, _, _ = await _while_generating(bench, bench.ours)
    return {"generation_during_transfer_received_elsewhere": kept}


async def _while_generating(
    bench: Bench, update: Callable[[], Awaitable[Update]]
) -> tuple[Update, float, float, float]:
    """Makes an update while engines generate.

    Returns it, tokens/s during its transfer over those before, the seconds from its commit until the slower engine had
    the next token of each answer, and the length of an answer in tokens.
    """
    async with Generation(bench.engines, bench.hf_config["vocab_size"]) as generation:
        start = time.monotonic()
        for _ in range(UNDISTURBED_TOKENS):
            await generation.each_has_token([time.monotonic()] * len(bench.engines))
        undisturbed = generation.rate(start, time.monotonic())
        done = await update()
        arrived = max(commit.arrived for commit in done.commits)
        kept = generation.rate(done.began, arrived) / undisturbed
        next_token_s = await generation.each_has_token([commit.live for commit in done.commits])
        context = generation.context()
    await bench.check()
    return done, kept, next_token_s, context


async def measure(out: Path, repetitions: int, small: bool, core_each: bool, staging: str) -> dict[str, object]:
    """Returns what --json writes."""
    say(f"writing the model into {out}")
    run, config = prepare(out, SMALL if small else SIZES, core_each, staging)
    host, idle, busy = [], [], []
    say(
        f"starting {config.trainer_ranks} trainer ranks and {config.rollout.engines} engines of "
        f"{config.rollout.tp} ranks"
    )
    async with pools(run, config) as (trainers, engines):
        bench = Bench(run, config, trainers, engines)
        await bench.join()
        await host_repetition(bench)  # makes the connections
        for repetition in range(1, repetitions + 1):
            host.append(await host_repetition(bench))
            say("through the host, repetition {}: {transfer_ms_through_host:.0f} ms".format(repetition, **host[-1]))
        await bench.use(LINKS[1])
        await warm_up(bench)
        for repetition in range(1, repetitions + 1):
            idle.append(await idle_repetition(bench))
            say(
                "idle engines, repetition {}: {update_ms:.0f} ms, gather and broadcast {gather_broadcast_ms:.0f} ms, "
                "raw link {raw_link_ms:.0f} ms".format(repetition, **idle[-1])
            )
        for repetition in range(1, repetitions + 1):
            busy.append(await busy_repetition(bench))
            say(
                "generating, repetition {}: stall {commit_ms:.0f} ms, of gather and broadcast "
                "{stall_ms_of_gather_broadcast:.0f} ms".format(repetition, **busy[-1])
            )
        if core_each:
            for engine in engines:
                await engine.rpc("bench_receive_on", trainers.cores)
            for repetition in busy:
                repetition |= await received_elsewhere(bench)
    return report(host, idle, busy, megabytes=sum(bench.slices()) / 1e6)


async def warm_up(bench: Bench) -> None:
    """Makes two updates each way, one of each kind of version, so that all connections exist."""
    for update in (bench.ours, bench.theirs, bench.theirs, bench.ours):
        await update()
        await bench.check()
    say("both ways deliver the weights that vLLM loads itself, and twice these")
    await bench.raw()
    await _while_generating(bench, lambda: bench.ours(clear_cache=True))


def report(*measured: list[dict[str, float]], megabytes: float) -> dict[str, object]:
    """Returns the medians of the figures with an aim, and every figure with its spread.

    Ratios are those within a repetition.
    """
    figures = {key: figure for repetitions in measured for key, figure in spreads(repetitions).items()}
    return {
        **{key: figures[key]["median"] for key in AIMS if key in figures},
        "repetitions": len(measured[0]),
        "megabytes": megabytes,
        "figures": figures,
    }


def table(report: dict) -> str:
    lines = [
        f"{report['megabytes']:,.0f} MB to all engine ranks; median (lowest – highest) of {report['repetitions']} "
        "repetitions",
        "",
    ]
    for key, figure in report["figures"].items():
        lines.append(line(key, figure, digits=3 if "over" in key else 2) + (f"   {AIMS[key]}" if key in AIMS else ""))
    return "\n".join(lines)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S ") + text, flush=True)


def main() -> None:
    parser = common.parser(__doc__, repetitions=5, out="bench-reshard")
    parser.add_argument("--small", action="store_true", help="a small model, to try the tool out")
    parser.add_argument(
        "--core-each", action="store_true", help="one trainer rank and one engine rank, a core for each"
    )
    parser.add_argument("--staging", choices=("full", "streamed"), default="full", help="reshard.staging")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="packing and unpacking alone, on this device")
    parser.add_argument("--update", choices=("delta", "auto"), help="updates of what has changed beside whole ones")
    parser.add_argument("--compression", choices=("none", "zstd"), default="none", help="reshard.compression")
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate of the steps between updates")
    parser.add_argument("--changed", type=float, default=0.0, help="share of weights that change, instead of steps")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="updates of adapters beside whole ones")
    parser.add_argument("--link-mbps", type=float, default=0.0, help="between two namespaces; default: loopback")
    options = parser.parse_args()
    if options.update:
        from tools.bench import reshard_delta

        figures = reshard_delta.measure(
            options.repetitions,
            options.small,
            options.update,
            options.compression,
            options.rate,
            options.changed,
            options.link_mbps,
        )
        print(reshard_delta.table(figures))
    elif options.lora:
        from tools.bench import reshard_lora

        out = new_folder("bench-reshard", options.out)
        figures = asyncio.run(
            reshard_lora.measure(out, options.repetitions, options.small, options.core_each, options.lora)
        )
        print("\n" + reshard_lora.table(figures))
    elif options.device:
        import torch

        from tools.bench import reshard_device as on_device

        model = on_device.SMALL if options.small else on_device.QWEN_1_5B
        figures = on_device.measure(torch.device(options.device), options.repetitions, model)
        print(on_device.table(figures))
    else:
        out = new_folder("bench-reshard", options.out)
        figures = asyncio.run(measure(out, options.repetitions, options.small, options.core_each, options.staging))
        print("\n" + table(figures))
    common.keep(options.json, figures)


if __name__ == "__main__":
    main()

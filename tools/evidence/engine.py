"""One real vLLM engine that is updated over a real link: its weights, its log-probabilities and its pauses.

The trainer is a Publisher of this process with one Megatron rank's tensors; even versions are the checkpoint, odd ones
twice that. Log-probabilities are compared with those of transformers in float32.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

import numpy as np
import torch
from safetensors.torch import load_file

from areal_megatron.config import ReshardConfig
from areal_megatron.engine.client import Completion
from areal_megatron.launch.supervision.processes import Children
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.outlet import Received, TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.session import LinkRef, init_body
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.link_store import open_store
from tests.support.reshard_oracle import megatron_shard
from tools.bench.reshard_pools import SIZES, SMALL, Engine, Generation, prepare
from tools.evidence.parts import Finding, Options, Part, Skip
from tools.evidence.processes import environment

PROMPT = list(range(3, 67))
TIMEOUT_S = 60.0
START_TIMEOUT_S = 115.0
WARM_TOKENS = 8
TOKENS = 64


class Pool:
    """The engine, and the trainer that publishes to it."""

    def __init__(self, engine: Engine, publisher: Publisher, live: dict[str, torch.Tensor]):
        self.engine, self._publisher, self._live = engine, publisher, live
        self.version = 0
        self.began = 0.0
        self.arrived = asyncio.Event()
        self.problem = ""

    async def update(self, clear_cache: bool) -> float:
        """Brings the next version to the engine; returns for how many seconds it generated nothing."""
        factor = 0.5 if self.version % 2 else 2.0
        torch._foreach_mul_(list(self._live.values()), factor)
        self.version += 1
        self.arrived.clear()
        await self.engine.start_update()
        await asyncio.to_thread(self._publisher.publish, self.version, [LinkRef(0, 1)])
        await asyncio.to_thread(self._publisher.wait_until_read)
        await asyncio.wait_for(self.arrived.wait(), TIMEOUT_S)
        if self.problem:
            raise RuntimeError(self.problem)
        return (await self.engine.commit(self.version, clear_cache=clear_cache)).seconds


@asynccontextmanager
async def pool(options: Options) -> AsyncIterator[Pool]:
    """Starts an engine and has it join the link, whereby it compares its parameters with the layout tables."""
    run, config = prepare(options.folder, SMALL if options.small else SIZES, True, "full", device=options.device)
    hf_config, store, loop = read_config(config.model.path), open_store(), asyncio.get_running_loop()
    tensors = load_file(options.folder / "model" / "model.safetensors")
    shard = megatron_shard(tensors, hf_config, MegatronSizes(), 0)
    live = {name: tensor.to(options.device, copy=True) for name, tensor in shard.items()}
    os.environ.update(environment(0))

    def delivered(engine: int, generation: int, version: int, seconds: float, received: Received, error: str) -> None:
        held.problem = error
        loop.call_soon_threadsafe(held.arrived.set)

    publisher = Publisher(
        TrainerRank(
            parameters=lambda: live,
            planner=Planner(hf_config, MegatronSizes(), EngineSizes()),
            rank=0,
            dtype=getattr(torch, config.model.dtype),
            store=f"127.0.0.1:{store.port}",
            on_delivered=delivered,
            timeline=Timeline(run.timeline("trainer-0"), "trainer-0"),
            reshard=ReshardConfig(timeout_s=TIMEOUT_S, update="full"),
        )
    )
    with Children() as children:
        engine = Engine(run, config, 0, children, sorted(os.sched_getaffinity(0)), environment(1))
        held = Pool(engine, publisher, live)
        try:
            await engine.ready(START_TIMEOUT_S)
            await engine.set_version(0)
            body = init_body(
                config=config, engine=0, generation=1, store=f"127.0.0.1:{store.port}", hf_config=hf_config
            )
            await engine.join_link(body)
            yield held
        finally:
            await engine.close()


def updates(options: Options) -> Iterator[Finding]:
    """All of it on one engine, since starting one takes most of the time."""
    if find_spec("vllm") is None:
        raise Skip("there is no package vllm")
    found: asyncio.Queue[Finding | None] = asyncio.Queue()
    with asyncio.Runner() as runner:
        work = runner.get_loop().create_task(_collect(options, found))
        while (finding := runner.run(found.get())) is not None:
            yield finding
        runner.run(asyncio.wait_for(work, None))


async def _collect(options: Options, found: asyncio.Queue[Finding | None]) -> None:
    try:
        async for finding in findings(options):
            found.put_nowait(finding)
    finally:
        found.put_nowait(None)


async def findings(options: Options) -> AsyncIterator[Finding]:
    async with pool(options) as held:
        engine = held.engine
        before = await engine.checksums()
        await held.update(clear_cache=False)
        doubled = await engine.checksums()
        commit_s = await held.update(clear_cache=False)
        after = await engine.checksums()
        wrong = sum(doubled[name] == before[name] or after[name] != before[name] for name in before)
        yield Finding("parameters as sent after two updates", f"{len(before) - wrong} of {len(before)}")
        yield Finding("commit of an idle engine", 1e3 * commit_s, "ms", shown=False)
        if wrong:
            raise RuntimeError(f"the engine does not hold what was sent: {wrong} of {len(before)} parameters are wrong")
        (answer,) = await _generate(engine, TOKENS, "one-version")
        yield difference(options, answer)
        async for finding in _while_generating(held, engine):
            yield finding
        spanned = await _through_update(held, engine)
        carried = sorted(set(spanned.versions.tolist()))
        yield Finding("versions of an answer through an update", " ".join(map(str, carried)))
        yield difference(options, spanned)
        if carried != [held.version - 1, held.version] or sorted(spanned.versions) != spanned.versions.tolist():
            raise RuntimeError(f"an answer through an update carries the versions {carried}")


async def _while_generating(held: Pool, engine: Engine) -> AsyncIterator[Finding]:
    """An update of the engine while it generates, whose KV cache is kept."""
    async with Generation([engine], 512) as generation:
        start = time.monotonic()
        for _ in range(WARM_TOKENS):
            await generation.each_has_token([time.monotonic()])
        began = time.monotonic()
        undisturbed = generation.rate(start, began)
        stall_s = await held.update(clear_cache=False)
        kept = generation.rate(began, time.monotonic() - stall_s) / undisturbed
    yield Finding("tokens/s", undisturbed, "tokens/s", shown=False)
    yield Finding("generation during a transfer", 100 * kept, "%, aim: at least 80")
    yield Finding("commit of a generating engine", 1e3 * stall_s, "ms")


async def _through_update(held: Pool, engine: Engine) -> Completion:
    """Returns an answer that was being sampled when the engine was updated, and prefilled again under the new
    version."""
    answer = asyncio.create_task(_generate(engine, 4000, "spans"))
    sampled = (await engine.load()).generated_tokens
    while (await engine.load()).generated_tokens < sampled + TOKENS // 2:
        await asyncio.sleep(0.02)
    await held.update(clear_cache=True)
    sampled = (await engine.load()).generated_tokens
    while (await engine.load()).generated_tokens < sampled + TOKENS // 2:
        await asyncio.sleep(0.02)
    await engine.abort("spans")
    (completion,) = await answer
    return completion


async def _generate(engine: Engine, tokens: int, request: str) -> list[Completion]:
    return await engine.generate(
        PROMPT, n=1, max_tokens=tokens, temperature=1.0, stop_tokens=[], request_id=request, cache_salt=request
    )


@torch.no_grad()
def difference(options: Options, answer: Completion) -> Finding:
    """Compares each token's log-probability with that of its version's weights, which see all tokens before it; the
    finding is about the last version."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.float32).to(options.device)
    tokens, versions = torch.tensor([PROMPT + answer.tokens.tolist()], device=options.device), answer.versions
    figures = {}
    for version in np.unique(versions).tolist():
        factor = 2.0 if version % 2 else 1.0
        torch._foreach_mul_(list(model.parameters()), factor)
        logprobs = model(tokens).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        torch._foreach_mul_(list(model.parameters()), 1 / factor)
        exact = logprobs.gather(1, tokens[0, len(PROMPT) :, None])[:, 0].cpu().numpy()
        off = np.abs(answer.logprobs - exact)[versions == version]
        p99, mean, largest = (float(x) for x in (np.quantile(off, 0.99), off.mean(), off.max()))
        figures[version] = {"p99": p99, "mean": mean, "max": largest, "tokens": len(off)}
    name = "log-probability off float32" + (", prefilled after an update" if len(figures) > 1 else "")
    return Finding(name, figures[version]["p99"], "at p99", more=figures)


PARTS: dict[str, Part] = {"updates": updates}

"""Weights of a trainer (TP2×PP2; with experts TP2×EP2) into a real vLLM server while it generates.

The trainers are four Publishers of this process: they hold what Megatron ranks hold and share nothing.
"""

import asyncio
import re
import subprocess
import sys
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from areal_megatron.config import ReshardConfig
from areal_megatron.config.config_file import load
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.launch.supervision.processes import end_sessions
from areal_megatron.launch.supervision.shared_memory import SharedMemory
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.outlet import TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.session import LinkRef, init_body
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.network import Site
from tests.support.engines import cores_of_part, tied
from tests.support.link_store import open_store
from tests.support.reshard_oracle import expected_checksums, held_checksums, megatron_shard, write_model
from tests.support.soaking import with_soaked
from tests.support.version_oracle import recomputed, with_stale_cache

METRICS = {"kv_cache_metrics": True}
DETAILS = {"enable_logging_iteration_details": True}
"""vLLM then logs how many tokens it computes in each step."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
NETS = ("qwen3-next-moe", "qwen3.5")
"""Models that engines on CPU compute in bfloat16 alone."""
SERVERS = {
    "tp1": ("qwen3", MegatronSizes(tp=2, pp=2), EngineSizes(), 1, "model", DETAILS, "delta"),
    "tp2-in-two-parts": (
        "qwen3",
        MegatronSizes(tp=2, pp=2),
        EngineSizes(tp=2),
        2,
        "trainers",
        METRICS | DETAILS,
        "auto",
    ),
    "experts-tp2": ("qwen3-moe", MegatronSizes(tp=2, dp=2, ep=2), EngineSizes(tp=2), 1, "trainers", {}, "delta"),
    "sigmoid-experts-tp2": ("glm4-moe", MegatronSizes(tp=2, pp=2), EngineSizes(tp=2), 1, "model", {}, "full"),
    "latents-tp1": ("deepseek-v3-moe", MegatronSizes(tp=2, pp=2), EngineSizes(), 1, "model", {}, "delta"),
    "latents-tp2": ("moonlight-moe", MegatronSizes(tp=2, dp=2, ep=2), EngineSizes(tp=2), 1, "trainers", {}, "full"),
    "far-tp2": ("qwen3", MegatronSizes(tp=2, pp=2), EngineSizes(tp=2), 1, "trainers", {}, "delta", "127.0.0.1"),
    "n-gram": ("qwen3", MegatronSizes(tp=2, pp=2), EngineSizes(), 1, "model", {"speculative_config": NGRAM}, "auto"),
    "gated-delta-nets": (NETS[0], MegatronSizes(tp=2, pp=2), EngineSizes(), 1, "trainers", {}, "full"),
    "gated-delta-nets-dense": (NETS[1], MegatronSizes(tp=2, pp=2), EngineSizes(tp=2), 1, "model", {}, "full"),
    "streamed": ("glm4-moe", MegatronSizes(tp=2, pp=2), EngineSizes(), 1, "model", {}, "delta", "", "streamed"),
}
"""Name → (model, trainer sizes, engine sizes, number of the engine's parts, each as on a node of its own,
rollout.first_weights, rollout.vllm, reshard.update, where it is reached if it is at another site, reshard.staging)."""
SOAKED = ("experts-tp2", "sigmoid-experts-tp2", "latents-tp1", "latents-tp2", "far-tp2", "n-gram", "streamed")
SOAKED += ("gated-delta-nets-dense",)
"""The servers that only `make soak` starts: each differs from another in what tests of its own cover (layouts of
experts, latents and gated delta nets, links between sites, speculation in runs, streams of updates)."""
PROMPT = [5, 6, 7, 8, 9]
LONGEST = 8000
TOLERANCE = 1e-4
PATIENCE_S = 120
"""A busy machine may let an engine or this process stand still for half a minute."""


class Server:
    """One engine of a run whose trainers live in this process. Versions take turns between two checkpoints, which
    differ in few elements where changes alone are sent."""

    def __init__(
        self,
        folder: Path,
        model: str,
        sizes: MegatronSizes,
        engine: EngineSizes,
        parts: int,
        first: str,
        vllm: dict[str, Any],
        update: str,
        site: str = "",
        staging: str = "full",
    ):
        self.sizes, self.engine, self.sends_changes, self.site = sizes, engine, update == "delta", site
        self.streamed = staging == "streamed"
        self.folders = [folder / "a", folder / "b"]
        changes = {"max_position_embeddings": 8192, "initializer_range": 0.1}
        self.dtype = torch.bfloat16 if model in NETS else torch.float32
        if model in NETS:  # vLLM's kernels take no smaller heads
            changes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        self.tensors = [
            {name: tensor.to(self.dtype) for name, tensor in write_model(model, path, seed, **changes).items()}
            for seed, path in enumerate(self.folders)
        ]
        if model in NETS:
            for tensors, path in zip(self.tensors, self.folders, strict=True):
                save_file(tensors, path / "model.safetensors", {"format": "pt"})
        if self.sends_changes:
            self.tensors[1] = {name: turned(tensor) for name, tensor in self.tensors[0].items()}
            save_file(self.tensors[1], self.folders[1] / "model.safetensors", {"format": "pt"})
        self.hf_config = read_config(self.folders[0])
        words = {f"<{number}>": number for number in range(self.hf_config["vocab_size"])}
        library = Tokenizer(WordLevel(words, unk_token="<0>"))
        library.save(str(self.folders[0] / "tokenizer.json"))  # vLLM makes one by itself for Qwen only
        self.run = RunFolder(folder / "run")
        self.run.create()
        OmegaConf.save(
            {
                "name": "run",
                "runs_dir": str(folder),
                "updates": 1,
                "batch_size": 8,
                "model": {"path": str(self.folders[0]), "dtype": str(self.dtype).removeprefix("torch.")},
                "data": {"train": "none", "max_prompt_tokens": 32},
                "machine": {"device": "cpu", "peer_timeout_s": PATIENCE_S},
                "trainer": {"tp": sizes.tp, "pp": sizes.pp, "dp": sizes.dp, "ep": sizes.ep},
                "reshard": {"update": update, "staging": staging},
                "rollout": {"tp": engine.tp, "group_size": 2, "max_new_tokens": LONGEST, "max_running": 8}
                | {"first_weights": first, "vllm": vllm},
            },
            self.run.config,
        )
        self.config = load(self.run.config)
        self.processes = [
            tied(
                [sys.executable, "-m", "areal_megatron.engine.server", "--run", self.run.folder, "--index", "0"],
                {"AREAL_CPUS": cores_of_part(part, engine.tp // parts)}
                | {"AREAL_PART": f"{part}/{parts}", "AREAL_RENDEZVOUS": "here"}
                | (Site(site, 0, site).settings if site else {}),
                stdout=self.run.log(f"engine-0.{part}" if part else "engine-0").open("wb"),
                stderr=subprocess.STDOUT,
            )
            for part in range(parts)
        ]
        self.shared = SharedMemory()
        self.store = open_store()
        timeline = Timeline(self.run.timeline("trainer-0"), "trainer-0")
        self.live = [self._shard(0, rank) for rank in range(sizes.ranks)]
        planner = Planner(self.hf_config, sizes, engine)
        self.publishers = [
            Publisher(
                TrainerRank(
                    parameters=lambda rank=rank: self.live[rank],
                    planner=planner,
                    rank=rank,
                    dtype=self.dtype,
                    store=f"127.0.0.1:{self.store.port}",
                    on_delivered=self._delivered,
                    timeline=timeline,
                    tls=self.run.credentials.calling(),
                    reshard=ReshardConfig(timeout_s=PATIENCE_S, update=self.config.reshard.update),
                )
            )
            for rank in range(sizes.ranks)
        ]
        self.generation = self.version = 0
        self.has_a_base = False
        """Whether the engine has had a version from these trainers."""

    def give_way(self):
        """Has the engine take what this process leaves. Linux shares a machine among sessions, and while this one waits
        for a turn that answers take, they can come to their end."""
        for process in self.processes:
            with suppress(OSError):  # not on Linux, or asked for too often by a user
                Path(f"/proc/{process.pid}/autogroup").write_text("10")

    def client(self) -> EngineClient:
        endpoint, tls = self.run.endpoint("engine-0", 30), self.run.credentials.calling()
        assert endpoint.startswith("https://" if self.site else "http://")
        return EngineClient("engine-0", endpoint, self.run.token, PATIENCE_S, tls)

    def _shard(self, version, rank):
        parameters = megatron_shard(self.tensors[version % 2], self.hf_config, self.sizes, rank)
        return {name: tensor.clone() for name, tensor in parameters.items()}

    def _delivered(self, engine, generation, version, seconds, received, error):
        self.loop.call_soon_threadsafe(self.delivery.set_result, (version, received, error))

    def body(self, **changes):
        body = init_body(
            config=self.config,
            engine=0,
            generation=self.generation,
            store=f"127.0.0.1:{self.store.port}",
            hf_config=self.hf_config,
        )
        return {"init_info": body["init_info"] | changes}

    async def join(self, client):
        self.generation += 1
        await client.join_link(self.body())

    async def update(self, client, version, *, clear_cache):
        self.loop, self.delivery = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        for rank, live in enumerate(self.live):
            for name, tensor in self._shard(version, rank).items():
                live[name].copy_(tensor)
        site = self.run.endpoint("engine-0").removeprefix("https://") if self.site else ""
        few = self.streamed and self.has_a_base
        if self.streamed and not few:
            await client.pause(clear_cache=False)
        for publisher in self.publishers:
            publisher.publish(version, [LinkRef(0, self.generation, few_changes=few, site=site)])
        await client.start_update()
        for publisher, live in zip(self.publishers, self.live, strict=True):
            await asyncio.to_thread(publisher.wait_until_read)
            for tensor in live.values():
                tensor.fill_(float("nan"))
        delivered = await asyncio.wait_for(self.delivery, 2 * PATIENCE_S)
        assert (delivered[0], delivered[2]) == (version, "")
        if self.sends_changes and self.has_a_base:
            assert delivered[1].bytes < 0.1 * self.slice_bytes()
        else:
            assert delivered[1].bytes == self.slice_bytes()
        self.has_a_base = True
        committed = await client.commit(version, clear_cache=clear_cache)
        self.version = version
        return committed

    def computed(self):
        """The tokens that the engine has computed in all its steps, as it has logged them."""
        steps = re.findall(r" (\d+) context tokens, \d+ generation requests, (\d+) generation tokens", self.log())
        return sum(int(context) + int(generation) for context, generation in steps)

    def log(self):
        return self.run.log("engine-0").read_text()

    async def begin(self, client):
        """Joins the link and asserts that the engine holds version 0, or gets it from here and is of no use before."""
        if not self.config.engines_start_empty:
            await client.set_version(0)
            await self.assert_holds(client, 0)
            await self.join(client)
            return
        asked = {"model": "policy", "prompt": PROMPT, "max_tokens": 1}
        refused = "status 503: .*this engine has no weights before its first version arrives from the trainers"
        await client.set_version(0)
        await self.join(client)
        with pytest.raises(EngineError, match=refused):
            await client.generate(PROMPT, n=1, max_tokens=1, temperature=1, stop_tokens=[], request_id="early")
        with pytest.raises(EngineError, match=refused):
            await client._call("POST", "/v1/completions", asked)
        await self.update(client, 0, clear_cache=True)
        await self.assert_holds(client, 0)
        await client._call("POST", "/v1/completions", asked)

    def slice_bytes(self):
        tensors = self.tensors[0].items()
        whole = ("norm", ".mlp.gate.", "_a_proj")
        on_every_rank = sum(t.numel() for name, t in tensors if any(part in name for part in whole))
        elements = sum(t.numel() for _, t in tensors) + (self.engine.tp - 1) * on_every_rank
        return self.dtype.itemsize * elements

    async def assert_holds(self, client, version):
        """Asserts, by vLLM's own checksums, that every parameter of every rank has the bytes of `version`, but for
        experts and convolutions, which vLLM packs."""
        expected = expected_checksums(self.tensors[version % 2], self.hf_config, tp=self.engine.tp)
        assert await held_checksums(client) == expected

    def close(self):
        end_sessions({process.pid for process in self.processes}, self.shared, grace_s=30)
        for process in self.processes:
            process.wait(10)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in which the signs of some elements are others."""
    changed = tensor.clone().contiguous()
    changed.view(-1)[::100].neg_()
    return changed


@pytest.fixture(scope="module", params=with_soaked(SERVERS, SOAKED))
def server(request, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("engine"), *SERVERS[request.param])
    yield server
    server.close()


@pytest.fixture(scope="module")
def references(server):
    import transformers

    make = transformers.AutoModelForCausalLM.from_pretrained
    return [make(path, dtype=torch.float32, attn_implementation="eager") for path in server.folders]


async def stream_through(server, *, clear_cache):
    """Samples one answer while the engine is updated twice.

    Returns the completion, its three versions, and the index of the first token of each later one. A machine that lets
    this process stand still for long has the answer end meanwhile: then there is another.
    """
    client = server.client()
    await client.wait_until_healthy(240)
    if server.generation == 0:
        server.give_way()
        await server.begin(client)
    for _ in range(5):
        versions = [server.version, server.version + 1, server.version + 2]
        completion = await answer_through(server, client, versions, clear_cache=clear_cache)
        await server.assert_holds(client, versions[-1])
        if len(completion.tokens) < LONGEST:
            break
    await client.close()
    carried = completion.versions.tolist()
    assert len(carried) < LONGEST, "the answer was over before the updates"
    assert len(carried) > 50 and carried == sorted(carried)
    assert set(carried) == set(versions)
    return completion, versions, [carried.index(version) for version in versions[1:]]


async def answer_through(server, client, versions, *, clear_cache):
    """Returns an answer that began with the first of `versions`, as long as the updates to the others last."""
    asked = {"max_tokens": LONGEST, "temperature": 1.0, "stop_tokens": [], "cache_salt": f"v{versions[0]}"}
    answer = asyncio.create_task(client.generate(PROMPT, n=1, request_id=f"r{versions[0]}", **asked))
    while (await client.load()).running == 0 and not answer.done():
        await asyncio.sleep(0.02)
    for version in versions[1:]:
        await server.update(client, version, clear_cache=clear_cache)
    sampled = (await client.load()).generated_tokens
    while (await client.load()).generated_tokens < sampled + 50 and not answer.done():
        await asyncio.sleep(0.02)
    await client.abort(f"r{versions[0]}")
    (completion,) = await answer
    return completion


def assert_of(server, policy, other, completion, references, versions, switches):
    """Asserts that the log-probabilities are those of a policy, and not those of the other: in bfloat16 with no more
    than three times the error that transformers has in it."""
    tokens, logprobs = completion.tokens.tolist(), torch.from_numpy(completion.logprobs)
    models = [references[version % 2] for version in versions]
    expected, others = (each(models, PROMPT, tokens, switches) for each in (policy, other))
    if server.dtype == torch.float32:
        torch.testing.assert_close(logprobs, expected, atol=TOLERANCE, rtol=0)
        assert (logprobs - others).abs().max() > 100 * TOLERANCE  # the two policies can be told apart
        return
    half = [deepcopy(model).to(server.dtype) for model in references]
    rounded = policy([half[version % 2] for version in versions], PROMPT, tokens, switches)
    error, rounding = ((each - expected).abs().mean() for each in (logprobs, rounded))
    assert error < 3 * rounding and (logprobs - others).abs().mean() > 2 * error


def test_recompute_policy_is_exact(server, references):
    completion, *rest = asyncio.run(stream_through(server, clear_cache=True))
    assert_of(server, recomputed, with_stale_cache, completion, references, *rest)


def test_keep_policy_is_exact(server, references):
    completion, *rest = asyncio.run(stream_through(server, clear_cache=False))
    assert_of(server, with_stale_cache, recomputed, completion, references, *rest)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_what_an_engine_prefills_again_is_what_it_computes_besides_prompts_and_answers(server, clear_cache):
    """By vLLM's own counts: tokens of its steps, and those of prompts. A group of four shares the first block of its
    prompt; each answer but for its last token is computed, too."""
    if "enable_logging_iteration_details" not in server.config.rollout.vllm:
        pytest.skip("vLLM does not log its steps here")
    prompt, count = [5, 6, 7] * 50, 4

    async def figures(client):
        raw = (await client._call("GET", "/metrics")).decode()
        prompts = re.findall(r'^vllm:prompt_tokens_by_source_total{.*"local_compute".*} (\S+)$', raw, re.M)
        return server.computed(), int(sum(map(float, prompts))), (await client.load()).generated_tokens

    async def through_updates(client, length):
        """Returns whether answers of this length outlast three updates, and what the commits of these and a fourth,
        of an idle engine, tell."""
        asked = {"max_tokens": length, "temperature": 1.0, "stop_tokens": []}
        answers = asyncio.create_task(client.generate(prompt, n=count, request_id=f"g{length}", **asked))
        told = []
        for _ in range(3):
            sampled = (await client.load()).generated_tokens
            while (await client.load()).generated_tokens < sampled + 100 and not answers.done():
                await asyncio.sleep(0.02)
            told.append((await server.update(client, server.version + 1, clear_cache=clear_cache)).prefilled_again)
        outlasts = not answers.done()
        assert [len(answer.tokens) for answer in await answers] == [length] * count
        told.append((await server.update(client, server.version + 1, clear_cache=True)).prefilled_again)
        return outlasts, told

    async def scenario():
        client = server.client()
        await client.wait_until_healthy(240)
        if server.generation == 0:
            await server.begin(client)
        await server.update(client, server.version + 1, clear_cache=True)  # tells of the tests before
        before, tried, all_told = await figures(client), 0, 0
        for length in (150, 600, 4800):  # machines differ
            outlasts, told = await through_updates(client, length)
            tried, all_told = tried + 1, all_told + sum(told)
            if outlasts:
                break
        after = await figures(client)
        await client.close()
        computed, prompts, sampled = (end - begin for begin, end in zip(before, after, strict=True))
        assert all_told == computed - prompts - (sampled - tried * count)
        return outlasts, told

    outlasts, told = asyncio.run(scenario())
    assert outlasts and told[0] == 0
    if clear_cache:
        assert told[1] >= 150 + 100 and told[3] > told[2] > told[1]
    else:
        assert told == [0] * 4


def test_failed_transfer_leaves_the_old_version(server):
    async def refused(call):
        with pytest.raises(EngineError, match="status 500"):
            await call

    async def assert_serves(client, version):
        await server.assert_holds(client, version)
        (answer,) = await client.generate(PROMPT, n=1, max_tokens=3, temperature=1.0, stop_tokens=[], request_id="f")
        assert set(answer.versions.tolist()) == {version}

    async def scenario():
        client = server.client()
        held = server.version
        await client.start_update()  # the trainers publish nothing
        await client.abandon_update()
        await assert_serves(client, held)
        await client.start_update()
        await client.pause(clear_cache=False)  # and now its controller dies
        for _ in range(2):
            await client.take_over()
            await assert_serves(client, held)
        await refused(client.join_link(server.body(hf_config=server.hf_config | {"vocab_size": 300})))
        await server.join(client)
        await server.update(client, held + 1, clear_cache=True)
        await assert_serves(client, held + 1)
        await client.start_update()
        await refused(client.commit(held + 2, clear_cache=True))
        await client.resume()
        await assert_serves(client, held + 1)
        await client.close()

    asyncio.run(scenario())
    log = server.log()
    assert "model.embed_tokens.weight has shape [" in log and "update 2 cannot be committed: not received yet" in log

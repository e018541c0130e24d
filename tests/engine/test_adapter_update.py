"""Adapters of a trainer (TP2×PP2) into a real vLLM server while it generates.

The trainers are four Publishers of this process: they hold what Megatron ranks hold of the factors and share nothing.
"""

import asyncio
import json
import subprocess
import sys

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from areal_megatron.config import ReshardConfig
from areal_megatron.config.config_file import load
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.launch.supervision.processes import end_sessions
from areal_megatron.launch.supervision.shared_memory import SharedMemory
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.outlet import TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.session import LinkRef, init_body
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run.folder import RunFolder
from tests.support.adapter_oracle import DENSE, adapt, megatron_factors, random_adapter, vllm_factors
from tests.support.engines import cores_of_part, tied
from tests.support.link_store import open_store
from tests.support.reshard_oracle import expected_checksums, held_checksums, write_model
from tests.support.version_oracle import recomputed, with_stale_cache

SIZES = MegatronSizes(tp=2, pp=2)
RANK, ALPHA = 5, 12.0
PROMPT = [5, 6, 7, 8, 9] * 20
"""Three blocks of the prefix cache, and a part of one."""
LONGEST = 8000
TOLERANCE = 1e-5
PATIENCE_S = 120
"""A busy machine may let an engine or this process stand still for half a minute."""


class Server:
    """One engine of a run whose trainers live in this process. Each version is another adapter; version 0 is none."""

    def __init__(self, folder, tp, update):
        self.tp, self.model = tp, folder / "model"
        self.tensors = write_model("qwen3", self.model, max_position_embeddings=8192, initializer_range=0.1)
        self.hf_config = read_config(self.model)
        words = {f"<{number}>": number for number in range(self.hf_config["vocab_size"])}
        Tokenizer(WordLevel(words, unk_token="<0>")).save(str(self.model / "tokenizer.json"))
        self.run = RunFolder(folder / "run")
        self.run.create()
        OmegaConf.save(
            {
                "name": "run",
                "runs_dir": str(folder),
                "updates": 1,
                "batch_size": 8,
                "model": {"path": str(self.model), "dtype": "float32"},
                "lora": {"rank": RANK, "alpha": ALPHA},
                "data": {"train": "none", "max_prompt_tokens": 128},
                "machine": {"device": "cpu", "peer_timeout_s": PATIENCE_S},
                "trainer": {"tp": SIZES.tp, "pp": SIZES.pp},
                "reshard": {"update": update},
                "rollout": {"tp": tp, "group_size": 2, "max_new_tokens": LONGEST, "max_running": 8},
            },
            self.run.config,
        )
        self.config = load(self.run.config)
        self.process = tied(
            [sys.executable, "-m", "areal_megatron.engine.server", "--run", self.run.folder, "--index", "0"],
            {"AREAL_CPUS": cores_of_part(0, tp)},
            stdout=self.run.log("engine-0").open("wb"),
            stderr=subprocess.STDOUT,
        )
        self.shared, self.store = SharedMemory(), open_store()
        self.live = [self._held(1, rank) for rank in range(SIZES.ranks)]
        self.publishers = [
            Publisher(
                TrainerRank(
                    parameters=lambda rank=rank: self.live[rank],
                    planner=Planner.of(self.config, self.hf_config, SIZES),
                    rank=rank,
                    dtype=torch.float32,
                    store=f"127.0.0.1:{self.store.port}",
                    on_delivered=self._delivered,
                    timeline=Timeline(self.run.timeline("trainer-0"), "trainer-0"),
                    reshard=ReshardConfig(timeout_s=PATIENCE_S, update=update),
                )
            )
            for rank in range(SIZES.ranks)
        ]
        self.generation = self.version = 0

    def factors(self, version):
        return random_adapter(self.tensors, DENSE, RANK, seed=version)

    def reference(self, version):
        """Returns transformers' model of a version."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float32, attn_implementation="eager"
        )
        return adapt(model, self.factors(version), ALPHA / RANK) if version else model

    def client(self):
        return EngineClient("engine-0", self.run.endpoint("engine-0", 30), self.run.token, PATIENCE_S)

    async def ready(self):
        """Returns a client of the engine once it serves and has joined the link."""
        client = self.client()
        await client.wait_until_healthy(240)
        if not self.generation:
            await client.set_version(0)
            await self.join(client)
        return client

    async def join(self, client):
        self.generation += 1
        told = {"store": f"127.0.0.1:{self.store.port}", "hf_config": self.hf_config}
        await client.join_link(init_body(config=self.config, engine=0, generation=self.generation, **told))

    async def update(self, client, version, *, clear_cache):
        self.loop, self.delivery = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        for rank, live in enumerate(self.live):
            for name, tensor in self._held(version, rank).items():
                live[name].copy_(tensor)
        for publisher in self.publishers:
            publisher.publish(version, [LinkRef(0, self.generation)])
        await client.start_update()
        for publisher, live in zip(self.publishers, self.live, strict=True):
            await asyncio.to_thread(publisher.wait_until_read)
            for tensor in live.values():
                tensor.fill_(float("nan"))
        delivered = await asyncio.wait_for(self.delivery, 2 * PATIENCE_S)
        assert (delivered[0], delivered[2]) == (version, "")
        own = [vllm_factors(self.factors(version), self.hf_config, self.tp, rank) for rank in range(self.tp)]
        assert delivered[1].bytes == sum(tensor.nbytes for held in own for tensor in held.values())
        await client.commit(version, clear_cache=clear_cache)
        self.version = version

    def _held(self, version, rank):
        held = megatron_factors(self.factors(version), self.hf_config, SIZES, rank)
        return {name: tensor.clone() for name, tensor in held.items()}

    def _delivered(self, engine, generation, version, seconds, received, error):
        self.loop.call_soon_threadsafe(self.delivery.set_result, (version, received, error))

    def close(self):
        end_sessions({self.process.pid}, self.shared, grace_s=30)
        self.process.wait(10)


@pytest.fixture(
    scope="module",
    # what a part of an engine writes of an adapter is in test_weight_layouts.py, two parts in test_weight_update.py
    params=[pytest.param(1, id="tp1"), pytest.param(2, id="tp2", marks=pytest.mark.soak)],
)
def server(request, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("engine"), request.param, "full")
    yield server
    server.close()


async def until_sampled(client, answer, tokens):
    """Returns when the engine has sampled so many more tokens, or the answer is over."""
    sampled = (await client.load()).generated_tokens
    while (await client.load()).generated_tokens < sampled + tokens and not answer.done():
        await asyncio.sleep(0.02)


def asked(version, **changed):
    return {"max_tokens": LONGEST, "temperature": 1.0, "stop_tokens": [], "cache_salt": f"v{version}"} | changed


@pytest.mark.parametrize("clear_cache", [True, False], ids=["recompute", "keep"])
def test_three_updates_into_an_answer_are_exact(server, clear_cache):
    async def scenario():
        client = await server.ready()
        for _ in range(5):  # a machine that lets this process stand still for long has the answer end meanwhile
            first = server.version
            await client.generate(PROMPT, n=1, request_id=f"cached-{first}", **asked(first, max_tokens=2))
            name, versions = f"answer-{first}", [first, first + 1, first + 2, first + 3]
            answer = asyncio.create_task(client.generate(PROMPT, n=1, request_id=name, **asked(first)))
            for version in versions[1:]:
                await until_sampled(client, answer, 30)
                await server.update(client, version, clear_cache=clear_cache)
            await until_sampled(client, answer, 30)
            await client.abort(name)
            (completion,) = await answer
            if len(completion.tokens) < LONGEST:
                break
        latest = asked(server.version, max_tokens=20)
        later = await client.generate(PROMPT, n=2, request_id=f"later-{server.version}", **latest)
        assert await held_checksums(client) == held
        await client.close()
        return versions, completion, later

    held = expected_checksums(server.tensors, server.hf_config, tp=server.tp)
    held = {name.replace("_proj.weight", "_proj.base_layer.weight"): sha for name, sha in held.items()}
    versions, completion, later = asyncio.run(scenario())
    tokens, carried = completion.tokens.tolist(), completion.versions.tolist()
    assert len(carried) < LONGEST and carried == sorted(carried) and sorted(set(carried)) == versions
    switches = [carried.index(version) for version in versions[1:]]
    models = [server.reference(version) for version in versions]
    logprobs = torch.from_numpy(completion.logprobs)
    fresh, stale = (of(models, PROMPT, tokens, switches) for of in (recomputed, with_stale_cache))
    expected, other = (fresh, stale) if clear_cache else (stale, fresh)
    torch.testing.assert_close(logprobs, expected, atol=TOLERANCE, rtol=0)
    assert (logprobs - other).abs().max() > 1000 * TOLERANCE  # the two policies can be told apart
    for one in later:
        alone = recomputed(models[-1:], PROMPT, one.tokens.tolist(), [])
        torch.testing.assert_close(torch.from_numpy(one.logprobs), alone, atol=TOLERANCE, rtol=0)


def test_requests_choose_between_the_policy_and_the_model_without_its_adapter(server):
    """In one batch, and over the routes that any client may use."""

    async def completed(client, model):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "seed": 1}
        body |= {"logprobs": 0, "return_token_ids": True, "cache_salt": f"beside-{model}"}
        return json.loads(await client._call("POST", "/v1/completions", body))["choices"][0]

    async def scenario():
        client = await server.ready()
        if not server.version:
            await server.update(client, 1, clear_cache=True)
        for attempt in range(5):  # see above
            name = f"beside-{attempt}"
            beside = asyncio.create_task(client.generate(PROMPT, n=2, request_id=name, **asked(server.version)))
            await until_sampled(client, beside, 5)
            answers = await asyncio.gather(*(completed(client, each) for each in ("base", "policy", "base", "policy")))
            was_beside = not beside.done()
            await client.abort(name)
            if was_beside:
                break
        assert was_beside
        with pytest.raises(EngineError, match=r"status 404: .*other.* does not exist"):
            await completed(client, "other")
        await client.close()
        return answers, await beside

    answers, beside = asyncio.run(scenario())
    base, policy = server.reference(0), server.reference(server.version)
    for answer, model in zip(answers, (base, policy, base, policy), strict=True):
        expected = recomputed([model], PROMPT, answer["token_ids"], [])
        found = torch.tensor(answer["logprobs"]["token_logprobs"])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    for one in beside:
        alone = recomputed([policy], PROMPT, one.tokens.tolist(), [])
        torch.testing.assert_close(torch.from_numpy(one.logprobs), alone, atol=TOLERANCE, rtol=0)


def test_an_abandoned_update_leaves_the_adapter_that_was_there(server):
    async def scenario():
        client = await server.ready()
        if not server.version:
            await server.update(client, 1, clear_cache=True)
        held = server.version
        await client.start_update()  # the trainers publish nothing
        await client.abandon_update()
        sampling = {**asked("abandoned", max_tokens=20)}
        (one,) = await client.generate(PROMPT, n=1, request_id="abandoned", **sampling)
        await server.join(client)
        await server.update(client, held + 1, clear_cache=True)
        (two,) = await client.generate(PROMPT, n=1, request_id="after", **sampling)
        await client.close()
        return held, one, two

    held, *answers = asyncio.run(scenario())
    for version, one in zip((held, held + 1), answers, strict=True):
        expected = recomputed([server.reference(version)], PROMPT, one.tokens.tolist(), [])
        torch.testing.assert_close(torch.from_numpy(one.logprobs), expected, atol=TOLERANCE, rtol=0)
        assert set(one.versions.tolist()) == {version}


def test_an_engine_that_takes_an_adapter_refuses_whole_weights(server):
    async def scenario():
        client = await server.ready()
        body = init_body(config=server.config, engine=0, generation=99, store="127.0.0.1:1", hf_config=server.hf_config)
        with pytest.raises(EngineError, match="status 500"):
            await client.join_link({"init_info": body["init_info"] | {"adapter": None}})
        await client.close()

    asyncio.run(scenario())
    assert "the trainers send weights" in server.run.log("engine-0").read_text()

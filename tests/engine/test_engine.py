"""The engine as it is started in a run: a real vLLM server behind the guard."""

import asyncio
import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from areal_megatron.config import RolloutConfig
from areal_megatron.config.config_file import load
from areal_megatron.data.prompts import Prompt
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.answers import decode
from areal_megatron.engine.client import EngineError
from areal_megatron.engine.kv_cache import CPU_BLOCK_TOKENS
from areal_megatron.run.network import STRANGER_S
from areal_megatron.workflows import multi_turn, single_turn, tool_use
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.runner import EpisodeRunner
from areal_megatron.workflows.sampling import Sampling
from areal_megatron.workflows.scoring import Scorer
from areal_megatron.workflows.workflow import Workflow
from tests.support.chat_world import InThisProcess, Judge
from tests.support.engines import ask, lengthened, make_run, started_engine
from tools.bench.standin_engines import answers

TEMPERATURE = 0.7
PROMPT = [5, 9, 7, 3]


@pytest.fixture(scope="module")
def long_world(world, tmp_path_factory):
    return lengthened(world, tmp_path_factory.mktemp("long") / "world")


@pytest.fixture(scope="module")
def started(long_world, tmp_path_factory):
    settings = {"max_new_tokens": 2000, "max_running": 64}
    run, _ = make_run(tmp_path_factory.mktemp("runs") / "engine", long_world, rollout=settings)
    with started_engine(run) as server:
        yield run, server.pid


@pytest.fixture(scope="module")
def run(started):
    return started[0]


@pytest.fixture(scope="module", autouse=True)
def silent(run):
    """What is read from a connection that says nothing, while tests ask the engine."""

    def read():
        address = urlsplit(run.endpoint("engine-0"))
        with socket.create_connection((address.hostname, address.port), timeout=STRANGER_S + 10) as silent:
            return silent.recv(1)

    beside = ThreadPoolExecutor()
    yield beside.submit(read)
    beside.shutdown(wait=False)  # the engine's end ends it


def generate(client, prompt=PROMPT, **changes):
    request = {
        "n": 4,
        "max_tokens": 40,
        "temperature": TEMPERATURE,
        "stop_tokens": [1],
        "request_id": "test",
        **changes,
    }
    return client.generate(prompt, **request)


@pytest.fixture(scope="module")
def reference(world):
    return AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32).eval()


def test_what_computes_keeps_to_its_cores_and_the_server_runs_on_any(started):
    server = psutil.Process(started[1])
    (core,) = server.children()
    assert core.cpu_affinity() == [0] and server.cpu_affinity() == psutil.Process().cpu_affinity()


@pytest.mark.parametrize("seed", [None, 2**62])
def test_log_probabilities_are_those_of_the_sampled_distribution(run, reference, seed):
    for completion in ask(run, lambda client: generate(client, stop_tokens=[], seed=seed)):
        assert_sampled_from(reference, completion)


def test_a_text_is_scored_at_temperature_1_beside_sampling_whatever_is_cached(run, reference):
    """Also where its beginning is in the prefix cache, from which log-probabilities cannot be read."""

    async def scored(client):
        await client.set_version(3)
        beside = asyncio.create_task(generate(client, max_tokens=300, stop_tokens=[], request_id="beside"))
        [answer] = await generate(client, n=1, max_tokens=150, stop_tokens=[], request_id="text")
        text = [*PROMPT, *answer.tokens.tolist()]
        found = [await client.score(text, request_id=f"scored-{k}", top_k=5 * k) for k in range(2)]
        await beside
        await client.set_version(0)
        return text, found

    text, found = ask(run, scored)
    with torch.no_grad():
        logits = reference(torch.tensor([text])).logits[0, :-1]
    distributions = torch.log_softmax(logits, -1)
    expected = distributions.gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
    for scored, k in zip(found, (0, 5), strict=True):
        assert scored.version == 3
        np.testing.assert_allclose(scored.logprobs, expected.numpy(), atol=1e-4)
        assert scored.likely_tokens.shape == (len(text) - 1, k)
        named = distributions.gather(-1, torch.from_numpy(scored.likely_tokens.astype(np.int64)))
        np.testing.assert_allclose(scored.likely_logprobs, named.numpy(), atol=1e-4)
        np.testing.assert_allclose(scored.likely_logprobs, distributions.topk(k).values.numpy(), atol=1e-4)


def test_answers_say_what_vllms_own_route_says(run):
    sampling = {"n": 3, "max_tokens": 9, "seed": 7, "temperature": 0.7, "logprobs": 0, "ignore_eos": True}
    request = {"token_ids": PROMPT, "sampling_params": sampling | {"detokenize": False}}

    async def both(client):
        vllms = await client._call("POST", "/inference/v1/generate", request | {"request_id": "theirs"})
        own = await generate(client, n=3, max_tokens=9, seed=7, stop_tokens=[], request_id="own")
        return json.loads(vllms)["choices"], own

    theirs, own = ask(run, both)
    assert [c["token_ids"] for c in theirs] == [c.tokens.tolist() for c in own]
    assert [c["finish_reason"] for c in theirs] == [c.finish_reason for c in own]
    expected = [[token["logprob"] for token in c["logprobs"]["content"]] for c in theirs]
    np.testing.assert_allclose([c.logprobs for c in own], expected, rtol=1e-6)


def test_vllm_takes_the_plugins_kernels_and_blocks(run):
    log = run.log("engine-0").read_text()
    assert "rms_norm=['areal', 'native'], fused_add_rms_norm=['areal', 'native']" in log
    assert f"'block_size': {CPU_BLOCK_TOKENS}" in log


def test_the_benchmarks_stand_in_answers_as_an_engine_does(run):
    sampling = {"n": 2, "max_tokens": 7, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    request = {"request_id": "raw", "token_ids": PROMPT, "sampling_params": sampling}
    answered = decode(ask(run, lambda client: client._call("POST", "/sample", request)))
    version = answered[0].versions[0][0]
    stood_in = decode(answers(version, tokens=7, group=2, variant=0))
    for real, imitated in zip(answered, stood_in, strict=True):
        assert (len(real.tokens), len(real.logprobs)) == (len(imitated.tokens), len(imitated.logprobs)) == (28, 28)
        assert real.versions == imitated.versions and real.routes is None


def assert_sampled_from(reference, completion, prompt=PROMPT, sampled=slice(None)):
    """`sampled` is the slice of the completion's tokens that the model has sampled."""
    tokens = torch.tensor([[*prompt, *completion.tokens.tolist()]])
    with torch.no_grad():
        logits = reference(tokens).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs[sampled], expected.numpy()[sampled], atol=1e-4)


def test_answers_end_with_a_stop_token_or_at_their_limit(run):
    stops = [1, 4, 8, 11, 13]
    completions = ask(run, lambda client: generate(client, n=16, max_tokens=12, stop_tokens=stops))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        assert not np.isin(completion.tokens[:-1], stops).any()
        if completion.finish_reason == "stop":
            assert completion.tokens[-1] in stops
        else:
            assert len(completion.tokens) == 12 and completion.tokens[-1] not in stops
    assert len({tuple(c.tokens) for c in completions}) > 1


def test_only_the_named_stop_tokens_end_an_answer(run, reference):
    end = reference.config.eos_token_id
    completions = ask(run, lambda client: generate(client, n=16, max_tokens=100, stop_tokens=[]))
    assert all(len(c.tokens) == 100 for c in completions)
    assert any(end in c.tokens for c in completions)


def test_a_seed_gives_the_same_answers_again(run):
    """Whether alone or beside others, in a group of any size; the answers of a group differ."""

    async def asked(client):
        beside = asyncio.create_task(generate(client, n=8, max_tokens=150, stop_tokens=[], request_id="beside"))
        first = await generate(client, seed=2**61, request_id="first")
        await beside
        again = await generate(client, seed=2**61, n=2, request_id="again")
        return first, again, await generate(client, seed=2**61 + 99, request_id="other")

    first, again, other = ([tuple(c.tokens) for c in completions] for completions in ask(run, asked))
    assert again == first[:2]
    assert len({*first, *other}) == 8


def test_seeded_answers_to_more_prompt_tokens_than_a_step_takes(run):
    """vLLM would prefill part of a prompt and rewind the random generator, which is impossible on CPU."""
    prompts = [np.random.default_rng(number).integers(3, 15, 900).tolist() for number in range(5)]

    async def asked(client):
        together = [
            generate(client, prompt, seed=2**60 + k, request_id=f"long-{k}") for k, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*together)
        return answers[-1], await generate(client, prompts[-1], seed=2**60 + 4, request_id="long-alone")

    together, alone = ask(run, asked)
    assert [tuple(c.tokens) for c in together] == [tuple(c.tokens) for c in alone]


def server(run):
    """Returns vLLM's processes."""
    port = int(run.endpoint("engine-0").rpartition(":")[2])
    (api,) = [p for p in psutil.Process().children() if any(c.laddr.port == port for c in p.net_connections())]
    return [api, *api.children(recursive=True)]


@pytest.mark.parametrize(
    ("options", "most"), [({"top_k": 3}, 3), ({"top_p": 0.2}, None), ({"top_k": 30, "top_p": 0.2}, None)]
)
def test_tokens_are_drawn_from_the_likeliest(run, reference, options, most):
    """The tokens that are left, and their log-probabilities, are those of Hugging Face's warpers."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(TEMPERATURE)]
    warpers += [TopKLogitsWarper(options["top_k"])] if "top_k" in options else []
    warpers += [TopPLogitsWarper(options["top_p"])] if "top_p" in options else []
    completions = ask(run, lambda client: generate(client, n=16, stop_tokens=[], seed=5, **options))
    found = 0
    for completion in completions:
        tokens = torch.tensor([[*PROMPT, *completion.tokens]])
        with torch.no_grad():
            logits = reference(tokens).logits[0, len(PROMPT) - 1 : -1]
        left = LogitsProcessorList(warpers)(tokens, logits).log_softmax(-1)
        expected = left[torch.arange(len(completion.tokens)), tokens[0, len(PROMPT) :]]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)
        assert most is None or (left.isfinite().sum(-1) == most).all()
        found += (left.isfinite().sum(-1) < logits.shape[-1]).sum()
    assert found


def test_answers_of_forced_length_have_it(run):
    prompt = Prompt(id=0, text="", answer="", tokens=PROMPT, response_tokens=100)

    def sampled(client):
        sampling = Sampling(client, RolloutConfig(max_new_tokens=5), [1, 4, 8], cache_salt="v0")
        return single_turn.sample(sampling, prompt, 4, "forced", seed=1)

    assert [len(completion.tokens) for completion in ask(run, sampled)] == [100] * 4


def test_each_token_carries_the_version_that_sampled_it(run):
    """The label moves twice while one answer is sampled."""

    async def moving(client):
        task = asyncio.create_task(generate(client, n=2, max_tokens=1500, stop_tokens=[], request_id="moving"))
        start = (await client.load()).generated_tokens
        for version in (1, 2, 3):
            while (await client.load()).generated_tokens < start + 200 * version:
                await asyncio.sleep(0.01)
            if version < 3:
                await client.set_version(version)
        await client.abort("moving")
        try:
            return await task
        finally:
            await client.set_version(0)

    for completion in ask(run, moving):
        assert len(completion.versions) == len(completion.tokens) >= 300
        assert np.unique(completion.versions).tolist() == [0, 1, 2]
        assert (np.diff(completion.versions) >= 0).all()


def test_an_aborted_request_returns_what_it_has(run):
    async def aborted(client):
        task = asyncio.create_task(generate(client, n=2, max_tokens=1900, stop_tokens=[], request_id="long"))
        while not (await client.load()).running:
            await asyncio.sleep(0.01)
        await client.abort("long")
        return await asyncio.wait_for(task, 300)

    for completion in ask(run, aborted):
        assert completion.finish_reason == "abort"
        assert len(completion.tokens) == len(completion.logprobs) < 1900


def test_interrupted_answers_are_resumed(run, reference):
    """They are of one distribution and end at the length that was asked for; complete answers stay as they are."""
    prompt = Prompt(id=0, text="", answer="", tokens=PROMPT, response_tokens=1000)
    rollout = RolloutConfig(temperature=TEMPERATURE)

    async def sampled(client):
        sampling = Sampling(client, rollout, [], cache_salt=None, may_interrupt=lambda: True)
        task = asyncio.create_task(single_turn.sample(sampling, prompt, 3, "group-1", seed=1))
        while not (await client.load()).running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await client.abort("group-")
        interrupted = await asyncio.wait_for(task, 300)
        await client.set_version(1)
        try:
            going_on = Sampling(client, rollout, [], cache_salt=None)
            whole = await single_turn.sample(going_on, prompt, 3, "group-1", seed=2, interrupted=interrupted)
            return (
                interrupted,
                whole,
                await single_turn.sample(going_on, prompt, 3, "group-1", seed=3, interrupted=whole),
            )
        finally:
            await client.set_version(0)

    interrupted, whole, again = ask(run, sampled)
    assert len({tuple(answer.tokens) for answer in whole}) == 3
    for first, answer in zip(interrupted, whole, strict=True):
        count = len(first.tokens)
        assert first.finish_reason == "abort" and 0 < count < 1000
        assert answer.finish_reason == "length" and len(answer.tokens) == 1000
        assert answer.tokens[:count].tolist() == first.tokens.tolist()
        assert answer.versions.tolist() == [0] * count + [1] * (1000 - count)
        assert_sampled_from(reference, answer)
    assert all(one is other for one, other in zip(whole, again, strict=True))


async def talk(episode):
    """An agent with the real OpenAI client; one of its calls belongs to another conversation."""
    async with episode.openai() as api, AsyncOpenAI(base_url=api.url, api_key=api.key) as client:
        messages = [{"role": "user", "content": episode.prompt.text}]
        for turn in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "42"}]
            if turn == 0:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1+1="}])
    return 1.0


@pytest.mark.parametrize("name", ["multi_turn", "tool_use", "openai"])
def test_trajectories_of_several_turns_are_of_one_distribution(run, reference, isolation, name):
    """Compares with one pass of the Hugging Face model over all of a trajectory's tokens: its context has what was said
    between the turns."""
    workflow, between = {
        "multi_turn": (multi_turn.run, "42"),
        "tool_use": (lambda episode: tool_use.run(episode, lambda text: "print(6 * 7)"), "\n```output\n42\n```\n"),
        "openai": (talk, "42"),
    }[name]
    config = load(run.config)
    tokenizer = Tokenizer(config.model.path)
    scorer = Scorer(config.reward, Judge(lambda *_: (0.5, "42")), config.rollout.max_new_tokens)
    episodes = EpisodeRunner(config, Workflow(workflow, turns=4 if name == "openai" else 3), tokenizer, scorer)
    prompt = Prompt(id=0, text="12+34=", answer="", tokens=tokenizer.prompts(["12+34="])[0], response_tokens=None)

    async def sampled(client):
        try:
            sampling = Sampling(client, config.rollout, tokenizer.stop_tokens, cache_salt=None)
            spec = EpisodeSpec(prompt, 0, "group-0", 2**60, "train")
            return await InThisProcess(episodes).sample(sampling, spec, 3)
        finally:
            await episodes.close()

    ended = ask(run, sampled)
    said = tokenizer.responses([between])[0][:-1]
    assert len({tuple(one.context.tokens) for one in ended}) == 3
    for context in (one.context for one in ended):
        own = context.loss_mask == 1
        assert context.answers == 3 and context.prompt == prompt.tokens
        assert context.tokens[~own].tolist() == said * 2 and not context.logprobs[~own].any()
        assert (
            np.isin(context.tokens[own], tokenizer.stop_tokens).sum() == 3
            and context.tokens[-1] in tokenizer.stop_tokens
        )
        assert_sampled_from(reference, context, prompt.tokens, own)
    assert episodes.account() == {"workflow_failures": 0, "refused_calls": 0}


def test_a_paused_engine_answers_after_it_resumes(run):
    async def paused(client):
        await client.pause(clear_cache=True)
        task = asyncio.create_task(generate(client))
        await asyncio.sleep(0.5)
        stalled = not task.done()
        await client.resume()
        return stalled, await asyncio.wait_for(task, 300)

    stalled, completions = ask(run, paused)
    assert stalled and len(completions) == 4


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic {secret}"},
        {"Authorization": "{secret}"},
        {"X-Token": "Bearer {secret}"},
    ],
)
def test_every_route_refuses_a_stranger(run, headers):
    headers = {name: value.format(secret=run.token) for name, value in headers.items()}
    named = [
        ("POST", "/commit"),
        ("POST", "/pause?mode=abort"),
        ("POST", "/update_weights"),
        ("POST", "/collective_rpc"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
        ("POST", "/sample"),
        ("POST", "/inference/v1/generate"),
    ]

    async def statuses(client):
        async with aiohttp.ClientSession(client.endpoint) as friend:
            friendly = {"Authorization": f"Bearer {run.token}"}
            described = await (await friend.get("/openapi.json", headers=friendly)).json()
        routes = named + [(method.upper(), path) for path, methods in described["paths"].items() for method in methods]
        async with aiohttp.ClientSession(client.endpoint) as stranger:
            answers = {}
            for method, path in routes:
                async with stranger.request(method, path, headers=headers, json={}) as response:
                    answers[method, path] = response.status
            async with stranger.get("/is_paused", headers=friendly) as response:
                return answers, await response.json()

    answers, paused = ask(run, statuses)
    assert len(answers) > 25
    assert set(answers.values()) == {401}, answers
    assert paused == {"is_paused": False}


def test_refusals_are_counted_and_logged(run):
    async def refused(client):
        async with client._session.get(client.endpoint + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("areal:refused_requests_total"))

    before = ask(run, refused)
    with pytest.raises(EngineError, match=r"engine-0 at http://127.0.0.1:\d+: POST /resume: status 401"):
        ask(run, lambda client: client.resume(), token="guess")
    assert ask(run, refused) == before + 1
    assert re.search(r"refused request 1, /\S+ from 127\.0\.0\.1", run.log("engine-0").read_text())


def test_a_silent_connection_is_closed(silent):
    assert silent.result() == b""


def test_the_secret_is_on_no_command_line(run):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                assert run.token.encode() not in file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_an_openai_client_with_the_secret_is_served(run):
    async def completion(client):
        body = {"model": "policy", "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
        async with client._session.post(client.endpoint + "/v1/completions", json=body) as response:
            return response.status, await response.json()

    status, answer = ask(run, completion)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 5


def test_a_request_that_vllm_refuses_is_an_error_with_its_reason(run):
    with pytest.raises(EngineError, match=r"engine-0 at .*/sample: status 400: .*vocab"):
        ask(run, lambda client: generate(client, prompt=[10**6]))


def test_a_request_to_a_dying_engine_fails_at_once(run):
    """Kills the engine, so this is the last test of the file."""
    api = server(run)[0]

    async def killed(client):
        task = asyncio.create_task(generate(client, n=2, max_tokens=1900, stop_tokens=[], request_id="doomed"))
        while not (await client.load()).running:
            await asyncio.sleep(0.01)
        api.send_signal(signal.SIGKILL)
        await asyncio.wait_for(task, 15)

    with pytest.raises(EngineError, match=r"engine-0 at http"):
        ask(run, killed)

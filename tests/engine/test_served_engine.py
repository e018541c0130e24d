"""An engine of a served model, as the launcher starts it: with an adapter and options of vLLM, against transformers."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_megatron.config import LoraConfig, PenaltyConfig, PPOConfig, ServedConfig, ServedModelConfig
from areal_megatron.controller.teacher import Teachers
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.launch.supervision.orders import start_order
from areal_megatron.planning.pools import Process, Slot
from areal_megatron.process.errors import first_cause
from areal_megatron.reward.served import ServedModels
from areal_megatron.run.folder import RunFolder
from tests.support.adapter_oracle import adapted_oracle, write_adapter
from tests.support.engines import ask, make_run, started_beside, started_engine
from tests.support.likeliest import likeliest
from tests.support.plain_results import make_trajectories
from tests.support.tiny_models import load_oracle
from tests.support.training_oracle import distributions, response_logprobs

LONGEST, LENGTH, RANK, ALPHA, TARGETS, TOP = 200, 12, 5, 12.0, ["o_proj", "gate_proj"], 6


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    adapter = write_adapter(folder / "adapter", world / "model", RANK, ALPHA, TARGETS)
    teacher = ServedModelConfig(str(world / "model"), str(adapter), max_length=LONGEST, max_new_tokens=LENGTH)
    teacher.temperature, teacher.vllm = 0.0, {"enable_prefix_caching": False, "max_num_seqs": 8}
    penalty = PenaltyConfig(kl=1.0, kl_form="forward", kl_model="served.teacher", kl_top_k=TOP)
    changes = {"served": ServedConfig(teacher=teacher), "ppo": PPOConfig(penalty=penalty)}
    run, config = make_run(folder / "run", world, rollout={"temperature": 1.0}, **changes)
    with started_beside(run, config, "teacher"):
        yield run, config


def test_a_served_model_answers_with_its_adapter(served, world):
    run, config = served
    tokenizer, models = Tokenizer(config.model.path), ServedModels(config.served_models, run)
    adapted, base = adapted_oracle(world / "model", RANK, ALPHA / RANK, TARGETS), load_oracle(world / "model")
    for question in ("1+1=", "12+30=", "7+8="):
        said = [{"role": "user", "content": question}]
        (answer,) = asyncio.run(models.chat("teacher", said))
        expected, without = (
            likeliest(model, tokenizer.conversation(said), tokenizer.stop_tokens, LENGTH) for model in (adapted, base)
        )
        assert answer.text == tokenizer.decode(expected) != tokenizer.decode(without)


def test_a_teacher_tells_how_likely_it_finds_what_was_sampled(served, world):
    """By its adapter, of whole trajectories; of those alone that are trained."""
    run, config = served
    trajectories = make_trajectories(9, version=0)
    for trajectory in trajectories:  # tokens that the model has
        trajectory.prompt, trajectory.response = trajectory.prompt % 16, trajectory.response % 16

    async def told():
        teachers = Teachers(config, run)
        try:
            await asyncio.wait_for(teachers.score("teacher", trajectories), 60)
        finally:
            await teachers.close()

    asyncio.run(told())
    adapted = adapted_oracle(world / "model", RANK, ALPHA / RANK, TARGETS)
    assert not trajectories[1].loss_mask.any() and not len(trajectories[1].reference)
    for trajectory in (*trajectories[:1], *trajectories[2:]):
        with torch.no_grad():
            expected = response_logprobs(adapted, trajectory, 1.0)
            whole = distributions(adapted, np.concatenate((trajectory.prompt, trajectory.response)), 1.0)
        torch.testing.assert_close(torch.tensor(trajectory.reference), expected, atol=1e-5, rtol=0)
        places = whole[len(trajectory.prompt) - 1 + np.flatnonzero(trajectory.loss_mask)]
        told = torch.tensor(trajectory.likely_logprobs).view(-1, TOP)
        named = torch.tensor(trajectory.likely_tokens.astype(np.int64)).view(-1, TOP)
        torch.testing.assert_close(told, places.topk(TOP).values, atol=1e-5, rtol=0)
        torch.testing.assert_close(told, places.gather(1, named), atol=1e-5, rtol=0)


def test_tokens_that_the_student_lacks_are_marked(served, tmp_path):
    """The student's table of tokens has fewer rows than the teacher's."""
    run, config = served
    smaller = json.loads((Path(config.model.path) / "config.json").read_text()) | {"vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps(smaller))
    pair = [make_trajectories(1, version=0)[0] for _ in range(2)]
    for trajectory in pair:
        trajectory.prompt, trajectory.response = trajectory.prompt % 11, trajectory.response % 11

    async def told(trajectory, path):
        teachers = Teachers(replace(config, model=replace(config.model, path=path)), run)
        try:
            await asyncio.wait_for(teachers.score("teacher", [trajectory]), 60)
        finally:
            await teachers.close()

    asyncio.run(told(pair[0], config.model.path))
    asyncio.run(told(pair[1], str(tmp_path)))
    lacking = pair[0].likely_tokens >= 11
    assert 0 < lacking.sum() < len(lacking)
    np.testing.assert_array_equal(pair[1].likely_tokens, np.where(lacking, -1, pair[0].likely_tokens))
    np.testing.assert_array_equal(pair[1].likely_logprobs, np.where(lacking, -100, pair[0].likely_logprobs))


def test_a_teacher_that_is_away_is_waited_for_and_then_ends_the_run(served):
    run, config = served
    gone = replace(config, served=replace(config.served, teacher=replace(config.served.teacher, engines=1)))
    gone.reward = replace(config.reward, away_s=0.5)
    elsewhere = RunFolder(run.folder.parent / "elsewhere")
    elsewhere.create()
    elsewhere.announce("teacher-0", "http://127.0.0.1:9")

    async def told():
        await Teachers(gone, elsewhere).score("teacher", make_trajectories(1, version=0))

    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(told())
    assert re.match(r"served.teacher: away for 1 s \(reward.away_s\): teacher-0 at", str(first_cause(ended.value)))


def test_the_options_of_its_engines_are_vllms_own(served):
    run, _ = served

    async def read(client):
        return (await client._call("GET", "/metrics")).decode()

    (cache,) = [line for line in ask(run, read, name="teacher-0").splitlines() if "cache_config_info{" in line]
    assert 'enable_prefix_caching="False"' in cache


def test_the_policys_engines_serve_models_of_their_base(world, tmp_path):
    """Each with its own adapter or none, asked in one batch with the policy's: none is answered with another one's."""
    own = {"policy": (4, 8.0, ["all-linear"]), "judge": (RANK, ALPHA, TARGETS), "teacher": (16, 4.0, ["v_proj"])}
    folders = {name: str(write_adapter(tmp_path / name, world / "model", *each)) for name, each in own.items()}
    path, limits = str(world / "model"), {"engines": 0, "max_length": LONGEST, "max_new_tokens": LENGTH}
    lodgers = {name: ServedModelConfig(path, folders[name], **limits) for name in ("judge", "teacher")}
    lodgers["user"] = ServedModelConfig(path, **limits, temperature=0.0)
    lodgers["judge"].temperature = 0.0
    penalty = PenaltyConfig(kl=1.0, kl_form="forward", kl_model="served.teacher", kl_top_k=TOP)
    changes = {"served": ServedConfig(**lodgers), "ppo": PPOConfig(penalty=penalty)}
    changes["lora"] = LoraConfig(rank=4, alpha=8.0, start=folders["policy"])
    run, config = make_run(tmp_path / "run", world, rollout={"temperature": 1.0, "max_running": 8}, **changes)
    tokenizer, models = Tokenizer(path), ServedModels(config.served_models, run)
    taught, questions = make_trajectories(3, version=0), ("1+1=", "12+30=", "7+8=")
    taught = [one for one in taught if one.loss_mask.any()]
    for trajectory in taught:
        trajectory.prompt, trajectory.response = trajectory.prompt % 16, trajectory.response % 16

    async def asked(client):
        teachers, sampling = Teachers(config, run), {"max_tokens": 100, "temperature": 1.0, "stop_tokens": []}
        policy = asyncio.ensure_future(client.generate([3, 5, 7], n=4, request_id="policy", **sampling))
        said = [models.chat(name, [{"role": "user", "content": q}]) for q in questions for name in ("judge", "user")]
        found = asyncio.gather(*said, teachers.score("teacher", taught))
        most = 0
        while not found.done():
            most = max(most, (await client.load()).running)
            await asyncio.sleep(0.01)
        answers, beside = await found, not policy.done()
        await teachers.close()
        return answers[:-1], await policy, beside, most

    process = Process("engine-0", "rollout", 0, "here", (Slot("here", 0),))
    with started_engine(run, **start_order(config, run, process, "here").settings):
        answers, policy, beside, most = ask(run, asked)
    assert beside and most > 6
    adapted = {name: adapted_oracle(path, rank, alpha / rank, targets) for name, (rank, alpha, targets) in own.items()}
    oracles = {"judge": adapted["judge"], "user": load_oracle(path)}
    for (question, name), (answer,) in zip(((q, n) for q in questions for n in oracles), answers, strict=True):
        tokens = tokenizer.conversation([{"role": "user", "content": question}])
        expected = {
            each: tokenizer.decode(likeliest(model, tokens, tokenizer.stop_tokens, LENGTH))
            for each, model in oracles.items()
        }
        assert answer.text == expected.pop(name) and answer.text not in expected.values()
    for one in policy:
        tokens = torch.tensor([3, 5, 7, *one.tokens.tolist()])
        with torch.no_grad():
            expected = adapted["policy"](tokens[None]).logits[0].log_softmax(-1)[range(2, len(tokens) - 1), tokens[3:]]
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-5, rtol=0)
    for trajectory in taught:
        with torch.no_grad():
            expected = response_logprobs(adapted["teacher"], trajectory, 1.0)
        torch.testing.assert_close(torch.tensor(trajectory.reference), expected, atol=1e-5, rtol=0)

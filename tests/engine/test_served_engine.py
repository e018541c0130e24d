"""An engine of a served model, as the launcher starts it: with an adapter and options of vLLM, against transformers."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_megatron.config import PenaltyConfig, PPOConfig, ServedConfig, ServedModelConfig
from areal_megatron.controller.teacher import Teachers
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.process.errors import first_cause
from areal_megatron.reward.served import ServedModels
from areal_megatron.run.folder import RunFolder
from tests.support.adapter_oracle import adapted_oracle, write_adapter
from tests.support.engines import ask, make_run, started_beside
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

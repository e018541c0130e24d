"""An engine of a served model, as the launcher starts it: with an adapter and options of vLLM, against transformers."""

import asyncio
import re
from dataclasses import replace

import pytest
import torch

from areal_megatron.config import ServedConfig, ServedModelConfig
from areal_megatron.controller.teacher import Teacher
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.process.errors import first_cause
from areal_megatron.reward.served import ServedModels
from areal_megatron.run.folder import RunFolder
from tests.support.adapter_oracle import adapted_oracle, write_adapter
from tests.support.engines import ask, make_run, started_beside
from tests.support.likeliest import likeliest
from tests.support.plain_results import make_trajectories
from tests.support.tiny_models import load_oracle
from tests.support.training_oracle import response_logprobs

LONGEST, LENGTH, RANK, ALPHA, TARGETS = 200, 12, 5, 12.0, ["o_proj", "gate_proj"]


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    adapter = write_adapter(folder / "adapter", world / "model", RANK, ALPHA, TARGETS)
    teacher = ServedModelConfig(str(world / "model"), str(adapter), max_length=LONGEST, max_new_tokens=LENGTH)
    teacher.temperature, teacher.vllm = 0.0, {"enable_prefix_caching": False, "max_num_seqs": 8}
    run, config = make_run(folder / "run", world, served=ServedConfig(teacher=teacher))
    with started_beside(run, config, "teacher"):
        yield run, config


def test_a_served_model_answers_with_its_adapter(served, world):
    run, config = served
    tokenizer, models = Tokenizer(config.model.path), ServedModels(config, run)
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
        teacher = Teacher(config, run)
        try:
            await asyncio.wait_for(teacher.score(trajectories), 60)
        finally:
            await teacher.close()

    asyncio.run(told())
    adapted = adapted_oracle(world / "model", RANK, ALPHA / RANK, TARGETS)
    assert not trajectories[1].loss_mask.any() and not len(trajectories[1].reference)
    for trajectory in (*trajectories[:1], *trajectories[2:]):
        with torch.no_grad():
            expected = response_logprobs(adapted, trajectory, 1.0)
        torch.testing.assert_close(torch.tensor(trajectory.reference), expected, atol=1e-5, rtol=0)


def test_a_teacher_that_is_away_is_waited_for_and_then_ends_the_run(served):
    run, config = served
    gone = replace(config, served=replace(config.served, teacher=replace(config.served.teacher, engines=1)))
    gone.reward = replace(config.reward, away_s=0.5)
    elsewhere = RunFolder(run.folder.parent / "elsewhere")
    elsewhere.create()
    elsewhere.announce("teacher-0", "http://127.0.0.1:9")

    async def told():
        await Teacher(gone, elsewhere).score(make_trajectories(1, version=0))

    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(told())
    assert re.match(r"served.teacher: away for 1 s \(reward.away_s\): teacher-0 at", str(first_cause(ended.value)))


def test_the_options_of_its_engines_are_vllms_own(served):
    run, _ = served

    async def read(client):
        return (await client._call("GET", "/metrics")).decode()

    (cache,) = [line for line in ask(run, read, name="teacher-0").splitlines() if "cache_config_info{" in line]
    assert 'enable_prefix_caching="False"' in cache

"""An engine of a served model, as the launcher starts it: with an adapter and options of vLLM, against transformers."""

import asyncio

import pytest

from areal_megatron.config import ServedConfig, ServedModelConfig
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward.served import ServedModels
from tests.support.adapter_oracle import adapted_oracle, write_adapter
from tests.support.engines import ask, make_run, started_beside
from tests.support.likeliest import likeliest
from tests.support.tiny_models import load_oracle

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


def test_the_options_of_its_engines_are_vllms_own(served):
    run, _ = served

    async def read(client):
        return (await client._call("GET", "/metrics")).decode()

    (cache,) = [line for line in ask(run, read, name="teacher-0").splitlines() if "cache_config_info{" in line]
    assert 'enable_prefix_caching="False"' in cache

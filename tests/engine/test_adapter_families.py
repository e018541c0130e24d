"""Adapters in models with experts, on attention, a dense MLP and shared experts, in a real vLLM server."""

import asyncio

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from areal_megatron.checkpoint import hf
from areal_megatron.config import (
    Config,
    DataConfig,
    LoraConfig,
    MachineConfig,
    ModelConfig,
    ReshardConfig,
    RolloutConfig,
)
from areal_megatron.config.config_file import save
from areal_megatron.engine.client import EngineClient
from areal_megatron.models.adapter import served
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.outlet import TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.session import LinkRef, init_body
from areal_megatron.reshard.trainer_layout import MegatronSizes, layout
from areal_megatron.run.folder import RunFolder
from tests.support.adapter_oracle import adapt, random_adapter
from tests.support.engines import started_engine
from tests.support.link_store import open_store
from tests.support.reshard_oracle import write_model
from tests.support.version_oracle import recomputed

TARGETS = {
    "qwen3-moe": "q_proj,k_proj,v_proj,o_proj",
    "deepseek-v3-moe": "q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj,gate_proj,up_proj,down_proj",
}
PROMPT = [5, 6, 7, 8, 9] * 8
PATIENCE_S = 120


def make(name, folder):
    """Writes a model and a run; returns (config, config.json, factors of an adapter)."""
    tensors = write_model(name, folder / "model", initializer_range=0.1)
    hf_config = read_config(folder / "model")
    words = {f"<{number}>": number for number in range(hf_config["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="<0>")).save(str(folder / "model" / "tokenizer.json"))
    config = Config(
        name="run",
        runs_dir=str(folder),
        updates=1,
        batch_size=8,
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        lora=LoraConfig(rank=5, alpha=12.0, targets=TARGETS[name]),
        data=DataConfig(train="none", max_prompt_tokens=64),
        machine=MachineConfig(device="cpu", peer_timeout_s=PATIENCE_S),
        rollout=RolloutConfig(group_size=2, max_new_tokens=64, max_running=8),
        reshard=ReshardConfig(timeout_s=PATIENCE_S, update="full"),
    )
    factors = random_adapter(tensors, config.lora.names, config.lora.rank, seed=0)
    (folder / "factors").mkdir()
    save_file(factors, folder / "factors" / "model.safetensors", {"format": "pt"})
    return config, hf_config, factors


async def answers_before_and_after(config, hf_config, run, held):
    """Returns answers of the engine without an adapter, and with what `held` has of one."""
    store, loop = open_store(), asyncio.get_running_loop()
    delivered = loop.create_future()
    trainer = TrainerRank(
        parameters=lambda: held,
        planner=Planner.of(config, hf_config, MegatronSizes()),
        rank=0,
        dtype=torch.float32,
        store=f"127.0.0.1:{store.port}",
        on_delivered=lambda *said: loop.call_soon_threadsafe(delivered.set_result, said[-1]),
        timeline=Timeline(run.timeline("trainer-0"), "trainer-0"),
        reshard=config.reshard,
    )
    client = EngineClient("engine-0", run.endpoint("engine-0", 30), run.token, PATIENCE_S)
    asked = {"n": 2, "max_tokens": 20, "temperature": 1.0, "stop_tokens": []}
    await client.set_version(0)
    await client.join_link(init_body(config=config, engine=0, generation=1, store=trainer.store, hf_config=hf_config))
    before = await client.generate(PROMPT, request_id="before", **asked)
    publisher = Publisher(trainer)
    publisher.publish(1, [LinkRef(0, 1)])
    await client.start_update()
    assert await asyncio.wait_for(delivered, PATIENCE_S) == ""
    await client.commit(1, clear_cache=True)
    after = await client.generate(PROMPT, request_id="after", **asked)
    await client.close()
    return before, after


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_an_update_of_adapters_is_exact(tmp_path, name):
    config, hf_config, factors = make(name, tmp_path)
    run = RunFolder(config.run_dir)
    run.create()
    save(config, run.config)
    own = layout(hf_config, MegatronSizes(), 0, served(config, hf_config))
    held = {name: torch.zeros(shape) for name, shape in own.parameters.items()}
    hf.load(held, own, tmp_path / "factors")
    with started_engine(run):
        before, after = asyncio.run(answers_before_and_after(config, hf_config, run, held))
    make_model = transformers.AutoModelForCausalLM.from_pretrained
    model = make_model(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    for answers in (before, after):
        for one in answers:
            expected = recomputed([model], PROMPT, one.tokens.tolist(), [])
            torch.testing.assert_close(torch.from_numpy(one.logprobs), expected, atol=1e-5, rtol=0)
        adapt(model, factors, config.lora.alpha / config.lora.rank)

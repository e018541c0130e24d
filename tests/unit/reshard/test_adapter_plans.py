"""Plans of adapters, without processes, against tests/support/adapter_oracle.py."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from areal_megatron.config import Config, ConfigError, DataConfig, LoraConfig, MachineConfig, ModelConfig, RolloutConfig
from areal_megatron.models.adapter import Adapter, served
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard.copies import bind, pack, unpack
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.session import LinkInfo, init_body
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.adapter_oracle import DENSE, megatron_factors, random_adapter, vllm_factors
from tests.support.reshard_oracle import write_model

DESCRIBED = Path(__file__).resolve().parents[3] / "configs" / "models"
ADAPTER = Adapter(rank=6, alpha=12.0, targets=DENSE)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(config.json, factors of an adapter) of a model that transformers wrote."""
    folder = tmp_path_factory.mktemp("model")
    tensors = write_model("qwen3", folder)
    return read_config(folder), random_adapter(tensors, DENSE, ADAPTER.rank, seed=0)


@pytest.mark.parametrize(
    "sizes",
    [MegatronSizes(), MegatronSizes(tp=4), MegatronSizes(tp=2, pp=2), MegatronSizes(pp=2, dp=2)],
    ids=str,
)
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_each_engine_rank_gets_exactly_its_slices(model, sizes, tp):
    config, factors = model
    sources = [megatron_factors(factors, config, sizes, rank) for rank in range(sizes.ranks)]
    plan = Planner(config, sizes, EngineSizes(tp=tp), bucket_elements=3000, adapter=ADAPTER).plan(0)
    for rank in range(tp):
        expected = vllm_factors(factors, config, tp, rank)
        held, received = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}, 0
        for bucket in plan.received_by(rank):
            flat = torch.empty(bucket.elements)
            pack(bind((each.send for each in bucket.transfers), sources[bucket.source], flat))
            unpack(bind((each.receive for each in bucket.transfers), held, flat))
            received += bucket.elements
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
        assert received == sum(tensor.numel() for tensor in expected.values())


def run_of(model: str, **lora) -> Config:
    return Config(
        name="x",
        updates=1,
        model=ModelConfig(path=str(DESCRIBED / model)),
        lora=LoraConfig(rank=8, **lora),
        data=DataConfig(train="t"),
        machine=MachineConfig(device="cpu"),
        rollout=RolloutConfig(tp=2),
    )


def test_both_sides_of_a_link_make_the_same_plan_of_an_adapter():
    config = run_of("Qwen3-8B", targets="o_proj,q_proj")
    hf_config = read_config(config.model.path)
    body = init_body(config=config, engine=0, generation=1, store="localhost:1", hf_config=hf_config)
    told = LinkInfo(**json.loads(json.dumps(body))["init_info"])
    assert told.sent_adapter == served(config, hf_config) == Adapter(8, 32.0, ("q_proj", "o_proj"))
    here = Planner.of(config, hf_config, MegatronSizes()).plan(0)
    assert told.planner().plan(0).digest == here.digest
    canonical = {each.receive.tensor for each in here.transfers}
    assert canonical == {
        f"model.layers.{{}}.self_attn.{target}.{factor}.weight"
        for target in ("q_proj", "o_proj")
        for factor in ("lora_A", "lora_B")
    }


def test_a_link_of_whole_weights_has_no_adapter():
    for config in (run_of("Qwen3-8B", merge=True), run_of("Qwen3-8B")):
        config.lora.rank *= config.lora.merge
        hf_config = read_config(config.model.path)
        body = init_body(config=config, engine=0, generation=1, store="localhost:1", hf_config=hf_config)
        assert body["init_info"]["adapter"] is None
        plan = Planner.of(config, hf_config, MegatronSizes()).plan(0)
        assert "model.embed_tokens.weight" in {each.receive.tensor for each in plan.transfers}


def test_layers_whose_adapters_engines_apply_wrongly_are_refused():
    for targets in ("all-linear", "kv_b_proj,o_proj"):
        config = run_of("DeepSeek-V3", targets=targets)
        everything = "q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj,gate_proj,up_proj,down_proj"
        others = "o_proj" if "," in targets else everything
        problem = f"lora.targets: engines apply an adapter of kv_b_proj wrongly; write {others}, or have merged weights"
        with pytest.raises(ConfigError, match=f"^{problem}"):
            served(config, read_config(config.model.path))
    config = run_of("DeepSeek-V3", targets="all-linear", merge=True)
    assert served(config, read_config(config.model.path)) is None


def test_what_other_processes_are_told_of_an_adapter_is_all():
    assert Adapter.of_told(json.loads(json.dumps(ADAPTER.told))) == ADAPTER
    assert ADAPTER.told.keys() == asdict(ADAPTER).keys()

"""Every engine layout against what vLLM builds and loads by itself from the same checkpoint, and what an update writes
into an engine's slot of an adapter against what vLLM itself writes of the same one."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from areal_megatron.checkpoint import hf
from areal_megatron.checkpoint.convert import from_hf, to_hf
from areal_megatron.checkpoint.hf_folder import INDEX
from areal_megatron.config import Config, DataConfig, MachineConfig, ModelConfig
from areal_megatron.engine.server import server_command
from areal_megatron.models.adapter import Adapter
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.adapter_oracle import random_adapter
from tests.support.loading import load
from tests.support.models_with_images import write_with_images
from tests.support.reshard_oracle import MODELS, megatron_shard, write_model

WRITTEN = [
    "llama-converted",
    "qwen2-converted",
    "qwen3-tied-converted",
    "qwen3-moe-converted",
    "qwen2-tied-exported",
    "qwen3-moe-exported",
    "glm4-moe-converted",
    "glm4-moe-exported",
    "deepseek-v3-moe-converted",
    "moonlight-moe-exported",
    "glm4-flash-moe-converted",
    "glm4-flash-moe-exported",
    "qwen3-next-moe-converted",
    "qwen3-next-moe-exported",
    "qwen3.5-exported",
    "qwen3.5-moe-converted",
]
IMAGES = "qwen3.5-moe-with-images"
"""A model of which engines have the language model alone."""
CASES = [
    *((name, tp, False) for tp in (1, 2) for name in MODELS),
    *((name, 1, False) for name in WRITTEN),
    ("qwen2-two-kv-heads", 4, False),
    ("qwen3-moe", 4, False),
    ("qwen3-moe", 2, True),
    ("qwen3-moe-five", 2, True),
    ("qwen3-moe-five", 4, True),
    ("glm4-moe", 2, True),
    ("deepseek-v3-moe", 2, True),
    ("glm4-flash-moe", 2, True),
    ("qwen3-next-moe", 2, True),
    ("qwen3.5-moe", 2, True),
]
"""(model, tp, expert parallel), in float32"""
HALF = [
    ("llama-tied", 2, False, "float16"),
    ("qwen2", 1, False, "float16"),
    ("qwen2-tied", 1, False, "bfloat16"),
    ("qwen3", 2, False, "bfloat16"),
    ("qwen3-moe", 2, True, "float16"),
    ("glm4-moe", 2, False, "bfloat16"),
    ("deepseek-v3-moe", 2, False, "bfloat16"),
    ("moonlight-moe", 1, False, "bfloat16"),
    ("glm4-flash-moe", 2, False, "bfloat16"),
    ("qwen3-next-moe", 1, False, "bfloat16"),
    ("qwen3-next-moe", 2, False, "bfloat16"),
    ("qwen3.5", 2, False, "bfloat16"),
    (IMAGES, 2, False, "bfloat16"),
    ("qwen3.5-moe", 1, False, "bfloat16"),
]
"""Cases in half precision."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    "llama": Adapter(8, 16.0, (*ATTENTION, *MLP)),
    "qwen2": Adapter(5, 12.0, (*ATTENTION, *MLP), use_rslora=True),
    "qwen3-tied": Adapter(1, 3.0, ("v_proj", "down_proj")),
    "qwen3": Adapter(16, 32.0, ("q_proj", "up_proj")),
    "qwen3-moe": Adapter(8, 16.0, ATTENTION),
    "glm4-moe": Adapter(8, 16.0, (*ATTENTION, *MLP)),
    "deepseek-v3-moe": Adapter(8, 16.0, LATENT),
    "moonlight-moe": Adapter(8, 16.0, ("q_proj", *LATENT[2:], *MLP)),
    "qwen3-next-moe": Adapter(8, 16.0, ("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION, *MLP)),
    "qwen3.5": Adapter(5, 12.0, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *ATTENTION, *MLP)),
    "qwen3.5-moe": Adapter(8, 16.0, ("in_proj_qkv", "in_proj_a", "down_proj")),
}
ADAPTED = [
    *((f"{name}-adapted", tp, False, "float32") for tp in (1, 2) for name in ADAPTERS),
    ("qwen2-two-kv-heads-adapted", 4, False, "bfloat16"),
]
"""Cases of models with an adapter."""
FUSED = ("qkv_proj", "gate_up_proj", "in_proj_qkvz", "in_proj_ba")
"""Layers of engines in which several targets lie side by side: those without an adapter stay empty."""
DESCRIBED = Path(__file__).resolve().parents[2] / "configs" / "models" / "Qwen3-8B"
RANKS = 4
SHARD_BYTES = 500_000


def write_again(folder: Path, name: str, tensors: dict) -> None:
    """Writes model `name` again: converted to torch_dist and back, and as a trainer of one rank exports it."""
    config, sizes = read_config(folder / name), MegatronSizes()
    from_hf(folder / name, folder / f"{name}-checkpoint")
    to_hf(folder / f"{name}-checkpoint", folder / f"{name}-converted", shard_bytes=SHARD_BYTES)
    hf.export(
        megatron_shard(tensors, config, sizes, 0),
        hf_config=config,
        sizes=sizes,
        rank=0,
        source=folder / name,
        path=folder / f"{name}-exported",
        shard_bytes=SHARD_BYTES,
    )
    for by in ("converted", "exported"):
        index = json.loads((folder / f"{name}-{by}" / INDEX).read_text())
        assert index["weight_map"].keys() == tensors.keys()


def write_adapted(folder: Path, name: str, adapter: Adapter, **sizes) -> None:
    """Writes model `name` of those sizes with a random adapter."""
    tensors = write_model(name, folder, hidden_size=256, **sizes)
    known = Adapter(1, 1.0, ("all-linear",)).modules(architecture(read_config(folder)))
    assert set(adapter.targets) <= set(known)
    (folder / "adapter").mkdir()
    factors = random_adapter(tensors, adapter.targets, adapter.rank, seed=0)
    save_file(factors, folder / "adapter" / "model.safetensors", {"format": "pt"})
    (folder / "adapter.json").write_text(json.dumps(adapter.told))


def hf_overrides(head_dtype: str) -> dict:
    """What an engine is told, whatever the dtype, so that its logits have `head_dtype`."""
    config = Config(
        name="x",
        updates=1,
        model=ModelConfig(path=str(DESCRIBED), dtype="float16", head_dtype=head_dtype),
        data=DataConfig(train="t"),
        machine=MachineConfig(device="cuda"),
    )
    command = server_command(config, "127.0.0.1", 80)
    return json.loads(command[command.index("--hf-overrides") + 1])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Each rank's case → [parameters as vLLM loaded them, as we filled them, logits], or of a model with an adapter
    [layers, those in which vLLM's slot is empty, those that differ, those in the last slot]."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        heads = {} if "kv_lora_rank" in MODELS[name][1] else {"head_dim": 32}
        write_again(folder, name, write_model(name, folder / name, hidden_size=256, **heads))
    write_model("qwen2", folder / "qwen2-two-kv-heads", num_key_value_heads=2, hidden_size=256)
    write_with_images("qwen3.5-moe", folder / IMAGES, hidden_size=256)
    # The experts of five do not divide evenly, and the kernel pads the width of each to a multiple of 32.
    write_model("qwen3-moe", folder / "qwen3-moe-five", num_local_experts=5, moe_intermediate_size=48, hidden_size=256)
    for name, adapter in ADAPTERS.items():
        write_adapted(folder / f"{name}-adapted", name, adapter)
    write_adapted(folder / "qwen2-two-kv-heads-adapted", "qwen2", ADAPTERS["qwen2"], num_key_value_heads=2)
    cases = [*((*case, "float32") for case in CASES), *HALF, *ADAPTED]
    return load(folder, cases, RANKS, hf_overrides(head_dtype="float32"))


def is_wide(model: str, parameter: str) -> bool:
    """Whether a parameter is float32 in models of any dtype."""
    return parameter.endswith((".e_score_correction_bias", ".A_log")) or (
        model.startswith("glm4") and ".mlp.gate." in parameter
    )


@pytest.mark.parametrize(("name", "tp", "expert_parallel", "dtype"), [*((*case, "float32") for case in CASES), *HALF])
def test_layout_is_what_vllm_loads(loaded, name, tp, expert_parallel, dtype):
    for rank in range(tp):
        by_vllm, by_us, _ = loaded[rank][f"{name} {tp} {expert_parallel} {dtype}"]
        assert by_us == by_vllm
        assert {kind for key, (_, kind, *_) in by_us.items() if not is_wide(name, key)} == {f"torch.{dtype}"}
        assert {kind for key, (_, kind, *_) in by_us.items() if is_wide(name, key)} <= {"torch.float32"}


@pytest.mark.parametrize(("name", "tp", "expert_parallel", "dtype"), HALF)
def test_logits_are_not_rounded_to_the_dtype_of_the_model(loaded, name, tp, expert_parallel, dtype):
    _, _, (kind, error, rounded) = loaded[0][f"{name} {tp} {expert_parallel} {dtype}"]
    assert kind == "torch.float32" and error < 1e-4 < rounded


def test_logits_can_have_the_dtype_of_the_model():
    assert hf_overrides(head_dtype="model") == {"head_dtype": "model"}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_we_write_is_to_vllm_the_checkpoint_it_came_from(loaded, name):
    """`write_again` asserts that the keys are the same, and this test that the parameters are."""
    ours, *_ = loaded[0][f"{name} 1 False float32"]
    original, *_ = loaded[0][f"{name.rpartition('-')[0]} 1 False float32"]
    assert ours == original


@pytest.mark.parametrize(("name", "tp", "expert_parallel", "dtype"), ADAPTED)
def test_an_update_writes_of_an_adapter_what_vllm_writes(loaded, name, tp, expert_parallel, dtype):
    for rank in range(tp):
        layers, empty, different, in_the_last = loaded[rank][f"{name} {tp} {expert_parallel} {dtype}"]
        assert layers and not different and not in_the_last
        assert all(layer.endswith(FUSED) for layer in empty)

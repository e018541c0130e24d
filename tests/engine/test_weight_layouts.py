"""Every engine layout against what vLLM builds and loads by itself from the same checkpoint."""

import json
from pathlib import Path

import pytest

from areal_megatron.checkpoint import hf
from areal_megatron.checkpoint.convert import from_hf, to_hf
from areal_megatron.checkpoint.hf_folder import INDEX
from areal_megatron.config import Config, DataConfig, MachineConfig, ModelConfig
from areal_megatron.engine.server import server_command
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard.trainer_layout import MegatronSizes
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
    """Each rank's case → [parameters as vLLM loaded them, as we filled them]."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        heads = {} if "kv_lora_rank" in MODELS[name][1] else {"head_dim": 32}
        write_again(folder, name, write_model(name, folder / name, hidden_size=256, **heads))
    write_model("qwen2", folder / "qwen2-two-kv-heads", num_key_value_heads=2, hidden_size=256)
    write_with_images("qwen3.5-moe", folder / IMAGES, hidden_size=256)
    # The experts of five do not divide evenly, and the kernel pads the width of each to a multiple of 32.
    write_model("qwen3-moe", folder / "qwen3-moe-five", num_local_experts=5, moe_intermediate_size=48, hidden_size=256)
    cases = [*((*case, "float32") for case in CASES), *HALF]
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

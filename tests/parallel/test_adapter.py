"""Adapters on trainer ranks against plain PyTorch on Hugging Face models, in every parallel layout.

Models have two layers, but for Qwen3, which is cut into virtual stages, and gated delta nets, of which the fourth layer
is the first of attention.
"""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from areal_megatron.checkpoint.convert import to_hf, to_peft
from areal_megatron.checkpoint.peft import WEIGHTS
from areal_megatron.checkpoint.torch_dist import MODEL_PREFIXES
from areal_megatron.checkpoint.torch_dist_metadata import stored_tensors
from areal_megatron.models.weight_files import ADAPTER
from areal_megatron.run.folder import RunFolder
from tests.support.adapter_oracle import adapted_oracle, write_adapter
from tests.support.soaking import with_soaked
from tests.support.tiny_models import load_oracle, save_model

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe", "glm4_moe", "deepseek_v3", "moonlight")
NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
CLASSIC = {"targets": "q_proj,v_proj"}
EXPERTS = {"experts": True, "rank": 8}
CASES = {
    "tp1": [(family, {}, {}) for family in FAMILIES] + [("qwen3", {"recompute": "full"}, CLASSIC)],
    "nets": [(family, {}, {}) for family in NETS],
    "nets-2-ranks": [
        ("qwen3_next", {"tp": 2, "etp": 1}, {}),
        ("qwen3_5", {"cp": 2, "recompute": "mlp"}, {"targets": "in_proj_qkv,in_proj_a,out_proj,k_proj"}),
        ("qwen3_5_moe", {"pp": 2, "recompute": "full"}, {"targets": "in_proj_z,down_proj"}),
    ],
    "2-ranks": [
        ("qwen2", {"tp": 2, "recompute": "full"}, {}),
        ("qwen3", {"pp": 2, "vpp": 2, "recompute": "mlp"}, {}),
        ("llama", {"cp": 2, "recompute": "elementwise"}, {"use_rslora": True}),
        ("deepseek_v3", {"tp": 2}, {}),
        ("qwen3_moe", {"dp": 2, "ep": 2}, {}),
        ("deepseek_v3", {"dp": 2, "ep": 2, "recompute": "full"}, EXPERTS),
    ],
    "2-ranks-and-the-rest": [
        ("qwen3", {"dp": 2}, CLASSIC),
        ("glm4_moe", {"tp": 2, "etp": 1, "recompute": "full"}, {}),
    ],
    "4-ranks": [
        ("qwen3", {"tp": 4}, {}),  # more ranks than KV heads
        ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 1}, EXPERTS),
    ],
    "parts-of-2-ranks-together": [
        ("llama", {"tp": 2, "dp": 2, "recompute": "mlp"}, {"use_rslora": True}),
        ("moonlight", {"tp": 2, "cp": 2, "recompute": "full"}, {}),
        ("qwen2", {"pp": 2, "dp": 2}, {}),
    ],
}
SOAKED = ("nets", "2-ranks-and-the-rest", "parts-of-2-ranks-together")
"""More of what other cases have: each family of nets is on 2 ranks, one with all linear layers; replicas, and slices of
heads beside whole experts, are on 4 ranks; q_proj and v_proj alone, and GLM-4.5, on one."""


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    short = {name: save_model(name, folder / name, num_hidden_layers=2) for name in FAMILIES if name != "qwen3"}
    return short | {name: save_model(name, folder / name) for name in ("qwen3", *NETS)}


@pytest.fixture
def folder(tmp_path, models):
    """The folder that ranks work in, with the models."""
    for name, path in models.items():
        (tmp_path / name).symlink_to(path)
    return tmp_path


def write_start(folder, run, model, targets="all-linear", rank=4, **settings):
    RunFolder(folder / run).create()
    write_adapter(folder / f"{run}-start", folder / model, rank, 10, targets.split(","), **settings)


@pytest.mark.parametrize("case", with_soaked(CASES, SOAKED))
def test_every_layout_trains_adapters_as_one_process_does(folder, on_ranks, case):
    runs = {f"run-{number}": each for number, each in enumerate(CASES[case])}
    for run, (model, _, settings) in runs.items():
        write_start(folder, run, model, **settings)
    [world] = {math.prod(layout.get(size, 1) for size in ("tp", "cp", "pp", "dp")) for _, layout, _ in CASES[case]}
    on_ranks("adapter_checks:check_layouts", world, cases=runs)


def test_adapters_of_experts_that_are_multiplied_together_are_those_of_single_ones(folder, on_ranks):
    runs = {
        "run-0": ("qwen3_moe", {}, EXPERTS),
        "run-1": ("glm4_moe", {"recompute": "mlp"}, EXPERTS | {"targets": "q_proj,up_proj"}),
    }
    for run, (model, _, settings) in runs.items():
        write_start(folder, run, model, **settings)
    on_ranks("kernel_checks:check_adapters", 1, cases=runs)


def test_dropout_is_the_same_where_layers_are_recomputed(folder, on_ranks):
    cases = {"none": {}, "full": {"recompute": "full"}, "mlp": {"recompute": "mlp"}}
    for run in cases:
        write_start(folder, run, "qwen3")
    on_ranks("adapter_checks:check_dropout", 1, cases=cases)
    on_two = {"whole": {"tp": 2}, "again": {"tp": 2, "recompute": "full"}}
    for run in on_two:
        write_start(folder, run, "qwen3")
    on_ranks("adapter_checks:check_dropout", 2, cases=on_two)


def test_preferences_are_learned_beside_the_model_without_the_adapter(folder, on_ranks):
    layouts = [{"tp": 2, "recompute": "full"}, {"pp": 2}, {"dp": 2}]
    runs = {f"run-{number}": ["qwen3", layout] for number, layout in enumerate(layouts)}
    for run, (model, _) in {**runs, "alone": ["qwen3_moe", {}]}.items():
        write_start(folder, run, model)
    on_ranks("adapter_checks:check_preferences", 1, cases={"alone": ["qwen3_moe", {}]})
    on_ranks("adapter_checks:check_preferences", 2, cases=runs)


def test_memory_is_what_is_planned(folder, on_ranks):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    save_model("qwen3", folder / "wide", **sizes)
    cases = {"bfloat16": ("bfloat16", "none"), "float32": ("float32", "none"), "full": ("bfloat16", "full")}
    for run in cases:
        RunFolder(folder / run).create()
    on_ranks("adapter_checks:check_memory", 1, model="wide", cases=cases)


def check_files(folder, family, rank):
    """What ranks gather is what the converter reads of their checkpoint, and transformers loads the sum of both."""
    shutil.copy(folder / "adapter" / ADAPTER, folder / "last")
    to_peft(folder / "last", folder / "converted")
    assert (folder / "converted" / WEIGHTS).read_bytes() == (folder / "adapter" / WEIGHTS).read_bytes()
    to_hf(folder / "adapter", folder / "merged")
    tokens = torch.arange(7, 40)[None]
    logits = [load_oracle(folder / name)(tokens).logits for name in ("once", "kept", "merged")]
    model = adapted_oracle(folder / family, rank, 10 / rank, ["all-linear"], experts=family == "qwen3_moe")
    factors = load_file(folder / "adapter" / WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(factors[f"base_model.model.{name}.weight"])
    for each in logits:
        torch.testing.assert_close(each, model(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "saved", "others", "rank", "kept"),
    [
        ("qwen3", {"tp": 2, "pp": 2}, [{"dp": 2}, {"cp": 2}], 4, ("self_attn.q_proj.lora_B", (4, 128, 4))),
        (
            "qwen3_moe",
            {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
            [{"dp": 2, "ep": 2}],
            8,
            ("mlp.experts.up_proj.lora_A", (2, 4, 8, 64)),
        ),
    ],
)
def test_checkpoints_hold_adapters_alone_and_resume_in_any_layout(folder, on_ranks, family, saved, others, rank, kept):
    """The optimizer's states of a factor are with it, float32, and nothing is there of the model's own weights."""
    for run in ("straight", "other", "none", *(f"run-{number}" for number in range(4))):
        RunFolder(folder / run).create()
    on_ranks("adapter_checks:check_straight", 4, family=family, layout=saved)
    held = stored_tensors(folder / "saved", (*MODEL_PREFIXES, "optimizer."))
    factors = {name: each.shape for name, each in held.items() if name.startswith("adapter.")}
    name, shape = kept
    assert factors[f"adapter.model.layers.{name}.weight"] == shape
    states = {f"optimizer.state.{state}.{name}" for name in factors for state in ("param", "exp_avg", "exp_avg_sq")}
    assert {*held} == {*factors, *states}
    check_files(folder, family, rank)
    on_ranks("adapter_checks:check_resumed", 4, family=family, cases={"run-0": saved}, exact=True)
    cases = {f"run-{number}": layout for number, layout in enumerate(others, 1)}
    on_ranks("adapter_checks:check_resumed", 2, family=family, cases=cases, exact=False)
    on_ranks("adapter_checks:check_resumed", 1, family=family, cases={"run-3": {}}, exact=False)
    on_ranks("adapter_checks:check_other", 1, family=family)

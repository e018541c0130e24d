"""Checkpoints that megatron-core saved against the files of transformers, and converted ones loaded by
megatron-core."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from areal_megatron.checkpoint.convert import from_hf, to_hf
from areal_megatron.run.folder import RunFolder
from tests.support.soaking import with_soaked
from tests.support.tiny_models import save_model

SIZES = {"qwen2": {"vocab_size": 101}, "qwen3": {"vocab_size": 203}}
SIZES |= {name: {} for name in ("qwen3_next", "qwen3_5")}
SIZES |= {
    name: {} for name in ("llama", "qwen3_moe", "qwen3_deep", "glm4_moe", "deepseek_v3", "moonlight", "glm4_moe_lite")
}
"""Models whose vocabulary is tied or not, padded or not, and what differs from the other tests'."""
SAVED = {
    "dense": {
        "stages": ("qwen2", {"tp": 2, "pp": 2}, "float32"),
        "virtual-stages": ("qwen2", {"tp": 2, "pp": 2, "vpp": 2}, "float32"),
        "uneven-stages": ("qwen3_deep", {"dp": 2, "pp": 2}, "float32"),
        "bfloat16": ("llama", {"tp": 4}, "bfloat16"),
        "float16": ("qwen3", {"tp": 2, "pp": 2}, "float16"),
    },
    "experts": {
        "ep2": ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2}, "float32"),
        "two-kinds-of-layers-ep2": ("glm4_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 1}, "float32"),
        "latents": ("deepseek_v3", {"tp": 2, "dp": 2, "ep": 2, "etp": 1}, "bfloat16"),
        "latents-without-query": ("moonlight", {"tp": 2, "pp": 2, "vpp": 2}, "float32"),
        "gated-delta-nets": ("qwen3_next", {"tp": 2, "pp": 2, "vpp": 2}, "float32"),
        "gated-delta-nets-dense": ("qwen3_5", {"tp": 2, "pp": 2}, "bfloat16"),
    },
    "experts-in-other-layouts": {
        "ep4": ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 4, "etp": 1}, "bfloat16"),
        "virtual-stages": ("qwen3_moe", {"pp": 2, "vpp": 2, "dp": 2, "etp": 2}, "float32"),
        "two-kinds-of-layers": ("glm4_moe", {"tp": 2, "pp": 2}, "bfloat16"),
        "latents-flash": ("glm4_moe_lite", {"tp": 2, "pp": 2}, "bfloat16"),
        "gated-delta-nets-ep2": ("qwen3_next", {"tp": 2, "dp": 2, "ep": 2}, "bfloat16"),
    },
}
"""Name → model, layout, dtype of a checkpoint that four ranks save. The tensors of GLM-4.7-Flash, which make soak alone
saves, are named as those of the other models with latents, and are loaded always."""
LOADED = {
    "dense": {
        "stages": ("qwen2", {"pp": 4}),
        "virtual-stages": ("qwen3", {"tp": 2, "pp": 2, "vpp": 2}),
        "tp4": ("qwen3", {"tp": 4}),
        "uneven-stages": ("qwen3_deep", {"tp": 2, "pp": 2}),
    },
    "experts": {
        "ep2": ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2}),
        "ep2-stages": ("qwen3_moe", {"dp": 2, "ep": 2, "etp": 1, "pp": 2}),
        "two-kinds-of-layers": ("glm4_moe", {"dp": 2, "ep": 2, "pp": 2}),
        "latents": ("deepseek_v3", {"tp": 2, "pp": 2}),
        "latents-flash": ("glm4_moe_lite", {"dp": 2, "ep": 2, "pp": 2}),
        "gated-delta-nets": ("qwen3_next", {"tp": 2, "pp": 2}),
        "gated-delta-nets-dense": ("qwen3_5", {"tp": 2, "dp": 2}),
    },
}
"""Name → model and layout into which four ranks load it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, sizes in SIZES.items():
        save_model(name, folder / name, **sizes)
    return folder


@pytest.fixture
def folder(tmp_path, models):
    """Where ranks work: the models and a run folder for each case."""
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for name in {name for cases in (SAVED, LOADED) for group in cases.values() for name in group}:
        RunFolder(tmp_path / name).create()
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("group", with_soaked(SAVED, ("dense", "experts-in-other-layouts")))
def test_saved_checkpoints_become_what_transformers_wrote(folder, on_ranks, group):
    on_ranks("convert_checks:check_saved", 4, cases=SAVED[group], mbridge=group == "dense")
    for run, (model, _, dtype) in SAVED[group].items():
        out = folder / f"{run}-hf"
        to_hf(folder / run / "checkpoint", out, description=folder / model, shard_bytes=100_000, verify=True)
        expected, found = load_file(folder / model / "model.safetensors"), weights(out)
        assert found.keys() == expected.keys(), run
        for name, tensor in expected.items():
            kind = torch.float32 if name.endswith("e_score_correction_bias") else getattr(torch, dtype)
            assert torch.equal(found[name], tensor.to(kind)) and found[name].dtype == kind, (run, name)
        if group == "dense":
            by_mbridge = load_file(folder / f"{run}.safetensors")
            assert found.keys() == by_mbridge.keys(), run
            for name, tensor in found.items():
                assert torch.equal(tensor, by_mbridge[name][: len(tensor)]), (run, name)
        _, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (run, info)


@pytest.mark.parametrize("group", LOADED)
def test_converted_checkpoints_have_the_logits_of_transformers(folder, on_ranks, group):
    for model in {model for model, _ in LOADED[group].values()}:
        from_hf(folder / model, folder / f"{model}-checkpoint", verify=True)
    cases = {run: (*case, str(folder / f"{case[0]}-checkpoint")) for run, case in LOADED[group].items()}
    on_ranks("convert_checks:check_loaded", 4, cases=cases)


@pytest.mark.parametrize("tp", with_soaked((1, 2), (1,)))
def test_gated_delta_nets_and_gated_heads_are_loaded_by_megatrons_own_layers(folder, on_ranks, tp):
    from_hf(folder / "qwen3_next", folder / "qwen3_next-checkpoint")
    RunFolder(folder / f"run-{tp}").create()
    on_ranks("linear_checks:check_layers", tp, model="qwen3_next", tp=tp)

"""PEFT's folders against the formula of LoRA on the weights of a Hugging Face folder, and against PEFT where it is."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_megatron.checkpoint.convert import from_peft, to_hf, to_peft
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.checkpoint.peft import WEIGHTS
from areal_megatron.models.weight_files import ADAPTER, SINGLE
from areal_megatron.programs.convert import main
from tests.support.low_rank import adapted_oracle, linear_layers, value
from tests.support.tiny_models import load_oracle, save_model

RANK, ALPHA = 3, 5
CLASSIC = ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: save_model(name, folder / name) for name in ("qwen3", "glm4_moe", "moonlight")}


def write_adapter(folder, base, targets=("all-linear",), dtype=torch.float32, **settings):
    """Writes a folder as PEFT does: factors of random values."""
    folder.mkdir()
    tensors = {}
    for name, layer in linear_layers(load_oracle(base), targets).items():
        for factor, shape in (("lora_A", (RANK, layer.in_features)), ("lora_B", (layer.out_features, RANK))):
            own = f"{name}.{factor}.weight"
            tensors[f"base_model.model.{own}"] = value(own, shape).to(dtype)
    save_file(tensors, folder / WEIGHTS)
    names = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": names, "bias": "none"}
    described |= {"base_model_name_or_path": str(base), "use_dora": False, "modules_to_save": None, **settings}
    (folder / ADAPTER).write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(
    ("name", "targets", "dtype"),
    [
        ("qwen3", ("all-linear",), torch.float32),
        ("qwen3", CLASSIC, torch.bfloat16),
        ("glm4_moe", ("k_proj", "o_proj"), torch.float32),
        ("moonlight", ("all-linear",), torch.float32),
    ],
)
def test_folders_come_back_bit_for_bit(tmp_path, bases, name, targets, dtype):
    """Also by way of a checkpoint, and whatever the name of the base is in the folder."""
    folder = write_adapter(tmp_path / "adapter", bases[name], targets, dtype, base_model_name_or_path="elsewhere")
    from_peft(folder, tmp_path / "checkpoint", base=bases[name], verify=True)
    to_peft(tmp_path / "checkpoint", tmp_path / "again", verify=True)
    before, after = (load_file(path / WEIGHTS) for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    described, expected = (json.loads((path / ADAPTER).read_text()) for path in (tmp_path / "again", folder))
    assert {key: described[key] for key in ("r", "lora_alpha", "peft_type")} == {
        "r": RANK,
        "lora_alpha": ALPHA,
        "peft_type": "LORA",
    }
    assert sorted(described["target_modules"]) == expected["target_modules"]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "glm4_moe", "moonlight"])
def test_a_merged_model_is_the_sum(tmp_path, bases, name, rslora):
    folder = write_adapter(tmp_path / "adapter", bases[name], use_rslora=rslora)
    scale = ALPHA / RANK**0.5 if rslora else ALPHA / RANK
    to_hf(folder, tmp_path / "merged", verify=True)
    tokens = torch.arange(7, 40)[None]
    expected = adapted_oracle(bases[name], RANK, scale, ["all-linear"])(tokens).logits
    torch.testing.assert_close(load_oracle(tmp_path / "merged")(tokens).logits, expected, atol=2e-5, rtol=0)
    base, merged = load_file(bases[name] / SINGLE), load_file(tmp_path / "merged" / SINGLE)
    layers = {f"{path}.weight" for path in linear_layers(load_oracle(bases[name]), ["all-linear"])}
    assert base.keys() == merged.keys()
    assert {key for key in base if not torch.equal(base[key], merged[key])} == layers


def test_half_precision_is_rounded_once(tmp_path, bases):
    """A weight in bfloat16, as trainers hold it, and the product are added in float32."""
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"], dtype=torch.bfloat16)
    to_hf(folder, tmp_path / "merged")
    base, merged, factors = (
        load_file(path) for path in (bases["qwen3"] / SINGLE, tmp_path / "merged" / SINGLE, folder / WEIGHTS)
    )
    name = "model.layers.2.self_attn.k_proj"
    down, up = (factors[f"base_model.model.{name}.{factor}.weight"].double() for factor in ("lora_A", "lora_B"))
    exact = base[f"{name}.weight"].bfloat16().double() + up @ down * (ALPHA / RANK)
    found = merged[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01).all()
    assert (found == exact.bfloat16()).float().mean() > 0.99


MISTAKES = {
    "use_dora": ({"use_dora": True}, "sets use_dora, which these adapters do not have"),
    "modules": ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
    "pattern": ({"target_modules": ".*proj"}, "needs a list of names as target_modules"),
    "kind": ({"peft_type": "IA3"}, "has peft_type='IA3'; only LORA is known"),
    "bias": ({"bias": "all"}, "has bias='all'"),
    "rank": ({"r": "8"}, "needs a positive integer r, has '8'"),
    "alpha": ({"lora_alpha": None}, "needs a positive number lora_alpha"),
    "base": (
        {"base_model_name_or_path": "nowhere"},
        "names nowhere as its base, which is no folder here: give the fol",
    ),
    "other rank": ({"r": 4}, r"has shape .* it is of another base"),
    "fewer": ({"target_modules": ["q_proj"]}, r"has a tensor base_model.model.model.layers.0.mlp.*which its config"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_another_kind_of_adapter(tmp_path, bases, mistake, capsys):
    settings, problem = MISTAKES[mistake]
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"], **settings)
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=problem):
        to_hf(folder, tmp_path / "merged")
    assert main(["from-peft", str(folder), str(tmp_path / "checkpoint")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "checkpoint").exists()


def test_a_damaged_file(tmp_path, bases):
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"])
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match="is truncated or no safetensors file"):
        to_hf(folder, tmp_path / "merged")


def test_peft_loads_what_is_written(tmp_path, bases):
    peft = pytest.importorskip("peft")
    folder = write_adapter(tmp_path / "adapter", bases["moonlight"])
    from_peft(folder, tmp_path / "checkpoint")
    to_peft(tmp_path / "checkpoint", tmp_path / "again")
    tokens = torch.arange(7, 40)[None]
    model = peft.PeftModel.from_pretrained(load_oracle(bases["moonlight"]), tmp_path / "again")
    expected = adapted_oracle(bases["moonlight"], RANK, ALPHA / RANK, ["all-linear"])(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "saved")
    to_peft(tmp_path / "saved", tmp_path / "third", base=bases["moonlight"])
    before, after = (load_file(path / WEIGHTS) for path in (folder, tmp_path / "third"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)

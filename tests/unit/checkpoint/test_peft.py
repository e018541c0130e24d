"""PEFT's folders against the formula of LoRA on the weights of a Hugging Face folder, and against PEFT where it is."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_megatron.checkpoint.convert import from_peft, to_hf, to_peft
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.checkpoint.peft import WEIGHTS, check_resumed, for_engines, note_of_base, open_start
from areal_megatron.config import Config, ConfigError, LoraConfig, ModelConfig
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.weight_files import ADAPTER, SINGLE
from areal_megatron.programs.convert import main
from tests.support import adapter_oracle
from tests.support.adapter_oracle import adapted_oracle, linear_layers
from tests.support.tiny_models import load_oracle, save_model

RANK, ALPHA = 3, 5
CLASSIC = ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: save_model(name, folder / name) for name in ("qwen3", "qwen3_moe", "glm4_moe", "moonlight")}


def write_adapter(folder, base, targets=("all-linear",), **settings):
    return adapter_oracle.write_adapter(folder, base, RANK, ALPHA, targets, **settings)


@pytest.mark.parametrize(
    ("name", "targets", "dtype", "experts"),
    [
        ("qwen3", ("all-linear",), torch.float32, False),
        ("qwen3", CLASSIC, torch.bfloat16, False),
        ("glm4_moe", ("k_proj", "o_proj"), torch.float32, False),
        ("glm4_moe", ("up_proj",), torch.bfloat16, True),
        ("moonlight", ("all-linear",), torch.float32, False),
        ("moonlight", ("all-linear",), torch.float32, True),
    ],
)
def test_folders_come_back_bit_for_bit(tmp_path, bases, name, targets, dtype, experts):
    """Also by way of a checkpoint, and whatever the name of the base is in the folder."""
    own = {"dtype": dtype, "experts": experts, "base_model_name_or_path": "elsewhere"}
    folder = write_adapter(tmp_path / "adapter", bases[name], targets, **own)
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
    named = [module for module in described["target_modules"] if "." not in module]
    of_experts = {module.rpartition(".")[2] for module in described["target_modules"] if module not in named}
    assert sorted({*named, *of_experts}) == expected["target_modules"] and bool(of_experts) == experts
    layers = [key.removeprefix("base_model.model.").partition(".lora_")[0] for key in before]
    assert all(any(f".{layer}".endswith(f".{module}") for module in described["target_modules"]) for layer in layers)


def test_nothing_is_rounded_where_dtypes_differ(tmp_path, bases):
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"], CLASSIC)
    tensors = load_file(folder / WEIGHTS)
    mixed = {name: each.bfloat16() if "q_proj" in name else each for name, each in tensors.items()}
    save_file(mixed, folder / WEIGHTS)
    from_peft(folder, tmp_path / "checkpoint")
    to_peft(tmp_path / "checkpoint", tmp_path / "again")
    again = load_file(tmp_path / "again" / WEIGHTS)
    assert all(torch.equal(again[name], each.float()) for name, each in mixed.items())


@pytest.mark.parametrize(
    ("name", "rslora", "experts"),
    [
        ("qwen3", False, False),
        ("qwen3", True, False),
        ("glm4_moe", False, False),
        ("glm4_moe", True, True),
        ("moonlight", False, True),
        ("moonlight", True, False),
    ],
)
def test_a_merged_model_is_the_sum(tmp_path, bases, name, rslora, experts):
    folder = write_adapter(tmp_path / "adapter", bases[name], use_rslora=rslora, experts=experts)
    scale = ALPHA / RANK**0.5 if rslora else ALPHA / RANK
    to_hf(folder, tmp_path / "merged", verify=True)
    tokens = torch.arange(7, 40)[None]
    expected = adapted_oracle(bases[name], RANK, scale, ["all-linear"], experts)(tokens).logits
    torch.testing.assert_close(load_oracle(tmp_path / "merged")(tokens).logits, expected, atol=2e-5, rtol=0)
    base, merged = load_file(bases[name] / SINGLE), load_file(tmp_path / "merged" / SINGLE)
    tensors = load_oracle(bases[name]).state_dict()
    layers = {f"{path}.weight" for path in linear_layers(tensors, ["all-linear"], experts)}
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
    "beginning": ({"init_lora_weights": "pissa_niter_4"}, "with which PEFT changes the base's weights too"),
    "gradients": ({"init_lora_weights": "lora_ga"}, "with which PEFT changes the base's weights too"),
    "rank": ({"r": "8"}, "needs a positive integer r, has '8'"),
    "alpha": ({"lora_alpha": None}, "needs a positive number lora_alpha"),
    "endless": ({"lora_alpha": 10**400}, "needs a positive number lora_alpha, below 1e9, has 1000"),
    "words": ({"use_rslora": "false"}, "has use_rslora='false'; write true or false"),
    "lines": ({"target_modules": ["q\nproj"]}, r"target_modules: q\\nproj is no linear layer"),
    "long base": ({"base_model_name_or_path": "x" * 5000}, "names xxx.*… as its base, which is no folder here"),
    "no base": ({"base_model_name_or_path": "a\0b"}, "names no model as its base"),
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


STARTS = {
    "rank": ({"rank": RANK + 1}, r"adapter has lora.rank=3 .*, and the config asks for lora.rank=4 .*: set these so"),
    "alpha": ({"alpha": 9.0}, "lora.alpha=5 .* the config asks for lora.rank=3 lora.alpha=9 "),
    "scale": ({"use_rslora": True}, "the config asks for .* lora.use_rslora=true"),
    "targets": ({"targets": "q_proj,v_proj"}, "the config asks for .* lora.targets=q_proj,v_proj"),
    "none": ({"start": "nowhere"}, "nowhere is no adapter: there is no nowhere/adapter_config.json"),
}


@pytest.mark.parametrize("mistake", STARTS)
def test_an_adapter_to_start_from_has_the_settings_of_the_run(tmp_path, bases, mistake):
    changes, problem = STARTS[mistake]
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"])
    lora = LoraConfig(**{"rank": RANK, "alpha": ALPHA, "start": str(folder), **changes})
    config = Config(model=ModelConfig(path=str(bases["qwen3"])), lora=lora)
    with pytest.raises(ConfigError, match=f"^lora.start: .*{problem}"):
        open_start(config, read_config(bases["qwen3"]))


@pytest.mark.parametrize("experts", [False, True])
def test_an_adapter_to_start_from_has_experts_as_the_run_has(tmp_path, bases, experts):
    """In Moonlight dense layers and shared experts have the same targets."""
    folder = write_adapter(tmp_path / "adapter", bases["moonlight"], experts=experts)
    lora = LoraConfig(RANK, ALPHA, experts=not experts, start=str(folder))
    config = Config(model=ModelConfig(path=str(bases["moonlight"])), lora=lora)
    held, asked = " lora.experts=true" * experts, " lora.experts=true" * (not experts)
    with pytest.raises(ConfigError, match=f"^lora.start: .*proj{held}, and .*all-linear{asked}: set these so$"):
        open_start(config, read_config(bases["moonlight"]))


def test_targets_of_experts_without_tensors(tmp_path, bases):
    """PEFT keeps the names that it was given, where the model has such layers or not."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    folder = write_adapter(tmp_path / "adapter", bases["qwen3_moe"], target_modules=names)
    problem = r"adapter_config.json: target_modules: up_proj is of experts, and no tensor is: take it out of the list; "
    with pytest.raises(CheckpointError, match=problem):
        to_hf(folder, tmp_path / "merged")
    config = Config(model=ModelConfig(path=str(bases["qwen3_moe"])), lora=LoraConfig(RANK, ALPHA, start=str(folder)))
    with pytest.raises(ConfigError, match=f"^lora.start: .*{problem}"):
        open_start(config, read_config(bases["qwen3_moe"]))


def test_an_adapter_to_start_from_is_one_of_the_model(tmp_path, bases):
    """Other shapes are refused; another name of the base is told, since one model may have several."""
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"], base_model_name_or_path="Owner/Other-8B")
    config = Config(model=ModelConfig(path=str(bases["qwen3"])), lora=LoraConfig(RANK, ALPHA, start=str(folder)))
    open_start(config, read_config(bases["qwen3"])).close()
    assert f"was trained on Owner/Other-8B; is {bases['qwen3']} that?" in note_of_base(str(folder), bases["qwen3"])
    for path in ("Other-8B", "models--Owner--Other-8B/snapshots/0123456789"):
        assert note_of_base(str(folder), str(tmp_path / path)) == ""
    wide = save_model("qwen3", tmp_path / "wide", intermediate_size=160)
    with pytest.raises(ConfigError, match=r"^lora.start: .*mlp.* has shape .* it is of another base"):
        open_start(config, read_config(wide))
    (folder / ADAPTER).write_text((folder / ADAPTER).read_text().replace("Owner/Other-8B", str(wide)))
    assert note_of_base(str(folder), str(wide)) == ""


def test_a_checkpoint_is_no_folder_of_pefts(tmp_path, bases):
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"])
    from_peft(folder, tmp_path / "checkpoint")
    lora = LoraConfig(RANK, ALPHA, start=str(tmp_path / "checkpoint"))
    with pytest.raises(ConfigError, match=r"^lora.start: .*checkpoint is a checkpoint: `areal convert to-peft "):
        open_start(Config(model=ModelConfig(path=str(bases["qwen3"])), lora=lora), read_config(bases["qwen3"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_not_finite_is_found(tmp_path, bases, dtype, value):
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"], dtype=dtype)
    model = architecture(read_config(bases["qwen3"]))
    tensors = load_file(folder / WEIGHTS)
    name, last = list(tensors.items())[-1]
    last[:, -1] = torch.finfo(dtype).max
    save_file(tensors, folder / WEIGHTS)
    for_engines(folder, model)
    last[-1, 0] = value
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} has values that are not finite; take an earlier"):
        for_engines(folder, model)


def test_a_run_is_resumed_with_the_adapters_that_it_has(tmp_path, bases):
    described, folder = read_config(bases["qwen3"]), write_adapter(tmp_path / "adapter", bases["qwen3"])
    check_resumed(Config(lora=LoraConfig(RANK, ALPHA)), described, folder)
    check_resumed(Config(), described, tmp_path)
    for lora, place in ((LoraConfig(), folder), (LoraConfig(4, ALPHA), folder), (LoraConfig(RANK, ALPHA), tmp_path)):
        with pytest.raises(ConfigError, match=f"^resume: {place} has .*: resume it with its own settings of lora$"):
            check_resumed(Config(lora=lora), described, place)


@pytest.mark.parametrize("place", ["to-hf", "--base"])
def test_a_path_that_cannot_be_looked_at(tmp_path, bases, place, capsys):
    folder, long = write_adapter(tmp_path / "adapter", bases["qwen3"]), "x" * 300
    given = [long] if place == "to-hf" else [str(folder), "--base", long]
    capsys.readouterr()
    assert main(["to-hf", given[0], str(tmp_path / "out"), *given[1:]]) == 2
    assert capsys.readouterr().err.startswith("error: " + ("cannot read xx" if place == "to-hf" else "--base: xx"))


def test_a_damaged_file(tmp_path, bases):
    folder = write_adapter(tmp_path / "adapter", bases["qwen3"])
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match="is truncated or no safetensors file"):
        to_hf(folder, tmp_path / "merged")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle, .*\(safe_serialization=True\)"):
        to_hf(folder, tmp_path / "merged")


@pytest.mark.parametrize(("name", "experts"), [("qwen3", False), ("qwen3_moe", True)])
def test_peft_loads_what_is_written(tmp_path, bases, name, experts):
    """PEFT (0.21) loads no adapters of dense and shared MLPs beside experts; Qwen3-MoE has none. It saves those of
    experts in a form of its own, which is refused."""
    peft = pytest.importorskip("peft")
    folder = write_adapter(tmp_path / "adapter", bases[name], experts=experts)
    from_peft(folder, tmp_path / "checkpoint")
    to_peft(tmp_path / "checkpoint", tmp_path / "again")
    tokens = torch.arange(7, 40)[None]
    model = peft.PeftModel.from_pretrained(load_oracle(bases[name]), tmp_path / "again")
    expected = adapted_oracle(bases[name], RANK, ALPHA / RANK, ["all-linear"], experts)(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "saved")
    if experts:
        with pytest.raises(CheckpointError, match=r"sets .*, which these adapters do not have"):
            to_peft(tmp_path / "saved", tmp_path / "third", base=bases[name])
        return
    to_peft(tmp_path / "saved", tmp_path / "third", base=bases[name])
    before, after = (load_file(path / WEIGHTS) for path in (folder, tmp_path / "third"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)

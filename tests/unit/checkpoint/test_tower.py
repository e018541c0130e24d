"""Published models that take images: their language model is converted, and the other part is carried along."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import save_file

from areal_megatron.checkpoint import hf
from areal_megatron.checkpoint.convert import from_hf, to_hf
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.config import Config, ConfigError, DataConfig, MachineConfig, ModelConfig
from areal_megatron.model_check import check_model
from areal_megatron.models.architecture import architecture, read_config, takes_images
from areal_megatron.models.names import TOWER, own
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.models_with_images import make_with_images, write_with_images
from tests.support.reshard_oracle import megatron_shard
from tests.support.saved_tensors import assert_equal, weights

NAMES = ("qwen3.5", "qwen3.5-moe")


def of_language_model(tensors):
    return {own(name): tensor for name, tensor in tensors.items() if not name.startswith(TOWER)}


@pytest.mark.parametrize("name", NAMES)
def test_both_parts_are_the_same_after_a_checkpoint(tmp_path, name):
    """The part for images keeps its dtype, whatever the other's becomes; transformers loads what is written."""
    model = tmp_path / "model"
    tensors = write_with_images(name, model)
    tensors |= {key: tensor.half() for key, tensor in tensors.items() if key.startswith(TOWER)}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    from_hf(model, tmp_path / "checkpoint", verify=True)
    to_hf(tmp_path / "checkpoint", tmp_path / "back", verify=True)
    assert_equal(weights(tmp_path / "back"), tensors)
    to_hf(tmp_path / "back", tmp_path / "half", dtype="bfloat16", shard_bytes=100_000)
    halved = {key: tensor if key.startswith(TOWER) else tensor.bfloat16() for key, tensor in tensors.items()}
    assert_equal(weights(tmp_path / "half"), halved)
    read = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    written = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.bfloat16)
    assert_equal(read.state_dict(), written.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_exports_of_trainers_keep_the_part_for_images(tmp_path, name):
    model, sizes = tmp_path / "model", MegatronSizes()
    tensors = write_with_images(name, model)
    config = read_config(model)
    parameters = megatron_shard(of_language_model(tensors), config, sizes, 0)
    layout = hf.trainer_layout.layout(config, sizes, 0)
    loaded = {key: torch.full_like(parameter, torch.nan) for key, parameter in parameters.items()}
    hf.load(loaded, layout, model)
    assert_equal(loaded, parameters)
    trained = {key: parameter + 1 for key, parameter in parameters.items()}
    hf.export(trained, hf_config=config, sizes=sizes, rank=0, source=model, path=tmp_path / "export")
    assert_equal(
        weights(tmp_path / "export"),
        {key: tensor if key.startswith(TOWER) else tensor + 1 for key, tensor in tensors.items()},
    )
    described = json.loads((tmp_path / "export" / "config.json").read_text())
    assert described["architectures"] == json.loads((model / "config.json").read_text())["architectures"]


def test_experts_that_lie_in_one_tensor_are_read_one_by_one(tmp_path):
    model = make_with_images("qwen3.5-moe")
    model.save_pretrained(tmp_path / "apart")
    shutil.copytree(tmp_path / "apart", tmp_path / "stacked")
    stacked = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stacked)
    files = {"one.safetensors": {}, "other.safetensors": {}}
    for number, (name, tensor) in enumerate(sorted(stacked.items())):
        files[("one.safetensors", "other.safetensors")[number % 2]][name] = tensor
    (tmp_path / "stacked" / "model.safetensors").unlink()
    for file, held in files.items():
        save_file(held, tmp_path / "stacked" / file)
    index = {name: file for file, held in files.items() for name in held}
    (tmp_path / "stacked" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    to_hf(tmp_path / "stacked", tmp_path / "written")
    assert_equal(weights(tmp_path / "written"), weights(tmp_path / "apart"))


def test_what_is_missing_or_contradicts_itself_is_said_in_one_line(tmp_path):
    model = tmp_path / "model"
    tensors = write_with_images("qwen3.5", model)
    described = json.loads((model / "config.json").read_text())
    assert takes_images(model) and architecture(read_config(model)).name == "Qwen3_5ForCausalLM"
    save_file({key: t for key, t in tensors.items() if not key.startswith(TOWER)}, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor model\.visual\.…, the part for images, .* as --config$"):
        from_hf(model, tmp_path / "checkpoint")
    (model / "config.json").write_text(json.dumps(described | {"tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"has tie_word_embeddings=False and in text_config True$"):
        read_config(model)
    alone = {key: value for key, value in described.items() if key != "tie_word_embeddings"}
    (model / "config.json").write_text(json.dumps(alone))
    with pytest.raises(ConfigError, match=r"has tie_word_embeddings=True in text_config alone; .*: say it in both$"):
        read_config(model)
    outside = {key: value for key, value in described["text_config"].items() if key != "tie_word_embeddings"}
    (model / "config.json").write_text(json.dumps(described | {"text_config": outside}))
    with pytest.raises(ConfigError, match=r"has tie_word_embeddings=True outside of text_config alone; "):
        read_config(model)
    (model / "config.json").write_text(json.dumps(described))
    embedding = tensors["model.language_model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, model / "model.safetensors")
    from_hf(model, tmp_path / "checkpoint")
    save_file(tensors | {"lm_head.weight": embedding + 1}, model / "model.safetensors")
    problem = r"has a lm_head\.weight other than model\.embed_tokens\.weight, .*: remove it, or set tie_word_embeddings"
    with pytest.raises(CheckpointError, match=problem):
        from_hf(model, tmp_path / "another")
    asked = Config(
        name="x", updates=1, model=ModelConfig(str(model)), data=DataConfig("t"), machine=MachineConfig("cuda")
    )
    asked.rollout.max_new_tokens = asked.data.max_prompt_tokens = 64
    with pytest.raises(ConfigError, match=problem):
        check_model(asked)
    save_file({key: t for key, t in tensors.items() if not key.startswith(TOWER)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^model\.path: .* has no tensor model\.visual\.…, the part for images, "):
        check_model(asked)
    (model / "config.json").write_text(json.dumps(described | {"text_config": None}))
    with pytest.raises(ConfigError, match=r"needs an object text_config, has None$"):
        read_config(model)


def test_tensors_in_float32_among_others_are_not_rounded(tmp_path):
    """As published: what decides how fast states fade, and the norm of what is read from them."""
    model = tmp_path / "model"
    tensors = {name: tensor.bfloat16() for name, tensor in write_with_images("qwen3.5", model).items()}
    alone = {name for name in tensors if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))}
    tensors |= {name: torch.rand(tensors[name].shape) for name in alone}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    from_hf(model, tmp_path / "checkpoint", verify=True)
    to_hf(tmp_path / "checkpoint", tmp_path / "back", verify=True)
    assert alone
    assert_equal(weights(tmp_path / "back"), tensors)
    *_, last = sorted(name for name in tensors if name.endswith("linear_attn.in_proj_b.weight"))
    tensors[last] = torch.rand(tensors[last].shape)  # one of four that are one parameter of trainers
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    from_hf(model, tmp_path / "another", verify=True)
    to_hf(tmp_path / "another", tmp_path / "again", verify=True)
    for name, tensor in weights(tmp_path / "again").items():
        assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name
    to_hf(model, tmp_path / "copy", verify=True)
    assert torch.equal(weights(tmp_path / "copy")[last], tensors[last])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn)} if name.startswith(TOWER) else {},
            r"model\.visual\..* has dtype F8_E4M3; the part for images is carried as it is, .*: take a folder that",
        ),
        (
            lambda name, tensor: {own(name): tensor + 1},
            r"/model\.safetensors has model\.\S+ under two names, of which readers take one or the other; remove one$",
        ),
    ],
)
def test_tensors_that_cannot_be_carried_are_named(tmp_path, change, problem):
    model = tmp_path / "model"
    tensors = write_with_images("qwen3.5", model)
    for name, tensor in [*tensors.items()]:
        tensors |= change(name, tensor)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=problem):
        from_hf(model, tmp_path / "checkpoint")

"""Models that a config cannot train are refused from config.json alone."""

import json
import subprocess
import sys

import pytest

from areal_megatron.config import Config, ConfigError, Data, Model, Rollout, Trainer
from areal_megatron.model_check import check_model

GOOD = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 100, "hidden_act": "silu",
        "max_position_embeddings": 4096}  # fmt: skip


def config(folder, hf=GOOD, **trainer) -> Config:
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "model.safetensors").touch()
    rollout = Rollout(max_new_tokens=64)
    return Config(
        name="t", updates=1, model=Model(str(folder)), data=Data(""), trainer=Trainer(**trainer), rollout=rollout
    )


def test_a_model_that_fits_passes(tmp_path):
    check_model(config(tmp_path, tp=4, pp=3))


@pytest.mark.parametrize(
    ("hf", "trainer", "message"),
    [
        ({}, {"tp": 3}, r"trainer.tp: 3 does not divide num_attention_heads=8 "),
        ({}, {"tp": 8}, r"trainer.tp: 8 does not divide num_key_value_heads=4 "),
        ({}, {"pp": 4}, r"trainer.pp: 4 does not divide num_hidden_layers=6 "),
        ({"intermediate_size": 98}, {"tp": 4}, r"trainer.tp: 4 does not divide intermediate_size=98 "),
        ({"model_type": "gpt2"}, {}, r"model.path: .*'gpt2'.*Qwen3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn"}}, {}, r"model.path: .*rotary embeddings of type 'yarn'"),
        ({"use_sliding_window": True}, {}, r"model.path: .*use_sliding_window"),
        ({"hidden_act": "gelu"}, {}, r"model.path: .*hidden_act 'gelu'"),
        ({"attention_bias": True}, {}, r"model.path: .*attention_bias"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, hf, trainer, message):
    with pytest.raises(ConfigError, match=message):
        check_model(config(tmp_path, GOOD | hf, **trainer))


def test_missing_folder_file_and_weights(tmp_path):
    subject = config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.path: .* holds no \*.safetensors"):
        check_model(subject)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.path: .*config.json is not JSON"):
        check_model(subject)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model.path: cannot read .*config.json"):
        check_model(subject)
    subject.model.path = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model.path: there is no folder .*nowhere"):
        check_model(subject)


def test_needs_neither_torch_nor_megatron():
    program = "import sys, areal_megatron.model_check as m; assert not {'torch', 'megatron', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

"""Models that a config cannot train are refused from config.json alone."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    ServedModelConfig,
    TrainerConfig,
)
from areal_megatron.engine.served import longest
from areal_megatron.model_check import CPU_HEADS, check_model
from areal_megatron.models.architecture import architecture, as_reward_model
from areal_megatron.models.weight_files import weight_map

GOOD = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 100,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

GATED = {
    **{"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "layer_types": None},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24, "full_attention_interval": 2},
}
SIGMOID = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


LATENTS = SIGMOID | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",  # unknown to transformers: the class decides
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 32,
    "topk_method": "noaux_tc",
}
FLASH = LATENTS | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
LINEAR = EXPERTS | {
    "model_type": "qwen3_next",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32,
}
UNSAID = {key: value for key, value in LINEAR.items() if key != "norm_topk_prob"}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def config(folder, hf=GOOD, **trainer) -> Config:
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "model.safetensors").touch()
    rollout = RolloutConfig(max_new_tokens=64)
    return Config(
        name="t",
        updates=1,
        model=ModelConfig(str(folder)),
        data=DataConfig(""),
        trainer=TrainerConfig(**trainer),
        rollout=rollout,
    )


@pytest.mark.parametrize(
    ("hf", "trainer"),
    [
        ({}, {"tp": 4, "pp": 3}),
        ({}, {"tp": 8}),
        ({"num_hidden_layers": 7}, {"pp": 3}),
        ({}, {"pp": 3, "vpp": 2}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}),
        (EXPERTS, {"tp": 2, "dp": 3, "ep": 3}),
        (EXPERTS, {"dp": 4, "ep": 2, "etp": 2}),
        (SIGMOID, {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 1}),
        (SIGMOID | {"first_k_dense_replace": 0, "attention_bias": True, "use_qk_norm": True}, {}),
        (LATENTS, {"tp": 8, "pp": 2, "dp": 2, "ep": 4, "etp": 1}),
        (LATENTS | {"q_lora_rank": None, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, {}),
    ],
)
def test_a_model_that_fits_passes(tmp_path, hf, trainer):
    check_model(config(tmp_path, GOOD | hf, **trainer))


@pytest.mark.parametrize(
    ("hf", "trainer", "message"),
    [
        ({}, {"tp": 3}, r"trainer.tp: 3 does not divide num_attention_heads=8 "),
        (
            {"num_attention_heads": 12},
            {"tp": 6},
            r"trainer.tp: 6 is neither a divisor nor a multiple of num_key_value_heads=4 ",
        ),
        ({}, {"pp": 7}, r"trainer.pp: num_hidden_layers=6 of the model cannot be divided over 7 stages"),
        ({}, {"pp": 2, "vpp": 6}, r"trainer.pp: num_hidden_layers=6 .* over 2 stages of 6 virtual ones"),
        ({}, {"vpp": 2}, r"trainer.vpp: 2 virtual stages need trainer.pp above 1"),
        ({}, {"dp": 2, "ep": 2}, r"trainer.ep: 2, but the model of .* has no experts"),
        (EXPERTS, {"dp": 4, "ep": 4}, r"trainer.ep: 4 does not divide num_experts=6 "),
        (EXPERTS, {"dp": 2, "ep": 3}, r"trainer.ep: 3 times etp=1 does not divide the 2 ranks of a pipeline stage"),
        (EXPERTS, {"dp": 3, "etp": 3}, r"trainer.etp: 3 does not divide moe_intermediate_size=32 "),
        (EXPERTS | {"num_experts_per_tok": 7}, {}, r"model.path: .*num_experts_per_tok=7 of 6 experts"),
        (EXPERTS | {"num_experts_per_tok": 1}, {}, r"model.path: .*num_experts_per_tok=1 and norm_topk_prob"),
        (GATED | {"num_experts_per_tok": 1}, {}, r"model.path: .*num_experts_per_tok=1 and norm_topk_prob"),
        (UNSAID | {"num_experts_per_tok": 1}, {}, r"model.path: .*num_experts_per_tok=1 and norm_topk_prob"),
        (
            SIGMOID | {"norm_topk_prob": False},
            {},
            r"norm_topk_prob=false; megatron-core always normalises sigmoid scores",
        ),
        (SIGMOID | {"output_router_logits": True}, {}, r"output_router_logits.*moe_router_bias_update_rate"),
        (SIGMOID | {"n_group": 3}, {}, r"n_group=3 and topk_group=1 for 8 experts"),
        (SIGMOID | {"topk_group": 3}, {}, r"n_group=2 and topk_group=3 for 8 experts"),
        (SIGMOID | {"num_experts_per_tok": 5}, {}, r"chooses 5 experts from 1 of 2 groups, which have 4 experts each"),
        (SIGMOID | {"first_k_dense_replace": 6}, {}, r"first_k_dense_replace=6, not one of 0 to 5"),
        (
            SIGMOID | {"moe_intermediate_size": 34},
            {"tp": 4, "etp": 2},
            r"trainer.tp: 4 .* width of the shared experts=34 ",
        ),
        (LATENTS | {"attention_bias": True}, {}, r"attention_bias, which the table of DeepseekV3.* lacks"),
        (
            LATENTS | {"scoring_func": "softmax"},
            {},
            r"scoring_func='softmax'.* only scoring_func='sigmoid'",
        ),
        (
            GOOD | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
            {},
            "names 'GptOssForCausalLM', which has no table: trainers have no attention sinks, .* MXFP4 are not read$",
        ),
        (FLASH | {"first_k_dense_replace": 2}, {}, r"first_k_dense_replace=2; of Glm4MoeLite.* only first_k_dense"),
        (
            FLASH | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4},
            {},
            r"mlp_layer_types=.* dense for the first 1 of 6",
        ),
        (FLASH | {"mlp_layer_types": ["sparse"]}, {}, r"mlp_layer_types=\['sparse'\]; .* of 6 layers, then sparse"),
        (LATENTS | {"topk_method": "greedy"}, {}, r"topk_method='greedy'; .* only topk_method='noaux_tc'"),
        (LATENTS | {"rope_interleave": False}, {}, r"rope_interleave=False; .* only rope_interleave=True"),
        (LATENTS | {"moe_layer_freq": 2}, {}, r"moe_layer_freq=2; .* only moe_layer_freq=1"),
        (LATENTS | {"num_key_value_heads": 4}, {}, r"num_key_value_heads=4 and num_attention_heads=8; with latents"),
        (LATENTS | {"kv_lora_rank": None}, {}, r"needs a positive integer kv_lora_rank, has None"),
        (LATENTS | {"q_lora_rank": -1}, {}, r"needs a positive integer q_lora_rank, has -1"),
        (LATENTS | {"qk_rope_head_dim": 3}, {}, r"qk_rope_head_dim=3; pairs are rotated"),
        (LATENTS | {"head_dim": 96}, {}, r"head_dim=96 and qk_rope_head_dim=64: transformers rotates the one"),
        (LATENTS | {"v_head_dim": 97}, {}, r"v_head_dim=97; kernels take values as wide as keys \(96\)"),
        (
            LATENTS | {"quantization_config": {"quant_method": "fp8"}},
            {},
            r"has a quantization_config; .* whole weights",
        ),
        (LATENTS | {"kv_lora_rank": 256}, {}, r"kv_lora_rank=256 and qk_rope_head_dim=64; .* kernels for 512 and 64"),
        (LATENTS | {"rope_scaling": YARN | {"type": "linear"}}, {}, r"type 'linear'; with latents .* default and yarn"),
        (LATENTS | {"rope_scaling": YARN | {"mscale": 0.7}}, {}, r"one of mscale and mscale_all_dim"),
        (LATENTS | {"rope_scaling": YARN | {"attention_factor": 1.0}}, {}, r"attention_factor=1\.0, with which"),
        (LATENTS | {"rope_scaling": YARN | {"mscale": "x"}}, {}, r"needs a positive number mscale, has 'x'"),
        (
            FLASH | {"partial_rotary_factor": 0.5},
            {},
            r"partial_rotary_factor=0\.5; with latents all of qk_rope_head_dim",
        ),
        (LATENTS, {"tp": 16}, r"trainer.tp: 16 does not divide num_attention_heads=8 "),
        ({"intermediate_size": 98}, {"tp": 4}, r"trainer.tp: 4 does not divide intermediate_size=98 "),
        ({"model_type": "gpt2"}, {}, r"model.path: .*'gpt2'.*Qwen3ForCausalLM"),
        ({"model_type": "Qwen3XMoeForCausalLM"}, {}, r"the nearest table is that of Qwen3MoeForCausalLM, see docs"),
        ({"rope_scaling": {"rope_type": "longrope"}}, {}, r"model.path: .*rotary embeddings of type 'longrope'"),
        ({"use_sliding_window": True}, {}, r"model.path: .*use_sliding_window"),
        ({"hidden_act": "gelu"}, {}, r"model.path: .*hidden_act 'gelu'"),
        ({"attention_bias": True}, {}, r"model.path: .*attention_bias"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, hf, trainer, message):
    with pytest.raises(ConfigError, match=message):
        check_model(config(tmp_path, GOOD | hf, **trainer))


@pytest.mark.parametrize("mode", ["rl", "replay", "sft", "dpo", "reward_model"])
def test_gated_delta_nets_are_trained_without_adapters(tmp_path, mode):
    subject = config(tmp_path, GOOD | LINEAR)
    subject.mode = mode
    check_model(subject)
    subject.trainer.cp = 2
    check_model(subject)
    subject.trainer.tp = 4
    with pytest.raises(
        ConfigError, match=r"^trainer\.cp: 2 times tp=4 does not divide linear_num_key_heads=4 of the m"
    ):
        check_model(subject)
    subject.trainer.tp = subject.trainer.cp = 1
    subject.lora.rank = 8
    check_model(subject)
    subject.lora.rank, subject.trainer.tp = 0, 8
    with pytest.raises(ConfigError, match=r"trainer\.tp: 8 does not divide linear_num_key_heads=4 "):
        check_model(subject)


@pytest.mark.parametrize(
    ("hf", "trainer", "problem"),
    [
        (GOOD, {}, "lora.experts: no layer of lora.targets in Qwen3ForCausalLM is of experts; leave it out"),
        (GOOD | EXPERTS, {"tp": 2}, "trainer.etp: experts with adapters are whole on a rank, not on 2; set it to 1"),
        (GOOD | EXPERTS, {"tp": 2, "etp": 1}, ""),
    ],
)
def test_adapters_of_experts(tmp_path, hf, trainer, problem):
    subject = config(tmp_path, hf, **trainer)
    subject.lora = LoraConfig(rank=8, experts=True, merge=True)
    with pytest.raises(ConfigError, match=f"^{problem}$") if problem else nullcontext():
        check_model(subject)


@pytest.mark.parametrize("mode", ["rl", "replay", "sft", "dpo", "reward_model"])
@pytest.mark.parametrize("experts", ["", "Moe"])
def test_positions_in_sections_are_those_of_text(tmp_path, mode, experts):
    name = {"architectures": [f"Qwen3_5{experts}ForCausalLM"], "model_type": f"qwen3_5_{experts and 'moe_'}text"}
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [6, 5, 5]}
    subject = config(tmp_path, GOOD | LINEAR | name | {"rope_parameters": rope})
    subject.mode = mode
    if mode != "reward_model":
        check_model(subject)
        subject = config(tmp_path, GOOD | LINEAR | name | {"rope_parameters": rope | {"mrope_section": [6, 5, 6]}})
        with pytest.raises(ConfigError, match=r"mrope_section=\[6, 5, 6\]; engines take numbers that are 16 together"):
            check_model(subject)
        return
    with pytest.raises(ConfigError, match="transformers has no reward models of the class Qwen3_5"):
        check_model(subject)


DENSE_NETS = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["full_attention"] * 6},
            "layer_types=.*needs linear_attention or full_att.* 6 layers, and both",
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, "for each of 6 layers"),
        ({"layer_types": []}, r"layer_types=\[\]; it needs .* for each of 6 layers"),
        ({"full_attention_interval": None}, "needs a positive integer full_attention_interval, has None"),
        ({"head_dim": None}, "needs a positive integer head_dim, of Qwen3NextForCausalLM it may not be null"),
        ({"layer_types": ["linear_attention", "mamba", *["full_attention"] * 4]}, "linear_attention or full_attention"),
        (
            {"num_key_value_heads": None},
            "needs num_key_value_heads, of Qwen3NextForCausalLM it may not be left out or null",
        ),
        (
            DENSE_NETS | {"num_key_value_heads": None},
            "needs num_key_value_heads, of Qwen3_5ForCausalLM it may not be left",
        ),
        (DENSE_NETS | {"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype='int8'; engines have states in auto, float32, "),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads=6, no multiple of linear_num_key_heads=4"),
        ({"linear_key_head_dim": None}, "needs a positive integer linear_key_head_dim, has None"),
        ({"mlp_only_layers": [1]}, "sets mlp_only_layers"),
        ({"shared_expert_intermediate_size": 0}, "needs a positive integer shared_expert_intermediate_size"),
    ],
)
def test_sizes_of_linear_attention_that_cannot_be_are_named(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        check_model(config(tmp_path, GOOD | LINEAR | change), trains=False)


def test_linear_attention_needs_bfloat16_on_cpu(tmp_path):
    subject = config(tmp_path, GOOD | LINEAR)
    for device, dtype in (("cpu", "float32"), ("cpu", "float16"), ("cuda", "float32")):
        subject.machine.device, subject.model.dtype = device, dtype
        if device == "cuda":
            check_model(subject, trains=False)
            continue
        with pytest.raises(ConfigError, match=rf"bfloat16 alone on CPU, not in {dtype}: `areal convert to-hf"):
            check_model(subject, trains=False)


@pytest.mark.parametrize(
    ("hf", "trainer", "device", "dtype", "message"),
    [
        (GOOD, {"attention": "fa3"}, "cpu", "bfloat16", "trainer.attention: there is no fa3 on CPU; leave it out"),
        (GOOD, {"attention": "fa2"}, "cuda", "float32", "trainer.attention: there is no fa2 in float32; leave it out"),
        (GOOD, {"attention": "fa4"}, "cuda", "bfloat16", ""),
        (GOOD, {"expert_dispatch": "flex"}, "cuda", "bfloat16", "trainer.expert_dispatch: the model of .* has no exp"),
        (EXPERTS, {"expert_dispatch": "flex"}, "cpu", "bfloat16", "trainer.expert_dispatch: flex needs DeepEP and GPU"),
        (EXPERTS, {"expert_dispatch": "flex"}, "cuda", "bfloat16", "trainer.expert_dispatch: with ep=1 and etp=1 noth"),
        (EXPERTS, {"expert_dispatch": "flex", "dp": 3, "ep": 3}, "cuda", "bfloat16", ""),
        (EXPERTS, {"expert_dispatch": "flex", "tp": 2}, "cuda", "bfloat16", ""),
    ],
)
def test_kernels_that_cannot_be_are_refused(tmp_path, hf, trainer, device, dtype, message):
    subject = config(tmp_path, GOOD | hf, **trainer)
    subject.machine.device, subject.model.dtype = device, dtype
    if not message:
        check_model(subject)
        return
    with pytest.raises(ConfigError, match=message):
        check_model(subject)


TEACHERS = [
    ({"num_hidden_layers": 12, "hidden_size": 128, "vocab_size": 128}, {"pp": 3}, ""),
    (EXPERTS, {"tp": 2, "dp": 2}, ""),
    ({"num_hidden_layers": 7}, {"pp": 2, "vpp": 3}, r"trainer.pp: num_hidden_layers=7 .* over 2 stages of 3 virtual"),
    ({"num_attention_heads": 4, "num_key_value_heads": 2}, {"tp": 8}, "trainer.tp: 8 does not divide num_attention"),
    ({"model_type": "gpt2"}, {}, "ppo.penalty.kl_model: .*'gpt2'"),
    ({"vocab_size": 99}, {}, r"ppo.penalty.kl_model: .*teacher has 99 tokens, fewer than the 100 of "),
    ({"max_position_embeddings": 1040}, {}, r"rollout.max_new_tokens: .*teacher has .*_embeddings=1040: .* 16 or less"),
    ({"max_position_embeddings": 1024}, {}, r"data.max_prompt_tokens: 1024 .*teacher has max_position_embeddings=1024"),
]


@pytest.mark.parametrize(("hf", "trainer", "message"), TEACHERS)
def test_a_teacher_must_fit_the_layout_of_the_trainers(tmp_path, hf, trainer, message):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    config(teacher, GOOD | hf)
    subject = config(tmp_path, **trainer)
    subject.ppo.penalty.kl, subject.ppo.penalty.kl_model = 1.0, str(teacher)
    if not message:
        check_model(subject)
        return
    with pytest.raises(ConfigError, match=message):
        check_model(subject)


def test_a_served_teacher_has_the_tokens_of_its_student_and_room_for_its_answers(tmp_path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    config(teacher, GOOD | {"vocab_size": 99})
    subject = config(tmp_path)
    subject.served.teacher.path = str(teacher)
    check_model(subject)
    subject.ppo.penalty.kl, subject.ppo.penalty.kl_model = 1.0, "served.teacher"
    with pytest.raises(ConfigError, match=r"^served.teacher.path: .*teacher has 99 tokens, fewer than the 100 of "):
        check_model(subject)
    assert longest(subject, "teacher") > subject.longest_sequence
    subject.served.teacher.max_length = subject.longest_sequence
    with pytest.raises(ConfigError, match=rf"^served.teacher.max_length: {subject.longest_sequence}, and for ppo"):
        longest(subject, "teacher")


def test_the_experts_of_a_student_say_nothing_of_its_teachers(tmp_path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    config(teacher)
    subject = config(tmp_path, GOOD | EXPERTS, tp=2, dp=3, ep=3)
    subject.ppo.penalty.kl, subject.ppo.penalty.kl_model = 1.0, str(teacher)
    check_model(subject)
    subject.ppo.penalty.kl_model = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"ppo.penalty.kl_model: there is no folder .*nowhere"):
        check_model(subject)


@pytest.mark.parametrize("asked", ["expert_parallel", "replay_routes"])
def test_what_engines_do_with_experts_needs_some_and_cuda(tmp_path, asked):
    subject = config(tmp_path, GOOD | EXPERTS)
    setattr(subject.rollout, asked, True)
    subject.machine.device = "cuda"
    check_model(subject)
    subject.machine.device = "cpu"
    with pytest.raises(ConfigError, match=rf"rollout.{asked}: on CPU vLLM's kernels fail .* leave it out"):
        check_model(subject)
    subject = config(tmp_path, GOOD)
    setattr(subject.rollout, asked, True)
    subject.machine.device = "cuda"
    with pytest.raises(ConfigError, match=rf"rollout.{asked}: the model of .* has no experts"):
        check_model(subject)


def test_missing_folder_file_and_weights(tmp_path):
    subject = config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.path: .* holds no \*.safetensors file$"):
        check_model(subject)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r" holds no \*.safetensors file; pickles are not read: save it anew"):
        check_model(subject)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.path: .*config.json is not JSON"):
        check_model(subject)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model.path: cannot read .*config.json: .*; give a model's folder$"):
        check_model(subject)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"; give a model's folder, such as {tmp_path}/inside$"):
        check_model(subject)
    subject.model.path = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model.path: there is no folder .*nowhere"):
        check_model(subject)


def test_a_shard_that_the_index_names_and_nobody_has(tmp_path):
    subject, index = config(tmp_path), tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model.path: .* lacks model-2.safetensors, which its index names, and 0 mo"):
        check_model(subject)
    for text in ("{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": [1]}}'):
        index.write_text(text)
        with pytest.raises(ConfigError, match=r"model.path: .*index.json cannot be read as an index of weights"):
            check_model(subject)


def save(folder, **files):
    """Writes files of one tensor each, as the library of safetensors does."""
    for name, value in files.items():
        save_file({"t": numpy.full(3, value, numpy.float32)}, folder / f"{name.replace('_', '-')}.safetensors")


OLD = {"metadata": {}, "weight_map": {"t": "model-00001-of-00001.safetensors"}}


@pytest.mark.parametrize(
    ("files", "index", "mode", "message"),
    [
        (["model"], OLD, "sft", None),
        (["model", "model_00001_of_00001"], OLD, "sft", None),
        (["model", "model_00001_of_00001"], OLD, "rl", "follow to other files: they were saved at two times"),
        (["model"], OLD, "rl", "follow to other files: they were saved at two times"),
        (["model_00001_of_00001"], OLD, "rl", None),
        (["model_00001_of_00001", "consolidated"], OLD, "rl", None),
        (["model_00001_of_00001", "model_00002_of_00002"], OLD, "rl", None),
        (["model", "consolidated"], None, "rl", "has consolidated.safetensors beside model.safetensors"),
        (["model", "consolidated"], None, "sft", None),
        (["model", "adapter"], None, "rl", "has adapter.safetensors beside model.safetensors"),
        (["model_00001_of_00002"], None, "sft", "has neither model.safetensors.index.json nor model.safetensors"),
        (["other"], OLD, "sft", "lacks model-00001-of-00001.safetensors, which its index names"),
        (
            ["model"],
            {"weight_map": {"t": "../model.safetensors"}},
            "sft",
            "'../model.safetensors' is no file of",
        ),
    ],
)
def test_trainers_and_engines_load_the_same_files_or_are_told(tmp_path, files, index, mode, message):
    subject = config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    subject.mode, subject.machine.device = mode, "cpu"
    save(tmp_path, **{name: number for number, name in enumerate(files)})
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if message:
        with pytest.raises(ConfigError, match=message) as refused:
            check_model(subject)
        assert "\n" not in str(refused.value)
        return
    check_model(subject)
    ours = read_tensor(tmp_path)
    theirs = transformers_files(tmp_path)
    assert ours == theirs
    if mode == "rl":
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        loader = DefaultModelLoader(LoadConfig(load_format="hf"))
        _, read, *_ = loader._prepare_weights(str(tmp_path), None, None, True, None)
        assert sorted(map(Path, read)) == ours


def transformers_files(folder):
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    found, _ = _get_resolved_checkpoint_files(
        pretrained_model_name_or_path=str(folder),
        variant=None,
        gguf_file=None,
        use_safetensors=True,
        user_agent=None,
        is_remote_code=False,
    )
    return sorted(map(Path, found))


def read_tensor(folder):
    """The files from which trainers and the converter read."""
    file_of = weight_map(folder)
    return sorted(folder / name for name in {*file_of.values()} or {"model.safetensors"})


def test_an_adapter_is_not_overlooked(tmp_path):
    subject = config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="an adapter is not applied; merge it into the weights"):
        check_model(subject)


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder", "loop", "huge", "deep", "text"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_of_a_model_that_is_no_such_file_is_refused_at_once(tmp_path, kind, name):
    subject, file = config(tmp_path), tmp_path / name
    file.unlink(missing_ok=True)
    make_strange(file, kind)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^model.path: [^\n]*{name}[^\n]*$"):
        check_model(subject)
    assert time.monotonic() - started < 5


def make_strange(file, kind):
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "zero":
            file.symlink_to("/dev/zero")
        case "folder":
            file.mkdir()
        case "loop":
            file.symlink_to(file.name)
        case "huge":
            with file.open("wb") as sparse:
                sparse.truncate(1 << 34)
        case "deep":
            file.write_text('{"a":' * 100_000)
        case "text":
            file.write_bytes(b"\xff\x00")


def test_heads_of_engines_on_cpu_are_those_that_vllm_has_kernels_for(tmp_path):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEADS
    subject = config(tmp_path, GOOD | {"head_dim": 16})
    subject.machine.device = "cuda"
    check_model(subject)
    subject.machine.device = "cpu"
    with pytest.raises(ConfigError, match=r"has heads of 16; engines on CPU have kernels for 32, 64, 80"):
        check_model(subject)
    subject.mode = "sft"
    check_model(subject)


def test_engines_on_gpus_have_kernels_for_any_head():
    from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend

    assert FlexAttentionBackend.get_supported_head_sizes() == []


@pytest.mark.parametrize("key", ["seq_length", "model_max_length", "n_positions"])
def test_the_most_tokens_that_engines_take(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"{key}=32"):
        check_model(config(tmp_path, GOOD | {key: 32}))


HOSTILE = [
    *(None, True, 0, -1, 3, 10**9, 10**5000, 0.5, 1e308, float("inf"), float("nan"), "", "x", "\x1b[2Jx", "8"),
    *([], [1], [[]], {}, {"type": 5}, {"rope_type": []}, {"rope_type": "yarn", "factor": "x"}),
    {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 10**300},
]
PROGRAM = """
import resource, sys, traceback
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
sys.set_int_max_str_digits(0)
from pathlib import Path
from areal_megatron.config import ConfigError
from areal_megatron.models.architecture import read_config
from areal_megatron.planning.memory import plan_memory
from tests.unit.test_model_check import EXPERTS, GOOD, HOSTILE, LINEAR, config
from areal_megatron.model_check import CPU_HEADS, check_model
from areal_megatron.models.architecture import architecture, as_reward_model

folder, step, wrong, count = Path(sys.argv[1]), int(sys.argv[2]), 0, 0
keys = sorted({*GOOD, *LINEAR, "layer_types", "full_attention_interval", "architectures",
               "rope_scaling", "rope_parameters", "rope_theta", "eos_token_id",
               "tie_word_embeddings", "decoder_sparse_step", "num_local_experts", "use_sliding_window"})
for base in (GOOD, GOOD | EXPERTS, GOOD | LINEAR):
    by = 1 if base is GOOD else step
    for number, key in enumerate(keys):
        for value in HOSTILE[number % by :: by]:
            count += 1
            try:
                subject = config(folder, base | {key: value})
                check_model(subject, trains="linear_num_key_heads" not in base)
                plan_memory(subject, read_config(folder), 80)
            except ConfigError as e:
                wrong += "\\n" in str(e) or "\x1b" in str(e) or len(str(e)) > 400
            except BaseException as e:
                wrong += 1
                print(key, repr(value)[:60], "".join(traceback.format_exception(e)[-3:]))
peak = next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(count, "tried", wrong, "wrong", peak, "MiB")
raise SystemExit(wrong > 0)
"""


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_whatever_config_json_says_is_refused_in_one_line_or_planned_in_little_memory(tmp_path, step):
    """Each value of each key for a dense model; for the others each `step`-th, and the other half for the next key."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(step)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-3000:]
    assert int(process.stdout.split()[-2]) < 600, process.stdout


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"num_hidden_layers": 10**9}, "config.json has num_hidden_layers=1000000000, no model has more than 4096"),
        ({"vocab_size": 10**12}, "config.json has vocab_size=1000000000000, no model has more than 16777216"),
        (EXPERTS | {"num_experts": 10**9}, "num_experts=1000000000, no model has more than 65536"),
        (EXPERTS | {"num_experts": 65000, "num_hidden_layers": 4000}, "4000 layers of 65000 experts"),
    ],
)
def test_absurd_sizes_are_named(tmp_path, hf, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_model(config(tmp_path, GOOD | hf))


def test_needs_neither_torch_nor_megatron():
    program = "import sys, areal_megatron.model_check as m; assert not {'torch', 'megatron', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


REWARD_MODEL = GOOD | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def test_a_reward_model_is_trained_as_such_and_nothing_else(tmp_path):
    check_model(replace(config(tmp_path, REWARD_MODEL), mode="reward_model"))
    for mode in ("rl", "sft", "dpo"):
        with pytest.raises(ConfigError, match=f"is a reward model .*, mode={mode} trains language models"):
            check_model(replace(config(tmp_path, REWARD_MODEL), mode=mode))
    labels = REWARD_MODEL | {"id2label": {"0": "bad", "1": "good"}}
    with pytest.raises(ConfigError, match="without one label"):
        check_model(replace(config(tmp_path, labels), mode="reward_model"))


def test_the_reward_model_of_a_run_is_looked_at_before_it_starts(tmp_path):
    for name in ("policy", "scorer"):
        (tmp_path / name).mkdir()
    asked = config(tmp_path / "policy")
    asked.reward, asked.served.reward.path = RewardConfig(function="model"), str(tmp_path / "scorer")
    with pytest.raises(ConfigError, match=r"^served.reward.path: cannot read .*config.json"):
        check_model(asked)
    config(tmp_path / "scorer")
    with pytest.raises(ConfigError, match=r"^served.reward.path: .* is no reward model but a Qwen3ForCausalLM"):
        check_model(asked)
    config(tmp_path / "scorer", REWARD_MODEL)
    check_model(asked)


def test_models_that_answer_are_looked_at_before_the_run_starts(tmp_path):
    for name in ("policy", "helper"):
        (tmp_path / name).mkdir()
    asked = config(tmp_path / "policy")
    asked.served.user = ServedModelConfig(path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"^served.user.path: there is no folder .*nowhere"):
        check_model(asked)
    asked.served.user.path = str(tmp_path / "helper")
    config(tmp_path / "helper", REWARD_MODEL)
    with pytest.raises(ConfigError, match=r"^served.user.path: .* is a reward model"):
        check_model(asked)
    config(tmp_path / "helper", GOOD)
    check_model(asked)
    asked.served.user.tp = 3
    with pytest.raises(ConfigError, match=r"^served.user.tp: 3 does not divide"):
        check_model(asked)
    asked.served.user.tp, asked.served.user.max_length = 1, 10**6
    with pytest.raises(ConfigError, match=r"^served.user.max_length: 1000000, but .* has max_position_embeddings=\d+$"):
        longest(asked, "user")
    asked.served.user.max_length = 0
    assert longest(asked, "user") == min(asked.longest_sequence + 1024, GOOD["max_position_embeddings"])


def test_a_language_model_is_described_as_a_reward_model():
    described = as_reward_model(GOOD | {"tie_word_embeddings": True, "pad_token_id": 7}, pad_token=3)
    assert described["architectures"] == ["Qwen3ForSequenceClassification"] and described["pad_token_id"] == 3
    canonical, before = architecture(described).canonical, architecture(GOOD).canonical
    assert canonical.pop("score.weight") == (1, 64)
    assert canonical == {name: shape for name, shape in before.items() if name != "lm_head.weight"}
    assert as_reward_model(REWARD_MODEL | {"pad_token_id": 9}, pad_token=3)["pad_token_id"] == 9

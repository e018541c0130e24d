"""config.json is read as transformers reads it, or refused in one line: keys given twice, numbers, flags, ids."""

import ast
import importlib.util
import json
import math
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from areal_megatron.config import ConfigError
from areal_megatron.model_check import check_model
from areal_megatron.models.architecture import architecture
from areal_megatron.models.described import rope
from tests.unit.test_model_check import EXPERTS, GOOD, LATENTS, LINEAR, SIGMOID, config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
SAVED = {"rope_theta": 1e6, "rope_type": "default"}


def as_transformers(folder, described):
    (folder / "config.json").write_text(json.dumps(described))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_theta": 1e6},
        {"rope_parameters": SAVED},
        {"rope_theta": 1e6, "rope_scaling": YARN},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        {"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": SAVED},
        {"rope_scaling": {}, "rope_parameters": YARN | {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 1000000}},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}, "rope_theta": 5e4},
    ],
)
def test_rotary_embeddings_are_those_of_transformers(tmp_path, given):
    described = GOOD | {"architectures": ["Qwen3ForCausalLM"]} | given
    theirs = as_transformers(tmp_path, described).rope_parameters
    kind, ours = rope(described)
    assert kind == theirs["rope_type"]
    assert {"rope_theta": 10_000} | {key: ours.get(key, theirs[key]) for key in theirs} == theirs | {
        "type": kind
    } or all(ours.get(key, theirs[key]) == theirs[key] for key in theirs)
    architecture(described)


@pytest.mark.parametrize(
    "family", [{}, EXPERTS, LINEAR, {"model_type": "qwen2"}], ids=["", "experts", "linear", "qwen2"]
)
def test_heads_are_as_wide_as_in_transformers_where_nothing_is_said(tmp_path, family):
    described = {key: value for key, value in (GOOD | family).items() if key != "head_dim"}
    theirs = getattr(as_transformers(tmp_path, described), "head_dim", 64 // 8)
    assert architecture(described).dimensions.head_dim == theirs


CONTRADICTIONS = {
    "type": (
        {"rope_parameters": SAVED, "rope_scaling": YARN},
        "rope_scaling.rope_type='yarn' and rope_parameters.rope_t",
    ),
    "hidden": ({"rope_parameters": SAVED, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "factor": (
        {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": YARN | {"rope_theta": 1e6, "factor": 2.0}},
        "rope_scaling.factor=2.0 and rope_parameters.factor=4.0",
    ),
    "one-sided": (
        {"rope_parameters": YARN | {"beta_fast": 16}, "rope_scaling": YARN},
        "no rope_scaling.beta_fast and rope_parameters.beta_fast=16",
    ),
    "theta-in-one": (
        {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": YARN},
        "no rope_scaling.rope_theta and rope_parameters.rope_theta=1000000.0",
    ),
    "theta": (
        {"rope_theta": 1e4, "rope_parameters": SAVED},
        "rope_theta=10000.0 and rope_parameters.rope_theta=1000000",
    ),
    "both-types": (
        {"rope_scaling": YARN | {"type": "linear"}},
        "rope_scaling.rope_type='yarn' and rope_scaling.type='lin",
    ),
    "part": (
        {"partial_rotary_factor": 0.5, "rope_parameters": SAVED | {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor=0.5 and rope_parameters.partial_rotary_factor=0.25",
    ),
    "old-part": ({"partial_rotary_factor": 1.0, "rotary_pct": 0.5}, "partial_rotary_factor=1.0 and rotary_pct=0.5"),
    "original": (
        {"original_max_position_embeddings": 64, "rope_scaling": YARN},
        "original_max_position_embeddings=64 and rope_scaling.original_max_position_embeddings=1024",
    ),
    "kinds": ({"rope_parameters": {"full_attention": SAVED}}, "of their own for 'full_attention' in rope_parameters"),
    "dtype": ({"torch_dtype": "bfloat16", "dtype": "float32"}, "dtype='float32' and torch_dtype='bfloat16'"),
    "experts": (EXPERTS | {"num_local_experts": 8}, "num_experts=6 and num_local_experts=8"),
    "routed": (SIGMOID | {"num_local_experts": 4}, "n_routed_experts=8 and num_local_experts=4"),
    "model": ({"architectures": ["LlamaForCausalLM"]}, "model_type='qwen3' and the class LlamaForCausalLM"),
    "qwen2-heads": ({"model_type": "qwen2"}, "head_dim=32; heads of Qwen2ForCausalLM have hidden_size=64 over"),
    "sliding": ({"layer_types": ["full_attention", "sliding_attention"] * 3}, "layer_types=.* all layers of Qwen3"),
    "mrope": ({"rope_parameters": SAVED | {"mrope_section": [8, 4, 4]}}, "rotary embeddings with mrope_section"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_is_said_twice_must_be_the_same(tmp_path, name):
    given, message = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=message) as refused:
        check(tmp_path, GOOD | given)
    assert "\n" not in str(refused.value)


def check(folder, hf):
    check_model(config(folder, hf))


def test_the_same_said_twice_is_taken(tmp_path):
    given = {"torch_dtype": "torch.bfloat16", "dtype": "bfloat16", "partial_rotary_factor": 1.0}
    check(tmp_path, GOOD | given | {"rope_theta": 1e6, "rope_parameters": SAVED | {"partial_rotary_factor": 1.0}})
    check(tmp_path, GOOD | EXPERTS | {"num_local_experts": 6})


NUMBERS = [
    *("rms_norm_eps", "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "rope_theta"),
    *("initializer_range", "attention_dropout", "tie_word_embeddings", "use_cache", "head_dim", "num_key_value_heads"),
    *("norm_topk_prob", "router_aux_loss_coef", "num_experts_per_tok", "moe_intermediate_size", "eos_token_id"),
    *("bos_token_id", "pad_token_id", "routed_scaling_factor", "n_group", "topk_group", "q_lora_rank", "v_head_dim"),
    *("rope_interleave", "n_shared_experts", "first_k_dense_replace", "use_qk_norm", "attention_bias"),
]
VALUES = [None, True, "8", "x", -1, 0, 1.5, [], {}, 1e30]


@pytest.mark.parametrize("family", [{}, EXPERTS, SIGMOID, LATENTS], ids=["dense", "experts", "sigmoid", "latents"])
def test_what_transformers_refuses_is_refused_before(tmp_path, family):
    """The oracle is the class that trainers and engines read config.json with."""
    good = GOOD | {"rms_norm_eps": 1e-6} | family
    check(tmp_path, good)
    known = CONFIG_MAPPING[architecture(good).model_type]
    accepted = []
    for key in NUMBERS:
        for value in VALUES:
            described = {k: v for k, v in (good | {key: value}).items() if k not in ("architectures", "model_type")}
            try:
                known(**described)
            except Exception:
                try:
                    check(tmp_path, good | {key: value})
                    accepted.append((key, value))
                except ConfigError as e:
                    assert "\n" not in str(e)
    assert accepted == []


@pytest.mark.parametrize(
    "text",
    ['"rms_norm_eps": NaN', '"rope_theta": Infinity', '"rms_norm_eps": 1e999', '"hidden_size": 64, "hidden_size": 32'],
)
def test_no_number_and_no_key_twice(tmp_path, text):
    subject = config(tmp_path, GOOD)
    file = tmp_path / "config.json"
    file.write_text(file.read_text()[:-1] + f", {text}}}")
    with pytest.raises(ConfigError, match=r"^model.path: .*config.json is not JSON: [^\n]*$"):
        check_model(subject)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rms_norm_eps": 0.0}, "above 0 to 1 as rms_norm_eps, has 0.0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rope_theta": 0.0}, "positive number rope_theta, has 0.0"),
        ({"rope_theta": 1.0}, "rope_theta above 1"),
        ({"rope_theta": math.nan}, "NaN is no number"),
        ({"rope_theta": True}, "rope_theta, has True"),
        ({"rope_scaling": {"rope_type": "linear"}}, "positive number factor, has None"),
        ({"rope_scaling": YARN | {"factor": -1}}, "positive number factor, has -1"),
        ({"rope_scaling": YARN | {"beta_fast": "x"}}, "positive number beta_fast, has 'x'"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor above low_freq_factor=1.0, has 1.0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor of 1 at most"),
        ({"head_dim": 33}, "heads of 33, of which an odd part is rotated"),
        ({"eos_token_id": [5, 100]}, r"eos_token_id=\[5, 100\]; tokens of the model are 0 to 99"),
        ({"bos_token_id": -1}, "bos_token_id=-1"),
        ({"pad_token_id": 10**9}, "pad_token_id=1000000000"),
        ({"eos_token_id": True}, "eos_token_id=True"),
    ],
)
def test_numbers_without_sense_are_named(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, GOOD | given)


def test_generation_settings_name_tokens_of_the_model(tmp_path):
    file = tmp_path / "generation_config.json"
    for text, message in (
        ('{"eos_token_id": [1, 100]}', r"generation_config.json has eos_token_id=\[1, 100\]; tokens .* are 0 to 99"),
        ('{"eos_token_id": "x"}', "eos_token_id='x'"),
        ("[]", "generation_config.json holds no JSON object"),
        ('{"temperature": NaN}', "generation_config.json is not JSON: NaN"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            check(tmp_path, GOOD)
    file.write_text('{"eos_token_id": [1, 99], "pad_token_id": null}')
    check(tmp_path, GOOD)


SERVED = {
    "qwen2": GOOD | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256},
    "qwen3": GOOD,
    "llama": GOOD | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3_moe": GOOD | EXPERTS,
    "glm4_moe": GOOD | SIGMOID,
    "deepseek_v2": GOOD | LATENTS | {"model_type": "deepseek_v3"},
    "glm4_moe_lite": GOOD | LATENTS | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"},
    "qwen3_next": GOOD | LINEAR,
}
"""Files of vLLM's models → what they are read with here."""
CHANGE_NOTHING = {
    *("head_dim", "indexer_rope_interleave"),  # read here, too; of an indexer
    *("index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern"),
    "moe_router_dtype",  # the precision of the routing alone
    "target_layer_count",  # of drafts
}


def keys_that_only_vllm_reads(name, described):
    """The keys that a file of vLLM's models reads of a config, which transformers' class does not have."""
    [vllm] = importlib.util.find_spec("vllm").submodule_search_locations
    theirs, read = CONFIG_MAPPING[described["model_type"]](), set()
    for node in ast.walk(ast.parse(Path(vllm, "model_executor", "models", f"{name}.py").read_text())):
        match node:
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[of, ast.Constant(str(key)), *_]):
                read |= {key} if "config" in ast.unparse(of) else set()
            case ast.Attribute(value=of, attr=key) if ast.unparse(of).removeprefix("self.") in ("config", "hf_config"):
                read.add(key)
    return {key for key in read if not hasattr(theirs, key)} - CHANGE_NOTHING


def is_refused(described):
    try:
        architecture(described)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", SERVED)
def test_what_engines_would_compute_and_trainers_not_is_refused(name):
    described = SERVED[name]
    architecture(described)
    for key in keys_that_only_vllm_reads(name, described) | {"sliding_window", "compression_config"}:
        set_aside = key == "sliding_window" and hasattr(CONFIG_MAPPING[described["model_type"]](), "use_sliding_window")
        values = (True, False, 7, {"chunk_size": 64})
        assert set_aside or any(is_refused(described | {key: value}) for value in values), key
    gates = {gate: is_refused(described | {"output_gate_type": gate}) for gate in ("sigmoid", "silu", "swish")}
    assert gates == {"sigmoid": True, "silu": False, "swish": False}  # read in a file of layers
    with pytest.raises(ConfigError, match=r"has dual_chunk_attention_config=.* leave it out$"):
        architecture(described | {"dual_chunk_attention_config": {"chunk_size": 64}})

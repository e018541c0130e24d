"""The models that this project supports: one table a family, chosen by the checkpoint's config.json."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.models.deepseek import DEEPSEEK_V3
from areal_megatron.models.described import EXPERT_COUNTS, check_described, rope, shown
from areal_megatron.models.glm4 import GLM4_MOE, GLM4_MOE_LITE
from areal_megatron.models.llama import LLAMA
from areal_megatron.models.qwen2 import QWEN2
from areal_megatron.models.qwen3 import QWEN3, QWEN3_MOE
from areal_megatron.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from areal_megatron.models.qwen3_next import QWEN3_NEXT
from areal_megatron.models.table import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    SCORE,
    Dimensions,
    Family,
    Row,
)
from areal_megatron.run.json_input import read_object

FAMILIES: dict[str, Family] = {
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
}
"""The class that config.json names in `architectures` → the table."""

_LANGUAGE, _REWARD = "ForCausalLM", "ForSequenceClassification"
"""How the names of the classes of language models end, and of reward models."""

_CLASS_OF_MODEL_TYPE = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
_MISSING = dict.fromkeys(
    ("GptOssForCausalLM", "gpt_oss"),
    "trainers have no attention sinks, no sliding windows, and no biases or clamped activations of experts, and "
    "weights in MXFP4 are not read",
)
"""Names of models without a table → the missing parts."""
_LANGUAGE_OF_IMAGES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
"""`model_type` of models that take images, too → the class of their language model, which text_config describes."""
_TIED = "tie_word_embeddings"
_SHARED = (_TIED, "quantization_config", "dtype", "torch_dtype")
"""What such a config.json may say outside of text_config, too."""

_MOST_ROWS = 1 << 24
"""Most rows or columns of a tensor. Larger sizes are errors, and would use up the memory of whoever plans for them."""
_HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
_MOST = {"num_hidden_layers": 4096} | dict.fromkeys((*EXPERT_COUNTS, *_HEADS), 65536)
_KINDS = ("linear_attention", "full_attention")
"""What `layer_types` of config.json calls the layers of models that have two kinds of attention."""
_STATES = (None, "auto", "float32", "float16", "bfloat16")
"""What config.json may say of the dtype of the states of linear attention."""
_MOST_TENSORS = 1 << 18
"""Most experts of all layers together."""


@dataclass(frozen=True)
class Architecture:
    """One model: the table of its family, and its sizes."""

    name: str
    family: Family
    dimensions: Dimensions
    layer: tuple[Row, ...]
    """The rows of the family that this model has."""
    tied: bool
    """Whether the output layer is the embedding; the checkpoint has no lm_head then."""
    is_reward_model: bool = False
    """Whether the output layer gives a score in place of logits."""
    is_adapter: bool = False
    """Whether these are the factors of adapters, which layers alone have."""

    @property
    def output_layer(self) -> Row | None:
        """None: it is the embedding."""
        return SCORE if self.is_reward_model else None if self.tied else HEAD

    @cached_property
    def canonical(self) -> dict[str, tuple[int, ...]]:
        """The canonical tensors, in the order of the model: the checkpoint's name as a pattern → shape."""
        return {name: self.dimensions.shape(axes) for row in self._rows for name, axes in row.tensors.items()}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The canonical tensors that have one dtype whatever the model's is: the checkpoint's name as a pattern →
        dtype."""
        return {name: row.dtype for row in self._rows if row.dtype for name in row.tensors}

    @property
    def attention_weights(self) -> int:
        """The weights of all layers that a token is multiplied with for its query, key and value, and for what its
        attention gives."""
        d, rows = self.dimensions, [row for row in self.layer if row.of_attention]
        shapes = [(len(d.layers_with(row)), d.shape(axes)) for row in rows for axes in row.tensors.values()]
        return sum(layers * prod(shape) for layers, shape in shapes if len(shape) > 1)

    @property
    def model_type(self) -> str:
        """The name that transformers has for models of this class."""
        name = self.name.replace(_REWARD, _LANGUAGE)
        return next(kind for kind, own in _CLASS_OF_MODEL_TYPE.items() if own == name)

    @property
    def _rows(self) -> list[Row]:
        inner = [row.of_layers(self.dimensions) for row in self.layer if self.dimensions.layers_with(row)]
        if self.is_adapter:
            return inner
        return [EMBEDDING, *inner, FINAL_NORM, *([self.output_layer] if self.output_layer else [])]

    def is_of_further_layer(self, tensor: str) -> bool:
        """Returns whether a checkpoint's tensor is of a layer after the last: published models have some that predict
        several tokens at once (MTP), which nothing here trains."""
        if tensor.startswith("mtp."):
            return True
        number = tensor.removeprefix("model.layers.").partition(".")[0]
        return number.isdecimal() and int(number) >= self.dimensions.layers

    def has(self, row: Row) -> bool:
        """Returns whether layers of the model have a parameter with the row's name in the checkpoint."""
        return any(own.tensors.keys() == row.tensors.keys() for own in self.layer)


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns what config.json of a Hugging Face model folder says of its language model. Raises ConfigError if it is
    missing or no JSON object, has a key twice, or a number that is not finite."""
    return of_language_model(read_whole_config(path))


def of_language_model(described: dict[str, Any]) -> dict[str, Any]:
    """Returns the description of the language model alone of a model with images; of any other model its own. Raises
    ConfigError."""
    if not (language := _language(described)):
        return described
    text = described.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"model.path: config.json needs an object text_config, has {shown(text)}")
    shared = {key: described[key] for key in _SHARED if key in described}
    if twice := next((key for key in shared if text.get(key, shared[key]) != shared[key]), None):
        raise ConfigError(
            f"model.path: config.json has {twice}={shown(shared[twice])} and in text_config {shown(text[twice])}"
        )
    for here, other, where in ((described, text, "outside of"), (text, described, "in")):
        if here.get(_TIED) and _TIED not in other:
            raise ConfigError(
                f"model.path: config.json has {_TIED}={shown(here[_TIED])} {where} text_config alone; transformers "
                "reads it outside, engines inside: say it in both"
            )
    return shared | text | {"architectures": [language]}


def takes_images(path: str | Path) -> bool:
    """Returns whether the model of a folder has a part for images; a folder without config.json has none. Raises
    ConfigError as `read_config` does."""
    return (Path(path) / "config.json").is_file() and bool(_language(read_whole_config(path)))


def _language(described: Mapping[str, Any]) -> str:
    kind = described.get("model_type")
    return _LANGUAGE_OF_IMAGES.get(kind, "") if isinstance(kind, str) else ""


def read_whole_config(path: str | Path) -> dict[str, Any]:
    """Returns config.json of a Hugging Face model folder, as it is. Raises ConfigError as `read_config` does."""
    file = Path(path) / "config.json"
    try:
        return read_object(file)
    except OSError as e:
        hint = ""
        if isinstance(e, FileNotFoundError):
            inside = next(Path(path).glob("*/config.json"), None)
            hint = "; give a model's folder" + (f", such as {inside.parent}" if inside else "")
        raise ConfigError(f"model.path: cannot read {file}: {e.strerror}{hint}") from None
    except ValueError as e:
        raise ConfigError(f"model.path: {file} {e}") from None


def architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a checkpoint's config.json describes.

    Raises ConfigError for a model without a table, a flag that adds unknown parameters, or a missing size.
    """
    name, family, is_reward_model = _table(hf_config)
    check_described(hf_config)
    _check_class(hf_config, name, family)
    _check_flags(hf_config, name, family)
    size = _Sizes(hf_config)
    layers = size("num_hidden_layers")
    dimensions = Dimensions(
        layers=layers,
        hidden=size("hidden_size"),
        ffn=size("intermediate_size") if family.has_dense_layers else 0,
        vocabulary=size("vocab_size"),
        experts=size.experts() if family.has_experts else 0,
        expert_ffn=size("moe_intermediate_size") if family.has_experts else 0,
        shared_ffn=_shared_ffn(hf_config, size) if family.has_shared_experts else 0,
        dense_layers=_dense_layers(hf_config, family, layers),
        **_heads(hf_config, name, family, size),
        **(_linear_attention(hf_config, family, size, layers) if family.has_linear_layers else {}),
    )
    if (tensors := dimensions.layers * max(dimensions.experts, 1)) > _MOST_TENSORS:
        raise ConfigError(
            f"model.path: config.json has {dimensions.layers} layers of {dimensions.experts} experts; {tensors} are "
            f"more than the {_MOST_TENSORS} that any model has"
        )
    layer = tuple(row for row in family.layer if _has(hf_config, row))
    if is_reward_model:
        _check_one_label(hf_config)
        return Architecture(shown(_named(hf_config)[0]), family, dimensions, layer, False, True)
    return Architecture(name, family, dimensions, layer, bool(hf_config.get(_TIED, False)))


class _Sizes:
    """Reads sizes of a config.json; raises ConfigError for what is no size of a model."""

    def __init__(self, hf_config: Mapping[str, Any]):
        self._config = hf_config

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise ConfigError(f"model.path: config.json needs a positive integer {key}, has {shown(value)}")
        if value > (most := _MOST.get(key, _MOST_ROWS)):
            raise ConfigError(f"model.path: config.json has {key}={shown(value)}, no model has more than {most}")
        return value

    def experts(self) -> int:
        return self(next((key for key in EXPERT_COUNTS if self._config.get(key) is not None), EXPERT_COUNTS[0]))


def _table(hf_config: Mapping[str, Any]) -> tuple[str, Family, bool]:
    """Returns the class of the language model, its table, and whether config.json names the reward model of it."""
    named, name = _named(hf_config)
    is_reward_model = name is not None and name.endswith(_REWARD)
    if name is not None and is_reward_model:
        name = name.removesuffix(_REWARD) + _LANGUAGE
    if name in FAMILIES:
        return name, FAMILIES[name], is_reward_model
    if isinstance(named, str) and named in _MISSING:
        raise ConfigError(f"model.path: config.json names {shown(named)}, which has no table: {_MISSING[named]}")
    near = difflib.get_close_matches(str(named), FAMILIES, 1, 0.3)
    hint = f"; the nearest table is that of {near[0]}, see docs/adding_a_family.md" if near else ""
    raise ConfigError(
        f"model.path: config.json names {shown(named)}, which has no table; known are {', '.join(FAMILIES)}{hint}"
    )


def _check_flags(hf_config: Mapping[str, Any], name: str, family: Family) -> None:
    """Raises ConfigError for a flag that adds parameters or changes what is computed."""
    for flag in family.refused:
        if hf_config.get(flag):
            raise ConfigError(f"model.path: config.json sets {flag}, which the table of {name} lacks")
    for key, only in family.fixed.items():
        if (value := hf_config.get(key, only)) != only:
            raise ConfigError(
                f"model.path: config.json has {key}={shown(value)}; of {name} only {key}={shown(only)} is computed"
            )
    if rope(hf_config)[1].get("mrope_section") and not family.positions_of_text:
        raise ConfigError(
            "model.path: config.json has rotary embeddings with mrope_section, which trainers do not have"
        )
    if family.has_experts and _Sizes(hf_config)("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "model.path: config.json has a decoder_sparse_step other than 1: layers without experts, "
            f"which the table of {name} lacks"
        )


def _check_one_label(hf_config: Mapping[str, Any]) -> None:
    labels = hf_config.get("id2label")
    if not isinstance(labels, dict) or {len(labels), hf_config.get("num_labels", 1)} != {1}:
        named = shown(_named(hf_config)[0])
        raise ConfigError(f"model.path: config.json names {named} without one label; a reward model has one")


def _heads(hf_config: Mapping[str, Any], name: str, family: Family, size: _Sizes) -> dict[str, int]:
    """The number of heads, and their sizes."""
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    has_own = (family.has_experts or family.has_linear_layers) and not family.has_latents
    if has_own and hf_config.get("num_key_value_heads") is None:  # for which their classes have numbers of their own
        raise ConfigError(
            f"model.path: config.json needs num_key_value_heads, of {name} it may not be left out or null"
        )
    kv_heads = size("num_key_value_heads", heads)
    default = family.defaults.get("head_dim")
    if default and hf_config.get("head_dim", default) is None:
        raise ConfigError(f"model.path: config.json needs a positive integer head_dim, of {name} it may not be null")
    sizes = (
        _latents(hf_config, size) if family.has_latents else {"head_dim": size("head_dim", default or hidden // heads)}
    )
    head_dim = sizes["head_dim"]
    if not family.own_head_dim and head_dim * heads != hidden:
        raise ConfigError(
            f"model.path: config.json has head_dim={head_dim}; heads of {name} have hidden_size={hidden} over "
            f"num_attention_heads={heads} in engines"
        )
    positions = rope(hf_config)[1]
    rotated = int(head_dim * positions.get("partial_rotary_factor", 1))
    if not family.has_latents and rotated % 2:
        raise ConfigError(f"model.path: config.json has heads of {head_dim}, of which an odd part is rotated")
    if sections := positions.get("mrope_section"):
        counts = sections if isinstance(sections, list) and all(type(each) is int for each in sections) else []
        if sum(counts) != rotated // 2:
            raise ConfigError(
                f"model.path: config.json has mrope_section={shown(sections)}; engines take numbers that are "
                f"{rotated // 2} together, half of what is rotated of a head"
            )
    if heads % kv_heads:
        raise ConfigError(
            f"model.path: config.json has num_attention_heads={heads}, no multiple of num_key_value_heads={kv_heads}"
        )
    if family.has_latents and kv_heads != heads:
        raise ConfigError(
            f"model.path: config.json has num_key_value_heads={kv_heads} and num_attention_heads={heads}; with latents "
            "each head has a key and a value"
        )
    return {"heads": heads, "kv_heads": kv_heads, **sizes}


def _check_class(hf_config: Mapping[str, Any], name: str, family: Family) -> None:
    """Raises ConfigError where transformers (by model_type) or engines (by layer_types) would build a model other than
    the class."""
    own = _CLASS_OF_MODEL_TYPE.get(kind) if isinstance(kind := hf_config.get("model_type"), str) else None
    if own not in (None, name):
        raise ConfigError(f"model.path: config.json has model_type={shown(kind)} and the class {name}, of two models")
    kinds = hf_config.get("layer_types")
    others = kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} != {_KINDS[1]})
    if others and not family.has_linear_layers:
        raise ConfigError(
            f"model.path: config.json has layer_types={shown(kinds)}; all layers of {name} are {_KINDS[1]} here"
        )


def _named(hf_config: Mapping[str, Any]) -> tuple[Any, str | None]:
    """What config.json calls the model, and the class that this is."""
    classes = hf_config.get("architectures")
    named = (classes[0] if isinstance(classes, list) and classes else classes) or hf_config.get("model_type")
    return named, _CLASS_OF_MODEL_TYPE.get(named, named) if isinstance(named, str) else None


def implied(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that config.json lacks although others than transformers want to read them, with their values;
    none of a model without a table."""
    family = FAMILIES.get(_named(hf_config)[1] or "")
    return {key: value for key, value in (family.fixed if family else {}).items() if key not in hf_config}


def for_engines(path: str | Path) -> dict[str, Any]:
    """Returns the keys of config.json that engines of a model folder get in place of its own: the `implied` ones, and
    for a model with images the class of its language model. Raises ConfigError as `read_config` does."""
    hf_config = read_config(path)
    return implied(hf_config) | ({"architectures": hf_config["architectures"]} if takes_images(path) else {})


def _has(hf_config: Mapping[str, Any], row: Row) -> bool:
    return bool(not row.when or hf_config.get(row.when)) and not (row.unless and hf_config.get(row.unless))


def _latents(hf_config: Mapping[str, Any], size: _Sizes) -> dict[str, int]:
    """The sizes of heads whose keys and values come from latents."""
    rotated = size("qk_rope_head_dim")
    if rotated % 2:
        raise ConfigError(f"model.path: config.json has qk_rope_head_dim={rotated}; pairs are rotated")
    return {
        "head_dim": size("qk_nope_head_dim") + rotated,
        "value_dim": size("v_head_dim"),
        "latent": size("kv_lora_rank"),
        "query_latent": size("q_lora_rank") if hf_config.get("q_lora_rank") is not None else 0,
        "rotated": rotated,
    }


def _shared_ffn(hf_config: Mapping[str, Any], size: _Sizes) -> int:
    """The width of all shared experts of a layer together."""
    if "n_shared_experts" in hf_config:
        return size("n_shared_experts") * size("moe_intermediate_size")
    return size("shared_expert_intermediate_size")


def _linear_attention(hf_config: Mapping[str, Any], family: Family, size: _Sizes, layers: int) -> dict[str, Any]:
    """The layers with linear attention, and its sizes."""
    if (types := hf_config.get("layer_types")) is None:
        every = size("full_attention_interval") if "full_attention_interval" in hf_config else 4
        types = [_KINDS[number % every == 0] for number in range(1, layers + 1)]
    if not isinstance(types, list) or len(types) != layers or {*map(str, types)} != {*_KINDS}:
        raise ConfigError(
            f"model.path: config.json has layer_types={shown(types)}; it needs {' or '.join(_KINDS)} for each of "
            f"{layers} layers, and both"
        )
    if (state := hf_config.get(family.state_dtype)) not in _STATES:
        raise ConfigError(
            f"model.path: config.json has {family.state_dtype}={shown(state)}; engines have states in "
            f"{', '.join(_STATES[1:])}"
        )
    keys, values = size("linear_num_key_heads"), size("linear_num_value_heads")
    if values % keys:
        raise ConfigError(
            f"model.path: config.json has linear_num_value_heads={values}, no multiple of linear_num_key_heads={keys}"
        )
    return {
        "linear": tuple(number for number, kind in enumerate(types) if kind == _KINDS[0]),
        "linear_key_heads": keys,
        "linear_value_heads": values,
        "linear_key_dim": size("linear_key_head_dim"),
        "linear_value_dim": size("linear_value_head_dim"),
        "kernel": size("linear_conv_kernel_dim"),
    }


def _dense_layers(hf_config: Mapping[str, Any], family: Family, layers: int) -> int:
    """How many of the first layers have a dense MLP."""
    if not (family.has_experts and family.has_dense_layers):
        return 0 if family.has_experts else layers
    value = hf_config.get("first_k_dense_replace", family.fixed.get("first_k_dense_replace", 0))
    if type(value) is not int or not 0 <= value < layers:
        raise ConfigError(
            f"model.path: config.json has first_k_dense_replace={shown(value)}, not one of 0 to {layers - 1}: some of "
            "the layers have experts"
        )
    kinds = hf_config.get("mlp_layer_types")
    if kinds and kinds != ["dense"] * value + ["sparse"] * (layers - value):
        raise ConfigError(
            f"model.path: config.json has mlp_layer_types={shown(kinds)}; it needs dense for the first {value} of "
            f"{layers} layers, then sparse"
        )
    return value


def as_reward_model(hf_config: Mapping[str, Any], pad_token: int | None = None) -> dict[str, Any]:
    """Returns the config.json of the reward model that has a language model's layers, and a score in place of its
    output layer, as transformers' class for the classification of sequences; one of a reward model is returned as it
    is.

    `pad_token`: the token with which callers fill up batches; None: they must not. The score belongs to the last other
    token.
    """
    model = architecture(hf_config)
    if model.is_reward_model:
        return dict(hf_config)
    if not model.family.reward_models:
        raise ConfigError(
            f"model.path: transformers has no reward models of the class {model.name}; take another model"
        )
    added = {
        "architectures": [model.name.removesuffix(_LANGUAGE) + _REWARD],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad_token,
    }
    return dict(hf_config) | added

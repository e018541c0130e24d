"""Low-rank adapters on Hugging Face models in plain PyTorch, by the formula that PEFT implements; their folders; what
each rank holds of them, cut by hand from whole factors with chunk and cat.

Factors have PEFT's names without `base_model.model.`. Shares no code with areal_megatron.reshard.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

from tests.support.tiny_models import load_oracle

FACTORS = ("lora_A", "lora_B")
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a model without experts and latents."""
PREFIX = "base_model.model."


STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The layers of an expert in each parameter in which transformers holds those of all experts."""


def linear_layers(tensors: Mapping[str, Tensor], targets: Sequence[str], experts: bool = False) -> dict[str, Tensor]:
    """Returns the weights of the layers of a model with an adapter, by the layers' names: for `all-linear` all but the
    output layer and routers, and without `experts` all but the experts that these choose."""
    found = {}
    for name, weight in tensors.items():
        if ".experts." not in name:
            found[name.removesuffix(".weight")] = weight
        elif experts:
            path, _, stacked = name.rpartition(".")
            for number, own in enumerate(weight):
                parts = zip(STACKED[stacked], own.chunk(len(STACKED[stacked])), strict=True)
                found |= {f"{path}.{number}.{layer}": part for layer, part in parts}
    last = {name: name.rpartition(".")[2] for name in found}
    every = tuple(targets) == ("all-linear",)
    return {
        name: weight
        for name, weight in found.items()
        if weight.ndim == 2 and ("_proj" in last[name] if every else last[name] in targets)
    }


def random_adapter(
    tensors: Mapping[str, Tensor], targets: Sequence[str], rank: int, seed: int = 0, experts: bool = False
) -> dict[str, Tensor]:
    """Returns factors for the model with these tensors."""
    factors = {}
    for layer, weight in linear_layers(tensors, targets, experts).items():
        rows, columns = weight.shape
        for factor, shape in zip(FACTORS, ((rank, columns), (rows, rank)), strict=True):
            factors[f"{layer}.{factor}.weight"] = value(f"{layer}.{factor}.weight", shape, seed)
    return factors


def value(name: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Returns a random factor, the same wherever it is asked for by this name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(tuple(shape), generator=generator) * 0.1


def adapt(model: torch.nn.Module, factors: Mapping[str, Tensor], scale: float) -> torch.nn.Module:
    """Adds an adapter to a model: what an adapted layer gives is W·x + scale · B·A·x. The factors alone are trained."""
    model.requires_grad_(False)
    stacked = {}
    for name, values in factors.items():
        layer, _, factor = name.removesuffix(".weight").rpartition(".")
        if ".experts." in layer:
            path, number, _ = layer.rsplit(".", 2)
            stacked[path] = model.get_submodule(path)
            for parent, own in ((path, number), (f"{path}.{number}", layer.rpartition(".")[2])):
                if own not in dict(model.get_submodule(parent).named_children()):
                    model.get_submodule(parent).add_module(own, torch.nn.Module())
        elif factor == FACTORS[0]:
            model.get_submodule(layer).register_forward_hook(
                lambda own, inputs, output: output + (inputs[0] @ own.lora_A.T @ own.lora_B.T) * scale
            )
        model.get_submodule(layer).register_parameter(factor, torch.nn.Parameter(values.clone()))
    for experts in stacked.values():
        for name, layers in STACKED.items():
            register_parametrization(experts, name, _Sums(experts, layers, scale))
    return model


class _Sums(torch.nn.Module):
    """W + scale · B·A of each expert in a parameter of all; for a layer without factors W."""

    def __init__(self, experts: torch.nn.Module, layers: Sequence[str], scale: float):
        super().__init__()
        self._experts, self._layers, self._scale = [experts], layers, scale  # a list hides what would be a child

    def forward(self, weights: Tensor) -> Tensor:
        return torch.stack([torch.cat([*self._of(number, own)]) for number, own in enumerate(weights)])

    def _of(self, number: int, weight: Tensor) -> Iterator[Tensor]:
        children = dict(self._experts[0].get_submodule(str(number)).named_children())
        for layer, part in zip(self._layers, weight.chunk(len(self._layers)), strict=True):
            own = children.get(layer)
            yield part if own is None else part + own.lora_B @ own.lora_A * self._scale


def adapted_oracle(
    folder: Path, rank: int, scale: float, targets: Sequence[str], experts: bool = False
) -> torch.nn.Module:
    """Returns the model of a folder with an adapter of random values."""
    model = load_oracle(folder)
    return adapt(model, random_adapter(model.state_dict(), targets, rank, experts=experts), scale)


def factors_among(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the factors among an adapted model's parameters, or their gradients."""
    return {f"{name}.weight": each for name, each in tensors.items() if name.endswith(FACTORS)}


def write_adapter(
    folder: Path, base: Path, rank: int, alpha: float, targets: Sequence[str] = ("all-linear",), **settings
) -> Path:
    """Writes a folder as PEFT does, with factors of random values; among the settings `dtype`: theirs,
    and `experts`: whether experts have some, too."""
    folder.mkdir(parents=True)
    dtype, experts = settings.pop("dtype", torch.float32), settings.pop("experts", False)
    factors = random_adapter(load_oracle(base).state_dict(), targets, rank, experts=experts)
    save_file({PREFIX + name: each.to(dtype) for name, each in factors.items()}, folder / "adapter_model.safetensors")
    names = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in factors})
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names, "bias": "none"}
    described |= {"base_model_name_or_path": str(base), "use_dora": False, "modules_to_save": None, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def megatron_factors(factors, config, sizes, rank):
    """Returns what rank `rank` of a MegatronSizes holds of an adapter on DENSE, by Megatron's names."""
    at, held = sizes.coordinates(rank), {}
    for local, layer in enumerate(sizes.chunk_layers(config["num_hidden_layers"], at.pp)[0]):
        a, b = _layer(factors, layer)
        groups = [heads.chunk(config["num_key_value_heads"]) for heads in b[:3]]
        by_group = torch.cat([part for group in zip(*groups, strict=True) for part in group])
        gate, up = (part.chunk(sizes.tp)[at.tp] for part in b[4:6])
        own = {
            "self_attention.linear_qkv": (torch.cat(a[:3]), by_group.chunk(sizes.tp)[at.tp]),
            "self_attention.linear_proj": (a[3].chunk(sizes.tp, 1)[at.tp], b[3]),
            "mlp.linear_fc1": (torch.cat(a[4:6]), torch.cat([gate, up])),
            "mlp.linear_fc2": (a[6].chunk(sizes.tp, 1)[at.tp], b[6]),
        }
        held |= _named(f"decoder.layers.{local}.", ".adapter", own)
    return held


def vllm_factors(factors, config, tp, rank):
    """Returns what rank `rank` of an engine receives of it; with tp above their number key and value heads are
    replicated."""
    held, replicas = {}, max(tp // config["num_key_value_heads"], 1)
    for layer in range(config["num_hidden_layers"]):
        a, b = _layer(factors, layer)
        heads = [b[0].chunk(tp)[rank], *(part.chunk(tp // replicas)[rank // replicas] for part in b[1:3])]
        own = {
            "self_attn.qkv_proj": (torch.cat(a[:3]), torch.cat(heads)),
            "self_attn.o_proj": (a[3].chunk(tp, 1)[rank], b[3]),
            "mlp.gate_up_proj": (torch.cat(a[4:6]), torch.cat([part.chunk(tp)[rank] for part in b[4:6]])),
            "mlp.down_proj": (a[6].chunk(tp, 1)[rank], b[6]),
        }
        held |= _named(f"model.layers.{layer}.", "", own)
    return held


def _layer(factors, layer):
    """The factors A of a layer in the order of DENSE, and the factors B."""
    parts = [f"model.layers.{layer}.{'self_attn' if n < 4 else 'mlp'}.{name}" for n, name in enumerate(DENSE)]
    return ([factors[f"{part}.{factor}.weight"] for part in parts] for factor in FACTORS)


def _named(prefix, suffix, own):
    return {
        f"{prefix}{linear}{suffix}.{factor}": tensor.contiguous()
        for linear, pair in own.items()
        for factor, tensor in zip(FACTORS, pair, strict=True)
    }

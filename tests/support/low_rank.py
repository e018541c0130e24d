"""Low-rank adapters on a Hugging Face model in plain PyTorch, by the formula that PEFT implements."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.support.tiny_models import load_oracle

FACTORS = ("lora_A", "lora_B")


def linear_layers(model: torch.nn.Module, targets: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """Returns the layers with an adapter: all but the output layer for `all-linear`, in a model with experts those of
    attention alone."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    if tuple(targets) == ("all-linear",):
        inner = () if hasattr(model.config, "num_experts_per_tok") else ("mlp",)
        return {
            name: each
            for name, each in layers.items()
            if name.split(".")[-2:-1] in ([part] for part in ("self_attn", *inner))
        }
    return {name: each for name, each in layers.items() if name.rpartition(".")[2] in targets}


def adapted_oracle(folder: Path, rank: int, scale: float, targets: Sequence[str]) -> torch.nn.Module:
    """Returns the model of a folder with adapters of random values, which alone are trained."""
    model = load_oracle(folder).requires_grad_(False)
    for name, layer in linear_layers(model, targets).items():
        shapes = (rank, layer.in_features), (layer.out_features, rank)
        for factor, shape in zip(FACTORS, shapes, strict=True):
            layer.register_parameter(factor, torch.nn.Parameter(value(f"{name}.{factor}.weight", shape)))
        layer.register_forward_hook(
            lambda own, inputs, output: output + (inputs[0] @ own.lora_A.T @ own.lora_B.T) * scale
        )
    return model


def value(name: str, shape: Sequence[int]) -> Tensor:
    """Returns a random factor, the same wherever it is asked for by this name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator) * 0.1


def factors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the factors among parameters, or their gradients, by PEFT's names without its prefix."""
    return {f"{name}.weight": each for name, each in tensors.items() if name.endswith(FACTORS)}

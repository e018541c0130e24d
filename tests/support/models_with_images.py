"""Random models that take images, as Qwen3.5 is published: a language model of reshard_oracle.py and the other part."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.reshard_oracle import MODELS, SIZES

VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 16}


def make_with_images(name: str, seed: int = 0, **sizes) -> torch.nn.Module:
    """Returns transformers' model of the class for images whose language model is the one of `name`."""
    import transformers

    family, own = MODELS[name]
    text = {**SIZES, **own, **sizes}
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}  # of the four pairs that are rotated of 32
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, **sections}
    make = getattr(transformers, f"{family}ForConditionalGeneration")
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    torch.manual_seed(seed)
    tied = text["tie_word_embeddings"]
    model = make(make.config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_with_images(name: str, folder: Path, seed: int = 0, **sizes) -> dict[str, torch.Tensor]:
    """Has transformers write such a model; returns the tensors of the file."""
    make_with_images(name, seed, **sizes).save_pretrained(folder)
    return load_file(folder / "model.safetensors")

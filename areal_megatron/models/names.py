"""Names of tensors in published folders of models with images, and with all experts of a layer in one tensor. Tables
have the language model's alone, an expert at a time."""

from __future__ import annotations

import re

TOWER = "model.visual."
"""How the names of tensors begin that take images in."""
_LANGUAGE = "model.language_model."
"""How the language model's names begin in a model that has such tensors, but for its output layer."""
_STACKED = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(?:(gate|up)|(down))_proj\.weight$")


def own(name: str) -> str:
    """Returns the name in the language model alone of a tensor of any published folder."""
    return "model." + name.removeprefix(_LANGUAGE) if name.startswith(_LANGUAGE) else name


def published(name: str) -> str:
    """Undoes `own`, for models that take images."""
    return _LANGUAGE + name.removeprefix("model.") if name.startswith("model.") else name


def parts(name: str) -> tuple[str, ...]:
    """Returns the projections that a tensor [experts, …] holds of all experts of a layer, each expert's one after
    another in its rows; () of any other tensor."""
    stacked = _STACKED.search(name)
    return {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}[stacked[1]] if stacked else ()


def part(name: str, expert: int, projection: str) -> str:
    """Returns the name of one expert's part of such a tensor."""
    return f"{name.rpartition('.')[0]}.{expert}.{projection}_proj.weight"


def stacked(name: str) -> str:
    """Returns the name of the tensor that would hold an expert's among all; "" of a tensor of no expert."""
    found = _EXPERT.search(name)
    kind = "down_proj" if found and found[2] else "gate_up_proj"
    return f"{name[: found.start()]}.mlp.experts.{kind}" if found else ""

"""Which part of a layer trainers compute otherwise than transformers; runs on one trainer rank (check_family.py)."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal_megatron.models.architecture import architecture
from areal_megatron.trainer.trainer import Trainer
from tests.support.plain_results import rows_and_batch
from tests.support.ranks.trainer_checks import make_config, open_trainer
from tests.support.tiny_models import load_oracle

CLOSE = 1e-4
"""Largest difference that float32 explains, over the largest number of what is compared."""
LINEAR = "linear_attn"
"""Transformers' module in layers that have linear attention in place of `self_attn`."""
PARTS = {
    "the norm before attention": ("self_attn", "self_attention", "input", "input_layernorm"),
    "attention": ("self_attn", "self_attention", "output", "self_attn"),
    "the norm before the MLP": ("mlp", "mlp", "input", "post_attention_layernorm"),
    "the MLP": ("mlp", "mlp", "output", "mlp"),
}
"""Part of a layer → (transformers' module, Megatron's, which side of it is what the part computes, how the names of the
part's tensors begin)."""


class Differs(RuntimeError):
    """Trainers compute something else; the message is one line."""


def check(folder: Path, rank: int, model: str) -> None:
    """Raises Differs for the first part of the model `folder`/`model` whose numbers are not those of transformers."""
    with open_trainer(folder, rank, make_config(folder, model, {"recompute": "none"})) as subject:
        ours, theirs = _ours(subject), _theirs(folder / model)
        for part, expected in theirs.items():
            found, largest = ours[part], float(expected.abs().max())
            error = float((found - expected).abs().max()) / largest
            if not error <= CLOSE:
                raise Differs(
                    f"{part} differs by {error:.1e} of the largest number"
                    + (", and all before it agrees" if part != next(iter(theirs)) else "")
                    + _rows(subject, part)
                )


def _ours(subject: Trainer) -> dict[str, Tensor]:
    _, tokens = rows_and_batch()
    [chunk] = subject.policy.chunks
    with torch.no_grad(), ExitStack() as stack:
        seen = _watched(stack, chunk.module.decoder.layers, lambda names: names[1], batch_first=False)
        hidden = chunk(tokens, None, None)
    weight = subject.ppo._objective._policy.output_weight
    size = subject.hf_config["vocab_size"]
    return seen | {"the output layer": (hidden @ weight.T)[..., :size].transpose(0, 1)}


def _theirs(model: Path) -> dict[str, Tensor]:
    _, tokens = rows_and_batch()
    reference = load_oracle(model)
    with torch.no_grad(), ExitStack() as stack:
        seen = _watched(stack, reference.model.layers, lambda names: names[0], batch_first=True)
        logits = reference(tokens).logits
    return seen | {"the output layer": logits}


def _watched(
    stack: ExitStack, layers: nn.ModuleList, name: Callable[[tuple[str, ...]], str], batch_first: bool
) -> dict[str, Tensor]:
    """Returns what will be filled with the numbers of each part, [batch, tokens, hidden], in the order of the model."""
    seen: dict[str, Tensor] = {}
    for number, layer in enumerate(layers):
        for part, names in PARTS.items():
            keep = partial(_keep, seen, f"layer {number}: {part}", names[2], batch_first)
            module = getattr(layer, name(names), None) or getattr(layer, LINEAR)
            stack.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
    return seen


def _keep(
    seen: dict[str, Tensor], part: str, side: str, batch_first: bool, module: Any, args: Any, kwargs: Any, output: Any
) -> None:
    value = (args[0] if args else kwargs["hidden_states"]) if side == "input" else output
    value = (value[0] if isinstance(value, tuple) else value).detach().float()
    seen[part] = value.clone() if batch_first else value.transpose(0, 1).clone()


def _rows(subject: Trainer, part: str) -> str:
    """Returns which rows of the table the part is made of."""
    *_, prefix = PARTS.get(part.rpartition(": ")[2], ("",))
    model, number = architecture(subject.hf_config), re.search(r"\d+", part)
    if prefix == "self_attn" and int(number[0]) in model.dimensions.linear:
        prefix = LINEAR
    rows = [
        f"{row.megatron} ← {', '.join(row.tensors)}"
        for row in model.layer
        if any(name.startswith(prefix) for name in row.tensors)
    ]
    return f"; its rows: {'; '.join(rows)}" if prefix else ""

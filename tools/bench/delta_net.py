"""The layers of a Qwen3.5 model beside each other in the trainer: one with a gated delta net, one with attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.trainer import Trainer
from tools.bench.common import cell, spread

SIZES = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "tie_word_embeddings": True,
    "vocab_size": 512,
}
"""Qwen3.5-9B with an eighth of its widths and half of its heads' width in attention."""
TOKENS = 2048
"""Tokens of a row."""
SEQUENCES = (1, 8, 64)
"""Sequences of a row, which are of the same length."""
KINDS = ("gated delta net", "attention")
ALONE = ", without MLP"


def compare(
    config: Config,
    folder: Path,
    row: Callable[[int, int], BatchPart],
    timed: Callable[[Callable[[], object], torch.device], float],
    repetitions: int,
) -> Iterator[dict[str, Any]]:
    """Yields what `table` shows for each number of SEQUENCES: the tokens/s of either layer, forwards and backwards,
    whole and without its MLP, and how many times as many those with a gated delta net are.

    `row`: makes the batch of a number of answers of a number of tokens; `timed`: returns the seconds of a call.
    """
    run = RunFolder(folder)
    run.create()
    with Trainer(config, run, 0) as trainer:
        layers = dict(zip(KINDS, trainer.policy.chunks[0].module.decoder.layers, strict=True))
        modules = layers | {name + ALONE: layer.self_attention for name, layer in layers.items()}
        weights = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
        for count in SEQUENCES:
            inputs = _inputs(trainer, row(count, TOKENS // count), modules)
            found = {name: [] for name in modules}
            for repetition in range(repetitions + 1):
                for name, module in modules.items():
                    took = timed(partial(_pass, module, *inputs[name]), trainer.device)
                    if repetition:  # the first one warms up
                        found[name].append(took)
            pairs = {part: zip(*(found[kind + part] for kind in KINDS), strict=True) for part in ("", ALONE)}
            yield {
                "sequences": count,
                "weights": weights,
                "tokens_per_s": {name: spread(TOKENS / took for took in own) for name, own in found.items()},
                "ratio": {part: spread(theirs / ours for ours, theirs in own) for part, own in pairs.items()},
            }


def _inputs(trainer: Trainer, part: BatchPart, modules: dict[str, torch.nn.Module]) -> dict[str, tuple]:
    """Returns what the modules get in an update on one row, and a gradient of what they give."""
    seen: dict[str, tuple] = {}

    def keep(name: str, _: torch.nn.Module, arguments: tuple, named: dict[str, Any], out: Any) -> None:
        seen[name] = (arguments, named, torch.randn_like(out[0]))

    hooks = [module.register_forward_hook(partial(keep, name), with_kwargs=True) for name, module in modules.items()]
    trainer.train_batch(part)
    for hook in hooks:
        hook.remove()
    return seen


def _pass(module: torch.nn.Module, arguments: tuple, named: dict[str, Any], gradient: torch.Tensor) -> None:
    """A forward and a backward pass."""

    def own(value: Any) -> Any:
        wants = torch.is_tensor(value) and value.requires_grad
        return value.detach().requires_grad_() if wants else value

    out = module(*map(own, arguments), **{name: own(value) for name, value in named.items()})[0]
    out.backward(gradient)


def table(row: dict[str, Any]) -> str:
    """Returns what a person reads about one row."""
    lines = [f"{row['sequences']} × {TOKENS // row['sequences']:,} tokens{'':<14}tokens/s (lowest – highest)   weights"]
    lines += [
        f"{name:<30}{cell(figure, 0, 10)}   {row['weights'][name] / 1e6:.2f}M"
        for name, figure in row["tokens_per_s"].items()
    ]
    lines += [f"{f'{KINDS[0]} / {KINDS[1]}{part}':<44}{cell(figure)}" for part, figure in row["ratio"].items()]
    return "\n".join(lines)

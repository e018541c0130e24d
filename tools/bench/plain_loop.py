"""The training loop that a user would write with transformers and torch alone, for tools/bench/trainer.py.

It trains the same batch with the same micro-batches, loss and optimizer as the trainer on one device, and does nothing
more: no metrics, no ledger, no second process. Where there are several ways to do something it takes the fast one: SDPA
or the kernel for sequences of varying length, fused AdamW, logits of trained tokens alone, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart, Trajectory

CHUNK = 2**27
"""Logits at a time."""
PER_SEQUENCE, VARYING = "per_sequence", "varying"


@dataclass
class Row:
    """A micro-batch as the model takes it, and the tokens to train. N: the trained tokens."""

    inputs: dict[str, Tensor | None]
    places: Tensor
    """int64 [N]: the token before each trained one, counted over the flattened tokens."""
    labels: Tensor
    behaviour: Tensor
    advantages: Tensor
    proximal: Tensor | None = None


Collate = Callable[[Sequence[Trajectory], torch.device], tuple[dict[str, Tensor | None], np.ndarray]]
"""Makes the model's inputs, and the place of each sequence's first token among the flattened ones."""


def padded(trajectories: Sequence[Trajectory], device: torch.device):
    """[sequences, longest]; without a mask where all are as long."""
    lengths = np.array([t.length for t in trajectories])
    tokens = np.zeros((len(lengths), lengths.max()), np.int64)
    for row, t in zip(tokens, trajectories, strict=True):
        row[: t.length] = _tokens(t)
    mask = np.arange(lengths.max()) < lengths[:, None]
    inputs = {"input_ids": tokens, "attention_mask": None if mask.all() else mask.astype(np.int64)}
    return _on(inputs, device), np.arange(len(lengths)) * lengths.max()


def packed(trajectories: Sequence[Trajectory], device: torch.device):
    """One row of all sequences; transformers finds their borders in the positions."""
    lengths = [t.length for t in trajectories]
    inputs = {
        "input_ids": np.concatenate([_tokens(t) for t in trajectories])[None],
        "position_ids": np.concatenate([np.arange(n) for n in lengths])[None],
    }
    return _on(inputs, device), np.cumsum([0, *lengths[:-1]])


def _tokens(t: Trajectory) -> np.ndarray:
    return np.concatenate((t.prompt, t.response)).astype(np.int64)


def _on(arrays: dict[str, np.ndarray | None], device: torch.device) -> dict[str, Tensor | None]:
    return {name: None if array is None else torch.from_numpy(array).to(device) for name, array in arrays.items()}


LENGTHS: tuple[int, ...] = ()
"""The lengths of the row that is computed: transformers passes no such thing to an attention function of one's own."""


def _per_sequence(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal attention of neighbours of the same length in one call."""
    runs = [(length, len(list(same))) for length, same in groupby(LENGTHS)]
    outs, start = [], 0
    for length, count in runs:
        part = (x[0, :, start : start + length * count].unflatten(1, (count, length)) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in part), is_causal=True, scale=scaling, enable_gqa=True
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
        start += length * count
    return torch.cat(outs)[None], None


def _varying(module, query, key, value, attention_mask, scaling=None, **_):
    from torch.nn.attention import varlen

    ends = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)
    longest = max(LENGTHS)
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    grouped = {"enable_gqa": True} if query.size(1) != key.size(1) else {}
    out = varlen.varlen_attn(*rows, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **grouped)
    return out[None], None


for _name, _attend in ((PER_SEQUENCE, _per_sequence), (VARYING, _varying)):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, lambda *_, **__: None)

WAYS: dict[str, tuple[Collate, str]] = {
    "padded": (padded, "sdpa"),
    "packed, block mask": (packed, "sdpa"),
    "packed, call a length": (packed, PER_SEQUENCE),
    "packed, varying lengths": (packed, VARYING),
}
"""How micro-batches become inputs, and which attention computes them."""


def ways(config: Config, device: torch.device) -> list[str]:
    """Returns the ways that the device has kernels for."""
    varying = device.type == "cuda" and config.model.dtype != "float32"
    return [way for way in WAYS if varying or WAYS[way][1] != VARYING]


class PlainLoop:
    """A Hugging Face model with AdamW on float32 parameters."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device, settings = config, device, config.optimizer
        self.model = AutoModelForCausalLM.from_pretrained(
            Path(config.model.path), dtype=getattr(torch, config.model.dtype), local_files_only=True
        ).to(device)
        self.model.train()
        self._own = list(self.model.parameters())
        same = config.model.dtype == "float32"
        self._main = self._own if same else [p.detach().float().requires_grad_() for p in self._own]
        groups = [
            {"params": [p for p in self._main if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in self._main if p.dim() == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, settings.lr, (settings.beta1, settings.beta2), settings.eps, fused=True
        )
        if config.trainer.recompute != "none":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def train_batch(self, part: BatchPart, way: str) -> list[float]:
        """Makes one PPO update with the decoupled objective; returns the gradient norms."""
        collate, attention = WAYS[way]
        rewards = np.array([t.reward for t in part.trajectories])
        counts = np.array([t.loss_mask.sum() for t in part.trajectories])
        above = rewards - np.average(rewards, weights=counts)
        advantages = above / (np.average(above**2, weights=counts) ** 0.5 + 1e-5)
        self.model.set_attn_implementation(attention)
        minibatches = [
            [self._row(part, members, advantages, collate) for members in minibatch] for minibatch in part.members
        ]
        with torch.no_grad():  # those of the first mini-batch are the current ones
            for lengths, row in (pair for minibatch in minibatches[1:] for pair in minibatch):
                row.proximal = self._logprobs(lengths, row)
        return [self._step(minibatch) for minibatch in minibatches]

    def _row(self, part: BatchPart, members: list[int], advantages: np.ndarray, collate: Collate):
        members = sorted(members, key=lambda i: part.trajectories[i].length)
        chosen = [part.trajectories[i] for i in members]
        inputs, starts = collate(chosen, self.device)
        trained = [np.flatnonzero(t.loss_mask) for t in chosen]
        own = [advantages[i] for i in members]
        arrays = (
            np.concatenate([s + len(t.prompt) - 1 + k for s, t, k in zip(starts, chosen, trained, strict=True)]),
            np.concatenate([t.response[k].astype(np.int64) for t, k in zip(chosen, trained, strict=True)]),
            np.concatenate([t.logprobs[k] for t, k in zip(chosen, trained, strict=True)]),
            np.concatenate([np.full(len(k), a, np.float32) for k, a in zip(trained, own, strict=True)]),
        )
        return tuple(t.length for t in chosen), Row(inputs, *(torch.from_numpy(a).to(self.device) for a in arrays))

    def _logprobs(self, lengths: tuple[int, ...], row: Row) -> Tensor:
        global LENGTHS
        LENGTHS = lengths
        hidden = self.model.model(**row.inputs, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, row.places)
        size = max(1, CHUNK // self.model.config.vocab_size)
        parts = zip(hidden.split(size), row.labels.split(size), strict=True)
        if len(row.labels) <= size or not torch.is_grad_enabled():
            return torch.cat([self._chunk(*part) for part in parts])
        return torch.cat([checkpoint(self._chunk, *part, use_reentrant=False) for part in parts])

    def _chunk(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden).float() / self.config.rollout.temperature
        return F.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]

    def _step(self, minibatch: list[tuple[tuple[int, ...], Row]]) -> float:
        settings, total = self.config.ppo, sum(len(row.labels) for _, row in minibatch)
        for lengths, row in minibatch:
            current = self._logprobs(lengths, row)
            proximal = current.detach() if row.proximal is None else row.proximal
            ratio = (current - proximal).exp()
            weight = (proximal - row.behaviour).exp().clamp(max=settings.correction.truncate)
            clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            gain = torch.minimum(ratio * row.advantages, clipped * row.advantages)
            (-(weight * gain).sum() / total).backward()
        if self._main is not self._own:
            for main, own in zip(self._main, self._own, strict=True):
                main.grad, own.grad = own.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._main, self.config.optimizer.clip_grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._main is not self._own:
            torch._foreach_copy_([p.data for p in self._own], [p.data for p in self._main])
        return float(norm)

"""The gated delta rule token by token, in the dtype of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what each token of a sequence reads, [T, heads, dv], and the state after the last one (Gated Delta
    Networks, arXiv 2412.06464, Equation 10), from [T, heads, dk] twice, [T, heads, dv], [T, heads] twice."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state, found = value.new_zeros(*key.shape[1:], value.size(-1)), []
    for q, k, v, g, beta in zip(query * key.size(-1) ** -0.5, key, value, decay, strength, strict=True):
        state = state * g.exp()[:, None, None]
        written = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * written[:, None]
        found.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(found), state


def compute_exactly() -> None:
    """Makes transformers' models compute the rule in float64 where there will be gradients. In float32, as transformers
    computes it whatever the dtype of the model, those of the decays lose most of their digits."""
    for modeling in (modeling_qwen3_next, modeling_qwen3_5):
        by_transformers = modeling.torch_chunk_gated_delta_rule
        if not isinstance(by_transformers, partial):
            modeling.torch_chunk_gated_delta_rule = partial(_rule, by_transformers)


def _rule(by_transformers: Callable, query: Tensor, key: Tensor, value: Tensor, **options):
    if not torch.is_grad_enabled():
        return by_transformers(query, key, value, **options)
    inputs = (query, key, value, options["g"], options["beta"])
    rows = zip(*(x.double() for x in inputs), strict=True)
    out, state = map(torch.stack, zip(*(gated_delta_rule(*row) for row in rows), strict=True))
    return out.to(value.dtype), state.to(value.dtype)

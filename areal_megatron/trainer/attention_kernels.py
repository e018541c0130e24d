"""Which kernel computes attention over packed sequences on a GPU: FlashAttention 2, which is part of torch, 3 or 4.

The last two come in packages of their own, and torch calls them prototypes: a newer package may return what this torch
does not expect. So a kernel is tried on a small row, forwards and backwards, before it is used. TransformerEngine's
attention is not among them: it gives the same kernels, or cuDNN's of the same speed, through a module that would have
to stand in for trainer/attention.py, and takes no runs of queries with a longer past.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from areal_megatron.config import ConfigError
from areal_megatron.process.errors import first_line
from areal_megatron.trainer.attention import attend_runs

FASTEST = {9: ("fa3", "fa4", "fa2"), 10: ("fa4", "fa2")}
"""Major compute capability → kernels, the fastest first; elsewhere there is only fa2."""
RUNS = ((70, 70), (1, 33), (5, 300), (129, 130), (1, 1))
"""Queries and keys of each run of the row that a kernel is tried on."""
TOLERANCE = 0.03
"""The largest error of a kernel, relative to the norm of what is right; rounding to bfloat16 alone costs 0.004."""


def candidates(setting: str, major: int, absent: dict[str, str]) -> list[str]:
    """Returns the kernels to try, in order, for trainer.attention on GPUs of that compute capability.

    `absent` says of each kernel why it cannot be used, "" if it can. Raises ConfigError if the setting names one that
    cannot.
    """
    if setting == "auto":
        return [name for name in FASTEST.get(major, ("fa2",)) if not absent[name]]
    if absent[setting]:
        raise ConfigError(f"trainer.attention: {setting} cannot be used: {absent[setting]}; trainer.attention=auto can")
    return [setting]


def activate(
    setting: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], absent: dict[str, str]
) -> str:
    """Makes this process compute attention with the best kernel that works, or with the one that `setting` names.

    `shape` is heads, groups and head size of a rank. Returns one line that says which it is, and why others are not.
    Raises ConfigError if the setting names one that does not work.
    """
    if device.type != "cuda" or dtype == torch.float32:
        if setting != "auto":
            raise ConfigError(f"trainer.attention: {setting} cannot be used: {absent[setting]}")
        return "attention of torch in padded blocks"
    major, failed = torch.cuda.get_device_capability(device)[0], []
    for name in candidates(setting, major, absent):
        try:
            _activate(name)
            error = largest_error(device, dtype, *shape)
            problem = "" if error < TOLERANCE else f"its results are off by {error:.0%}"
        except Exception as e:  # other people's compilers and kernels
            problem = f"{type(e).__name__}: {first_line(e)}"
        if not problem:
            return "; ".join([f"attention of {name}", *failed])
        failed.append(f"not of {name}: {problem}")
        _activate("fa2")
    raise ConfigError(f"trainer.attention: no kernel works here: {'; '.join(failed)}")


def _activate(name: str) -> None:
    from torch.nn import attention

    if name != "fa2":
        attention.activate_flash_attention_impl(name.upper())
    elif getattr(attention, "current_flash_attention_impl", lambda: None)():
        attention.restore_flash_attention_impl()


def largest_error(device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int) -> float:
    """Returns how far torch's attention for packed sequences is off the plain formula: the largest of the norms of the
    errors of the result and of its gradients, each relative to the norm of what is right."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, count: int) -> Tensor:
        return torch.randn(rows, count, size, generator=generator).to(device, dtype)

    queries, keys = (sum(column) for column in zip(*RUNS, strict=True))
    inputs = [drawn(queries, heads), drawn(keys, groups), drawn(keys, groups)]
    scale, gradient = 0.7 / math.sqrt(size), drawn(queries, heads)
    ends, key_ends = (
        torch.tensor((0, *column), dtype=torch.int32).cumsum(0).int().to(device) for column in zip(*RUNS, strict=True)
    )
    longest, most_keys = (max(column) for column in zip(*RUNS, strict=True))

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_runs(query, key, value, ends, key_ends, longest, most_keys, scale)

    def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return plain(query, key, value, RUNS, scale)

    found, right = _with_gradients(kernel, inputs, gradient), _with_gradients(formula, inputs, gradient.float())
    errors = [float((f.float() - r).norm() / r.norm()) for f, r in zip(found, right, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _with_gradients(attend, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().to(gradient.dtype).requires_grad_() for x in inputs]
    out = attend(*leaves)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def plain(query: Tensor, key: Tensor, value: Tensor, runs: Sequence[tuple[int, int]], scale: float) -> Tensor:
    """[queries, heads, d], [keys, groups, d] twice → [queries, heads, d]: the formula, run by run. The last query of a
    run attends to all of its keys, each query before it to one less."""
    repeats, outs = query.size(1) // key.size(1), []
    counts, key_counts = zip(*runs, strict=True)
    for q, k, v in zip(query.split(counts), key.split(key_counts), value.split(key_counts), strict=True):
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        reached = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~reached, -math.inf).softmax(-1), v))
    return torch.cat(outs)

"""Which kernel of attention is taken, and that one that is wrong is found out."""

from __future__ import annotations

import math
from functools import wraps

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention
from torch.nn.attention import varlen

from areal_megatron.config import ConfigError
from areal_megatron.trainer import attention_kernels, hardware
from areal_megatron.trainer.attention_kernels import RUNS, activate, candidates, largest_error, plain

ALL = {"fa2": "", "fa3": "", "fa4": ""}
CPU, HALF = torch.device("cpu"), torch.bfloat16
SHAPE = (4, 2, 16)


def without(*names):
    return ALL | dict.fromkeys(names, "its package is missing")


@pytest.mark.parametrize(
    ("major", "absent", "expected"),
    [
        (9, ALL, ["fa3", "fa4", "fa2"]),
        (9, without("fa3"), ["fa4", "fa2"]),
        (9, without("fa3", "fa4"), ["fa2"]),
        (10, ALL, ["fa4", "fa2"]),
        (8, ALL, ["fa2"]),
        (12, ALL, ["fa2"]),
    ],
)
def test_auto_takes_the_fastest_that_is_there(major, absent, expected):
    assert candidates("auto", major, absent) == expected


def test_a_kernel_that_is_named_is_taken_or_refused():
    assert candidates("fa2", 9, ALL) == ["fa2"]
    with pytest.raises(ConfigError, match=r"trainer\.attention: fa4 cannot be used: its package is missing; trainer"):
        candidates("fa4", 9, without("fa4"))


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_there_is_none_to_choose_on_a_cpu(dtype):
    absent = hardware.kernels(CPU, "bfloat16")
    assert activate("auto", CPU, dtype, SHAPE, absent) == "attention of torch in padded blocks"
    with pytest.raises(ConfigError, match=r"trainer\.attention: fa3 cannot be used: there is no GPU"):
        activate("fa3", CPU, dtype, SHAPE, absent)


def by_mask(query, key, value, starts, key_starts, *_, scale, window_size, enable_gqa=False):
    """Has the signature of torch's varlen_attn, and computes it with a mask over the whole row."""
    assert window_size == (-1, 0)
    own, other = (torch.arange(len(ends) - 1).repeat_interleave(ends.diff()) for ends in (starts, key_starts))
    from_end = torch.cat([torch.arange(n).flip(0) for n in starts.diff().tolist()])
    key_from_end = torch.cat([torch.arange(n).flip(0) for n in key_starts.diff().tolist()])
    mask = (own[:, None] == other) & (key_from_end >= from_end[:, None])
    parts = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)


def test_the_formula_is_that_of_another_path():
    torch.manual_seed(0)
    counts, key_counts = (torch.tensor((0, *column)).cumsum(0) for column in zip(*RUNS, strict=True))
    query, key, value = (
        torch.randn(int(ends[-1]), heads, 8, dtype=torch.float64)
        for ends, heads in ((counts, 4), (key_counts, 2), (key_counts, 2))
    )
    expected = by_mask(query, key, value, counts, key_counts, scale=0.3, window_size=(-1, 0), enable_gqa=True)
    torch.testing.assert_close(plain(query, key, value, RUNS, 0.3), expected)


@wraps(by_mask)
def upper_left(query, key, value, starts, key_starts, *rest, **options):
    """Aligned wrongly: the first query attends to the first key of its run alone."""
    runs = zip(key_starts[:-1].tolist(), starts.diff().tolist(), strict=True)
    kept = torch.cat([torch.arange(first, first + count) for first, count in runs])
    return by_mask(query, key[kept], value[kept], starts, starts, *rest, **options)


@wraps(by_mask)
def broken_backward(*arguments, **options):
    out = by_mask(*arguments, **options)
    return out.detach() + (out - out.detach()) * 1.5


@wraps(by_mask)
def too_many_results(*_, **__):
    raise ValueError("too many values to unpack (expected 2)")


@pytest.mark.parametrize(("kernel", "right"), [(by_mask, True), (upper_left, False), (broken_backward, False)])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_a_kernel_is_tried_forwards_and_backwards(monkeypatch, kernel, right, heads):
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    error = largest_error(CPU, HALF, *heads, 16)
    assert (error < attention_kernels.TOLERANCE) == right
    assert right or error > 0.1


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [(upper_left, "its results are off by"), (too_many_results, "ValueError: too many values to unpack")],
)
def test_a_kernel_that_does_not_work_is_replaced_and_said(monkeypatch, kernel, problem):
    """As with flash-attn-4 from 4.0.0b20 on and torch 2.13."""
    active = ["fa2"]

    def use(name):
        active.append(name)
        monkeypatch.setattr(varlen, "varlen_attn", by_mask if name == "fa2" else kernel)

    gpu = torch.device("cuda")
    monkeypatch.setattr(attention_kernels, "_activate", use)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    plain_error = largest_error
    monkeypatch.setattr(attention_kernels, "largest_error", lambda _, *rest: plain_error(CPU, *rest))
    line = activate("auto", gpu, HALF, SHAPE, without("fa3"))
    assert line.startswith("attention of fa2; not of fa4: ") and problem in line and "\n" not in line
    assert active[-1] == "fa2"
    with pytest.raises(ConfigError, match=r"trainer\.attention: no kernel works here: not of fa4: "):
        activate("fa4", gpu, HALF, SHAPE, ALL)
    assert active[-1] == "fa2"


def test_torch_has_the_calls_that_activate_a_kernel():
    assert {"FA3", "FA4"} <= set(attention.list_flash_attention_impls())
    assert attention.current_flash_attention_impl() is None
    attention_kernels._activate("fa2")
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        attention_kernels._activate("fa3")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 2, 64), (4, 4, 128), (7, 1, 128)])
@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_kernels_are_the_formula_on_cuda(name, shape, dtype):
    device = torch.device("cuda")
    if absent := hardware.kernels(device, "bfloat16")[name]:
        pytest.skip(absent)
    attention_kernels._activate(name)
    try:
        error = largest_error(device, dtype, *shape)
    finally:
        attention_kernels._activate("fa2")
    assert error < attention_kernels.TOLERANCE and math.isfinite(error)

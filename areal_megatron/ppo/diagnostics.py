"""Sums over trained tokens that tell how the weights w = π_prox/π_behav, the clipping and the entropy are distributed.

All tensors are as in loss.py: [N], one element for each trained token of a micro-batch. Sums of micro-batches add up.
Some figures are given by group of tokens: by staleness, since it is the stalest tokens that stray, and by the sign of
the advantage, since nothing bounds a ratio from above where that is negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from areal_megatron.ppo.correction import sequence_products
from areal_megatron.ppo.loss import Bounds, Tokens, effective_share, log_ratios

STALENESS = {"0": 0, "1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16, "17+": torch.inf}
"""Name → largest staleness, in versions, of each group of tokens."""
GROUPS = (*(f"staleness_{name}" for name in STALENESS), "advantage_above_0", "advantage_below_0")
STATISTICS = ("count", "weight", "weight_squared", "log_weight", "advantage", "advantage_squared", "clipped")
"""What is summed over the tokens of each group."""
NEGLIGIBLE = 1e-6
"""The advantage of an answer at the mean of its group differs from 0 by rounding."""

GROUP_SUMS = tuple(f"{statistic}/{group}" for statistic, group in product(STATISTICS, GROUPS))
SUMS = (
    *("clip_share_high", "clip_share_low", "zero_advantage_share", "log_weight_mean"),
    *("right_tokens", "wrong_tokens", "entropy_right", "entropy_wrong"),
    *("answers", "answer_weight", "answer_weight_squared"),
)
MAXIMA = ("weight_max", *(f"weight_max/{group}" for group in GROUPS))


def sums(
    tokens: Tokens, entropy: Tensor, right: Tensor, staleness: Tensor, bounds: Bounds
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Returns SUMS and GROUP_SUMS, MAXIMA, and the `weight` of each token, float32. Nothing waits for the device.

    right: bool [N], whether the token's answer is right; staleness: float32 [N], in versions.
    """
    drift, lag = log_ratios(tokens, bounds)
    ratio, weight, advantages = drift.exp(), lag.exp(), tokens.advantages
    up, down = advantages > NEGLIGIBLE, advantages < -NEGLIGIBLE
    high, low = up & (ratio > 1 + bounds.high), down & (ratio < 1 - bounds.low)
    members = torch.stack([*_by_staleness(staleness), up, down])
    found = {
        "count": torch.ones_like(weight),
        "weight": weight,
        "weight_squared": weight.square(),
        "log_weight": lag,
        "advantage": advantages,
        "advantage_squared": advantages.double().square(),
        "clipped": (high | low).to(weight.dtype),
    }
    grouped = torch.stack([_over_groups(members, found[statistic]) for statistic in STATISTICS])
    largest = weight.expand_as(members).masked_fill(~members, 0)
    products, there = sequence_products(tokens.proximal.double() - tokens.behaviour, tokens.sequences)
    products = products.masked_fill(~there, 0)
    largest = largest.amax(1) if len(weight) else largest.new_zeros(len(GROUPS))
    return (
        {
            "clip_share_high": high.sum(),
            "clip_share_low": low.sum(),
            "zero_advantage_share": (~(up | down)).sum(),
            "log_weight_mean": lag.sum(),
            "right_tokens": right.sum(),
            "wrong_tokens": (~right).sum(),
            "entropy_right": entropy.masked_fill(~right, 0).sum(),
            "entropy_wrong": entropy.masked_fill(right, 0).sum(),
            "answers": there.sum(),
            "answer_weight": products.sum(),
            "answer_weight_squared": products.square().sum(),
            **dict(zip(GROUP_SUMS, grouped.flatten().unbind(), strict=True)),
        },
        dict(zip(MAXIMA, (largest.amax(), *largest.unbind()), strict=True)),
        {"weight": weight.float()},
    )


def metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a batch from the totals of `tokens`, `left_out` (those without an advantage that were not
    computed), `weight`, SUMS, GROUP_SUMS and MAXIMA.

    Metrics of a group, or of right or wrong answers, are left out if there are no such tokens.
    """
    tokens = max(totals["tokens"], 1)
    found = {name: totals[name] / tokens for name in SUMS[:4]}
    found |= {"weight_mean": totals["weight"] / tokens, "weight_max": totals["weight_max"]}
    without = totals["zero_advantage_share"] + totals["left_out"]
    found["zero_advantage_share"] = without / max(totals["tokens"] + totals["left_out"], 1)
    answers, weight, squared = (totals[name] for name in ("answers", "answer_weight", "answer_weight_squared"))
    if answers:
        found["effective_share_answers"] = effective_share(weight, squared, answers)
    for answers in ("right", "wrong"):
        if count := totals[f"{answers}_tokens"]:
            found[f"entropy_{answers}"] = totals[f"entropy_{answers}"] / count
    for group in GROUPS:
        count, weight, squared, log_weight, advantage, advantage_squared, clipped = (
            totals[f"{statistic}/{group}"] for statistic in STATISTICS
        )
        if not count:
            continue
        mean = advantage / count
        found |= {
            f"token_share/{group}": count / tokens,
            f"weight_mean/{group}": weight / count,
            f"weight_max/{group}": totals[f"weight_max/{group}"],
            f"log_weight_mean/{group}": log_weight / count,
            f"effective_share/{group}": effective_share(weight, squared, count),
            f"advantage_mean/{group}": mean,
            f"advantage_std/{group}": max(advantage_squared / count - mean**2, 0.0) ** 0.5,
            f"clip_share/{group}": clipped / count,
        }
    return found


def _by_staleness(staleness: Tensor) -> list[Tensor]:
    """Returns which tokens are in each group of STALENESS, bool [N] each."""
    below, members = -1.0, []
    for largest in STALENESS.values():
        members.append((staleness > below) & (staleness <= largest))
        below = largest
    return members


def _over_groups(members: Tensor, values: Tensor) -> Tensor:
    """Returns the sums over each group, float64 [groups]: deviations are small differences of them.

    A value that is not finite spoils its own groups only.
    """
    return values.double().expand_as(members).masked_fill(~members, 0).sum(1)

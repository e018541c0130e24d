"""Warnings of a run: its answers teach nothing, its steps are too long for how stale they are, or its activations leave
the range of float16. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from statistics import mean
from typing import Any

from areal_megatron.config import Config, OptimizerConfig
from areal_megatron.config.algorithms import LEAST_FACTOR

WARNED_OVER = 10
"""Updates whose means decide: single updates are far off while a run learns fastest, and do no harm."""
IDLE_OVER = 3
"""Updates without a single advantage after which a run is told that it learns nothing."""
LEAST_EFFECTIVE_SHARE = 0.9
LARGEST_RESIDUAL = 65504 / 2
"""Half of float16's range: a later update may double it."""
LARGEST_KL = 0.2
"""A larger KL divergence from the samples, as a share of the entropy, came before falls (docs/staleness.md)."""


def warning(config: Config, updates: Sequence[dict[str, Any]]) -> str:
    """Returns a line about the last updates, at most WARNED_OVER; "" if nothing is wrong with them, or they are too few
    to say."""
    if idle := _idle(config, updates[-IDLE_OVER:]):
        return idle
    last, o = updates[-WARNED_OVER:], config.optimizer
    if len(last) < WARNED_OVER:
        return ""
    residual = _mean(last, "residual_max")
    if residual is not None and residual > LARGEST_RESIDUAL:
        return (
            f"residual_max was {residual:,.0f} over {WARNED_OVER} updates, and float16 ends at 65,504: set "
            "model.dtype=bfloat16 before activations overflow"
        )
    lower = f"lower optimizer.lr={o.lr:g}, then rollout.max_staleness={config.rollout.max_staleness}"
    if o.staleness_kl and all((step.get("lr_factor") or 1.0) <= LEAST_FACTOR for step in last):
        return (
            f"in {WARNED_OVER} updates even {LEAST_FACTOR:g} of the rate left more than "
            f"optimizer.staleness_kl={o.staleness_kl:g} of the entropy between the policy and its samples: {lower}; "
            "where mismatch_p99 is large, engines and trainers differ without any step (docs/metrics.md)"
        )
    divergence, entropy, share = (_mean(last, key) for key in ("kl_staleness", "entropy", "effective_share"))
    if divergence is not None and entropy and divergence > LARGEST_KL * entropy:
        limit = "" if o.staleness_kl else f"set optimizer.staleness_kl={OptimizerConfig.staleness_kl:g}, or "
        return (
            f"kl_staleness was {divergence / entropy:.2f} of the entropy over {WARNED_OVER} updates, above "
            f"{LARGEST_KL:g}: steps are too long for answers this stale; {limit}{lower}, see docs/staleness.md"
        )
    if share is not None and share < LEAST_EFFECTIVE_SHARE:
        return (
            f"effective_share was {share:.2f} over {WARNED_OVER} updates, below {LEAST_EFFECTIVE_SHARE:g}: "
            f"steps are too long for answers this stale; {lower}, see docs/staleness.md"
        )
    return ""


def _idle(config: Config, updates: Sequence[dict[str, Any]]) -> str:
    if len(updates) < IDLE_OVER or _mean(updates, "zero_advantage_share") != 1:
        return ""
    read = f"areal trajectories {quote(str(config.run_dir))}" if config.rollout.dump else "rollout.dump=true keeps them"
    right = _mean(updates, "accuracy")
    shown = "" if right is None else f", {right:.0%} of them right"
    return (
        f"in {IDLE_OVER} updates all answers to a prompt had the same reward{shown}, so nothing was learned: read some "
        f"({read}), see what the reward gives to right ones (areal rows), and take prompts with both right and wrong "
        "answers (docs/troubleshooting.md)"
    )


def _mean(updates: Sequence[dict[str, Any]], key: str) -> float | None:
    """The mean of a metric that all of the updates have."""
    values = [step[key] for step in updates if step.get(key) is not None]
    return mean(values) if len(values) == len(updates) else None

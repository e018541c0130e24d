"""Which settings of PPO contradict each other. Imports no torch: a login node checks a config too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_megatron.config import Config

OF_CRITIC = ("ppo", "ppo_sequence")
"""Algorithms whose baseline may be a critic: that of the others is the group."""
Require = Callable[[bool, str, str], None]
"""(whether it holds, key, problem): raises ConfigError if it does not."""


def check(config: Config, require: Require) -> None:
    ppo = config.ppo
    low, high = ppo.clip
    require(0 < low <= 1 and high > 0, "ppo.clip", f"must be a number up to 1 and one above 0, is {ppo.clip}")
    for name in ("icepop", "sequence_mask"):
        bound = ppo.correction.get(name, math.inf)
        require(bound > 1, "ppo.correction", f"{name}, the b of [1/b, b], must be above 1, is {bound}")
    masks = [name for name in ppo.correction if name != "truncated"]
    require(
        ppo.objective != "naive" or not masks,
        "ppo.correction",
        f"{', '.join(masks)} would change nothing: with ppo.objective=naive every weight is 1",
    )
    require(
        ppo.objective != "loglinear" or "m2po" not in masks,
        "ppo.correction",
        "m2po has to know the proximal policy before the loss: it needs ppo.objective=decoupled",
    )
    if ppo.critic:
        _check_critic(config, require)


def _check_critic(config: Config, require: Require) -> None:
    algorithm, critic = config.ppo.algorithm, config.ppo.critic
    require(config.mode != "sft", "ppo.critic", "supervised runs have no critic")
    require("lr" in critic, "ppo.critic", "needs lr, the critic's learning rate: {lr: 1e-5}")
    require(
        algorithm in OF_CRITIC,
        "ppo.critic",
        f"ppo.algorithm={algorithm} has the other answers of the group as its "
        f"baseline; with a critic set it to {' or '.join(OF_CRITIC)}",
    )
    for name in ("gamma", "lambda"):
        require(critic.get(name, 1) <= 1, "ppo.critic", f"{name} must be at most 1, is {critic.get(name)}")
    warmup = critic.get("warmup", 0)
    require(warmup == int(warmup), "ppo.critic", f"warmup, a number of updates, must be whole, is {warmup}")
    require(
        warmup < config.updates, "ppo.critic", f"warmup={warmup:g} leaves the policy none of updates={config.updates}"
    )

"""The algorithms that `ppo.algorithm` names: an advantage, a loss, and a way to average the losses of tokens.

To add one, write a function in advantage.py or loss.py, a line here, and one in config/algorithms.py with the
numbers that it is published with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_megatron.ppo import advantage, loss
from areal_megatron.ppo.advantage import Reduce, Rewards
from areal_megatron.ppo.loss import Bounds, Tokens


@dataclass(frozen=True)
class Algorithm:
    advantages: Callable[[Rewards, Reduce], Tensor]
    loss: Callable[[Tokens, Bounds], Tensor]
    mean: str
    """`tokens`: the mean over trained tokens; `episodes`: over episodes of the mean over each one's tokens;
    `longest`: over episodes of the sum over each one's tokens, divided by rollout.max_new_tokens."""
    whole: bool = False
    """Whether a sequence has one ratio and one weight, see loss.Bounds."""
    critic: Callable[[Tensor], Tensor] | None = None
    """Trained tokens of an episode → weight of each of them in the mean and deviation of a critic's advantages. None if
    the baseline is the rest of the group, which leaves no place for a critic."""


ALGORITHMS = {
    "ppo": Algorithm(advantage.batch_tokens, loss.clipped, "tokens", critic=torch.ones_like),
    "ppo_sequence": Algorithm(advantage.batch_sequences, loss.clipped, "tokens", critic=torch.reciprocal),
    "boba_grpo": Algorithm(advantage.group_normalised_then_batch, loss.clipped, "tokens"),
    "grpo": Algorithm(advantage.group, loss.clipped, "episodes"),
    "dr_grpo": Algorithm(advantage.group_mean, loss.clipped, "longest"),
    "dapo": Algorithm(advantage.group, loss.clipped, "tokens"),
    "rloo": Algorithm(advantage.leave_one_out, loss.clipped, "tokens"),
    "reinforce++": Algorithm(advantage.group_then_batch, loss.clipped, "tokens"),
    "gspo": Algorithm(advantage.group, loss.clipped, "episodes", whole=True),
    "cispo": Algorithm(advantage.group, loss.weighted, "tokens"),
    "sapo": Algorithm(advantage.group, loss.gated, "episodes"),
}
FINE_TUNING = "sft"
"""A loss beside these that a program may ask for (mode=driven): the mean negative log-probability of the tokens."""


def token_weights(mean: str, lengths: Tensor, tokens: float, episodes: float, longest: int) -> Tensor:
    """Returns the weight of a token of each sequence in the mean over the mini-batch's tokens, float32 [n].

    It does not depend on how an episode is divided into sequences. mean: an `Algorithm.mean`; lengths [n]: the trained
    tokens of the whole episode of each sequence; tokens, episodes: the mini-batch's on all replicas, an episode
    with a part of its trained tokens there counting as that part; longest: rollout.max_new_tokens.
    """
    if mean == "tokens":
        return torch.ones(len(lengths))
    per = {"episodes": lengths.clamp(min=1), "longest": torch.tensor(longest)}[mean]
    return (tokens / (episodes or 1) / per).float().expand(len(lengths))

"""Penalties that are added to the policy loss; `ppo.penalty` names them, each with a coefficient.

A penalty is added for every trained token, even one that a correction masks, and averaged as the policy loss is; only
`kl_k1` is part of the advantage instead. To add a penalty, write a function, a line in PENALTIES and its name in
config/fields.py.

Schulman's estimators of KL(π_θ ‖ π_ref) from tokens of π_θ are k1 = log π_θ − log π_ref, k2 = k1² / 2 and
k3 = π_ref/π_θ − 1 + k1. The values of k1 and k3 have the right mean. The gradient has the right mean with k2 as a loss,
and with k1 subtracted from the reward. With k1 as a loss its mean is 0; with k3 it is the gradient of KL(π_ref ‖ π_θ),
which is equal only near the reference (Liu et al., arXiv 2510.01555).

Tokens are of π_behav, not of π_θ. Times ρ = π_θ/π_behav the means are those over tokens of π_θ: k2 with ρ as a mere
number has the right gradient again, and k3 with a ρ that has a gradient, too, the right value and the right gradient
(DeepSeek-V3.2, arXiv 2512.02556, "Unbiased KL Estimate").

`kl_forward` and `kl_reverse` estimate nothing: they are divergences of two distributions over k + 1 outcomes, the k
tokens that a teacher finds likeliest in a place, and any other token. By the data-processing inequality each is at
most the divergence over the whole vocabulary, and it is 0 only if both give the k tokens the same probabilities: what
the student puts on other tokens costs it, though the teacher names none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal_megatron.ppo.advantage import Reduce
from areal_megatron.ppo.selection import first_beyond

IN_REWARD, COVARIANT = "kl_k1", "kl_cov"
"""The penalty subtracted from the advantages by `penalised`, and the penalty of the tokens chosen by
`most_covariant`."""
_LARGEST = 700.0
"""The exponential of this is a float64."""
_LEAST_REST = 1e-6
"""The other tokens have this probability at least: below it 1 less a sum of float32 numbers says nothing."""


@dataclass(frozen=True)
class PenaltyTokens:
    """What penalties of the trained tokens are computed from: [N] each. `current` and `entropy` have gradients."""

    current: Tensor
    """log π_θ"""
    proximal: Tensor
    """log π_prox"""
    entropy: Tensor
    """The entropy of the distribution that the token was sampled from."""
    behaviour: Tensor | None = None
    """log π_behav; None where ρ is 1 and not π_θ/π_behav."""
    cap: float = math.inf
    """ρ counts as this at most."""
    reference: Tensor | None = None
    """log π_ref; None without a KL penalty."""
    covariant: Tensor | None = None
    """bool: whether `most_covariant` has chosen the token; None without kl_cov."""
    likely: Tensor | None = None
    """log π_θ of the tokens that a teacher finds likeliest, [N, k], with a gradient; None where they are not asked."""
    taught: Tensor | None = None
    """Their log-probabilities by the teacher, [N, k]."""


def entropy_bonus(tokens: PenaltyTokens) -> Tensor:
    """−H(π_θ), so that entropy lowers the loss (arXiv 1602.01783, Section 4)."""
    return -tokens.entropy


def kl_k2(tokens: PenaltyTokens) -> Tensor:
    assert tokens.reference is not None
    k2 = (tokens.current - tokens.reference).square() / 2
    return k2 if tokens.behaviour is None else _ratio(tokens, tokens.behaviour).detach() * k2


def kl_k3(tokens: PenaltyTokens) -> Tensor:
    """The loss term of GRPO (arXiv 2402.03300, Equation 4), times ρ."""
    assert tokens.reference is not None
    drift = tokens.reference - tokens.current
    if tokens.behaviour is None:
        return k3(drift)
    # ρ · π_ref/π_θ has no gradient where ρ is not capped: as a sum of two large ones it would drown that of the rest.
    joint = torch.minimum(tokens.reference.double() - tokens.behaviour, math.log(tokens.cap) + drift)
    return joint.exp() - _ratio(tokens, tokens.behaviour) * (1 + drift)


def kl_cov(tokens: PenaltyTokens) -> Tensor:
    """|log π_θ/π_prox| of the chosen tokens, 0 for the others (KL-Cov, arXiv 2505.22617)."""
    assert tokens.covariant is not None
    return (tokens.current - tokens.proximal).abs() * tokens.covariant


def kl_forward(tokens: PenaltyTokens) -> Tensor:
    """KL(π_teacher ‖ π_θ) of the teacher's likeliest tokens and of all others together."""
    own, taught = _with_teacher(tokens)
    return (taught.exp() * (taught - own)).sum(1)


def kl_reverse(tokens: PenaltyTokens) -> Tensor:
    """KL(π_θ ‖ π_teacher) of the same."""
    own, taught = _with_teacher(tokens)
    return (own.exp() * (own - taught)).sum(1)


def _with_teacher(tokens: PenaltyTokens) -> tuple[Tensor, Tensor]:
    assert tokens.likely is not None and tokens.taught is not None
    return _with_rest(tokens.likely), _with_rest(tokens.taught)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Returns the log-probabilities [N, k] and one of all other tokens together, float64 [N, k + 1]."""
    logprobs = logprobs.double()
    rest = (1 - logprobs.exp().sum(1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([logprobs, rest.log()], 1)


def k3(drift: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(a ‖ b) from each token of a, float64, never negative; drift is log b − log a."""
    drift = drift.double()
    return torch.expm1(drift) - drift


PENALTIES: dict[str, Callable[[PenaltyTokens], Tensor]] = {
    "entropy": entropy_bonus,
    "kl_k2": kl_k2,
    "kl_k3": kl_k3,
    COVARIANT: kl_cov,
    "kl_forward": kl_forward,
    "kl_reverse": kl_reverse,
}
"""Name → penalty of each token, [N]."""


def penalty(tokens: PenaltyTokens, coefficients: Mapping[str, float]) -> Tensor:
    """Returns the sum of the named penalties times their coefficients, float64 [N]."""
    tokens = replace(tokens, current=tokens.current.double())
    total = torch.zeros_like(tokens.current)
    for name, penalise in PENALTIES.items():
        if name in coefficients:
            total = total + coefficients[name] * penalise(tokens)
    return total


def capped_ratio(current: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Returns min(π_θ/π_behav, cap), float64 [N], with a gradient where it is not capped. `cap` may be infinite: what
    multiplies the ratio may be 0, so that it has to stay finite itself."""
    return (current.double() - behaviour).clamp(max=min(math.log(cap), _LARGEST)).exp()


def _ratio(tokens: PenaltyTokens, behaviour: Tensor) -> Tensor:
    return capped_ratio(tokens.current, behaviour, tokens.cap)


def penalised(
    advantages: Tensor, current: Tensor, reference: Tensor | None, coefficients: Mapping[str, float]
) -> Tensor:
    """Returns the advantages [N] minus the coefficient of `kl_k1` times the token's k1, without gradient."""
    if IN_REWARD not in coefficients:
        return advantages
    assert reference is not None
    return advantages - coefficients[IN_REWARD] * (current.detach() - reference)


def most_covariant(advantages: Tensor, logprobs: Tensor, share: float, reduce: Reduce) -> Tensor:
    """Returns which tokens KL-Cov penalises, bool [N] (arXiv 2505.22617).

    They are the `share` of a mini-batch's tokens, rounded up, with the largest (A − mean A) · (log π − mean log π), by
    whose mean entropy falls. Equal ones are chosen together, and none whose product is not above 0. advantages,
    logprobs: of this replica's part of the mini-batch. Collective.
    """
    columns = torch.stack([torch.ones_like(advantages), advantages, logprobs]).double()
    count, *sums = reduce(columns.sum(1).cpu()).tolist()  # replicas add up on their hosts
    advantage, logprob = (total / max(count, 1) for total in sums)
    covariance = ((advantages - advantage) * (logprobs - logprob)).float().nan_to_num(0).clamp(min=0)
    least = first_beyond(covariance, lambda upto, _: upto <= count - share * count, reduce)
    return (covariance >= least) & (covariance > 0)

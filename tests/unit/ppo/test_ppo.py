"""Losses and advantages against the papers' formulas, written in plain Python, one answer at a time."""

import math
import statistics
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch

from areal_megatron.config import CorrectionConfig, PenaltyConfig, PPOConfig, RewardConfig
from areal_megatron.config.algorithms import PUBLISHED
from areal_megatron.ppo import correction, loss, penalty
from areal_megatron.ppo.advantage import EPSILON, Rewards, over_tokens
from areal_megatron.ppo.algorithm import ALGORITHMS, token_weights
from areal_megatron.ppo.critic import at_the_end, gae, value_loss
from areal_megatron.ppo.loss import Bounds, Tokens
from areal_megatron.ppo.penalty import PenaltyTokens
from areal_megatron.ppo.selection import quantile
from areal_megatron.reward.function import LARGEST_SCORE, checked
from areal_megatron.workflows.scoring import Scorer
from tests.support.replicas import on_replicas

LOW, HIGH, CAP = 0.2, 0.3, 1.5
EXTREMES = [0.0, 1.0, -1.0, LARGEST_SCORE, -LARGEST_SCORE, 1e308, -1e308, math.inf, math.nan, 10**400, 0.5]
"""What reward functions may return."""
BOUNDS = Bounds(LOW, HIGH, {"truncate": CAP})
LENGTHS = (1, 17, 30, 12)
CORRECTIONS = {
    "none": {},
    "truncate": {"truncate": CAP},
    "mask above": {"mask_high": 1.45},
    "mask on both sides": {"mask_low": 0.5, "mask_high": 2.2},
    "sequences above": {"sequence_mask_high": 1.5},
    "sequences on both sides": {"sequence_mask_low": 0.65, "sequence_mask_high": 1.45},
    "products above": {"product_mask_high": 50.0},
    "products on both sides": {"product_mask_low": 1e-4, "product_mask_high": 50.0},
    "product": {"product_truncate": 1.3},
    "negative sequences": {"negative_mask": 0.03},
    "all": {
        "product_truncate": 1.9,
        "truncate": 1.2,
        "mask_low": 0.4,
        "mask_high": 1.9,
        "sequence_mask_low": 0.5,
        "sequence_mask_high": 1.7,
        "product_mask_high": 1e6,
        "negative_mask": 0.2,
    },
}
MASKS = ("mask", "sequence_mask", "product_mask")


def tokens(seed: int) -> Tokens:
    """Makes the tokens of four sequences, with ratios and weights on both sides of every bound."""
    random = torch.Generator().manual_seed(seed)
    start, first, second = torch.randn(3, sum(LENGTHS), generator=random, dtype=torch.float64)
    sequences = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    shift = torch.tensor([0.5, -0.4, 0.3, -0.6], dtype=torch.float64)[sequences]
    behaviour = start - 3
    proximal = behaviour + 0.4 * first - shift
    advantages = torch.tensor([1.5, -0.7, 0.9, -2.0], dtype=torch.float64)[sequences]
    current = (proximal + 0.4 * second + shift).requires_grad_()
    return Tokens(current, proximal, behaviour, advantages, sequences, torch.ones_like(sequences, dtype=torch.bool))


def bounded(ratio: float) -> float:
    return max(1 - LOW, min(1 + HIGH, ratio))


def plain_weights(current, proximal, behaviour, advantage, bounds):
    """Returns the corrected weights of the tokens of one sequence."""
    ratios = [math.exp(p - b) for p, b in zip(proximal, behaviour, strict=True)]
    product, found = math.prod(ratios), []
    left = statistics.fmean(b - c for b, c in zip(behaviour, current, strict=True))
    for ratio in ratios:
        weight = min(product, bounds["product_truncate"]) if "product_truncate" in bounds else ratio
        weight = min(weight, bounds.get("truncate", math.inf))
        for name, value in zip(MASKS, (ratio, product ** (1 / len(ratios)), product), strict=True):
            if not bounds.get(f"{name}_low", 0) <= value <= bounds.get(f"{name}_high", math.inf):
                weight = 0.0
        if advantage < 0 and left > bounds.get("negative_mask", math.inf):
            weight = 0.0
        found.append(weight)
    return found


def gain(u, advantage, dual):
    """PPO's clipped gain of a ratio, with the third bound of arXiv 1912.09729 where the advantage is negative."""
    clipped = min(u * advantage, bounded(u) * advantage)
    return max(clipped, dual * advantage) if advantage < 0 else clipped


def plain_clipped(current, proximal, behaviour, advantage, bounds, dual=math.inf):
    """AReaL, Equation 5, with corrections and two bounds."""
    total = 0.0
    weights = plain_weights(current, proximal, behaviour, advantage, bounds)
    for c, p, weight in zip(current, proximal, weights, strict=True):
        total -= weight * gain(math.exp(c - p), advantage, dual)
    return total


def plain_gspo(current, proximal, behaviour, advantage, bounds, dual=math.inf):
    """GSPO, Equations 5 and 7: one ratio a sequence, π(y)^(1/|y|); the sequence counts for each of its tokens."""
    n = len(current)
    s = math.exp((sum(current) - sum(proximal)) / n)
    own = [[statistics.fmean(values)] * n for values in (current, proximal, behaviour)]
    return -sum(weight * gain(s, advantage, dual) for weight in plain_weights(*own, advantage, bounds))


def plain_sapo(current, proximal, behaviour, advantage, bounds):
    """SAPO, arXiv 2511.20347: f(u) = σ(τ(u − 1)) · 4/τ in place of clipping."""
    total, tau = 0.0, 0.8 if advantage > 0 else 1.7
    weights = plain_weights(current, proximal, behaviour, advantage, bounds)
    for c, p, weight in zip(current, proximal, weights, strict=True):
        total -= weight * 4 / tau / (1 + math.exp(-tau * (math.exp(c - p) - 1))) * advantage
    return total


LOSSES = {"tokens": (plain_clipped, False), "sequences": (plain_gspo, True)}


def plain_sum(formula, values: Tokens, current: list[float]) -> float:
    total = 0.0
    for sequence in range(4):
        own = [i for i, s in enumerate(values.sequences.tolist()) if s == sequence]
        columns = [
            [column[i] for i in own] for column in (current, values.proximal.tolist(), values.behaviour.tolist())
        ]
        total += formula(*columns, values.advantages[own[0]].item())
    return total


def assert_loss_and_gradient(total: torch.Tensor, values: Tokens, formula) -> None:
    """The gradient is compared with differences of the formula."""
    current = values.current.tolist()
    assert total.item() == pytest.approx(plain_sum(formula, values, current), abs=1e-9)
    (gradient,) = torch.autograd.grad(total, values.current)
    step = 1e-6
    for i in range(len(current)):
        up, down = ([*current[:i], current[i] + d, *current[i + 1 :]] for d in (step, -step))
        slope = (plain_sum(formula, values, up) - plain_sum(formula, values, down)) / (2 * step)
        assert gradient[i].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("ratios", LOSSES)
@pytest.mark.parametrize("corrections", CORRECTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_a_loss_and_its_gradient_are_those_of_the_paper(ratios, corrections, seed):
    values, bounds = tokens(seed), CORRECTIONS[corrections]
    formula, whole = LOSSES[ratios]
    total = loss.clipped(values, Bounds(LOW, HIGH, bounds, whole)).sum()
    assert_loss_and_gradient(total, values, partial(formula, bounds=bounds))


@pytest.mark.parametrize("ratios", LOSSES)
def test_a_third_bound_holds_where_the_advantage_is_negative(ratios):
    formula, whole = LOSSES[ratios]
    values, bounds = tokens(1), Bounds(LOW, HIGH, {"truncate": CAP}, whole, dual=1.1 if whole else 1.4)
    values = replace(values, advantages=-values.advantages)
    found = loss.clipped(values, bounds)
    assert_loss_and_gradient(found.sum(), values, partial(formula, bounds={"truncate": CAP}, dual=bounds.dual))
    changed = found != loss.clipped(values, replace(bounds, dual=math.inf))
    assert changed.any() and (values.advantages[changed] < 0).all()
    entropy = torch.zeros(60)
    assert loss.metric_sums(values, entropy, bounds)["dual_clip_share"] == changed.sum()
    assert loss.metric_sums(values, entropy, replace(bounds, dual=math.inf))["dual_clip_share"] == 0


def test_sapo_has_a_gate_in_place_of_clipping():
    values, bounds = tokens(0), Bounds(LOW, HIGH, {"truncate": CAP}, gates=(0.8, 1.7))
    total = loss.gated(values, bounds).sum()
    assert_loss_and_gradient(total, values, partial(plain_sapo, bounds={"truncate": CAP}))
    near = replace(values, current=values.proximal.clone().requires_grad_())
    slopes = [torch.autograd.grad(f(near, bounds).sum(), near.current)[0] for f in (loss.gated, loss.clipped)]
    torch.testing.assert_close(*slopes)  # at u = 1 it is the gradient of all others


def test_cispo_has_a_gradient_at_every_token_also_where_the_ratio_is_clipped():
    """MiniMax-M1, Equation 4: the gradient of sg(clip(u)) · A · log π is the factor before the logarithm."""
    values = tokens(0)
    rows = zip(
        *(v.tolist() for v in (values.current, values.proximal, values.behaviour, values.advantages)), strict=True
    )
    factors = [min(math.exp(p - b), CAP) * bounded(math.exp(c - p)) * a for c, p, b, a in rows]
    found = loss.weighted(values, BOUNDS)
    np.testing.assert_allclose(found.tolist(), -np.array(factors) * values.current.detach().numpy(), atol=1e-9)
    (gradient,) = torch.autograd.grad(found.sum(), values.current)
    np.testing.assert_allclose(gradient.tolist(), -np.array(factors), atol=1e-9)


def test_naive_ppo_has_weight_1():
    values = tokens(2)
    naive = replace(values, proximal=values.behaviour)
    ratio = (values.current - values.behaviour).exp()
    expected = -torch.minimum(ratio * values.advantages, ratio.clamp(1 - LOW, 1 + HIGH) * values.advantages)
    torch.testing.assert_close(loss.clipped(naive, BOUNDS), expected)


def test_the_log_linear_proximal_policy_lies_between_the_others_by_version():
    """Version 7 is trained, and one of four steps of its update has been taken."""
    current, behaviour = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -1.0, -3.0]]).double()
    versions = [7, 6, 4]
    expected = [
        b + (7 - v) / (7.25 - v) * (c - b)
        for c, b, v in zip(current.tolist(), behaviour.tolist(), versions, strict=True)
    ]
    staleness = 7 - torch.tensor(versions).double()
    found = loss.log_linear(current, behaviour, staleness, 1 / 4)
    assert found.tolist() == pytest.approx(expected) and found[0] == behaviour[0]
    assert torch.equal(loss.log_linear(current, behaviour, staleness, 0.0), current)


def test_empty_micro_batches_have_losses_of_nothing():
    nothing = torch.zeros(0)
    for algorithm in ALGORITHMS.values():
        values = Tokens(nothing, nothing, nothing, nothing, nothing.long(), nothing.bool())
        bounds = Bounds(LOW, HIGH, CORRECTIONS["all"], algorithm.whole)
        assert algorithm.loss(values, bounds).shape == (0,)


def test_sums_count_what_they_say():
    values, entropy = tokens(3), torch.linspace(0, 1, 60, dtype=torch.float64)
    found = {name: value.item() for name, value in loss.metric_sums(values, entropy, BOUNDS).items()}
    current, proximal, behaviour = (v.detach().numpy() for v in (values.current, values.proximal, values.behaviour))
    advantages = values.advantages.numpy()
    ratio, weight = np.exp(current - proximal), np.exp(proximal - behaviour)
    clipped = ((advantages > 0) & (ratio > 1 + HIGH)) | ((advantages < 0) & (ratio < 1 - LOW))
    assert 0 < found["clip_share"] == clipped.sum() < 60
    assert 0 < found["capped_share"] == (weight > CAP).sum() < 60
    assert found["masked_share"] == 0
    assert found["ratio_mean"] == pytest.approx(ratio.sum())
    for name, drift in (
        ("kl", current - behaviour),
        ("kl_proximal", proximal - behaviour),
        ("kl_step", current - proximal),
    ):
        assert found[name] == pytest.approx((np.exp(drift) - 1 - drift).sum())
    assert found["entropy"] == pytest.approx(30)
    chi_squared = np.mean(weight**2) / np.mean(weight) ** 2 - 1
    share = loss.effective_share(found["weight"], found["weight_squared"], 60)
    assert share == pytest.approx(1 / (1 + chi_squared)) and 0.5 < share < 1
    assert loss.effective_share(0.0, 0.0, 0) == 1


def test_corrections_do_what_they_say_to_the_example():
    """Each of the cases above changes some tokens and not all; products are not geometric means."""
    values = tokens(1)
    plain = loss.clipped(values, Bounds(LOW, HIGH, {})).detach()
    changed = {}
    for name, bounds in CORRECTIONS.items():
        changed[name] = (loss.clipped(values, Bounds(LOW, HIGH, bounds)).detach() != plain).tolist()
    assert all(0 < sum(own) < 60 for name, own in changed.items() if name not in ("none", "product", "all")), changed
    assert not any(changed["none"]) and any(changed["all"]) and any(changed["product"])
    assert changed["products above"] != changed["sequences above"]


def policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy over seven tokens, its log-probabilities, and those of a reference far from it."""
    logits, other = torch.randn(2, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.requires_grad_()
    return logits, logits.log_softmax(0), other.log_softmax(0)


def plain_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


KL_MEANS = [
    ("kl_k1", True, True, "policy to reference"),
    ("kl_k2", True, False, "policy to reference"),
    ("kl_k3", True, True, "policy to reference"),
    ("kl_k2", False, False, "policy to reference"),
    ("kl_k3", False, True, "reference to policy"),
]


def penalties(current, reference, coefficients, **more):
    """Returns the penalties of tokens whose proximal policy is the current one, and whose entropy is 0."""
    given = {"proximal": current.detach(), "entropy": torch.zeros_like(current)} | more
    return penalty.penalty(PenaltyTokens(current=current, reference=reference, **given), coefficients)


@pytest.mark.parametrize(("name", "weighted", "has_mean", "has_gradient"), KL_MEANS)
def test_means_of_kl_penalties_over_all_tokens(name, weighted, has_mean, has_gradient):
    """arXiv 2510.01555: which have the mean of KL(policy ‖ reference), and whose gradient they have on average. Every
    token comes once, weighted with its probability: that is the mean over tokens of the policy that has sampled them,
    which is the one that is trained."""
    logits, current, reference = policies()
    share = current.detach().exp()
    if name == "kl_k1":  # k1 alone is the reward, under a loss with ratio and weight 1
        advantages = penalty.penalised(torch.zeros(7).double(), current, reference, {name: 1.0})
        everything = torch.arange(7)
        values = Tokens(current, current.detach(), current.detach(), advantages, everything, everything >= 0)
        total, mean = (share * loss.clipped(values, BOUNDS)).sum(), -(share * advantages).sum()
    else:
        weighing = {"behaviour": current.detach(), "cap": 5.0} if weighted else {}
        total = mean = (share * penalties(current, reference, {name: 1.0}, **weighing)).sum()
    truth = plain_kl(current, reference)
    assert (abs(mean.item() - truth.item()) < 1e-9) == has_mean
    aim = truth if has_gradient == "policy to reference" else plain_kl(reference, current)
    expected, found = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (aim, total))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-9)
    assert expected.norm() > 0.1


@pytest.mark.parametrize("name", ["kl_forward", "kl_reverse"])
def test_divergences_from_a_teacher_are_those_of_the_whole_vocabulary_or_less(name):
    """With all tokens named they are equal; with some, those of the distributions in which all others are one."""
    logits, current, reference = policies()
    for named in ([*range(7)], [4, 1, 6, 0, 2, 3], [2, 5]):
        others = [token for token in range(7) if token not in named]
        coarse = [
            torch.cat([p[named], p[others].exp().sum().log()[None]]) if others else p for p in (current, reference)
        ]
        truth = plain_kl(*coarse) if name == "kl_reverse" else plain_kl(*reversed(coarse))
        given = {"likely": current[None, named], "taught": reference[None, named]}
        (found,) = penalties(current[:1], None, {name: 1.0}, **given)
        assert found.item() == pytest.approx(truth.item(), rel=1e-6)
        expected, ours = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (truth, found))
        np.testing.assert_allclose(ours.numpy(), expected.numpy(), atol=1e-6)
        assert expected.norm() > 0.05


@pytest.mark.parametrize("name", ["kl_k2", "kl_k3"])
def test_weighted_kl_penalties_are_right_on_tokens_of_an_older_policy(name):
    """DeepSeek-V3.2: with the ratio to the policy that sampled, the mean over its tokens is that over the policy's own.
    Without it neither the value nor the gradient is right."""
    logits, current, reference = policies()
    behaviour = torch.randn(7, generator=torch.Generator().manual_seed(8), dtype=torch.float64).log_softmax(0)
    share, truth = behaviour.exp(), plain_kl(current, reference)
    (expected,) = torch.autograd.grad(truth, logits, retain_graph=True)
    for weighted in (True, False):
        mean = (share * penalties(current, reference, {name: 1.0}, behaviour=behaviour if weighted else None)).sum()
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert (float((found - expected).abs().max()) < 1e-9) == weighted
        assert (abs(mean.item() - truth.item()) < 1e-9) == (weighted and name == "kl_k3")


def test_the_ratio_of_a_penalty_is_capped_and_then_has_no_gradient():
    current = torch.tensor([0.0, 1.0, 2.0, 900.0]).double().requires_grad_()
    ratio = penalty.capped_ratio(current, torch.zeros(4).double(), 5.0)
    assert ratio.tolist() == pytest.approx([1, math.e, 5, 5])
    (gradient,) = torch.autograd.grad(ratio.sum(), current)
    assert gradient.tolist() == pytest.approx([1, math.e, 0, 0])


def test_penalties_are_those_of_their_formulas_and_add_up():
    values = tokens(2)
    current, reference, proximal = values.current, values.behaviour, values.proximal
    entropy = torch.linspace(0, 3, 60, dtype=torch.float64).requires_grad_()
    given = {"proximal": proximal, "entropy": entropy, "covariant": torch.arange(60) % 4 == 0}
    given |= {"behaviour": proximal - 0.1, "cap": 1.2}
    coefficients = {"entropy": 0.5, "kl_k2": 2.0, "kl_k3": 3.0, "kl_cov": 0.7}
    total = penalties(current, reference, coefficients, **given)
    to_current, to_entropy = torch.autograd.grad(total.sum(), (current, entropy))
    columns = (v.tolist() for v in (current, reference, proximal, entropy))
    for i, (c, r, p, h) in enumerate(zip(*columns, strict=True)):
        rho, slope = min(math.exp(c - p + 0.1), 1.2), math.exp(c - p + 0.1) * (c - p + 0.1 < math.log(1.2))
        k3, chosen = math.exp(r - c) - 1 - (r - c), i % 4 == 0
        expected = -0.5 * h + rho * (c - r) ** 2 + 3 * rho * k3 + 0.7 * chosen * abs(c - p)
        assert total[i].item() == pytest.approx(expected, abs=1e-9)
        expected = 2 * rho * (c - r) + 3 * (rho * (1 - math.exp(r - c)) + slope * k3)
        assert to_current[i].item() == pytest.approx(expected + 0.7 * chosen * math.copysign(1, c - p), abs=1e-9)
        assert to_entropy[i] == -0.5
    assert not penalties(current, None, {"kl_k1": 1.0}).any()
    assert torch.equal(penalty.penalised(values.advantages, current, None, {"kl_k2": 1.0}), values.advantages)


@pytest.mark.parametrize(("share", "count"), [(0.05, 20), (0.0501, 21), (1e-6, 1), (1.0, 0)])
def test_kl_cov_chooses_the_tokens_with_the_largest_covariance_of_all_replicas(share, count):
    """KL-Cov, arXiv 2505.22617: the first ones in the order of (A − mean A) · (log π − mean log π)."""
    random = torch.Generator().manual_seed(4)
    advantages, logprobs = torch.randn(2, 400, generator=random, dtype=torch.float64)
    a, p = (values - values.mean() for values in (advantages, logprobs))
    order = (a * p).argsort(descending=True).tolist()
    expected = {i for i in order[: count or 400] if a[i] * p[i] > 0}
    parts = list(zip(advantages.split([150, 0, 249, 1]), logprobs.split([150, 0, 249, 1]), strict=True))
    found = on_replicas(lambda part, reduce: penalty.most_covariant(*part, share, reduce), parts)
    assert {i for i, chosen in enumerate(torch.cat(found).tolist()) if chosen} == expected
    assert len(expected) == count or 100 < len(expected) < 300


@pytest.mark.parametrize("share", [1.0, 0.5, 0.002])
def test_kl_cov_chooses_none_where_all_advantages_are_equal_or_a_number_is_not_one(share):
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    for advantages in (torch.ones(3), torch.zeros(3), torch.tensor([1.0, math.nan, -1.0])):
        assert not penalty.most_covariant(advantages, logprobs, share, lambda own: own).any()
    assert penalty.most_covariant(torch.zeros(0), torch.zeros(0), 1.0, lambda own: own).tolist() == []


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_masked_tokens_are_counted(name, whole):
    values = tokens(1)
    values = replace(values, kept=torch.arange(60) != 40)
    bounds = Bounds(LOW, HIGH, CORRECTIONS[name], whole)
    found = loss.metric_sums(values, values.current.detach(), bounds)["masked_share"]
    masked = 0
    for sequence in range(4):
        own = (values.sequences == sequence).nonzero()[:, 0].tolist()
        columns = [column[own].tolist() for column in (values.current, values.proximal, values.behaviour)]
        if whole:
            columns = [[statistics.fmean(column)] * len(own) for column in columns]
        weights = plain_weights(*columns, values.advantages[own[0]].item(), CORRECTIONS[name])
        masked += sum(weight == 0 or i == 40 for i, weight in zip(own, weights, strict=True))
    assert found == masked
    masks = name == "all" or any(bound.endswith(("_low", "_high", "mask")) for bound in CORRECTIONS[name])
    assert (masked > 1) == masks, "the example masks what it should"


def test_a_weight_that_is_not_a_number_is_not_masked():
    """The step is skipped for it, whatever the corrections."""
    values = tokens(0)
    values.behaviour[20] = math.nan
    assert loss.clipped(values, Bounds(LOW, HIGH, CORRECTIONS["all"])).sum().isnan()
    kept = correction.within_second_moment(values.proximal - values.behaviour, 0.01, lambda tensor: tensor)
    assert kept[20] and not kept.all()


def greedy(moments: list[float], threshold: float) -> list[bool]:
    """M2PO, Algorithm 1: while the mean of what is left is above the threshold, mask the largest."""
    kept = dict(enumerate(moments))
    while kept and statistics.fmean(kept.values()) > threshold:
        del kept[max(kept, key=kept.get)]
    return [i in kept for i in range(len(moments))]


@pytest.mark.parametrize("threshold", [1e-30, 0.004, 0.04, 0.2, 100.0])
def test_the_second_moment_masks_the_largest_until_the_mean_is_within(threshold):
    lag = 0.5 * torch.randn(400, generator=torch.Generator().manual_seed(5)) ** 3
    lag[7] = 0.0
    expected = greedy(lag.square().double().tolist(), threshold)
    parts = list(lag.split([150, 0, 249, 1]))
    found = on_replicas(partial(correction.within_second_moment, threshold=threshold), parts)
    assert torch.cat(found).tolist() == expected
    assert {1e-30: sum(expected) == 1, 100.0: all(expected)}.get(threshold, 1 < sum(expected) < 400)


def test_equal_moments_are_masked_together_and_none_is_none():
    mask = partial(correction.within_second_moment, threshold=0.3, reduce=lambda tensor: tensor)
    assert mask(torch.tensor([0.1, -0.8, 0.8, 0.8, math.inf])).tolist() == [True, False, False, False, False]
    assert mask(torch.zeros(0)).tolist() == []


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 5000])
def test_a_quantile_over_replicas_is_that_of_all_values(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).abs()
    values[: count // 3] = values[0]
    parts = list(values.tensor_split(3))
    for share in (0.5, 0.99, 1.0):
        [found, *others] = on_replicas(lambda part, reduce: quantile(part, share, count, reduce), parts)  # noqa: B023
        assert found == np.quantile(values.numpy(), share, method="inverted_cdf") and set(others) == {found}


GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3]
REWARDS = [5.0, -5, -5, 5, 5, -5, 0, 5, 5, -5, 1, 2]
TRAINED = [3, 9, 1, 4, 4, 0, 7, 2, 5, 6, 1, 8]
"""The sixth is masked: its reward is ignored."""


def of_single_turns(values: torch.Tensor, trained: list[int], groups: list[int]) -> Rewards:
    own = torch.tensor(trained), torch.tensor(groups), max(groups) + 1
    return Rewards(values, *own, torch.arange(len(values)), len(values))


def plain_advantages(name: str) -> list[float]:
    kept = [i for i, count in enumerate(TRAINED) if count]
    mates = {g: [REWARDS[i] for i in kept if GROUPS[i] == g] for g in set(GROUPS)}
    own = [mates[g] for g in GROUPS]

    def over_batch(values, weights):
        repeated = [v for v, w in zip(values, weights, strict=True) for _ in range(w)]
        mean, deviation = statistics.fmean(repeated), statistics.pstdev(repeated)
        return [(v - mean) / (deviation + EPSILON) for v in values]

    above = [r - statistics.fmean(group) for r, group in zip(REWARDS, own, strict=True)]
    by_group = [a / (statistics.pstdev(group) + EPSILON) for a, group in zip(above, own, strict=True)]
    match name:
        case "ppo":
            return over_batch(REWARDS, TRAINED)
        case "ppo_sequence":
            return over_batch(REWARDS, [min(count, 1) for count in TRAINED])
        case "dr_grpo":
            return above
        case "rloo":
            return [r - (sum(group) - r) / (len(group) - 1) for r, group in zip(REWARDS, own, strict=True)]
        case "reinforce++":
            return over_batch(above, TRAINED)
        case "boba_grpo":
            return over_batch(by_group, TRAINED)
    return by_group


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_are_those_of_the_paper_also_where_replicas_share_groups(name):
    expected = plain_advantages(name)
    shares = [[0, 4, 7, 9, 11], [1, 2, 3, 5, 6, 8, 10]]
    columns = [torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(TRAINED), torch.tensor(GROUPS)]
    parts = [Rewards(*(column[s] for column in columns), 4, torch.tensor(s), len(REWARDS)) for s in shares]
    for share, found in zip(shares, on_replicas(ALGORITHMS[name].advantages, parts), strict=True):
        for i, value in zip(share, found.tolist(), strict=True):
            assert not TRAINED[i] or value == pytest.approx(expected[i], abs=1e-9)


def test_advantages_are_described_over_the_tokens_of_all_replicas():
    values = torch.tensor([0.5, -3.0, 2.0, 1.0, 9.0]).double()
    trained = torch.tensor([3, 1, 2, 4, 0])
    every = [value for value, count in zip(values.tolist(), trained.tolist(), strict=True) for _ in range(count)]
    expected = {
        "advantage_mean": statistics.fmean(every),
        "advantage_std": statistics.pstdev(every),
        "advantage_min": -3.0,
        "advantage_max": 2.0,
    }
    shares = [[0, 2], [1], [3], [4]]
    bounds = torch.tensor([2.0, 3.0]).double()
    parts = [(values[share], trained[share]) for share in shares]
    for found in on_replicas(lambda part, reduce: over_tokens(*part, reduce, lambda own: own.maximum(bounds)), parts):
        assert found == pytest.approx(expected)
    assert over_tokens(values[4:], trained[4:], lambda own: own, lambda own: own) == {}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_have_an_advantage_of_exactly_0(name):
    """They are of any value and number, in groups and over replicas, and may differ from group to group where answers
    of a group are compared. The last digits of a float32, and answers without a trained token, change nothing."""
    random = np.random.default_rng(7)
    for trial in range(300):
        count, groups = int(random.integers(1, 70)), int(random.integers(1, 6))
        value = random.choice([0.7, 0.1 + 0.2, 1 / 3, -5.0, 1e-12, random.normal(), 1e6 * random.normal(), 1e12 / 3])
        group = torch.from_numpy(random.integers(0, groups, count))
        values = torch.full((count,), value, dtype=torch.float64)
        if name not in ("ppo", "ppo_sequence"):
            values = values * (1 + group.double() ** 3)
        if trial % 3 == 1:
            values = values.float().double()
        elif trial % 3 == 2:
            values = values * (1 + 1e-7 * torch.from_numpy(random.uniform(-1, 1, count)))
        trained = torch.from_numpy(random.integers(1, 5000, count))
        blank = torch.from_numpy(random.random(count) < 0.1)
        values, trained = values.masked_fill(blank, 9.0), trained.masked_fill(blank, 0)
        cuts = sorted(random.integers(0, count + 1, 2).tolist())
        columns = (values, trained, group, torch.arange(count))
        split = zip(*(column.tensor_split(cuts) for column in columns), strict=True)
        parts = [Rewards(*own, groups, episode, count) for *own, episode in split]
        found = torch.cat(on_replicas(ALGORITHMS[name].advantages, parts))
        assert found.isfinite().all()
        assert not found[~blank].any(), (value, count, groups)


def test_a_reward_that_differs_is_a_signal_however_little():
    """Those of a long answer's length penalty may: what is near 0 is not 0."""
    for name, algorithm in ALGORITHMS.items():
        values = torch.tensor([1.0, 1.0, 1.0, 0.9999], dtype=torch.float64)
        rewards = of_single_turns(values, [3, 4, 5, 6], [0, 0, 0, 0])
        found = algorithm.advantages(rewards, lambda tensor: tensor)
        assert (found[:3] > 0).all() and found[3] < 0, name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_batches_without_tokens_have_finite_advantages(name):
    rewards = of_single_turns(torch.tensor([5.0, 5.0]).double(), [0, 0], [0, 0])
    assert ALGORITHMS[name].advantages(rewards, lambda tensor: tensor).isfinite().all()


def test_weights_make_a_mean_over_tokens_one_over_sequences():
    lengths, losses = torch.tensor([2, 0, 5, 1]), [[1.0, 2.0], [], [3.0, 4, 5, 6, 7], [8.0]]
    for mean, expected in {
        "tokens": 36 / 8,
        "episodes": (1.5 + 5 + 8) / 3,
        "longest": 36 / 3 / 100,
    }.items():
        weights = token_weights(mean, lengths, 8, 3, 100).tolist()
        assert sum(w * sum(own) for w, own in zip(weights, losses, strict=True)) / 8 == pytest.approx(expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_groups_of_equal_rewards_have_no_advantage_where_the_config_says_so(name):
    """That is what packing goes by (packing/partition.py). Another group of the batch has unequal ones."""
    rewards = of_single_turns(
        torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 1.0]).double(), [3, 5, 2, 4, 2, 1], [0, 0, 0, 1, 1, 1]
    )
    found = ALGORITHMS[name].advantages(rewards, lambda tensor: tensor)
    assert found[3:].any() and (not found[:3].any()) == PUBLISHED[name].within_group


def test_the_config_names_every_algorithm_correction_and_penalty():
    (algorithms,) = (f.metadata["choices"] for f in fields(PPOConfig) if f.name == "algorithm")
    assert set(ALGORITHMS) == set(algorithms)
    elsewhere = {correction.SECOND_MOMENT, correction.NEGATIVE}
    assert {*correction.CORRECTIONS, *elsewhere} == {f.name for f in fields(CorrectionConfig)}
    (forms,) = (f.metadata["choices"] for f in fields(PenaltyConfig) if f.name == "kl_form")
    named = {name for form in forms for name in PenaltyConfig(1, 1, form, kl_cov=1).coefficients}
    assert {*penalty.PENALTIES, penalty.IN_REWARD} == named


def reward_of(score: object, config: RewardConfig) -> float:
    """Returns the reward as a run computes it; a failed one scores 0."""
    try:
        score, _ = checked(score)
    except ValueError:
        score = 0.0
    return Scorer(config, None, max_new_tokens=8).reward(score, 4, truncated=False, forced=False).reward


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("wrong_right", [(-5.0, 5.0), (-1e6, 1e6)])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_no_reward_makes_the_advantages_of_a_batch_infinite(algorithm, wrong_right, extreme):
    config = RewardConfig(wrong=wrong_right[0], right=wrong_right[1])
    values = torch.tensor([reward_of(score, config) for score in (0, 1, 0, extreme)], dtype=torch.float64)
    lengths = torch.tensor([3, 5, 2, 4])
    found = ALGORITHMS[algorithm].advantages(of_single_turns(values, lengths.tolist(), [0, 0, 1, 1]), lambda x: x)
    assert found.isfinite().all() and found.float().isfinite().all()
    sequences = torch.repeat_interleave(torch.arange(4), lengths)
    before = torch.zeros(len(sequences), requires_grad=True)
    returns = gae(at_the_end(values, sequences), before.detach(), sequences, 1.0, 1.0).float()
    value_loss(before, before.detach(), returns, 0.2).mean().backward()
    assert returns.isfinite().all() and before.grad.isfinite().all()

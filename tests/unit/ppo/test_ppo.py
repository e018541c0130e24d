"""Losses and advantages against the papers' formulas, written in plain Python, one answer at a time."""

import math
import statistics
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch

from areal_megatron.config import CorrectionConfig, PenaltyConfig, PPOConfig, RewardConfig
from areal_megatron.ppo import correction, loss, penalty
from areal_megatron.ppo.advantage import EPSILON, Rewards, over_tokens
from areal_megatron.ppo.algorithm import ALGORITHMS, token_weights
from areal_megatron.ppo.critic import at_the_end, gae, value_loss
from areal_megatron.ppo.loss import Bounds, Tokens
from areal_megatron.ppo.selection import quantile
from areal_megatron.reward.function import LARGEST_SCORE, checked
from areal_megatron.workflows.scoring import Scorer

LOW, HIGH, CAP = 0.2, 0.3, 1.5
EXTREMES = [0.0, 1.0, -1.0, LARGEST_SCORE, -LARGEST_SCORE, 1e308, -1e308, math.inf, math.nan, 10**400, 0.5]
"""What reward functions may return."""
BOUNDS = Bounds(LOW, HIGH, {"truncate": CAP})
LENGTHS = (1, 17, 30, 12)
CORRECTIONS = {
    "none": {},
    "truncate": {"truncate": CAP},
    "icepop": {"icepop": 1.6},
    "sequence_mask": {"sequence_mask": 1.45},
    "all": {"sequence_mask": 1.7, "icepop": 1.9, "truncate": 1.2},
}


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


def plain_weights(proximal, behaviour, thresholds):
    """Returns the corrected weights of the tokens of one sequence."""
    ratios = [math.exp(p - b) for p, b in zip(proximal, behaviour, strict=True)]
    geometric, found = math.prod(ratios) ** (1 / len(ratios)), []
    for ratio in ratios:
        weight = min(ratio, thresholds.get("truncate", math.inf))
        if (bound := thresholds.get("icepop")) and not 1 / bound <= ratio <= bound:
            weight = 0.0
        if (bound := thresholds.get("sequence_mask")) and not 1 / bound <= geometric <= bound:
            weight = 0.0
        found.append(weight)
    return found


def plain_clipped(current, proximal, behaviour, advantage, thresholds):
    """AReaL, Equation 5, with corrections and two bounds."""
    total = 0.0
    for c, p, weight in zip(current, proximal, plain_weights(proximal, behaviour, thresholds), strict=True):
        u = math.exp(c - p)
        total -= weight * min(u * advantage, bounded(u) * advantage)
    return total


def plain_gspo(current, proximal, behaviour, advantage, thresholds):
    """GSPO, Equations 5 and 7: one ratio a sequence, π(y)^(1/|y|); the sequence counts for each of its tokens."""
    n = len(current)
    s = math.exp((sum(current) - sum(proximal)) / n)
    [weight] = plain_weights([sum(proximal) / n], [sum(behaviour) / n], thresholds)
    return -n * weight * min(s * advantage, bounded(s) * advantage)


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


@pytest.mark.parametrize("ratios", LOSSES)
@pytest.mark.parametrize("corrections", CORRECTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_a_loss_and_its_gradient_are_those_of_the_paper(ratios, corrections, seed):
    values, thresholds = tokens(seed), CORRECTIONS[corrections]
    formula, whole = LOSSES[ratios]
    formula = partial(formula, thresholds=thresholds)
    total = loss.clipped(values, Bounds(LOW, HIGH, thresholds, whole)).sum()
    current = values.current.tolist()
    assert total.item() == pytest.approx(plain_sum(formula, values, current), abs=1e-9)
    (gradient,) = torch.autograd.grad(total, values.current)
    step = 1e-6
    for i in range(len(current)):
        up, down = ([*current[:i], current[i] + d, *current[i + 1 :]] for d in (step, -step))
        slope = (plain_sum(formula, values, up) - plain_sum(formula, values, down)) / (2 * step)
        assert gradient[i].item() == pytest.approx(slope, abs=1e-6)


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


def policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy over seven tokens, its log-probabilities, and those of a reference far from it."""
    logits, other = torch.randn(2, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.requires_grad_()
    return logits, logits.log_softmax(0), other.log_softmax(0)


def plain_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize(
    ("name", "has_mean", "has_gradient"),
    [
        ("kl_k1", True, "policy to reference"),
        ("kl_k2", False, "policy to reference"),
        ("kl_k3", True, "reference to policy"),
    ],
)
def test_means_of_kl_penalties_over_all_tokens(name, has_mean, has_gradient):
    """arXiv 2510.01555: which have the mean of KL(policy ‖ reference), and whose gradient they have on average. Every
    token comes once, weighted with its probability: that is the mean over tokens of the policy."""
    logits, current, reference = policies()
    share = current.detach().exp()
    if name == "kl_k1":  # k1 alone is the reward, under a loss with ratio and weight 1
        advantages = penalty.penalised(torch.zeros(7).double(), current, reference, {name: 1.0})
        everything = torch.arange(7)
        values = Tokens(current, current.detach(), current.detach(), advantages, everything, everything >= 0)
        total, mean = (share * loss.clipped(values, BOUNDS)).sum(), -(share * advantages).sum()
    else:
        total = mean = (share * penalty.penalty(current, torch.zeros(7), reference, {name: 1.0})).sum()
    truth = plain_kl(current, reference)
    assert (abs(mean.item() - truth.item()) < 1e-9) == has_mean
    aim = truth if has_gradient == "policy to reference" else plain_kl(reference, current)
    expected, found = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (aim, total))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-9)
    assert expected.norm() > 0.1


def test_penalties_are_those_of_their_formulas_and_add_up():
    values = tokens(2)
    current, reference = values.current, values.behaviour
    entropy = torch.linspace(0, 3, 60, dtype=torch.float64).requires_grad_()
    total = penalty.penalty(current, entropy, reference, {"entropy": 0.5, "kl_k2": 2.0, "kl_k3": 3.0})
    to_current, to_entropy = torch.autograd.grad(total.sum(), (current, entropy))
    for i, (c, r, h) in enumerate(zip(current.tolist(), reference.tolist(), entropy.tolist(), strict=True)):
        assert total[i].item() == pytest.approx(-0.5 * h + (c - r) ** 2 + 3 * (math.exp(r - c) - 1 - (r - c)), abs=1e-9)
        assert to_current[i].item() == pytest.approx(2 * (c - r) + 3 * (1 - math.exp(r - c)), abs=1e-9)
        assert to_entropy[i] == -0.5
    assert not penalty.penalty(current, entropy, None, {"kl_k1": 1.0}).any()
    assert torch.equal(penalty.penalised(values.advantages, current, None, {"kl_k2": 1.0}), values.advantages)


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
        columns = [column[own].tolist() for column in (values.proximal, values.behaviour)]
        if whole:
            columns = [[statistics.fmean(column)] * len(own) for column in columns]
        weights = plain_weights(*columns, CORRECTIONS[name])
        masked += sum(weight == 0 or i == 40 for i, weight in zip(own, weights, strict=True))
    assert found == masked
    assert (masked > 1) == (name not in ("none", "truncate")), "the example masks what it should"


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
    return by_group


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_are_those_of_the_paper_also_where_replicas_share_groups(name):
    expected = plain_advantages(name)
    shares = [[0, 4, 7, 9, 11], [1, 2, 3, 5, 6, 8, 10]]
    parts = [
        Rewards(torch.tensor(REWARDS, dtype=torch.float64)[s], torch.tensor(TRAINED)[s], torch.tensor(GROUPS)[s], 4)
        for s in shares
    ]
    for share, found in zip(shares, on_replicas(ALGORITHMS[name].advantages, parts), strict=True):
        for i, value in zip(share, found.tolist(), strict=True):
            assert not TRAINED[i] or value == pytest.approx(expected[i], abs=1e-9)


def on_replicas(function, parts):
    """Returns the result of `function` on each replica, with sums over all of them.

    The replicas run again and again, each time with one more sum known, until none of them needs another.
    """
    known: list[torch.Tensor] = []
    while True:
        asked, results = [], []
        for part in parts:
            sums = iter(known)

            def reduce(tensor, sums=sums, asked=asked):
                if (total := next(sums, None)) is None:
                    asked.append(tensor)
                    raise StopIteration
                return total

            try:
                results.append(function(part, reduce=reduce))
            except StopIteration:
                continue
        if not asked:
            return results
        known.append(sum(asked))


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
def test_equal_rewards_and_batches_without_tokens_have_no_advantage(name):
    for trained in ([3, 4], [0, 0]):
        rewards = Rewards(torch.tensor([5.0, 5.0]).double(), torch.tensor(trained), torch.tensor([0, 0]), 1)
        found = ALGORITHMS[name].advantages(rewards, lambda tensor: tensor)
        assert torch.isfinite(found).all()
        assert sum(trained) == 0 or torch.equal(found, torch.zeros(2).double())


def test_weights_make_a_mean_over_tokens_one_over_sequences():
    lengths, losses = torch.tensor([2, 0, 5, 1]), [[1.0, 2.0], [], [3.0, 4, 5, 6, 7], [8.0]]
    for mean, expected in {
        "tokens": 36 / 8,
        "sequences": (1.5 + 5 + 8) / 3,
        "longest": 36 / 3 / 100,
    }.items():
        weights = token_weights(mean, lengths, 8, 3, 100).tolist()
        assert sum(w * sum(own) for w, own in zip(weights, losses, strict=True)) / 8 == pytest.approx(expected)


def test_the_config_names_every_algorithm_correction_and_penalty():
    (algorithms,) = (f.metadata["choices"] for f in fields(PPOConfig) if f.name == "algorithm")
    assert set(ALGORITHMS) == set(algorithms)
    assert {*correction.CORRECTIONS, correction.SECOND_MOMENT} == {f.name for f in fields(CorrectionConfig)}
    (forms,) = (f.metadata["choices"] for f in fields(PenaltyConfig) if f.name == "kl_form")
    named = {name for form in forms for name in PenaltyConfig(entropy=1, kl=1, kl_form=form).coefficients}
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
    found = ALGORITHMS[algorithm].advantages(Rewards(values, lengths, torch.tensor([0, 0, 1, 1]), 2), lambda x: x)
    assert found.isfinite().all() and found.float().isfinite().all()
    sequences = torch.repeat_interleave(torch.arange(4), lengths)
    before = torch.zeros(len(sequences), requires_grad=True)
    returns = gae(at_the_end(values, sequences), before.detach(), sequences, 1.0, 1.0).float()
    value_loss(before, before.detach(), returns, 0.2).mean().backward()
    assert returns.isfinite().all() and before.grad.isfinite().all()

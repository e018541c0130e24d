"""Losses and advantages against the papers' formulas, written out with Python's numbers, one answer at a time."""

import math
import statistics

import numpy as np
import pytest
import torch

from areal_megatron.config import PPO
from areal_megatron.ppo import loss
from areal_megatron.ppo.advantage import EPSILON, Rewards
from areal_megatron.ppo.algorithm import ALGORITHMS, token_weights
from areal_megatron.ppo.loss import Bounds, Tokens

LOW, HIGH, CAP = 0.2, 0.3, 1.5
BOUNDS = Bounds(LOW, HIGH, CAP)
LENGTHS = (1, 17, 30, 12)


def tokens(seed: int) -> Tokens:
    """Of four sequences; ratios and weights lie on both sides of every bound."""
    random = torch.Generator().manual_seed(seed)
    start, first, second = torch.randn(3, sum(LENGTHS), generator=random, dtype=torch.float64)
    sequences = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    shift = torch.tensor([0.5, -0.4, 0.3, -0.6], dtype=torch.float64)[sequences]
    behaviour = start - 3
    proximal = behaviour + 0.4 * first - shift
    advantages = torch.tensor([1.5, -0.7, 0.9, -2.0], dtype=torch.float64)[sequences]
    return Tokens((proximal + 0.4 * second + shift).requires_grad_(), proximal, behaviour, advantages, sequences)


def bounded(ratio: float) -> float:
    return max(1 - LOW, min(1 + HIGH, ratio))


def plain_clipped(current, proximal, behaviour, advantage):
    """AReaL, Equation 5; with cap and two bounds."""
    total = 0.0
    for c, p, b in zip(current, proximal, behaviour, strict=True):
        u = math.exp(c - p)
        total -= min(math.exp(p - b), CAP) * min(u * advantage, bounded(u) * advantage)
    return total


def plain_gspo(current, proximal, behaviour, advantage):
    """GSPO, Equations 5 and 7: one ratio a sequence, π(y)^(1/|y|); the sequence counts for each of its tokens."""
    n = len(current)
    s = math.exp((sum(current) - sum(proximal)) / n)
    weight = min(math.exp((sum(proximal) - sum(behaviour)) / n), CAP)
    return -n * weight * min(s * advantage, bounded(s) * advantage)


LOSSES = {loss.clipped: plain_clipped, loss.clipped_sequences: plain_gspo}


def plain_sum(formula, values: Tokens, current: list[float]) -> float:
    total = 0.0
    for sequence in range(4):
        own = [i for i, s in enumerate(values.sequences.tolist()) if s == sequence]
        columns = [
            [column[i] for i in own] for column in (current, values.proximal.tolist(), values.behaviour.tolist())
        ]
        total += formula(*columns, values.advantages[own[0]].item())
    return total


@pytest.mark.parametrize("found", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_and_its_gradient_are_those_of_the_paper(found, seed):
    values, formula = tokens(seed), LOSSES[found]
    total = found(values, BOUNDS).sum()
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
    naive = Tokens(values.current, values.behaviour, values.behaviour, values.advantages, values.sequences)
    ratio = (values.current - values.behaviour).exp()
    expected = -torch.minimum(ratio * values.advantages, ratio.clamp(1 - LOW, 1 + HIGH) * values.advantages)
    torch.testing.assert_close(loss.clipped(naive, BOUNDS), expected)


def test_empty_micro_batches_have_losses_of_nothing():
    nothing = torch.zeros(0)
    for algorithm in ALGORITHMS.values():
        values = Tokens(nothing, nothing, nothing, nothing, torch.zeros(0, dtype=torch.int64))
        assert algorithm.loss(values, BOUNDS).shape == (0,)


def test_sums_count_what_they_say():
    values, entropy = tokens(3), torch.linspace(0, 1, 60, dtype=torch.float64)
    found = {name: value.item() for name, value in loss.sums(values, entropy, BOUNDS).items()}
    current, proximal, behaviour = (v.detach().numpy() for v in (values.current, values.proximal, values.behaviour))
    advantages = values.advantages.numpy()
    ratio, weight = np.exp(current - proximal), np.exp(proximal - behaviour)
    clipped = ((advantages > 0) & (ratio > 1 + HIGH)) | ((advantages < 0) & (ratio < 1 - LOW))
    assert 0 < found["clip_share"] == clipped.sum() < 60
    assert 0 < found["capped_share"] == (weight > CAP).sum() < 60
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


GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3]
REWARDS = [5.0, -5, -5, 5, 5, -5, 0, 5, 5, -5, 1, 2]
TRAINED = [3, 9, 1, 4, 4, 0, 7, 2, 5, 6, 1, 8]
"""The sixth is masked: its reward counts nowhere."""


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
    parts = [Rewards(torch.tensor(REWARDS, dtype=torch.float64)[s], torch.tensor(TRAINED)[s], torch.tensor(GROUPS)[s], 4)
             for s in shares]  # fmt: skip
    for share, found in zip(shares, on_replicas(ALGORITHMS[name].advantages, parts), strict=True):
        for i, value in zip(share, found.tolist(), strict=True):
            assert not TRAINED[i] or value == pytest.approx(expected[i], abs=1e-9)


def on_replicas(function, parts):
    """What it gives on each replica, all of which reduce in step: again and again with one more sum known."""
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
                results.append(function(part, reduce))
            except StopIteration:
                continue
        if not asked:
            return results
        known.append(sum(asked))


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


def test_the_config_names_every_algorithm():
    assert set(ALGORITHMS) == set(PPO.__dataclass_fields__["algorithm"].metadata["choices"])

"""The PPO objective and its advantages against the paper's formulas written out token by token."""

import math

import numpy as np
import pytest
import torch

from areal_megatron.ppo import advantage, loss

CLIP, CAP = 0.2, 2.0


def tokens(seed: int, count: int = 60) -> list[torch.Tensor]:
    """current, proximal, behaviour, advantages; ratios and weights lie on both sides of every bound."""
    random = torch.Generator().manual_seed(seed)
    start, first, second, advantages = torch.randn(4, count, generator=random, dtype=torch.float64)
    behaviour = start - 3
    proximal = behaviour + 0.4 * first
    return [proximal + 0.4 * second, proximal, behaviour, advantages]


def plain_loss(current: float, proximal: float, behaviour: float, a: float) -> float:
    u = math.exp(current - proximal)
    clipped = max(1 - CLIP, min(1 + CLIP, u))
    return -min(math.exp(proximal - behaviour), CAP) * min(u * a, clipped * a)


def test_decoupled_loss_is_equation_5():
    values = tokens(0)
    found = loss.policy_loss(*values, CLIP, CAP)
    expected = [plain_loss(*row) for row in zip(*(v.tolist() for v in values), strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_only_the_current_policy_has_a_gradient_and_it_is_the_numerical_one():
    values = [v.requires_grad_() for v in tokens(1)]
    found = torch.autograd.grad(loss.policy_loss(*values, CLIP, CAP).sum(), values[0])[0]
    rows = list(zip(*(v.tolist() for v in values), strict=True))
    step = 1e-6
    expected = [(plain_loss(c + step, *rest) - plain_loss(c - step, *rest)) / (2 * step) for c, *rest in rows]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-5)


def test_naive_ppo_has_weight_1():
    current, _, behaviour, advantages = tokens(2)
    ratio = (current - behaviour).exp()
    expected = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    torch.testing.assert_close(loss.policy_loss(current, behaviour, behaviour, advantages, CLIP, CAP), expected)


def test_sums_count_what_they_say():
    values, entropy = tokens(3), torch.linspace(0, 1, 60, dtype=torch.float64)
    found = {name: float(value) for name, value in loss.sums(*values, entropy, CLIP, CAP).items()}
    current, proximal, behaviour, advantages = (v.numpy() for v in values)
    ratio, weight, drift = np.exp(current - proximal), np.exp(proximal - behaviour), current - behaviour
    clipped = ((advantages > 0) & (ratio > 1 + CLIP)) | ((advantages < 0) & (ratio < 1 - CLIP))
    assert 0 < found["clip_share"] == clipped.sum() < 60
    assert 0 < found["capped_share"] == (weight > CAP).sum() < 60
    assert found["ratio_mean"] == pytest.approx(ratio.sum())
    assert found["kl"] == pytest.approx((np.exp(drift) - 1 - drift).sum())
    assert found["entropy"] == pytest.approx(30)


@pytest.mark.parametrize("weighting", ["token", "sequence"])
def test_advantages_are_normalised_over_the_whole_batch(weighting):
    random = np.random.default_rng(4)
    rewards, trained = random.choice([-5.0, 5.0, 1.0], 20), random.integers(0, 30, 20)
    trained[3] = 0  # masked: its reward counts in neither mean
    weights = trained if weighting == "token" else (trained > 0).astype(int)
    repeated = np.repeat(rewards, weights)
    expected = (rewards - repeated.mean()) / (repeated.std() + advantage.EPSILON)
    parts = [slice(0, 7), slice(7, 20)]  # as two replicas hold it
    total = sum(advantage.moments(torch.tensor(rewards[p]), torch.tensor(trained[p]), weighting) for p in parts)
    found = torch.cat([advantage.normalise(torch.tensor(rewards[p]), total) for p in parts])
    torch.testing.assert_close(found.double(), torch.tensor(expected), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("trained", [[3, 4], [0, 0]])
def test_equal_rewards_and_empty_batches_have_no_advantage(trained):
    rewards = torch.tensor([5.0, 5.0])
    moments = advantage.moments(rewards, torch.tensor(trained), "token")
    found = advantage.normalise(rewards, moments)
    assert torch.isfinite(found).all()
    assert sum(trained) == 0 or torch.equal(found, torch.zeros(2))

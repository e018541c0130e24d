"""Advantages and losses with a critic against the papers' formulas, one episode at a time."""

import math
import statistics
import time

import numpy as np
import pytest
import torch

from areal_megatron.config import CRITIC_ALGORITHMS, CriticConfig, PPOConfig
from areal_megatron.ppo.algorithm import ALGORITHMS
from areal_megatron.ppo.critic import at_the_end, explained_variance, gae, value_loss
from tests.support.replicas import on_replicas

LENGTHS = (5, 1, 0, 33, 2, 64, 1, 0)


def plain_gae(rewards, values, gamma, lambda_):
    """arXiv 1506.02438, Equation 16, literally: a sum over all later residuals of Equation 10."""
    ahead = [*values[1:], 0.0][: len(values)]
    residuals = [r + gamma * after - v for r, v, after in zip(rewards, values, ahead, strict=True)]
    return [sum((gamma * lambda_) ** later * d for later, d in enumerate(residuals[t:])) for t in range(len(values))]


def sequences_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.5])
@pytest.mark.parametrize("lambda_", [1.0, 0.95, 0.0])
def test_advantages_of_packed_sequences_are_those_of_the_paper(gamma, lambda_):
    random, sequences = torch.Generator().manual_seed(1), sequences_of(LENGTHS)
    rewards, values = torch.randn(2, len(sequences), generator=random).double()
    values = values.float()
    found = gae(rewards, values, sequences, gamma, lambda_)
    start = 0
    for length in LENGTHS:
        own = slice(start, start + length)
        expected = plain_gae(rewards[own].tolist(), values[own].tolist(), gamma, lambda_)
        np.testing.assert_allclose(found[own].tolist(), expected, atol=1e-12)
        start += length
    assert gae(torch.zeros(0).double(), torch.zeros(0), torch.zeros(0).long(), gamma, lambda_).shape == (0,)


@pytest.mark.parametrize("decay", [1.0, 0.9999, 0.9, 0.0])
def test_32768_tokens_lose_no_digits(decay):
    """Compares with the backward recursion in plain Python and, for γ = λ = 1, with R − V."""
    random = torch.Generator().manual_seed(2)
    values = 100 * torch.randn(32768, generator=random)
    sequences = torch.zeros(32768, dtype=torch.int64)
    rewards = at_the_end(torch.tensor([5.0]).double(), sequences)
    start = time.thread_time()
    found = gae(rewards, values, sequences, decay, 1.0)
    assert time.thread_time() - start < 1  # a loop over tokens in torch would take half a minute
    if decay == 1:
        assert (found - (5.0 - values.double())).abs().max() < 1e-10
    later, after = 0.0, 0.0
    expected = []
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        later = reward + decay * after - value + decay * later
        after = value
        expected.append(later)
    np.testing.assert_allclose(found.tolist(), expected[::-1], atol=1e-9)


def test_what_is_not_a_number_stays_in_its_sequence():
    values, sequences = torch.ones(9), sequences_of((4, 5))
    values[6] = math.nan
    found = gae(torch.ones(9).double(), values, sequences, 1.0, 1.0)
    assert found.isnan().tolist() == [False] * 4 + [True] * 3 + [False] * 2


def test_a_reward_is_that_of_the_last_trained_token():
    found = at_the_end(torch.arange(1.0, 9.0).double(), sequences_of(LENGTHS)).tolist()
    expected = [
        value for number, length in enumerate(LENGTHS, 1) if length for value in [0.0] * (length - 1) + [number]
    ]
    assert found == expected


@pytest.mark.parametrize("clip", [0.2, 1.0, math.inf])
def test_the_value_loss_and_its_gradient(clip):
    before, returns, change = torch.randn(3, 200, generator=torch.Generator().manual_seed(3)).double()
    current = (before + change).requires_grad_()
    found = value_loss(current, before, returns, clip)
    (gradient,) = torch.autograd.grad(found.sum(), current)
    clipped = 0
    for own, slope, v, b, r in zip(*(x.tolist() for x in (found, gradient, current, before, returns)), strict=True):
        near = min(max(v, b - clip), b + clip)
        assert own == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2, abs=1e-12)
        inside = abs(v - b) < clip or (v - r) ** 2 > (near - r) ** 2
        clipped += not inside
        assert slope == pytest.approx(v - r if inside else 0.0, abs=1e-12)
    assert (clipped > 5) == (clip < math.inf)


def test_explained_variance_over_replicas():
    values, returns = torch.randn(2, 50, generator=torch.Generator().manual_seed(4)).double()
    errors = (returns - values).tolist()
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance(returns.tolist())
    assert explained_variance(values, returns, lambda own: own) == pytest.approx(expected)
    parts = list(zip(values.split([20, 0, 30]), returns.split([20, 0, 30]), strict=True))
    assert on_replicas(lambda part, reduce: explained_variance(*part, reduce), parts) == pytest.approx([expected] * 3)
    assert explained_variance(returns, returns, lambda own: own) == 1
    for equal in (2.0, 0.7, 1e6 / 3):
        assert explained_variance(values, torch.full((50,), equal).double(), lambda own: own) is None
    assert explained_variance(values[:0], returns[:0], lambda own: own) is None


def test_the_config_knows_what_a_critic_goes_with():
    assert {name for name, algorithm in ALGORITHMS.items() if algorithm.critic} == set(CRITIC_ALGORITHMS)
    lengths = torch.tensor([4.0, 1.0])
    assert ALGORITHMS["ppo"].critic(lengths).tolist() == [1, 1]
    assert ALGORITHMS["ppo_sequence"].critic(lengths).tolist() == [0.25, 1]
    assert not PPOConfig().has_critic and PPOConfig(critic=CriticConfig(lr=1e-5)).has_critic

"""Advantages and means over episodes of several answers, against the formulas in plain Python."""

import statistics
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from areal_megatron.ppo.advantage import EPSILON, Rewards
from areal_megatron.ppo.algorithm import ALGORITHMS, token_weights
from tests.support.replicas import on_replicas


@dataclass
class Answer:
    group: int
    episode: int
    tokens: int
    value: float


def drawn(random: np.random.Generator, own_returns: bool) -> list[Answer]:
    """Makes groups of episodes of 1 to 7 answers; some answers, and some episodes, have no trained token."""
    answers, episode = [], 0
    for group in range(int(random.integers(1, 5))):
        for _ in range(int(random.integers(1, 6))):
            failed, reward = random.random() < 0.2, random.normal()
            for _ in range(int(random.integers(1, 8))):
                tokens = 0 if failed or random.random() < 0.1 else int(random.integers(1, 50))
                answers.append(Answer(group, episode, tokens, random.normal() if own_returns else reward))
            episode += 1
    return answers


def plain(name: str, answers: list[Answer]) -> list[float]:
    kept = [a for a in answers if a.tokens]

    def over_tokens(values):
        each = [value for value, a in zip(values, answers, strict=True) for _ in range(a.tokens)]
        return [(v - statistics.fmean(each)) / (statistics.pstdev(each) + EPSILON) for v in values]

    def over_episodes(chosen, function):
        """The mean over the episodes of `chosen` of the mean over each one's answers."""
        episodes = [[function(a.value) for a in chosen if a.episode == e] for e in {a.episode for a in chosen}]
        return statistics.fmean(statistics.fmean(own) for own in episodes)

    def normal(a, chosen):
        mean = over_episodes(chosen, lambda v: v)
        return (a.value - mean) / (over_episodes(chosen, lambda v: (v - mean) ** 2) ** 0.5 + EPSILON)

    found = []
    for a in answers:
        mates = [b for b in kept if b.group == a.group]
        others = [b for b in mates if b.episode != a.episode]
        if not a.tokens:
            found.append(0.0)
        elif name == "ppo":
            found.append(a.value)
        elif name == "ppo_sequence":
            found.append(normal(a, kept))
        elif name == "rloo":
            found.append(a.value - over_episodes(others, lambda v: v) if others else 0.0)
        elif name in ("dr_grpo", "reinforce++"):
            found.append(a.value - over_episodes(mates, lambda v: v))
        else:
            found.append(normal(a, mates))
    return over_tokens(found) if name in ("ppo", "reinforce++", "boba_grpo") else found


def advantages(name: str, answers: list[Answer], random: np.random.Generator) -> list[float]:
    """Computes them on three replicas, each with some answers of any episode."""
    share = random.integers(0, 3, len(answers))
    places = [np.flatnonzero(share == replica) for replica in range(3)]
    parts = []
    for own in places:
        columns = [[getattr(answers[i], key) for i in own] for key in ("value", "tokens", "group", "episode")]
        values = torch.tensor(columns[0], dtype=torch.float64)
        tokens, group, episode = (torch.tensor(column, dtype=torch.int64) for column in columns[1:])
        groups, episodes = 1 + max(a.group for a in answers), 1 + max(a.episode for a in answers)
        parts.append(Rewards(values, tokens, group, groups, episode, episodes))
    found = np.zeros(len(answers))
    for own, values in zip(places, on_replicas(ALGORITHMS[name].advantages, parts), strict=True):
        found[own] = values
    return [float(value) if a.tokens else 0.0 for a, value in zip(answers, found, strict=True)]


@pytest.mark.parametrize("own_returns", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_episode_counts_once_however_many_answers_it_has(name, own_returns):
    random = np.random.default_rng(5)
    for _ in range(30):
        answers = drawn(random, own_returns)
        if not any(a.tokens for a in answers):
            continue
        expected = [value if a.tokens else 0.0 for a, value in zip(answers, plain(name, answers), strict=True)]
        assert advantages(name, answers, random) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "ppo_sequence"])
def test_a_talkative_episode_has_no_other_advantage(name):
    """Whether an episode's reward stands at one answer or at seven of its own changes nothing."""
    random = np.random.default_rng(6)
    short = [Answer(0, episode, 10, value) for episode, value in enumerate([1.0, 0.0, 0.0, 1.0, 0.0])]
    long = [Answer(0, a.episode, 10, a.value) for a in short for _ in range(7 if a.episode == 1 else 1)]
    once, often = advantages(name, short, random), advantages(name, long, random)
    assert [often[0], often[1], *often[8:]] == pytest.approx(once)
    assert often[1:8] == pytest.approx([once[1]] * 7)


@pytest.mark.parametrize("mean", ["tokens", "episodes", "longest"])
def test_the_loss_does_not_depend_on_how_an_episode_is_divided(mean):
    """Three episodes of 6, 10 and 4 tokens, the second one whole or in three samples; one of these is in another
    mini-batch, where it counts for its share."""
    losses = np.arange(20.0)
    whole = token_weights(mean, torch.tensor([6, 10, 4]), 20, 3, 100).repeat_interleave(torch.tensor([6, 10, 4]))
    lengths, of_episode = torch.tensor([6, 5, 3, 2, 4]), torch.tensor([6, 10, 10, 10, 4])
    divided = token_weights(mean, of_episode, 20, 3, 100).repeat_interleave(lengths)
    torch.testing.assert_close(divided, whole)

    here, there = ([0, 1, 2, 4], [3])
    total = 0.0
    for chosen in (here, there):
        tokens = int(lengths[chosen].sum())
        episodes = float((lengths[chosen] / of_episode[chosen]).sum())
        weights = token_weights(mean, of_episode[chosen], tokens, episodes, 100).repeat_interleave(lengths[chosen])
        own = np.concatenate([losses[lengths[:i].sum() : lengths[: i + 1].sum()] for i in chosen])
        share = {"tokens": tokens / 20}.get(mean, episodes / 3)
        total += share * float((weights * torch.tensor(own)).sum()) / tokens
    assert total == pytest.approx(float((whole * torch.tensor(losses)).sum()) / 20)

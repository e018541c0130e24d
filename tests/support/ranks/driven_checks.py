"""Checks of what a program asks trainer ranks for (mode=driven), against the formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_megatron.config import Config, LoraConfig, OptimizerConfig, PPOConfig
from areal_megatron.controller.driven import loss_parts
from areal_megatron.protocol import GiveSamples
from areal_megatron.trainer.trainer import Trainer
from tests.support import training_oracle as oracle
from tests.support.comparison import assert_gradient, assert_parameters
from tests.support.plain_results import beside_model, gradients, make_trajectories, once
from tests.support.ranks.trainer_checks import make_config, open_trainer
from tests.support.tiny_models import load_oracle

CLIP = {"objective": "naive", "clip_low": 0.2, "clip_high": 0.3}
LR = 2e-3
CALLS = [("grpo", False, CLIP), ("sft", True, {}), ("grpo", True, CLIP), ("sft", False, {})]
"""Loss, whether weights are given, and settings of each call."""


def asked(number: int, loss: str, weighted: bool, settings: dict, logprobs: list[torch.Tensor]) -> GiveSamples:
    """Random samples, from their log-probabilities; for the clipped loss, about half of whose ratios are beyond the
    clip."""
    samples, random = make_trajectories(7, version=0, seed=number), np.random.default_rng(number)
    for sample, own in zip(samples, logprobs, strict=True):
        sample.logprobs = (own.numpy() + random.normal(0, 0.3, len(own))).astype(np.float32)
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    advantages, weights = ([random.normal(0, 1, n).astype(np.float32) for n in counts] for _ in range(2))
    given = weights if weighted else []
    return GiveSamples(samples=samples, loss=loss, advantages=advantages, weights=given, settings=settings)


def plain(exact: torch.nn.Module, message: GiveSamples) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss, and the log-probabilities of the trained tokens."""
    losses, found = [], []
    tuned = message.loss == "sft"
    for place, sample in enumerate(message.samples):
        trained = sample.loss_mask == 1
        now = oracle.response_logprobs(exact, sample, 1.0 if tuned else 0.7)[trained]
        found.append(now)
        ratio = (now - torch.from_numpy(sample.logprobs[trained]).double()).exp()
        gain = torch.from_numpy(message.advantages[place]).double()
        clipped = ratio.clamp(1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        losses.append(-now if tuned else -torch.minimum(ratio * gain, clipped * gain))
    weights = [torch.from_numpy(own).double() for own in message.weights]
    if not weights:  # the mean over tokens, or over answers of the mean over the tokens of each
        episodes = sum(len(own) > 0 for own in losses)
        tokens = sum(map(len, losses))
        weights = [torch.full_like(own, 1 / tokens if tuned else 1 / episodes / max(len(own), 1)) for own in losses]
    return sum((w * own).sum() for w, own in zip(weights, losses, strict=True)), torch.cat(found)


def compute_plainly(config: Config) -> dict[str, Any]:
    """Returns the log-probabilities of each call's samples, the loss and the log-probabilities of the trained tokens,
    then the gradient of all calls together, and the parameters after a step."""
    exact, results = load_oracle(Path(config.model.path)).double(), {"samples": [], "losses": [], "logprobs": []}
    for number, call in enumerate(CALLS):
        with torch.no_grad():
            samples = [oracle.response_logprobs(exact, t, 0.7) for t in make_trajectories(7, version=0, seed=number)]
        loss, logprobs = plain(exact, asked(number, *call, samples))
        loss.backward()
        for name, value in (("samples", samples), ("losses", float(loss)), ("logprobs", logprobs.detach().float())):
            results[name].append(value)
    gradient = {name: value.clone() for name, value in gradients(exact).items()}
    decayed = [p for p in exact.parameters() if p.ndim > 1]
    others = [p for p in exact.parameters() if p.ndim < 2]
    torch.nn.utils.clip_grad_norm_(exact.parameters(), config.optimizer.clip_grad)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    o = config.optimizer
    torch.optim.AdamW(groups, lr=LR, betas=(o.beta1, o.beta2), eps=o.eps).step()
    return {**results, "gradient": gradient, "parameters": {n: v.float() for n, v in exact.state_dict().items()}}


def check_loop(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Gradients of several calls add up, losses and log-probabilities are those of the formulas, and a step is
    AdamW's; what is only looked at changes nothing. cases: run folder → model, layout."""
    for run, (model, layout) in cases.items():
        config = make_config(folder, model, layout, ppo=PPOConfig(algorithm="grpo"))
        with open_trainer(folder, rank, config, run) as subject:
            expected = once(subject, beside_model(subject, "driven"), partial(compute_plainly, config))
            for number, call in enumerate(CALLS):
                message = asked(number, *call, expected["samples"][number])
                for learns in (False, True):
                    metrics, found = compute(subject, message, learns, more=number > 0)
                    assert metrics["loss"] == pytest.approx(expected["losses"][number], rel=1e-4, abs=1e-5)
                    np.testing.assert_allclose(found, expected["logprobs"][number].numpy(), atol=2e-5, rtol=0)
            assert_gradient(subject, expected["gradient"])
            called = []
            applied, metrics = subject.ppo.step(LR, lambda: called.append(1))  # noqa: B023
            assert applied and called == [1] and metrics["lr"] == LR
            assert_parameters(subject, expected["parameters"], atol=3e-5)


def compute(subject: Trainer, message: GiveSamples, learns: bool, more: bool) -> tuple[dict[str, float], np.ndarray]:
    parts = loss_parts(message, subject.config, 0, seed=5)
    return subject.ppo_with(message.settings).gradient(parts[subject.parallel.replica], learns, more)


def check_turns(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Two adapters that are trained in turns, call by call, each become bit for bit what they become alone: factors,
    main values, moments, and gradients that were left and added to. cases: run folder → model, layout, keys of the
    optimizer, dtype."""
    for run, (model, layout, keys, dtype) in cases.items():
        sections = {"lora": LoraConfig(rank=4, alpha=10.0, adapters=2), "optimizer": OptimizerConfig(**keys)}
        config = make_config(folder, model, layout, ppo=PPOConfig(algorithm="grpo"), dtype=dtype, **sections)
        with open_trainer(folder, rank, config, run) as subject:
            turns, alone = subject.turns, []
            for seed in (1, 2):
                turns.turn_to(0, True, False)
                [*lesson(subject, seed)]
                alone.append(state(subject))
            assert not all(map(torch.equal, *alone))
            turns.turn_to(0, True, True)
            running, left = [lesson(subject, seed) for seed in (1, 2)], [False, False]
            for _ in range(6):
                for adapter in (0, 1):
                    turns.turn_to(adapter, False, left[1 - adapter])
                    left[adapter] = next(running[adapter])
            for adapter in (0, 1):
                turns.turn_to(adapter, False, False)
                assert all(map(torch.equal, state(subject), alone[adapter])), f"{run}: adapter {adapter}"


def lesson(subject: Trainer, seed: int) -> Iterator[bool]:
    """Two steps, each by the sum of two gradients; yields after every call whether there is a gradient."""
    for step in range(2):
        for half in range(2):
            samples = make_trajectories(7, version=0, seed=100 * seed + 10 * step + half)
            advantages = [np.zeros(int(sample.loss_mask.sum()), np.float32) for sample in samples]
            message = GiveSamples(samples=samples, loss="sft", advantages=advantages, weights=[])
            compute(subject, message, learns=True, more=half > 0)
            yield True
        subject.ppo.step(LR * seed, lambda: None)
        yield False


def state(subject: Trainer) -> list[torch.Tensor]:
    learner = subject.policy
    return [each.detach().clone() for each in (*learner.factors().values(), *learner.optimizer.states())]

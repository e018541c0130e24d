"""Checks of micro-batches whose answers share prompts, against Hugging Face models that see each answer alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_megatron.config import Config, OptimizerConfig, PPOConfig
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.packing.partition import split
from areal_megatron.trainer.batch import pack_trajectories
from areal_megatron.trainer.token_sums import TokenSums
from areal_megatron.trainer.trainer import Trainer
from tests.support import training_oracle as oracle
from tests.support.comparison import assert_gradient, whole_gradients
from tests.support.plain_results import beside_model, critic_minibatch, gradients, make_trajectories, minibatch, once
from tests.support.ranks.routing_checks import Routed, with_routes
from tests.support.ranks.trainer_checks import MiniBatch, make_config, open_trainer, set_head
from tests.support.tiny_models import load_oracle

PROMPTS = (40, 1, 13)
"""The tokens of the prompts. One token leaves nothing to share."""


def with_prompts(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Gives the answers of each group the same prompt."""
    random = np.random.default_rng(8)
    prompts = [random.integers(0, 100, n, dtype=np.int32) for n in PROMPTS]
    for t in trajectories:
        t.prompt = prompts[t.prompt_id % len(prompts)]
    return trajectories


def check_prompts(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Gradients are those of the plain formula in float64, and an update has the metrics of one that shares nothing.

    cases: run folder → model, layout, settings of PPO or None.
    """
    for run, (name, layout, ppo) in cases.items():
        settings = {"ppo": PPOConfig(**ppo)} if ppo else {}
        optimizer = OptimizerConfig(lr=0.0)  # an update may be repeated
        config = make_config(folder, name, layout, optimizer=optimizer, **settings)
        content = minibatch(config.ppo.algorithm)
        with_prompts(content[0])
        with open_trainer(folder, rank, config, run) as subject:
            batch = MiniBatch(subject, *content, shares_prompts=True)
            for cap in (100, 400):
                members = [members for replica in batch.microbatches(cap) for members in replica]
                balanced = members if name == "qwen3_balanced" else []
                path = subject.run.folder / (f"plain-{cap}.pt" if balanced else "plain.pt")
                expected = once(subject, path, partial(plain_gradient, folder / name, content, config, balanced))
                batch.forward_backward(cap)
                assert_gradient(subject, expected)
            if subject.critic:  # which an update changes, so that it cannot be repeated
                check_critic(subject)
            else:
                check_metrics(subject)


def plain_gradient(folder: Path, content: tuple, config: Config, balanced: list[list[int]]) -> dict[str, torch.Tensor]:
    """Returns the gradient of a mini-batch, with the loss that balances the load of these micro-batches, if any."""
    exact = load_oracle(folder).double()
    loss = oracle.ppo_loss(exact, *content, config)
    if balanced:
        loss = loss + oracle.balance_loss(exact, content[0], balanced)
    loss.backward()
    return gradients(exact)


def check_metrics(subject: Trainer) -> None:
    trajectories, found = with_prompts(make_trajectories(12, 0, seed=4, group=4)), []
    for shares in (False, True):
        parts = split(
            trajectories,
            version=0,
            replicas=subject.config.trainer.dp,
            minibatches=subject.config.ppo.minibatches,
            cap=128,
            seed=0,
            share_prompts=shares,
        )
        bundles = [bundle for part in parts for microbatches in part.minibatches for m in microbatches for bundle in m]
        assert (max(map(len, bundles)) > 1) == shares
        metrics = subject.train_batch(parts[subject.parallel.replica]).metrics
        others = ("_s", "_per_s", "kl_staleness", "lr_factor")  # times, and what earlier updates have a part in
        found.append({name: value for name, value in metrics.items() if not name.endswith(others)})
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def check_critic(subject: Trainer) -> None:
    """The critic's gradient does not depend on who shares a prompt."""
    trajectories, before, returns = critic_minibatch()
    with_prompts(trajectories)
    set_head(subject)
    learner, found = subject.critic.learner, []
    for shares in (False, True):
        minibatch, work = MiniBatch(subject, trajectories, [], [], [], shares), []
        for members in minibatch.microbatches(400)[subject.parallel.replica]:
            bundles = minibatch.bundles(members)
            members = [i for bundle in bundles for i in bundle]
            ones, sizes = [1.0] * len(members), [len(bundle) for bundle in bundles]
            batch = pack_trajectories(
                [trajectories[i] for i in members], ones, ones, 0, "recompute", subject._part, None, sizes
            )
            batch.values, batch.returns = (
                torch.cat([torch.zeros(0), *(own[i] for i in members)]) for own in (before, returns)
            )
            work.append((batch.microbatch, partial(subject.critic._loss, sampled=batch, sums=TokenSums())))
        norm = learner.gradient(work)
        found.append({name: gradient.clone() for name, gradient in whole_gradients(learner).items()})
    for name, gradient in found[0].items():
        assert (error := float((found[1][name] - gradient).norm() / norm)) < 1e-6, f"{name} is off by {error:.1e}"


def check_routes(folder: Path, rank: int, cases: dict[str, dict]) -> None:
    """Replayed routes go to the tokens that they are of. cases: run folder → layout."""
    content = minibatch()
    trajectories = with_routes(with_prompts(content[0]))
    for t in trajectories:  # only equal routes in the prompt are shared
        first = next(other for other in trajectories if other.prompt_id == t.prompt_id)
        common, width = len(t.prompt) - 1, 4 * 2
        t.uid, t.routes = (
            first.uid,
            np.concatenate(
                [first.routes.reshape(-1, width)[:common], with_routes([t])[0].routes.reshape(-1, width)[common:]]
            )
            .reshape(-1)
            .astype(first.routes.dtype),
        )

    def plain() -> dict[str, torch.Tensor]:
        exact = Routed(load_oracle(folder / "qwen3_moe").double(), trajectories, 2)
        oracle.ppo_loss(exact, *content, config).backward()
        return gradients(exact.model)

    for run, layout in cases.items():
        config = make_config(folder, "qwen3_moe", layout)
        with open_trainer(folder, rank, config, run) as subject:
            expected = once(subject, beside_model(subject, "shared-routes"), plain)
            for cap in (100, 400):
                MiniBatch(subject, *content, shares_prompts=True).forward_backward(cap)
                assert_gradient(subject, expected)

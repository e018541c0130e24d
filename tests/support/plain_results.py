"""Results of plain code on a tiny model, computed once for all layouts and ranks, since they take most of the time."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_megatron.config import Config
from areal_megatron.controller.probe import excerpts
from areal_megatron.data.examples import Sample
from areal_megatron.data.trajectory import Excerpt, Trajectory
from areal_megatron.trainer.trainer import Trainer
from tests.support import training_oracle as oracle
from tests.support.tiny_models import load_oracle

TOKENS = 100
"""All ids below are tokens of every tiny model."""
LIKELY = 5
"""So many tokens a teacher names in each place."""
ROWS = [[70, 3, 1, 34, 33, 8, 2], [50], [1]]
"""The lengths of the sequences of each packed row."""
UPDATES = SFT_STEPS = 2


def make_trajectories(count: int, version: int, seed: int = 0, group: int = 1) -> list[Trajectory]:
    """Makes random answers of very different lengths; some tokens and one whole answer are masked."""
    random = np.random.default_rng(seed)
    trajectories = []
    for uid in range(count):
        length = int(random.integers(1, 12)) if uid else 100
        mask = np.ones(length, np.uint8)
        mask[: length // 4] = 0
        trajectories.append(
            Trajectory(
                uid=uid,
                epoch=0,
                prompt_id=uid // group,
                admission_version=version - uid % 2,
                prompt=random.integers(0, TOKENS, int(random.integers(1, 9)), dtype=np.int32),
                response=random.integers(0, TOKENS, length, dtype=np.int32),
                logprobs=random.normal(-6, 1, length).astype(np.float32),
                versions=np.full(length, version - uid % 2, np.int32),
                loss_mask=mask * (uid != 1),
                reward=float(random.choice([-5.0, 5.0])),
                truncated=False,
            )
        )
        trajectories[-1].correct = trajectories[-1].reward > 0
    return trajectories


def plain_results(subject: Trainer) -> dict[str, Any]:
    """Returns the results of the subject's model under its config."""
    return once(subject, beside_model(subject, "plain_results"), lambda: _compute(subject.config))


def plain_update(subject: Trainer) -> dict[str, Any]:
    """Returns the gradient of `minibatch` and the parameters after one update on `update_data`.

    Runs of the same name share the results.
    """
    return once(subject, beside_model(subject, subject.run.folder.name), lambda: _compute_update(subject.config))


def beside_model(subject: Trainer, name: str) -> Path:
    """Returns the file of a result that is the same in all runs of a model."""
    return Path(subject.config.model.path) / f"{name}.pt"


def once(subject: Trainer, path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Rank 0 of the first run that asks computes the result, and keeps it in the file."""
    if subject.parallel.is_first and not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save(compute(), temporary)
        os.replace(temporary, path)
    subject.parallel.barrier()
    return torch.load(path, weights_only=True)


def rows_and_batch() -> tuple[list[list[np.ndarray]], torch.Tensor]:
    """Returns the sequences of each packed row, and an unpacked batch [3, 24]."""
    random = np.random.default_rng(1)
    rows = [[random.integers(0, TOKENS, n, dtype=np.int32) for n in lengths] for lengths in ROWS]
    return rows, torch.from_numpy(random.integers(0, TOKENS, (3, 24)))


def plain_logits(model: torch.nn.Module) -> dict[str, Any]:
    rows, batch = rows_and_batch()
    with torch.no_grad():
        packed = [torch.cat([model(torch.from_numpy(s)[None].long()).logits[0] for s in row]) for row in rows]
        return {"rows": packed, "batch": model(batch).logits}


def minibatch(
    algorithm: str = "ppo",
) -> tuple[list[Trajectory], list[np.ndarray], list[torch.Tensor], list[torch.Tensor]]:
    """Returns the trajectories of a mini-batch, their advantages, proximal and reference log-probabilities."""
    trajectories, random = make_trajectories(9, version=0, seed=2, group=3), np.random.default_rng(3)
    _teach(trajectories)
    proximals, references = (
        [
            torch.from_numpy(t.logprobs + random.normal(0, deviation, len(t.logprobs)).astype(np.float32))
            for t in trajectories
        ]
        for deviation in (0.2, 0.4)
    )
    return trajectories, oracle.advantages(trajectories, algorithm), proximals, references


def _teach(trajectories: list[Trajectory]) -> None:
    """Gives each trained token what a teacher finds likeliest in its place: LIKELY tokens, of which the student lacks
    one now and then, with up to 0.9 of the probability together."""
    random = np.random.default_rng(9)
    for t in trajectories:
        count = int(t.loss_mask.sum())
        tokens = [random.choice(TOKENS, LIKELY, replace=False) for _ in range(count)]
        shares = random.dirichlet(np.ones(LIKELY), count) * random.uniform(0.3, 0.9, (count, 1))
        t.likely_tokens = np.array(tokens, np.int32).reshape(-1)
        t.likely_logprobs = np.log(shares).astype(np.float32).reshape(-1)
        t.likely_tokens[::17], t.likely_logprobs[::17] = -1, -100


def critic_minibatch() -> tuple[list[Trajectory], list[torch.Tensor], list[torch.Tensor]]:
    """Returns the trajectories of a mini-batch, with values before the batch and returns of their trained tokens."""
    trajectories, random = make_trajectories(9, version=0, seed=2, group=3), np.random.default_rng(5)
    before, returns = (
        [torch.from_numpy(random.normal(0, 2, int(t.loss_mask.sum())).astype(np.float32)) for t in trajectories]
        for _ in range(2)
    )
    return trajectories, before, returns


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _compute(config: Config) -> dict[str, Any]:
    model = load_oracle(Path(config.model.path))
    results = {"logits": plain_logits(model), **_response(model, make_trajectories(7, version=0), config)}
    exact = copy.deepcopy(model).double()
    oracle.ppo_loss(exact, *minibatch(), config).backward()
    return results | {"gradient": gradients(exact)} | _training(model, config)


def update_data() -> tuple[list[Trajectory], list[list[int]]]:
    """Returns groups of trajectories, and the members of the two mini-batches that `split` makes with seed 0.

    Some episodes have several samples, one of them in both mini-batches, and answers with returns of their own.
    """
    order = [4 * group + answer for group in np.random.default_rng(0).permutation(3).tolist() for answer in range(4)]
    trajectories = make_trajectories(12, 0, seed=4, group=4)
    for group in range(3):
        first, *others = trajectories[4 * group : 4 * group + 4]
        for sample, t in enumerate(others[1:2] if group == 0 else others[:2], 1):
            t.uid, t.sample, t.reward, t.correct = first.uid, sample, first.reward, first.correct
        last, trained = others[-1], int(others[-1].loss_mask.sum())
        last.returns = [(trained // 2, last.reward + 1.5), (trained - trained // 2, last.reward)]
    told = np.random.default_rng(6)
    for t in trajectories:  # what a served teacher says
        if t.loss_mask.any():
            t.reference = (t.logprobs + told.normal(0, 0.4, len(t.logprobs))).astype(np.float32)
    _teach(trajectories)
    return trajectories, [order[:6], order[6:]]


def _compute_update(config: Config) -> dict[str, Any]:
    model = load_oracle(Path(config.model.path))
    exact, learner, values, results = copy.deepcopy(model).double(), oracle.Learner(model, config), None, {}
    oracle.ppo_loss(exact, *minibatch(config.ppo.algorithm), config).backward()
    if config.ppo.has_critic:
        valued = oracle.Valued(copy.deepcopy(model))
        results, values = _compute_critic(learner, valued, config)
    if not config.ppo.critic.warmup:
        learner.ppo_update(*update_data(), values)
    return {"gradient": gradients(exact), "parameters": model.state_dict(), **results}


def _compute_critic(learner: oracle.Learner, valued: oracle.Valued, config: Config) -> tuple[dict[str, Any], list]:
    """Returns for the critic what _compute_update does for the policy, and the advantages of each trajectory."""
    exact = copy.deepcopy(valued).double()
    oracle.critic_loss(exact, *critic_minibatch(), config).backward()
    values, returns, advantages = oracle.assess(valued, update_data()[0], config)
    learner.critic_update(valued, *update_data())
    return {
        "critic_gradient": gradients(exact),
        "critic_parameters": valued.state_dict(),
        "values": torch.cat(values).double(),
        "returns": torch.cat(returns),
        "advantages": torch.cat(advantages),
    }, advantages


@torch.no_grad()
def _response(model: torch.nn.Module, trajectories: list[Trajectory], config: Config) -> dict[str, torch.Tensor]:
    """Returns log-probabilities and entropies of the trained tokens."""
    pairs = [
        [values[t.loss_mask == 1] for values in oracle.response(model, t, config.rollout.temperature)]
        for t in trajectories
    ]
    logprobs, entropies = zip(*pairs, strict=True)
    return {"logprobs": torch.cat(logprobs), "entropy": torch.cat(entropies)}


def training_data(version: int) -> tuple[list[Trajectory], list[set[int]]]:
    """Returns the trajectories of an update, and the members of its two mini-batches."""
    trajectories = make_trajectories(12, version, seed=10 + version)
    order = np.random.default_rng(version).permutation(12)
    return trajectories, [set(half.tolist()) for half in np.array_split(order, 2)]


def sft_examples(step: int) -> list[Sample]:
    """Samples of which all is trained but a prompt; every other one has a turn in between that is not."""
    found = []
    for number, t in enumerate(make_trajectories(8, 0, step)):
        tokens = np.concatenate((t.prompt, t.response))
        trained = np.arange(len(t.prompt), len(tokens))
        trained = trained[trained % 5 != 0] if number % 2 and len(trained) > 2 else trained
        found.append(Sample(tokens, trained, len(trained)))
    return found


def _training(model: torch.nn.Module, config: Config) -> dict[str, Any]:
    """Makes UPDATES updates, then SFT_STEPS supervised steps.

    Returns the final parameters, the supervised losses, and for each update the metrics and the log-probabilities of
    the probe.
    """
    learner, metrics, probes = oracle.Learner(model, config), [], []
    for version in range(UPDATES):
        trajectories, halves = training_data(version)
        metrics.append(oracle.metrics(model, trajectories, config, version))
        probes.append(oracle.scored(model, probed(trajectories)))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        learner.ppo_update(trajectories, [sorted(half) for half in halves])
        moved = sum(((now - own) ** 2).sum() for now, own in zip(model.parameters(), before, strict=True)).detach()
        metrics[-1]["update_size"] = float((moved / sum((own**2).sum() for own in before)).sqrt())
    losses = [learner.sft_step(sft_examples(step)) for step in range(SFT_STEPS)]
    return {"metrics": metrics, "probes": probes, "sft_losses": losses, "parameters": model.state_dict()}


def probed(trajectories: list[Trajectory]) -> list[Excerpt]:
    """Returns the excerpts of a batch that are scored, some of which are cut."""
    return excerpts(trajectories, longest=40)

"""Checks of routing replay on trainer ranks, against a Hugging Face model whose routers are given the routes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from areal_megatron.config import ConfigError
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.packing.partition import split
from tests.support import training_oracle as oracle
from tests.support.comparison import assert_gradient
from tests.support.plain_results import gradients, make_trajectories, minibatch
from tests.support.ranks.trainer_checks import MiniBatch, make_config, open_trainer
from tests.support.tiny_models import load_oracle


class Routed(torch.nn.Module):
    """A Hugging Face model that sends each token of known sequences through given experts of each layer."""

    def __init__(self, model: torch.nn.Module, trajectories: list[Trajectory], chosen: int):
        super().__init__()
        self.model, layers = model, model.config.num_hidden_layers
        self._routes = {
            (*t.prompt.tolist(), *t.response.tolist()): t.routes.reshape(-1, layers, chosen) for t in trajectories
        }
        self._now: np.ndarray | None = None
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = partial(self._route, layer.mlp.gate, number)

    def forward(self, tokens: torch.Tensor, **options):
        self._now = self._routes[tuple(tokens[0].tolist())]
        return self.model(tokens, **options)

    def _route(self, gate, layer: int, hidden: torch.Tensor):
        logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(gate.top_k).indices
        known = torch.from_numpy(self._now[:, layer].astype(np.int64))
        chosen = torch.cat([known, chosen[len(known) :]])
        weights = probabilities.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def with_routes(trajectories: list[Trajectory], layers: int = 4, experts: int = 4, chosen: int = 2) -> list[Trajectory]:
    """Sets random routes for all tokens but the last, for the prompt only, or for none."""
    random = np.random.default_rng(6)
    for t in trajectories:
        rows = (t.length - 1, len(t.prompt), 0)[(t.uid % 5) // 2]
        choices = [random.permutation(experts)[:chosen] for _ in range(rows * layers)]
        t.routes = np.array(choices, np.uint16 if t.uid % 2 else np.uint8).reshape(-1)
    return trajectories


def check_replay(folder: Path, rank: int, cases: dict[str, dict]) -> None:
    """Checks gradients, and the log-probabilities that an update computes before its first step.

    cases: run folder → layout.
    """
    model = load_oracle(folder / "qwen3_moe")
    trajectories, *rest = minibatch()
    with_routes(trajectories)
    exact, free = (Routed(load_oracle(folder / "qwen3_moe").double(), t, 2) for t in (trajectories, minibatch()[0]))
    for run, layout in cases.items():
        config = make_config(folder, "qwen3_moe", layout)
        with open_trainer(folder, rank, config, run) as subject:
            # The second batch has no routes: none may be left from the first.
            for forced, content in ((exact, trajectories), (free, minibatch()[0])):
                forced.zero_grad()
                oracle.ppo_loss(forced, content, *rest, config).backward()
                batch = MiniBatch(subject, content, *rest)
                for cap in (40, 400):
                    batch.forward_backward(cap)
                    assert_gradient(subject, gradients(forced.model))
            check_update(subject, model)


def check_update(subject, model: torch.nn.Module) -> None:
    """The difference from the engine's log-probabilities is that of a model that uses the engine's experts."""
    trajectories = with_routes(make_trajectories(12, 0, seed=4, group=4))
    with torch.no_grad():
        routed = Routed(model, trajectories, 2)
        found = [
            (oracle.response_logprobs(routed, t, 0.7) - torch.from_numpy(t.logprobs.copy())).abs()[
                (t.loss_mask == 1) & (t.versions == 0)
            ]
            for t in trajectories
        ]
    parts = split(trajectories, version=0, replicas=subject.config.trainer.dp, minibatches=2, cap=128, seed=0)
    result = subject.train_batch(parts[subject.parallel.replica])
    assert result.applied and abs(result.metrics["logprob_diff_mean"] - float(torch.cat(found).mean())) < 1e-4


def check_other_model(folder: Path, rank: int) -> None:
    config = make_config(folder, "qwen3_moe", {})
    with open_trainer(folder, rank, config) as subject:
        for changes in ({"layers": 5}, {"experts": 6}):
            trajectories = with_routes(make_trajectories(12, 0), **changes)
            [part] = split(trajectories, version=0, replicas=1, minibatches=2, cap=128, seed=0)
            with pytest.raises(ConfigError, match="of another model: this one has 4 layers that choose 2 of 4"):
                subject.train_batch(part)

"""Checks of routing replay on trainer ranks, against a Hugging Face model whose routers are given the routes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from areal_megatron.config import ConfigError
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.packing.partition import split
from areal_megatron.trainer.learner import Steps
from areal_megatron.trainer.model import tensors
from tests.support import training_oracle as oracle
from tests.support.comparison import assert_gradient
from tests.support.plain_results import beside_model, gradients, make_trajectories, minibatch, once
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
            if hasattr(layer.mlp, "gate"):  # else it is dense, and what its routes say is of no account
                layer.mlp.gate.forward = partial(self._route, layer.mlp.gate, number)

    def forward(self, tokens: torch.Tensor, **options):
        self._now = self._routes[tuple(tokens[0].tolist())]
        return self.model(tokens, **options)

    def _route(self, gate, layer: int, hidden: torch.Tensor):
        logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        *_, chosen = type(gate).forward(gate, hidden)
        scale = getattr(gate, "routed_scaling_factor", None)
        scores = logits.sigmoid() if scale else logits.softmax(-1)
        known = torch.from_numpy(self._now[:, layer].astype(np.int64))
        chosen = torch.cat([known, chosen[len(known) :]])
        weights = scores.gather(1, chosen)
        return logits, (scale or 1.0) * weights / weights.sum(-1, keepdim=True), chosen


def with_routes(trajectories: list[Trajectory], layers: int = 4, experts: int = 4, chosen: int = 2) -> list[Trajectory]:
    """Sets random routes for all tokens but the last, for the prompt only, or for none."""
    random = np.random.default_rng(6)
    for t in trajectories:
        rows = (t.length - 1, len(t.prompt), 0)[(t.uid % 5) // 2]
        choices = [random.permutation(experts)[:chosen] for _ in range(rows * layers)]
        t.routes = np.array(choices, np.uint16 if t.uid % 2 else np.uint8).reshape(-1)
    return trajectories


def check_replay(folder: Path, rank: int, cases: dict[str, dict], family: str = "qwen3_moe") -> None:
    """Checks gradients, and the log-probabilities that an update computes before its first step.

    cases: run folder → layout.
    """
    described = AutoConfig.from_pretrained(folder / family)
    experts, chosen = described.num_local_experts, described.num_experts_per_tok
    content, updated = minibatch(), make_trajectories(12, 0, seed=4, group=4)
    dense = getattr(described, "first_k_dense_replace", 0)
    for trajectories in (content[0], updated):
        for t in with_routes(trajectories, experts=experts, chosen=chosen):
            t.routes.reshape(-1, 4, chosen)[:, :dense] = 0  # nobody reads these
    # The second batch has no routes: none may be left from the first.
    contents = {"forced": content, "free": minibatch()}

    def plain() -> dict[str, Any]:
        results = {}
        for name, given in contents.items():
            exact = Routed(load_oracle(folder / family).double(), given[0], chosen)
            oracle.ppo_loss(exact, *given, config).backward()
            results[name] = gradients(exact.model)
        with torch.no_grad():
            routed = Routed(load_oracle(folder / family), updated, chosen)
            found = [
                (oracle.response_logprobs(routed, t, 0.7) - torch.from_numpy(t.logprobs.copy())).abs()[
                    (t.loss_mask == 1) & (t.versions == 0)
                ]
                for t in updated
            ]
        return results | {"logprob_diff_mean": float(torch.cat(found).mean())}

    for run, layout in cases.items():
        config = make_config(folder, family, layout)
        with open_trainer(folder, rank, config, run) as subject:
            expected = once(subject, beside_model(subject, "routed"), plain)
            for name, given in contents.items():
                batch = MiniBatch(subject, *given)
                for cap in (40, 400):
                    batch.forward_backward(cap)
                    assert_gradient(subject, expected[name])
            # The difference from the engine's log-probabilities is that of a model that uses the engine's experts.
            parts = split(updated, version=0, replicas=subject.config.trainer.dp, minibatches=2, cap=128, seed=0)
            result = subject.train_batch(parts[subject.parallel.replica])
            assert result.applied
            assert abs(result.metrics["logprob_diff_mean"] - expected["logprob_diff_mean"]) < 1e-4


def check_other_model(folder: Path, rank: int) -> None:
    config = make_config(folder, "qwen3_moe", {})
    with open_trainer(folder, rank, config) as subject:
        for changes in ({"layers": 5}, {"experts": 6}):
            trajectories = with_routes(make_trajectories(12, 0), **changes)
            [part] = split(trajectories, version=0, replicas=1, minibatches=2, cap=128, seed=0)
            with pytest.raises(ConfigError, match="of another model: this one has 4 layers that choose 2 of 4"):
                subject.train_batch(part)


def check_biases(folder: Path, rank: int, layout: dict, fields: dict) -> None:
    """A step moves the biases by the rate, up for experts with less than the mean load of that step's tokens and down
    for those with more; a step that is not taken moves none, nor does the rate 0. The reference keeps its own.

    fields: further ones of megatron-core.
    """
    model = load_oracle(folder / "glm4_moe")
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    begun = [gate.e_score_correction_bias.clone() for gate in gates]
    loads = [torch.zeros(gate.num_experts) for gate in gates]
    for gate, load in zip(gates, loads, strict=True):
        gate.register_forward_hook(partial(_count, load))
    trajectories, *rest = minibatch()
    with torch.no_grad():
        for t in trajectories:
            model(torch.from_numpy(np.concatenate((t.prompt, t.response)).astype(np.int64))[None])
    for run, rate in (("run", 0.0), ("moving", 0.01)):
        megatron = fields | {"moe_router_bias_update_rate": rate}
        config = make_config(folder, "glm4_moe", layout | {"megatron": megatron})
        with open_trainer(folder, rank, config, run) as subject:
            batch, held = MiniBatch(subject, trajectories, *rest), biases(subject.policy.chunks)
            for norm in (float("nan"), 1.0):
                batch.forward_backward(400)
                subject.policy.step(norm, Steps())
                for own, before, load in zip(held, begun, loads, strict=True):
                    moved = rate * torch.sign(load.mean() - load) * (norm == 1.0)
                    sure = (load - load.mean()).abs() > 12  # what fills up the rows is routed, too
                    assert sure.sum() > 3 and own.dtype == torch.float32
                    torch.testing.assert_close(own[sure], (before + moved)[sure])
            for own, before in zip(biases(subject._reference._chunks), begun, strict=True):
                assert torch.equal(own, before)


def _count(load: torch.Tensor, _gate: Any, _inputs: Any, found: tuple[torch.Tensor, ...]) -> None:
    load += found[2].flatten().bincount(minlength=len(load))


def biases(chunks) -> list[torch.Tensor]:
    return [values for name, values in tensors(chunks).items() if name.endswith("expert_bias")]

"""What training should do, written plainly: Hugging Face models, one sequence at a time, torch's own AdamW."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from areal_megatron.config import Config
from areal_megatron.data.trajectory import Trajectory


def distributions(model: torch.nn.Module, tokens: np.ndarray, temperature: float) -> Tensor:
    """Log-probabilities [n − 1, vocabulary] of every token but the first."""
    logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1]
    return torch.log_softmax(logits / temperature, dim=-1)


def response_logprobs(model: torch.nn.Module, trajectory: Trajectory, temperature: float) -> Tensor:
    """[R]"""
    tokens = np.concatenate((trajectory.prompt, trajectory.response))
    logprobs = distributions(model, tokens, temperature)[len(trajectory.prompt) - 1 :]
    return logprobs.gather(1, torch.from_numpy(trajectory.response.astype(np.int64))[:, None])[:, 0]


def advantages(trajectories: list[Trajectory], weighting: str) -> list[float]:
    values, weights = [], []
    for t in trajectories:
        trained = int(t.loss_mask.sum())
        values.append(t.reward)
        weights.append(trained if weighting == "token" else min(trained, 1))
    mean = np.average(values, weights=weights)
    deviation = math.sqrt(np.average((np.array(values) - mean) ** 2, weights=weights))
    return [(value - mean) / (deviation + 1e-5) for value in values]


def ppo_loss(model, trajectories, advantages, proximals, config: Config) -> Tensor:
    """Equation 5 as a mean over the trained tokens of a mini-batch. `proximals`: [R] of each trajectory."""
    total, count = torch.zeros(()), 0
    for t, advantage, proximal in zip(trajectories, advantages, proximals, strict=True):
        current = response_logprobs(model, t, config.rollout.temperature)
        trained = torch.from_numpy(np.flatnonzero(t.loss_mask))
        proximal, behaviour = proximal[trained], torch.from_numpy(t.logprobs.copy())[trained]
        ratio = torch.exp(current[trained] - proximal)
        clipped = torch.clamp(ratio, 1 - config.ppo.clip, 1 + config.ppo.clip)
        weight = torch.exp(proximal.double() - behaviour.double()).clamp(max=config.ppo.behaviour_cap)
        total = total - (weight * torch.min(ratio * advantage, clipped * advantage)).sum()
        count += len(trained)
    return total / max(count, 1)


def balance_loss(model: torch.nn.Module, trajectories: list[Trajectory], microbatches: list[list[int]]) -> Tensor:
    """Switch Transformer, Equation 4, of the trained tokens of each micro-batch; their mean over trained tokens."""
    config, total = model.config, torch.zeros(())
    for members in microbatches:
        layers = [[] for _ in range(config.num_hidden_layers)]
        for t in (trajectories[i] for i in members if trajectories[i].loss_mask.any()):
            tokens = torch.from_numpy(np.concatenate((t.prompt, t.response)).astype(np.int64))[None]
            predicting = len(t.prompt) - 1 + np.flatnonzero(t.loss_mask)
            for layer, logits in zip(layers, model(tokens, output_router_logits=True).router_logits, strict=True):
                layer.append(logits[predicting].softmax(-1))
        for probabilities in (torch.cat(layer) for layer in layers if layer):
            chosen = probabilities.topk(config.num_experts_per_tok).indices.flatten()
            share = torch.bincount(chosen, minlength=config.num_experts) / len(chosen)
            balance = config.num_experts * (share * probabilities.mean(0)).sum()
            total = total + config.router_aux_loss_coef * balance * len(probabilities)
    return total / sum(int(t.loss_mask.sum()) for t in trajectories)


class Learner:
    """A Hugging Face model trained by the book."""

    def __init__(self, model: torch.nn.Module, config: Config):
        self.model, self.config = model, config
        settings = config.optimizer
        decay = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decay, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, settings.lr, settings.adam[:2], settings.adam[2])

    def step(self, loss: Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
        self.optimizer.step()
        return float(norm)

    def ppo_update(self, trajectories: list[Trajectory], minibatches: list[list[int]]) -> None:
        """`minibatches`: indices of trajectories."""
        config = self.config
        values = advantages(trajectories, config.ppo.advantage_weighting)
        if config.ppo.objective == "naive":
            proximals = [torch.from_numpy(t.logprobs.copy()) for t in trajectories]
        else:
            with torch.no_grad():
                proximals = [response_logprobs(self.model, t, config.rollout.temperature) for t in trajectories]
        for members in minibatches:
            chosen = [[items[i] for i in members] for items in (trajectories, values, proximals)]
            self.step(ppo_loss(self.model, *chosen, config))

    def sft_step(self, examples: list[tuple[np.ndarray, int]]) -> float:
        losses = []
        for tokens, prompt in examples:
            logprobs = distributions(self.model, tokens, 1.0)
            labels = torch.from_numpy(tokens[1:].astype(np.int64))
            losses.append(-logprobs.gather(1, labels[:, None])[prompt - 1 :, 0])
        loss = torch.cat(losses).mean()
        self.step(loss)
        return float(loss.detach())

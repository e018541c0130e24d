"""The oracle of training, written plainly: Hugging Face models, one sequence at a time, torch's own AdamW."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_megatron.config import Config
from areal_megatron.data.examples import Sample
from areal_megatron.data.trajectory import Excerpt, Trajectory
from tests.support.tiny_models import load_oracle


def distributions(model: torch.nn.Module, tokens: np.ndarray, temperature: float) -> Tensor:
    """Returns the log-probabilities [n − 1, vocabulary] of every token but the first."""
    logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1]
    return torch.log_softmax(logits / temperature, dim=-1)


def response(model: torch.nn.Module, trajectory: Trajectory, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of the response and the entropies of its distributions: [R] each."""
    tokens = np.concatenate((trajectory.prompt, trajectory.response))
    logprobs = distributions(model, tokens, temperature)[len(trajectory.prompt) - 1 :]
    sampled = logprobs.gather(1, torch.from_numpy(trajectory.response.astype(np.int64))[:, None])[:, 0]
    return sampled, -(logprobs.exp() * logprobs).sum(-1)


def response_logprobs(model: torch.nn.Module, trajectory: Trajectory, temperature: float) -> Tensor:
    """Returns the log-probabilities of the response: [R]."""
    return response(model, trajectory, temperature)[0]


def advantages(trajectories: list[Trajectory], algorithm: str) -> list[np.ndarray]:
    """Returns the advantages of each trajectory's trained tokens: [n] each. An episode counts once in a group."""
    answers = [
        (place, t.prompt_id, t.uid, tokens, value)
        for place, t in enumerate(trajectories)
        for tokens, value in t.returns or [(int(t.loss_mask.sum()), t.reward)]
    ]
    trained, returns = (np.array([answer[k] for answer in answers]) for k in (3, 4))
    of_episode = Counter(uid for _, _, uid, tokens, _ in answers if tokens)
    shares = np.array([1 / of_episode[uid] if tokens else 0.0 for _, _, uid, tokens, _ in answers])

    def over_batch(values, weights):
        mean = np.average(values, weights=weights)
        return (values - mean) / (math.sqrt(np.average((values - mean) ** 2, weights=weights)) + 1e-5)

    def in_group(value, prompt, uid):
        episodes = {
            other: [v for _, _, u, tokens, v in answers if u == other and tokens]
            for _, p, other, tokens, _ in answers
            if p == prompt and tokens
        }
        if algorithm == "rloo":
            return value - np.mean([np.mean(own) for other, own in episodes.items() if other != uid] or value)
        mean = np.mean([np.mean(own) for own in episodes.values()])
        deviation = math.sqrt(np.mean([np.mean((np.array(own) - mean) ** 2) for own in episodes.values()]))
        return value - mean if algorithm in ("dr_grpo", "reinforce++") else (value - mean) / (deviation + 1e-5)

    if algorithm in ("ppo", "ppo_sequence"):
        found = over_batch(returns, trained if algorithm == "ppo" else shares)
    else:
        found = np.array([in_group(value, prompt, uid) if n else 0.0 for _, prompt, uid, n, value in answers])
        found = over_batch(found, trained) if algorithm in ("reinforce++", "boba_grpo") else found
    per_token = np.repeat(found, trained)
    places = np.repeat([answer[0] for answer in answers], trained)
    return [per_token[places == place] for place in range(len(trajectories))]


@torch.no_grad()
def metrics(model: torch.nn.Module, trajectories: list[Trajectory], config: Config, version: int) -> dict[str, float]:
    """Returns those metrics of an update that depend only on the policy before it."""
    columns = []
    for t, advantage in zip(trajectories, advantages(trajectories, config.ppo.algorithm), strict=True):
        proximal = response_logprobs(model, t, config.rollout.temperature).double().numpy()
        trained = t.loss_mask == 1
        columns.append(np.stack([(proximal - t.logprobs)[trained], advantage, version - t.versions[trained]]))
    lag, advantage, staleness = np.concatenate(columns, 1)
    weight, fresh = np.exp(lag), np.abs(lag[staleness == 0])
    found = {
        "logprob_diff_max": fresh.max(),
        "logprob_diff_mean": fresh.mean(),
        "logprob_diff_p99": np.quantile(fresh, 0.99, method="inverted_cdf"),
        "weight_max": weight.max(),
        "weight_p99": np.quantile(weight, 0.99, method="inverted_cdf"),
        "weight_mean": weight.mean(),
        "log_weight_mean": lag.mean(),
        "zero_advantage_share": np.mean(advantage == 0),
    }
    for name, own in {
        "staleness_0": staleness == 0,
        "staleness_1": staleness == 1,
        "advantage_above_0": advantage > 0,
        "advantage_below_0": advantage < 0,
    }.items():
        found |= {
            f"token_share/{name}": own.mean(),
            f"weight_mean/{name}": weight[own].mean(),
            f"weight_max/{name}": weight[own].max(),
            f"log_weight_mean/{name}": lag[own].mean(),
            f"effective_share/{name}": weight[own].mean() ** 2 / (weight[own] ** 2).mean(),
            f"advantage_mean/{name}": advantage[own].mean(),
            f"advantage_std/{name}": advantage[own].std(),
        }
    return {name: float(value) for name, value in found.items()}


@torch.no_grad()
def scored(model: torch.nn.Module, found: list[Excerpt]) -> Tensor:
    """Returns the log-probabilities of the compared tokens, at temperature 1."""
    parts = [torch.zeros(0)]
    for excerpt in found:
        labels = torch.from_numpy(excerpt.tokens[1:].astype(np.int64))
        logprobs = distributions(model, excerpt.tokens, 1.0).gather(1, labels[:, None])[:, 0]
        parts.append(logprobs[excerpt.compared[1:] == 1])
    return torch.cat(parts)


class Valued(torch.nn.Module):
    """A Hugging Face model with a value head on its final hidden states in place of the output layer."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        hidden, random = model.config.hidden_size, torch.Generator().manual_seed(11)
        self.model = model.model
        self.head = torch.nn.Linear(hidden, 1, bias=False)
        self.head.weight.data = 0.3 * torch.randn(1, hidden, generator=random)

    def values(self, trajectory: Trajectory) -> Tensor:
        """Returns the values of the states before the trained tokens."""
        tokens = torch.from_numpy(np.concatenate((trajectory.prompt, trajectory.response)).astype(np.int64))[None]
        values = self.head(self.model(tokens).last_hidden_state)[0, :, 0]
        return values[len(trajectory.prompt) - 1 + np.flatnonzero(trajectory.loss_mask)]


def gae(rewards: list[float], values: list[float], gamma: float, lambda_: float) -> list[float]:
    """Computes Equations 10 and 16 of Schulman et al., arXiv 1506.02438, backwards through one episode."""
    found, later, value = [], 0.0, 0.0
    for reward, own in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * value - own + gamma * lambda_ * later
        value = own
        found.insert(0, later)
    return found


@torch.no_grad()
def assess(valued: Valued, trajectories: list[Trajectory], config: Config) -> tuple[list[Tensor], ...]:
    """Returns values, returns and normalised advantages of the trained tokens of each trajectory."""
    settings, values, returns, raw = config.ppo.critic, [], [], []
    for t in trajectories:
        values.append(valued.values(t))
        rewards, later = [], 0.0
        for tokens, value in reversed(t.returns or [(len(values[-1]), t.reward)]):
            rewards = [0.0] * (tokens - 1) + [value - later] * bool(tokens) + rewards
            later = value
        raw.append(np.array(gae(rewards, values[-1].tolist(), settings.gamma, settings.gae_lambda)))
        returns.append(torch.from_numpy(raw[-1]) + values[-1])
    whole = in_episodes(trajectories)
    weights = np.concatenate(
        [
            np.full(len(own), 1.0 if config.ppo.algorithm == "ppo" else 1 / max(whole[t.uid], 1))
            for t, own in zip(trajectories, raw, strict=True)
        ]
    )
    mean = np.average(np.concatenate(raw), weights=weights)
    deviation = math.sqrt(np.average((np.concatenate(raw) - mean) ** 2, weights=weights))
    return values, returns, [torch.from_numpy((own - mean) / (deviation + 1e-5)) for own in raw]


def in_episodes(trajectories: list[Trajectory]) -> Counter[int]:
    """Returns the trained tokens of each episode, by its uid."""
    found = Counter()
    for t in trajectories:
        found[t.uid] += int(t.loss_mask.sum())
    return found


def critic_loss(valued: Valued, trajectories, before, returns, config: Config) -> Tensor:
    """Returns the loss of a mini-batch: Schulman's ppo2, the mean clipped squared error over trained tokens."""
    clip, parts = config.ppo.critic.clip, [torch.zeros(0)]
    for t, old, target in zip(trajectories, before, returns, strict=True):
        now = valued.values(t)
        errors = (now - target) ** 2
        if clip:
            errors = torch.max(errors, (old + torch.clamp(now - old, -clip, clip) - target) ** 2)
        parts.append(errors / 2)
    return torch.cat(parts).mean()


def weights(lag: Tensor, correction: dict[str, float]) -> Tensor:
    """Returns the corrected weights of one sequence's trained tokens, from the logarithms of the uncorrected ones."""
    ratio = weights = lag.exp()
    product = ratio.prod()
    if cap := correction.get("product_truncate"):
        weights = torch.full_like(ratio, min(product, cap))
    if cap := correction.get("truncate"):
        weights = torch.minimum(weights, torch.tensor(cap))
    deciding = {"mask": ratio, "sequence_mask": product ** (1 / len(ratio)), "product_mask": product}
    for name, value in deciding.items():
        low, high = correction.get(f"{name}_low", 0), correction.get(f"{name}_high", math.inf)
        weights = weights * ((value >= low) & (value <= high))
    return weights


def within_second_moment(trajectories, proximals, config: Config) -> list[Tensor]:
    """Returns which tokens M2PO keeps, bool [R] of each trajectory, by masking the largest one by one."""
    keep = [torch.ones(len(t.response), dtype=torch.bool) for t in trajectories]
    moments = {
        (i, k): (float(proximals[i][k]) - float(t.logprobs[k])) ** 2
        for i, t in enumerate(trajectories)
        for k in np.flatnonzero(t.loss_mask)
    }
    while moments and np.mean(list(moments.values())) > (config.ppo.correction.m2po or math.inf):
        i, k = max(moments, key=moments.get)
        keep[i][k] = False
        del moments[i, k]
    return keep


def interpolated(current: Tensor, trajectory: Trajectory, config: Config, taken: int, version: int) -> Tensor:
    """Returns log π_prox [R] by AReaL's log-linear formula.

    `taken` of the update's steps have been taken; after one step for each mini-batch the version is `version` + 1.
    """
    behaviour, now = torch.from_numpy(trajectory.logprobs.copy()), version + taken / config.ppo.minibatches
    alpha = [(version - v) / (now - v) if taken else 1.0 for v in trajectory.versions.tolist()]
    return behaviour + torch.tensor(alpha) * (current.detach() - behaviour)


def most_covariant(trajectories, advantages, proximals, config: Config) -> list[Tensor]:
    """Returns which tokens KL-Cov chooses, bool [R] of each trajectory: the first ones in the order of covariances."""
    tokens = [
        (i, k, float(np.broadcast_to(advantages[i], int(t.loss_mask.sum()))[n]), float(proximals[i][k]))
        for i, t in enumerate(trajectories)
        for n, k in enumerate(np.flatnonzero(t.loss_mask))
    ]
    advantage, logprob = np.mean([token[2] for token in tokens]), np.mean([token[3] for token in tokens])
    order = sorted(tokens, key=lambda token: -(token[2] - advantage) * (token[3] - logprob))
    chosen = [torch.zeros(len(t.response), dtype=torch.bool) for t in trajectories]
    for i, k, a, p in order[: math.ceil(config.ppo.penalty.kl_cov_share * len(tokens))]:
        chosen[i][k] = bool((a - advantage) * (p - logprob) > 0)
    return chosen


def kl(current: Tensor, behaviour: Tensor, reference: Tensor, config: Config) -> Tensor:
    """Returns Schulman's k2 and k3 of each token, as losses, times π_θ/π_behav (DeepSeek-V3.2)."""
    penalty, ratio = config.ppo.penalty.coefficients, (reference - current).exp()
    weight = torch.ones_like(current)
    if config.ppo.penalty.kl_weighted:
        weight = (current - behaviour).exp().clamp(max=config.ppo.correction.truncate or math.inf)
    return penalty.get("kl_k2", 0) * weight.detach() * (current - reference) ** 2 / 2 + penalty.get(
        "kl_k3", 0
    ) * weight * (ratio - 1 - ratio.log())


def divergences(model: torch.nn.Module, t: Trajectory, config: Config) -> Tensor:
    """Returns the divergence between student and teacher in the place of each trained token, [n]: over the teacher's
    likeliest tokens, and all others of the vocabulary together."""
    k, form = config.ppo.penalty.top_k, config.ppo.penalty.kl_form
    logprobs = distributions(model, np.concatenate((t.prompt, t.response)), config.rollout.temperature)
    found, of_places = [], logprobs[len(t.prompt) - 1 + np.flatnonzero(t.loss_mask)]
    for number, own in enumerate(of_places.double().exp()):
        tokens, told = (values[number * k : number * k + k] for values in (t.likely_tokens, t.likely_logprobs))
        likely = torch.zeros(len(own), dtype=torch.bool)
        likely[tokens[tokens >= 0].tolist()] = True
        teacher = torch.zeros(len(own), dtype=torch.float64)
        teacher[tokens[tokens >= 0].tolist()] = torch.from_numpy(told[tokens >= 0].astype(np.float64)).exp()
        outcomes = (teacher, 1 - teacher.sum()), (own, own[~likely].sum())
        p, q = (torch.cat([values[likely], rest[None]]) for values, rest in outcomes)
        found.append(torch.distributions.kl_divergence(*map(_categorical, (p, q) if form == "forward" else (q, p))))
    return torch.stack(found)


def _categorical(probabilities: Tensor) -> torch.distributions.Categorical:
    return torch.distributions.Categorical(probs=probabilities)


def ppo_loss(
    model,
    trajectories,
    advantages,
    proximals,
    references,
    config: Config,
    taken: int = 1,
    version: int = 0,
    whole: Counter[int] | None = None,
) -> Tensor:
    """Returns the loss of a mini-batch as in the algorithm's paper, after `taken` steps on a batch of that version.

    `proximals`, `references`: the log-probabilities [R] of each trajectory; `whole`: the trained tokens of each
    episode, by its uid, if some of them are in other mini-batches.
    """
    algorithm, low, high = config.ppo.algorithm, config.ppo.clip_low, config.ppo.clip_high
    whole = whole or in_episodes(trajectories)
    sums, lengths, episodes, keep = [], [], [], within_second_moment(trajectories, proximals, config)
    penalty, correction = config.ppo.penalty.coefficients, config.ppo.correction
    for t, advantage, proximal, reference, kept, marked in zip(
        trajectories,
        advantages,
        proximals,
        references,
        keep,
        most_covariant(trajectories, advantages, proximals, config) if config.ppo.penalty.kl_cov else keep,
        strict=True,
    ):
        trained = torch.from_numpy(np.flatnonzero(t.loss_mask))
        if not len(trained):
            continue
        current, entropy = response(model, t, config.rollout.temperature)
        if config.ppo.objective == "loglinear":
            proximal = interpolated(current, t, config, taken, version)
        current, entropy, reference = current[trained], entropy[trained], reference[trained]
        advantage = torch.as_tensor(advantage, dtype=current.dtype)
        advantage = advantage - penalty.get("kl_k1", 0) * (current.detach() - reference)
        behaviour = torch.from_numpy(t.logprobs.copy())[trained]
        drift, lag = current - proximal[trained], proximal[trained].double() - behaviour
        costs = kl(current, behaviour, reference, config)
        if config.ppo.penalty.top_k:
            costs = config.ppo.penalty.kl * divergences(model, t, config).to(current.dtype)
        costs = costs - penalty.get("entropy", 0) * entropy
        costs = costs + penalty.get("kl_cov", 0) * drift.abs() * marked[trained]
        if algorithm == "gspo":  # one ratio and one weight a sequence
            drift, lag = drift.mean().expand(len(trained)), lag.mean().expand(len(trained))
        weight = weights(lag, correction.bounds) * kept[trained]
        if correction.negative_mask and (behaviour - current.detach()).mean() > correction.negative_mask:
            weight = weight * (advantage >= 0)
        clipped = torch.clamp(drift.exp(), 1 - low, 1 + high)
        gain = torch.min(drift.exp() * advantage, clipped * advantage)
        if config.ppo.dual_clip:
            gain = torch.where(advantage < 0, torch.max(gain, config.ppo.dual_clip * advantage), gain)
        if algorithm == "cispo":
            gain = clipped.detach() * advantage * current
        if algorithm == "sapo":
            gates = {k: torch.sigmoid(k * (drift.exp() - 1)) * 4 / k for k in (1.0, 1.05)}
            gain = torch.where(advantage > 0, gates[1.0], gates[1.05]) * advantage
        sums.append((costs - weight * gain).sum())
        lengths.append(len(trained))
        episodes.append(whole[t.uid])
    parts = sum(length / episode for length, episode in zip(lengths, episodes, strict=True))
    if algorithm in ("grpo", "gspo", "sapo"):
        return sum(total / episode for total, episode in zip(sums, episodes, strict=True)) / parts
    if algorithm == "dr_grpo":
        return sum(sums) / parts / config.rollout.max_new_tokens
    return sum(sums, torch.zeros(())) / max(sum(lengths), 1)


def balance_loss(model: torch.nn.Module, trajectories: list[Trajectory], microbatches: list[list[int]]) -> Tensor:
    """Returns the mean over trained tokens of each micro-batch's loss by Switch Transformer, Equation 4."""
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


class Adam:
    """A model with torch's AdamW."""

    def __init__(self, model: torch.nn.Module, config: Config, lr: float):
        self.model, self.config, settings = model, config, config.optimizer
        decay = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decay, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr, (settings.beta1, settings.beta2), settings.eps)

    def step(self, loss: Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
        self.optimizer.step()
        return float(norm)


class Learner(Adam):
    """A Hugging Face model that is trained with plain code."""

    def __init__(self, model: torch.nn.Module, config: Config):
        super().__init__(model, config, config.optimizer.lr)
        teacher = config.ppo.penalty.kl_folder
        self.reference = load_oracle(Path(teacher)) if teacher else copy.deepcopy(model)

    def critic_update(self, valued: Valued, trajectories: list[Trajectory], minibatches: list[list[int]]) -> None:
        critic = Adam(valued, self.config, self.config.ppo.critic.lr)
        before, returns, _ = assess(valued, trajectories, self.config)
        for members in minibatches:
            chosen = [[items[i] for i in members] for items in (trajectories, before, returns)]
            critic.step(critic_loss(valued, *chosen, self.config))

    def ppo_update(self, trajectories: list[Trajectory], minibatches: list[list[int]], values=None) -> list[float]:
        """Makes one PPO update and returns the gradient norms. `minibatches`: the indices of their trajectories.

        `values`: the advantages of each trajectory's trained tokens; the algorithm's by default.
        """
        config, temperature = self.config, self.config.rollout.temperature
        values = values or advantages(trajectories, config.ppo.algorithm)
        if not config.ppo.rewards:
            values = [0.0 * value for value in values]
        if config.ppo.objective == "naive":
            proximals = [torch.from_numpy(t.logprobs.copy()) for t in trajectories]
        else:
            with torch.no_grad():
                proximals = [response_logprobs(self.model, t, temperature) for t in trajectories]
        with torch.no_grad():
            references = [response_logprobs(self.reference, t, temperature) for t in trajectories]
        if config.ppo.penalty.asks_teacher:
            untold = torch.zeros(100)
            references = [torch.from_numpy(t.reference) if len(t.reference) else untold for t in trajectories]
        norms = []
        for taken, members in enumerate(minibatches):
            chosen = [[items[i] for i in members] for items in (trajectories, values, proximals, references)]
            norms.append(self.step(ppo_loss(self.model, *chosen, config, taken, whole=in_episodes(trajectories))))
        return norms

    def sft_step(self, examples: list[Sample]) -> float:
        losses = []
        for example in examples:
            logprobs = distributions(self.model, example.tokens, 1.0)
            labels = torch.from_numpy(example.tokens[1:].astype(np.int64))
            losses.append(-logprobs.gather(1, labels[:, None])[example.trained - 1, 0])
        loss = torch.cat(losses).mean()
        self.step(loss)
        return float(loss.detach())

"""How long an update takes at least, by a few formulas: microseconds a layout, where the simulator takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_megatron.config import Config
from areal_megatron.planning.forecast.engine_time import EngineTime
from areal_megatron.planning.forecast.lengths import AnswerLengths
from areal_megatron.planning.forecast.weights_time import WeightsTime

_ROUNDS = 6
"""Times that the length of an update, on which the number of running answers depends, is put in for a guess."""
_NEARLY = 0.8
"""An engine lacks memory if it runs more than this share of the answers that fit its memory."""
FULL = 0.9
"""The share of a KV cache that answers of the mean length may fill: they do not all have the mean."""


@dataclass(frozen=True)
class BatchLengths:
    """The lengths of answers as they matter for a batch, in tokens; means over several batches."""

    prompt: float
    answer: float
    context: float
    """Tokens before the next one of a running answer, its prompt included."""
    longest: float
    """The longest answer of a batch."""
    group_longest: float
    """The longest answer to a prompt."""

    @classmethod
    def of(cls, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> BatchLengths:
        """Returns the lengths of batches, given the prompts' lengths [groups] and the answers' [groups, n] of each."""
        prompts = np.concatenate([prompts for prompts, _ in batches]).astype(np.float64)
        answers = np.concatenate([answers for _, answers in batches]).astype(np.float64)
        context = (answers * (prompts[:, None] + answers / 2)).sum() / answers.sum()
        longest = np.mean([own.max() for _, own in batches])
        found = prompts.mean(), answers.mean(), context, longest, answers.max(axis=1).mean()
        return cls(*map(float, found))


def draw_batches(
    lengths: AnswerLengths, config: Config, answers: int = 4096, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns batches with `answers` answers in all, at least one batch: lengths of prompts int64 [groups] and of
    answers int64 [groups, n], equal to the first ones of a simulation with this seed."""
    drawn = []
    for batch in range(max(1, answers // config.batch_size)):
        first = batch * config.groups_per_batch
        numbers = range(first, first + config.groups_per_batch)
        groups = [lengths.group(np.random.default_rng((seed, number)), config.rollout.group_size) for number in numbers]
        drawn.append((np.array([prompt for prompt, _ in groups]), np.stack([own for _, own in groups])))
    return drawn


@dataclass(frozen=True)
class Pace:
    """The least that an update takes for each reason, in seconds."""

    training: float
    """Trainers have that much to do."""
    network: float
    """… and wait so long for weights that are still on their way to engines."""
    decoding: float
    """Engines sample a batch."""
    tail: float
    """The longest answers end within the staleness bound."""
    engines_lack: str
    """What keeps engines from running more answers at once: memory, staleness, or nothing ("")."""
    running: float
    """Answers that an engine runs at once."""
    again: float
    """Tokens that it prefills once more when weights change, each answer with its prompt."""
    again_s: float
    """The seconds that takes."""

    @property
    def update(self) -> float:
        """Seconds from one update to the next."""
        return max(self.training + self.network, self.decoding, self.tail)

    @property
    def binds(self) -> str:
        """The reason that decides: memory, decoding, training, tail or network."""
        if self.update == self.training + self.network:
            return "network" if self.network > 0.1 * self.training else "training"
        if self.update == self.decoding:
            return {"memory": "memory", "staleness": "tail"}.get(self.engines_lack, "decoding")
        return "tail"


def pace(
    config: Config,
    lengths: BatchLengths,
    engine: EngineTime,
    weights: WeightsTime,
    kv_tokens: float,
    training: float,
    reward_s: float = 1.0,
) -> Pace:
    """Returns the pace of a config's run whose trainers take `training` seconds for a batch.

    Of the simulator's decisions it has sums alone: an answer that is admitted with version v has until the end of
    update v + η to be sampled, scored and trained, and of the (η + 1) · B answers that may be under way one batch is
    being trained and half a batch waits for its others. How many answers run decides how long a step takes, and the
    reverse, so that it is put in a few times.
    """
    rollout, batch = config.rollout, config.batch_size
    eta, n, engines = rollout.max_staleness, rollout.group_size, rollout.engines
    network = max(0.0, weights.transfer - training / config.ppo.minibatches)
    prompts = batch / n / engines * engine.prefill(lengths.prompt, lengths.prompt**2 / 2)
    held, most = FULL * kv_tokens / lengths.context, float(rollout.max_running)
    whole_groups = lengths.answer / lengths.group_longest  # a group is under way until its longest answer has ended
    update, decoding, tail, running, admitted, again, again_s = training + network, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0
    for _ in range(_ROUNDS):
        under_way = eta + 0.5 - min(training / update, 1.0)
        admitted = max(under_way * whole_groups, lengths.answer / lengths.longest) * batch / engines
        running = max(min(most, held, admitted), 1.0)
        step = engine.step(running) + engine.per_token * running * lengths.context
        again = running * lengths.context * (rollout.kv_policy == "recompute")
        again_s = engine.prefill(again, again * lengths.context * 2 / 3)
        pause = weights.commit + again_s
        decoding = batch * lengths.answer / engines / running * step + prompts + pause
        ends = lengths.longest * step * (1 + pause / max(update, pause)) + reward_s
        tail = (ends + weights.transfer + weights.commit + training) / (eta + 1)
        update = max(training + network, decoding, tail)
    lack = "staleness" if running == admitted else "memory" if running > _NEARLY * held else ""
    return Pace(training, network, decoding, tail, lack, running, again, again_s)

"""Supervised training of a trainer rank: an optimizer step on a batch of items, and the figures of held-out ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np
from torch import Tensor

from areal_megatron.config import TrainerConfig
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.observe.timeline import Timeline
from areal_megatron.packing.partition import partition
from areal_megatron.trainer import pipeline
from areal_megatron.trainer.batch import RowPart, pack
from areal_megatron.trainer.copies import to_device
from areal_megatron.trainer.learner import Learner, Steps, step_metrics
from areal_megatron.trainer.lessons import Item, Lesson, Sequences
from areal_megatron.trainer.parallel import Parallel
from areal_megatron.trainer.reference import Reference
from areal_megatron.trainer.residual import Residual
from areal_megatron.trainer.token_sums import TokenSums

_EVALUATED_AT_ONCE = 1024
"""Items whose tokens are on the device at the same time."""


class Supervised:
    """Teaches a model a lesson. The batches are the same on all ranks; each takes its replica's part."""

    def __init__(
        self,
        settings: TrainerConfig,
        learner: Learner,
        lesson: Lesson,
        reference: Reference | None,
        parallel: Parallel,
        part: RowPart,
        flops: SequenceFlops,
        residual: Residual,
        timeline: Timeline,
    ):
        self._settings, self._learner, self._lesson, self._reference = settings, learner, lesson, reference
        self._parallel, self._part, self._flops, self._timeline = parallel, part, flops, timeline
        self._residual = residual
        self._sums = ("tokens", "loss", *lesson.sums)

    def step(self, items: Sequence[Item], before_step: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Makes one optimizer step on a batch, and returns its metrics.

        `before_step` is called right before parameters change.
        """
        start, sums, steps = time.monotonic(), TokenSums(), Steps(before_step)
        self._residual.begin()
        trained = sum(len(places) for item in items for _, places in self._lesson.sequences(item))
        factor = self._lesson.scale(items, trained)
        work = [
            (own.microbatch, partial(self._scaled_loss, own=own, sums=sums, factor=factor)) for own in self._rows(items)
        ]
        with self._timeline.device_span("train", tokens=pipeline.token_count(work)):
            norm = self._learner.gradient(work)
        self._learner.step(norm, steps)
        self._learner.optimizer.settle()
        watched = self._residual.add_to(sums)
        totals = sums.totals(self._parallel, self._sums, watched)
        figures = self._lesson.figures(totals) | {name: totals[name] for name in watched}
        return figures | step_metrics(self._learner.optimizer, steps, totals["tokens"], start)

    def evaluate(self, files: Mapping[str, Sequence[Item]]) -> dict[str, object]:
        """Returns the figures of held-out items, of all together and under `files` of each file, with counts of
        `items`; the same on all ranks."""
        found, everything = {}, dict.fromkeys(self._sums, 0.0)
        for name, items in files.items():
            sums = TokenSums()
            for first in range(0, len(items), _EVALUATED_AT_ONCE):
                rows = self._rows(items[first : first + _EVALUATED_AT_ONCE])
                loss = partial(self._lesson.loss, sums=sums, held_out=True)
                work = [(own.microbatch, partial(loss, own=own)) for own in rows]
                with self._timeline.device_span("evaluate", tokens=pipeline.token_count(work)):
                    pipeline.forward(self._learner.chunks, work)
            totals = sums.totals(self._parallel, self._sums)
            everything = {key: everything[key] + value for key, value in totals.items()}
            found[name] = self._lesson.figures(totals) | {"items": len(items)}
        count = sum(map(len, files.values()))
        return {**self._lesson.figures(everything), "items": count, "files": found}

    def _scaled_loss(self, output: Tensor, own: Sequences, sums: TokenSums, factor: float) -> Tensor:
        return factor * self._lesson.loss(output, own, sums, held_out=False)

    def _rows(self, items: Sequence[Item]) -> list[Sequences]:
        """The micro-batches of this replica, with what the frozen model makes of them."""
        rows = [self._row([items[i] for i in members]) for members in self._plan(items)[self._parallel.replica]]
        if self._reference:
            asked = [own.microbatch for own in rows]
            with self._timeline.device_span("reference", tokens=sum(row.tokens.numel() for row in asked)):
                for own, logprobs in zip(rows, self._reference.logprobs(asked), strict=False):
                    own.reference = logprobs
        return rows

    def _row(self, items: Sequence[Item]) -> Sequences:
        sequences = list(chain.from_iterable(map(self._lesson.sequences, items)))
        trained = [places for _, places in sequences]
        microbatch = pack([tokens for tokens, _ in sequences], trained, self._part)
        members = np.repeat(np.arange(len(sequences)), [len(places) for places in trained])
        return Sequences(items, microbatch, to_device(members, self._part.device), len(sequences))

    def _plan(self, items: Sequence[Item]) -> list[list[list[int]]]:
        """The items by [replica][micro-batch]: an item's sequences stay together."""
        replicas, multiple = self._settings.dp, self._settings.microbatch_multiple
        if len(items) < replicas:
            return [[[i] if i < len(items) else [], *[[]] * (multiple - 1)] for i in range(replicas)]
        sizes = [[(len(tokens), len(places)) for tokens, places in self._lesson.sequences(item)] for item in items]
        lengths = [sum(length for length, _ in own) for own in sizes]
        costs = [self._flops(*np.transpose(own)).sum() for own in sizes]
        cap = self._settings.microbatch_tokens
        plan = partition(lengths, replicas, 1, cap, seed=0, costs=costs, multiple=multiple)
        return [microbatches for [microbatches] in plan]

"""Forms the batch that the trainers ask for, splits it over their replicas and keeps the account of each update."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from areal_megatron.config import Config
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.schedule import Schedule
from areal_megatron.data.dumps import Dump, write
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.partition import split
from areal_megatron.protocol import EncodedBatch, NextBatch, NotYet, PublishAgain, Refused, Stop, Trained, encode_batch

log = logging.getLogger(__name__)


class Stopwatch:
    """Sums the time between `start` and `stop`; starting twice changes nothing."""

    def __init__(self):
        self._total, self._since = 0.0, None

    def start(self) -> None:
        self._since = self._since or time.monotonic()

    def stop(self) -> None:
        if self._since is not None:
            self._total += time.monotonic() - self._since
            self._since = None

    def take(self) -> float:
        total, self._total = self._total, 0.0
        return total


def ask_again_s(config: Config) -> float:
    """How long a trainer's question waits for its answer before it is told to ask again, well before it gives up."""
    return min(5.0, config.machine.peer_timeout_s / 4)


class Batches:
    """One batch at a time: asked for, formed, handed to every replica, trained."""

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        generation: Generation,
        flops: SequenceFlops,
        first: int = 0,
        dumps: Path | None = None,
    ):
        """`flops`: what a trajectory costs the trainers; `first`: batches that the run has trained before; `dumps`:
        folder in which every batch is kept."""
        self._config, self._schedule, self._generation, self._flops = config, schedule, generation, flops
        self.number = first
        self._batch: asyncio.Future[tuple[list[EncodedBatch], dict[str, Any]]] | None = None
        """The parts of what is in training, or soon will be, and its numbers."""
        self._dumps = dumps
        self._dump: asyncio.Future | None = None
        """The writing of the batch that was formed last."""
        self._formed = asyncio.Event()
        self._asked = False
        self.stopping = False
        """No further batch is formed."""
        self._to_publish: set[int] = set()
        """Replicas that are yet to be told to publish again. All are told before any has the next batch, or Stop."""
        self._trainer_waits, self._straggler = Stopwatch(), Stopwatch()
        self._last_trained = time.monotonic()

    async def next(self, request: NextBatch) -> EncodedBatch | NotYet | Stop | PublishAgain | Refused:
        """The replica's part as soon as the batch has been formed; NotYet well before the trainer gives up."""
        if request.number == self.number + 1:  # this replica is done with a batch that rank 0 has yet to report
            await asyncio.sleep(0.05)
            return NotYet()
        if request.number != self.number or request.version != self._schedule.version:
            return Refused(
                f"batch {request.number} of version {request.version} is not next: "
                f"that is batch {self.number} of version {self._schedule.version}"
            )
        if not 0 <= request.replica < self._config.trainer.dp:
            return Refused(f"there is no replica {request.replica}, trainer.dp is {self._config.trainer.dp}")
        if request.replica in self._to_publish:
            self._to_publish.discard(request.replica)
            return PublishAgain()
        self._asked = True
        self.try_form()
        try:
            async with asyncio.timeout(ask_again_s(self._config)):
                await self._formed.wait()
        except TimeoutError:
            return NotYet()
        if self._batch is None and self._to_publish:
            return NotYet()
        if self._batch is None and self.stopping:
            return Stop()
        if self._batch is None:
            return Refused(f"batch {request.number} was trained before replica {request.replica} had its part")
        parts, _ = await asyncio.shield(self._batch)
        return parts[request.replica]

    async def formed(self) -> None:
        """Returns when the batch that trains next has been formed, or when no further one is."""
        await self._formed.wait()

    @contextmanager
    def trainers_waiting(self) -> Iterator[None]:
        """Meanwhile they wait for something else than a batch."""
        self._trainer_waits.start()
        try:
            yield
        finally:
            self._trainer_waits.stop()

    def try_form(self) -> None:
        """Forms the batch if trainers wait for it and the schedule allows it."""
        if self._batch is not None or not self._asked or self.stopping or self._to_publish:
            return
        self._trainer_waits.start()
        groups = self._schedule.form_batch()
        if groups is None:
            if self._schedule.stragglers():
                self._straggler.start()
            return
        self._trainer_waits.stop()
        self._straggler.stop()
        trajectories = [trajectory for group in groups for trajectory in self._generation.take(group)]
        # A thread: thousands of answers take longer than requests should wait for the event loop.
        self._batch = asyncio.ensure_future(
            asyncio.to_thread(self._pack, trajectories, self.number, self._schedule.version)
        )
        self._batch.add_done_callback(lambda _: self._formed.set())
        if self._dumps:
            dump = Dump(number=self.number, version=self._schedule.version, trajectories=trajectories)
            self._dump = asyncio.ensure_future(asyncio.to_thread(write, dump, self._dumps))

    def _pack(
        self, trajectories: list[Trajectory], number: int, version: int
    ) -> tuple[list[EncodedBatch], dict[str, Any]]:
        config = self._config
        parts = split(
            trajectories,
            version=version,
            replicas=config.trainer.dp,
            seed=config.seed + number,
            minibatches=config.ppo.minibatches,
            cap=config.trainer.microbatch_tokens,
            flops=self._flops,
            multiple=config.trainer.microbatch_multiple,
        )
        return [encode_batch(part) for part in parts], describe(trajectories, version, config.reward.right)

    def trained(self, message: Trained) -> dict[str, Any] | Refused:
        """Moves the schedule on; the numbers of the update, the trainer's own among them."""
        in_training = self._batch is not None and self._batch.done()
        if not in_training or message.number != self.number or message.version != self._schedule.version:
            return Refused(
                f"batch {message.number} of version {message.version} is not in training: "
                f"that is batch {self.number} of version {self._schedule.version}"
            )
        if message.applied:
            self._schedule.applied()
        else:
            self._schedule.rejected("non-finite gradients")
        now = time.monotonic()
        elapsed, self._last_trained = now - self._last_trained, now
        wait = self._trainer_waits.take()
        _, described = self._batch.result()
        account = described | {
            "effective_tokens_per_s": described["trained_tokens"] / elapsed if message.applied else 0.0,
            "straggler_wait_s": self._straggler.take(),
            "trainer_wait_s": wait,
            "trainer_idle_share": min(1.0, wait / elapsed),
            "update_s": elapsed,
        }
        self.number += 1
        self._batch, self._asked = None, False
        if not self.stopping:
            self._formed = asyncio.Event()
        return account | message.metrics

    async def dumped(self) -> None:
        """Returns when the batch that was formed last is on disk, or cannot be written, which the run survives."""
        writing, self._dump = self._dump, None
        try:
            if writing:
                await writing
        except OSError as e:
            log.error("batch %d is not kept: %s", self.number, e)

    def publish_again(self) -> bool:
        """Has the trainers publish the current version again, unless one of them may be training: whether it has."""
        if self._batch is not None or self.stopping or self._to_publish:
            return False
        self._to_publish = set(range(self._config.trainer.dp))
        return True

    def stop(self) -> None:
        """Replicas get the batch that has been formed, if there is one, and Stop instead of the next."""
        self.stopping = True
        self._formed.set()

    def begin(self) -> None:
        """Generation starts now: waiting and tokens per second count from here."""
        self._last_trained = time.monotonic()
        self._trainer_waits = Stopwatch()


def describe(trajectories: Sequence[Trajectory], version: int, correct: float) -> dict[str, Any]:
    """Numbers of one batch: rewards, lengths in tokens, staleness in versions."""
    lengths = np.array([len(t.response) for t in trajectories])
    rewards = np.array([t.reward for t in trajectories])
    staleness = Counter(version - t.admission_version for t in trajectories)
    trained = np.concatenate([t.versions[t.loss_mask == 1] for t in trajectories])
    return {
        "reward_mean": float(rewards.mean()),
        "accuracy": float(np.mean(rewards >= correct)),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": int(lengths.max()),
        "truncated_share": float(np.mean([t.truncated for t in trajectories])),
        "staleness_mean": sum(k * count for k, count in staleness.items()) / len(trajectories),
        "staleness_max": max(staleness),
        "staleness_histogram": {str(k): staleness[k] for k in sorted(staleness)},
        "token_staleness_histogram": {str(k): int(n) for k, n in enumerate(np.bincount(version - trained)) if n},
        "versions_per_answer_mean": float(np.mean([len(np.unique(t.versions)) for t in trajectories])),
        "turns_mean": float(np.mean([_answers(t.loss_mask) for t in trajectories])),
        "trained_tokens": len(trained),
    }


def _answers(loss_mask: np.ndarray) -> int:
    """Runs of trained tokens."""
    return int(np.count_nonzero(loss_mask[1:] > loss_mask[:-1])) + int(np.count_nonzero(loss_mask[:1]))

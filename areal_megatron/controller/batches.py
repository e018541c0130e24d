"""Forms the batch that the trainers ask for, splits it over their replicas and keeps the account of each update."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from areal_megatron.config import Config
from areal_megatron.config.algorithms import PUBLISHED
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.probe import Probe
from areal_megatron.controller.service import Refusal
from areal_megatron.data.dumps import Dump, write
from areal_megatron.data.trajectory import Excerpt, Trajectory
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.partition import split
from areal_megatron.protocol import EncodedBatch, NextBatch, NotYet, PublishAgain, Stop, Trained, encode_batch

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
        """Returns the sum in seconds, and begins another."""
        total, self._total = self._total, 0.0
        return total


class BatchSchedule(Protocol):
    """The part of Schedule that Batches needs: picks the groups that train `version` and records the outcome."""

    version: int

    @property
    def held_up_by(self) -> int | None: ...
    def form_batch(self) -> list[Any] | None: ...
    def applied(self) -> None: ...
    def rejected(self, reason: str) -> None: ...


class Batches:
    """One batch at a time: asked for, formed, handed to every replica, trained."""

    def __init__(
        self,
        config: Config,
        schedule: BatchSchedule,
        take: Callable[[Any], list[Trajectory]],
        flops: SequenceFlops,
        first: int = 0,
        dumps: Path | None = None,
        probe: Probe | None = None,
        environment_of: Mapping[int, str] | None = None,
    ):
        """`take` hands out the trajectories of a group of the schedule, `flops` is the trainers' cost of one, `first`
        the number of batches trained before, `dumps` the folder to keep every batch in, `probe` the comparison of its
        version with the engines', and `environment_of` the name of each prompt's environment, by id, in a run with
        several."""
        self._config, self._schedule, self._take, self._flops = config, schedule, take, flops
        self._probe, self._environment_of = probe, environment_of or {}
        self.number = first
        self._batch: asyncio.Future[tuple[list[EncodedBatch], dict[str, Any]]] | None = None
        """The parts and the figures of the batch that is in training, or soon will be."""
        self._dumps = dumps
        self._dump: asyncio.Future | None = None
        """The writing of the batch that was formed last, or of one before that still holds up."""
        self._changed = Changed()
        """Notified when a replica that waits in `next` may be answered."""
        self._asked = False
        self.stopping = False
        """No further batch is formed."""
        self._to_publish: set[int] = set()
        """Replicas that are yet to be told to publish again. All are told before any has the next batch, or Stop."""
        self._trainer_waits, self._straggler = Stopwatch(), Stopwatch()
        self._last_trained = time.monotonic()

    async def run(self, changed: Changed) -> None:
        """Forms every batch as soon as trainers wait for it and the schedule allows it, for ever; `changed` is notified
        when the schedule may have come to allow it."""
        while True:
            self._try_form()
            await changed.wait()

    async def next(self, request: NextBatch) -> EncodedBatch | PublishAgain | Stop | NotYet:
        """Returns the replica's part as soon as the batch has been formed; NotYet well before the trainer gives up.

        Raises Refusal if another batch is next.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.machine.ask_again_s):
                while (answer := self._answer(request)) is None:
                    await self._changed.wait()
                return answer
        return NotYet()

    def _answer(self, request: NextBatch) -> EncodedBatch | PublishAgain | Stop | None:
        """None if the replica has to wait."""
        if request.number == self.number + 1:  # its last batch has yet to be reported by rank 0
            return None
        if request.number != self.number or request.version != self._schedule.version:
            raise Refusal(
                f"batch {request.number} of version {request.version} is not next: "
                f"that is batch {self.number} of version {self._schedule.version}"
            )
        if not 0 <= request.replica < self._config.trainer.dp:
            raise Refusal(f"there is no replica {request.replica}, trainer.dp is {self._config.trainer.dp}")
        if request.replica in self._to_publish:
            self._to_publish.discard(request.replica)
            self._changed.notify()
            return PublishAgain()
        if not self._to_publish and self._batch is None:
            if self.stopping:
                return Stop()
            self._asked = True
            self._try_form()
        if self._batch is None or not self._batch.done():
            return None
        parts, _ = self._batch.result()
        return parts[request.replica]

    def _try_form(self) -> None:
        if self._batch is not None or not self._asked or self.stopping or self._to_publish:
            return
        self._trainer_waits.start()
        groups = self._schedule.form_batch()
        if groups is None:
            if self._schedule.held_up_by is not None:
                self._straggler.start()
            return
        self._trainer_waits.stop()
        self._straggler.stop()
        trajectories = [trajectory for group in groups for trajectory in self._take(group)]
        version = self._schedule.version
        probed = self._probe.begin(version, trajectories) if self._probe else []
        # A thread: thousands of answers take longer than requests should wait for the event loop.
        self._batch = asyncio.ensure_future(asyncio.to_thread(self._pack, trajectories, self.number, version, probed))
        self._batch.add_done_callback(lambda _: self._changed.notify())
        if self._dumps:
            self._begin_dump(trajectories, self._dumps)

    def _begin_dump(self, trajectories: list[Trajectory], folder: Path) -> None:
        if self._dump is not None:  # at most one is in memory
            log.error("batch %d is not kept: the one before is still being written", self.number)
            return
        dump = Dump(number=self.number, version=self._schedule.version, trajectories=trajectories)
        most = self._config.rollout.dump_gb * 1e9 or math.inf
        self._dump = asyncio.ensure_future(asyncio.to_thread(write, dump, folder, most))

    def _pack(
        self, trajectories: list[Trajectory], number: int, version: int, probed: list[Excerpt]
    ) -> tuple[list[EncodedBatch], dict[str, Any]]:
        config, ppo = self._config, self._config.ppo
        parts = split(
            trajectories,
            version=version,
            replicas=config.trainer.dp,
            seed=config.seed + number,
            minibatches=config.ppo.minibatches,
            cap=config.trainer.microbatch_tokens,
            flops=self._flops,
            multiple=config.trainer.microbatch_multiple,
            share_prompts=config.trainer.share_prompts,
            within_group=PUBLISHED[ppo.algorithm].within_group and not ppo.all_count,
        )
        for replica, part in enumerate(parts):
            part.probe = probed[replica :: len(parts)]
            part.probe_tokens = sum(int(excerpt.compared.sum()) for excerpt in probed)
        described = describe(trajectories, version) | means_of_terms(trajectories)
        described |= by_environment(trajectories, self._environment_of)
        return [encode_batch(part) for part in parts], described

    def trained(self, message: Trained) -> dict[str, Any]:
        """Moves the schedule on and returns the figures of the update, the trainer's own among them.

        Raises Refusal if the batch is not in training.
        """
        batch = self._batch if self._batch and self._batch.done() else None
        if batch is None or message.number != self.number or message.version != self._schedule.version:
            raise Refusal(
                f"batch {message.number} of version {message.version} is not in training: "
                f"that is batch {self.number} of version {self._schedule.version}"
            )
        if self._probe:
            self._probe.trained(message.version, message.probe)
        if message.applied:
            self._schedule.applied()
        else:
            self._schedule.rejected("non-finite gradients")
        now = time.monotonic()
        elapsed, self._last_trained = now - self._last_trained, now
        wait = self._trainer_waits.take()
        _, described = batch.result()
        account = described | {
            "effective_tokens_per_s": described["trained_tokens"] / elapsed if message.applied else 0.0,
            "straggler_wait_s": self._straggler.take(),
            "trainer_wait_s": wait,
            "trainer_idle_share": min(1.0, wait / elapsed),
            "update_s": elapsed,
        }
        self.number += 1
        self._batch, self._asked = None, False
        self._changed.notify()
        return account | message.metrics | (self._probe.account() if self._probe else {})

    async def dumped(self) -> None:
        """Returns when the batch formed last is on disk, or cannot be written, or takes long: the run survives that."""
        if self._dump is None:
            return
        done, _ = await asyncio.wait([self._dump], timeout=self._config.machine.ask_again_s)
        if done:
            writing, self._dump = self._dump, None
            try:
                writing.result()
            except OSError as e:
                log.error("batch %d is not kept: %s", self.number, e)

    def publish_again(self) -> bool:
        """Has the trainers publish the current version again. Returns False if one of them may be training."""
        if self._batch is not None or self.stopping or self._to_publish:
            return False
        self._to_publish = set(range(self._config.trainer.dp))
        self._changed.notify()
        return True

    def stop(self) -> None:
        """Replicas get the batch that has been formed, if there is one, and Stop instead of the next."""
        self.stopping = True
        self._changed.notify()

    def begin(self) -> None:
        """Has waiting and tokens per second count from here, where generation starts."""
        self._last_trained = time.monotonic()
        self._trainer_waits = Stopwatch()


def describe(trajectories: Sequence[Trajectory], version: int) -> dict[str, Any]:
    """Returns the figures of one batch: rewards, lengths in tokens, staleness in versions.

    An episode of several samples counts once in rewards and staleness. Means over answers of which there are
    none are left out.
    """
    lengths = np.array([len(t.response) for t in trajectories])
    known = np.array([not t.failed for t in trajectories])
    right = np.array([t.correct for t in trajectories])
    episodes = each_episode(trajectories)
    staleness = Counter(version - t.admission_version for t in episodes)
    trained = np.concatenate([t.versions[t.loss_mask == 1] for t in trajectories])
    return {
        "reward_mean": float(np.mean([t.reward for t in episodes if not t.failed])),
        "accuracy": float(np.mean([t.correct for t in episodes if not t.failed])),
        **{
            f"response_tokens_{name}": float(lengths[chosen].mean())
            for name, chosen in (("right", known & right), ("wrong", known & ~right))
            if chosen.any()
        },
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": int(lengths.max()),
        "truncated_share": float(np.mean([t.truncated for t in episodes])),
        "staleness_mean": sum(k * count for k, count in staleness.items()) / len(episodes),
        "staleness_max": max(staleness),
        "staleness_histogram": {str(k): staleness[k] for k in sorted(staleness)},
        "token_staleness_histogram": {str(k): int(n) for k, n in enumerate(np.bincount(version - trained)) if n},
        "versions_per_answer_mean": float(np.mean([len(np.unique(t.versions)) for t in trajectories])),
        "turns_mean": sum(t.turns for t in trajectories) / len(episodes),
        "samples_per_episode_mean": len(trajectories) / len(episodes),
        "trained_tokens": len(trained),
    }


def each_episode(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns one sample of each episode: what is said of the episode as a whole is in all of them."""
    return list({t.uid: t for t in trajectories}.values())


def means_of_terms(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean of each term that a group function has added to rewards; it is 0 where it was not returned."""
    known = [t.terms for t in each_episode(trajectories) if not t.failed]
    names = sorted({name for terms in known for name in terms})
    return {f"reward_{name}_mean": sum(terms.get(name, 0.0) for terms in known) / len(known) for name in names}


def by_environment(trajectories: Sequence[Trajectory], environment_of: Mapping[int, str]) -> dict[str, float]:
    """Returns figures of each environment that is in the batch, as NAME/ENVIRONMENT; none without environments.

    Means over answers of which there are none are left out.
    """
    found, whole = {}, len(each_episode(trajectories))
    for name in sorted(set(environment_of.values())):
        own = [t for t in trajectories if environment_of[t.prompt_id] == name]
        episodes = each_episode(own)
        known = [t for t in episodes if not t.failed]
        found[f"answer_share/{name}"] = len(episodes) / whole
        if own:
            found[f"response_tokens_mean/{name}"] = float(np.mean([len(t.response) for t in own]))
            found[f"truncated_share/{name}"] = float(np.mean([t.truncated for t in episodes]))
        if known:
            found[f"accuracy/{name}"] = float(np.mean([t.correct for t in known]))
            found[f"reward_mean/{name}"] = float(np.mean([t.reward for t in known]))
    return found

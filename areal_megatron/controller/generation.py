"""Keeps the engines busy with prompts, as the schedule allows, and turns answers into scored trajectories."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import numpy as np
from msgspec.structs import asdict

from areal_megatron.config import Config
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.difficulty import Difficulty, Measured, SampledGroups
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.failures import FailedAnswers
from areal_megatron.controller.sampler import Sampler
from areal_megatron.controller.schedule import Group, Schedule
from areal_megatron.controller.state import ControllerState, InterruptedGroup
from areal_megatron.controller.teacher import Teachers
from areal_megatron.data.prompts import Prompt, cursor, drawing_of
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.observe.status import EngineState
from areal_megatron.process.lateness import within
from areal_megatron.run.folder import RunError
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import sampling_seed
from areal_megatron.workflows.scoring import Score, ScoredEpisode
from areal_megatron.workflows.single_turn import AnswersInterrupted

log = logging.getLogger(__name__)
_INTERRUPT_S = 10.0
_REST_S = 1e-5
"""How long others have the event loop, for each engine, before all of them are looked at again: of thousands that takes
milliseconds, and something changes all the time."""
_TOO_LONG = "longer than data.max_prompt_tokens"
_FEWEST_SCORED = 2
"""Answers of a group whose rewards are known; with fewer there is nothing to compare."""


class Generation:
    """Owns the cursor, the requests in flight and the samples of finished groups."""

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        sampler: Sampler,
        prompts: list[Prompt],
        changed: Changed,
        tokenizer: Tokenizer | None = None,
        teachers: Teachers | None = None,
    ):
        """`changed` says when another group may be admitted, and is notified of groups that finish; checkpoints name
        the `tokenizer` of the prompts. `teachers`: whom the trainers need log-probabilities of."""
        self._config, self._schedule, self._sampler, self._changed = config, schedule, sampler, changed
        self._prompts, self._teachers = prompts, teachers
        self.drawing = drawing_of(config, prompts, tokenizer)
        """How prompts are drawn, from the beginning."""
        self._by_id = {prompt.id: prompt for prompt in prompts}
        self._cursor = cursor(config, prompts)
        self._difficulty = Difficulty(config.rollout)
        self._failed_answers = FailedAnswers(config)
        self._sampled = SampledGroups()
        self._trajectories: dict[int, list[Trajectory]] = {}
        """Trajectories of finished groups, by number of the group."""
        self._again: deque[tuple[int, int]] = deque()
        """(epoch, prompt_id) of groups that are to be admitted before the cursor's."""
        self._interrupted: dict[int, InterruptedGroup] = {}
        """Answers of interrupted groups, by number of the group."""
        self._interrupting = False
        self._tasks: defaultdict[int, set[asyncio.Task]] = defaultdict(set)
        """Running groups, by engine."""
        self.prompts_too_long = 0

    def save(self) -> ControllerState:
        """Returns what a resumed run needs to continue from here; between two batches."""
        groups = self._schedule.running
        schedule = self._schedule.save(interrupted=groups.keys() & self._interrupted.keys())
        running = (
            (group.epoch, group.prompt_id) for number, group in groups.items() if number not in self._interrupted
        )
        drawing: dict[str, Any] = asdict(self.drawing) | {"cursor": self._cursor.at}
        return ControllerState(
            **drawing,
            again=[*running, *self._again],
            schedule=schedule,
            trajectories={group.number: self._trajectories[group.number] for group in schedule.finished},
            resumable={group.number: self._interrupted[group.number] for group in schedule.interrupted},
            group_size=self._config.rollout.group_size,
            prompts_too_long=self.prompts_too_long,
            pass_rates={prompt: measured.rate for prompt, measured in self._difficulty.measured.items()},
            measured_at={prompt: measured.version for prompt, measured in self._difficulty.measured.items()},
        )

    def restore(self, state: ControllerState) -> None:
        """Continues from what `save` returned, with this config's batch, group and bound."""
        n, saved = self._config.rollout.group_size, state.schedule
        whole = (group for group in saved.finished if len({t.uid for t in state.trajectories[group.number]}) == n)
        finished = [group for group in whole if self._is_scored(state.trajectories[group.number])]
        interrupted = [group for group in saved.interrupted if self._is_resumable(group, state.resumable)]
        kept = {group.number for group in (*finished, *interrupted)}
        lost = [group for group in (*saved.finished, *saved.interrupted) if group.number not in kept]
        admitted = -(-saved.admitted * state.group_size // n)  # so that no uid is given twice
        lost += self._schedule.restore(replace(saved, admitted=admitted, finished=finished, interrupted=interrupted))
        self._again.extend(sorted([*state.again, *((group.epoch, group.prompt_id) for group in lost)]))
        self._trajectories = {number: state.trajectories[number] for number in self._schedule.finished}
        self._interrupted = {number: state.resumable[number] for number in self._schedule.interrupted}
        if self._interrupted:
            log.info("resuming %s", _described(self._interrupted))
        self._cursor = cursor(self._config, self._prompts, state.cursor)
        self._difficulty = Difficulty(
            self._config.rollout,
            {prompt: Measured(rate, state.measured_at.get(prompt, 0)) for prompt, rate in state.pass_rates.items()},
        )
        self.prompts_too_long = state.prompts_too_long

    async def run(self) -> None:
        """Admits groups for ever, interrupted ones first. Raises EngineError when a request fails for the last
        time, and RunError when too many rewards do."""
        async with asyncio.TaskGroup() as groups:
            while True:
                for engine in self._free_engines():
                    group = self._next_group(engine)
                    engine.occupy(self._config.rollout.group_size)  # now: the task starts after further admissions
                    tasks = self._tasks[engine.index]
                    tasks.add(task := groups.create_task(self._run_group(engine, group)))
                    task.add_done_callback(tasks.discard)
                await self._changed.wait()
                await asyncio.sleep(_REST_S * len(self._sampler.engines))

    async def interrupt(self) -> None:
        """Ends what is running, for `save` to keep what has been sampled. Nothing is admitted any more."""
        if self._interrupting:
            return
        self._interrupting = True
        groups = [task for tasks in self._tasks.values() for task in tasks]
        aborts = [asyncio.create_task(_abort(engine)) for engine in self._sampler.engines if not engine.gone]
        if waiting := [*groups, *aborts]:
            with contextlib.suppress(TimeoutError):
                await within(_INTERRUPT_S, asyncio.wait(waiting))
        for abort in aborts:
            abort.cancel()
        log.info("kept %s", _described(self._interrupted))

    def lose(self, engine: Engine) -> None:
        """Has the engine's groups admitted again, elsewhere or when it is back."""
        if engine.index in self._schedule.engines:
            lost = self._schedule.remove_engine(engine.index)
            self._again.extendleft((group.epoch, group.prompt_id) for group in reversed(lost))
        for task in self._tasks[engine.index] - {asyncio.current_task()}:
            group = cast(Coroutine, task.get_coro())
            if inspect.getcoroutinestate(group) == inspect.CORO_CREATED:  # it will not release the engine
                engine.release(self._config.rollout.group_size)
            task.cancel()
        self._changed.notify()

    def account(self) -> dict[str, float]:
        """Returns what was sampled since the last call, as metrics."""
        sampled, self._sampled = self._sampled, SampledGroups()
        return sampled.metrics()

    def take(self, group: Group) -> list[Trajectory]:
        """Hands out the trajectories of a group that trains now."""
        return self._trajectories.pop(group.number)

    def _free_engines(self) -> Iterator[Engine]:
        """Yields the least loaded engine that may take a group, by Eq. 3, by rollout.max_running and by its share of
        all, until none may; it is to take the group before the next engine is asked for."""
        if self._interrupting:
            return
        room = self._config.rollout.max_running - self._config.rollout.group_size
        whole = [e for e in self._sampler.engines if e.state != EngineState.TORN]
        if not whole and all(e.version >= 0 for e in self._sampler.engines):  # one without any gets it again
            raise EngineError(
                "every engine holds a mixture of versions after a streamed update that failed (the "
                "reason is logged above); nothing can generate the batch that would bring the next"
            )
        free = {e.index: e for e in whole if e.index in self._schedule.engines and not e.draining}
        for index in self._schedule.takers(free, lambda index: free[index].running, room, self._sharing()):
            yield free[index]

    def _sharing(self) -> int:
        """Returns the number of engines that will take prompts soon, and so share the admitted groups. Starting engines
        count only before the first update; later a start may take minutes, and nobody waits for it."""
        absent = {EngineState.TORN} | ({EngineState.STARTING} if self._schedule.version else set())
        present = [e for e in self._sampler.engines if not (e.gone or e.draining or e.unreached)]
        return sum(e.state not in absent for e in present)

    def _next_group(self, engine: Engine) -> Group:
        if self._schedule.interrupted:
            return self._schedule.resume(engine.index)
        epoch, prompt = self._draw()
        return self._schedule.admit(engine.index, epoch, prompt.id)

    def _draw(self) -> tuple[int, Prompt]:
        """Returns (epoch, prompt) of the next prompt that fits; skips and counts longer ones. Raises RunError if none
        is left."""
        skipped = 0
        while True:
            if self._again:
                epoch, prompt_id = self._again.popleft()
                prompt = self._by_id[prompt_id]
            else:
                epoch, position = self._cursor.next()
                prompt = self._prompts[position]
            if not (reason := self._reason_to_skip(prompt)):
                return epoch, prompt
            self._schedule.skip_prompt(epoch, prompt.id, reason)
            self.prompts_too_long += reason == _TOO_LONG
            skipped += 1
            if skipped % len(self._prompts) == 0 and all(map(self._reason_to_skip, self._prompts)):
                raise RunError(
                    "rollout.draw_min_pass_rate: no prompt is left that is not too hard, too easy "
                    "(rollout.draw_max_pass_rate) or too long"
                )

    def _is_resumable(self, group: Group, kept: Mapping[int, InterruptedGroup]) -> bool:
        """Whether the interrupted group has answers that its workflow can continue, in the group size of now."""
        answers = kept[group.number].answers if group.number in kept else []
        resumes = self._sampler.of(self._by_id[group.prompt_id]).runner.resumes
        return len(answers) == self._config.rollout.group_size and resumes

    def _is_scored(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether the trajectories have what a teacher says of their tokens, if one is asked."""
        top_k = self._config.ppo.penalty.top_k
        return not self._teachers or all(
            (len(t.reference) or not t.loss_mask.any()) and len(t.likely_tokens) == top_k * t.loss_mask.sum()
            for t in trajectories
        )

    def _reason_to_skip(self, prompt: Prompt) -> str:
        fits = self._sampler.of(prompt).fits(len(prompt.tokens))
        return self._difficulty.reason_to_skip(prompt, self._schedule.version) if fits else _TOO_LONG

    async def _run_group(self, engine: Engine, group: Group) -> None:
        n, prompt = self._config.rollout.group_size, self._by_id[group.prompt_id]
        interrupted: list[Completion] = []
        if kept := self._interrupted.pop(group.number, None):
            interrupted, prompt = kept.answers, replace(prompt, tokens=kept.prompt.tolist())
        # Random numbers of their own for what is sampled later
        later = [sum(len(answer.tokens) for answer in interrupted)] if interrupted else []
        seed = sampling_seed(self._config.seed, "train", group.epoch, prompt.id, *later)
        spec = EpisodeSpec(prompt, group.admission_version, f"group-{group.number}", seed, "train")
        try:
            sampled = await self._sampler.sample(engine, spec, n, interrupted, lambda: self._interrupting)
        except AnswersInterrupted as e:
            tokens = np.array(prompt.tokens, np.int32)
            self._interrupted[group.number] = InterruptedGroup(prompt=tokens, answers=e.answers)
            return
        if sampled is None:  # admitted again, elsewhere or by the next incarnation
            return
        sampled = await self._sampler.with_terms(prompt, sampled)
        numbered, discount = enumerate(sampled, group.number * n), self._config.reward.turn_discount
        trajectories = [*chain(*(_samples(group, uid, ended, discount) for uid, ended in numbered))]
        if self._teachers:
            await self._teachers.score(prompt.teacher, trajectories)
        self._failed_answers.add(ended.score.failure for ended in sampled)
        known = [ended.score for ended in sampled if not ended.score.failed]
        if len(known) < min(_FEWEST_SCORED, n):
            self._schedule.fail(group, "rewards failed")
        elif self._count(prompt, sampled, known):
            self._schedule.filter(group)
        else:
            self._trajectories[group.number] = trajectories
            self._schedule.finish(group)
        self._changed.notify()

    def _count(self, prompt: Prompt, sampled: list[ScoredEpisode], known: list[Score]) -> bool:
        """Counts a group, with the scores that are known. Returns whether to filter it."""
        trained = any(ended.score.trained and ended.answers for ended in sampled)
        useless = self._difficulty.filters(prompt, known, self._schedule.version) or not trained
        self._sampled.add(known, sum(ended.length for ended in sampled), useless)
        return useless


async def _abort(engine: Engine) -> None:
    """Ends the requests of groups on an engine."""
    try:
        await engine.client.abort("group-")
    except EngineError as e:
        log.warning("its answers will be generated again: %s", e)


def _described(interrupted: dict[int, InterruptedGroup]) -> str:
    answers = [answer for group in interrupted.values() for answer in group.answers]
    return f"{sum(len(answer.tokens) for answer in answers)} tokens of {len(answers)} answers that were interrupted"


def _samples(group: Group, uid: int, ended: ScoredEpisode, discount: float) -> list[Trajectory]:
    returns = ended.returns(discount)
    return [_sample(group, uid, number, ended, own) for number, own in enumerate(returns)]


def _sample(group: Group, uid: int, number: int, ended: ScoredEpisode, returns: list[tuple[int, float]]) -> Trajectory:
    context, score = ended.samples[number], ended.score
    return Trajectory(
        uid=uid,
        sample=number,
        of_samples=len(ended.samples),
        turns=context.answers,
        epoch=group.epoch,
        prompt_id=group.prompt_id,
        admission_version=group.admission_version,
        prompt=np.array(context.prompt, np.int32),
        asked=context.asked,
        response=context.tokens,
        logprobs=context.logprobs,
        versions=context.versions,
        loss_mask=context.loss_mask * np.uint8(score.trained),
        reward=score.reward,
        returns=returns if score.trained else [],
        truncated=score.truncated,
        failed=score.failed,
        terms=score.terms,
        correct=score.correct,
        routes=context.routes,
    )

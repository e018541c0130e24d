"""An engine as the simulator sees it: answers that decode together, between two events."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from areal_megatron.planning.forecast.engine_time import EngineTime

_EPSILON = 1e-6
"""The part of a step that rounding may leave."""


@dataclass(slots=True)
class RunningAnswer:
    """An answer on an engine, from when it is taken."""

    group: int
    prompt: int
    tokens: int
    done: float = 0.0
    """Tokens sampled when it began to run, and not sampled again."""
    begun: float = 0.0
    """The engine's step at which it began to run."""


class SimulatedEngine:
    """Decodes one token of every running answer a step; `now` is the time up to which it has worked.

    Between two events the number of running answers R stays, and their context C grows by R a step, so that k steps
    take k·step(R) + per_token·(k·C + R·k²/2): what `_seconds` computes, and `_steps` inverts.
    """

    def __init__(self, number: int, time: EngineTime, capacity: float, version: int, room: float = math.inf):
        """`room`: with more answers than this it takes no other group."""
        self.number, self.version, self._time, self._room = number, version, time, room
        self.capacity = capacity
        """Tokens whose keys and values it can hold."""
        self.now = 0.0
        self.pace = 1.0
        """What its times are multiplied with."""
        self.load = 0
        """Answers that it has taken and not finished."""
        self.pending: int | None = None
        """The version that it commits once its answers have ended; it takes no others until then."""
        self.busy, self.sampled, self.prefilled, self.preempted = 0.0, 0.0, 0.0, 0
        self.prefilled_again, self.prefilling_again = 0.0, 0.0
        """Tokens that it has computed once more for answers under way when weights changed, each with its prompt, and
        seconds in which it did."""
        self.full = 0.0
        """Seconds in which it had no room for another group, or no memory for all that it had taken."""
        self._running: dict[int, RunningAnswer] = {}
        self._ends: list[tuple[float, int]] = []
        self._waiting: deque[RunningAnswer] = deque()
        self._step, self._context, self._numbers = 0.0, 0.0, 0

    def take(self, answers: list[RunningAnswer], at: float) -> None:
        """Begins a group's answers, which share the computation of their prompt."""
        self.advance(at)
        self.load += len(answers)
        self._waiting.extend(answers)
        self._prefill(answers[0].prompt, 0)
        self._work(self._time.begin(len(answers)))
        self._start_waiting()

    def advance(self, at: float) -> list[RunningAnswer]:
        """Works until `at`, if it has not yet; returns the answers that have ended."""
        if at > self.now:
            if self._running:
                self._decode(self._steps(at - self.now))
                self.busy += at - self.now
                self.full += (at - self.now) * (self.load > self._room or bool(self._waiting))
            self.now = at
        ended = []
        while self._ends and self._ends[0][0] <= self._step + _EPSILON:
            _, number = heapq.heappop(self._ends)
            if (answer := self._running.pop(number, None)) is not None:
                self._context -= answer.prompt + answer.tokens
                ended.append(answer)
        self.load -= len(ended)
        while self._context > self.capacity + _EPSILON and len(self._running) > 1:
            self._preempt()
        self._start_waiting()
        return ended

    def next_event(self) -> float:
        """The time at which the next answer ends, or the memory is full; infinite if nothing runs."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        steps = max(self._ends[0][0] - self._step, 0.0)
        if len(self._running) > 1 and self._context + steps * len(self._running) > self.capacity:
            steps = min(steps, max((self.capacity - self._context) // len(self._running) + 1, 1))
        return self.now + self._seconds(steps)

    def pause(self, at: float, seconds: float, again: bool) -> None:
        """Does nothing for so long, and with `again` computes the keys and values of all that runs once more."""
        self.advance(at)
        self.now += seconds
        if again and self._running:
            contexts = [each.prompt + each.done + self._step - each.begun for each in self._running.values()]
            begun = self.now
            self._prefill(sum(contexts), sum(each * each / 2 for each in contexts))
            self.prefilled_again += sum(contexts)
            self.prefilling_again += self.now - begun

    @property
    def under_way(self) -> float:
        """The tokens that it has sampled of answers that have not ended."""
        return sum(each.done + self._step - each.begun for each in self._running.values()) + sum(
            each.done for each in self._waiting
        )

    def _start_waiting(self) -> None:
        while self._waiting:
            answer = self._waiting[0]
            context = answer.prompt + answer.done
            if self._running and self._context + context > self.capacity:
                return
            self._waiting.popleft()
            if answer.done:
                self._prefill(context, context * context / 2)
            answer.begun = self._step
            self._running[self._numbers] = answer
            heapq.heappush(self._ends, (self._step + answer.tokens - answer.done, self._numbers))
            self._context += context
            self._numbers += 1

    def _preempt(self) -> None:
        """The answer that began last waits until there is room, as in vLLM, and is prefilled again."""
        _, answer = self._running.popitem()
        answer.done += self._step - answer.begun
        self._context -= answer.prompt + answer.done
        self._waiting.appendleft(answer)
        self.preempted += 1

    def _prefill(self, tokens: float, pairs: float) -> None:
        self._work(self._time.prefill(tokens, pairs or tokens * tokens / 2))
        self.prefilled += tokens

    def _work(self, seconds: float) -> None:
        self.now += self.pace * seconds
        self.busy += self.pace * seconds

    def _decode(self, steps: float) -> None:
        self._step += steps
        self._context += steps * len(self._running)
        self.sampled += steps * len(self._running)

    def _seconds(self, steps: float) -> float:
        running, per_token = len(self._running), self._time.per_token
        own = steps * self._time.step(running) + per_token * steps * (self._context + running * steps / 2)
        return self.pace * own

    def _steps(self, seconds: float) -> float:
        running, per_token = len(self._running), self._time.per_token
        linear = self._time.step(running) + per_token * self._context
        square, seconds = per_token * running / 2, seconds / self.pace
        return 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))

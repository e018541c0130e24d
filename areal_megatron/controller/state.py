"""The controller's part of a checkpoint: the file controller.msgpack, what is in it, and how it is written and read.

It says which prompts are still to be trained, and holds the answers sampled so far. It is written between two batches,
so that it and the trainers' part are of one version. Finished groups keep their answers; running ones are generated
again, or, if the run was asked to stop, are resumed from where they were interrupted.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from areal_megatron.controller.schedule import ScheduleState
from areal_megatron.data import drawing
from areal_megatron.data.drawing import Drawing, PromptDrawing
from areal_megatron.data.trajectory import Trajectory, store
from areal_megatron.engine.client import Completion


class InterruptedGroup(msgspec.Struct, kw_only=True):
    """The answers of a group as they were when they were interrupted; some of them are whole."""

    prompt: np.ndarray
    """int32 [P], the tokens from which they were sampled: the same text may be rendered otherwise later, as by a
    template that shows the date."""
    answers: list[Completion]


class ControllerState(PromptDrawing, kw_only=True):
    """The rows that come next, and what has been sampled."""

    again: list[tuple[int, int]]
    """(epoch, prompt_id) of groups that were admitted and are neither finished nor interrupted nor disposed of."""
    schedule: ScheduleState
    trajectories: dict[int, list[Trajectory]]
    """Trajectories of the finished groups, by number of the group."""
    resumable: dict[int, InterruptedGroup] = msgspec.field(default_factory=dict)
    """What the interrupted groups have, by number of the group."""
    group_size: int
    """The n of the run, by which its uids are numbered."""
    prompts_too_long: int
    reward_failures: int = 0
    answers_refused: int = 0
    pass_rates: dict[int, float] = msgspec.field(default_factory=dict)
    """Share of right answers in the group that finished last, by prompt."""
    measured_at: dict[int, int] = msgspec.field(default_factory=dict)
    """The version at which each of these was measured; 0 if it is not here."""

    def anew(self, now: Drawing) -> ControllerState:
        """Returns the state of a run that begins its epochs anew, with other rows, at this one's version."""
        schedule = ScheduleState(self.schedule.version, self.schedule.admitted, [], [], [])
        own = msgspec.structs.asdict(now)
        return ControllerState(
            **own, again=[], schedule=schedule, trajectories={}, group_size=self.group_size, prompts_too_long=0
        )


def write(state: ControllerState, path: Path) -> None:
    """Raises OSError if the file cannot be written."""
    store(state, path)


def read(path: Path) -> ControllerState:
    """Raises ConfigError if the file cannot be read."""
    return drawing.read(path, ControllerState)

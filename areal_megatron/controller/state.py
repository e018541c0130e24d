"""The controller's part of a checkpoint: the file controller.msgpack, what is in it, and how it is written and read.

It says which prompts are still to be trained, and holds the answers sampled so far. It is written between two batches,
so that it and the trainers' part are of one version. Finished groups keep their answers; running ones are generated
again, or, if the run was asked to stop, are resumed from where they were interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.controller.schedule import ScheduleState
from areal_megatron.data.prompts import Drawing
from areal_megatron.data.trajectory import Trajectory, decoder, store
from areal_megatron.engine.client import Completion


class ControllerState(msgspec.Struct, kw_only=True):
    prompts: int
    """Number of rows of data.train."""
    seed: int
    cursor: tuple[int, int]
    """`Cursor.at` of data/prompts.py."""
    again: list[tuple[int, int]]
    """(epoch, prompt_id) of groups that were admitted and are neither finished nor interrupted nor disposed of."""
    schedule: ScheduleState
    trajectories: dict[int, list[Trajectory]]
    """Trajectories of the finished groups, by number of the group."""
    interrupted: dict[int, list[Completion]]
    """Answers of the interrupted groups, by number of the group; some of them are whole."""
    prompts_too_long: int
    reward_failures: int = 0
    answers_refused: int = 0
    mixture: list[tuple[int, int]] = []
    """(rows, rows drawn an epoch) of each file of data.train, if the files have weights."""
    order: int = 0
    """`Cursor.order` of data/prompts.py."""
    pass_rates: dict[int, float] = {}
    """Share of right answers in the group that finished last, by prompt."""
    measured_at: dict[int, int] = {}
    """The version at which each of these was measured; 0 if it is not here."""


_decode = decoder(ControllerState).decode


def write(state: ControllerState, path: Path) -> None:
    """Raises OSError if the file cannot be written."""
    store(state, path)


def read(
    path: Path, prompts: int, seed: int, mixture: Sequence[tuple[int, int]] = (), order: int = 0
) -> ControllerState:
    """Raises ConfigError if the file cannot be read, or if this data and seed give another order of prompts."""
    try:
        state = _decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as e:
        raise ConfigError(f"{path}: no readable state of a controller: {e}") from None
    drawing = Drawing(rows=state.prompts, seed=state.seed, mixture=state.mixture, cursor=state.cursor)
    drawing.check(prompts, seed, mixture)
    if state.order != order:
        raise ConfigError(
            "rollout.easiest_first: the checkpoint was made with prompts in another order: continue with the same "
            "setting and pass rates of rows, or start a new run from the exported model"
        )
    return state

"""The controller's part of a checkpoint: all that decides which prompts are still to be trained, and with what.

Written between two batches, so that it and the trainers' part are of one version. Finished groups keep their answers.
Those that were running then are generated again, or, where the run was asked to stop, go on from where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.controller.schedule import ScheduleState
from areal_megatron.data.trajectory import Trajectory, decoder, store
from areal_megatron.engine.client import Completion


class ControllerState(msgspec.Struct, kw_only=True):
    prompts: int
    """Lines of data.train."""
    seed: int
    cursor: tuple[int, int]
    again: list[tuple[int, int]]
    """(epoch, prompt_id) of groups that were admitted and are neither finished nor interrupted nor disposed of."""
    schedule: ScheduleState
    trajectories: dict[int, list[Trajectory]]
    """Of the finished groups, by number."""
    interrupted: dict[int, list[Completion]]
    """Answers of the interrupted groups, by number; some of them are whole."""
    prompts_too_long: int
    reward_failures: int = 0
    mixture: list[tuple[int, int]] = []
    """(rows, rows drawn an epoch) of each file of data.train, where they have weights."""
    order: int = 0
    """Of data/prompts.Cursor."""
    pass_rates: dict[int, float] = {}
    """By prompt, of its group that finished last."""


_decode = decoder(ControllerState).decode


def write(state: ControllerState, path: Path) -> None:
    """Raises OSError."""
    store(state, path)


def read(
    path: Path, prompts: int, seed: int, mixture: Sequence[tuple[int, int]] = (), order: int = 0
) -> ControllerState:
    """Raises ConfigError if it cannot be read, or belongs to another order of prompts than this data and seed give."""
    try:
        state = _decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as e:
        raise ConfigError(f"{path}: no readable state of a controller: {e}") from None
    if state.prompts != prompts:
        raise ConfigError(
            f"data.train: {prompts} prompts, but the checkpoint was made with {state.prompts}: go on with "
            "the same file, or start a new run from the exported model"
        )
    if state.seed != seed:
        raise ConfigError(f"seed: {seed}, but the checkpoint was made with {state.seed}, which orders the prompts")
    if state.mixture != list(mixture):
        raise ConfigError(
            "data.train: the checkpoint was made with other weights, which order the prompts: go on with the "
            "same, or start a new run from the exported model"
        )
    if state.order != order:
        raise ConfigError(
            "rollout.easiest_first: the checkpoint was made with prompts in another order: go on with the same setting "
            "and pass rates of rows, or start a new run from the exported model"
        )
    return state

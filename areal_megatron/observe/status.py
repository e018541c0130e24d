"""status.json: what a run does at the moment, as its controller writes it and the console and the launchers read it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

Number = Annotated[float, Meta(ge=-1e39, le=1e39)]
"""All that a float32 may be, which no arithmetic of a reader overflows."""


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    """It serves; under `full` staging also while it receives weights."""
    WAITING = "waiting for weights"
    """It serves, but holds no version yet that it could sample from."""
    RECEIVING = "receiving"
    """It is paused while weights stream in (`streamed` staging)."""
    COMMITTING = "committing"
    TORN = "torn"
    """A streamed update has failed: it holds a mixture of versions and gets no request before a whole one."""
    UNREACHED = "unreached"
    """It answers, but weights did not reach it several times in a row: updates leave it out but for a trial now and
    then."""
    LOST = "lost"
    """It has died or stopped answering, and was not started again yet."""
    DRAINED = "drained"
    """It has answered everything and is to get nothing more."""

    @property
    def gone(self) -> bool:
        return self in (EngineState.LOST, EngineState.DRAINED)


class EngineStatus(msgspec.Struct, kw_only=True):
    """One engine's entry in status.json."""

    name: str
    state: EngineState
    version: int = -1
    """Policy version that the controller has seen the engine commit; -1: none."""
    running: int = 0
    """Trajectories that it samples."""
    losses: int = 0
    """How often it was lost since the controller started."""
    tokens_per_s: float = 0.0

    @property
    def serves(self) -> bool:
        """Whether it holds a version."""
        return self.version >= 0 and not self.state.gone


class Status(msgspec.Struct, kw_only=True):
    """What a run does at the moment; before anything is known, the defaults."""

    phase: str = ""
    version: int = -1
    """The newest policy version; supervised: the steps done."""
    updates: int = 0
    """Which the run is to make."""
    elapsed_s: Number | None = None
    """Since its process was started."""
    engines: list[EngineStatus] = []
    buffer_groups: int = 0
    """Groups that have been scored and wait to be trained."""
    running_groups: int = 0
    training_groups: int = 0
    filtered_groups: int = 0
    """By rollout.filter_groups, since the run began."""

"""The names of a run's processes: `controller`, `engine-E`, `trainer-RANK`, and `judge-E` and the like for models that
are served beside the policy."""

from __future__ import annotations

import re

from areal_megatron.config import SERVED

CONTROLLER = "controller"
_ENGINE = "engine-"
_WHOLE_ENGINE = re.compile(rf"{_ENGINE}(0|[1-9]\d{{0,8}})")
_TRAINER = "trainer-"


def engine_name(index: int) -> str:
    return f"{_ENGINE}{index}"


def engine_index(name: str) -> int:
    return int(name.removeprefix(_ENGINE))


def is_engine(name: str) -> bool:
    """Whether a process of this name is an engine, or the part of one on another node (`engine-E.1`)."""
    return name.startswith(_ENGINE)


def is_whole_engine(name: str) -> bool:
    """Whether a process of this name is an engine, and not a part of one."""
    return bool(_WHOLE_ENGINE.fullmatch(name))


def served_name(model: str, index: int) -> str:
    """The name of an engine of a model that is served beside the policy."""
    return f"{model}-{index}"


def is_server(name: str) -> bool:
    """Whether a process of this name serves until the run is over: an engine, of the policy or of another model."""
    return name.startswith((_ENGINE, *(f"{model}-" for model in SERVED)))


def trainer_name(rank: int) -> str:
    return f"{_TRAINER}{rank}"


def is_trainer(name: str) -> bool:
    return name.startswith(_TRAINER)

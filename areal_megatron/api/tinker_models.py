"""What clients of `areal tinker` train and sample from: models in the places of a policy, and adapters on the disk."""

from __future__ import annotations

import itertools
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_megatron.config import ConfigError
from areal_megatron.process.errors import printable

SILENT_S = 45.0
"""A client that says nothing for so long, where it is to do so every 10 s, may lose its places to others, and what it
has asked for is sampled no more."""
KEPT_UNNAMED = 4
"""Samplers that a model has without a name for them."""


class Models:
    """Which model has which place, until its session is over and another one needs it."""

    def __init__(self, places: int, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._heard: dict[str, float] = {}
        """Session → when its client was heard last."""
        self._in_place: list[tuple[str, str] | None] = [None] * places
        """Session and name of the models."""

    def begin_session(self) -> str:
        session = secrets.token_hex(8)
        self._heard[session] = self._now()
        return session

    def hear(self, session: str) -> bool:
        """Returns whether the session is one that goes on."""
        known = session in self._heard
        if known:
            self._heard[session] = self._now()
        return known

    def check(self, session: str) -> None:
        """Raises ConfigError if nobody waits any more for what was asked for in the session."""
        if not self._goes_on(session):
            raise ConfigError(
                f"session {printable(session)} has finished, or nothing was heard of its program for {SILENT_S:.0f} s"
            )

    def finish(self, session: str) -> None:
        self._heard.pop(session, None)

    def begin(self, session: str, name: str) -> tuple[int, str]:
        """Returns the place of a new model, and the name of the one that has lost it, if any. Raises ConfigError."""
        if not self.hear(session):
            raise ConfigError(f"session {printable(session)} is none of this server, or it has finished")
        free = next((place for place, model in enumerate(self._in_place) if self._is_free(model)), None)
        if free is None:
            most = len(self._in_place)
            raise ConfigError(
                f"lora.adapters: {most} models are trained here, and no more: close the ServiceClient of one, wait "
                f"{SILENT_S:.0f} s after its program has ended, or start the server with lora.adapters={most + 1}"
            )
        before, self._in_place[free] = self._in_place[free], (session, name)
        return free, before[1] if before else ""

    def place(self, name: str) -> int:
        """Raises ConfigError for a model without one."""
        for place, model in enumerate(self._in_place):
            if model and model[1] == name:
                return place
        raise ConfigError(f"model {printable(str(name))} is not trained here: its session is over, or never began it")

    def _is_free(self, model: tuple[str, str] | None) -> bool:
        return model is None or not self._goes_on(model[0])

    def _goes_on(self, session: str) -> bool:
        return session in self._heard and self._now() - self._heard[session] < SILENT_S


@dataclass
class _Sampler:
    path: str
    """By which clients know its weights; "" if by none."""
    folder: Path
    owner: str
    """The model that it goes with; "" if it stays."""
    busy: int = 0


class Samplers:
    """Sampling sessions, each with an adapter in PEFT's folder, from which engines read it. May be used by several
    threads."""

    def __init__(self, folder: Path):
        self._folder, self._lock = folder, threading.Lock()
        self._numbers = itertools.count(1 + max((int(old.name) for old in folder.glob("[0-9]*")), default=-1))
        self._sessions: dict[str, _Sampler] = {}
        self._paths: dict[str, Path] = {}

    def new_folder(self) -> Path:
        return self._folder / f"{next(self._numbers):06d}"

    def name(self, path: str, folder: Path) -> None:
        self._paths[path] = folder

    def of_path(self, path: str) -> Path:
        """Raises ConfigError."""
        if path not in self._paths:
            raise ConfigError(f"{printable(path)} is no path of weights for samplers that this server has made")
        return self._paths[path]

    def begin(self, session: str, path: str, folder: Path, owner: str = "") -> None:
        """Begins a session. Of the unnamed ones of an owner the last KEPT_UNNAMED stay."""
        with self._lock:
            self._sessions[session] = _Sampler(path, folder, owner)
        if owner:
            self.forget(owner, KEPT_UNNAMED)

    def path_of(self, session: str) -> str:
        return self._known(session).path

    def has(self, session: str) -> bool:
        return session in self._sessions

    @contextmanager
    def using(self, session: str) -> Iterator[Path]:
        """A context in which the folder of the session stays. Raises ConfigError."""
        with self._lock:
            sampler = self._known(session)
            sampler.busy += 1
        try:
            yield sampler.folder
        finally:
            with self._lock:
                sampler.busy -= 1

    def forget(self, owner: str, keep: int = 0) -> None:
        """Removes what is unnamed of a model, but for the last `keep`, and for what is in use."""
        with self._lock:
            own = [session for session, sampler in self._sessions.items() if sampler.owner == owner]
            over = [session for session in own[: max(len(own) - keep, 0)] if not self._sessions[session].busy]
            gone = [self._sessions.pop(session).folder for session in over]
        for folder in gone:
            shutil.rmtree(folder, ignore_errors=True)

    def _known(self, session: str) -> _Sampler:
        if session not in self._sessions:
            raise ConfigError(
                f"{printable(session)} is no sampling session of this server; of those without a name it keeps the "
                f"last {KEPT_UNNAMED} of a model"
            )
        return self._sessions[session]

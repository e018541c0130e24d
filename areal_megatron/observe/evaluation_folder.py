"""What an evaluation keeps: its settings and its answers, so that one that was killed goes on
(areal_megatron.evaluate)."""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.files import drop_torn_line, write_atomically


class Sampled(msgspec.Struct, kw_only=True):
    """One answer, a line of answers.jsonl."""

    item: int
    """Row of the data set, from 0."""
    sample: int
    """From 0 to n − 1."""
    seed: int
    score: float
    """Of the reward function."""
    correct: bool
    """1 or more."""
    truncated: bool
    """Cut at the longest length."""
    tokens: int
    response: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Sampled).decode


class Folder:
    """A context manager. Raises ConfigError for the folder of another evaluation, or of one that is running."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        if path.is_dir() and not self._settings.exists() and any(map(_is_foreign, path.iterdir())):
            raise ConfigError(f"{path}: holds something else than an evaluation; choose another --out")
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / "answers.jsonl").open("ab", buffering=0)
        except OSError as e:
            raise ConfigError(f"{path}: cannot be written: {e.strerror}") from None
        try:
            self._lock()
            self._check(settings)
            self.answers = self._read()
            """By (item, sample)."""
        except ConfigError:
            self._file.close()
            raise

    def add(self, answer: Sampled) -> None:
        """Written before it returns."""
        self._file.write(_encode(answer) + b"\n")
        self.answers[answer.item, answer.sample] = answer

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    @property
    def _settings(self) -> Path:
        return self.path / "settings.json"

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{self.path}: another evaluation is writing here; wait for it or choose another --out"
            ) from None

    def _check(self, settings: dict[str, Any]) -> None:
        file = self._settings
        if not file.exists():
            if self._file.tell():
                raise ConfigError(f"{self.path}: has answers but no settings.json; choose another --out")
            write_atomically(file, json.dumps(settings, indent=2) + "\n")
            return
        try:
            begun = json.loads(file.read_text())
        except ValueError as e:
            raise ConfigError(f"{file}: not JSON: {e}") from None
        for key, value in settings.items():
            if begun.get(key) != value:
                raise ConfigError(
                    f"{self.path}: was begun with {key}={begun.get(key)}, not {value}; choose another --out, or "
                    "the same settings"
                )

    def _read(self) -> dict[tuple[int, int], Sampled]:
        path, answers = self.path / "answers.jsonl", {}
        drop_torn_line(path)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    answer = _decode(line)
                except msgspec.MsgspecError as e:
                    raise ConfigError(f"{path}:{number}: no answer of an evaluation: {e}; remove the line") from None
                answers[answer.item, answer.sample] = answer
        return answers


def _is_foreign(file: Path) -> bool:
    return file.name != "answers.jsonl" and not file.name.startswith(".settings.json")


def digest(value: Any) -> str:
    """16 hexadecimal digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def files_digest(model: Path) -> str:
    """Of the model's files by name, size and time of writing: another training run may have written to the same
    path."""
    files = sorted(file for kind in ("*.safetensors", "*.json", "*.jinja") for file in model.glob(kind))
    return digest([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])

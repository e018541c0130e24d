"""The folder of an evaluation: its settings and answers, from which areal_megatron.launch.evaluate resumes."""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.process.files import drop_torn_line, write_atomically
from areal_megatron.run.json_input import read_record


class Sampled(msgspec.Struct, kw_only=True):
    """One answer, a line of answers.jsonl."""

    item: int
    """The row of the data set, from 0."""
    sample: int
    """The number of the sample of this item, from 0 to n − 1."""
    seed: int
    score: float
    """The score that the reward function returned."""
    correct: bool
    """Whether the score is 1 or more."""
    truncated: bool
    """Whether the answer was cut at --max-new-tokens."""
    tokens: int
    """Those after the prompts, of all samples of an episode, the environment's included."""
    response: str
    """Their text."""
    prompt: str = ""
    """Without the chat template."""
    answer: str = ""
    """The right one."""


_PLACE = "data"
"""The setting that says where the rows are: they may be elsewhere if their digest is the same."""
_DIGESTS = {
    "rows": "other rows",
    "tokenizer": "another tokenizer",
    "template": "another chat template",
    "model_files": "other files of the model",
    "adapter_files": "other files of the adapter",
}
"""What an evaluation was begun with if a setting that is a digest is another one."""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Sampled).decode


class Folder:
    """A locked folder of an evaluation; a context manager.

    Raises ConfigError for the folder of an evaluation with other settings, or of one that is running.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        try:
            if path.is_dir() and not self._settings.exists() and any(map(_is_foreign, path.iterdir())):
                raise ConfigError(f"{path}: holds something else than an evaluation; choose another --out")
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / "answers.jsonl").open("ab", buffering=0)
        except OSError as e:
            raise ConfigError(f"{path}: cannot be written: {e.strerror}") from None
        try:
            self._lock()
            self._check(settings)
            self.answers = self._read()
            """Answers by (item, sample)."""
        except ConfigError:
            self._file.close()
            raise

    def add(self, answer: Sampled) -> None:
        """Appends an answer; it is written when this returns."""
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
        except BlockingIOError:
            raise ConfigError(
                f"{self.path}: another evaluation is writing here; wait for it or choose another --out"
            ) from None
        except OSError as e:  # as of Lustre without its option flock
            raise ConfigError(
                f"{self.path}: its file system locks no files: {e.strerror}; choose another --out"
            ) from None

    def _check(self, settings: dict[str, Any]) -> None:
        file = self._settings
        if not file.exists():
            if self._file.tell():
                raise ConfigError(f"{self.path}: has answers but no settings.json; choose another --out")
            write_atomically(file, json.dumps(settings, indent=2) + "\n")
            return
        begun = read_record(file.read_bytes(), dict[str, Any], file)
        for key, value in settings.items():
            if key != _PLACE and begun.get(key) != value:
                other = _DIGESTS.get(key) or f"{key}={begun.get(key)}, not {value}"
                raise ConfigError(f"{self.path}: was begun with {other}; choose another --out, or the same settings")

    def _read(self) -> dict[tuple[int, int], Sampled]:
        path, answers = self.path / "answers.jsonl", {}
        drop_torn_line(path)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    answer = _decode(line)
                except (ValueError, RecursionError) as e:
                    raise ConfigError(f"{path}:{number}: no answer of an evaluation: {e}; remove the line") from None
                answers[answer.item, answer.sample] = answer
        return answers


def _is_foreign(file: Path) -> bool:
    return file.name != "answers.jsonl" and not file.name.startswith(".settings.json")


def digest(value: Any) -> str:
    """Returns a hash of a JSON value, as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def files_digest(model: Path) -> str:
    """Returns a hash of the names, sizes and modification times of the model's files.

    It tells models apart that were written to the same path one after the other.
    """
    files = sorted(file for kind in ("*.safetensors", "*.json", "*.jinja") for file in model.glob(kind))
    return digest([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])

"""The trajectories of a run, a page of them and one by one, for its page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.dumps import dumped, read
from areal_megatron.data.pieces import pieces
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import Trajectory, decoder, trained_by_version
from areal_megatron.hub import hub
from areal_megatron.run.folder import RunFolder

PAGE = 25
"""Trajectories on a page of the browser."""
PAGE_TOKENS = 2000
"""Tokens of an answer, or of its prompt, that are shown at a time."""
_EXCERPT = 120
_KEPT_BATCHES = 2


class ShownTrajectory(msgspec.Struct, kw_only=True):
    """What is shown of a Trajectory: routes of experts alone may take gigabytes of a batch."""

    uid: int
    sample: int = 0
    of_samples: int = 1
    epoch: int
    prompt_id: int
    admission_version: int
    prompt: np.ndarray
    response: np.ndarray
    versions: np.ndarray
    loss_mask: np.ndarray
    reward: float
    returns: list[tuple[int, float]] = []
    truncated: bool
    correct: bool = False
    failed: bool = False

    name, cut = Trajectory.name, Trajectory.cut


class ShownDump(msgspec.Struct, kw_only=True):
    """A Dump decoded with ShownTrajectory."""

    version: int
    trajectories: list[ShownTrajectory]


_decode = decoder(ShownDump).decode


class Browser:
    """The trajectories of a run, one batch at a time; the last ones looked at stay in memory."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._batches: OrderedDict[int, tuple[float, ShownDump]] = OrderedDict()
        self._tokenizer: Tokenizer | None = None

    def page(self, config: Config, batch: int | None, first: int, only: str) -> dict[str, Any]:
        """Returns a page of a batch's trajectories, by default of the newest. Raises ConfigError."""
        files = dumped(self._run.trajectories)
        numbers = list(files)
        number = batch if batch in files else numbers[-1]
        place, dump = numbers.index(number), self._read(number, files[number])
        kept = {
            "right": lambda t: t.correct,
            "wrong": lambda t: not t.correct and not t.failed,
            "cut": lambda t: t.cut,
        }.get(only, lambda t: True)
        found = [(index, t) for index, t in enumerate(dump.trajectories) if kept(t)]
        tokenizer = self._tokenizer_of(config)
        shown = found[first : first + PAGE]
        starts = _starts([t.prompt for _, t in shown], dump.trajectories, tokenizer)
        return {
            "batch": number,
            "version": dump.version,
            "older": numbers[place - 1] if place else None,
            "newer": numbers[place + 1] if place + 1 < len(numbers) else None,
            "newest": numbers[-1],
            "from": first,
            "size": PAGE,
            "found": len(found),
            "rows": [
                _row(index, t, dump.version, tokenizer) | {"start": start}
                for (index, t), start in zip(shown, starts, strict=True)
            ],
        }

    def trajectory(self, config: Config, batch: int, index: int, first: int) -> dict[str, Any]:
        """Returns one trajectory, with PAGE_TOKENS tokens of its answer. Raises ConfigError."""
        files = dumped(self._run.trajectories)
        if batch not in files:
            raise ConfigError(f"there is no batch {batch} any more")
        dump = self._read(batch, files[batch])
        if not 0 <= index < len(dump.trajectories):
            raise ConfigError(f"batch {batch} has {len(dump.trajectories)} trajectories")
        t, tokenizer = dump.trajectories[index], self._tokenizer_of(config)
        return _row(index, t, dump.version, tokenizer) | {
            "batch": batch,
            "episode": [
                _row(other, dump.trajectories[other], dump.version, tokenizer) | {"depth": depth}
                for other, depth in tree({k: o for k, o in enumerate(dump.trajectories) if o.uid == t.uid}, tokenizer)
            ],
            "trained": dump.version,
            "prompt": tokenizer.decode(t.prompt[:PAGE_TOKENS].tolist(), special=True),
            "prompt_tokens": len(t.prompt),
            "prompt_shown": min(len(t.prompt), PAGE_TOKENS),
            "by_version": [*trained_by_version(t.versions, t.loss_mask).items()],
            "from": first,
            "next": first + PAGE_TOKENS if first + PAGE_TOKENS < len(t.response) else None,
            "parts": parts(tokenizer, t, first, PAGE_TOKENS),
        }

    def _read(self, number: int, path: Path) -> ShownDump:
        changed = path.stat().st_mtime if path.exists() else 0.0
        if number not in self._batches or self._batches[number][0] != changed:
            self._batches[number] = changed, read(path, _decode)
        self._batches.move_to_end(number)
        while len(self._batches) > _KEPT_BATCHES:
            self._batches.popitem(last=False)
        return self._batches[number][1]

    def _tokenizer_of(self, config: Config) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(hub.model_folder(config.model.path, "model.path", weights=False))
        return self._tokenizer


def _row(index: int, t: ShownTrajectory, trained: int, tokenizer: Tokenizer) -> dict[str, Any]:
    versions = t.versions.tolist() or [t.admission_version]
    excerpt = tokenizer.decode(t.response[:_EXCERPT].tolist())
    return {
        "index": index,
        "uid": t.name,
        "epoch": t.epoch,
        "row": t.prompt_id,
        "reward": None if t.failed else t.reward,
        "returns": [] if t.failed else [value for _, value in t.returns],
        "correct": t.correct,
        "truncated": t.cut,
        "tokens": len(t.response),
        "staleness": trained - t.admission_version,
        "versions": [min(versions), max(versions)],
        "excerpt": _line(excerpt),
    }


def tree(samples: dict[int, ShownTrajectory], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Returns (key, depth) of an episode's samples, each after the one that it branches from: the sample with the
    longest history that its own begins with. Samples of the same depth and origin stay in their order."""
    history = {key: _history(t, tokenizer.stop_tokens) for key, t in samples.items()}
    whole = {key: np.concatenate([t.prompt, t.response]) for key, t in samples.items()}
    below: dict[int | None, list[int]] = {}
    for key, own in history.items():
        before = [k for k, other in history.items() if len(other) < len(own) and own.startswith(other)]
        closeness = {k: (len(history[k]), _common(whole[k], whole[key])) for k in before}
        below.setdefault(max(before, key=closeness.__getitem__, default=None), []).append(key)
    found: list[tuple[int, int]] = []
    waiting = [(key, 0) for key in reversed(below.get(None, []))]
    while waiting:
        key, depth = waiting.pop()
        found.append((key, depth))
        waiting += [(other, depth + 1) for other in reversed(below.get(key, []))]
    return found


def _history(t: ShownTrajectory, stop_tokens: Collection[int]) -> bytes:
    """The tokens before the sample's own first answer, up to the last end of a message: a template's beginning of an
    answer need not be in later prompts."""
    own = np.flatnonzero(t.loss_mask)
    before = np.concatenate([t.prompt, t.response[: own[0] if len(own) else 0]])
    ends = np.flatnonzero(np.isin(before, [*stop_tokens]))
    return before[: ends[-1] + 1 if len(ends) else None].tobytes()


def _starts(prompts: list[np.ndarray], batch: list[ShownTrajectory], tokenizer: Tokenizer) -> list[str]:
    """Returns the start of each prompt as one line, without the lines that all prompts of the batch begin with: a
    chat template's, a system prompt's or few-shot examples'."""
    if not prompts:
        return []
    one = batch[0].prompt
    common = min(_common(one, t.prompt) for t in batch)
    if any(len(t.prompt) == common for t in batch):
        common = 0  # a prompt that all others begin with has to show something
    skipped = tokenizer.decode(one[:common].tolist(), special=True).rfind("\n") + 1
    return [_line(tokenizer.decode(p[: common + _EXCERPT].tolist(), special=True)[skipped:]) for p in prompts]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens both begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _line(text: str) -> str:
    return " ".join(text.split())[:_EXCERPT]


def parts(tokenizer: Tokenizer, t: ShownTrajectory, first: int, count: int) -> list[tuple[int, bool, str]]:
    """Returns the text of `count` tokens of the answer as (version, whether it is trained, text), neighbours of the
    same version together."""
    found: list[tuple[int, bool, str]] = []
    position = first
    for tokens, text in pieces(tokenizer, t.response[first : first + count].tolist()):
        version, trained = int(t.versions[position]), bool(t.loss_mask[position])
        if found and found[-1][:2] == (version, trained):
            text = found.pop()[2] + text
        found.append((version, trained, text))
        position += tokens
    return found

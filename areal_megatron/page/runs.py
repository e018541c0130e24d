"""The runs of a folder, for one page that shows them side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_megatron.page.watched import Watched
from areal_megatron.run.folder import RunFolder

_MOST = 100
"""Most runs shown: the ones with the newest configs."""
_LISTED_S = 10.0
"""Time between two looks for new runs."""


class WatchedRuns:
    """What is known of the runs in a folder, and in its folders."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.runs: dict[str, Watched] = {}
        """By their folders' names, the newest first."""
        self._left_out, self._listed_at, self._seen_at = 0, float("-inf"), 0.0
        self._problem = ""

    def refresh(self) -> None:
        """Looks for runs, and at each run folder. Not for two threads at once."""
        if time.monotonic() - self._listed_at > _LISTED_S:
            self._list()
            self._listed_at = time.monotonic()
        for watched in list(self.runs.values()):
            watched.refresh()
        self._seen_at = time.monotonic()

    def overview(self) -> dict[str, Any]:
        """What the last look has found; without `runs` before the first."""
        if not self._seen_at:
            return {}
        left_out = f"{self._left_out} older runs of this folder are not shown." if self._left_out else ""
        return {
            "folder": str(self._folder.absolute()),
            "runs": [_line(name, watched.overview()) for name, watched in self.runs.items()],
            "age_s": round(time.monotonic() - self._seen_at, 1),
            "problem": self._problem or left_out,
        }

    def _list(self) -> None:
        try:
            found = sorted(runs_in(self._folder), reverse=True)
            self._problem = ""
        except OSError as e:
            self._problem = f"{self._folder} cannot be read: {e.strerror}"
            return
        names = [path.relative_to(self._folder).as_posix() for _, path in found[:_MOST]]
        self._left_out = len(found) - len(names)
        self.runs = {name: self.runs.get(name) or Watched(RunFolder(self._folder / name)) for name in names}


def holds_runs(run: RunFolder) -> bool:
    """Whether a folder holds several runs, and is none itself."""
    try:
        return run.folder.is_dir() and not run.config.exists() and any(runs_in(run.folder))
    except OSError:
        return False


def runs_in(folder: Path) -> Iterator[tuple[float, Path]]:
    """Yields the run folders in a folder that is none itself, and in its folders, each with the time at which its
    config was written. Raises OSError."""
    for path in folder.iterdir():
        if (written := _written(path)) is not None:
            yield written, path
        elif path.is_dir() and not path.is_symlink():
            yield from ((written, own) for own in path.iterdir() if (written := _written(own)) is not None)


def _written(path: Path) -> float | None:
    try:
        return (path / "config.yaml").stat().st_mtime if (path / "leases").is_dir() else None
    except OSError:
        return None


def _line(name: str, overview: dict[str, Any]) -> dict[str, Any]:
    """What the list of runs says of one."""
    cards = {label: value for value, label in overview.get("cards", ())}
    shown = ("state", "phase", "mode", "version", "updates", "updated", "revision")
    found = {key: overview.get(key) for key in shown}
    found["phase"] = overview.get("problem") or found["phase"]
    return found | {"name": name, "reward": cards.get("reward", ""), "accuracy": cards.get("held-out accuracy", "")}

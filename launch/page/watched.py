"""What the page of a run shows, as data."""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any

from areal_megatron import config_file
from areal_megatron.config import ConfigError
from areal_megatron.launch.page.history import MOST_POINTS, History
from areal_megatron.launch.process_rows import HEAD, rows
from areal_megatron.launch.records import GONE_S, Pulse, read_record
from areal_megatron.observe.figures import HELD_OUT, Figure, sections
from areal_megatron.observe.metrics import read_status
from areal_megatron.run import Run
from areal_megatron.shown import visible


class Watched:
    """What is known of a run, whether it has begun, goes on or has ended."""

    def __init__(self, run: Run):
        self.run, self.config = run, None
        self.history = History(run)
        self._pulse, self._first, self._seen_at = Pulse(run, GONE_S), None, 0.0
        self._problem = ""
        self._overview: dict[str, Any] = {}
        self._curves = (-1, b"")

    def refresh(self) -> None:
        """Looks at the run folder. Not for two threads at once."""
        try:
            if self.config is None and self.run.config.exists():
                self.config = config_file.load(self.run.config)
            self.history.update()
            self._problem = self.history.problem
        except (ConfigError, OSError) as e:
            self._problem = str(e)
        self._overview = self._look()
        self._seen_at = time.monotonic()
        if self.config and self._curves[0] != self.history.revision:
            self._curves = self.history.revision, as_json(self._drawn())

    def overview(self) -> dict[str, Any]:
        """What the last look has found; without a `state` before the first."""
        age_s = time.monotonic() - self._seen_at if self._seen_at else 0.0
        return self._overview | {"revision": self._curves[0], "age_s": round(age_s, 1)}

    def curves(self) -> bytes:
        return self._curves[1]

    def _look(self) -> dict[str, Any]:
        record, status, last = read_record(self.run), read_status(self.run), self.history.last
        self._first = self._first or record
        state = self._pulse.state() if record else "not started" if self.config else "not begun"
        if state == "running" and record == self._first and abs(time.time() - record.time) > GONE_S:
            state = "silent"  # until the launcher is seen to write, or not to
        return {
            "name": self.config.name if self.config else self.run.folder.name,
            "folder": str(self.run.folder),
            "mode": self.config.mode if self.config else "",
            "state": state,
            "phase": status.get("phase", "") if state == "running" else "",
            "version": max(status.get("version", 0), last.get("version", 0)),
            "updates": self.config.updates if self.config else 0,
            "updated": last.get("time"),
            "now": time.time(),
            "elapsed_s": status.get("elapsed_s"),
            "cards": self._cards() if self.config else [],
            "processes": {"head": HEAD, "rows": rows(record, status, False) if record else []},
            "problem": self._problem,
        }

    def _cards(self) -> list[tuple[str, str]]:
        def recent(key: str, form: str, scale: float = 1.0) -> str:
            values = self.history.values(key)[-10:]
            return form.format(median(values) * scale) if len(values) else "–"

        if self.config.is_supervised:
            return [(recent("loss", "{:.3f}"), "loss"), (recent("tokens_per_s", "{:,.0f}"), "tokens/s")]
        measured = [e["accuracy"] for e in self.history.evaluations if e.get("accuracy") is not None]
        held_out = [f"{100 * accuracy:.0f}%" for accuracy in measured]
        bound = self.config.rollout.max_staleness
        return [
            (" → ".join([*held_out[:1], *held_out[1:][-1:]]) or "–", "held-out accuracy"),
            (recent("reward_mean", "{:.2f}"), "reward"),
            (recent("effective_tokens_per_s", "{:,.0f}"), "trained tokens/s"),
            (f"{max(self.history.values('staleness_max'), default=0):.0f}", f"largest staleness, bound {bound}"),
            (recent("publish_s", "{:.2g} s"), "publish"),
            (recent("commit_s", "{:.0f} ms", 1000), "commit"),
        ]

    def _drawn(self) -> dict[str, Any]:
        shown = sections(self.config, self.history.keys)
        return {
            "x": "step" if self.config.is_supervised else "policy version",
            "end": self.config.updates,
            "sections": [
                {"title": s.title, "text": s.text, "figures": [self._figure(f) for f in s.figures]} for s in shown
            ],
        }

    def _figure(self, figure: Figure) -> dict[str, Any]:
        share = figure.kind in ("accuracy", "utilisation", "histogram")
        drawn = {"title": figure.title, "unit": figure.unit, "zero": figure.zero or share, "log": figure.log}
        drawn |= {"share": share, "kind": figure.kind, "curves": []}
        for curve in figure.curves:
            points = self.history.histogram(curve.key) if figure.kind == "histogram" else self.history.curve(curve.key)
            if figure.kind == "utilisation":
                points = [points[0], [1 - value for value in points[1]]]
            points[1] = [value * figure.scale for value in points[1]]
            drawn["curves"].append({"label": curve.label, "colour": curve.colour, "points": points})
        if figure.kind == "utilisation":
            drawn["unit"] = "share of an update's time at work"
        if figure.kind == "histogram":
            drawn["bound"] = self.config.rollout.max_staleness
        if figure.kind == "held_out":
            key = figure.curves[0].key
            found = [(e["version"], e[key]) for e in self.history.evaluations[-MOST_POINTS:] if e.get(key) is not None]
            points = [list(column) for column in zip(*sorted(found), strict=True)]
            held_out = {"label": "held-out", "colour": HELD_OUT, "points": points, "marked": True}
            drawn["curves"] += [held_out] if found else []
        if figure.kind == "accuracy":
            keys = ("accuracy", "accuracy_low", "accuracy_high")
            known = [e for e in self.history.evaluations if all(e.get(key) is not None for key in keys)]
            whole = sorted(known[-MOST_POINTS:], key=lambda e: e["version"])
            points = [[e.get("version_mean") or e["version"] for e in whole], [e["accuracy"] for e in whole]]
            interval = [[e["accuracy_low"] for e in whole], [e["accuracy_high"] for e in whole]]
            held_out = {"label": "held-out", "colour": HELD_OUT, "points": points, "interval": interval, "marked": True}
            drawn["curves"] += [held_out] if whole else []
        return drawn


def as_json(found: Any) -> bytes:
    """Returns the JSON of what is shown; in a browser, too, a text could show itself in another order, or hide."""
    return json.dumps(_visible(found)).encode()


def _visible(found: Any) -> Any:
    if isinstance(found, str):
        return visible(found)
    if isinstance(found, dict):
        return {visible(name): _visible(value) for name, value in found.items()}
    return [_visible(value) for value in found] if isinstance(found, list | tuple) else found

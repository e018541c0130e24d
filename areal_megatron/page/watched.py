"""What the page of a run shows, as data."""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.observe.advice import advise
from areal_megatron.observe.figures import GREY, HELD_OUT, Figure, sections
from areal_megatron.observe.metrics import read_status
from areal_megatron.observe.process_rows import HEAD, rows
from areal_megatron.observe.records import GONE_S, LaunchRecord, Pulse, has_room, read_record
from areal_megatron.observe.status import Status
from areal_megatron.page.evaluated import Evaluated
from areal_megatron.page.history import MOST_POINTS, History
from areal_megatron.page.summary import tables
from areal_megatron.process.shown import visible
from areal_megatron.run.folder import RunFolder

_MODES = {"sft": "supervised fine-tuning", "dpo": "direct preference optimisation", "reward_model": "reward model"}
"""Supervised modes in words."""

_FILES = ("#9333ea", "#ca8a04", "#db2777", GREY)
"""Colours of the files of data.eval."""


class Watched:
    """What is known of a run, whether it has begun, goes on or has ended."""

    def __init__(self, run: RunFolder):
        self.run = run
        self.config: Config | None = None
        self.history, self._evaluated = History(run), Evaluated(run)
        self._pulse, self._seen_at = Pulse(run, GONE_S), 0.0
        self._first: LaunchRecord | None = None
        self._problem = ""
        self.status = Status()
        """The last status.json that could be read."""
        self._overview: dict[str, Any] = {}
        self._curves = (-1, b"")

    def refresh(self) -> None:
        """Looks at the run folder. Not for two threads at once."""
        try:
            if self.config is None and self.run.config.exists():
                self.config = config_file.load(self.run.config)
            self.history.update()
            self._evaluated.update(self.history.evaluations)
            self._problem = self.history.problem or self._evaluated.problem
        except (ConfigError, OSError) as e:
            self._problem = str(e)
        self._overview = self._look()
        self._seen_at = time.monotonic()
        if self.config and self._curves[0] != self.history.revision:
            self._curves = self.history.revision, as_json(self.drawn(self.config))

    def overview(self) -> dict[str, Any]:
        """What the last look has found; without a `state` before the first."""
        age_s = time.monotonic() - self._seen_at if self._seen_at else 0.0
        return self._overview | {
            "revision": self._curves[0],
            "answers": self._evaluated.revision,
            "age_s": round(age_s, 1),
        }

    def curves(self) -> bytes:
        return self._curves[1]

    def answers(self) -> dict[str, Any]:
        """Returns the answers to the same prompts at each evaluation; `revision` changes when they do."""
        return {"revision": self._evaluated.revision, "evaluations": self._evaluated.shown}

    def _look(self) -> dict[str, Any]:
        config, record, last = self.config, read_record(self.run), self.history.last
        self.status = status = read_status(self.run)
        self._first = self._first or record
        state = self._pulse.state() if record else "not started" if config else "not begun"
        if record and state == "running" and record == self._first and abs(time.time() - record.time) > GONE_S:
            state = "silent"  # until the launcher is seen to write, or not to
        return {
            "name": config.name if config else self.run.folder.name,
            "folder": str(self.run.folder),
            "mode": config.mode if config else "",
            "state": state,
            "phase": status.phase if state == "running" else "",
            "version": max(status.version, last.get("version", 0)),
            "updates": config.updates if config else 0,
            "updated": last.get("time"),
            "now": time.time(),
            "elapsed_s": status.elapsed_s,
            "done": self.history.done,
            "facts": self._facts(config, record) if config else [],
            "advice": self._advice(config, record) if config else "",
            "cards": [card for card in self._cards(config) if card[0]] if config else [],
            "processes": {"head": HEAD, "rows": rows(record, status, False) if record else []},
            "problem": self._problem,
        }

    def _facts(self, config: Config, record: LaunchRecord | None) -> list[tuple[str, str]]:
        """What the heading says of the run, as (name, value)."""
        unit = "steps" if config.is_supervised else "updates"
        mode = _MODES.get(config.mode, "asynchronous PPO")
        facts = [
            ("", f"{mode}, {self.history.done} of {config.updates} {unit}"),
            ("model", str(config.model.path)),
            ("data", str(config.data.train)),
            ("commit", record.commit if record else ""),
            ("host", record.launcher if record else ""),
        ]
        return [(name, value) for name, value in facts if value]

    def _advice(self, config: Config, record: LaunchRecord | None) -> str:
        found = advise(config, self.history.lately, has_room(record, config))
        return found.line if found else ""

    def _cards(self, config: Config) -> list[tuple[str, str]]:
        def recent(key: str, form: str, scale: float = 1.0) -> str:
            values = self.history.values(key)[-10:]
            return form.format(median(values) * scale) if len(values) else ""

        if config.is_supervised:
            losses = self.history.values("loss")
            loss = f"{losses[0]:.2f} → {losses[-1]:.3f}" if len(losses) else ""
            return [(loss, "loss"), (recent("tokens_per_s", "{:,.0f}"), "tokens/s")]
        measured = [e["accuracy"] for e in self.history.evaluations if e.get("accuracy") is not None]
        held_out = [f"{100 * accuracy:.0f}%" for accuracy in measured]
        bound, stalest = config.rollout.max_staleness, self.history.values("staleness_max")
        return [
            (" → ".join([*held_out[:1], *held_out[1:][-1:]]), "held-out accuracy"),
            (recent("reward_mean", "{:.2f}"), "reward"),
            (recent("effective_tokens_per_s", "{:,.0f}"), "trained tokens/s"),
            (f"{max(stalest):.0f}" if len(stalest) else "", f"largest staleness, bound {bound}"),
            (recent("publish_s", "{:.2g} s"), "publish"),
            (recent("commit_s", "{:.0f} ms", 1000), "commit"),
        ]

    def drawn(self, config: Config) -> dict[str, Any]:
        """Returns the tables, and the sections with the points of their curves, of a run with this config."""
        shown = sections(config, self.history.keys)
        return {
            "x": "step" if config.is_supervised else "policy version",
            "end": config.updates,
            "tables": tables(config, self.history, self.status.elapsed_s),
            "sections": [
                {"title": s.title, "text": s.text, "figures": [self._figure(f, config) for f in s.figures]}
                for s in shown
            ],
        }

    def _figure(self, figure: Figure, config: Config) -> dict[str, Any]:
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
            drawn["bound"] = config.rollout.max_staleness
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
            drawn["curves"] += self._by_file()
        return drawn

    def _by_file(self) -> list[dict[str, Any]]:
        """Curves of the held-out accuracy on each file of data.eval, if there are several."""
        points: dict[str, list[tuple[float, ...]]] = {}
        for e in sorted(self.history.evaluations[-MOST_POINTS:], key=lambda e: e["version"]):
            for file, figures in (e.get("files") or {}).items():
                average = figures.get(f"avg@{e.get('n')}")
                if not isinstance(average, dict):
                    continue
                known: list[Any] = [average.get(key) for key in ("value", "low", "high")]
                if None not in known:
                    points.setdefault(file, []).append((e.get("version_mean") or e["version"], *known))
        curves = []
        for number, (file, found) in enumerate(points.items() if len(points) > 1 else ()):
            x, y, low, high = map(list, zip(*found, strict=True))
            colour = _FILES[number % len(_FILES)]
            curves.append({"label": file, "colour": colour, "points": [x, y], "interval": [low, high], "marked": True})
        return curves


def as_json(found: Any) -> bytes:
    """Returns the JSON of what is shown; in a browser, too, a text could show itself in another order, or hide."""
    return json.dumps(_visible(found)).encode()


def _visible(found: Any) -> Any:
    if isinstance(found, str):
        return visible(found)
    if isinstance(found, dict):
        return {visible(name): _visible(value) for name, value in found.items()}
    return [_visible(value) for value in found] if isinstance(found, list | tuple) else found

"""Writes an HTML page about a run: what it learned, its staleness, utilisation, and the cost of weight updates.

    python -m areal_megatron.report runs/NAME [--out FILE.html]

The page contains its figures and needs no network. timeline.json in the run folder has every process on one clock, for
ui.perfetto.dev or chrome://tracing. Works for finished, running and failed runs.
"""

from __future__ import annotations

import argparse
import html
import io
import math
import sys
import time
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from areal_megatron import config_file
from areal_megatron.command import program
from areal_megatron.config import Config
from areal_megatron.files import write_atomically
from areal_megatron.observe.advice import advise, since_resumed
from areal_megatron.observe.figures import GREY, HELD_OUT, THIRD, TRAIN, Figure, Section, sections
from areal_megatron.observe.metrics import STEPS, read_metrics, read_status
from areal_megatron.observe.spans import Span, busy_share, merge, read_spans, speeds_with_and_without
from areal_megatron.run import Run, is_engine, is_trainer
from areal_megatron.shown import guard, visible

FILES = (HELD_OUT, THIRD, "#9333ea", "#ca8a04", "#db2777", GREY)
"""Colours of the files of data.eval."""
UTILISATION_BINS = 60
FEW_POINTS = 15
"""The points of a line with fewer than this are marked."""
WAITS = ("wait", "publish", "pause")
"""Spans whose name starts with one of these do not count as work of their pool."""

WHAT = {"sft": "supervised fine-tuning", "dpo": "direct preference optimisation", "reward_model": "reward model"}
"""Supervised modes in words."""

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


@dataclass
class RunData:
    """The data that a report shows."""

    run: Run
    config: Config
    status: dict[str, Any]
    steps: list[dict[str, Any]]
    """The lines of metrics.jsonl that tell of an update."""
    evaluations: list[dict[str, Any]]
    spans: list[Span]
    advice: str
    """Which pool is short; "" if none is, or if that is not certain."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns (versions, values) of the steps that have a value for `key`."""
        points = [(step["version"], step[key]) for step in self.steps if step.get(key) is not None]
        return [version for version, _ in points], [value for _, value in points]

    def values(self, key: str) -> list[float]:
        return self.series(key)[1]


def load(run: Run) -> RunData:
    """Reads the run's files. Raises ConfigError if the folder is no run, and OSError."""
    config = config_file.load(run.config)
    records = read_metrics(run, lambda problem: print(f"warning: {problem}", file=sys.stderr))
    advice = advise(config, since_resumed(records))
    return RunData(
        run,
        config,
        read_status(run),
        [r for r in records if r["kind"] in STEPS],
        sorted((_whole(r) for r in records if r["kind"] == "eval"), key=lambda r: r["version"]),
        read_spans(run),
        advice.line if advice else "",
    )


def _whole(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Returns the evaluation with what one of another release may lack."""
    known = {key: value for key, value in evaluation.items() if value is not None}
    version = evaluation["version"]
    versions = {"version_min": version, "version_mean": version, "version_max": version}
    lacking = math.nan  # is drawn as no point
    figures = {"accuracy": lacking, "accuracy_low": lacking, "accuracy_high": lacking}
    return {**figures, **versions, "n": 1, "files": {}, **known}


def write_report(run: Run, out: Path) -> None:
    data = load(run)
    merge(run)
    keys = {key for step in data.steps for key in step}
    page = _page(data, [_drawn(data, section) for section in sections(data.config, keys)])
    write_atomically(out, visible(page))


# ---------------------------------------------------------------- sections


def _drawn(data: RunData, section: Section) -> str:
    table = ""
    if section.title == "Weight updates":
        head = ["trainer, tokens/s of a rank", "steps that meet a publish", "other steps", "share kept"]
        table = _table(head, _publish_rows(data))
    return _section(section.title, section.text, [_figure(data, figure) for figure in section.figures], table)


def _figure(data: RunData, figure: Figure) -> str:
    if figure.kind == "accuracy":
        return _accuracy(data)
    if figure.kind == "utilisation":
        return _utilisation(data)
    if figure.kind == "held_out":
        return _with_held_out(data, figure)
    return _staleness(data, figure) if figure.kind == "histogram" else _lines(data, figure)


def _publish_rows(data: RunData) -> list[tuple[str, ...]]:
    """Returns a row for each kind of step: a rank's tokens/s while weights are sent, in other steps, and the ratio."""
    trainers = [span for span in data.spans if is_trainer(span.process)]
    publishes = [span for span in trainers if span.name == "publish"]
    rows = []
    for name in ("train", "proximal"):
        speeds = speeds_with_and_without([s for s in trainers if s.name == name and "tokens" in s.args], publishes)
        cells = [f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{100 * speeds[0] / speeds[1]:.0f}%"] if speeds else "–––"
        rows.append((name, *cells))
    return rows


def _evaluation_rows(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the accuracy with its interval; of several answers or files also the figures of each file."""
    title = f"version {evaluation['version']}"
    if evaluation["version_max"] > evaluation["version_min"]:
        title += f" ({evaluation['version_min']} to {evaluation['version_max']}, mean {evaluation['version_mean']:.1f})"
    low, high = evaluation["accuracy_low"], evaluation["accuracy_high"]
    rows = [(f"held-out accuracy, {title}", _with_interval(evaluation["accuracy"], low, high))]
    if evaluation["n"] == len(evaluation["files"]) == 1:
        return rows
    return rows + [
        (f"{file}, {name}", _with_interval(*_interval(figure)))
        for file, figures in evaluation["files"].items()
        for name, figure in figures.items()
        if isinstance(figure, dict)
    ]


def _files(evaluation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The figures of each file of data.eval, if there are several."""
    files = list(evaluation["files"].items())
    return files if len(files) > 1 else []


def _interval(figure: dict[str, Any]) -> tuple[float, ...]:
    return tuple(math.nan if figure.get(key) is None else figure[key] for key in ("value", "low", "high"))


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f}% ({100 * low:.1f} – {100 * high:.1f})" if math.isfinite(value + low + high) else "–"


def _final_rows(data: RunData) -> list[tuple[str, str]]:
    def last(key: str, form: str, count: int = 10) -> str:
        values = data.values(key)[-count:]
        return form.format(mean(values)) if values else "–"

    rows = [("duration", _duration(data.status.get("elapsed_s", _time_covered(data))))]
    if data.config.is_supervised:
        for evaluation in data.evaluations:
            title = f"held-out, step {evaluation['version']}"
            for name, figures in {title: evaluation, **{f"{title}, {f}": e for f, e in _files(evaluation)}}.items():
                loss, accuracy = (
                    math.nan if figures.get(key) is None else figures[key] for key in ("loss", "accuracy")
                )
                rows.append((name, f"loss {loss:.4f}, accuracy {100 * accuracy:.1f}%"))
        return [
            *rows,
            ("loss, last 10 steps", last("loss", "{:.3f}")),
            ("tokens/s, median", _median(data, "tokens_per_s")),
        ]
    for evaluation in data.evaluations:
        rows += _evaluation_rows(evaluation)
    totals = {
        "trained tokens": "trained_tokens",
        "groups filtered": "groups_filtered",
        "groups skipped": "groups_skipped",
        "prompts too long": "prompts_too_long",
        "reward failures": "reward_failures",
        "answers not worked out": "answers_refused",
        "skipped optimizer steps": "skipped_steps",
    }
    return [
        *rows,
        ("accuracy, last 10 updates", last("accuracy", "{:.3f}")),
        ("reward, last 10 updates", last("reward_mean", "{:.2f}")),
        (
            "staleness, mean and largest",
            f"{last('staleness_mean', '{:.2f}', 10**9)}, {max(data.values('staleness_max'), default=0):.0f}",
        ),
        ("effective tokens/s, median", _median(data, "effective_tokens_per_s")),
        ("publish, median s", _median(data, "publish_s", 3)),
        ("commit, median s", _median(data, "commit_s", 3)),
        ("weights sent per update, MB", _median(data, "weights_bytes", 1, 1e-6)),
        ("elements sent per update, %", _median(data, "weights_changed", 2, 100)),
        ("log-probability difference, largest", f"{max(data.values('logprob_diff_max'), default=0):.1e}"),
        ("the same of the probe", f"{max(data.values('mismatch_max'), default=0):.1e}"),
        ("effective share, least", f"{min(data.values('effective_share'), default=1):.3f}"),
        *((name, f"{sum(data.values(key)):,.0f}") for name, key in totals.items()),
    ]


# ---------------------------------------------------------------- figures


def _axes(title: str, unit: str, wide: bool = False) -> tuple[plt.Figure, Axes]:
    figure, axes = plt.subplots(figsize=(12.4, 2.9) if wide else (4.4, 2.8), layout="constrained")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color="#0f172a")
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#cbd5e1")
    axes.tick_params(colors="#64748b", labelsize=9)
    axes.yaxis.label.set_color("#64748b")
    axes.xaxis.label.set_color("#64748b")
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: plt.Figure, wide: bool = False) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    svg = buffer.getvalue()
    return f"<figure{' class=wide' if wide else ''}>{svg[svg.index('<svg') :]}</figure>"


def _over_versions(data: RunData, axes: Axes) -> None:
    axes.set_xlabel("step" if data.config.is_supervised else "policy version")
    axes.set_xlim(0, data.config.updates)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _lines(data: RunData, figure: Figure) -> str:
    """Draws one figure with a line for each curve over versions."""
    drawing, axes = _axes(figure.title, figure.unit)
    for curve in figure.curves:
        versions, values = data.series(curve.key)
        axes.plot(
            versions,
            [value * figure.scale for value in values],
            color=curve.colour,
            linewidth=1.8,
            marker="o" if len(values) < FEW_POINTS else "",
            markersize=3,
            label=curve.label or None,
        )
    _over_versions(data, axes)
    if figure.log and any(value > 0 for curve in figure.curves for value in data.values(curve.key)):
        axes.set_yscale("log")
    if figure.zero:
        axes.set_ylim(bottom=0)
    if any(curve.label for curve in figure.curves):
        axes.legend(frameon=False, fontsize=9)
    return _svg(drawing)


def _with_held_out(data: RunData, shown: Figure) -> str:
    """Draws a metric of supervised steps, and what it is on held-out items."""
    figure, axes = _axes(shown.title, shown.unit)
    (curve,) = shown.curves
    axes.plot(*data.series(curve.key), color=curve.colour, linewidth=1.8, label="training batch")
    if found := [(e["version"], e[curve.key]) for e in data.evaluations if e.get(curve.key) is not None]:
        axes.plot(*zip(*found, strict=True), "o-", color=HELD_OUT, linewidth=1.8, markersize=5, label="held-out")
        axes.legend(frameon=False, fontsize=9)
    _over_versions(data, axes)
    return _svg(figure)


def _accuracy(data: RunData) -> str:
    figure, axes = _axes("Accuracy", "share of right answers")
    axes.plot(*data.series("accuracy"), color=TRAIN, linewidth=1.8, label="training batch")
    axes.plot(*data.series("sampled_accuracy"), color=THIRD, linewidth=1.2, label="all that was sampled")
    axes.plot(
        [e["version"] for e in data.evaluations],
        [e["accuracy"] for e in data.evaluations],
        "o-",
        color=HELD_OUT,
        linewidth=1.8,
        markersize=5,
        label="held-out",
    )
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _over_versions(data, axes)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return _svg(figure)


def _held_out(data: RunData) -> dict[str, list[tuple[float, float, float, float]]]:
    """Returns (mean version, avg@n, low, high) of each evaluation, by file; if there is one file, as "held-out"."""
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for evaluation in data.evaluations:
        for file, figures in evaluation["files"].items():
            if isinstance(average := figures.get(f"avg@{evaluation['n']}"), dict):
                name = file if len(evaluation["files"]) > 1 else "held-out"
                point = evaluation["version_mean"], *_interval(average)
                points.setdefault(name, []).append(point)
    return points


def _staleness(data: RunData, drawn: Figure) -> str:
    counts: dict[int, float] = {}
    for step in data.steps:
        for staleness, count in (step.get(drawn.curves[0].key) or {}).items():
            counts[int(staleness)] = counts.get(int(staleness), 0) + count
    bound, total = data.config.rollout.max_staleness, sum(counts.values()) or 1
    figure, axes = _axes(drawn.title, drawn.unit)
    axes.bar(list(counts), [count / total for count in counts.values()], color=TRAIN, width=0.8)
    axes.axvline(bound + 0.5, color=HELD_OUT, linestyle="--", linewidth=1.4, label=f"bound η = {bound}")
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    axes.set_xlim(-0.6, bound + 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("versions")
    return _svg(figure)


def _utilisation(data: RunData) -> str:
    figure, axes = _axes("Pool utilisation", "share of time at work", wide=True)
    begin, end = _time_range(data)
    edges = [begin + (end - begin) * i / UTILISATION_BINS for i in range(UTILISATION_BINS + 1)]
    minutes = [(edge - begin) / 60 for edge in edges]
    for pool, is_of_pool, color in (("trainer", is_trainer, TRAIN), ("rollout", is_engine, HELD_OUT)):
        work = [s for s in data.spans if is_of_pool(s.process) and not s.name.startswith(WAITS)]
        axes.stairs(busy_share(work, edges), minutes, color=color, linewidth=1.8, label=pool)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlim(0, minutes[-1])
    axes.set_xlabel("minutes since the first span")
    axes.legend(frameon=False, fontsize=9, loc="lower right", ncols=2, bbox_to_anchor=(1, 1))
    return _svg(figure, wide=True)


# ---------------------------------------------------------------- page


def _page(data: RunData, sections: list[str]) -> str:
    name = html.escape(data.config.name)
    what = WHAT.get(data.config.mode, "asynchronous PPO")
    unit = "steps" if data.config.is_supervised else "updates"
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(data.steps[0]["time"])) if data.steps else "no step yet"
    return "\n".join(
        [
            f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{name} · areal_megatron</title>",
            f"<meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<style>{STYLE}</style></head><body><main>",
            f"<h1>{name}</h1><p>{what}, {len(data.steps)} of {data.config.updates} {unit}, {started}</p>",
            _banner(data),
            _cards(data),
            f"<p>Advice: {html.escape(data.advice)}</p>" if data.advice else "",
            *sections,
            "<h2>Figures and configuration</h2><div class=tables>",
            _table(["final figures", ""], _final_rows(data)),
            _table(["configuration", ""], [(key, str(value)) for key, value in _settings(data.config)]),
            "</div></main></body></html>",
        ]
    )


def _banner(data: RunData) -> str:
    if len(data.steps) >= data.config.updates:
        return ""
    last = max([step["time"] for step in data.steps] + [span.end for span in data.spans], default=None)
    sign = f", last sign of life {time.strftime('%H:%M:%S', time.localtime(last))}" if last else ""
    return (
        f"<div class=banner>This run is incomplete: {len(data.steps)} of {data.config.updates} updates, phase "
        f"“{html.escape(str(data.status.get('phase', 'unknown')))}”{sign}. "
        f"Its processes' logs are in {html.escape(data.config.name)}/logs/.</div>"
    )


def _cards(data: RunData) -> str:
    if data.config.is_supervised:
        losses = data.values("loss")
        cards = [
            (f"{losses[0]:.2f} → {losses[-1]:.3f}" if losses else "–", "loss"),
            (_median(data, "tokens_per_s"), "tokens/s"),
        ]
    else:
        accuracy = [f"{100 * e['accuracy']:.0f}%" for e in data.evaluations if math.isfinite(e["accuracy"])]
        cards = [
            (" → ".join([accuracy[0], accuracy[-1]][: len(accuracy)]) if accuracy else "–", "held-out accuracy"),
            (_median(data, "effective_tokens_per_s"), "effective tokens/s"),
            (
                f"{max(data.values('staleness_max'), default=0):.0f}",
                f"largest staleness, bound {data.config.rollout.max_staleness}",
            ),
            (_percent(data.values("trainer_idle_share")), "trainer idle"),
            (_percent(data.values("engine_idle_share")), "engines idle"),
        ]
    cards.append((_duration(data.status.get("elapsed_s", _time_covered(data))), "duration"))
    return (
        "<div class=cards>"
        + "".join(f"<div class=card><b>{html.escape(value)}</b><span>{label}</span></div>" for value, label in cards)
        + "</div>"
    )


def _section(title: str, text: str, figures: list[str], table: str = "") -> str:
    below = f"<div class=tables style='margin-top:14px'>{table}</div>" if table else ""
    return f"<h2>{title}</h2><p>{text}</p><div class=figures>{''.join(figures)}</div>{below}"


def _table(head: list[str], rows: list[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div><table><tr>{top}</tr>{body}</table></div>"


def _settings(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    settings = []
    for field in fields(node):
        value = getattr(node, field.name)
        settings += _settings(value, f"{field.name}.") if is_dataclass(value) else [(prefix + field.name, value)]
    return settings


def _time_range(data: RunData) -> tuple[float, float]:
    begin = min((span.start for span in data.spans), default=0.0)
    return begin, max([begin + 1.0] + [span.end for span in data.spans])


def _time_covered(data: RunData) -> float:
    times = [step["time"] for step in data.steps + data.evaluations]
    return max(times) - min(times) if times else 0.0


def _median(data: RunData, key: str, digits: int = 0, scale: float = 1.0) -> str:
    values = data.values(key)
    return f"{median(values) * scale:,.{digits}f}" if values else "–"


def _percent(values: list[float]) -> str:
    return f"{100 * mean(values):.0f}%" if values else "–"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def main() -> int:
    guard()
    parser = argparse.ArgumentParser(prog=program("areal_megatron.report"), description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder, e.g. runs/demo")
    parser.add_argument("--out", type=Path, help="the file to write; default: report.html in the run folder")
    options = parser.parse_args()
    out = options.out or options.run / "report.html"
    try:
        write_report(Run(options.run), out)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

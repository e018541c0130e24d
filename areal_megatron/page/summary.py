"""The figures of a whole run and its settings, as tables of its page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from statistics import mean, median
from typing import Any, TypeGuard

from areal_megatron.config import Config, config_fields
from areal_megatron.observe.console import duration
from areal_megatron.page.history import History

_LAST = 10
"""Updates of which the last figures are a mean."""
_TOTALS = {
    "trained tokens": "trained_tokens",
    "groups filtered": "groups_filtered",
    "groups skipped": "groups_skipped",
    "prompts too long": "prompts_too_long",
    "reward failures": "reward_failures",
    "answers not worked out": "answers_refused",
    "skipped optimizer steps": "skipped_steps",
}
_HELD_OUT = {"loss": "{:.4f}", "accuracy": "{:.1%}"}
_SUPERVISED = (
    ("loss, last 10 steps", "loss", "{:.3f}", lambda values: mean(values[-_LAST:])),
    ("tokens/s, median", "tokens_per_s", "{:,.0f}", median),
)
_RL = (
    ("accuracy, last 10 updates", "accuracy", "{:.3f}", lambda values: mean(values[-_LAST:])),
    ("reward, last 10 updates", "reward_mean", "{:.2f}", lambda values: mean(values[-_LAST:])),
    ("staleness, mean", "staleness_mean", "{:.2f}", mean),
    ("staleness, largest", "staleness_max", "{:.0f}", max),
    ("effective tokens/s, median", "effective_tokens_per_s", "{:,.0f}", median),
    ("trainer idle", "trainer_idle_share", "{:.0%}", mean),
    ("engines idle", "engine_idle_share", "{:.0%}", mean),
    ("publish, median s", "publish_s", "{:,.3f}", median),
    ("commit, median s", "commit_s", "{:,.3f}", median),
    ("tokens prefilled again per update, mean", "prefilled_again", "{:,.0f}", mean),
    ("weights sent per update, MB", "weights_bytes", "{:,.1f}", lambda values: median(values) * 1e-6),
    ("elements sent per update", "weights_changed", "{:.2%}", median),
    ("log-probability difference, largest", "logprob_diff_max", "{:.1e}", max),
    ("the same of the probe", "mismatch_max", "{:.1e}", max),
    ("effective share, least", "effective_share", "{:.3f}", min),
    ("learning rate over what is scheduled, mean", "lr_factor", "{:.3f}", mean),
    *((title, key, "{:,.0f}", sum) for title, key in _TOTALS.items()),
)


def tables(config: Config, history: History, elapsed_s: float | None) -> list[dict[str, Any]]:
    """Returns the tables as {title, rows}; `elapsed_s`: how long the run has gone on, if that is known.
    What was not measured has no row."""
    figures = _SUPERVISED if config.is_supervised else _RL
    rows = [] if elapsed_s is None else [("duration", duration(elapsed_s))]
    for evaluation in history.evaluations:
        rows += _evaluation(evaluation, config.is_supervised)
    for title, key, form, summed in figures:
        if len(values := history.values(key)):
            rows.append((title, form.format(summed(values))))
    settings = [(name, str(value)) for name, _, value in config_fields(config) if not is_dataclass(value)]
    return [{"title": "Figures of the run", "rows": rows}, {"title": "Configuration", "rows": settings}]


def _evaluation(evaluation: dict[str, Any], is_supervised: bool) -> Iterator[tuple[str, str]]:
    """Yields the figures of an evaluation; if it is of several files, or of several answers, of each file too."""
    files = evaluation.get("files") or {}
    if is_supervised:
        title = f"held-out, step {evaluation['version']}"
        by_file = {f"{title}, {file}": figures for file, figures in files.items()} if len(files) > 1 else {}
        for name, figures in {title: evaluation, **by_file}.items():
            known = {key: figures[key] for key in _HELD_OUT if _is_number(figures.get(key))}
            found = [f"{key} {_HELD_OUT[key].format(value)}" for key, value in known.items()]
            if found:
                yield name, ", ".join(found)
        return
    title, low, high = (evaluation.get(f"version{part}") for part in ("", "_min", "_max"))
    if low is not None and high is not None and high > low:
        title = f"{title} ({low} to {high}, mean {evaluation.get('version_mean') or title:.1f})"
    ends = {"value": "accuracy", "low": "accuracy_low", "high": "accuracy_high"}
    value = {part: evaluation.get(key) for part, key in ends.items()}
    if shown := _interval(value):
        yield f"held-out accuracy, version {title}", shown
    if len(files) > 1 or evaluation.get("n") != 1:
        for file, figures in files.items():
            yield from ((f"{file}, {name}", shown) for name, f in figures.items() if (shown := _interval(f)))


def _interval(figure: Any) -> str:
    if not isinstance(figure, dict) or not _is_number(figure.get("value")):
        return ""
    low, high = figure.get("low"), figure.get("high")
    around = f" ({100 * low:.1f} – {100 * high:.1f})" if _is_number(low) and _is_number(high) else ""
    return f"{100 * figure['value']:.1f}%{around}"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float)

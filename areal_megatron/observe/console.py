"""The live console of a run: a panel on a terminal, one line per event anywhere else.

The launcher runs it. It reads status.json and metrics.jsonl and nothing else, and imports neither torch nor vllm.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_megatron.config import Config
from areal_megatron.observe import update_warnings
from areal_megatron.observe.advice import Short, advise
from areal_megatron.observe.metrics import STEPS, MetricsReader, read_status, surviving, trained_before
from areal_megatron.observe.records import has_room, read_record
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.process.shown import guard, visible
from areal_megatron.process.terminal import Terminal
from areal_megatron.run.folder import RunFolder

EVENTS_SHOWN = 6
TREND_WIDTH = 32
REDRAW_S = 0.5
WAITED_S = 10.0
"""The time from one line about the first batch to the next, at least."""
EVENTS = ("first_batch", "engines", "trainers")
"""What is timed of a start (startup.py)."""
WARNED_EVERY = 20
"""Updates from one warning of the same kind to the next, at least."""
ADVISED_EVERY = 50
"""Updates from one advice about the same pool to the next, at least."""


class Console:
    """Shows one run; on a terminal it owns the lower part of the screen until `close`.

    Updates and evaluations of earlier jobs of the run are counted, and their events are not shown again.

    Example:
        console = Console(run, config)
        while run_is_alive():
            console.refresh()
            time.sleep(0.1)
        console.close()
        print(console.summary())
    """

    def __init__(self, run: RunFolder, config: Config, stream: TextIO | None = None):
        self._run, self._config = run, config
        self._reader = MetricsReader(run)
        self._terminal = Terminal(stream)
        self._live = None
        if self._terminal.is_terminal:
            self._live = Live(console=self._terminal, auto_refresh=False)
            self._live.start()
            guard()  # what is printed above the panel
        self._drawn = float("-inf")
        self._phase, self._told_of_lines = "", False
        self._first_batch, self._told_at = "", 0.0
        """What was told last of the first batch, and when; at first, when this phase began."""
        self._steps: list[dict[str, Any]] = []
        self._before = trained_before(run)
        self._resumed_after = 0
        self._warned_at: int | None = None
        """The update of the last warning."""
        self._advised_at: dict[Short, int] = {}
        """The pool that was short → the update of the last advice about it."""
        self._evaluations: list[dict[str, Any]] = []
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        for record in self._reader.new():
            self._take(record)

    def refresh(self) -> None:
        """Reads what is new and shows it, at most once in REDRAW_S seconds; call it as often as you like."""
        if time.monotonic() - self._drawn >= REDRAW_S:
            self._drawn = time.monotonic()
            self._update()

    def close(self) -> None:
        """Shows the last state, leaves it on the screen and releases the terminal."""
        self._update()
        if self._live:
            self._live.stop()

    @property
    def _done(self) -> int:
        return self._before + len(self._steps)

    @property
    def _updates(self) -> list[dict[str, Any]]:
        """The updates that were read, since the run began or was resumed last."""
        return self._steps[self._resumed_after :]

    def summary(self) -> str:
        """Returns the results of the run in a few lines."""
        lines = [f"{self._done} of {self._config.updates} {self._unit} done in {self._run.folder}"]
        if self._config.mode == "rl":
            lines.append(f"held-out accuracy {self._held_out()}")
        elif self._steps:
            lines.append(f"loss {number(self._steps[0].get('loss'), 3)} → {number(self._steps[-1].get('loss'), 3)}")
            if self._evaluations:
                lines.append(f"held-out accuracy {self._held_out()}")
        return "\n".join(lines)

    def _update(self) -> None:
        status = read_status(self._run)
        phase = status.phase or "starting"
        if phase != self._phase:
            self._phase, self._told_at = phase, time.monotonic()
            self._note(time.time(), phase)
        with suppress(OSError):  # of a shared file system: the next look has what this one could not read
            for record in self._reader.new():
                self._take(record)
                self._tell(record)
        if self._reader.problem and not self._told_of_lines:
            self._told_of_lines = True
            self._note(time.time(), f"warning: {self._reader.problem}")
        if self._live:
            self._live.update(self._fitting(status), refresh=True)
        elif self._config.mode == "rl" and phase == "training" and not self._updates:
            self._tell_first_batch(status)

    def _tell_first_batch(self, status: Status) -> None:
        """Tells where the batch is that the first update waits for, which may take minutes."""
        groups = self._config.batch_size // self._config.rollout.group_size
        answers = sum(engine.running for engine in status.engines)
        filtered = f", {status.filtered_groups} filtered" * bool(status.filtered_groups)
        said = (
            f"first batch: {status.buffer_groups} of {groups} groups scored{filtered}, {answers} answers are under way"
        )
        if status.training_groups:
            said = "first batch: all groups scored, it is being trained"
        if said != self._first_batch and time.monotonic() - self._told_at >= WAITED_S:
            self._first_batch, self._told_at = said, time.monotonic()
            self._print(time.time(), said)

    def _fitting(self, status: Status) -> Panel:
        """Returns the panel with as many of the last events as the terminal is high enough for."""
        for events in range(len(self._events), 0, -1):
            panel = self._panel(status, events)
            if len(self._terminal.render_lines(panel)) <= self._terminal.height:
                return panel
        return self._panel(status, 0)

    @property
    def _unit(self) -> str:
        return "updates" if self._has_rewards else "steps"

    @property
    def _has_rewards(self) -> bool:
        return not (self._config.is_supervised or self._config.is_driven)

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "eval":
            self._evaluations = sorted([*self._evaluations, record], key=lambda e: e["version"])
        elif record["kind"] in STEPS:
            self._steps.append(record)
        elif record["kind"] == "resume":
            self._steps = surviving(self._steps, record["version"])
            self._evaluations = surviving(self._evaluations, record["version"])
            self._resumed_after, self._warned_at, self._advised_at = len(self._steps), None, {}

    def _tell(self, record: dict[str, Any]) -> None:
        if record["kind"] == "eval":
            measured = (
                f"held-out loss {number(record['loss'], 4)}, accuracy" if "loss" in record else "held-out accuracy"
            )
            self._note(
                record["time"],
                f"{measured} {percent(record.get('accuracy'))} at {_versions(record)}, "
                f"{record.get('items', '?')} prompts{_unscored(record)}{_by_file(record)}",
            )
        elif record["kind"] == "start":
            batch, engines, trainers = (number(record.get(f"{event}_s"), 0) for event in EVENTS)
            self._note(
                record["time"],
                f"first batch trained {batch} s after the launch; engines served after {engines} s, trainers were "
                f"ready after {trainers} s",
            )
        elif record["kind"] == "checkpoint" and (said := record.get("error") or record.get("warning")):
            self._note(record["time"], said)
        elif record["kind"] == "resume":
            begun = f"resumed at version {record['version']}" if record["version"] >= 0 else "began anew"
            self._note(record["time"], begun)
        if record["kind"] == "update":
            self._warn(record)
            self._advise(record)
        if not self._live and (record["kind"] == "update" or (record["kind"] in STEPS and self._is_twentieth())):
            total = self._config.updates
            left = _seconds_left(self._updates, total - self._done)
            ending = f"  {duration(left)} left" if left else ""
            self._print(record["time"], _line(record, self._done, total) + ending)

    def _warn(self, record: dict[str, Any]) -> None:
        """Tells what goes wrong in the updates, once in WARNED_EVERY of them."""
        since = record["version"] - (-WARNED_EVERY if self._warned_at is None else self._warned_at)
        if since >= WARNED_EVERY and (said := update_warnings.warning(self._config, self._updates)):
            self._warned_at = record["version"]
            self._note(record["time"], f"warning: {said}")

    def _advise(self, record: dict[str, Any]) -> None:
        """Tells which pool is short, once in ADVISED_EVERY updates."""
        room = has_room(read_record(self._run), self._config)
        advice, version = advise(self._config, self._updates, room), record["version"]
        last = self._advised_at.get(advice.short) if advice else None
        if advice and (last is None or version >= last + ADVISED_EVERY):
            self._advised_at[advice.short] = version
            self._note(record["time"], f"advice: {advice.line}")

    def _is_twentieth(self) -> bool:
        """Whether this step completes another twentieth: supervised steps are too many to log each."""
        count, total = self._done, self._config.updates
        return len(self._steps) == 1 or count * 20 // total > (count - 1) * 20 // total

    def _note(self, when: float, event: str) -> None:
        self._events.append(_stamped(when, event))
        if not self._live:
            self._print(when, event)

    def _print(self, when: float, line: str) -> None:
        self._terminal.print(Text(_stamped(when, line)))

    def _panel(self, status: Status, events: int) -> Panel:
        body = [self._progress(), Text()]
        body.append(_facts(self._rl_facts(status) if self._has_rewards else self._supervised_facts()))
        if self._config.has_engines:
            body += [Text(), _engine_table(status.engines, self._config.rollout.engines)]
        last = visible("\n".join(list(self._events)[len(self._events) - events :]))
        body += [Text(), Text(last, "dim", no_wrap=False, overflow="fold")]
        elapsed = status.elapsed_s
        return Panel(
            Group(*body),
            title=Text(self._config.name, "bold").append(f"  {self._phase}", "not bold"),
            title_align="left",
            subtitle=duration(elapsed) if elapsed is not None else None,
            subtitle_align="right",
            border_style="cyan",
            width=self._terminal.width,
        )

    def _progress(self) -> Table:
        done, total = self._done, self._config.updates
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column()
        row.add_column(ratio=1)
        row.add_column(justify="right")
        left = _seconds_left(self._updates, total - done)
        row.add_row(
            self._unit,
            ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="green"),
            f"{done} of {total}" + (f", {duration(left)} left" if left else ""),
        )
        return row

    def _rl_facts(self, status: Status) -> dict[str, str]:
        last = self._steps[-1] if self._steps else {}
        return {
            "accuracy": f"{percent(last.get('accuracy')):<6}  {_trend(self._steps, 'accuracy')}",
            "held-out": self._held_out(),
            "reward": f"{number(last.get('reward_mean')):<6}  {_trend(self._steps, 'reward_mean')}",
            "answers": f"{number(last.get('response_tokens_mean'))} tokens mean, "
            f"{number(last.get('response_tokens_max'), 0)} longest, "
            f"{percent(last.get('truncated_share'))} cut",
            "staleness": f"{number(last.get('staleness_mean'))} mean, {number(last.get('staleness_max'), 0)} max "
            f"(bound {self._config.rollout.max_staleness})",
            "rate": _rate(last),
            "trained": f"{number(last.get('effective_tokens_per_s'), 0)} tokens/s",
            "idle": f"trainer {percent(last.get('trainer_idle_share'))}, "
            f"engines {percent(last.get('engine_idle_share'))}",
            "waiting": f"{status.buffer_groups} groups in the buffer, {status.running_groups} being answered",
        }

    def _held_out(self) -> str:
        if not self._evaluations:
            return "not measured yet"
        first, last = self._evaluations[0], self._evaluations[-1]
        accuracy = f"{percent(first.get('accuracy'))} ({_versions(first)})"
        if last is first:
            return accuracy
        return f"{accuracy} → {percent(last.get('accuracy'))} ({_versions(last)})"

    def _supervised_facts(self) -> dict[str, str]:
        last = self._steps[-1] if self._steps else {}
        return {
            "loss": f"{number(last.get('loss'), 3):<6}  {_trend(self._steps, 'loss')}",
            "trained": f"{number(last.get('tokens_per_s'), 0)} tokens/s",
            **({"held-out": self._held_out()} if self._evaluations else {}),
            "learning rate": _rate(last),
        }


def _versions(evaluation: dict[str, Any]) -> str:
    """Says which version was measured, or the range where most answers are of later ones."""
    version = evaluation["version"]
    if (evaluation.get("version_mean") or version) < version + 0.5:
        return f"version {version}"
    return f"versions {version} to {evaluation['version_max']}"


def _rate(last: dict[str, Any]) -> str:
    if last.get("lr") is None:
        return "–"
    factor = last.get("lr_factor")
    return f"{last['lr']:.2e}" + ("" if factor is None or factor == 1 else f", {factor:.2f} of what is scheduled")


def _stamped(when: float, text: str) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(when))}  {text}"


def _line(record: dict[str, Any], count: int, total: int) -> str:
    if record["kind"] != "update":
        return (
            f"step {count}/{total}  loss {number(record.get('loss'), 4)}  "
            f"{number(record.get('tokens_per_s'), 0)} tokens/s"
        )
    return (
        f"update {count}/{total}  reward {number(record.get('reward_mean'))}  "
        f"accuracy {percent(record.get('accuracy'))}  staleness {number(record.get('staleness_mean'))} "
        f"(max {number(record.get('staleness_max'), 0)})  "
        f"{number(record.get('effective_tokens_per_s'), 0)} tokens/s  "
        f"idle trainer {percent(record.get('trainer_idle_share'))} "
        f"engines {percent(record.get('engine_idle_share'))}"
    )


def _facts(facts: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, value in facts.items():
        grid.add_row(name, value)
    return grid


def _unscored(evaluation: dict[str, Any]) -> str:
    failed = evaluation.get("failed")
    return f", {failed} answer{'s' * (failed > 1)} without a score" if failed else ""


def _by_file(evaluation: dict[str, Any]) -> str:
    """The accuracy of each file, if there are several."""
    files, average = evaluation.get("files", {}), f"avg@{evaluation.get('n')}"
    shares = {
        name: figures.get("accuracy", (figures.get(average) or {}).get("value"))
        for name, figures in (files or {}).items()
    }
    parts = [f"{name} {percent(share)}" for name, share in shares.items()]
    return f": {', '.join(parts)}" if len(parts) > 1 else ""


def _engine_table(engines: list[EngineStatus], expected: int) -> Table | Text:
    if not engines:
        return Text(f"{expected} engine{'s' * (expected > 1)} starting", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("engine", "state", "version", "requests", "tokens/s"):
        table.add_column(name, justify="left" if name in ("engine", "state") else "right")
    for engine in engines:
        version = str(engine.version) if engine.version >= 0 else "–"
        numbers = version, str(engine.running), number(engine.tokens_per_s, 0)
        table.add_row(engine.name, engine.state, *numbers)
    return table


def _seconds_left(steps: list[dict[str, Any]], left: int) -> float | None:
    """Estimates the time that `left` updates take, from the pace of the last ten since the run began or was resumed.

    Returns None before the second of them, and if no updates are left; 0 if the clock was set back meanwhile.
    """
    recent = steps[-10:]
    if len(recent) < 2 or left <= 0:
        return None
    return max(0.0, recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1) * left


def _trend(records: list[dict[str, Any]], key: str) -> str:
    values = [r[key] for r in records if r.get(key) is not None][-TREND_WIDTH:]
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / span)] for value in values)


def number(value: float | None, digits: int = 2) -> str:
    """Returns a number for people; – if it is not known."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Returns a share in per cent; – if it is not known."""
    return "–" if value is None else f"{100 * value:.0f}%"


def duration(seconds: float) -> str:
    """Returns the two largest parts of a time: 2 h 3 min, 3 min 12 s or 12 s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

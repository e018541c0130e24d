import io
import re
import subprocess
import sys

import pytest

from areal_megatron.config import Config
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.observe import console as console_module
from areal_megatron.observe.console import Console
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.planning.pools import Node, Placement, Process, Slot
from areal_megatron.run.folder import RunFolder

UPDATE = {
    "reward_mean": -1.25,
    "accuracy": 0.37,
    "staleness_mean": 1.5,
    "staleness_max": 3,
    "effective_tokens_per_s": 1234.5,
    "trainer_idle_share": 0.12,
    "engine_idle_share": 0.08,
}


SHORT = {"update_s": 10.0, "trainer_wait_s": 4.0, "straggler_wait_s": 0.0, "engines_serving": 2}
SHORT |= {"engine_idle_share": 0.0, "engine_full_share": 1.0}
"""Measurements of an update for which engines are short."""


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


class Screen(io.StringIO):
    """A terminal that remembers what was written to it."""

    def isatty(self):
        return True


def shown(screen):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())


@pytest.mark.parametrize(
    ("limit", "wrong", "told"),
    [
        (
            0.05,
            {"effective_share": 0.5},
            "warning: effective_share was 0.86 over 10 updates, below 0.9: steps are too long for answers this stale; "
            "lower optimizer.lr=2e-05, then rollout.max_staleness=8, see docs/staleness.md",
        ),
        (
            0.0,
            {"kl_staleness": 0.3},
            "warning: kl_staleness was 0.24 of the entropy over 10 updates, above 0.2: steps are too long for answers "
            "this stale; set optimizer.staleness_kl=0.02, or lower optimizer.lr=2e-05, then "
            "rollout.max_staleness=8, see docs/staleness.md",
        ),
        (
            0.05,
            {"residual_max": 65_504.0},
            "warning: residual_max was 33,651 over 10 updates, and float16 ends at 65,504: set model.dtype=bfloat16 "
            "before activations overflow",
        ),
    ],
)
def test_what_goes_wrong_in_the_mean_of_updates_is_told_now_and_then(run, limit, wrong, told):
    out, writer = io.StringIO(), MetricsWriter(run)
    config = Config(name="demo", updates=99)
    config.optimizer.staleness_kl = limit
    console = Console(run, config, out)
    for version in range(1, 80):
        fine = UPDATE | {"effective_share": 0.95, "kl_staleness": 0.0, "entropy": 0.5, "residual_max": 20_000.0}
        writer.write("update", version, fine | (wrong if 25 < version < 70 else {}))
    writer.flush()
    console.close()
    writer.close()
    lines = [line.split("  ", 1)[1] for line in out.getvalue().splitlines()]
    warned = [place for place, line in enumerate(lines) if line.startswith("warning")]
    assert lines[warned[0]] == told
    since = [int(re.match(r"update (\d+)/99", lines[place + 1])[1]) for place in warned]
    assert since == [since[0], since[0] + 20, since[0] + 40] and 26 <= since[0] <= 29


def test_a_rate_that_cannot_be_scaled_enough_is_told_after_ten_updates(run):
    out, writer = io.StringIO(), MetricsWriter(run)
    console = Console(run, Config(name="demo", updates=99), out)
    for version in range(1, 20):
        writer.write("update", version, UPDATE | {"lr_factor": 0.01 if version > 4 else 0.02})
    writer.flush()
    console.close()
    writer.close()
    [warned] = (line for line in out.getvalue().splitlines() if "warning" in line)
    assert "in 10 updates even 0.01 of the rate left more than optimizer.staleness_kl=0.02 of the entropy" in warned
    assert "lower optimizer.lr=2e-05, then rollout.max_staleness=8" in warned
    assert out.getvalue().index("update 13/99") < out.getvalue().index(warned) < out.getvalue().index("update 14/99")


@pytest.mark.parametrize(
    ("dump", "read"), [(False, "rollout.dump=true keeps them"), (True, "areal trajectories 'a b/x'")]
)
def test_a_run_whose_answers_teach_nothing_is_told_after_three_updates(run, dump, read):
    out, writer = io.StringIO(), MetricsWriter(run)
    config = Config(name="x", runs_dir="a b", updates=99)
    config.rollout.dump = dump
    console = Console(run, config, out)
    for version, idle in enumerate((1.0, 1.0, 0.99, 1.0, 1.0, 1.0, 1.0), 1):
        writer.write("update", version, UPDATE | {"zero_advantage_share": idle, "accuracy": 0.0})
    writer.close()
    console.close()
    [warned] = (line for line in out.getvalue().splitlines() if "warning" in line)
    assert "warning: in 3 updates all answers to a prompt had the same reward, 0% of them right" in warned
    assert f"read some ({read}), see what the reward gives to right ones (areal rows)" in warned
    assert out.getvalue().index("update 5/99") < out.getvalue().index(warned) < out.getvalue().index("update 6/99")


def test_a_run_that_goes_well_is_not_warned_of(run):
    """Most single updates of docs/staleness.md's runs that lost nothing stay above 0.9, a few are far below."""
    out, writer = io.StringIO(), MetricsWriter(run)
    console = Console(run, Config(name="demo", updates=99), out)
    for version in range(1, 80):
        scaled = {"kl_staleness": 0.025, "entropy": 0.5, "lr_factor": 0.01 if version % 9 else 0.3}
        writer.write("update", version, UPDATE | scaled | {"effective_share": 0.522 if version % 10 == 0 else 0.97})
    writer.flush()
    console.close()
    writer.close()
    assert "warning" not in out.getvalue()


def test_the_last_events_are_shown_where_the_terminal_is_low(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen()
    console = Console(run, Config(name="demo", updates=40), screen)
    for number in range(6):
        console._note(0.0, f"event {number} " + "of many words " * 10)
    console.refresh()
    assert "event 5" in shown(screen) and "event 0" not in shown(screen)
    console.close()


@pytest.mark.parametrize("columns", [80, 100, 140, 200])
def test_the_panel_takes_the_whole_width_and_cuts_nothing(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen()
    console = Console(run, Config(name="demo", updates=40), screen)
    advice = "advice: engines are short: " + " ".join(f"word{n}" for n in range(40)) + " " + "x" * 150
    console._note(0.0, advice)
    console.close()
    rows = shown(screen).splitlines()
    assert max(map(len, rows)) == columns
    text = "".join(row.strip("│").rstrip() for row in rows if row.startswith("│"))
    assert advice.replace(" ", "") in text.replace(" ", "")


@pytest.mark.parametrize(("device", "slots", "told"), [("cpu", 2, False), ("cpu", 3, True), ("cuda", 2, True)])
def test_an_engine_on_cores_is_advised_where_one_is_idle(run, device, slots, told):
    out, writer = io.StringIO(), MetricsWriter(run)
    config = Config(name="demo", updates=400)
    config.rollout.max_staleness, config.machine.device = 1, device
    processes = [Process(f"{pool}-0", pool, 0, "n", (Slot("n", n),)) for n, pool in enumerate(("trainer", "rollout"))]
    Recorder(run, Placement((Node("n", tuple(range(slots))),), tuple(processes))).write({}, 0)
    console = Console(run, config, out)
    for version in range(1, 20):
        writer.write("update", version, UPDATE | SHORT)
    writer.close()
    console.close()
    assert ("advice: engines are short" in out.getvalue()) == told


def test_the_short_pool_is_told_now_and_then(run):
    out, writer = io.StringIO(), MetricsWriter(run)
    config = Config(name="demo", updates=400)
    config.rollout.max_staleness = 1
    console = Console(run, config, out)
    for version in range(1, 130):
        if version == 100:
            writer.write("resume", 99, {"incarnation": 1})
        writer.write("update", version, UPDATE | SHORT)
    writer.flush()
    console.close()
    writer.close()
    lines = [line.split("  ", 1)[1] for line in out.getvalue().splitlines()]
    told = [place for place, line in enumerate(lines) if line.startswith("advice")]
    assert lines[told[0]].startswith("advice: engines are short: trainers wait for 40% of the time")
    assert [re.match(r"update (\d+)/400", lines[place + 1])[1] for place in told] == ["12", "62", "111"]


def test_without_a_terminal_one_line_an_update_and_a_phase(run):
    out = io.StringIO()
    console = Console(run, Config(name="demo", updates=40), out)
    console.refresh()
    write_status(run, Status(phase="training", version=0))
    writer = MetricsWriter(run)
    writer.write("eval", 0, {"accuracy": 0.41, "items": 500})
    writer.write("update", 1, UPDATE)
    writer.write("update", 2, UPDATE)
    writer.flush()
    console.close()
    console.close()
    writer.close()
    lines = [line.split("  ", 1)[1] for line in out.getvalue().splitlines()]
    second, left = lines.pop().rsplit("  ", 1)
    assert second.startswith("update 2/40  reward") and re.fullmatch(r"[\d. mins]+ left", left)
    assert lines == [
        "starting",
        "training",
        "held-out accuracy 41% at version 0, 500 prompts",
        "update 1/40  reward -1.25  accuracy 37%  staleness 1.50 (max 3)  1,234 tokens/s  idle trainer 12% engines 8%",
    ]


def test_without_a_terminal_the_first_batch_is_told_while_it_grows(run, monkeypatch):
    monkeypatch.setattr(console_module, "REDRAW_S", 0.0)
    monkeypatch.setattr(console_module, "WAITED_S", 0.0)
    out, writer = io.StringIO(), MetricsWriter(run)
    config = Config(name="demo", updates=40, batch_size=32)
    config.rollout.group_size = 8
    console = Console(run, config, out)
    busy = [EngineStatus(name=f"engine-{n}", state="ready", running=12) for n in range(2)]
    for finished, training, filtered in ((0, 0, 0), (0, 0, 0), (3, 0, 0), (3, 0, 5), (0, 4, 5)):
        now = Status(phase="training", engines=busy, buffer_groups=finished, filtered_groups=filtered)
        now.training_groups = training
        write_status(run, now)
        console.refresh()
    writer.write("update", 1, UPDATE)
    writer.close()
    write_status(run, Status(phase="training", engines=busy, buffer_groups=2))
    console.refresh()
    console.refresh()
    lines = [line.split("  ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines[:-1] == [
        "training",
        "first batch: 0 of 4 groups scored, 24 answers are under way",
        "first batch: 3 of 4 groups scored, 24 answers are under way",
        "first batch: 3 of 4 groups scored, 5 filtered, 24 answers are under way",
        "first batch: all groups scored, it is being trained",
    ]
    assert lines[-1].startswith("update 1/40")


def test_what_is_done_again_counts_once_and_earlier_jobs_are_not_told_again(run):
    writer = MetricsWriter(run)
    writer.write("eval", 0, {"accuracy": 0.41, "items": 500})
    for version in range(1, 6):
        writer.write("update", version, UPDATE)
    writer.flush()
    out = io.StringIO()
    console = Console(run, Config(name="demo", updates=6), out)
    writer.write("resume", 4, {"incarnation": 1})
    writer.write("update", 5, UPDATE)
    writer.flush()
    console.close()
    averages = {"aime": {"avg@4": {"value": 0.4}}, "gsm8k": {"avg@4": {"value": 1.0}}, "amc": {"items": 0}}
    writer.write("eval", 6, {"accuracy": 0.7, "items": 500, "failed": 3, "n": 4, "files": averages})
    writer.write("resume", 5, {"incarnation": 2})
    writer.write("update", 6, UPDATE)
    writer.close()
    console.close()
    lines = [line.split("  ")[1] for line in out.getvalue().splitlines()]
    assert lines == [
        "starting",
        "resumed at version 4",
        "update 5/6",
        "held-out accuracy 70% at version 6, 500 prompts, 3 answers without a score: aime 40%, gsm8k 100%, amc –",
        "resumed at version 5",
        "update 6/6",
    ]
    assert "6 of 6 updates done" in console.summary() and "accuracy 41% (version 0)" in console.summary()


def test_a_run_that_begins_anew_has_resumed_no_version(run):
    out = io.StringIO()
    console, writer = Console(run, Config(name="demo", updates=6), out), MetricsWriter(run)
    writer.write("resume", -1, {"incarnation": 1})
    writer.close()
    console.close()
    assert "began anew" in out.getvalue() and "-1" not in out.getvalue()


def test_panel_shows_progress_engines_and_last_events(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen()
    config = Config(name="demo", updates=40)
    config.rollout.max_staleness = 4
    console = Console(run, config, screen)
    writer = MetricsWriter(run)
    writer.write("eval", 0, {"accuracy": 0.41, "items": 500})
    for version in range(10):
        writer.write("update", version, UPDATE)
    writer.close()
    engine = EngineStatus(name="engine-0", state="ready", version=9, running=96, tokens_per_s=3210.4)
    begun = EngineStatus(name="engine-1", state="waiting for weights")
    now = Status(phase="training", version=10, updates=40, elapsed_s=192, engines=[engine, begun])
    now.buffer_groups, now.running_groups = 4, 12
    write_status(run, now)
    console.close()
    text = shown(screen)
    for part in (
        "demo  training",
        "10 of 40",
        "3 min 12 s",
        "37%",
        "41% (version 0)",
        "(bound 4)",
        "trainer 12%",
        "engines 8%",
        "4 groups in the buffer, 12 being answered",
        "held-out accuracy 41%",
    ):
        assert part in text, part
    assert re.search(r"engine-0 +ready +9 +96 +3,210", text)
    assert re.search(r"engine-1 +waiting for weights +– +0 +0", text)


def test_time_left_follows_the_pace_of_the_updates(run):
    lines = [f'{{"time": {100 + 3 * n}, "kind": "update", "version": {n}}}\n' for n in range(4)]
    screen = Screen()
    console = Console(run, Config(name="demo", updates=24), screen)
    run.metrics.write_text("".join(lines))
    console.close()
    assert "4 of 24, 1 min 0 s left" in shown(screen)
    later = [
        '{"time": 9000, "kind": "resume", "version": 2}\n',
        *(f'{{"time": {9000 + 7 * n}, "kind": "update", "version": {n}}}\n' for n in range(3, 6)),
    ]
    with run.metrics.open("a") as file:
        file.writelines(later)
    screen = Screen()
    Console(run, Config(name="demo", updates=24), screen).close()
    assert "6 of 24, 2 min 6 s left" in shown(screen), "the time between two jobs is not the pace of updates"


def test_a_clock_that_was_set_back_leaves_no_time_below_zero(run):
    lines = [f'{{"time": {9000 - 3600 * n}, "kind": "update", "version": {n}}}\n' for n in range(2)]
    run.metrics.write_text("".join(lines))
    screen = Screen()
    Console(run, Config(name="demo", updates=24), screen).close()
    assert "2 of 24" in shown(screen) and "left" not in shown(screen)


def test_updates_of_the_run_before_count(run):
    run.begin(version=20, batches=21, checkpoint="runs/other/checkpoints/version-000020")
    lines = [f'{{"time": {100 + 3 * n}, "kind": "update", "version": {21 + n}}}\n' for n in range(4)]
    run.metrics.write_text("".join(lines))
    screen = Screen()
    console = Console(run, Config(name="demo", updates=45), screen)
    console.close()
    assert "25 of 45, 1 min 0 s left" in shown(screen)
    assert "25 of 45 updates done" in console.summary()


def test_sft_shows_the_loss_and_no_engine(run):
    screen = Screen()
    console = Console(run, Config(name="warm", mode="sft", updates=300), screen)
    writer = MetricsWriter(run)
    for step, loss in enumerate([2.5, 0.75], 1):
        writer.write("sft", step, {"step": step, "loss": loss, "tokens_per_s": 9000.0, "lr": 1e-3})
    writer.close()
    console.close()
    assert "0.750" in shown(screen) and "9,000 tokens/s" in shown(screen) and "engine" not in shown(screen)
    assert "2 of 300 steps done" in console.summary() and "loss 2.500 → 0.750" in console.summary()


def test_without_a_terminal_a_twentieth_of_the_sft_steps(run):
    out = io.StringIO()
    console = Console(run, Config(name="warm", mode="sft", updates=400), out)
    writer = MetricsWriter(run)
    for step in range(1, 401):
        writer.write("sft", step, {"step": step, "loss": 1.0})
    writer.close()
    console.close()
    shown_steps = [int(n) for n in re.findall(r"step (\d+)/400", out.getvalue())]
    assert shown_steps == [1, *range(20, 401, 20)]


def test_summary_tells_held_out_accuracy_before_and_after(run):
    console = Console(run, Config(name="demo", updates=40), io.StringIO())
    writer = MetricsWriter(run)
    writer.write("eval", 0, {"accuracy": 0.412, "items": 500, "version_mean": 3.97, "version_max": 9})
    writer.write("eval", 40, {"accuracy": 0.934, "items": 500})
    writer.write("eval", 20, {"accuracy": 0.8, "items": 500})  # evaluations end when they end
    writer.close()
    console.close()
    assert "held-out accuracy 41% (versions 0 to 9) → 93% (version 40)" in console.summary()


def test_needs_neither_torch_nor_vllm():
    code = "import sys, areal_megatron.observe.console; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"

import json
import re

import pytest

from areal_megatron.config import Config, config_file
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.observe.status import Status
from areal_megatron.observe.timeline import Timeline
from areal_megatron.page import report
from areal_megatron.run.folder import RunFolder


class Page:
    """What a report has inlined: two-column tables as `rows`, wider ones as `wide_rows`."""

    def __init__(self, text):
        found = re.search(r'<script type="application/json" id="saved">(.*?)</script>', text, re.DOTALL)
        saved = json.loads(found[1])
        self.overview, self.curves = saved["overview"], saved["curves"]
        self.rows, self.wide_rows = {}, {}
        for table in self.curves["tables"]:
            for name, *cells in table["rows"]:
                if len(cells) == 1:
                    self.rows[name] = cells[0]
                else:
                    self.wide_rows[name] = cells
        self.figures = {f["title"]: f for section in self.curves["sections"] for f in section["figures"]}


def make_run(tmp_path, updates, mode="rl"):
    run = RunFolder(tmp_path / "run")
    run.create()
    config = Config(name="run", mode=mode, updates=updates)
    config.model.path, config.data.train = "model", "<train>.jsonl"
    config_file.save(config, run.config)
    return run


def evaluation(version_min=0, version_max=None, n=1, **files):
    """The figures of an evaluation of files with (avg@n, low, high); the first file's are those of all."""
    averages = {name: dict(zip(("value", "low", "high"), figure, strict=True)) for name, figure in files.items()}
    first, *_ = averages.values()
    version_max = version_min if version_max is None else version_max
    return {
        "accuracy": first["value"],
        "accuracy_low": first["low"],
        "accuracy_high": first["high"],
        "n": n,
        "items": 500,
        "version_min": version_min,
        "version_mean": (version_min + version_max) / 2,
        "version_max": version_max,
        "files": {name: {"items": 500, f"avg@{n}": figure} for name, figure in averages.items()},
    }


def write_updates(run, count):
    writer = MetricsWriter(run)
    writer.write("eval", 0, evaluation(math=(0.41, 0.38, 0.45)))
    for n in range(1, count + 1):
        writer.write(
            "update",
            n,
            {
                "reward_mean": n / 2,
                "accuracy": n / 10,
                "staleness_mean": 1.0,
                "staleness_max": n % 3,
                "staleness_histogram": {"0": 3, "1": 5},
                "trained_tokens": 1000 + n,
                "effective_tokens_per_s": 100.0 * n,
                "publish_s": 0.5,
                "commit_s": 0.03,
                "weights_bytes": 3_200_000,
                "logprob_diff_max": 1e-5 * n,
                "mismatch_max": 2e-5 * n,
                "effective_share": 1 - n / 10,
                "weight_mean/staleness_0": 1.0,
                "weight_mean/staleness_9-16": 1.1,
                "weight_mean/staleness_17+": 1.2,
                "loss": None,
                "reward_failures": 2,
                "groups_filtered": n,
            },
        )
    writer.write("eval", count, evaluation(math=(0.93, 0.9, 0.95), version_min=count))
    writer.close()


def write_spans(run):
    timeline = Timeline(run.timeline("trainer-0"), "trainer-0")
    second = 1_000_000_000
    for start in range(0, 250, 10):
        timeline.event("publish", start * second, (start + 5) * second)
        timeline.event("train", (start + 1) * second, (start + 3) * second, tokens=1900)
        timeline.event("train", (start + 6) * second, (start + 8) * second, tokens=2000)
    timeline.close()


def build(run):
    out = run.folder / "report.html"
    report.write_report(run, out)
    return out.read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("finished"), 4)
    write_updates(run, 4)
    write_spans(run)
    write_status(run, Status(phase="done", elapsed_s=75))
    return run, build(run)


def test_evaluations_of_several_files_are_shown_by_file(tmp_path):
    run = make_run(tmp_path, 4)
    writer = MetricsWriter(run)
    for version, accuracy in ((0, 0.2), (4, 0.3)):
        sets = {"aime": (accuracy, accuracy - 0.1, accuracy + 0.1), "gsm8k": (0.9, 0.85, 0.95)}
        writer.write("eval", version, evaluation(version, version + 1, n=4, **sets))
    writer.close()
    page = Page(build(run))
    assert page.rows["held-out accuracy, version 0 (0 to 1, mean 0.5)"] == "20.0% (10.0 – 30.0)"
    assert page.rows["held-out accuracy, version 4 (4 to 5, mean 4.5)"] == "30.0% (20.0 – 40.0)"
    assert (page.rows["aime, avg@4"], page.rows["gsm8k, avg@4"]) == ("30.0% (20.0 – 40.0)", "90.0% (85.0 – 95.0)")
    curves = {curve["label"]: curve for curve in page.figures["Accuracy"]["curves"]}
    assert curves["aime"]["points"] == [[0.5, 4.5], [0.2, 0.3]] and curves["gsm8k"]["points"][1] == [0.9, 0.9]
    assert curves["aime"]["interval"] == [[0.1, pytest.approx(0.2)], [pytest.approx(0.3), 0.4]]


def test_final_figures_are_those_of_the_metrics(finished):
    _, text = finished
    page = Page(text)
    rows = page.rows
    assert page.overview["advice"] == "" and page.overview["problem"] == ""
    assert rows["duration"] == "1 min 15 s"
    assert rows["held-out accuracy, version 0"] == "41.0% (38.0 – 45.0)"
    assert rows["held-out accuracy, version 4"] == "93.0% (90.0 – 95.0)" and "math, avg@1" not in rows
    assert rows["effective tokens/s, median"] == "250"
    assert rows["trained tokens"] == "4,010" and rows["groups filtered"] == "10" and rows["reward failures"] == "8"
    assert (rows["staleness, mean"], rows["staleness, largest"]) == ("1.00", "2")
    assert rows["log-probability difference, largest"] == "4.0e-05"
    assert rows["the same of the probe"] == "8.0e-05" and rows["effective share, least"] == "0.600"
    assert rows["weights sent per update, MB"] == "3.2"
    assert page.wide_rows["train"] == ["950", "1,000", "95%"] and "proximal" not in page.wide_rows
    assert rows["data.train"] == "<train>.jsonl" and "<train>" not in text, "a value of the config is escaped"
    assert "–" not in rows.values()
    facts = dict(page.overview["facts"])
    assert facts == {"": "asynchronous PPO, 4 of 4 updates", "model": "model", "data": "<train>.jsonl"}


def test_the_short_pool_is_named(tmp_path):
    run = make_run(tmp_path, 100)
    writer = MetricsWriter(run)
    pools = {"update_s": 10.0, "trainer_wait_s": 4.0, "straggler_wait_s": 0.0, "engines_serving": 2}
    for version in range(1, 20):
        writer.write("update", version, pools | {"engine_idle_share": 0.0, "engine_full_share": 1.0})
    writer.close()
    assert "engines are short: trainers wait for 40% of the time" in Page(build(run)).overview["advice"]


def test_figures_by_staleness_have_a_line_for_each_that_was_trained(finished):
    figures = Page(finished[1]).figures
    curves = figures["Mean of w"]["curves"]
    assert [curve["label"] for curve in curves] == ["0", "9-16", "17+"]
    assert len({curve["colour"] for curve in curves}) == 3 and figures["Mean of log w"]["curves"] == []


def test_page_needs_no_network_and_the_trace_lies_beside_it(finished):
    run, text = finished
    assert not re.search(r"(src|href)\s*=\s*['\"]?(https?:)?//", text) and "default-src 'none'" in text
    drawn = [f for f in Page(text).figures.values() if any(curve["points"][0] for curve in f["curves"])]
    learning = {"Accuracy", "Reward", "Staleness of trained answers", "Effective speed", "Effective share", "Mean of w"}
    updates = {"Publish", "Commit", "Sent to all engines", "Trainer − engine, probe"}
    titles = {figure["title"] for figure in drawn}
    assert titles == learning | updates | {"Trainer − engine, tokens of the trained version"}
    events = json.loads((run.folder / "timeline.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["publish", "train", "train"] * 25


@pytest.mark.parametrize("updates", [0, 2])
def test_run_that_died_says_so(tmp_path, updates):
    run = make_run(tmp_path, 40)
    if updates:
        write_updates(run, updates)
        with run.metrics.open("a") as file:
            file.write('{"time": 1.0, "ki')
    write_status(run, Status(phase="training", elapsed_s=20))
    assert f"This run is incomplete: {updates} of 40 updates, phase “training”" in Page(build(run)).overview["problem"]


def test_sft_run_shows_its_loss(tmp_path):
    run = make_run(tmp_path, 3, mode="sft")
    writer = MetricsWriter(run)
    for step, loss in enumerate([3.0, 1.5, 0.6], 1):
        writer.write("sft", step, {"step": step, "loss": loss, "tokens_per_s": 9000.0 + step, "lr": 1e-3})
    writer.close()
    page = Page(build(run))
    rows = page.rows
    assert rows["loss, last 10 steps"] == "1.700" and rows["tokens/s, median"] == "9,002"
    assert ["3.00 → 0.600", "loss"] in page.overview["cards"] and page.overview["problem"] == ""
    assert not any("taleness" in title for title in page.figures)


def test_folder_that_is_no_run_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path)])
    assert report.main() == 2
    assert str(tmp_path) in capsys.readouterr().err

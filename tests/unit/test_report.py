import json
import re
from html.parser import HTMLParser

import pytest

from areal_megatron import config_file, report
from areal_megatron.config import Config
from areal_megatron.observe.figures import sections
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.observe.timeline import Timeline
from areal_megatron.run import Run


class Page(HTMLParser):
    """Collects the rows of all tables."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.wide_rows, self.cells, self.stack = {}, {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.cells = []
        self.stack.append((tag, dict(attributes).get("class")))

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop()[0] != tag:
            pass
        if tag == "tr" and len(self.cells) == 2:
            self.rows[self.cells[0]] = self.cells[1]
        elif tag == "tr":
            self.wide_rows[self.cells[0]] = self.cells[1:]

    def handle_data(self, data):
        if self.stack and self.stack[-1][0] in ("td", "th"):
            self.cells.append(data)


def make_run(tmp_path, updates, mode="rl"):
    run = Run(tmp_path / "run")
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
    write_status(run, {"phase": "done", "elapsed_s": 75})
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
    assert report._held_out(report.load(run)) == {
        "aime": [(0.5, 0.2, 0.1, pytest.approx(0.3)), (4.5, 0.3, pytest.approx(0.2), 0.4)],
        "gsm8k": [(0.5, 0.9, 0.85, 0.95), (4.5, 0.9, 0.85, 0.95)],
    }


def test_final_figures_are_those_of_the_metrics(finished):
    assert "Advice" not in finished[1]
    _, text = finished
    page = Page(text)
    rows = page.rows
    assert rows["duration"] == "1 min 15 s"
    assert rows["held-out accuracy, version 0"] == "41.0% (38.0 – 45.0)"
    assert rows["held-out accuracy, version 4"] == "93.0% (90.0 – 95.0)" and "math, avg@1" not in rows
    assert rows["effective tokens/s, median"] == "250"
    assert rows["trained tokens"] == "4,010" and rows["groups filtered"] == "10" and rows["reward failures"] == "8"
    assert rows["staleness, mean and largest"] == "1.00, 2"
    assert rows["log-probability difference, largest"] == "4.0e-05"
    assert rows["the same of the probe"] == "8.0e-05" and rows["effective share, least"] == "0.600"
    assert rows["weights sent per update, MB"] == "3.2"
    assert page.wide_rows["train"] == ["950", "1,000", "95%"] and page.wide_rows["proximal"] == ["–", "–", "–"]
    assert rows["data.train"] == "<train>.jsonl", "a value of the config must be escaped in the page"
    assert "incomplete" not in text


def test_the_short_pool_is_named(tmp_path):
    run = make_run(tmp_path, 100)
    writer = MetricsWriter(run)
    pools = {"update_s": 10.0, "trainer_wait_s": 4.0, "straggler_wait_s": 0.0, "engines_serving": 2}
    for version in range(1, 20):
        writer.write("update", version, pools | {"engine_idle_share": 0.0, "engine_full_share": 1.0})
    writer.close()
    assert "Advice: engines are short: trainers wait for 40% of the time" in build(run)


def test_figures_by_staleness_have_a_line_for_each_that_was_trained(finished):
    data = report.load(finished[0])
    keys = {key for step in data.steps for key in step}
    shown = {figure.title: figure for section in sections(data.config, keys) for figure in section.figures}
    curves = shown["Mean of w"].curves
    assert [curve.label for curve in curves] == ["0", "9-16", "17+"] and len({curve.colour for curve in curves}) == 3
    assert shown["Mean of log w"].curves == ()


def test_page_needs_no_network_and_the_trace_lies_beside_it(finished):
    run, text = finished
    assert not re.search(r"(src|href)\s*=\s*['\"]?(https?:)?//", text)
    assert text.count("<svg") == text.count("</svg>") >= 12
    events = json.loads((run.folder / "timeline.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["publish", "train", "train"] * 25


@pytest.mark.parametrize("updates", [0, 2])
def test_run_that_died_says_so(tmp_path, updates):
    run = make_run(tmp_path, 40)
    if updates:
        write_updates(run, updates)
        with run.metrics.open("a") as file:
            file.write('{"time": 1.0, "ki')
    write_status(run, {"phase": "training", "elapsed_s": 20})
    assert f"This run is incomplete: {updates} of 40 updates, phase “training”" in build(run)


def test_sft_run_shows_its_loss(tmp_path):
    run = make_run(tmp_path, 3, mode="sft")
    writer = MetricsWriter(run)
    for step, loss in enumerate([3.0, 1.5, 0.6], 1):
        writer.write("sft", step, {"step": step, "loss": loss, "tokens_per_s": 9000.0 + step, "lr": 1e-3})
    writer.close()
    text = build(run)
    rows = Page(text).rows
    assert rows["loss, last 10 steps"] == "1.700" and rows["tokens/s, median"] == "9,002"
    assert "3.00 → 0.600" in text and "Staleness" not in text and "incomplete" not in text


def test_folder_that_is_no_run_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path)])
    assert report.main() == 2
    assert str(tmp_path) in capsys.readouterr().err

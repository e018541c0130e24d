"""The live page, served as users serve it and looked at with a real browser; and what is behind it."""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np
import pytest

from areal_megatron.config import Config, DataConfig, ModelConfig, config_file
from areal_megatron.controller.generation import _samples
from areal_megatron.controller.schedule import Group
from areal_megatron.data import dumps
from areal_megatron.data.dumps import Dump, write
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.launch.supervision.processes import Log
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.observe.shown_answers import LONGEST, AnswersWriter, ShownAnswer
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.page import browser as trajectory_browser
from areal_megatron.page import report, runs, server
from areal_megatron.page.browser import Browser, tree
from areal_megatron.page.history import MOST_POINTS, History, thinned
from areal_megatron.page.report import write_report
from areal_megatron.page.runs import WatchedRuns
from areal_megatron.page.server import Page
from areal_megatron.page.watched import Watched
from areal_megatron.planning.pools import Node, Placement, Process, Slot
from areal_megatron.run import descriptors
from areal_megatron.run.folder import RunFolder
from tests.support.chat_world import FORGETTING, TEMPLATE, World
from tests.support.chromium import Chromium
from tests.unit.page.test_report import evaluation
from tests.unit.programs.test_trajectories import answer, model  # noqa: F401 - a fixture
from tests.unit.workflows.test_endpoint import ask as ask_for
from tests.unit.workflows.test_endpoint import user
from tests.unit.workflows.test_samples import ANSWERS, by_itself

HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\"&'><svg onload=window.hacked=3>"
UPDATES = 40
RUNS = (("", "lr-2 & <b>", 29), ("sweep", "lr-1", 12), ("", "first", 5))
"""Where a run is, its name and its updates."""


def update(v, **changes):
    values = {"accuracy": v / 50, "sampled_accuracy": v / 60, "reward_mean": v / 10 - 1, "entropy": 2 - v / 40}
    values |= {"response_tokens_mean": 100 + v, "response_tokens_max": 400, "loss": -1e-3, "grad_norm": 1 / v}
    values |= {"publish_s": 0.5, "commit_s": 0.03, "mismatch_max": 1e-5 * v, "mismatch_mean": 1e-6, "lr": 1e-6 * v}
    values |= {"effective_tokens_per_s": 1200.0, "staleness_max": 3, "staleness_histogram": {"0": 3, "2": 5, "3": 1}}
    values |= {"trainer_idle_share": 0.1, "engine_idle_share": 0.05, "effective_share": 1 - v / 1000}
    values |= {"weight_mean/staleness_0": 1.0, "weight_mean/staleness_9-16": 1.1, "step_s": 1.5}
    return values | changes


def make(tmp_path, model, updates=12, name="run"):  # noqa: F811
    """Returns a run that trains, its metrics, and what its launcher records."""
    run, tokenizer = RunFolder(tmp_path / name), Tokenizer(model)
    run.create()
    config = Config(name=name, updates=UPDATES, model=ModelConfig(str(model)), data=DataConfig("d"))
    config_file.save(config, run.config)
    run.begin()
    metrics = MetricsWriter(run)
    shown = AnswersWriter(run, metrics)
    for v in (0, 5, 10):
        said = {"prompt": f"1+1= {HOSTILE}", "answer": "2", "response": f"version {v} says\n{HOSTILE} " + "x" * 3000}
        right = ShownAnswer(**said, score=v / 10, correct=v == 10, truncated=v == 0)
        shown.write(v, [right, *[ShownAnswer(**said, score=None, correct=False, truncated=False)] * 7])
        metrics.write("eval", v, evaluation(v, math=(0.1 + v / 50, 0.08, 0.32)))
    shown.close()
    for v in range(1, updates + 1):
        metrics.write("update", v, update(v))
    metrics.flush()
    show(run, updates)
    versions = np.array([3, 3, 4, 4, 4], np.int32)
    mask = (versions == 4).astype(np.uint8)
    for number in range(2):
        own = [answer(tokenizer, 100 * number + i, f"answer {i} {HOSTILE}", reward=i - 2.0) for i in range(30)]
        own[1] = answer(tokenizer, 100 * number + 1, "abcd", versions=versions, loss_mask=mask, correct=True)
        own[2] = answer(tokenizer, 100 * number + 2, "x" * 5000, truncated=True)
        own[3] = answer(tokenizer, 100 * number + 3, HOSTILE, prompt=own[0].response)
        episode = {"uid": 100 * number + 5, "reward": 3.0, "of_samples": 3}
        own[5] = answer(tokenizer, text=f"answer 5 {HOSTILE}", **episode)
        own[6] = answer(tokenizer, text="its second sample", sample=1, **episode)
        on = {"prompt": np.concatenate([own[5].prompt, own[5].response, [7, 0]]).astype(np.int32), "versions": versions}
        own[7] = answer(tokenizer, text="goes", sample=2, returns=[(3, 2.0), (2, -1.5)], **episode, **on)
        write(Dump(number=number, version=number, trajectories=own), run.trajectories)
    places = [Process("controller", "controller", 0, "a1", ())]
    places += [Process("trainer-0", "trainer", 0, "a1", (Slot("a1", 0),))]
    places += [Process("engine-0", "rollout", 0, "b1", (Slot("b1", 0),))]
    processes = {place.name: Log(place.name, run.log(place.name)) for place in places}
    for process in processes.values():
        process.exit_code = None
    recorder = Recorder(run, Placement((Node("a1", (0,)), Node("b1", (0,))), tuple(places)))
    recorder.write(processes, 0)
    return run, metrics, lambda outcome: recorder.write(processes, 0, outcome)


def show(run, version, phase="training"):
    engine = EngineStatus(name="engine-0", state="ready", version=version, running=16, tokens_per_s=230.4)
    write_status(run, Status(phase=phase, version=version, updates=UPDATES, elapsed_s=75, engines=[engine]))


@contextlib.contextmanager
def served(folder, *options, stderr=subprocess.PIPE):
    """Yields the address that `areal status --web` prints. Few files may be open, until it asks for more."""
    limits = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    command = [sys.executable, "-m", "areal_megatron.programs.status", str(folder), "--web", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, preexec_fn=limits) as process:
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http"), process.stderr and process.stderr.read()
            yield address
        finally:
            process.terminate()
            assert process.wait(20) == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@contextlib.contextmanager
def looked_at(browser, folder, **window):
    """Yields the browser with the page of a run; at the end there must be nothing on its console."""
    with served(folder) as address:
        browser.leave()
        browser.errors.clear()
        browser.open(address, **window)
        yield browser
        browser.value("0")  # brings what the console has had since
        assert browser.errors == []
        browser.leave()


CONTRAST = """(() => {
  const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const rgb = (c) => c.match(/[\\d.]+/g).slice(0, 4).map(Number);
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] === 1) return c.slice(0, 3); } };
  return Math.min(...[...document.querySelectorAll("h1, h2, p, span, b, td, th, figcaption, .plot text")]
    .filter((e) => e.textContent.trim() && e.getBoundingClientRect().width).map((e) => {
      const style = getComputedStyle(e), ink = e.namespaceURI.endsWith("svg") ? style.fill : style.color;
      const [a, b] = [light(rgb(ink).slice(0, 3)), light(ground(e))].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05); }));
})()"""
"""The least contrast between a text and what is behind it, as WCAG measures it."""


def fits(page):
    return page.value("document.documentElement.scrollWidth <= innerWidth")


def test_a_run_is_shown_while_it_goes_on(tmp_path, model, browser):  # noqa: F811
    run, metrics, ended = make(tmp_path, model)
    with looked_at(browser, run.folder) as page:
        page.wait("document.querySelectorAll('.figure').length > 15 && document.title === '12/40 · run'")
        assert page.value("document.getElementById('state').textContent") == "running"
        assert page.value("location.hash") == "", "the token stays out of the history"
        shown = page.value("document.body.innerText")
        for text in ("version 12 of 40", "engine-0", "Reward", "mean of the batch", "Publish", "bound η = ", "0.5 s"):
            assert text in shown
        page.wait("document.querySelectorAll('#evaluation option').length === 3")
        compare_answers(page)
        began = time.monotonic()
        metrics.write("update", 13, update(13, reward_mean=7.25))
        metrics.flush()
        show(run, 13)
        page.wait("document.title === '13/40 · run' && document.body.innerText.includes('7.25')", 15)
        assert time.monotonic() - began < 5
        metrics.close()
        show(run, 13, "done")
        ended("done")
        page.wait("document.getElementById('state').textContent === 'done'")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1300, 400])
def test_a_report_is_the_page_in_one_file(tmp_path, model, browser, width, dark):  # noqa: F811
    run, metrics, _ = make(tmp_path, model)
    metrics.write("update", 13, update(13, filtered_tokens=0, zero_advantage_share=0.0))
    metrics.close()
    write_report(run, tmp_path / "report.html")
    browser.leave()
    browser.errors.clear()
    browser.open((tmp_path / "report.html").as_uri(), width=width, dark=dark)
    browser.wait("document.querySelectorAll('.figure').length > 15")
    shown = browser.value("document.body.innerText")
    for text in ("asynchronous PPO, 13 of 40 updates", str(model), "This run is incomplete", "rollout.max_staleness"):
        assert text in shown
    for text in ("Thrown away", "Tokens that teach nothing", "–\n", "Trajectories", "Solved groups", "Loading"):
        assert text not in shown, "nothing is shown without a value"
    assert fits(browser) and browser.errors == []
    titles = "[...document.querySelectorAll('figcaption, .legend, h1, h2, .card')]"
    assert browser.value(f"{titles}.filter(e => e.scrollWidth > e.clientWidth).length") == 0, "no title is cut"
    assert browser.value(CONTRAST) >= 4.5, "text on its ground"
    compare_answers(browser)
    if folder := os.environ.get("SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"report-{width}{'-dark' * dark}.png")
    browser.leave()


def compare_answers(page):
    """Looks at the answers of each evaluation to the same prompts."""
    rows = "[...document.querySelectorAll('#answers tr')].slice(1).map(r => [...r.cells].map(c => c.textContent))"
    chosen = "document.getElementById('evaluation').selectedOptions[0].textContent"
    scores = {"version 0: 10% right": "0 cut", "version 5: 20% right": "0.5", "version 10: 30% right": "1"}
    for n, (name, score) in reversed(list(enumerate(scores.items()))):
        assert page.value(chosen) == name
        first, *others = page.value(rows)
        assert first[:2] == [f"1+1= {HOSTILE}", "2"] and first[3] == score and len(others) == 7
        assert first[2].startswith(f"version {5 * n} says\n{HOSTILE}") and first[2].endswith("x")
        assert 990 < len(first[2]) <= LONGEST
        assert {row[3] for row in others} == {"unknown"}
        assert page.value("document.getElementById('earlier').disabled") == (n == 0)
        page.value("document.getElementById('earlier').click()")
    page.value("document.getElementById('evaluation').selectedIndex = 1")
    page.value("document.getElementById('evaluation').dispatchEvent(new Event('change'))")
    assert page.value(rows)[0][3] == "0.5"
    page.value("document.getElementById('later').click()")
    assert page.value(chosen) == "version 10: 30% right"
    assert page.value("typeof window.hacked") == "undefined"
    assert page.value("document.querySelectorAll('main script, main img').length") == 0
    assert fits(page)


def test_runs_of_a_folder_are_shown_side_by_side(tmp_path, model, browser):  # noqa: F811
    made = [make(tmp_path / "runs" / place, model, updates, name) for place, name, updates in RUNS]
    for (run, metrics, _), (_, _, updates) in zip(made, RUNS, strict=True):
        metrics.write("update", updates + 1, update(updates + 1, reward_mean=updates / 4))
        metrics.flush()
        os.utime(run.config, (updates, updates))  # the newest first
    shown = {"lr-2 & <b>": "7.25", "sweep/lr-1": "3", "first": "1.25"}
    row = "[...document.querySelectorAll('#all-runs tr')].slice(1).map(r => [...r.cells].map(c => c.textContent))"
    figure = "[...document.querySelectorAll('.figure')].find(f => f.textContent.startsWith('Reward'))"
    legend = f"{figure}.querySelector('.legend')"
    lines = f"{figure}.querySelectorAll('polyline').length"
    boxes = "document.querySelectorAll('#all-runs input')"
    with looked_at(browser, tmp_path / "runs") as page:
        page.wait("document.querySelectorAll('.figure').length > 10 && document.title === '3 runs'")
        page.wait(f"{legend}.children.length === 3")
        for width, dark in ((1300, False), (400, True), (1300, True), (400, False)):
            page.show(width=width, dark=dark)
            assert [[cell[1], cell[3]] for cell in page.value(row)] == [
                ["lr-2 & <b>", "30 of 40"],
                ["sweep/lr-1", "13 of 40"],
                ["first", "6 of 40"],
            ]
            values = page.value(f"[...{legend}.children].map(e => e.textContent)")
            assert values == [f"{name} {value}" for name, value in shown.items()]
            assert page.value(lines) == 3 and fits(page) and page.value(CONTRAST) >= 4.5
            assert page.value(f"new Set([...{legend}.querySelectorAll('i')].map(e => e.style.background)).size") == 3
            if folder := os.environ.get("SCREENSHOTS"):
                page.screenshot(Path(folder) / f"runs-{width}{'-dark' * dark}.png")
        page.value(f"{boxes}[1].click()")
        page.wait(f"{legend}.children.length === 2 && {lines} === 2")
        page.value(f"{boxes}[1].click()")
        page.wait(f"{legend}.children.length === 3")
        made[2][1].write("update", 7, update(7, reward_mean=9.5))
        made[2][1].flush()
        page.wait(f"{legend}.textContent.includes('first 9.5')", 15)
        page.value("document.querySelectorAll('#all-runs a')[0].click()")
        page.wait("document.title === '30/40 · lr-2 & <b>' && document.querySelectorAll('#answers tr').length === 9")
        compare_answers(page)
        page.wait(
            "document.getElementById('browser').scrollIntoView(), document.querySelectorAll('#rows tr').length > 5"
        )
        page.value("document.getElementById('all').click()")
        page.wait("document.title === '3 runs' && document.querySelectorAll('.figure').length > 10")
    for _, metrics, _ in made:
        metrics.close()


def make_empty(folder, count):
    """Makes runs that have not been started; the newest have the highest numbers."""
    for number in range(count):
        run = RunFolder(folder / f"run-{number:02}")
        run.create()
        config_file.save(Config(name="x", updates=2, model=ModelConfig("m"), data=DataConfig("d")), run.config)
        os.utime(run.config, (number, number))


def test_of_several_runs_eight_are_drawn_and_others_may_be(tmp_path, browser):
    make_empty(tmp_path, 10)
    with looked_at(browser, tmp_path) as page:
        page.wait("document.title === '10 runs'")
        names = "[...document.querySelectorAll('#all-runs a')].map(e => e.textContent)"
        assert page.value(names) == [f"run-{number:02}" for number in range(9, -1, -1)]
        boxes = "[...document.querySelectorAll('#all-runs input')]"
        assert page.value(f"{boxes}.map(e => [e.checked, e.disabled])") == [[True, False]] * 8 + [[False, True]] * 2
        page.value(f"{boxes}[0].click()")
        page.value(f"{boxes}[9].click()")
        assert page.value(f"{boxes}.map(e => e.checked)") == [False, *[True] * 7, False, True]


def test_runs_of_a_folder_are_found_as_they_come_and_the_newest_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_LISTED_S", 0)
    monkeypatch.setattr(runs, "_MOST", 3)
    make_empty(tmp_path / "sweep", 2)
    (tmp_path / "notes").mkdir()
    watched = WatchedRuns(tmp_path)
    assert watched.overview() == {}
    watched.refresh()
    assert [(run["name"], run["state"]) for run in watched.overview()["runs"]] == [
        ("sweep/run-01", "not started"),
        ("sweep/run-00", "not started"),
    ]
    kept = watched.runs["sweep/run-01"]
    make_empty(tmp_path, 4)
    watched.refresh()
    found = watched.overview()
    assert [run["name"] for run in found["runs"]] == ["run-03", "run-02", "sweep/run-01"]
    assert found["problem"] == "3 older runs of this folder are not shown." and watched.runs["sweep/run-01"] is kept
    shutil.move(tmp_path, tmp_path.with_name("away"))
    watched.refresh()
    assert "cannot be read" in watched.overview()["problem"] and len(watched.overview()["runs"]) == 3


def test_prompts_are_told_apart_by_what_follows_their_common_lines(tmp_path, model):  # noqa: F811
    tokenizer, run = Tokenizer(model), RunFolder(tmp_path / "run")
    run.create()
    prompts = [f"You are kind.\nAnswer.\n{question}" for question in ("two and two", "two and three")]
    tokens = [np.array(tokenizer.responses([prompt])[0], np.int32) for prompt in prompts]
    own = [answer(tokenizer, i, "a", prompt=prompt) for i, prompt in enumerate(tokens)]
    write(Dump(number=0, version=0, trajectories=own), run.trajectories)
    write(Dump(number=1, version=0, trajectories=own[:1]), run.trajectories)
    config = Config(name="run", updates=2, model=ModelConfig(str(model)), data=DataConfig("d"))
    found, browser = [], Browser(run)
    for batch in (0, 1):
        found.append([row["start"].removesuffix("<eos>") for row in browser.page(config, batch, 0, "")["rows"]])
    assert found == [["two and two", "two and three"], ["You are kind. Answer. two and two"]]
    assert browser.page(config, 0, 0, "cut")["rows"] == []


async def branching(episode):
    """Two answers to the first question, one of which goes on in two ways, and a question apart."""
    async with episode.openai() as api:
        first = [user("hi?"), await ask_for(api, [user("hi?")])]
        for said in ("one", "two"):
            await ask_for(api, [*first, user(said)])
        await ask_for(api, [user("else?")])
        await ask_for(api, [user("hi?")])
    return 1.0


@pytest.mark.parametrize(
    ("workflow", "template", "depths"),
    [
        (by_itself, TEMPLATE, {"0": 0}),
        (by_itself, FORGETTING, {"0.0": 0, "0.1": 1, "0.2": 2}),
        (branching, TEMPLATE, {"0.0": 0, "0.1": 1, "0.2": 0, "0.3": 0}),
    ],
)
def test_samples_are_below_the_one_whose_history_they_branch_from(tmp_path, workflow, template, depths):
    said = [*ANSWERS, "five"]
    world = World(tmp_path, workflow, lambda _, number: said[number], template=template, turns=5)
    (ended,) = asyncio.run(world.sample())
    group = Group(number=0, epoch=0, prompt_id=7, engine=0, admission_version=0, deadline=9)
    found = dict(enumerate(_samples(group, 0, ended, 1.0)))
    assert {found[key].name: depth for key, depth in tree(found, world.tokenizer)} == depths


@pytest.mark.parametrize("width", [1300, 400])
def test_it_is_readable_and_what_models_say_stays_text(tmp_path, model, browser, width):  # noqa: F811
    run, metrics, _ = make(tmp_path, model)
    metrics.close()
    with looked_at(browser, run.folder, width=width, dark=width == 400) as page:
        page.wait("document.querySelectorAll('.figure').length > 15")
        page.wait(
            "document.getElementById('browser').scrollIntoView(), document.querySelectorAll('#rows tr').length > 5"
        )
        assert fits(page)
        heights = "[...document.querySelectorAll('.plot text')].map(t => t.getBoundingClientRect().height)"
        assert min(page.value(heights)) >= 10, "pixels of the labels of axes"
        page.value("document.querySelectorAll('#rows tr.entry')[3].click()")
        page.wait("document.getElementById('answer').textContent.includes('onerror')")
        assert page.value("document.getElementById('answer').textContent") == f"{HOSTILE}<eos>"
        assert page.value("document.getElementById('prompt').textContent") == f"answer 0 {HOSTILE}<eos>"
        assert page.value("typeof window.hacked") == "undefined"
        assert page.value("document.querySelectorAll('main script, main img').length") == 0
        assert page.value("document.getElementById('episode').hidden")
        page.value("document.querySelectorAll('#rows tr.entry')[5].click()")
        samples = "[...document.querySelectorAll('#samples tr.entry')]"
        page.wait(f"{samples}.length === 3")
        assert page.value(f"{samples}.map(r => [...r.cells].map(c => c.textContent).slice(0, 4))") == [
            ["105.0", "3", str(len(f"answer 5 {HOSTILE}<eos>") - 4), "0"],
            ["105.2", "2, -1.5", "5", "3–4"],
            ["105.1", "3", "18", "0"],
        ]
        assert page.value(f"{samples}.map(r => [r.ariaLevel, r.ariaCurrent])") == [
            ["1", "true"],
            ["2", "false"],
            ["1", "false"],
        ]
        starts = f"{samples}.map(r => {{ const s = document.createRange(); s.selectNodeContents(r.cells[0]); "
        first, second, third = page.value(starts + "return s.getBoundingClientRect().left; })")
        assert first == third and second - first == 16 and fits(page)
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(Path(folder) / f"episode-{width}.png")
        page.value(f"{samples}[2].click()")
        page.wait("document.getElementById('answer').textContent.includes('its second sample')")
        assert page.value("document.getElementById('trajectory-of').textContent") == "Trajectory 105.1"
        page.value("document.querySelectorAll('#rows tr.entry')[1].click()")
        page.wait("document.querySelectorAll('#answer span').length === 2")
        kinds = page.value("[...document.querySelectorAll('#answer span')].map(part => part.className)")
        assert kinds == ["v3 untrained", "v4"]
        page.value("document.querySelectorAll('#rows tr.entry')[2].click()")
        page.wait("document.getElementById('answer').textContent.length === 2000")
        page.value("document.getElementById('more').click()")
        page.wait("document.getElementById('answer').textContent.length === 4000")
        page.value("document.getElementById('after').click()")
        page.wait("document.getElementById('page').textContent === '26–30 of 30'")
        page.value("document.getElementById('older').click()")
        page.wait("document.getElementById('batch').value === '0' && document.getElementById('older').disabled")
        assert fits(page)
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(Path(folder) / f"live-{width}.png")


def test_a_run_that_has_not_begun(tmp_path, model, browser):  # noqa: F811
    with looked_at(browser, tmp_path / "run", width=400) as page:
        page.wait("document.getElementById('state').textContent === 'has not begun'")
        page.wait("document.body.innerText.includes('The run has not begun.')")
        assert fits(page)
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(Path(folder) / "live-empty.png")
        make(tmp_path, model)[1].close()
        page.wait("document.title === '12/40 · run' && document.querySelectorAll('.figure').length > 15")


@pytest.mark.parametrize("there", [False, True], ids=["no folder", "an empty folder"])
def test_a_folder_opened_before_its_first_run_lists_those_that_come(tmp_path, model, browser, there):  # noqa: F811
    if there:
        (tmp_path / "runs").mkdir()
    with looked_at(browser, tmp_path / "runs") as page:
        page.wait("document.body.innerText.includes('The run has not begun.')")
        made = [make(tmp_path / "runs", model, updates, name)[1] for name, updates in (("one", 3), ("two", 5))]
        page.wait("document.title === '2 runs' && document.querySelectorAll('.figure').length > 10", 15)
        assert "has not begun" not in page.value("document.body.innerText") and fits(page)
        for metrics in made:
            metrics.close()


def test_a_report_of_several_runs_is_one_file(tmp_path, model, browser, capsys, monkeypatch):  # noqa: F811
    for place, name, updates in RUNS:
        make(tmp_path / "runs" / place, model, updates, name)[1].close()
    monkeypatch.setattr(sys, "argv", ["areal", str(tmp_path / "runs")])
    assert report.main() == 0 and capsys.readouterr().out == f"{tmp_path}/runs/report.html\n"
    browser.leave()
    browser.errors.clear()
    for width, dark in ((1300, False), (400, True)):
        browser.open((tmp_path / "runs/report.html").as_uri(), width=width, dark=dark)
        browser.wait("document.title === '3 runs' && document.querySelectorAll('.figure').length > 10")
        figure = "[...document.querySelectorAll('.figure')].find(f => f.textContent.startsWith('Reward'))"
        browser.wait(f"{figure}.querySelectorAll('polyline').length === 3")
        shown = browser.value("document.body.innerText")
        assert all(name in shown for _, name, _ in RUNS) and "Trajectories" not in shown and "Loading" not in shown
        assert fits(browser) and browser.errors == []
        browser.value("document.querySelectorAll('#all-runs input')[1].click()")
        browser.wait(f"{figure}.querySelectorAll('polyline').length === 2")
        browser.leave()


def test_an_address_without_the_token_shows_nothing(tmp_path, model, browser):  # noqa: F811
    run, metrics, _ = make(tmp_path, model)
    metrics.close()
    with served(run.folder) as address:
        bare = address.partition("#")[0]
        browser.open(bare)
        browser.value("sessionStorage.clear()")
        browser.open(bare)
        browser.wait("document.getElementById('problem').textContent.includes('token')")
        assert "answer 0" not in browser.value("document.body.innerText")
        browser.leave()


# ---------------------------------------------------------------- without a browser


def ask(address, path, token=None, **changes):
    """Returns (status, content)."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{address.partition('#')[0]}{path}", headers=headers, **changes)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def test_only_who_has_the_token_gets_data(tmp_path, model):  # noqa: F811
    run, metrics, _ = make(tmp_path, model)
    metrics.close()
    with served(run.folder) as address:
        token = address.partition("#")[2]
        assert token == server.token_of(run) and token not in run.token
        for path in (
            "api/overview",
            "api/curves",
            "api/answers",
            "api/trajectories",
            "api/trajectory",
            "api/other",
            "config.yaml",
        ):
            for wrong in (None, "x", run.token, token[:-1], f"{token}0", f"{token}\xe9"):
                status, content = ask(address, path, wrong)
                assert status == 401 and b"answer" not in content and str(run.folder).encode() not in content
        assert ask(address, "api/overview", token)[0] == 200
        assert ask(address, "api/other", token)[0] == 404
        assert ask(address, "api/overview", token, data=b"x", method="POST")[0] == 405
        assert ask(address, "api/trajectories?batch=1e3", token)[0] == 400
        assert ask(address, "api/trajectories?batch=../1", token)[0] == 400
        rows = json.loads(ask(address, "api/trajectories?batch=0&only=right", token)[1])
        assert [row["index"] for row in rows["rows"]] == [1] and rows["newer"] == 1 and rows["older"] is None
        assert "note" in json.loads(ask(address, "api/trajectory?batch=0&index=99", token)[1])
        status, content = ask(address, "")
        assert status == 200 and run.folder.name.encode() + b"/" not in content


def test_addresses_that_cannot_be_listened_on(tmp_path):
    taken = ("--host", "192.0.2.7"), ("--host", "nosuchinterface")
    for options in taken:
        command = [sys.executable, "-m", "areal_megatron.programs.status", str(tmp_path), "--web", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_many_updates_make_few_points(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    rng = np.random.default_rng(1)
    values = rng.normal(size=10_000)
    with run.metrics.open("w") as file:
        for v in range(10_000):
            line = {"time": 1.0, "kind": "update", "version": v + 1, **update(v + 1, reward_mean=values[v])}
            file.write(json.dumps(line) + "\n")
    config = Config(name="run", updates=10_000, model=ModelConfig("m"), data=DataConfig("d"))
    config_file.save(config, run.config)
    watched = Watched(run)
    began = time.monotonic()
    watched.refresh()
    first_s = time.monotonic() - began
    drawn = watched.curves()
    assert len(drawn) < 1_000_000
    x, y = watched.history.curve("reward_mean")
    assert len(x) <= MOST_POINTS and x == sorted(x) and (x[0], x[-1]) == (1, 10_000)
    assert (min(y), max(y)) == (pytest.approx(values.min(), rel=1e-5), pytest.approx(values.max(), rel=1e-5))
    with run.metrics.open("a") as file:
        file.write(json.dumps({"time": 1.0, "kind": "update", "version": 10_001, **update(10_001)}) + "\n")
    began = time.monotonic()
    watched.refresh()
    assert watched.curves() != drawn and time.monotonic() - began < max(1.0, first_s)
    watched.refresh()
    assert watched.overview()["version"] == 10_001


def test_thinned_keeps_few_points_as_they_are():
    x, y = np.arange(5.0), np.array([3.0, 1, 2, 5, 4])
    for found, whole in zip(thinned(x, y, 5), (x, y), strict=True):
        assert found.tolist() == whole.tolist()
    x, y = thinned(np.arange(1000.0), np.zeros(1000), 10)
    assert len(x) <= 10 and (x[0], x[-1]) == (0, 999)


def test_work_that_is_done_again_is_shown_once(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    metrics, history = MetricsWriter(run), History(run)
    for v in (1, 2, 3):
        metrics.write("update", v, {"loss": v, "staleness_histogram": {str(v): 1}})
    metrics.write("eval", 3, evaluation(3, math=(0.5, 0.4, 0.6)))
    metrics.flush()
    history.update()
    assert history.curve("loss") == [[1, 2, 3], [1, 2, 3]] and len(history.evaluations) == 1
    metrics.write("resume", 1, {"incarnation": 1})
    metrics.write("update", 2, {"loss": 20, "staleness_histogram": {"7": 3}})
    metrics.close()
    history.update()
    assert history.curve("loss") == [[1, 2], [1, 20]] and history.evaluations == []
    assert history.histogram("staleness_histogram") == [[1, 7], [0.25, 0.75]]


def test_updates_of_the_run_before_count(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin(version=20, batches=21, checkpoint="runs/other/checkpoints/version-000020")
    metrics, history = MetricsWriter(run), History(run)
    for v in (21, 22, 23):
        metrics.write("update", v, {"loss": v})
    metrics.write("resume", 22, {"incarnation": 1})
    metrics.close()
    history.update()
    assert history.done == 23


def test_one_batch_is_read_and_no_other(tmp_path, model, monkeypatch):  # noqa: F811
    run, metrics, _ = make(tmp_path, model)
    metrics.close()
    for number in range(2, 2000):
        (run.trajectories / f"batch-{number:06d}.msgpack").write_bytes(b"no batch")
    config = config_file.load(run.config)
    asked = []
    monkeypatch.setattr(
        trajectory_browser, "read", lambda path, decode: asked.append(path.name) or dumps.read(path, decode)
    )
    browser = Browser(run)
    page = browser.page(config, 1, 25, "")
    assert (page["newest"], page["newer"], page["older"], page["found"], len(page["rows"])) == (1999, 2, 0, 30, 5)
    browser.page(config, 1, 0, "")
    browser.trajectory(config, 1, 0, 0)
    assert asked == ["batch-000001.msgpack"]


def test_many_who_look_cost_one_look(tmp_path, model):  # noqa: F811
    run, metrics, _ = make(tmp_path, model)
    metrics.close()

    async def look():
        page, looks = Page(Watched(run), "t"), []
        whole = page.watched.refresh
        page.watched.refresh = lambda: looks.append(time.monotonic()) or whole()
        for _ in range(3):
            await asyncio.gather(*(page._fresh() for _ in range(50)))
        return len(looks)

    assert asyncio.run(look()) <= 2


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nX-Half: ", b"GET /page.js HTTP/1.1\r\nHost: x\r\n\r\n" * 30])
def test_strangers_who_stay_hold_up_nobody(tmp_path, model, said):  # noqa: F811
    """2,000 who say nothing, half a header, or ask for much and read none of it, at a page as a login node has it."""
    if descriptors.raise_limit() < 4096:
        pytest.skip("this process may not open 2,000 connections")
    run, metrics, _ = make(tmp_path, model)
    metrics.close()
    errors = tmp_path / "errors"
    with errors.open("wb") as log, served(run.folder, stderr=log) as page, contextlib.ExitStack() as strangers:
        address, _, token = page.partition("#")
        place = urlsplit(address).hostname, urlsplit(address).port
        waits = []
        for number in range(2000):
            stranger = strangers.enter_context(socket.create_connection(place, 10))
            stranger.sendall(said)
            if number % 100 == 99:
                began = time.monotonic()
                assert ask(address, "api/overview", token)[0] == 200
                waits.append(time.monotonic() - began)
        assert median(waits) < 1 and max(waits) < 5, waits
    assert errors.stat().st_size < 10_000


def test_a_file_server_that_hangs_holds_up_no_request(tmp_path, model, monkeypatch):  # noqa: F811
    run, metrics, _ = make(tmp_path, model)
    metrics.close()
    hanging = threading.Event()

    async def look():
        page = Page(Watched(run), "t")
        assert "state" not in page.watched.overview()
        await page._fresh()
        page.watched.refresh = hanging.wait
        page._looked_at = float("-inf")
        monkeypatch.setattr(server, "_PATIENCE_S", 0.2)
        began = time.monotonic()
        await page._fresh()
        shown, waited_s = page.watched.overview(), time.monotonic() - began
        hanging.set()
        return shown, waited_s

    shown, waited_s = asyncio.run(look())
    assert shown["version"] == 12 and waited_s < 5


def test_a_slow_file_server_leaves_the_page_as_it_loads(tmp_path, model, browser):  # noqa: F811
    """Before the first look at the run folder there is nothing to show, and nothing to complain of."""
    code = (
        "import time; from areal_megatron.programs import status; "
        "from areal_megatron.page.watched import Watched; "
        "Watched.refresh = lambda self: time.sleep(4); status.main()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        browser.leave()
        browser.errors.clear()
        browser.open(process.stdout.readline().strip())
        time.sleep(3)
        assert browser.value("document.getElementById('problem').hidden") and browser.errors == []
        assert browser.value("document.getElementById('state').textContent") == "loading"
        browser.leave()
        process.terminate()

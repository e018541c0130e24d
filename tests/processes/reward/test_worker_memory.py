"""Reward workers whose memory a policy's text uses up."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from areal_megatron.config import RewardConfig
from areal_megatron.reward.worker import MEMORY_MB, Answer
from areal_megatron.reward.workers import RewardWorkers
from tests.processes.reward.test_reward import run
from tests.support.judging import scores_of, short_pauses  # noqa: F401
from tests.support.living import command_of

pytestmark = pytest.mark.usefixtures("short_pauses")
GREEDY = """
import os, resource, time
held = []

def spends(prompt, response, answer):
    if answer == "raise": raise MemoryError
    return os.getpid()

def score(prompt, response, answer):
    # a function may catch what it raises
    if answer == "limit":
        return resource.getrlimit(resource.RLIMIT_DATA)[0] / 2**20
    if answer == "crash": os.abort()
    if answer == "killed": os.kill(os.getpid(), 9)
    if answer == "hang": time.sleep(1000)
    if answer == "broken": raise KeyError
    if answer == "hold":
        held.append(b"x" * (300 << 20))
    try: bytes(1 << 30)
    except MemoryError: return os.getpid()
    raise RuntimeError("no limit")
"""


def test_powers_that_no_memory_holds_stay_below_the_limit():
    """The peak is that of the worker's resident memory, as the kernel keeps it."""
    bombs = [Answer("", f"\\boxed{{{power}}}", "x^2") for power in ("2^{2^{36}}", "9^{9^{9^{9}}}")]
    right = Answer("", r"\boxed{x^2+2x+1}", "(x+1)^2")
    config = RewardConfig(function="math", workers=1, timeout_s=3)
    peaks_mb = [0.0]

    async def watch():
        while True:
            for child in psutil.Process().children(recursive=True):
                if "areal_megatron.reward.worker" not in command_of(child):
                    continue
                try:
                    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                    peaks_mb.append(max(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")))
                except (OSError, ValueError):
                    continue
            await asyncio.sleep(0.02)

    async def scores():
        pool = RewardWorkers(config)
        await pool.start()
        watching = asyncio.create_task(watch())
        try:
            found = [await scores_of(pool, [bomb]) for bomb in bombs]
            config.timeout_s = 60
            return found, await scores_of(pool, [right]), pool.refused, pool.failures
        finally:
            watching.cancel()
            await pool.close()

    assert asyncio.run(scores()) == ([[0.0], [0.0]], [1.0], 2, 0)
    assert 20 < max(peaks_mb) < MEMORY_MB + 100


def test_a_worker_without_memory_fails_one_answer_and_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(GREEDY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ((before, wrong, after, again),), failures = run(
        "greedy:spends", [[Answer("", "", a) for a in ("", "raise", "", "")]]
    )
    assert (wrong, failures) == (None, 1)
    assert before != after == again


@pytest.fixture
def greedy_math(tmp_path, monkeypatch):
    """Replaces math's own function by a greedy one, in the workers' processes."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    (tmp_path / "sitecustomize.py").write_text(
        "import areal_megatron.reward.function as f\nf.BUILT_IN['math'] = 'greedy:score'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("greedy_math")
def test_an_answer_that_math_cannot_finish_twice_is_refused():
    """Unless something else has killed the worker: that says nothing about the answer."""

    async def judged(pool, answers):
        return await pool.judge(answers), pool.refused

    answers = [Answer("", "", kind) for kind in ("", "crash", "hang", "broken", "killed", "")]
    (((first, *refused, killed, last), count),), failures = run("math", [answers], timeout_s=3, ask=judged)
    assert [(one.score, one.refused, one.problem) for one in refused] == [(0.0, True, "")] * 3 and count == 3
    assert killed.problem == "math ended its worker process with code -9" and failures == 1
    assert first.score > 0 < last.score


@pytest.mark.usefixtures("greedy_math")
def test_math_runs_with_a_limit_and_is_replaced_when_worn_out():
    kinds = ("limit", "", "hold", "", "")
    ((limit_mb, first, second, third, fourth),), failures = run("math", [[Answer("", "", kind) for kind in kinds]])
    assert failures == 0
    assert MEMORY_MB < limit_mb < MEMORY_MB + 500
    assert first == second != third == fourth


WORKER = "areal_megatron.reward.worker"


def test_workers_are_the_first_to_go_when_a_machine_is_out_of_memory():
    async def priorities():
        pool = RewardWorkers(RewardConfig(function="choice", workers=1))
        await pool.start()
        try:
            workers = [child for child in psutil.Process().children() if WORKER in command_of(child)]
            return [Path(f"/proc/{worker.pid}/oom_score_adj").read_text() for worker in workers]
        finally:
            await pool.close()

    assert asyncio.run(priorities()) == ["1000\n"]

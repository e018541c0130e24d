import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal_megatron.config import ConfigError, RewardConfig
from areal_megatron.reward.function import load_function
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers
from tests.support.living import is_alive

USER_CODE = """
import os, time
print("imported")

def by_answer(prompt, response, answer):
    print("called")
    if answer == "raise": raise RuntimeError("boom")
    if answer == "loud": raise RuntimeError("half \\ud800\\n" + "x" * 10**6)
    if answer == "hang": time.sleep(1000)
    if answer == "exit": os._exit(3)
    if answer == "slow": time.sleep(1); return 1
    if answer == "slow once":
        if not os.path.exists(response):
            open(response, "w").close()
            time.sleep(1000)
        return 1
    if answer == "pid": return os.getpid()
    odd = {"told": (0.5, "too long"), "triple": (1, "", ""), "untold": (0.25, None), "nan": float("nan"), "text": "5",
           "none": None, "complex": 1j, "surrogate": (1, "\\ud800")}
    return odd.get(answer, len(response))
"""


@pytest.fixture
def user_function(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(USER_CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards:by_answer"


def run(function, answers, workers=1, timeout_s=30.0, ask=RewardWorkers.score):
    async def scores():
        pool = RewardWorkers(RewardConfig(function=function, timeout_s=timeout_s), count=workers)
        await pool.start()
        try:
            return await asyncio.gather(*(ask(pool, group) for group in answers)), pool.failures
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(scores(), 60))


def answer(kind, response="abc"):
    return Answer("", response, kind)


def test_what_a_user_function_does_wrong_scores_zero_and_is_counted(user_function):
    kinds = ["good", "raise", "nan", "text", "none", "complex", "exit", "good"]
    (scores,), failures = run(user_function, [[answer(kind) for kind in kinds]])
    assert scores == [3, 0, 0, 0, 0, 0, 0, 3]
    assert failures == 6


def test_a_function_may_say_what_is_wrong(user_function):
    answers = [answer(kind) for kind in ("told", "good", "untold", "triple")]
    (judged,), failures = run(user_function, [answers], ask=RewardWorkers.judge)
    assert [(one.score, one.feedback) for one in judged] == [(0.5, "too long"), (3, ""), (0.25, ""), (0, "")]
    assert failures == 1


def test_an_answer_that_cannot_be_sent_is_a_failure_of_its_own(user_function, caplog):
    """Half a character has no bytes in UTF-8."""
    texts = ["abc", "\ud800", "abcde"]
    answers = [Answer("", text, "good", where=f"a.jsonl:{row}") for row, text in enumerate(texts, 1)]
    (scores, alone), failures = run(user_function, [answers, [Answer("\ud800", "", "", where="a.jsonl:9")]])
    assert (scores, alone, failures) == ([3, 0, 5], [0], 2)
    lines = sorted(record.getMessage() for record in caplog.records if "failure" in record.getMessage())
    assert "a.jsonl:2: cannot be sent to a reward worker" in lines[0] + lines[1] and "a.jsonl:9" in lines[0] + lines[1]
    assert not any("\n" in line for line in lines)


def test_a_failure_names_the_row_in_one_line(user_function, caplog):
    (scores,), failures = run(user_function, [[Answer("", "", "raise", where="a.jsonl:3"), Answer("", "", "loud")]])
    assert (scores, failures) == ([0, 0], 2)
    first, second = (record.getMessage() for record in caplog.records if "failure" in record.getMessage())
    assert first == "reward failure 1: a.jsonl:3: RuntimeError: boom"
    assert len(second) < 600 and "\n" not in second and "half \\ud800" in second


def test_answers_that_are_refused_are_wrong_and_counted_but_no_failure(user_function):
    async def judged():
        pool = RewardWorkers(RewardConfig(function="math"), count=1)
        await pool.start()
        try:
            restated = Answer("", r"\boxed{6 \times 7}", "42")
            found = await pool.judge([restated, Answer("", r"\boxed{42}", "42")])
            return found, pool.refused, pool.failures
        finally:
            await pool.close()

    (refused, right), count, failures = asyncio.run(asyncio.wait_for(judged(), 60))
    assert (refused.score, right.score, count, failures) == (0, 1, 1, 0)
    assert refused.feedback == "The final answer must be one plain number."


def test_feedback_that_is_no_unicode_fails_its_answer_alone(user_function):
    ((first, wrong, after),), failures = run(user_function, [[answer("pid"), answer("surrogate"), answer("pid")]])
    assert (wrong, failures) == (0, 1)
    assert first == after, "its worker died"


def test_a_hung_worker_is_killed_and_replaced(user_function):
    before = {p.pid for p in psutil.Process().children()}
    ((first, hung, after),), failures = run(
        user_function, [[answer("pid"), answer("hang"), answer("pid")]], timeout_s=1
    )
    assert (hung, failures) == (0, 1)
    assert first != after
    assert not psutil.pid_exists(int(first)), "the hung worker lives on"
    assert {p.pid for p in psutil.Process().children()} == before, "workers outlive their pool"


def test_groups_are_shared_out_over_the_workers_in_order(user_function):
    groups = [[answer("", "x" * i), answer("", "x" * (i + 1))] for i in range(40)]
    scores, failures = run(user_function, groups, workers=2)
    assert scores == [[i, i + 1] for i in range(40)]
    assert failures == 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "maths",
            "'maths' is no reward, expected math, choice, code, an http:// or https:// address, or "
            "package.module:function; "
            "did you mean 'math'?",
        ),
        ("nowhere:f", "cannot import nowhere: ModuleNotFoundError"),
        ("my_rewards:missing", "my_rewards has no function missing"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(user_function, name, problem):
    with pytest.raises(ConfigError, match=r"reward.function") as error:
        load_function(name)
    assert problem in str(error.value)
    with pytest.raises(ConfigError) as error:
        run(name, [])
    assert problem in str(error.value)


def test_a_worker_in_user_code_dies_with_its_controller(user_function, tmp_path):
    pids = tmp_path / "pid"
    code = f"""
import asyncio, os
from areal_megatron.config import RewardConfig
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.reward.worker import Answer
async def main():
    pool = RewardWorkers(RewardConfig(function={user_function!r}, timeout_s=100))
    await pool.start()
    (pid,) = await pool.score([Answer("", "", "pid")])
    open({str(pids)!r}, "w").write(str(int(pid)))
    asyncio.create_task(pool.score([Answer("", "", "hang")]))
    await asyncio.sleep(0.5)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    process = psutil.Popen([sys.executable, "-c", code])
    process.wait(60)
    worker, deadline = int(Path(pids).read_text()), time.monotonic() + 10
    while is_alive(worker):
        assert time.monotonic() < deadline, "the worker outlived its controller"
        time.sleep(0.05)


PAUSED = """
import asyncio, sys
from areal_megatron.config import RewardConfig
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers

async def main():
    pool = RewardWorkers(RewardConfig(function="my_rewards:by_answer", timeout_s=3), count=2)
    await pool.start()
    pids = [worker._process.pid for worker in pool._workers]
    scoring = asyncio.gather(*(pool.score([Answer("", "x", "slow")] * 4) for _ in range(2)))
    await asyncio.sleep(0.3)
    print("scoring", flush=True)
    print(await scoring, pool.failures, sorted(pids) == sorted(worker._process.pid for worker in pool._workers))
    await pool.close()

asyncio.run(main())
"""


def test_a_controller_that_was_stopped_for_longer_than_the_limit_scores_right_answers_right(user_function):
    process = psutil.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "scoring\n"
    process.suspend()
    time.sleep(4)
    process.resume()
    assert process.communicate(timeout=60)[0].strip() == "[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]] 0 True"


def test_an_answer_that_took_too_long_is_scored_once_more_before_it_counts(user_function, tmp_path):
    """As where its worker got no processor the first time."""
    slow_once = [Answer("", str(tmp_path / "tried"), "slow once")]
    (scores,), failures = run(user_function, [[answer("good"), *slow_once, answer("good")]], timeout_s=2)
    assert (scores, failures) == ([3, 1, 3], 0)

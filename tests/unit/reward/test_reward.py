import asyncio
import os
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
    if answer == "hang": time.sleep(1000)
    if answer == "exit": os._exit(3)
    if answer == "pid": return os.getpid()
    odd = {"told": (0.5, "too long"), "triple": (1, "", ""), "untold": (0.25, None), "nan": float("nan"), "text": "5",
           "none": None, "complex": 1j}
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

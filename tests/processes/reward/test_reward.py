import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal_megatron.config import ConfigError, RewardConfig
from areal_megatron.process import lateness
from areal_megatron.reward.function import load_function
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers
from tests.support.judging import scores_of, short_pauses  # noqa: F401
from tests.support.living import is_alive

pytestmark = pytest.mark.usefixtures("short_pauses")

USER_CODE = """
import os, re, time
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
    if answer.startswith("fails "):  # so many times
        with open(response, "a") as tries:
            tries.write("x")
        if os.path.getsize(response) <= int(answer.split()[1]): raise ConnectionError("not now")
        return 1
    if answer == "never":
        with open(response, "a") as tries:
            tries.write("x")
        from areal_megatron.reward.no_score import NeverScored
        raise NeverScored("no verdict")
    if answer == "type": return len(prompt) + response
    if answer == "match": return re.match("x", response).group()
    if answer == "name": return nothing
    if answer == "import": import nowhere
    if answer == "pid": return os.getpid()
    odd = {"told": (0.5, "too long"), "triple": (1, "", ""), "untold": (0.25, None), "nan": float("nan"), "text": "5",
           "none": None, "complex": 1j, "surrogate": (1, "\\ud800")}
    return odd.get(answer, len(response))
"""


@pytest.fixture
def user_function(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(USER_CODE)
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    (tmp_path / "long.py").write_text("raise RuntimeError('one\\ntwo')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards:by_answer"


def run(function, answers, workers=1, timeout_s=30.0, retry_s=0.0, ask=scores_of):
    async def scores():
        pool = RewardWorkers(RewardConfig(function=function, timeout_s=timeout_s, retry_s=retry_s, workers=workers))
        await pool.start()
        try:
            return await asyncio.gather(*(ask(pool, group) for group in answers)), pool.failures
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(scores(), 300))


def answer(kind, response="abc"):
    return Answer("", response, kind)


def test_the_work_of_workers_is_counted_while_it_lasts(user_function):
    """Two answers of a second each, by one of two workers: half a second of work so far after the first."""

    async def shares():
        pool = RewardWorkers(RewardConfig(function=user_function, workers=2))
        await pool.start()
        try:
            idle_s = pool.take_worked()
            asked = asyncio.create_task(pool.judge([answer("slow"), answer("slow")]))
            first_s = 0.0
            while first_s < 0.45 and not asked.done():
                await asyncio.sleep(0.05)
                first_s += pool.take_worked()
            assert not asked.done(), "work is counted before it is done"
            await asked
            second_s = pool.take_worked()
            await asyncio.sleep(0.2)
            return idle_s, first_s, second_s, pool.take_worked()
        finally:
            await pool.close()

    began = time.monotonic()
    idle_s, first_s, second_s, rested_s = asyncio.run(asyncio.wait_for(shares(), 300))
    assert idle_s == rested_s == 0
    assert first_s >= 0.45 and 1.0 <= first_s + second_s < (time.monotonic() - began) / 2


def test_what_a_user_function_does_wrong_is_no_score_and_is_counted(user_function):
    kinds = ["good", "raise", "nan", "text", "none", "complex", "exit", "good"]
    (scores,), failures = run(user_function, [[answer(kind) for kind in kinds]])
    assert scores == [3, None, None, None, None, None, None, 3]
    assert failures == 6


@pytest.mark.parametrize(("times", "retry_s", "score"), [(1, 0.0, 1), (2, 0.0, None), (4, 20.0, 1)])
def test_what_fails_is_tried_again_until_the_time_for_that_is_over(user_function, tmp_path, times, retry_s, score):
    """The others of its group are scored once; the reward of a later answer is not lost either."""

    async def tried(pool, answers):
        return [None if s.problem else s.score for s in await pool.judge(answers)], pool.retries

    flaky = Answer("", str(tmp_path / "tries"), f"fails {times}")
    counted = Answer("", str(tmp_path / "others"), "fails 0")
    ((scores, retries),), failures = run(user_function, [[counted, flaky, answer("good")]], retry_s=retry_s, ask=tried)
    assert scores == [1, score, 3] and failures == (score is None)
    assert retries == (times if score else 1) and (tmp_path / "others").stat().st_size == 1
    assert (tmp_path / "tries").stat().st_size == retries + 1


def test_what_would_fail_again_is_not_tried_again(user_function, tmp_path):
    async def tried(pool, answers):
        return [None if s.problem else s.score for s in await pool.judge(answers)], pool.retries

    hopeless = Answer("", str(tmp_path / "tries"), "never")
    ((scores, retries),), failures = run(user_function, [[hopeless, answer("good")]], retry_s=60.0, ask=tried)
    assert (scores, retries, failures) == ([None, 3], 0, 1) and (tmp_path / "tries").stat().st_size == 1


MISTAKES = {
    "type": "TypeError: unsupported operand",
    "match": "AttributeError: 'NoneType' object has no attribute 'group'",
    "name": "NameError: name 'nothing' is not defined",
    "import": "ModuleNotFoundError: No module named 'nowhere'",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_function_ends_the_run_at_once_with_its_line(user_function, mistake):
    line = next(k for k, text in enumerate(USER_CODE.splitlines(), 1) if f'"{mistake}"' in text)
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        run(user_function, [[answer("good"), Answer("", "abc", mistake, where="d.jsonl:7")]], retry_s=600)
    said = str(error.value)
    assert said.startswith("reward.function: my_rewards:by_answer has a mistake in ") and "\n" not in said
    assert f"my_rewards.py:{line}: d.jsonl:7: {MISTAKES[mistake]}" in said and "resume=auto" in said
    assert time.monotonic() - began < 20


def test_while_one_answer_is_tried_again_its_worker_scores_others(user_function, tmp_path, monkeypatch):
    monkeypatch.setattr(lateness, "_FIRST_PAUSE_S", 1.5)
    ended = []

    async def in_order(pool, answers):
        (scored,) = await pool.judge(answers)
        ended.append(scored.score)

    run(user_function, [[Answer("", str(tmp_path / "tries"), "fails 1")], [answer("good")]], ask=in_order)
    assert ended == [3, 1]


def test_a_function_may_say_what_is_wrong(user_function):
    answers = [answer(kind) for kind in ("told", "good", "untold", "triple")]
    (judged,), failures = run(user_function, [answers], ask=RewardWorkers.judge)
    assert [(one.score, one.feedback) for one in judged[:3]] == [(0.5, "too long"), (3, ""), (0.25, "")]
    assert judged[3].problem and failures == 1


def test_an_answer_that_cannot_be_sent_is_a_failure_of_its_own(user_function, caplog):
    """Half a character has no bytes in UTF-8."""
    texts = ["abc", "\ud800", "abcde"]
    answers = [Answer("", text, "good", where=f"a.jsonl:{row}") for row, text in enumerate(texts, 1)]
    (scores, alone), failures = run(user_function, [answers, [Answer("\ud800", "", "", where="a.jsonl:9")]])
    assert (scores, alone, failures) == ([3, None, 5], [None], 2)
    lines = sorted(record.getMessage() for record in caplog.records if "failure" in record.getMessage())
    assert "a.jsonl:2: cannot be sent to a reward worker" in lines[0] + lines[1] and "a.jsonl:9" in lines[0] + lines[1]
    assert not any("\n" in line for line in lines)


def test_a_failure_names_the_row_in_one_line(user_function, caplog):
    (scores,), failures = run(user_function, [[Answer("", "", "raise", where="a.jsonl:3"), Answer("", "", "loud")]])
    assert (scores, failures) == ([None, None], 2)
    tried, first, second = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert tried == "rewards of 2 answers are tried again in 0.05 s: a.jsonl:3: RuntimeError: boom"
    assert first == "reward failure 1: a.jsonl:3: RuntimeError: boom"
    assert len(second) < 600 and "\n" not in second and "half \\ud800" in second


def test_answers_that_are_refused_are_wrong_and_counted_but_no_failure(user_function):
    async def judged():
        pool = RewardWorkers(RewardConfig(function="math", workers=1))
        await pool.start()
        try:
            restated = Answer("", r"\boxed{6 \times 7}", "42")
            found = await pool.judge([restated, Answer("", r"\boxed{42}", "42")])
            return found, pool.refused, pool.failures
        finally:
            await pool.close()

    (refused, right), count, failures = asyncio.run(asyncio.wait_for(judged(), 300))
    assert (refused.score, right.score, count, failures) == (0, 1, 1, 0)
    assert refused.feedback == "The final answer must be one plain number."


@pytest.mark.parametrize(("function", "said"), [("math", "The answer is 7"), ("choice", "The answer is C")])
def test_a_built_in_function_reads_of_a_cut_response_what_is_in_a_complete_box(function, said):
    right = said[-1]
    texts = [said, f"{said} \\boxed{{{right}", f"\\boxed{{{right}}} and", f"\\boxed{{{right}}} or \\boxed{{", said]
    answers = [Answer("", text, right, cut=True) for text in texts]
    answers[-1].cut = False
    assert run(function, [answers]) == ([[0, 0, 1, 1, 1]], 0)


def test_feedback_that_is_no_unicode_fails_its_answer_alone(user_function):
    ((first, wrong, after),), failures = run(user_function, [[answer("pid"), answer("surrogate"), answer("pid")]])
    assert (wrong, failures) == (None, 1)
    assert first == after, "its worker died"


def test_a_hung_worker_is_killed_and_replaced(user_function):
    before = {p.pid for p in psutil.Process().children()}
    ((first, hung, after),), failures = run(
        user_function, [[answer("pid"), answer("hang"), answer("pid")]], timeout_s=1
    )
    assert (hung, failures) == (None, 1)
    assert first != after
    assert not psutil.pid_exists(int(first)), "the hung worker lives on"
    assert {p.pid for p in psutil.Process().children()} == before, "workers outlive their pool"


def test_a_worker_that_is_ended_before_it_has_loaded_is_started_again(user_function, tmp_path, caplog):
    """As by the kernel, which ends reward workers first where no memory is left."""
    mark = tmp_path / "frail"
    ends_once = f"import os, sys\nif os.path.exists({str(mark)!r}): os.remove({str(mark)!r}); os._exit(7)"
    (tmp_path / "my_rewards.py").write_text(f"{ends_once}\n{USER_CODE}")

    async def ask(pool, answers):
        mark.touch()
        return await scores_of(pool, answers)

    (scores,), failures = run(user_function, [[answer("exit"), answer("good")]], ask=ask)
    assert (scores, failures, mark.exists()) == ([None, 3], 1, False)
    assert "the worker process of my_rewards:by_answer ended with code 7" in caplog.text


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
            "'maths' is no reward, expected math, choice, code, model, judge, an http:// or https:// address, or "
            "package.module:function; did you mean 'math'?",
        ),
        ("nowhere:f", "cannot import nowhere: ModuleNotFoundError"),
        ("leaves:f", "cannot import leaves: SystemExit: 0"),
        ("long:f", "cannot import long: RuntimeError: one"),
        ("my_rewards:missing", "my_rewards has no function missing; it has by_answer"),
        ("my_rewards:by_answr", "has no function by_answr, did you mean by_answer?"),
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
    (pid,) = await pool.judge([Answer("", "", "pid")])
    open({str(pids)!r}, "w").write(str(int(pid.score)))
    asyncio.create_task(pool.judge([Answer("", "", "hang")]))
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
    pool = RewardWorkers(RewardConfig(function="my_rewards:by_answer", timeout_s=3, workers=2))
    await pool.start()
    pids = [worker._process.pid for worker in pool._workers]
    scoring = asyncio.gather(*(pool.judge([Answer("", "x", "slow")] * 4) for _ in range(2)))
    await asyncio.sleep(0.3)
    print("scoring", flush=True)
    scores = [[scored.score for scored in group] for group in await scoring]
    print(scores, pool.retries, sorted(pids) == sorted(worker._process.pid for worker in pool._workers))
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


def test_an_answer_that_took_too_long_is_scored_once_more_before_it_fails(user_function, tmp_path):
    """As where its worker got no processor the first time."""
    slow_once = [Answer("", str(tmp_path / "tried"), "slow once")]
    (scores,), failures = run(user_function, [[answer("good"), *slow_once, answer("good")]], timeout_s=2)
    assert (scores, failures) == ([3, 1, 3], 0)

"""Episodes in worker processes: the same as in this one, whatever workflows compute and however they end."""

import asyncio
import os
import signal
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_megatron.config import ConfigError
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.workflows import multi_turn
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import Sampling
from areal_megatron.workflows.workers import EpisodeWorkers, WorkflowRunner
from tests.support.chat_world import FORGETTING, World
from tests.support.soaking import with_soaked

MODULE = textwrap.dedent("""
    import asyncio, os, pathlib, re, signal, threading, time
    import numpy as np

    pathlib.Path("loading").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()

    async def talk(episode):
        await episode.sample()
        episode.say("go on")
        await episode.sample()
        return [0.5, 0.5]

    async def answers(episode):
        await episode.sample()
        return 1.0

    async def fails(episode):
        await episode.sample()
        raise ValueError("broken")

    async def fails_oddly(episode):
        await episode.sample()
        raise ValueError(chr(0xD800))

    async def dies_once(episode):
        text = await episode.sample()
        try:
            pathlib.Path("died").touch(exist_ok=False)
        except FileExistsError:
            return 1.0
        os._exit(7)

    async def leaves_a_process(episode):
        await episode.sample()
        if not pathlib.Path("left").exists():
            if not (left := os.fork()):
                time.sleep(3600)
            pathlib.Path("left").write_text(str(left))
            os.kill(os.getpid(), signal.SIGKILL)
        episode.discount = np.float32(0.5)
        return 1.0

    async def dies(episode):
        os._exit(7)

    async def dies_by_the_row(episode):
        await episode.sample()
        if episode.prompt.row["dies"]:
            os._exit(7)
        await asyncio.sleep(2)
        return 1.0

    async def holds_up(episode):
        await episode.sample()
        time.sleep(3600)

    async def holds_the_interpreter(episode):
        await episode.sample()
        re.match(r"(a|a)*b", "a" * 60)

    async def computes(episode, seconds=1.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        await episode.sample()
        return 1.0

    async def computes_a_little(episode):
        return await computes(episode, 0.5)

    async def reads_the_row(episode):
        await episode.sample()
        return episode.prompt.row["deep"]["share"]

    async def gives_up(episode):
        try:
            await asyncio.wait_for(episode.sample(), 0.2)
        except TimeoutError:
            await episode.sample()
        return 1.0

    async def slow(episode):
        try:
            await episode.sample()
            pathlib.Path("began").touch()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pathlib.Path("cancelled").touch()
            raise
""")

ROW = {"answer": "right", "deep": {"share": 0.5}}


class Pool:
    """A world whose workflow is the name of a function of the module above, or a workflow of the package."""

    def __init__(self, folder, monkeypatch, workflow, answer=None, workers=1, **settings):
        (folder / "talking.py").write_text(MODULE)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        answer = answer or (lambda _, number: f"<think>x</think>a{number}")
        # for workflows that say something: rendering imports transformers, most of what a worker takes to start
        template = FORGETTING if workflow in ("talk", "multi_turn") else ""
        self.world = World(folder / "model", None, answer, template=template, **settings)
        rollout = self.world.config.rollout
        rollout.workflow = workflow if workflow == "multi_turn" else f"talking:{workflow}"
        rollout.turns, rollout.workflow_workers = 3, workers
        self.world.config.reward.retry_s = 0.0
        self.workers = EpisodeWorkers([self.world.config])
        self.runner = WorkflowRunner(self.workers, self.world.scorer)

    async def sample(self, n=2, **prompt):
        world, spec = self.world, EpisodeSpec(replace(self.world.prompt(), **prompt), 0, "group-3", 100, "train")
        stop = world.tokenizer.stop_tokens
        sampling = Sampling(world.client, world.config.rollout, stop, None, lambda: world.interrupting)
        return await self.runner.sample(sampling, spec, n)

    def run(self, then=None, n=2):
        """Returns the episodes, and what `then` returns; without it, what was counted."""

        async def live():
            await self.workers.start()
            try:
                found = await (then(self) if then else self.sample(n))
                return found, self.workers.account()
            finally:
                await self.workers.close()

        return asyncio.run(asyncio.wait_for(live(), 120))


def same(one, other):
    assert (one.score, one.numbers, len(one.samples)) == (other.score, other.numbers, len(other.samples))
    for a, b in zip(one.samples, other.samples, strict=True):
        assert a.prompt == b.prompt and a.asked == b.asked and a.truncated == b.truncated
        for name in ("tokens", "logprobs", "versions", "loss_mask", "routes"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_an_episode_is_the_same_as_in_this_process(tmp_path, monkeypatch):
    answers = ["wrong", "ab", "right"]
    pool = Pool(tmp_path, monkeypatch, "multi_turn", lambda _, number: answers[number])
    (found,), counts = pool.run(n=1)
    here = World(tmp_path / "here", multi_turn.run, lambda _, number: answers[number], template=FORGETTING)
    (expected,) = asyncio.run(here.sample())
    same(found, expected)
    assert pool.world.judge.asked == here.judge.asked == answers and found.score.correct
    assert [call.prompt for call in pool.world.client.calls] == [call.prompt for call in here.client.calls]
    assert [call.seed for call in pool.world.client.calls] == [call.seed for call in here.client.calls]
    assert counts == {"workflow_failures": 0, "refused_calls": 0, "workflow_deaths": 0}


def test_samples_and_rewards_of_answers_come_back(tmp_path, monkeypatch):
    found, _ = Pool(tmp_path, monkeypatch, "talk").run(n=3)
    assert [len(one.samples) for one in found] == [2, 2, 2] and {one.score.of_answers for one in found} == {(5.0, 0.0)}
    assert [one.returns(1.0)[0][0][1] for one in found] == [5.0] * 3


def test_the_row_is_the_workflows(tmp_path, monkeypatch):
    (found,), _ = Pool(tmp_path, monkeypatch, "reads_the_row").run(lambda pool: pool.sample(1, row=ROW))
    assert found.score.reward == 0.0 and found.score.of_answers == () and found.score.score == 0.5


def test_a_row_that_cannot_be_sent_fails_its_episode(tmp_path, monkeypatch):
    rows = {"text": "\ud800"}, {"number": 2**64}, {"type": object()}

    async def then(pool):
        return [(await pool.sample(1, row=row, where="x:3"), await pool.sample(1, row=ROW)) for row in rows]

    pairs, counts = Pool(tmp_path, monkeypatch, "reads_the_row").run(then)
    for (failed,), (found,) in pairs:
        assert failed.score.failure.startswith("x:3: cannot be sent to a process of workflows: ")
        assert not failed.score.trained and found.score.trained
    assert counts["workflow_failures"] == len(pairs) == 3


def test_what_fails_is_counted(tmp_path, monkeypatch):
    found, counts = Pool(tmp_path, monkeypatch, "fails").run()
    assert all(one.score.failure == "rows.jsonl:8: ValueError: broken" and not one.score.trained for one in found)
    assert counts["workflow_failures"] == 2


def test_a_failure_that_is_no_unicode_is_told(tmp_path, monkeypatch):
    found, _ = Pool(tmp_path, monkeypatch, "fails_oddly").run(n=1)
    assert [one.score.failure for one in found] == [r"rows.jsonl:8: ValueError: \ud800"]


def test_a_worker_that_dies_costs_its_episodes_a_retry(tmp_path, monkeypatch):
    pool = Pool(tmp_path, monkeypatch, "dies_once")
    found, counts = pool.run()
    assert all(one.score.correct for one in found) and (tmp_path / "died").exists()
    asked = [call.request_id for call in pool.world.client.calls]
    assert len(asked) == len({*asked}) > 2
    assert counts["workflow_deaths"] == 1 and not counts["workflow_failures"]


def test_a_process_that_a_dead_worker_leaves_holds_up_nobody(tmp_path, monkeypatch):
    try:
        (found,), counts = Pool(tmp_path, monkeypatch, "leaves_a_process").run(n=1)
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert found.score.correct and found.score.reward == 0.0
    assert counts["workflow_deaths"] == 1 and not counts["workflow_failures"]


def test_an_episode_that_ends_every_worker_has_failed(tmp_path, monkeypatch):
    ((found,), counts) = Pool(tmp_path, monkeypatch, "dies").run(n=1)
    assert found.score.failure == "rows.jsonl:8: a workflow ended its process with code 7" and not found.score.trained
    assert found.length == 1 and not found.answers
    assert counts["workflow_deaths"] == 3 and counts["workflow_failures"] == 1


def test_an_episode_does_not_fail_of_another_that_ends_every_worker(tmp_path, monkeypatch):
    async def then(pool):
        return await asyncio.gather(*(pool.sample(1, row={"dies": dies}) for dies in (True, False)))

    ([dead], [lives]), counts = Pool(tmp_path, monkeypatch, "dies_by_the_row").run(then)
    assert dead.score.failed and lives.score.correct and lives.score.trained
    assert counts["workflow_deaths"] == 3 and counts["workflow_failures"] == 1


# what holds the interpreter lets no other thread run either: it asks for more than what sleeps
@pytest.mark.parametrize("workflow", with_soaked(("holds_up", "holds_the_interpreter"), ["holds_up"]))
def test_a_workflow_that_holds_up_its_process_is_ended(tmp_path, monkeypatch, workflow):
    ((found,), counts) = Pool(tmp_path, monkeypatch, workflow, timeout_s=0.5).run(n=1)
    assert "or held it up for rollout.workflow_timeout_s=0.5 s" in found.score.failure
    assert counts["workflow_deaths"] == 3


def test_what_a_workflow_computes_holds_up_nobody_here(tmp_path, monkeypatch):
    async def then(pool):
        sampling, late = asyncio.ensure_future(pool.sample(2)), []
        while not sampling.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - before)
        return await sampling, sum(one > 0.9 for one in late)

    (found, held_up), _ = Pool(tmp_path, monkeypatch, "computes").run(then)
    assert all(one.score.correct for one in found) and not held_up


def test_many_that_compute_in_turn_hold_up_nobody(tmp_path, monkeypatch):
    """Eight, each within the limit, in one turn of the event loop."""
    found, counts = Pool(tmp_path, monkeypatch, "computes_a_little", timeout_s=2.0).run(n=8)
    assert all(one.score.correct for one in found) and counts["workflow_deaths"] == 0


def test_an_engine_that_fails_for_good_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_megatron.workflows.sampling._RETRY_S", 0.0)
    pool = Pool(tmp_path, monkeypatch, "answers", lambda *_: EngineError("it is gone"))
    with pytest.raises(EngineError, match="it is gone"):
        pool.run()


def test_what_is_interrupted_ends_without_a_result_and_asks_nothing_more(tmp_path, monkeypatch):
    nothing = np.zeros(0, np.int32)
    pool = Pool(
        tmp_path, monkeypatch, "answers", lambda *_: Completion(nothing, nothing.astype("f4"), nothing, "abort")
    )
    pool.world.interrupting = True
    found, counts = pool.run()
    assert found is None and not pool.world.client.calls and not counts["workflow_failures"]


def test_episodes_that_nobody_waits_for_end(tmp_path, monkeypatch):
    async def then(pool):
        sampling = asyncio.ensure_future(pool.sample(1))
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.02)
        sampling.cancel()
        while not (tmp_path / "cancelled").exists():
            await asyncio.sleep(0.02)
        return [len(worker.running) for worker in pool.workers._workers]

    left, counts = Pool(tmp_path, monkeypatch, "slow").run(then)
    assert left == [0] and counts["workflow_deaths"] == 0


def test_an_answer_that_an_episode_gives_up_is_sampled_no_further(tmp_path, monkeypatch):
    pool = Pool(tmp_path, monkeypatch, "gives_up")
    scripted, given_up = pool.world.client.generate, []

    async def slow_at_first(*arguments, **settings):
        if not given_up:
            given_up.append("asked")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                given_up.append("cancelled")
                raise
        given_up.append("asked again")
        return await scripted(*arguments, **settings)

    pool.world.client.generate = slow_at_first
    (found,), counts = pool.run(n=1)
    assert counts["workflow_deaths"] == 0 and given_up == ["asked", "cancelled", "asked again"]
    assert found.score.correct and found.answers == 1


def test_workers_that_are_killed_while_idle_are_replaced(tmp_path, monkeypatch):
    async def then(pool):
        for worker in list(pool.workers._workers):
            os.kill(worker._process.pid, signal.SIGKILL)
        while pool.workers.account()["workflow_deaths"] < 2:
            await asyncio.sleep(0.02)
        return await pool.sample()

    found, _ = Pool(tmp_path, monkeypatch, "answers", workers=2).run(then)
    assert len(found) == 2 and all(one.score.correct for one in found)


def test_episodes_that_come_while_a_worker_ends_run_in_its_successor(tmp_path, monkeypatch):
    async def then(pool):
        (worker,), begun = pool.workers._workers, []
        os.kill(worker._process.pid, signal.SIGKILL)
        while worker._process.returncode is None:
            await asyncio.sleep(0)
        while not pool.workers.account()["workflow_deaths"]:  # in each turn of the loop until it is known to be gone
            begun.append(asyncio.ensure_future(pool.sample(1)))
            await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.gather(*begun), 30)

    found, _ = Pool(tmp_path, monkeypatch, "answers").run(then)
    assert found and all(one.score.correct for (one,) in found)


def test_a_worker_that_is_starting_ends_with_the_others(tmp_path, monkeypatch):
    async def then(pool):
        [worker], before = pool.workers._workers, processes_of(os.getpid())
        os.kill(worker._process.pid, signal.SIGKILL)
        while not (own := processes_of(os.getpid()) - before):
            await asyncio.sleep(0.02)
        return own

    started, _ = Pool(tmp_path, monkeypatch, "answers").run(then)
    assert started and not started & processes_of(os.getpid())


def processes_of(parent):
    return {int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()}


def test_workers_give_way_once_they_have_loaded(tmp_path, monkeypatch):
    """On busy cores those that give way at once take minutes to load, and a run waits for them."""

    async def then(pool):
        (worker,) = pool.workers._workers
        threads = [int(thread.name) for thread in Path(f"/proc/{worker._process.pid}/task").iterdir()]
        return [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]

    own = os.getpriority(os.PRIO_PROCESS, 0)
    priorities, _ = Pool(tmp_path, monkeypatch, "answers").run(then)
    assert len(priorities) > 1 and {*priorities} == {min(own + 10, 19)}
    assert (tmp_path / "loading").read_text() == str(own)


def test_a_workflow_that_cannot_be_loaded_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^rollout\.workflow: talking has no function nothing"):
        Pool(tmp_path, monkeypatch, "nothing").run()


def test_workers_end_with_their_controller(tmp_path, monkeypatch):
    async def then(pool):
        return [worker._process.pid for worker in pool.workers._workers]

    pids, _ = Pool(tmp_path, monkeypatch, "answers").run(then)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

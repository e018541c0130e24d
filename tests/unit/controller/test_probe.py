"""The comparison of trainers and engines: what is scored, by whom, and at which version."""

import asyncio

import numpy as np
import pytest

from areal_megatron.config import Config, DataConfig, ModelConfig, ReshardConfig, RolloutConfig
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.probe import EXCERPTS, Probe, excerpts
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.engine.client import EngineError, ScoredText
from areal_megatron.observe.status import EngineState
from areal_megatron.observe.timeline import Timeline
from areal_megatron.run.folder import RunError

LONGEST = 24


def trajectory(uid, prompt=5, answer=9, untrained=0):
    """Makes one whose tokens tell which they are; the first `untrained` of the answer are not trained."""
    return Trajectory(
        uid=uid,
        epoch=0,
        prompt_id=uid,
        admission_version=0,
        prompt=1000 * uid + np.arange(prompt, dtype=np.int32),
        response=1000 * uid + 500 + np.arange(answer, dtype=np.int32),
        logprobs=np.zeros(answer, np.float32),
        versions=np.zeros(answer, np.int32),
        loss_mask=(np.arange(answer) >= untrained).astype(np.uint8),
        reward=0.0,
        truncated=False,
    )


def test_excerpts_are_beginnings_of_answers_after_the_ends_of_their_prompts():
    short, long, tool = trajectory(1), trajectory(2, prompt=50, answer=100), trajectory(3, answer=12, untrained=3)
    found = excerpts([short, long, trajectory(4, answer=40, untrained=30), tool], LONGEST)
    assert [e.tokens.tolist() for e in found] == [
        [*range(1000, 1005), *range(1500, 1509)],
        [*range(2044, 2050), *range(2500, 2518)],
        [*range(3000, 3005), *range(3500, 3512)],
    ], "no token of the third is trained so early"
    assert [e.tokens[e.compared == 1].tolist() for e in found] == [
        [*range(1500, 1509)],
        [*range(2500, 2518)],
        [*range(3503, 3512)],
    ]
    assert [e.at for e in found] == [0, 9, 27]
    assert all(e.tokens.dtype == np.int32 and e.compared.dtype == np.uint8 for e in found)


@pytest.mark.parametrize("count", [1, EXCERPTS, EXCERPTS + 1, 500])
def test_a_few_answers_of_the_whole_batch_are_chosen(count):
    found = [int(e.tokens[0]) // 1000 for e in excerpts([trajectory(uid) for uid in range(count)], LONGEST)]
    assert len(found) == min(count, EXCERPTS) and len({*found}) == len(found)
    assert found[-1] >= count * (1 - 1 / EXCERPTS) - 1


class Client:
    """The client of an engine whose log-probability of a token is −token / 1000, plus `off` in every tenth place."""

    name = "engine-0"

    def __init__(self, version=0, off=0.0):
        self.version, self.off, self.asked = version, off, []
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, tokens, *, request_id, cache_salt):
        await self.gate.wait()
        if self.version is None:
            raise EngineError("engine-0 is dead")
        self.asked.append((request_id, cache_salt))
        logprobs = -np.array(tokens[1:], np.float32) / 1000
        logprobs[::10] += self.off
        nothing = np.zeros((len(logprobs), 0), np.float32)
        return ScoredText(logprobs, self.version, nothing.astype(np.int32), nothing)


def of_trainers(found):
    return np.concatenate([-e.tokens[e.compared == 1].astype(np.float32) / 1000 for e in found])


def play(scene, tmp_path, client, kv_policy="keep", dtype="bfloat16", vllm=None, **reshard):
    config = Config(
        name="x",
        updates=9,
        batch_size=4,
        model=ModelConfig(path="x", dtype=dtype),
        data=DataConfig(train="x", max_prompt_tokens=5),
        rollout=RolloutConfig(group_size=2, max_new_tokens=20, kv_policy=kv_policy, vllm=vllm or {}),
        reshard=ReshardConfig(**reshard),
    )

    async def run():
        changed = Changed()
        engine = Engine(0, client, Timeline(tmp_path / "timeline", "controller"), changed)
        engine.state = EngineState.READY
        subject = Probe(config, [engine], changed)
        task = asyncio.create_task(subject.run())
        await scene(subject, engine, changed)
        if task.done():
            task.result()
        task.cancel()

    asyncio.run(run())


async def turns():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("trainers_first", [True, False])
def test_the_differences_are_those_of_one_version_whoever_is_first(tmp_path, trainers_first):
    client = Client(version=0, off=0.5)

    async def scene(subject, engine, changed):
        engine.version = 2  # the trainers are at 3, which is on its way to it
        found = subject.begin(3, [trajectory(uid, answer=20) for uid in range(2)])
        await turns()
        assert not client.asked and not subject.account()
        if trainers_first:
            subject.trained(3, of_trainers(found))
        engine.version = client.version = 3
        changed.notify()
        await turns()
        assert client.asked == [("probe-3-0", "v3"), ("probe-3-1", "v3")]
        if not trainers_first:
            subject.trained(3, of_trainers(found))
        expected = np.concatenate([np.where(np.arange(len(e.tokens) - 1) % 10 == 0, 0.5, 0)[4:] for e in found])
        assert subject.account() == pytest.approx(
            {
                "mismatch_mean": expected.mean(),
                "mismatch_p99": 0.5,
                "mismatch_max": 0.5,
                "mismatch_tokens": 38,
                "mismatch_version": 3,
            },
            abs=1e-6,
        )
        again = subject.begin(4, [trajectory(5)])
        subject.trained(4, of_trainers(again) + 1)
        await turns()
        assert subject.account()["mismatch_version"] == 3, "no engine has version 4"

    play(scene, tmp_path, client)


@pytest.mark.parametrize("version", [1, None], ids=["has gone on", "died"])
def test_what_an_engine_scored_with_another_version_is_not_compared(tmp_path, version):
    client = Client(version)

    async def scene(subject, engine, changed):
        found = subject.begin(0, [trajectory(1)])
        await turns()
        subject.trained(0, of_trainers(found))
        assert not subject.account()
        engine.version = client.version = 1
        found = subject.begin(1, [trajectory(2)])
        await turns()
        subject.trained(1, of_trainers(found))
        assert subject.account()["mismatch_max"] < 1e-6

    play(scene, tmp_path, client)


def test_an_answer_that_comes_late_is_compared_with_its_own_batch(tmp_path):
    client = Client(version=0)

    async def scene(subject, engine, changed):
        client.gate.clear()
        first = subject.begin(0, [trajectory(1)])
        await turns()
        subject.trained(0, of_trainers(first))
        engine.version = 1
        second = subject.begin(1, [trajectory(2)])
        client.gate.set()
        await turns()
        assert subject.account()["mismatch_version"] == 0 and subject.account()["mismatch_max"] < 1e-6
        client.version = 1
        subject.trained(1, of_trainers(second))
        third = subject.begin(1, [trajectory(3)])  # the second was not applied
        await turns()
        subject.trained(1, of_trainers(third))
        assert subject.account()["mismatch_version"] == 1 and subject.account()["mismatch_max"] < 1e-6

    play(scene, tmp_path, client)


@pytest.mark.parametrize(
    ("dtype", "off", "explained"), [("float32", 2e-2, "0.001"), ("float16", 1.0, "0.05"), ("bfloat16", 2.0, "0.15")]
)
@pytest.mark.parametrize("version", [0, 1])
def test_an_engine_that_computes_another_model_ends_the_run(tmp_path, dtype, off, explained, version):
    """By `off` in every tenth place, with the weights that it began with or after its first update; a tenth of that is
    explained by the dtype."""

    async def both(subject, engine, changed):
        for number in range(version + 1):
            engine.version = client.version = number
            client.off = off if number == version else off / 10
            subject.trained(number, of_trainers(subject.begin(number, [trajectory(1, answer=20)])))
            await turns()

    client = Client()
    with pytest.raises(
        RunError, match=f"engine-0 gives tokens .* at version {version}: .* {dtype} explains {explained}"
    ):
        play(both, tmp_path, client, dtype=dtype)
    off /= 10
    play(both, tmp_path, Client(), dtype=dtype)


@pytest.mark.parametrize("off", [9.0, np.nan])
@pytest.mark.parametrize("settings", [{"check_logprobs": False}, {"vllm": {"kv_cache_dtype": "fp8"}}], ids=str)
def test_the_test_of_engines_can_be_left_out(tmp_path, settings, off):
    async def scene(subject, engine, changed):
        subject.trained(0, of_trainers(subject.begin(0, [trajectory(1)])))
        await turns()
        assert not subject.account()["mismatch_max"] < 1

    play(scene, tmp_path, Client(off=off), **settings)


def test_an_engine_whose_numbers_are_none_ends_the_run(tmp_path):
    async def scene(subject, engine, changed):
        subject.trained(0, of_trainers(subject.begin(0, [trajectory(1)])))
        await turns()

    with pytest.raises(RunError, match=r"engine-0 gives tokens .* they differ by nan in the mean"):
        play(scene, tmp_path, Client(off=np.nan))


def test_an_engine_that_was_tested_ends_no_run_later(tmp_path):
    client = Client()

    async def scene(subject, engine, changed):
        for version in range(4):
            engine.version = client.version = version
            client.off = 9.0 if version > 1 else 0.0
            subject.trained(version, of_trainers(subject.begin(version, [trajectory(1)])))
            await turns()
        assert subject.account()["mismatch_version"] == 3 and subject.account()["mismatch_max"] > 1

    play(scene, tmp_path, client)

"""Rewards of the user's that ask served models, from scripted engines; tests/e2e/test_served.py has real ones."""

import asyncio

import numpy as np
import pytest

from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RewardConfig,
    ServedConfig,
    ServedModelConfig,
    config_file,
)
from areal_megatron.data.prompts import Prompt
from areal_megatron.reward.asking import ask
from areal_megatron.reward.group import GroupAnswer
from areal_megatron.reward.trial import try_rewards
from areal_megatron.reward.worker import Answer, AnswerGroup
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.run.folder import RunError, RunFolder
from tests.support.chat_world import IDS, make_tokenizer
from tests.support.served_engine import ServedEngine

REWARDS = "tests.support.served_rewards"


@pytest.fixture
def scored(tmp_path):
    """Scores answers in a run with a scripted judge: returns what `ask_pool(pool, engine)` does."""
    make_tokenizer(tmp_path / "judge")
    run = RunFolder(tmp_path / "run")
    run.create()

    def score(ask_pool, function, say, timeout_s=10.0, retry_s=0.0, away_s=60.0, group_function=""):
        reward = RewardConfig(
            f"{REWARDS}:{function}" if function else "math",
            timeout_s=timeout_s,
            retry_s=retry_s,
            away_s=away_s,
            workers=1,
            group_function=group_function,
        )
        served = ServedConfig(judge=ServedModelConfig(path=str(tmp_path / "judge"), max_length=200))
        model, data = ModelConfig(str(tmp_path / "judge")), DataConfig("x.jsonl")
        config_file.save(Config("x", updates=1, model=model, data=data, reward=reward, served=served), run.config)
        engine = ServedEngine(run, "judge-0", say)

        async def started():
            pool = RewardWorkers(reward, tmp_path / "judge", run.folder)
            await pool.start()
            try:
                return await ask_pool(pool, engine)
            finally:
                await pool.close()

        try:
            return asyncio.run(asyncio.wait_for(started(), 300))
        finally:
            engine.stop()

    return score


def answers(*texts):
    return [Answer("12+3=", text, "15") for text in texts]


def test_a_reward_asks_a_judge(scored):
    async def of(pool, engine):
        engine.start()
        return [one.score for one in await pool.judge(answers("<15>", "4"))], engine.asked

    found, asked = scored(of, "by_judge", lambda prompt, number: "5" if "<15>" in prompt or not number else "no")
    assert found == pytest.approx([1, 1 / 3])
    assert [question["n"] for question in asked] == [3, 3] and asked[0]["max_tokens"] == 6


@pytest.mark.parametrize("function", ["by_judge", "careless"])
def test_a_judge_that_is_away_is_waited_for_and_no_answer_is_wrong_for_it(scored, function):
    """Also where the function takes its own error for a score."""

    async def of(pool, engine):
        asked = asyncio.ensure_future(pool.judge(answers("4")))
        await asyncio.sleep(2.5)
        assert not asked.done()
        engine.start()
        first = await asked
        engine.stop()
        return first, pool.failures

    (first,), failures = scored(of, function, lambda *_: "yes" if function == "careless" else "15")
    assert (first.score, first.problem, failures) == (1, "", 0)


def test_a_judge_that_stays_away_ends_the_run(scored):
    async def of(pool, _):
        return await pool.judge(answers("4"))

    with pytest.raises(RunError, match=r"^reward.function: away for 1 s \(reward.away_s\): ServiceAway: judge-0: http"):
        scored(of, "careless", lambda *_: "yes", away_s=0.5)


def test_what_a_judge_fails_on_is_no_score_but_a_failure(scored):
    """An answer that takes too long; one to a conversation that is too long may be scored by the function."""

    async def of(pool, engine):
        engine.start()
        return [(one.score, one.problem) for one in await pool.judge(answers("slow", "x" * 300, "4"))]

    slow, long, fine = scored(of, "careless", lambda prompt, _: 3.0 if "slow" in prompt else "yes", timeout_s=2.0)
    assert slow[0] == 0 and "TimeoutError" in slow[1]
    assert (long, fine) == ((0.25, ""), (1.0, ""))


def test_a_function_that_asks_for_what_is_not_served_has_a_mistake(scored):
    async def of(pool, _):
        return await pool.judge(answers("4"))

    with pytest.raises(ConfigError, match=r"served_rewards.py:\d+: ConfigError: no model 'umpire' is served beside"):
        scored(of, "of_nobody", lambda *_: "yes")


def test_a_group_function_asks_too(scored):
    async def of(pool, engine):
        engine.start()
        members = [GroupAnswer(tokens=1, truncated=False, score=0, correct=False, reward=0) for _ in "ab"]
        tokens = [np.array([IDS[letter]], np.int32).tobytes() for letter in "ab"]
        return (await pool.terms(AnswerGroup("p", "a", members, tokens, tokens))).terms

    group_function = f"{REWARDS}:longest_is_praised"
    assert scored(of, "", lambda *_: "b", group_function=group_function) == {"praise": [0, 1]}


def test_the_trial_before_a_run_has_a_judge_that_does_not_know():
    prompt = Prompt(0, "12+3=", "15", [1], None, where="d:1")

    def tried(function, **served):
        lines = []
        reward = RewardConfig(f"{REWARDS}:{function}")
        try_rewards(Config(model=ModelConfig(""), reward=reward, served=ServedConfig(**served)), [prompt], lines.append)
        return lines

    assert tried("by_judge", judge=ServedModelConfig("judge")) == []
    for function in ("by_judge", "careless"):
        with pytest.raises(ConfigError, match=r"no model 'judge' is served beside the policy, but none is: see served"):
            tried(function)


def test_only_rewards_ask():
    with pytest.raises(ConfigError, match=r"^ask\(\) is for reward functions; a workflow asks with episode\.served"):
        ask("judge", [{"role": "user", "content": "?"}])

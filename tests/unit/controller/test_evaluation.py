"""Evaluations that lose engines on the way."""

import asyncio

import numpy as np
import pytest

from areal_megatron.config import Config, DataConfig, ModelConfig, RolloutConfig
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.evaluation import Evaluation
from areal_megatron.controller.sampler import Sampler
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.observe.status import EngineState
from areal_megatron.observe.timeline import Timeline
from areal_megatron.workflows import sampling
from areal_megatron.workflows.scoring import Score

PROMPTS = [Prompt(id=number, text="", answer="", tokens=[1], response_tokens=None) for number in range(6)]


class Client:
    """The client of an engine that answers a number of requests and then dies."""

    def __init__(self, name, answers):
        self.name, self.answers = name, answers

    async def generate(self, prompt, *, n, **_):
        await asyncio.sleep(0)
        self.answers -= 1
        if self.answers < 0:
            raise EngineError(f"{self.name} is dead")
        return [Completion(np.ones(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")] * n


class Right:
    async def score(self, prompt, completions):
        return [Score(reward=5.0, correct=True, truncated=False, trained=True) for _ in completions]


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_RETRY_S", 0.0)

    def run(*answers, version=0):
        config = Config(
            name="x",
            updates=3,
            batch_size=4,
            model=ModelConfig(path="x"),
            data=DataConfig(train="x", eval="x"),
            rollout=RolloutConfig(group_size=2, max_running=2),
        )
        timeline = Timeline(tmp_path / "timeline", "controller")
        engines = [Engine(number, Client(f"engine-{number}", count), timeline) for number, count in enumerate(answers)]

        async def is_lost(engine, client, error):
            assert engine.client is client and "is dead" in str(error)
            if not engine.gone:
                engine.leave(EngineState.LOST)
            return True

        sampler = Sampler(
            rollout=config.rollout,
            engines=engines,
            is_lost=is_lost,
            stop_tokens=[0],
            scorer=Right(),
            timeline=timeline,
        )
        return asyncio.run(Evaluation(config, sampler, PROMPTS).run(version)), engines

    return run


def test_what_a_lost_engine_did_not_answer_another_does(evaluate):
    values, engines = evaluate(2, 100)
    assert values == {"accuracy": 1.0, "items": 6, "response_tokens_mean": 2.0}
    assert [engine.losses for engine in engines] == [1, 0]
    assert [engine.running for engine in engines] == [0, 0]


def test_without_an_engine_that_has_the_version_it_is_left_out(evaluate):
    values, engines = evaluate(2, 1)
    assert values is None and [engine.state for engine in engines] == ["lost", "lost"]


def test_a_version_that_no_engine_was_ever_given_is_an_error(evaluate):
    with pytest.raises(EngineError, match="version 1 cannot be evaluated: no engine has committed it"):
        evaluate(9, version=1)

"""Rewards of whole answers, with a real worker and a real tokenizer."""

import asyncio

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_megatron.config import RewardConfig
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.workflows.scoring import Score, Scorer

LONGEST = 10
DIGITS = {"<eos>": 0} | {str(d): d + 1 for d in range(10)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    library = Library(models.WordLevel(DIGITS, unk_token="<eos>"))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<eos>").save_pretrained(folder)
    return folder


def completion(text, finish_reason="stop"):
    tokens = np.array([DIGITS[c] for c in text] + [0] * (finish_reason == "stop"), np.int32)
    zeros = np.zeros(len(tokens))
    return Completion(tokens, zeros.astype(np.float32), zeros.astype(np.int32), finish_reason)


@pytest.fixture(scope="module")
def scores(model):
    """Scores answers by one worker for all tests."""

    def config(rule):
        return RewardConfig(function="tests.support.rewards:ends", truncated=rule, wrong=-0.3, right=0.7)

    def found(rule, completions, response_tokens=None):
        prompt = Prompt(id=0, text="3+4=", answer="7", tokens=[1], response_tokens=response_tokens)
        return loop.run(Scorer(config(rule), workers, max_new_tokens=LONGEST).score(prompt, completions))

    with asyncio.Runner() as loop:
        workers = RewardWorkers(config("incorrect"), model)
        loop.run(workers.start())
        yield found
        loop.run(workers.close())


RIGHT = Score(reward=0.7, correct=True, truncated=False, trained=True, score=1.0)
WRONG = Score(reward=-0.3, correct=False, truncated=False, trained=True)


@pytest.mark.parametrize(
    ("rule", "cut"),
    [
        ("incorrect", Score(reward=-0.3, correct=False, truncated=True, trained=True)),
        ("masked", Score(reward=-0.3, correct=False, truncated=True, trained=False)),
        ("scored", Score(reward=0.7, correct=True, truncated=True, trained=True, score=1.0)),
    ],
)
def test_the_rule_for_truncated_answers(scores, rule, cut):
    answers = [completion("7"), completion("7", "length"), completion("8"), completion("7")]
    assert scores(rule, answers) == [RIGHT, cut, WRONG, RIGHT]


def test_an_answer_of_forced_length_is_not_truncated(scores):
    assert scores("masked", [completion("7", "length")], response_tokens=1) == [RIGHT]
    [forced] = scores("overlong", [completion("7", "length")], response_tokens=1)
    assert forced == RIGHT


@pytest.mark.parametrize("length", [2, 8, 9, 10])
@pytest.mark.parametrize("cut", [False, True])
def test_overlong_answers_lose_up_to_half_the_range_of_rewards(scores, length, cut):
    """DAPO, Equation 13, for rewards of −1 and 1; here they span 1 instead of 2."""
    digits, reason = (length, "length") if cut else (length - 1, "stop")
    found = scores("overlong", [completion("8" * (digits - 1) + last, reason) for last in "78"])
    cache = 2
    lost = 0 if length <= LONGEST - cache else ((LONGEST - cache) - length) / cache
    assert [score.reward for score in found] == pytest.approx([0.7 + 0.5 * lost, -0.3 + 0.5 * lost])
    assert [(s.correct, s.truncated, s.trained) for s in found] == [(True, cut, True), (False, cut, True)]

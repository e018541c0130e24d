"""Terms that a function adds to the rewards of a group, with a real worker and a real tokenizer."""

import asyncio
import os
import re
from pathlib import Path

import numpy as np
import pytest

from areal_megatron.config import ConfigError, RewardConfig
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.process import lateness
from areal_megatron.reward.group import GroupAnswer, checked_terms, load_group_function
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.workflows.scoring import ScoredEpisode, Scorer
from areal_megatron.workflows.transcript import Transcript
from tests.support.chat_world import END, make_tokenizer, spelled

ROOT = Path(__file__).parents[3]
FUNCTIONS = """
import math

def score(prompt, response, answer):
    if response == "fails": raise ConnectionError("status 500")
    return float(response == answer)

def told(prompt, answer, answers):
    # what it is given, as numbers
    assert (prompt, answer) == ("hi?", "right")
    return {
        "characters": [len(a.response) for a in answers],
        "tokens": [a.tokens for a in answers],
        "versions": [sum(a.versions) for a in answers],
        "rest": [100 * a.truncated + 10 * a.score + a.correct + a.reward / 100 for a in answers],
    }

def none(prompt, answer, answers): return {}
def short(prompt, answer, answers): return {"length": [0.0]}
def mistaken(prompt, answer, answers): return {"length": answers + 1}
def nan(prompt, answer, answers): return {"length": [math.nan] * len(answers)}
def listed(prompt, answer, answers): return [1.0] * len(answers)
def named(prompt, answer, answers): return {"a b": [1.0] * len(answers)}
def raises(prompt, answer, answers): raise KeyError("mine")
def alone(prompt): return {}
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "grouped.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lateness, "_FIRST_PAUSE_S", 0.05)


def completion(text, *versions, cut=False):
    tokens = np.array([*spelled(text), *([] if cut else [END])], np.int32)
    versions = np.resize(versions or [0], len(tokens)).astype(np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), versions, "length" if cut else "stop")


def scored(tmp_path, function, completions, answer="right", score="grouped:score"):
    """The scores of a group, without and with the terms; the number of failures."""
    tokenizer = make_tokenizer(tmp_path / "model")
    config = RewardConfig(score, group_function=function, workers=1, truncated="masked", wrong=-1, right=1, retry_s=0)
    prompt = Prompt(id=0, text="hi?", answer=answer, tokens=tokenizer.prompts(["hi?"])[0], response_tokens=None)

    async def run():
        workers = RewardWorkers(config, tmp_path / "model")
        await workers.start()
        try:
            scorer = Scorer(config, workers, max_new_tokens=100)
            scores = await scorer.score(prompt, completions)
            start = Transcript(prompt.tokens, 0)
            pairs = zip(completions, scores, strict=True)
            episodes = [ScoredEpisode((start.with_answer(c, s.truncated),), s) for c, s in pairs]
            after = await scorer.with_terms(prompt, episodes)
            return scores, [episode.score for episode in after], workers.failures
        finally:
            await workers.close()

    return asyncio.run(asyncio.wait_for(run(), 300))


@pytest.mark.usefixtures("functions")
def test_what_a_function_is_given_and_what_becomes_of_its_terms(tmp_path):
    """Answers without a reward are not shown to it."""
    group = [completion("right", 3), completion("fails"), completion("ab", 5, 4), completion("right so", cut=True)]
    before, after, failures = scored(tmp_path, "grouped:told", group)
    assert [one.reward for one in before] == [1, -1, -1, -1] and failures == 1
    assert [one.terms for one in after] == [
        {"characters": 5, "tokens": 6, "versions": 3, "rest": 10 + 1 + 0.01},
        {},
        {"characters": 2, "tokens": 3, "versions": 9, "rest": -0.01},
        {"characters": 8, "tokens": 8, "versions": 0, "rest": 100 - 0.01},
    ]
    assert [one.reward for one in after] == [
        old.reward + sum(new.terms.values()) for old, new in zip(before, after, strict=True)
    ]
    assert [(one.correct, one.failed, one.trained) for one in after] == [
        (True, False, True),
        (False, True, False),
        (False, False, True),
        (False, False, False),
    ]


@pytest.mark.usefixtures("functions")
def test_without_terms_nothing_changes(tmp_path):
    before, after, _ = scored(tmp_path, "grouped:none", [completion("right"), completion("ab")])
    assert before == after
    before, after, _ = scored(tmp_path, "", [completion("right"), completion("ab")])
    assert before == after


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("short", "returned 1 values of length for 2 answers"),
        ("nan", "returned nan as a value of length, expected a finite number of at most 1,000,000"),
        ("listed", "returned [1.0, 1.0], expected up to 32 terms: {name: [a number for each answer]}"),
        ("named", "returned a term 'a b', expected a name of letters, digits and _"),
        ("raises", "KeyError: 'mine'"),
    ],
)
def test_a_function_that_fails_leaves_its_group_without_rewards(tmp_path, function, problem):
    _, after, failures = scored(tmp_path, f"grouped:{function}", [completion("right"), completion("ab")])
    assert all(one.failed and not one.trained and not one.correct and problem in one.failure for one in after)
    assert failures == 2


@pytest.mark.usefixtures("functions")
def test_a_mistake_in_a_function_ends_the_run(tmp_path):
    mistake = r"^reward\.group_function: grouped:mistaken has a mistake in .*grouped.py:\d+: .*TypeError: "
    with pytest.raises(ConfigError, match=mistake):
        scored(tmp_path, "grouped:mistaken", [completion("right"), completion("ab")])


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("grouped:missing", "grouped has no function missing"),
        ("nowhere:f", "cannot import nowhere"),
        ("told", "'told' is no import path, expected package.module:function"),
        ("grouped:alone", "grouped:alone cannot be called with (prompt, answer, answers): too many positional"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_start(tmp_path, function, problem):
    with pytest.raises(ConfigError, match=r"^reward\.group_function: ") as error:
        load_group_function(function)
    assert problem in str(error.value)
    with pytest.raises(ConfigError, match=r"^reward\.group_function: ") as error:
        scored(tmp_path, function, [completion("right")])
    assert problem in str(error.value)


def test_numbers_of_numpy_are_terms():
    assert checked_terms({"a": np.array([1, 2], np.float32)}, 2) == {"a": [1.0, 2.0]}


def test_the_example_of_the_docs():
    """The shortest right answer gains 0.5, the longest loses 0.5; a wrong one never gains."""
    text = (ROOT / "docs" / "rewards.md").read_text()
    names = {}
    exec(re.search(r"```python\n(# lengths\.py.*?)```", text, re.DOTALL)[1], names)

    def terms(*answers):
        group = [
            GroupAnswer(tokens=tokens, truncated=False, score=float(right), correct=right, reward=0.0)
            for tokens, right in answers
        ]
        return names["relative_length"]("", "", group)

    assert terms((100, True), (300, True), (200, False), (100, False), (150, True)) == {
        "length": [0.5, -0.5, 0.0, 0.0, 0.25]
    }
    assert terms((7, True), (7, False)) == {"length": [0.0, 0.0]}

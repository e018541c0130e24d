"""Reward functions of the user are called before a run, by real workers, and may ask for their row."""

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RewardConfig
from areal_megatron.data.prompts import Prompt, read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import Completion
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.reward.function import load_function
from areal_megatron.reward.trial import try_rewards
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.workflows.scoring import Scorer
from tests.support.chat_world import make_tokenizer

FUNCTIONS = """
import os, re, sys, time
from areal_megatron.reward.no_score import AnswerRefused, ServiceAway
def four(p, r, a, other): return 1.0
def two(p, r: str): return 1.0
def batch(prompts, completions, **others): return [1.0]
async def waits(p, r, a): return 1.0
def by_name(p, r, a, *, row): return float(row["level"])
def fourth(p, r, a, row=None): return float(row["level"])
def text(p, r, a): return "1"
def forgets(p, r, a):
    if r == a: return 1.0
def matches(p, r, a): return float(re.match(a, r).group())
def hangs(p, r, a): time.sleep(60)
def exits(p, r, a): os._exit(3)
def leaves(p, r, a): sys.exit(3)
def asks(p, r, a): return float(input() == a)
def away(p, r, a): raise ServiceAway("not yet")
def refuses(p, r, a): raise AnswerRefused("no")
def strict(p, r, a): return {"2": 1.0}[r]
def always(p, r, a): return 1 / 0
def unreached(p, r, a):
    try: open("/nowhere/at/all")
    except OSError: raise ValueError("no service") from None
def swapped(r, p, a): return float(r == a)
def nearly(p, r, a): return 0.99 * (r == a)
def few(p, a, answers): return {"x": [1.0]}
def terms(p, a, answers): return {"x": [one.score for one in answers]}
"""
PROMPT = Prompt(id=0, text="1+1=", answer="2", tokens=[1], response_tokens=None, where="d:1", row={"level": 3})


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    (tmp_path / "tried.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)


def tried(config: RewardConfig, model: str = "") -> list[str]:
    """What try_rewards says of a run with this reward."""
    said = []
    try_rewards(Config(model=ModelConfig(path=model), reward=config), [PROMPT], said.append)
    return said


def line_of(name: str) -> int:
    """The line on which a function fails, or returns what is wrong."""
    lines = FUNCTIONS.splitlines()
    begin = next(k for k, text in enumerate(lines, 1) if f"def {name}(" in text)
    return begin + 2 if name == "unreached" else begin


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("four", r"must take \(prompt, .* columns; it takes \(p, r, a, other\)$"),
        ("two", r"it takes \(p, r\)$"),
        ("batch", r"it takes \(prompts, completions, \*\*others\)$"),
        ("waits", "is `async def`"),
    ],
)
def test_what_cannot_be_called_is_refused_as_it_is_loaded(name, words):
    with pytest.raises(ConfigError, match=f"^reward.function: tried:{name} .*{words}"):
        load_function(f"tried:{name}")
    for good in ("by_name", "fourth", "text"):
        load_function(f"tried:{good}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text", "cannot score '2' as a response to d:1: the reward function returned '1', expected a finite number"),
        ("forgets", "cannot score 'I do not know.' as a response to d:1: the reward function returned None"),
        ("matches", "'I do not know.' as a response to d:1: AttributeError: 'NoneType' object has no attribute"),
        ("always", "'2' as a response to d:1: ZeroDivisionError: division by zero ("),
        ("asks", "'2' as a response to d:1: EOFError: "),
        ("leaves", "as a response to d:1: SystemExit: 3 ("),
        ("hangs", "tried:hangs took longer than reward.timeout_s=1 s"),
        ("exits", "tried:exits ended its worker process with code 3"),
    ],
)
def test_mistakes_of_a_function_are_told_with_their_line_before_a_run(name, words):
    with pytest.raises(ConfigError, match=r"^reward\.function: tried:") as refused:
        tried(RewardConfig(function=f"tried:{name}", timeout_s=1 if name == "hangs" else 10))
    message = str(refused.value)
    assert words in message and message.endswith("return a number for any text, within reward.timeout_s")
    assert name in ("hangs", "exits") or f"tried.py:{line_of(name)})" in message, message


def test_what_may_be_right_is_not_refused():
    """Services may come later, and a refused answer is none of the function's mistakes."""
    for name in ("by_name", "away", "refuses"):
        assert tried(RewardConfig(function=f"tried:{name}")) == []
    for name, response, problem in (
        ("strict", "'I do not know.'", "KeyError: 'I do not know.'"),
        ("unreached", "'2'", "ValueError: no service"),
    ):
        (line,) = tried(RewardConfig(function=f"tried:{name}"))
        begin = f"warning: reward.function: tried:{name} cannot score {response} as a response to d:1: {problem} ("
        assert line.startswith(begin) and f"tried.py:{line_of(name)}); such answers are tried again" in line, line
    assert tried(RewardConfig(function="http://127.0.0.1:9/")) == tried(RewardConfig()) == []


def test_a_right_answer_that_no_accuracy_would_count_is_told():
    (line,) = tried(RewardConfig(function="tried:nearly"))
    assert line == (
        "warning: reward.function: tried:nearly scores '2', the right answer to d:1, with 0.99: accuracy counts scores "
        "of 1 or more"
    )
    (line,) = tried(RewardConfig(function="tried:swapped"))
    assert line == (
        "warning: reward.function: tried:swapped scores '2', the right answer to d:1, with 0: are its arguments "
        "(prompt, response, answer)? If it wants more than the bare answer, all is well"
    )


def test_a_number_that_no_worker_can_be_sent_is_one_line():
    prompt = replace(PROMPT, row={"level": 10**30})
    with pytest.raises(ConfigError, match=r"^reward\.function: d:1: cannot be sent to a reward worker: "):
        try_rewards(Config(model=ModelConfig(path=""), reward=RewardConfig(function="tried:fourth")), [prompt], print)


def test_a_group_function_gets_two_answers(tmp_path):
    make_tokenizer(tmp_path / "model")
    assert tried(RewardConfig(group_function="tried:terms"), str(tmp_path / "model")) == []
    with pytest.raises(ConfigError, match=r"reward\.group_function: tried:few .* returned 1 values of x for 2 answers"):
        tried(RewardConfig(group_function="tried:few"), str(tmp_path / "model"))


def test_a_fourth_argument_is_the_whole_row(tmp_path):
    make_tokenizer(tmp_path / "model")
    (tmp_path / "d.jsonl").write_text('{"prompt": "hi?", "answer": {"a": 1}, "level": 7}\n')
    config = Config(data=DataConfig(train=str(tmp_path / "d.jsonl")), reward=RewardConfig("tried:fourth", workers=1))
    (prompt,) = read_prompts(config, "train", Tokenizer(tmp_path / "model"))
    answer = Completion(np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    async def run():
        workers = RewardWorkers(config.reward, tmp_path / "model")
        await workers.start()
        try:
            scorer = Scorer(config.reward, workers, 10)
            return (await scorer.score(prompt, [answer]))[0].score, (await scorer.judge(prompt, "x")).score
        finally:
            await workers.close()

    assert asyncio.run(run()) == (7.0, 7.0)
    others = replace(config, reward=RewardConfig())
    assert read_prompts(others, "train", Tokenizer(tmp_path / "model"))[0].row is None  # millions of rows are large


@pytest.mark.parametrize("answer", ['{"a": 1}', '[{"a": 1}, {"a": 2}]', "{}"])
def test_an_object_is_no_answer_for_math(answer):
    assert "it is an object" in problem_with_answers("math")(answer)
    assert problem_with_answers("tried:text")(answer) == ""


@pytest.mark.parametrize("answer", ["{1, 2}", "[1, 2]", '["1", "2"]', "{x : x > 1}", "[[1, 2], [3, 4]]"])
def test_sets_intervals_and_matrices_are_answers_for_math(answer):
    assert problem_with_answers("math")(answer) == ""

"""Data that a run would be wrong to begin with, or right to warn about."""

import json

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RewardConfig
from areal_megatron.data.check import check_data
from areal_megatron.reward.answers import problem_with_answers

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


@pytest.fixture
def check(world, tmp_path):
    """Checks rows as training and evaluation data; returns what is said."""

    def checked(train, held_out, function="math", **data):
        for name, rows in (("train", train), ("eval", held_out)):
            rows = [row if isinstance(row, dict) else {"prompt": row, "answer": "1"} for row in rows]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(train=str(tmp_path / "train.jsonl"), eval=str(tmp_path / "eval.jsonl"), **data)
        config = Config(
            name="x",
            updates=1,
            model=ModelConfig(path=str(world / "model")),
            data=data,
            reward=RewardConfig(function=function),
        )
        said = []
        check_data(config, said.append, problem_with_answers)
        return said

    return checked


def test_data_without_an_overlap_is_not_remarked_upon(check):
    assert check(["1+1=", "1+2="], ["2+1=", "2+2="]) == []


def test_an_evaluation_of_trained_prompts_is_refused_unless_it_is_wanted(check, tmp_path):
    trained, asked = ["1+1=", "2+1=", "3+1="], ["4+1=", " 3+1= ", "2+1="]
    problem = (
        f"2 of 3 prompts are in data.train too, such as {tmp_path}/eval.jsonl:2, which is {tmp_path}/train.jsonl:3"
    )
    with pytest.raises(ConfigError) as error:
        check(trained, asked)
    assert str(error.value).startswith(f"data.eval: {problem}: ") and "data.allow_overlap=true" in str(error.value)
    assert "\n" not in str(error.value)
    assert check(trained, asked, allow_overlap=True) == [f"warning: data.eval: {problem}"]


def test_long_phrases_in_common_are_counted(check, tmp_path):
    *letters, phrases = check(["1", f"2 {LONG}"], ["3", f"{LONG}?", "4"])
    assert phrases == (
        "warning: data.eval: 1 of 3 prompts has 13 words in a row in common with a row of data.train, such as "
        f"{tmp_path}/eval.jsonl:2 with {tmp_path}/train.jsonl:2"
    )
    assert ["characters that the tokenizer does not know" in line for line in letters] == [True, True]


def test_prompts_that_no_evaluation_asks_are_counted(check, tmp_path):
    assert check(["1+1="], ["2+2=", "20+20=", "30+30="], max_prompt_tokens=5) == [
        "warning: data.eval: 2 of 3 prompts are longer than data.max_prompt_tokens=5 and no part of any evaluation, "
        f"such as {tmp_path}/eval.jsonl:2"
    ]


@pytest.mark.parametrize(
    ("function", "answer", "problem"),
    [
        ("math", " ", "it is empty"),
        ("my.module:score", "\n", "it is empty"),
        ("choice", "gold", "expected the capital letter of a choice"),
        ("code", "42", "the answer holds no tests: expected an object"),
        ("code", {"inputs": ["1"], "outputs": []}, "inputs and outputs must be lists of one length"),
    ],
)
def test_an_answer_that_its_grader_cannot_use_is_named(check, tmp_path, function, answer, problem):
    good = {"choice": "C", "code": {"inputs": ["1"], "outputs": ["2"]}}.get(function, "7")
    rows = [{"prompt": "1+1=", "answer": good}, {"prompt": "2+2=", "answer": answer}]
    check(rows[:1], [{"prompt": "3", "answer": good}], function)
    for train, held_out, name in ((rows, rows[:1], "train"), ([{"prompt": "3", "answer": good}], rows, "eval")):
        with pytest.raises(ConfigError) as error:
            check(train, held_out, function)
        assert str(error.value).startswith(
            f"{tmp_path}/{name}.jsonl:2: reward.function={function} cannot use the answer: "
        )
        assert problem in str(error.value) and "\n" not in str(error.value)

"""Rows that can hardly teach anything are named at the launch, and by `areal rows`."""

import json
import shutil

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RewardConfig
from areal_megatron.data.check import check_data
from areal_megatron.data.doubts import says_nothing
from areal_megatron.programs import rows
from tests.conftest import ROOT

SIX = {"prompt": [{"role": "user", "content": "What is 6 times 7?"}], "reward_model": {"ground_truth": "42"}}


@pytest.fixture
def said(world, tmp_path):
    """Returns what the launcher says of rows. `knows`: the tokenizer names no token for what it does not know."""

    def said(found, mode="rl", function="math", knows=True):
        path, model = tmp_path / "d.jsonl", tmp_path / "model"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        shutil.copytree(world / "model", model, dirs_exist_ok=True)
        (model / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
        if knows:
            named = json.loads((model / "tokenizer_config.json").read_text()) | {"unk_token": None}
            (model / "tokenizer_config.json").write_text(json.dumps(named))
        settings = {"model": ModelConfig(path=str(model)), "reward": RewardConfig(function=function)}
        lines = []
        check_data(Config(name="x", updates=1, mode=mode, data=DataConfig(train=str(path)), **settings), lines.append)
        return [line.replace(str(path), "d") for line in lines]

    return said


def test_repeated_prompts_are_counted(said):
    assert said([SIX] * 8) == [
        "warning: data.train: 7 of 8 rows have the prompt and answer of an earlier row: d:2, which is d:1 again; …"
    ]
    again = SIX | {"prompt": " What is  6 times 7?\n", "reward_model": {"ground_truth": "42.0"}}
    assert said([SIX, {"prompt": "1", "answer": "1"}, again]) == [
        "warning: data.train: 1 of 3 rows has the prompt and answer of an earlier row: d:3, which is d:1 again"
    ]


def test_a_prompt_with_two_answers_is_named(said):
    [line] = said([SIX, SIX | {"reward_model": {"ground_truth": "43"}}])
    assert line == (
        "warning: data.train: 1 of 2 rows has the prompt of another row, and another answer, so that what is right for "
        "one is wrong for the other: d:2 ('43') and d:1 ('42')"
    )


def test_answers_that_say_nothing_are_named(said):
    rows = [{"prompt": f"{n}?", "answer": answer} for n, answer in enumerate(["N/A", "None", "5", "-", "nan"])]
    assert said(rows) == ["warning: data.train: 4 of 5 rows have no answer: 'N/A' of d:1; 'None' of d:2; '-' of d:4; …"]
    assert said(rows, function="tests.support.rewards:broken") == []
    assert all(map(says_nothing, ["proof", "Proof.", "notfound", "\\text{See the proof.}"]))  # of NuminaMath
    with pytest.raises(ConfigError, match=r"data.train: no row has an answer that says anything, such as 'N/A'"):
        said(rows[:2])
    assert said([{"prompt": "?", "answer": "1"}])[0].endswith("1 of 1 rows has a prompt that asks nothing: '?' of d:1")


@pytest.mark.parametrize("text", ["", " ", "N/A", "n/a.", "NULL", "nan", "--", "?", "[]", "\\boxed{}", "$None$"])
def test_what_says_nothing(text):
    assert says_nothing(text)


@pytest.mark.parametrize("text", ["0", "x", "-1", "∅", "\\infty", "π", "<", "undefined", "None of these"])
def test_what_says_something(text):
    assert not says_nothing(text)


def test_supervised_rows_that_are_there_twice_or_contradict_others(said):
    row = {"prompt": "1", "response": "2"}
    assert said([row, row | {"response": "3"}, row], mode="sft") == [
        "warning: data.train: 1 of 3 rows has the prompt and answers of an earlier row: d:3, which is d:1 again"
    ]
    pair = {"prompt": "1", "chosen": "2", "rejected": "3"}
    assert said([pair, pair | {"chosen": "3", "rejected": "2"}, pair], mode="dpo") == [
        "warning: data.train: 1 of 3 rows has the prompt and answers of an earlier row: d:3, which is d:1 again",
        "warning: data.train: 1 of 3 rows has the two answers of another row the other way round, so that they teach "
        "nothing together: d:2 and d:1",
    ]


def test_characters_that_the_tokenizer_does_not_know_are_named(said):
    what = "characters that the tokenizer does not know, which are all the same to the model"
    answers = [{"prompt": "7-2=", "answer": "5"}, {"prompt": "7+2=", "answer": "9"}]
    assert said(answers, knows=False) == [f"warning: data.train: 1 of 2 rows has {what}: '7-2=' of d:1"]
    responses = [{"prompt": "7+2=", "response": "9"}, {"prompt": "2", "response": "two"}]
    assert said(responses, mode="sft", knows=False) == [f"warning: data.train: 1 of 2 rows has {what}: d:2"]


def test_an_answer_that_is_no_number_by_its_name_is_compared_as_a_text(said):
    rows = [{"prompt": "6*7=", "answer": answer} for answer in ("sNaN", "42", "snan")]
    [line, *_] = said(rows)
    assert "has the prompt and answer of an earlier row: d:3, which is d:1 again" in line


def test_rows_shows_them_too(said, tmp_path, capsys):
    said([SIX, SIX])
    keys = ["name=x", f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'd.jsonl'}", "data.eval="]
    assert rows.main([str(ROOT / "configs/tiny_cpu.yaml"), *keys]) == 0
    assert "data.train: 1 of 2 rows has the prompt and answer of an earlier row" in capsys.readouterr().out

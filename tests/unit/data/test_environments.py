"""Prompts of several environments: how they are read, drawn and checked."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, EnvironmentConfig, ModelConfig
from areal_megatron.data.check import check_data
from areal_megatron.data.files import file_names
from areal_megatron.data.prompts import cursor, read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.programs.audit import rows_of
from areal_megatron.reward.answers import problem_with_answers


@pytest.fixture
def config(world, tmp_path):
    """Three files of sums, 30 of `short` in two files and 20 of `long`, and three held-out prompts."""
    rows = iter([f"{a}+{b}=" for a in range(10, 20) for b in range(10, 20)])
    for name, count in (("a", 20), ("b", 10), ("c", 20), ("held", 2), ("other", 1)):
        lines = [json.dumps({"prompt": next(rows), "answer": "A" if name in "c" else "1"}) for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    at = {name: str(tmp_path / f"{name}.jsonl") for name in ("a", "b", "c", "held", "other")}
    short = EnvironmentConfig(name="short", train=f"{at['a']},{at['b']}", eval=f"{at['held']},{at['other']}", share=3)
    long = EnvironmentConfig(name="long", train=at["c"], share=1, reward="choice", max_prompt_tokens=10)
    return Config(
        name="x",
        updates=1,
        model=ModelConfig(path=str(world / "model")),
        data=DataConfig(train="", max_prompt_tokens=12),
        environments=[short, long],
    )


def test_rows_and_files_are_counted_through_all_environments(config):
    prompts = read_prompts(config, "train", Tokenizer(config.model.path))
    assert [prompt.id for prompt in prompts] == [*range(50)]
    assert [prompt.environment for prompt in prompts] == [0] * 30 + [1] * 20
    assert [prompt.source for prompt in prompts] == [0] * 20 + [1] * 10 + [2] * 20
    assert file_names(config, "eval") == ["short/held", "short/other"]
    config.environments[1].eval = config.environments[1].train
    assert file_names(config, "eval") == ["short/held", "short/other", "long"]
    held_out = read_prompts(config, "eval", Tokenizer(config.model.path))
    assert Counter(prompt.source for prompt in held_out) == {0: 2, 1: 1, 2: 20}


def test_an_epoch_has_each_environments_share(config):
    prompts = read_prompts(config, "train", Tokenizer(config.model.path))
    drawn = cursor(config, prompts)
    first = [row for epoch, row in (drawn.next() for _ in range(41)) if epoch == 0]
    assert Counter(prompts[row].environment for row in first) == {0: 30, 1: 10}
    audited = cursor(config, rows_of(config))
    again = cursor(config, prompts)
    assert [audited.next() for _ in range(100)] == [again.next() for _ in range(100)]
    config.environments = [replace(environment, share=0) for environment in config.environments]
    assert cursor(config, prompts).shares == []


def test_each_environment_has_its_own_limit_and_reward(config, tmp_path):
    check_data(config, problems_of=problem_with_answers)
    config.environments[1].reward = "code"
    with pytest.raises(ConfigError, match=r"c\.jsonl:1: reward\.function=code cannot use the answer"):
        check_data(config, problems_of=problem_with_answers)
    config.environments[1].max_prompt_tokens = 2
    with pytest.raises(ConfigError, match=r"c\.jsonl: the shortest prompt has 6 tokens, data\.max_prompt_tokens is 2"):
        check_data(config)


def test_a_prompt_of_two_environments_is_refused(config, tmp_path):
    (tmp_path / "c.jsonl").open("a").write((tmp_path / "a.jsonl").read_text().splitlines()[4] + "\n")
    with pytest.raises(ConfigError) as error:
        check_data(config)
    where = f"{tmp_path}/c.jsonl:21 is the same prompt as {tmp_path}/a.jsonl:5"
    assert str(error.value).startswith(f"environments.1.train: {where} of environments.0: ")


def test_weights_of_files_are_no_shares_of_environments(config):
    config.environments[1].train += ":0.5"
    with pytest.raises(ConfigError, match=r"environments\.1\.train: an environment has one weight, its `share`"):
        check_data(config)


def test_rows_that_are_left_out_are_not_drawn_and_the_audit_knows(config, tmp_path):
    lines = (tmp_path / "c.jsonl").read_text().replace('"A"', '"1"', 3)
    (tmp_path / "c.jsonl").write_text(lines)
    config.data.unusable_rows = "skip"
    prompts = read_prompts(config, "train", Tokenizer(config.model.path), problem_with_answers)
    assert [prompt.id for prompt in prompts] == [*range(30), *range(33, 50)]
    audited = cursor(config, rows_of(config))
    again = cursor(config, prompts)
    assert [row.id for row in rows_of(config)] == [prompt.id for prompt in prompts]
    assert [audited.next() for _ in range(100)] == [again.next() for _ in range(100)]

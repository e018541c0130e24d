"""Checks of the data of a run before anything starts: every row of it, and whether what is evaluated is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.contamination import PHRASE, Overlap, compare
from areal_megatron.data.doubts import doubts, doubts_about_items, messages_left_out
from areal_megatron.data.drawing import Member
from areal_megatron.data.examples import Example
from areal_megatron.data.files import sources
from areal_megatron.data.pairs import Pair
from areal_megatron.data.prompts import (
    LeftOut,
    ProblemsOf,
    Prompt,
    cursor,
    is_easiest_first,
    no_problems,
    read_prompts,
)
from areal_megatron.data.supervised import read_items
from areal_megatron.data.tokenizer import Tokenizer

_REASONS = 5
"""The most reasons for leaving rows out that are said."""


def check_data(
    config: Config,
    say: Callable[[str], None] = lambda line: None,
    problems_of: ProblemsOf = no_problems,
) -> Sequence[Member]:
    """Reads every file of `config.data`, or of the environments, once, and returns what `data.train` holds. Raises
    ConfigError for the first problem that would stop a run.

    `say` is told, in a line each, of what does not stop a run, and of the progress. `problems_of`: see
    ProblemsOf.
    """
    tokenizer = Tokenizer(config.model.path, untried=True)
    for line in tokenizer.check():
        say(f"warning: model.path: {line}")
    if config.is_supervised:
        return _check_supervised(config, tokenizer, say)
    penalty = config.ppo.penalty
    if penalty.kl_folder:
        tokenizer.check_same(penalty.kl_folder, "ppo.penalty.kl_model")
    for name in config.teachers:
        tokenizer.check_same(config.served_models[name].path, f"served.{name}.path")
    _check_weights(config)
    train = _read(config, "train", tokenizer, problems_of, say)
    _check_served(config, train)
    _check_teachers(config, train)
    cursor(config, train)
    _check_pass_rates(config, train)
    _check_environments(config, train)
    held_out = _read(config, "eval", tokenizer, problems_of, say)
    limits = [own.data.max_prompt_tokens for own in config.by_environment()]
    if too_long := [prompt for prompt in held_out if len(prompt.tokens) > limits[prompt.environment]]:
        say(
            f"warning: data.eval: {_number(too_long, held_out)} longer than "
            f"data.max_prompt_tokens={limits[too_long[0].environment]} and no part of any evaluation, such as "
            f"{too_long[0].where}"
        )
    if held_out:
        _check_overlap(config, compare(train, held_out, say), held_out, say)
    return train


def _check_served(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError if the tokenizer of a served model cannot be used, or if a reward model cannot read a prompt
    that it is to score answers to."""
    readers = {}
    for name, model in config.served_models.items():
        try:
            readers[name] = Tokenizer(model.path, untried=True)
            readers[name].check()
        except ConfigError as e:
            raise ConfigError(str(e).replace("model.path", f"served.{name}.path", 1)) from None
    for number, own in enumerate(config.by_environment()):
        if own.reward.of_model:
            asked = [prompt for prompt in prompts if prompt.environment == number]
            readers["reward"].prompts([prompt.text for prompt in asked], [prompt.where for prompt in asked])


def _check_teachers(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError for a teacher whom nobody would ask: no row names it, and no workflow of the user could."""
    if any(own.reads_rows for own in config.by_environment()):
        return
    for name in {*config.teachers} - {prompt.teacher for prompt in prompts}:
        raise ConfigError(
            f"served.{name}.path: no row would be taught by it: name it in a column `teacher` of rows, or in "
            "environments.N.teacher"
        )


def _check_weights(config: Config) -> None:
    for number, own in enumerate(config.by_environment()):
        if any(source.weight is not None for source in sources(own.data.eval)) if own.data.eval else False:
            raise ConfigError("data.eval: an evaluation asks every prompt; leave the weights out")
        if config.environments and any(source.weight is not None for source in sources(own.data.train)):
            raise ConfigError(
                f"environments.{number}.train: an environment has one weight, its `share`; leave those of files out"
            )


def _check_environments(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError if a prompt is in two environments, which would be one too many."""
    first: dict[str, Prompt] = {}
    for prompt in prompts if config.environments else ():
        there = first.setdefault(prompt.text, prompt)
        if there.environment != prompt.environment:
            raise ConfigError(
                f"environments.{prompt.environment}.train: {prompt.where} is the same prompt as {there.where} of "
                f"environments.{there.environment}: a prompt has one environment, take it out of the other"
            )


def _read(
    config: Config, key: str, tokenizer: Tokenizer, problems_of: ProblemsOf, say: Callable[[str], None]
) -> list[Prompt]:
    left_out = LeftOut.none()
    prompts = read_prompts(config, key, tokenizer, problems_of, left_out)
    _say_left_out(key, left_out, len(prompts), say)
    _check_rewards(config, prompts, key)
    for line in doubts(config, key, prompts, tokenizer.unknown_token):
        say(f"warning: {line}")
    return prompts


def _say_left_out(key: str, left_out: LeftOut, used: int, say: Callable[[str], None]) -> None:
    if rows := left_out.counts.total():
        reasons = "; ".join(left_out.lines()[:_REASONS])
        say(f"warning: data.{key}: {rows} of {rows + used} rows cannot be used and are left out: {reasons}")


def _check_supervised(config: Config, tokenizer: Tokenizer, say: Callable[[str], None]) -> Sequence[Member]:
    _check_weights(config)
    train = _read_items(config, "train", tokenizer, say)
    cursor(config, train)
    if config.mode == "reward_model":
        _ = tokenizer.pad_token  # which its export names
    for line in doubts_about_items("train", train, tokenizer.unknown_token):
        say(f"warning: {line}")
    if config.data.eval:
        held_out = _read_items(config, "eval", tokenizer, say)
        _check_overlap(config, compare(train, held_out, say), held_out, say)
    return train


def _read_items(
    config: Config, key: str, tokenizer: Tokenizer, say: Callable[[str], None]
) -> list[Example] | list[Pair]:
    left_out = LeftOut.none()
    items = read_items(config, key, tokenizer, left_out)
    _say_left_out(key, left_out, len(items), say)
    for line in messages_left_out(key, items, config.sft.max_tokens):
        say(f"warning: {line}")
    return items


def _check_overlap(config: Config, overlap: Overlap, held_out: Sequence[Any], say: Callable[[str], None]) -> None:
    if overlap.equal:
        asked, trained = overlap.equal[0]
        problem = (
            f"data.eval: {_number(overlap.equal, held_out)} in data.train too, such as {asked.where}, which is "
            f"{trained.where}"
        )
        if not config.data.allow_overlap:
            raise ConfigError(
                f"{problem}: take them out of one of the two, or evaluate what is trained with data.allow_overlap=true"
            )
        say(f"warning: {problem}")
    if overlap.similar:
        asked, trained = overlap.similar[0]
        say(
            f"warning: data.eval: {_number(overlap.similar, held_out, 'have', 'has')} {PHRASE} words in a row in "
            f"common with a row of data.train, such as {asked.where} with {trained.where}"
        )


def _number(some: Sequence, prompts: Sequence[Any], several: str = "are", one: str = "is") -> str:
    return f"{len(some)} of {len(prompts)} prompts {several if len(some) > 1 else one}"


def _check_pass_rates(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError if rollout.draw_min_pass_rate and draw_max_pass_rate exclude every prompt, or
    rollout.easiest_first has nothing to order by."""
    rollout = config.rollout
    if is_easiest_first(config) and all(prompt.pass_rate is None for prompt in prompts):
        raise ConfigError(
            f"rollout.easiest_first: no row of {config.data.train} has a pass_rate to order by; "
            "areal evaluate --pass-rates writes them"
        )
    limits = [own.data.max_prompt_tokens for own in config.by_environment()]
    fitting = [prompt.pass_rate for prompt in prompts if len(prompt.tokens) <= limits[prompt.environment]]
    low, high = rollout.draw_min_pass_rate, rollout.draw_max_pass_rate
    if not any(rate is None or low <= rate <= high for rate in fitting):
        raise ConfigError(
            f"rollout.draw_min_pass_rate: every prompt of {config.data.train} has a pass_rate outside of {low:g} to "
            f"rollout.draw_max_pass_rate={high:g}"
        )


def _check_rewards(config: Config, prompts: Sequence[Prompt], key: str) -> None:
    """Raises ConfigError if a row's format is made for a built-in reward other than the configured one. A
    served model takes any."""
    rewards = [own.reward for own in config.by_environment()]
    for prompt in prompts:
        reward = rewards[prompt.environment]
        function = reward.function
        if reward.of_served:
            continue
        if ":" not in function and prompt.reward not in ("", function):
            raise ConfigError(
                f"reward.function: {function}, but row {prompt.id + 1} of data.{key} is of a format that is scored "
                f"by reward.function={prompt.reward}"
            )

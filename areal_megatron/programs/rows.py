"""Shows the first rows of a run's data as the run sees them: `areal rows CONFIG [key=value …] [--eval]`.

Of each row: the prompt after the model's chat template, the right answer, and the reward that a response with the right
answer gets. In supervised runs: the samples or the two answers that are made of it, with what is trained in colour, or
below a line of its own where there are no colours. Then how many rows are left out, or would keep the run from
starting, and why; and which can hardly teach anything. A reward function of the user is called as a launch calls it. Of
a model on the hub only the description and the tokenizer are fetched. Exit code 0: done, 2: wrong input. Imports
neither torch nor vllm.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from rich.text import Text

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.data.doubts import doubts, doubts_about_items, messages_left_out
from areal_megatron.data.examples import Example, Sample
from areal_megatron.data.pairs import Pair
from areal_megatron.data.prompts import LeftOut, Prompt, read_prompts
from areal_megatron.data.supervised import read_items
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.process.errors import first_line
from areal_megatron.process.shown import guard
from areal_megatron.process.terminal import Terminal
from areal_megatron.programs.fetch import fetch_all
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.reward.function import RewardFunction, load_function, scored, takes_row
from areal_megatron.reward.math import right_answers
from areal_megatron.reward.trial import try_rewards
from areal_megatron.run.arguments import Parser, count

_LONGEST = 2000
"""Characters of a text that are shown."""
_TRAINED = "bold green"


def shown(config: Config, key: str, count: int, colours: bool = False) -> Iterator[str | Text]:
    """Yields the text of the first `count` rows of data.train or data.eval (`key`), then what is left out. Raises
    ConfigError."""
    tokenizer, left_out = Tokenizer(config.model.path, untried=True), LeftOut.none()
    refuses, config.data.unusable_rows = config.data.unusable_rows == "refuse", "skip"
    if config.is_supervised:
        yield from _supervised(config, key, count, tokenizer, left_out, refuses, colours)
        return
    prompts = read_prompts(config, key, tokenizer, problem_with_answers, left_out)
    functions = [own.reward for own in config.by_environment()]
    loaded = [load_function(own.function, own.timeout_s) for own in functions] if prompts else []
    try_rewards(config, prompts, lambda line: print(line, file=sys.stderr))
    for prompt in prompts[:count]:
        yield _titled(f"{prompt.where}: {len(prompt.tokens)} tokens")
        name = functions[prompt.environment].function
        yield f"{_text(tokenizer, prompt.tokens)}\n--- answer\n{_cut(prompt.answer)}\n--- " + _reward(
            name, loaded[prompt.environment], prompt
        )
    limits = [own.data.max_prompt_tokens for own in config.by_environment()]
    long = sum(len(prompt.tokens) > limits[prompt.environment] for prompt in prompts)
    found = len(prompts) + left_out.counts.total()
    yield _titled(
        f"{len(prompts)} of {found} rows can be used; {long} of them are longer than data.max_prompt_tokens and skipped"
    )
    yield from _left_out(left_out, refuses)
    yield from doubts(config, key, prompts, tokenizer.unknown_token)


def _left_out(left_out: LeftOut, refuses: bool) -> Iterator[str]:
    unusable, too_long = left_out.apart()
    refused = "keep the run from starting (data.unusable_rows=skip leaves them out)"
    for some, happens in ((unusable, refused if refuses else "are left out"), (too_long, "are left out")):
        if some.counts:
            yield "\n".join([f"{some.counts.total()} rows {happens}:", *some.lines()])


def _supervised(
    config: Config, key: str, count: int, tokenizer: Tokenizer, left_out: LeftOut, refuses: bool, colours: bool
) -> Iterator[str | Text]:
    items = read_items(config, key, tokenizer, left_out)
    for item in items[:count]:
        samples = item.samples if isinstance(item, Example) else [*_answers(item).values()]
        names = [*_answers(item)] if isinstance(item, Pair) else [f"sample {n}" for n, _ in enumerate(samples, 1)]
        for name, sample in zip(names, samples, strict=True):
            trained = len(sample.trained)
            title = f"{item.where}, {name}" if len(samples) > 1 else item.where
            yield _titled(f"{title}: {len(sample.tokens) - trained} + {trained} tokens")
            yield _sample(tokenizer, sample, colours)
    samples = sum(len(item.samples) if isinstance(item, Example) else 2 for item in items)
    yield _titled(f"rows: {len(items)}; {'samples' if config.mode == 'sft' else 'answers'}: {samples}")
    yield from _left_out(left_out, refuses)
    yield from messages_left_out(key, items, config.sft.max_tokens)
    yield from doubts_about_items(key, items, tokenizer.unknown_token)


def _answers(pair: Pair) -> dict[str, Sample]:
    answers, begin = {"chosen": pair.chosen, "rejected": pair.rejected}, pair.prompt_length
    return {
        name: Sample(tokens, np.arange(begin, len(tokens)), len(tokens) - begin) for name, tokens in answers.items()
    }


def _sample(tokenizer: Tokenizer, sample: Sample, colours: bool) -> str | Text:
    """Returns the text of a sample, with its trained parts coloured or each below a line that says so."""
    is_trained = np.isin(np.arange(len(sample.tokens)), sample.trained)
    edges = [0, *(np.flatnonzero(np.diff(is_trained)) + 1).tolist(), len(is_trained)]
    parts = [(bool(is_trained[a]), _text(tokenizer, sample.tokens[a:b].tolist())) for a, b in pairwise(edges)]
    if colours:
        return Text.assemble(*((text, _TRAINED if trained else "") for trained, text in parts))
    return "\n".join(f"--- {'trained' if trained else 'not trained'}\n{text}" for trained, text in parts)


def _reward(name: str, function: RewardFunction, prompt: Prompt) -> str:
    """Returns a line about the reward of a response that has the right answer."""
    if name == "code":
        return (
            f"reward code: {len(json.loads(prompt.answer)['inputs'])} tests, and no program that is known to be right"
        )
    response = prompt.answer
    if name in ("math", "choice"):
        answer = right_answers(prompt.answer)[0].strip() if name == "math" else prompt.answer
        response = f"\\boxed{{{answer}}}"
    row = (prompt.row or {}) if takes_row(function) else None
    try:
        score, _ = scored(function, prompt.text, response, prompt.answer, row)
    except Exception as e:  # the function may be the user's
        return f"reward {name} of {_cut(response)!r} fails: {type(e).__name__}: {first_line(e)}"
    return f"reward {name} of {_cut(response)!r}: {score:g}"


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return _cut(tokenizer.decode(tokens, special=True))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def _titled(text: str) -> str:
    return f"=== {text}"


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.programs.rows", __doc__)
    parser.add_config()
    parser.add_argument("--eval", action="store_true", help="of data.eval")
    parser.add_argument("--rows", type=count, default=3, metavar="N", help="rows; default 3")
    options = parser.parse_intermixed_args(arguments)
    key = "eval" if options.eval else "train"
    try:
        config = config_file.load(options.config, options.overrides)
        fetch_all(config, weights=False)
        if options.eval and not any(own.data.eval for own in config.by_environment()):
            raise ConfigError("data.eval: there is none")
        terminal = Terminal()
        for text in shown(config, key, options.rows, colours=terminal.color_system is not None):
            print(text) if isinstance(text, str) else terminal.print(text)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())

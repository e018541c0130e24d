"""Shows the first rows of a run's data as the run sees them: `areal rows CONFIG [key=value …] [--eval]`.

Of each row: the prompt after the model's chat template, the right answer, and the reward that a response with the right
answer gets. Then how many rows are left out, or would keep the run from starting, and why; and which can hardly teach
anything. A reward function of the user is called as a launch calls it. Of a model on the hub only the
description and the tokenizer are fetched. Exit code 0: done, 2: wrong input. Imports neither torch nor vllm.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.data.doubts import doubts, doubts_about_items
from areal_megatron.data.prompts import LeftOut, Prompt, read_prompts
from areal_megatron.data.supervised import read_items
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.launch.supervision import start
from areal_megatron.process.errors import first_line
from areal_megatron.process.shown import guard
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.reward.function import RewardFunction, load_function, scored
from areal_megatron.reward.math import right_answers
from areal_megatron.reward.trial import try_rewards
from areal_megatron.run.arguments import Parser

_LONGEST = 2000
"""Characters of a text that are shown."""


def shown(config: Config, key: str, count: int) -> Iterator[str]:
    """Yields the text of the first `count` rows of data.train or data.eval (`key`), then what is left out. Raises
    ConfigError."""
    tokenizer, left_out = Tokenizer(config.model.path, untried=True), LeftOut.none()
    if config.is_supervised:
        items = read_items(config, key, tokenizer)
        names = ("tokens",) if config.mode == "sft" else ("chosen", "rejected")
        for number, item in enumerate(items[:count], 1):
            length, answers = item.prompt_length, {name: getattr(item, name).tolist() for name in names}
            sizes = " or ".join(str(len(tokens) - length) for tokens in answers.values())
            yield _titled(f"row {number}: {length} + {sizes} tokens")
            texts = [_text(tokenizer, next(iter(answers.values()))[:length])]
            for name, tokens in answers.items():
                texts += [f"--- {'response' if name == 'tokens' else name}", _text(tokenizer, tokens[length:])]
            yield "\n".join(texts)
        yield "\n".join([_titled(f"rows: {len(items)}"), *doubts_about_items(key, items)])
        return
    refuses, config.data.unusable_rows = config.data.unusable_rows == "refuse", "skip"
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
    if left_out.counts:
        happens = "keep the run from starting (data.unusable_rows=skip leaves them out)" if refuses else "are left out"
        yield "\n".join([f"{left_out.counts.total()} rows {happens}:", *left_out.lines()])
    yield from doubts(config, key, prompts)


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
    try:
        score, _ = scored(function, prompt.text, response, prompt.answer, prompt.row or {})
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
    parser = Parser("areal_megatron.launch.rows", __doc__)
    parser.add_config()
    parser.add_argument("--eval", action="store_true", help="of data.eval")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="so many rows; default 3")
    options = parser.parse_intermixed_args(arguments)
    key = "eval" if options.eval else "train"
    try:
        config = config_file.load(options.config, options.overrides)
        start.fetch(config, weights=False)
        if options.eval and not any(own.data.eval for own in config.by_environment()):
            raise ConfigError("data.eval: there is none")
        for text in shown(config, key, options.rows):
            print(text)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())

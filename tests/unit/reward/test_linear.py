"""What reads the text of a policy takes time in proportion to its length, whatever it says."""

import contextlib
import importlib
import inspect
import json
import pkgutil
import random
import time
from functools import partial

import pytest

import areal_megatron.reward
import areal_megatron.workflows
from areal_megatron.data import conversations, formats
from areal_megatron.reward import (
    choice,
    code,
    expression,
    formula,
    function,
    math,
    notation,
    numeral,
    quantity,
    question,
    tokens,
    wording,
    worker,
)
from areal_megatron.reward.sandbox import ProgramResult
from areal_megatron.workflows import agent_calls, chat_completions, tool_calls, tool_use
from tests.support.measured import later

LENGTH = 1_000_000
LIMIT_S = 0.5
"""CPU time for LENGTH characters."""

PIECES = [
    *("{", "}", "{}", "}{", "\\{", "(", ")", "[", "]", " ", "\n", "\t", "\r\n", "\0", "\\", "\\ ", "\\\\", "\\,", "`"),
    *("1", "1,", "1,111", "1.", "1 ", "1/", "1e", "-", "+1", "1!", "9^", "a", "a ", "A)", "x=", "^{", "**", "$", ".5"),
    *("\\boxed{", "\\boxed{1}", "\\boxed{1}}", "\\boxed{{", "\\boxed{}\n", "\\boxed", "\\frac{", "\\text{", "$1$", "("),
    *("```python\n", "```\n", "```python\nx = 1\n", "```py\n```\n", "  ```\n\n", "```x y", "``` \n", "\n```python"),
    *("<tool_call>", "<tool_call>{}", "<tool_call>{", "<tool_call>{}</tool_call>", "}</tool_call>", "</tool_call>"),
    *("<function=", "<parameter=a>", "<arg_key>", "<arg_key>a</arg_key><arg_value>", "</arg_value>", "</think>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁calls▁begin｜> ",
        "<|tool_call_begin|>",
        "<｜tool▁call▁begin｜><｜tool▁call▁end｜>",
    ),
    *("}  ", "answer is ", "answer:", "the answer is A\n", "answer is $", "answer is \\(", "####", "#### 1\n", "or "),
    *(
        "7 or 8 ",
        '"',
        '{"a":',
        "[[",
        '"\\u',
        "é",
        "𝒳",
        "\u202e",
        "\\sum_{",
        "\\begin{pmatrix}",
        "&",
        "=",
        "<",
        "%",
        "°",
    ),
]
FRAMES = [
    ("", ""),
    ("\\boxed{", "}"),
    ("answer is ", " x"),
    ("```python\n", "\n```"),
    ("<tool_call>{", "}</tool_call>"),
]


def framed(piece, before, after, length):
    return f"{before}{(piece * (length // len(piece) + 1))[:length]}{after}"


def mixed(seed, length):
    return "".join(random.Random(seed).choices(PIECES, k=length // 5))


HOSTILE = [
    *(partial(framed, piece, *frame) for piece in PIECES for frame in FRAMES[: 5 if len(piece) == 1 else 2]),
    *(partial(mixed, seed) for seed in range(3)),
]
"""Each makes a text of about a length."""


def quietly(read, *arguments):
    with contextlib.suppress(tokens.NotRead, math.AnswerRefused, agent_calls.BadCall, formats.ConfigError, ValueError):
        read(*arguments)


def _said(text):
    return [{"role": role, "content": text} for role in ("user", "assistant")]


STDIN = {"question_content": "x", "public_test_cases": "[]", "private_test_cases": "[]"}

READERS = {
    math.score: [
        lambda text: quietly(math.score, "", text, "42"),
        lambda text: quietly(math.score, text, text, "x^2"),
        lambda text: quietly(math.score, text, "\\boxed{x(x+1)}", "x^2+x"),
        lambda text: quietly(math.score, text, "\\boxed{7\\%}", "7"),
        lambda text: quietly(math.score, "", text, "\\text{even}"),
    ],
    math.final_answer: [math.final_answer],
    math.last_boxed: [math.last_boxed],
    math.right_answers: [math.right_answers],
    numeral.numeral: [numeral.numeral],
    numeral.bare: [numeral.bare],
    numeral.is_name: [numeral.is_name],
    numeral.words: [numeral.words],
    tokens.prepared: [lambda text: quietly(tokens.prepared, text)],
    tokens.tokens_of: [lambda text: quietly(tokens.tokens_of, text)],
    formula.read: [lambda text: quietly(formula.read, text)],
    numeral.is_unit: [numeral.is_unit],
    numeral.in_base: [numeral.in_base],
    numeral.in_digits: [numeral.in_digits, lambda text: numeral.in_digits(text.replace("a ", "one million "))],
    notation.numbers_in: [notation.numbers_in],
    notation.restates: [
        lambda text: notation.restates(f"{text} 0.5 as a fraction", numeral.numeral("0.5"), numeral.numeral("1/2"))
    ],
    quantity.quantity: [quantity.quantity, lambda text: quantity.quantity(text[:380] + " cm")],
    quantity.same_quantity: [lambda text: quietly(quantity.same_quantity, text[:380] + " cm", "3 m", text)],
    quantity.units_in: [quantity.units_in],
    wording.as_clock: [wording.as_clock],
    wording.ratio_as_fraction: [wording.ratio_as_fraction],
    wording.plain: [wording.plain],
    wording.as_formula: [wording.as_formula],
    wording.without_constant: [wording.without_constant],
    wording.without_integer: [wording.without_integer],
    wording.letters_of: [wording.letters_of],
    wording.halves_of_day: [wording.halves_of_day],
    question.rewrites: [lambda text: question.rewrites(text, text[:500])],
    question.is_written: [lambda text: question.is_written(text, text[:500])],
    question.has_name: [lambda text: question.has_name(text, "m")],
    question.asked_for: [question.asked_for],
    question.formulas_in: [question.formulas_in],
    question.repeats: [lambda text: question.repeats(text, text[:500], None)],
    expression.name_differently: [lambda text: expression.name_differently(text, "x")],
    expression.same_expression: [lambda text: quietly(expression.same_expression, text, "x^2")],
    choice.score: [lambda text: choice.score("", text, "C")],
    choice.chosen: [choice.chosen],
    code.last_program: [code.last_program],
    code.parse_tests: [lambda text: code.parse_tests(json.dumps({"inputs": [text], "outputs": [text]}))],
    code.same_output: [
        lambda text: code.same_output(text, "1"),
        lambda text: code.same_output(text, text + "x"),
        lambda text: code.same_output("1" + text, "2" + text),
    ],
    code.score: [lambda text: code.score("", text, '{"inputs": [""], "outputs": [""]}', limit_s=-1)],  # not run
    function.checked: [lambda text: function.checked((1.0, text))],
    chat_completions.parsed_answer: [lambda text: chat_completions.parsed_answer(text, [{"name": "a"}])],
    agent_calls.text_of: [lambda text: agent_calls.text_of([{"type": "text", "text": text}] * 2, ("text",))],
    agent_calls.tool_call: [
        lambda text: quietly(agent_calls.tool_call, text, json.dumps(text)),
        lambda text: quietly(agent_calls.tool_call, "", text),
    ],
    tool_calls.split_thinking: [tool_calls.split_thinking],
    tool_calls.find_calls: [
        lambda text: tool_calls.find_calls(text, []),
        lambda text: tool_calls.find_calls(f"<tool_call>{text}", []),
        lambda text: tool_calls.find_calls(f"<tool_call><function=a>{text}</function></tool_call>", []),
        lambda text: tool_calls.find_calls(f"<tool_call>a<arg_key>{text}</tool_call>", []),
    ],
    chat_completions.normalized: [lambda text: chat_completions.normalized({"role": "user", "content": text})],
    tool_use.described: [
        lambda text: tool_use.described(ProgramResult("exit", 1, text, text)),
    ],
    formats.text_of: [lambda text: formats.text_of([{"role": "user", "content": text}] * 2)],
    formats.field: [lambda text: formats.field({"a": text}, "a", (str,), "x:1")],
    conversations.conversation_of: [
        lambda text: quietly(conversations.conversation_of, {"messages": _said(text)}, "x:1", "all")
    ],
    formats.check_text_alone: [
        lambda text: formats.check_text_alone({"a": [{"content": [{"type": text, "text": text}]}]}, "x:1"),
        lambda text: quietly(formats.check_text_alone, {"image": text}, "x:1"),
    ],
    formats.with_system: [lambda text: formats.with_system({"system": text}, text, "x:1")],
    formats.prompt_of: [lambda text: formats.prompt_of({"prompt": text}, "x:1")],
    formats.read_item: [
        lambda text: quietly(formats.read_item, {"prompt": text, "answer": text}, "x:1", [0]),
        lambda text: quietly(formats.read_item, {"question": text, "choices": ["a", text], "answer": text}, "x:1", [0]),
        lambda text: quietly(formats.read_item, STDIN | {"private_test_cases": text}, "x:1", [0]),
    ],
    worker._problem: [lambda text: worker._problem(ValueError(text), "x:1")],
}
"""What reads texts → calls of it."""

ELSEWHERE = {
    "load_function": "a name from the config",
    "function": "an address from the config",
    "score": "sends the text to a service",
    "ask": "sends the text to a service",
    "ask_engines": "sends the text to engines",
    "run": "hands the program to a process of its own",
    "run_program": "hands the program to a process of its own",
    "check_isolation": "a key of the config",
    "check_messages": "looks at types alone",
    "serve": "hands texts to what is measured here",
    "is_score": "no text is one",
    "openai_error": "a line that says what is wrong with a call",
    "residues_of": "a tree and the name of a symbol",
    "chosen": "a tree and a sign",
    "check_name": "a name from the config",
    "engines_of": "a name from the config",
    "load_group_function": "a name from the config",
    "problem_with_answers": "a name from the config",
    "scores_of": "numbers that a workflow returns",
    "checked_terms": "numbers that a function of the user's returns",
    "sample": "the id of a request",
    "try_workflows": "hands the row to a process of its own",
    "scored": "hands texts to the function, and what it returns to `checked`",
    "try_rewards": "the first row of the data",
}
"""Public functions with a text that no policy writes, or that they only pass on."""


def cpu_s(read, text):
    began = time.process_time()
    read(text)
    return time.process_time() - began


def slowest_first(read, hostile, length):
    """Returns those that make the texts, the slowest first. Fails if one takes longer than the limit for its length,
    also later: other work of a shared machine may disturb measurements for a second."""
    limit_s = LIMIT_S * max(length / LENGTH, 0.05)
    times = {}
    for make in hostile:
        text = make(length)
        times[make] = cpu_s(read, text)
        if times[make] > limit_s:
            again = later(lambda text=text: cpu_s(read, text), limit_s)
            assert again < limit_s, f"{length} characters {text[:40]!r}… take {again:.3g} s"
    return sorted(times, key=times.get, reverse=True)


@pytest.mark.parametrize("function", READERS, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_time_is_in_proportion_to_the_length_of_the_text(function):
    """Short texts first, on which a quadratic reader fails within seconds; of longer ones those that took longest."""
    for read in READERS[function]:
        hostile = slowest_first(read, HOSTILE, LENGTH // 100)
        hostile = slowest_first(read, hostile[:50], LENGTH // 10)
        slowest_first(read, hostile[:5], LENGTH)


def test_every_public_function_that_takes_a_text_is_measured():
    packages = areal_megatron.reward, areal_megatron.workflows
    names = [f"{package.__name__}.{m.name}" for package in packages for m in pkgutil.iter_modules(package.__path__)]
    found = set()
    inside = {f"areal_megatron.reward.{name}" for name in ("sandbox_init", "system_calls")}  # make the sandbox
    for name in {*names, formats.__name__} - inside:
        for value in vars(importlib.import_module(name)).values():
            if inspect.isfunction(value) and value.__module__ == name and not value.__name__.startswith("_"):
                kinds = {hint for key, hint in value.__annotations__.items() if key != "return"}
                if any(kind in hint for hint in kinds for kind in ("str", "Message", "Chat", "Row", "object")):
                    found.add(value)
    left = {f"{one.__module__}.{one.__name__}" for one in found - set(READERS) if one.__name__ not in ELSEWHERE}
    assert not left

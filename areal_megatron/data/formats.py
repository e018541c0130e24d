"""Formats of data sets: each has a pure function that turns a row into the prompt, the right answer and its reward.

The first format of FORMATS whose mark the row has reads it; docs/data.md shows a row of each.
"""

from __future__ import annotations

import base64
import json
import pickletools
import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_megatron.config import ConfigError
from areal_megatron.data.boxed import last_boxed
from areal_megatron.run.json_input import kind_of, kinds_expected, parse_json

Row = dict[str, Any]
Chat = list[dict[str, str]]
"""A list of messages, each with `role` and `content`."""

BOXED = "\n\nReason step by step and put the final answer into \\boxed{}."
LETTER = "\n\nReason step by step and put the letter of the right choice into \\boxed{}."
PROGRAM = (
    "\n\nWrite a Python program that reads the input from stdin and prints the output to stdout. "
    "Put the whole program into one ```python block."
)
_CALLED = "\n\nWrite a Python function {} and put all of it into one ```python block."
FUNCTION = "\n\nComplete this Python code and put all of it into one ```python block:\n```python\n{}\n```"

_GSM8K = "#### "
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<think>")
"""What AReaL's prompts have of the chat template of DeepSeek's models; the template of the model takes its place."""
_CODEFORCES = {"input_format": "Input", "output_format": "Output"}
_GUIDES = "docs/data.md, docs/supervised.md"
"""What rows may hold, of RL and of supervised modes."""
_ALSO_CALLED = {
    "prompt": ("question", "question_text", "instruction", "input", "query", "text"),
    "answer": ("target", "label", "solution", "ground_truth", "output", "gold", "response", "completion"),
    "response": ("completion", "output", "answer", "target", "solution", "text"),
    "chosen": ("preferred", "better", "accepted"),
    "rejected": ("dispreferred", "worse"),
}
"""What others call our fields."""
_SHOWN_OR_PLAYED = ("image", "images", "image_url", "input_image", "video", "videos", "video_url")
_SHOWN_OR_PLAYED += ("audio", "audios", "audio_url", "input_audio", "multi_modal_data", "pixel_values", "decoded_image")
"""Names of fields, of what messages have, and of their parts, that are no text; small letters, without a number."""
_UNPACKED_BYTES = 1 << 30
"""Limit on a decompressed LiveCodeBench field."""
_PICKLED_TEXT = {
    "PROTO",
    "FRAME",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "UNICODE",
    "MEMOIZE",
    "PUT",
    "BINPUT",
    "STOP",
}
"""The operations of a pickle that holds a single string."""


@dataclass(frozen=True)
class Item:
    """What a row asks, and how an answer to it is scored."""

    prompt: str | Chat
    answer: str
    """The right answer as the reward function expects it."""
    reward: str = ""
    """The built-in reward (reward/function.py) that the format is made for; empty: any."""


def read_item(row: Row, where: str, seed: Sequence[int]) -> Item:
    """Returns the item of a row, in whichever format it is.

    `where` names the row in errors, `seed` shuffles the choices of a multiple-choice question. Raises ConfigError for
    an unknown format, a missing field, a field of the wrong type or with an invalid value, and what is no text.
    """
    check_text_alone(row, where)
    known = [key for key in FORMATS if key in row]
    if known:
        # a column of Parquet that is another format's may be there and empty
        key = next((key for key in known if row[key] is not None or key == "prompt"), known[0])
        try:
            return FORMATS[key](row, where, seed)
        except RecursionError:
            raise ConfigError(f"{where}: lists or objects are nested too deeply") from None
    if talk := next((name for name in ("messages", "conversations") if row.get(name) is not None), ""):
        hint = f"; {talk!r} are for mode=sft"
    else:
        hint = _renaming(row, "prompt") or f"; other formats have one of {', '.join(map(repr, list(FORMATS)[1:]))}"
    raise _missing(row, "prompt", hint, where)


def check_text_alone(row: Row, where: str) -> None:
    """Raises ConfigError for a row with images, videos or sound, in a field or in a part of a message."""
    if name := _shown_or_played(row):
        raise ConfigError(
            f"{where}: field {name!r} is no text, and models get texts alone here; leave the row out, or the field if "
            "the prompt does without"
        )
    for name, said in row.items():
        for number, message in enumerate(said if isinstance(said, list) else (), 1):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(message, dict) and "role" in message and (kind := _shown_or_played(message)):
                raise ConfigError(
                    f"{where}: message {number} of {name!r} has {kind!r}, and models get texts alone here; leave the "
                    "row out"
                )
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and (kind := _kind_of_part(part)):
                    raise ConfigError(
                        f"{where}: message {number} of {name!r} has a part {kind!r}, and models get texts alone here; "
                        "leave the row out"
                    )


def _is_given(value: Any) -> bool:
    """Whether a field holds anything: of a data set in which only some rows have an image, others hold None or parts
    that are None."""
    if isinstance(value, dict | list):
        return any(map(_is_given, value.values() if isinstance(value, dict) else value))
    return bool(value)


def _kind_of_part(part: dict[str, Any]) -> str:
    """Returns what a part of a message is, "" if it may be a text."""
    if part.get("type") in _SHOWN_OR_PLAYED:
        return part["type"]
    return _shown_or_played(part)


def _shown_or_played(fields: dict[str, Any]) -> str:
    """Returns the name of a field that holds an image, a video or sound, "" if none does."""
    held = (name for name, value in fields.items() if _is_given(value))
    return next((name for name in held if name.lower().rstrip("0123456789_") in _SHOWN_OR_PLAYED), "")


def field(row: Row, name: str, kinds: tuple[type, ...], where: str) -> Any:
    """Returns a required field. Raises ConfigError if it is missing, empty or of none of the types `kinds`."""
    if name not in row:
        raise _missing(row, name, _renaming(row, name), where)
    value = row[name]
    if type(value) not in kinds:
        raise ConfigError(f"{where}: field {name!r} is {kind_of(value)}, expected {kinds_expected(kinds)}")
    if value in ("", [], {}):
        raise ConfigError(f"{where}: field {name!r} is empty")
    return value


def prompt_of(row: Row, where: str) -> str | Chat:
    """Returns the field `prompt`, a text or messages, after the field `system`. Raises ConfigError."""
    prompt = field(row, "prompt", (str, list), where)
    if isinstance(prompt, list):
        check_messages(prompt, "prompt", where)
    return with_system(row, prompt, where)


def check_messages(messages: list, name: str, where: str) -> None:
    """Raises ConfigError if one of the messages in the field `name` has no text as its role or content."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(type(message.get(key)) is str for key in ("role", "content")):
            raise ConfigError(f"{where}: message {number} of {name!r} needs a text `role` and a text `content`")


def with_system(row: Row, prompt: str | Chat, where: str) -> str | Chat:
    """Returns a prompt with the message of the field `system` before it, if the row has one. Raises ConfigError if the
    prompt begins with another."""
    if not row.get("system"):
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    system = {"role": "system", "content": field(row, "system", (str,), where)}
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"].strip() != system["content"].strip():
            raise ConfigError(f"{where}: field 'system' and the system's message differ; leave one out")
        return messages
    return [system, *messages]


def added_sentence(item: Item) -> str:
    """Returns the sentence that a format has added to the end of a prompt, "" if none."""
    text = item.prompt if isinstance(item.prompt, str) else ""
    return next((added for added in (BOXED, LETTER, PROGRAM) if text.endswith(added)), "")


def text_of(prompt: str | Chat) -> str:
    """Returns a prompt as reward functions get it: the text, or the messages' contents joined by empty lines."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def _with_prompt(row: Row, where: str, seed: Sequence[int]) -> Item:
    """Reads this project's own format, and those that have the answer in another field."""
    others = {"reward_model": _verl, "solutions": _areal_math, "input_output": _areal_code, "label": _slime}
    own = "answer" in row or not any(row.get(name) is not None for name in others)
    if not own:
        read = next(read for name, read in others.items() if row.get(name) is not None)
        return read(row, where)
    answer = field(row, "answer", (str, int, float, dict, list), where)
    return Item(prompt_of(row, where), json.dumps(answer) if isinstance(answer, dict | list) else str(answer))


def _slime(row: Row, where: str) -> Item:
    return Item(prompt_of(row, where), _text(field(row, "label", (str, int, float, dict, list), where)))


def _verl(row: Row, where: str) -> Item:
    model = field(row, "reward_model", (dict,), where)
    if "ground_truth" not in model:
        raise ConfigError(f"{where}: field 'reward_model' has no 'ground_truth', found {_names(model)}")
    truth = model["ground_truth"]
    if type(truth) not in (str, int, float, dict, list) or truth in ("", [], {}):
        raise ConfigError(f"{where}: field 'ground_truth' of 'reward_model' is no text, number, list or object")
    return Item(prompt_of(row, where), _text(truth))


def _areal_math(row: Row, where: str) -> Item:
    solutions = field(row, "solutions", (list,), where)
    if not all(type(solution) is str for solution in solutions):
        raise ConfigError(f"{where}: field 'solutions' must be texts")
    answers = [_boxed(solution) or solution for solution in solutions]
    return Item(_areal_prompt(row, where), answers[0] if len(answers) == 1 else json.dumps(answers), "math")


def _areal_code(row: Row, where: str) -> Item:
    tests = field(row, "input_output", (str, dict), where)
    return Item(_areal_prompt(row, where), tests if isinstance(tests, str) else json.dumps(tests), "code")


def _areal_prompt(row: Row, where: str) -> str:
    prompt = field(row, "prompt", (str,), where)
    for token in _DEEPSEEK:
        prompt = prompt.replace(token, "")
    return prompt.strip()


def _text(answer: Any) -> str:
    """Returns an answer as reward functions take it; a list with a single text, as datasets of verl have it, is that
    text."""
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], str):
        return answer[0]
    return json.dumps(answer) if isinstance(answer, dict | list) else str(answer)


def _boxed(text: str) -> str:
    return (last_boxed(text) or "").strip()


def _math(question: str) -> Callable[[Row, str, Sequence[int]], Item]:
    def read(row: Row, where: str, seed: Sequence[int]) -> Item:
        name = "Answer" if question == "Problem" else "answer"
        if row.get(name) in (None, "") and isinstance(row.get("solution"), str):  # MATH: a whole solution alone
            answer = _boxed(row["solution"])
            if not answer:
                raise ConfigError(f"{where}: there is no field {name!r}, and nothing is boxed in field 'solution'")
            return Item(field(row, question, (str,), where) + BOXED, answer, "math")
        answer = str(field(row, name, (str, int, float), where))
        if question == "question" and _GSM8K in answer:  # a whole solution, with the answer in its last line
            answer = answer.rpartition(_GSM8K)[2].replace(",", "").strip()
            if not answer:
                raise ConfigError(f"{where}: field 'answer' has nothing after its last {_GSM8K}")
        return Item(field(row, question, (str,), where) + BOXED, answer, "math")

    return read


def _choices(row: Row, where: str, seed: Sequence[int]) -> Item:
    choices = field(row, "choices", (list,), where)
    if not 2 <= len(choices) <= len(string.ascii_uppercase) or not all(type(choice) is str for choice in choices):
        raise ConfigError(f"{where}: field 'choices' must be 2 to {len(string.ascii_uppercase)} texts")
    answer = field(row, "answer", (int, str), where)
    letters = string.ascii_uppercase[: len(choices)]
    if answer in choices:
        right = choices.index(answer)
    elif isinstance(answer, str):
        right = letters.find(answer) if len(answer) == 1 else -1
    else:
        right = answer
    if not 0 <= right < len(choices):
        raise ConfigError(f"{where}: field 'answer' is {answer!r}, expected a choice, its letter or its number from 0")
    return _multiple_choice(field(row, "question", (str,), where), choices, right, seed)


def _gpqa(row: Row, where: str, seed: Sequence[int]) -> Item:
    names = ["Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3))]
    choices = [field(row, name, (str,), where).strip() for name in names]
    return _multiple_choice(field(row, "Question", (str,), where), choices, 0, seed)


def _multiple_choice(question: str, choices: list[str], right: int, seed: Sequence[int]) -> Item:
    """Builds the item of a multiple-choice question, the choices shuffled by `seed`."""
    order = np.random.default_rng(seed).permutation(len(choices)).tolist()
    lines = [f"{letter}) {choices[number]}" for letter, number in zip(string.ascii_uppercase, order, strict=False)]
    return Item(question + "\n\n" + "\n".join(lines) + LETTER, string.ascii_uppercase[order.index(right)], "choice")


def _deep_coder(row: Row, where: str, seed: Sequence[int]) -> Item:
    tests = row["tests"]
    try:
        tests = parse_json(tests) if isinstance(tests, str) else tests
    except ValueError as e:
        raise ConfigError(f"{where}: field 'tests' is not JSON: {e}") from None
    question = field(row, "problem", (str,), where)
    starter = row.get("starter_code") or ""
    asked = question + (FUNCTION.format(starter) if starter else PROGRAM)
    if isinstance(tests, dict):  # TACO's, whose calls are lists of arguments
        return Item(
            question + _CALLED.format(name) if (name := tests.get("fn_name")) else asked, json.dumps(tests), "code"
        )
    cases = _cases(tests, "tests", where)
    kinds = {case.get("testtype") or case.get("type") or "stdin" for case in cases}
    names = {case["fn_name"] for case in cases if case.get("fn_name")}
    if kinds <= {"stdin", "stdin_stdout"}:
        return Item(asked, _columns([(case["input"], case["output"]) for case in cases], where), "code")
    if kinds == {"functional"}:
        return _functions(asked, cases, row, where)
    if kinds != {"function_call"} or len(names) != 1:
        raise ConfigError(
            f"{where}: tests of type {', '.join(sorted(map(repr, kinds)))}, expected all of one known type"
        )
    columns = {name: [case[key] for case in cases] for name, key in (("inputs", "input"), ("outputs", "output"))}
    name = names.pop()
    return Item(question + _CALLED.format(name), json.dumps(columns | {"fn_name": name}), "code")


def _functions(asked: str, cases: list[dict[str, Any]], row: Row, where: str) -> Item:
    """Builds the item of a problem that a function solves: each input is one argument a line, as JSON."""
    try:
        described: Any = row.get("metadata") or cases[0].get("metadata")
        tests = {
            "inputs": [[parse_json(line) for line in case["input"].split("\n") if line.strip()] for case in cases],
            "outputs": [parse_json(case["output"]) for case in cases],
            "fn_name": (parse_json(described) if isinstance(described, str) else described)["func_name"],
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{where}: functional tests need JSON values, one argument a line, and the name of the function "
            "as func_name in the JSON text of field 'metadata'"
        ) from None
    return Item(asked, json.dumps(tests), "code")


def _live_code_bench(row: Row, where: str, seed: Sequence[int]) -> Item:
    cases = [
        case
        for name in ("public_test_cases", "private_test_cases")
        if row.get(name)
        for case in _test_cases(row, name, where)
    ]
    if not cases:
        raise ConfigError(f"{where}: no test in public_test_cases or private_test_cases")
    kinds = {case.get("testtype", "stdin") for case in cases}
    if kinds not in ({"stdin"}, {"functional"}):
        raise ConfigError(f"{where}: tests of type {', '.join(map(repr, kinds))}, expected all stdin or all functional")
    question = field(row, "question_content", (str,), where)
    if kinds == {"stdin"}:
        return _program(question, [(case["input"], case["output"]) for case in cases])
    return _functions(question + FUNCTION.format(field(row, "starter_code", (str,), where)), cases, row, where)


def _codeforces(row: Row, where: str, seed: Sequence[int]) -> Item:
    reasons = {
        "generated_checker": "several outputs are right, and its checker is not run",
        "interaction_format": "it is interactive",
    }
    unusable = [reason for name, reason in reasons.items() if row.get(name)]
    unusable += ["it reads a file"] if row.get("input_mode", "stdio") not in ("stdio", "") else []
    if unusable:
        raise ConfigError(f"{where}: programs for this problem cannot be tested: {unusable[0]}; leave the row out")
    tests = _pairs(field(row, "official_tests", (list,), where), "official_tests", where)
    parts = [field(row, "description", (str,), where)]
    parts += [f"{title}\n{row[name]}" for name, title in _CODEFORCES.items() if row.get(name)]
    for number, (given, expected) in enumerate(_pairs(row.get("examples") or [], "examples", where), 1):
        parts.append(f"Example {number}\nInput:\n{given}\nOutput:\n{expected}")
    parts += [f"Note\n{row['note']}"] if row.get("note") else []
    return _program("\n\n".join(parts), tests)


def _code_contests(row: Row, where: str, seed: Sequence[int]) -> Item:
    if row.get("input_file") or row.get("output_file"):
        raise ConfigError(
            f"{where}: programs for this problem cannot be tested: it reads or writes a file; leave the row out"
        )
    tests = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        columns = row.get(name) or {"input": [], "output": []}
        given, expected = (columns.get(key) if isinstance(columns, dict) else None for key in ("input", "output"))
        if not isinstance(given, list) or not isinstance(expected, list) or len(given) != len(expected):
            raise ConfigError(f"{where}: field {name!r} needs an `input` and an `output`, lists of one length")
        cases = [{"input": text, "output": other} for text, other in zip(given, expected, strict=True)]
        tests += _pairs(cases, name, where)
    if not tests:
        raise ConfigError(f"{where}: no test in public_tests, private_tests or generated_tests")
    return _program(field(row, "description", (str,), where), tests)


def _pairs(cases: list[Any], name: str, where: str) -> list[tuple[str, str]]:
    """Returns (input, output) of each case. Raises ConfigError."""
    try:
        found: list[tuple[Any, Any]] = [(case["input"], case["output"]) for case in cases]
    except (KeyError, TypeError):
        found = [(None, None)]
    if not all(type(given) is type(expected) is str for given, expected in found):
        raise ConfigError(f"{where}: field {name!r} is no list of tests with a text `input` and a text `output`")
    return found


def _program(question: str, tests: list[tuple[str, str]]) -> Item:
    """Builds the item of a problem for a program that reads standard input."""
    columns = {"inputs": [given for given, _ in tests], "outputs": [expected for _, expected in tests]}
    return Item(question + PROGRAM, json.dumps(columns), "code")


def _columns(tests: list[tuple[Any, Any]], where: str) -> str:
    if not all(type(given) is type(expected) is str for given, expected in tests):
        raise ConfigError(f"{where}: tests for standard input must be texts")
    return json.dumps({"inputs": [given for given, _ in tests], "outputs": [expected for _, expected in tests]})


def _cases(tests: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(tests, list) or not tests or not all(isinstance(case, dict) for case in tests):
        raise ConfigError(f"{where}: field {name!r} is no list of tests")
    if not all("input" in case and "output" in case for case in tests):
        raise ConfigError(f"{where}: a test of field {name!r} lacks its input or its output")
    if not all(isinstance(case.get(key) or "", str) for case in tests for key in ("testtype", "type", "fn_name")):
        raise ConfigError(f"{where}: a test of field {name!r} has a type or fn_name that is no text")
    return tests


def _test_cases(row: Row, name: str, where: str) -> list[dict[str, str]]:
    cases = row[name]
    try:
        if isinstance(cases, str):
            cases = parse_json(cases if cases.lstrip().startswith("[") else _unpacked(cases))
        if not all(
            type(case["input"]) is type(case["output"]) is type(case.get("testtype", "")) is str for case in cases
        ):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error):
        raise ConfigError(
            f"{where}: field {name!r} is no list of tests with a text `input` and a text `output`, neither "
            "as JSON nor packed as LiveCodeBench does it"
        ) from None
    return cases


def _unpacked(text: str) -> str:
    """Returns the string in base64-encoded, zlib-compressed pickle data, which is parsed and never executed.

    Raises ValueError or zlib.error.
    """
    inflater = zlib.decompressobj()
    pickled = inflater.decompress(base64.b64decode(text, validate=True), _UNPACKED_BYTES)
    operations = list(pickletools.genops(pickled)) if not inflater.unconsumed_tail else []
    texts = [str(value) for operation, value, _ in operations if "UNICODE" in operation.name]
    if len(texts) != 1 or any(operation.name not in _PICKLED_TEXT for operation, _, _ in operations):
        raise ValueError("more than a text")
    return texts[0]


FORMATS: dict[str, Callable[[Row, str, Sequence[int]], Item]] = {
    "prompt": _with_prompt,
    "question_content": _live_code_bench,
    "official_tests": _codeforces,
    "public_tests": _code_contests,
    "tests": _deep_coder,
    "choices": _choices,
    "Correct Answer": _gpqa,
    "problem": _math("problem"),
    "Problem": _math("Problem"),
    "question": _math("question"),
}
"""Reader of each format, by the field that identifies it."""


def _names(row: Row) -> str:
    return ", ".join(map(repr, row)) or "no field"


def _missing(row: Row, name: str, hint: str, where: str) -> ConfigError:
    return ConfigError(f"{where}: field {name!r} is missing, found {_names(row)}{hint} ({_GUIDES})")


def _renaming(row: Row, name: str) -> str:
    """Returns the advice to rename a field that seems to be the one missing, "" if none does."""
    alike = next((other for other in _ALSO_CALLED.get(name, ()) if row.get(other) is not None), "")
    return f"; rename {alike!r} to {name!r}?" if alike else ""

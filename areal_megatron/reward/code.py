"""Scores Python programs: runs the last fenced block of a response against tests in the format of APPS and TACO.

`answer` is JSON. In {"inputs": […], "outputs": […]}, inputs are texts for standard input, and outputs are the texts
expected on standard output. With "fn_name" they are argument lists and results of a function, or of a method of class
Solution. docs/graders.md has examples. The expected outputs never enter the sandbox.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from areal_megatron.reward.sandbox import Limits, run
from areal_megatron.run.json_input import kind_of, parse_json

_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([^\s`]*+)([^\n`]*+)$", re.MULTILINE)
_GAP = re.compile(r"([ \t]+)")
_ENDS = " \t\r"
"""What does not count at the end of a line."""
_NUMBER = re.compile(
    r"(?P<lead>[-+]?+(?>0*(?=\d))?+)(\d++(\.\d++)?+|\.\d++)(e[-+]?+\d{1,9})?+", re.IGNORECASE | re.ASCII
)
"""`lead` is a sign, and zeros before another digit."""


@dataclass(frozen=True)
class Tests:
    """The tests of one problem."""

    inputs: list[Any]
    """Texts for standard input, or lists of arguments."""
    outputs: list[Any]
    """Expected texts on standard output, or results."""
    function: str | None
    """The function to call; None: the program reads standard input."""


def score(prompt: str, response: str, answer: str, limit_s: float = 8.0) -> float:
    """Returns 1.0 if the program passes all tests within `limit_s` seconds in total, else 0.0.

    Stops at the first test that fails. Raises ValueError for malformed tests, and SandboxError if the program cannot be
    isolated.
    """
    deadline = time.monotonic() + limit_s
    tests = parse_tests(answer)
    program = last_program(response)
    if program is None:
        return 0.0
    passed = _passes_texts if tests.function is None else _passes_calls
    return float(passed(program, tests, deadline))


def last_program(response: str) -> str | None:
    """Returns the last complete block fenced as Python, else the last one without a language; None without either."""
    response = response.replace("\r\n", "\n")
    last: dict[str, tuple[int, int]] = {}
    opened = None
    for fence in _FENCE.finditer(response):
        if opened is None:
            opened = fence
        elif not fence[1] and not fence[2]:
            language = opened[1].lower()
            last["python" if language in ("py", "python3") else language] = opened.end() + 1, fence.start()
            opened = None
    found = last.get("python", last.get(""))
    return response[slice(*found)] if found else None


def parse_tests(answer: str) -> Tests:
    """Returns the tests in a row's answer. Raises ValueError that says what is wrong with them."""
    try:
        tests = parse_json(answer)
    except ValueError as e:
        raise ValueError(f"the answer holds no tests: not JSON: {e}") from None
    if not isinstance(tests, dict):
        raise ValueError(f"the answer holds no tests: expected an object, is {kind_of(tests)}")
    inputs, outputs, function = (tests.get(key) for key in ("inputs", "outputs", "fn_name"))
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
        raise ValueError("the answer holds no tests: inputs and outputs must be lists of one length, not empty")
    if function and not (isinstance(function, str) and function.isidentifier()):
        raise ValueError(f"the answer's fn_name must be a name, is {function!r}")
    if not function:
        return Tests(list(map(_text, inputs)), list(map(_text, outputs)), None)
    calls = [_call(arguments, result) for arguments, result in zip(inputs, outputs, strict=True)]
    return Tests([arguments for arguments, _ in calls], [result for _, result in calls], function)


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs agree line by line, apart from white space at the ends of lines and empty lines at the end.

    White space within lines counts where the expected output is laid out (`_is_laid_out`), else only as what separates
    words. A word that is expected with a point or an exponent is compared by value: 2.50 equals 2.5.
    """
    found_lines, expected_lines = ([line.rstrip(_ENDS) for line in _lines(text)] for text in (found, expected))
    if len(found_lines) != len(expected_lines):
        return False
    differing = [pair for pair in zip(found_lines, expected_lines, strict=True) if pair[0] != pair[1]]
    spaced_alike = True
    for one, other in differing:
        (words, gaps), (expected_words, expected_gaps) = _words_and_gaps(one), _words_and_gaps(other)
        pairs = zip(words, expected_words, strict=False)
        if len(words) != len(expected_words) or not all(a == b or _same_word(a, b) for a, b in pairs):
            return False
        spaced_alike &= gaps == expected_gaps
    return spaced_alike or not any(map(_is_laid_out, {*expected_lines}))


def _lines(text: str) -> list[str]:
    return text.rstrip(_ENDS + "\n").split("\n")


def _is_laid_out(line: str) -> bool:
    """Whether the white space of a line is part of what it shows, as in drawings: it begins with some, has a word
    without a letter or digit, or has more than one space between words that are not both numbers."""
    words, gaps = _words_and_gaps(line)
    numbers = [_NUMBER.fullmatch(word) is not None for word in words]
    return (
        gaps[0] != ""
        or not all(any(map(str.isalnum, word)) for word in words)
        or any(gap != " " and not (numbers[n] and numbers[n + 1]) for n, gap in enumerate(gaps[1:]))
    )


def _words_and_gaps(line: str) -> tuple[list[str], list[str]]:
    """Returns the words of a line, and the white space before each of them."""
    parts = _GAP.split(line)  # words and gaps in turn
    first = not parts[0]  # the line begins with a gap, or is empty
    return parts[2 * first :: 2], parts[1::2] or [""] if first else ["", *parts[1::2]]


def _same_word(found: str, expected: str) -> bool:
    one, other = _NUMBER.fullmatch(found), _NUMBER.fullmatch(expected)
    if one is None or other is None or expected.lstrip("+-").isdigit():
        return False
    return one["lead"] == other["lead"] and Decimal(found) == Decimal(expected)


def _text(value: Any) -> str:
    """Returns one text for standard input or output; APPS also has lists of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"a test for standard input must be text, is {value!r}")
    return value


def _call(arguments: Any, result: Any) -> tuple[list[Any], Any]:
    """Returns arguments and result as values; LiveCodeBench has both as text, one JSON value on each line."""
    if isinstance(arguments, str) and isinstance(result, str):
        try:
            return [parse_json(line) for line in arguments.splitlines() if line.strip()], parse_json(result)
        except ValueError:
            raise ValueError(f"a test of a function is no JSON: {arguments!r}, {result!r}") from None
    if not isinstance(arguments, list):
        raise ValueError(f"a test of a function needs a list of arguments, has {arguments!r}")
    return arguments, result


def _passes_texts(program: str, tests: Tests, deadline: float) -> bool:
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        outcome = run(program, given, Limits(wall_s=left))
        if not (outcome.good and same_output(outcome.stdout, expected)):
            return False
    return True


def _passes_calls(program: str, tests: Tests, deadline: float) -> bool:
    """Makes all calls in one process, in order."""
    job = json.dumps({"program": program, "function": tests.function, "inputs": tests.inputs})
    outcome = run(_CALLS, job, Limits(wall_s=deadline - time.monotonic()))
    if not outcome.good:
        return False
    try:
        results = [json.loads(line) for line in outcome.stdout.splitlines()]
    except (ValueError, RecursionError):  # the program wrote to the descriptor of the results itself
        return False
    return len(results) == len(tests.outputs) and all(map(_same_result, results, tests.outputs))


def _same_result(found: Any, expected: Any) -> bool:
    """Whether a result is the expected one, which APPS wraps into a list of one in most tests, but not in all."""
    return found == expected or (isinstance(expected, list) and len(expected) == 1 and found == expected[0])


# Results are written to a descriptor of their own, since the program may print. As on LeetCode, the names that
# signatures and solutions commonly use need no import.
_CALLS = """
import json, os, sys
job = json.load(sys.stdin)
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names = {"__name__": "solution"}
for module in ("typing", "collections", "itertools", "functools", "heapq", "bisect", "math", "builtins"):
    exec(f"import {module}\\nfrom {module} import *", names)
exec(compile(job["program"], "program", "exec"), names)
solution = names.get("Solution")
for arguments in job["inputs"]:
    function = getattr(solution(), job["function"]) if solution else names[job["function"]]
    print(json.dumps(function(*arguments)), file=results, flush=True)
"""

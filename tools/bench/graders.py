"""How long the built-in reward functions take for texts that a collapsed policy writes.

    python tools/bench/graders.py [--characters 100000] [--repetitions 5] [--json FILE]

Grades that many characters of each kind of text, and half as many. Figures are CPU milliseconds, as medians with the
lowest and highest repetition, and the ratio of the two lengths: 2 where time grows with the length, 4 where with its
square. `code` finds the program and compares outputs; it runs nothing. Exits with code 1 if a text of 100,000
characters takes 50 ms or longer.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from areal_megatron.reward import choice, code, expression, math
from areal_megatron.reward.no_score import AnswerRefused
from tools.bench import common
from tools.bench.common import Figure, spread

MOST_MS = 50.0
"""The target for TARGET_CHARACTERS."""
TARGET_CHARACTERS = 100_000
TEXTS = {
    "fences": "```\n",
    "opened fences": "```python\n",
    "fences with code": "```python\nx = 1\n```\n",
    "opened boxes": "\\boxed{",
    "boxes": "\\boxed{1}",
    "boxes in boxes": "\\boxed{{",
    "braces": "{",
    "blanks": " ",
    "lines": "\n",
    "digits": "1",
    "grouped digits": "1,111",
    "powers": "9^",
    "fractions": "\\frac{1}{2}",
    "formulas": "$1$ ",
    "sums of roots": "\\sqrt{x+y}\\ln(x+z)+",
    "towers": "9^{9^{9}}+x!",
    "cases": "\\begin{cases}1&x>0\\end{cases}",
    "sentences": "the answer is A or B ",
    "words": "so we try it again ",
}
GRADERS: dict[str, list[Callable[[str], object]]] = {
    "math": [
        lambda text: math.score("", text, "42"),
        lambda text: math.score("", f"\\boxed{{{text}}}", "42"),
        lambda text: math.score("", f"\\boxed{{{text}}}", "x^2"),
        lambda text: math.score("", f"\\boxed{{{text[:900]}}}", r"\sqrt{x+1}"),
        lambda text: math.score(text, "\\boxed{x(x+1)}", "x^2+x"),
    ],
    "choice": [lambda text: choice.score("", text, "C"), lambda text: choice.score("", f"\\boxed{{{text}}}", "C")],
    "code": [code.last_program, lambda text: code.same_output(text, text + "x")],
}
"""Each function with the ways in which it may meet a text; their times are added."""


def grade_ms(readers: list[Callable[[str], object]], text: str) -> float:
    """Returns CPU milliseconds of this process."""
    began = time.process_time()
    for read in readers:
        with contextlib.suppress(AnswerRefused):
            read(text)
    return 1000 * (time.process_time() - began)


def measure(characters: int, repetitions: int) -> dict[str, dict[str, dict[str, Figure | float]]]:
    """Returns grader → text → `ms`, `half_ms` and `ratio`."""
    expression.same_expression("y", "x^2")  # loads what compares formulas
    found: dict[str, dict[str, dict[str, Figure | float]]] = {}
    for grader, readers in GRADERS.items():
        found[grader] = {}
        grade_ms(readers, "\\boxed{\\sqrt{2}}")  # what a reader imports and keeps at its first text
        for name, piece in TEXTS.items():
            text = piece * (characters // len(piece))
            half = text[: len(text) // 2]
            times = [(grade_ms(readers, text), grade_ms(readers, half)) for _ in range(repetitions)]
            whole, halves = (spread(column) for column in zip(*times, strict=True))
            ratio = whole["median"] / max(halves["median"], 1e-6)
            found[grader][name] = {"ms": whole, "half_ms": halves, "ratio": ratio}
    return found


def main() -> int:
    parser = common.parser(__doc__, repetitions=5)
    parser.add_argument("--characters", type=int, default=TARGET_CHARACTERS)
    options = parser.parse_args()
    found = measure(options.characters, options.repetitions)
    print(f"{'':<8}{'':<18}{'ms':>8}{'lowest':>8}{'highest':>9}{'half':>8}{'ratio':>7}")
    for grader, texts in found.items():
        for name, figures in texts.items():
            whole, half = figures["ms"], figures["half_ms"]["median"]
            times = f"{whole['median']:>8.2f}{whole['min']:>8.2f}{whole['max']:>9.2f}{half:>8.2f}"
            print(f"{grader:<8}{name:<18}{times}{figures['ratio']:>7.1f}")
    common.keep(options.json, found)
    most = MOST_MS * options.characters / TARGET_CHARACTERS
    slow = [f"{g}: {name}" for g, texts in found.items() for name, own in texts.items() if own["ms"]["median"] >= most]
    if slow:
        print(f"error: {most:g} ms or longer: {', '.join(slow)}", file=sys.stderr)
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())

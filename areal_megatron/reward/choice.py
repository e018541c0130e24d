"""Scores answers to multiple-choice questions: the letter in the last \\boxed{…}, or in the last "answer is X"."""

from __future__ import annotations

import re

from areal_megatron.reward.math import last_boxed

_BOXED = re.compile(
    r"[\s({*$]*+(?:\\(?:text|textbf|mathrm|mathbf)\s*+\{)?[\s(*]*+([A-Za-z])(?:[\s)}*.$]*+|[).:}].*)", re.S
)
"""A letter, alone or followed by the text of its choice: C, (C), C., \\text{C}, C) 42."""
_SAID = re.compile(r"(?i:answer\s*+(?:is|:|=))[\s:*(\"'$]*+([A-Z])\b")


def score(prompt: str, response: str, answer: str) -> float:
    """Returns 1.0 if the response chooses the letter `answer`, else 0.0; a box takes precedence over "answer is"."""
    boxed = last_boxed(response)
    if boxed is not None:
        found = _BOXED.fullmatch(boxed)
        return float(found is not None and found[1].upper() == answer)
    said = _SAID.findall(response)
    return float(bool(said) and said[-1] == answer)

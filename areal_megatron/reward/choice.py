"""Scores answers to multiple-choice questions: the letter in the last \\boxed{…}, or in the last "answer is X".

A response that names several letters has chosen none.
"""

from __future__ import annotations

import re

from areal_megatron.data.boxed import last_boxed

_FORMATTING = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|bf|rm)(?![A-Za-z])|\\[ ,;:!]|\\quad|[{}$*]")
_CHOSEN = re.compile(r"[\s(]*+([A-Za-z])(?:[\s).]*+$|\s*+[).:])")
"""A letter, alone or followed by the text of its choice: C, (C), C., C) 42."""
_SAID = re.compile(
    r"(?i:answer\s*+(?:is|:|=)|(?:choice|option)\s++is)"
    r"(?:[\s:*(\"'$]|\\(?:text|textbf|mathrm|mathbf)\s*+\{)*+(?i:(?:option|choice|letter)[\s*(\"'$]++)?+"
    r"(?:([A-Z])(?![A-Za-z])|(?i:not)\b)"
)
_ALONE = re.compile(r"[\s(*$]*+([A-Z])[\s).*$]*+")
_ANOTHER = re.compile(
    r"[\s?.)\"']*(?:[,;/&|]|\(?\b(?i:or|and)\b)[\s,]*(?:(?i:or|and|maybe|perhaps|possibly|even)\s+)*\(?[A-HJ](?![A-Za-z0-9'’-])"
    r"|(?:[\s,.;:()]*(?<![A-Za-z])[A-HJ](?![A-Za-z0-9]))+[\s.)]*(?:$|\n)"
)
"""After a letter: another one, after a comma or a word, or as all there is."""
_LABEL = re.compile(r"(?:^|[\s,;/&|])\(?[A-HJ]\)")
_REST = 300
"""How many characters after a letter are searched for others."""


def score(prompt: str, response: str, answer: str) -> float:
    """Returns 1.0 if the response chooses the letter `answer`, else 0.0; a box takes precedence over "answer is"."""
    return float(chosen(response) == answer)


def chosen(response: str) -> str | None:
    """Returns the letter that a response chooses, as a capital; None if it chooses none or several."""
    if (boxed := last_boxed(response)) is not None:
        boxed = _FORMATTING.sub(" ", boxed[:_REST])
        if not (found := _CHOSEN.match(boxed)):
            return None
        rest = boxed[found.end() :]
        return None if _ANOTHER.match(rest) or _LABEL.search(rest) else found[1].upper()
    if len(response) <= _REST and (found := _ALONE.fullmatch(response)):
        return found[1]
    *_, said = [None, *_SAID.finditer(response)]
    if not said or _ANOTHER.match(_FORMATTING.sub(" ", response[said.end() : said.end() + _REST])):
        return None
    return said[1]

"""Scores answers to multiple-choice questions: the letter in the last \\boxed{…}, or what a response says last that it
chooses.

A response that names several letters has chosen none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from areal_megatron.data.boxed import last_boxed

_FORMATTING = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|bf|rm)(?![A-Za-z])|\\[ ,;:!()\[\]]|\\quad|[{}$*]")
_LABELLED = r"(?i:(?:the\s+)?(?:option|choice|letter|answer)(?:\s+is)?)"
_CHOSEN = re.compile(rf"\s*+(?:{_LABELLED}[\s:]++)?[\s(]*+([A-Za-z])(?:[\s).]*+$|\s*+[).:])")
"""A letter, alone or followed by the text of its choice: C, (C), C., C) 42, Option C."""
_BESIDE_TEXT = re.compile(r"[\s$]*+\(?([A-Z])\)?[\s$]*+\\(?:text|textbf|textrm|mathrm|mathbf)\s*+\{\s")
"""A letter before the text of its choice: C \\text{ Paris}, unlike \\text{A decrease}."""
_PLACE = re.compile(r"####([^\n]*+)|<answer>((?:(?!</?answer>).)*+)", re.DOTALL)
_SAID = re.compile(
    r"(?i:answer\s*+(?:is|:|=)|(?:choice|option)\s++is)(?i:\s+(?:therefore|thus|hence|then|clearly)\b,?)?"
    r"(?:[\s:*(\"'$]|\\[(\[]|\\(?:text|textbf|mathrm|mathbf)\s*+\{)*+(?i:(?:option|choice|letter)[\s*(\"'$]++)?+"
    r"(?:([A-Z])(?![A-Za-z])|(?i:not)\b)"
)
_SENTENCE = re.compile(
    r"(?:^|(?<=\n)|(?<=[.!?>]\s))[\s*]*+(?:(?i:therefore|thus|hence|so|finally|consequently|(?:in\s)?conclusion|final\sanswer)\b[\s,:]*+)?"
    r"(?:(?i:I|we)(?:['’]ll|\s+will|\s+would)?\s+(?i:choose|chose|pick|select|go\s+with)\s+(?:{label}[\s:]++)?"
    r"[(*$]*+([A-J])[)*$]*+(?=[\s]*+(?:[.!]|$|\n|,\s*(?:because|since|as)\b|\s(?:because|since)\b))"
    r"|(?:{label}[\s:]++)?[(*$]*+([A-J])[)*$]*+\s+(?i:is|must\sbe)\s+(?i:the\s+)?(?i:correct|right|best)"
    r"(?:\s+(?i:answer|choice|option|one))?(?=\s*+[*]*+(?:[.!]|$|\n)))".replace("{label}", _LABELLED)
)
"""A sentence that chooses: "Therefore, C is correct." "I choose option C." """
_ALSO = re.compile(
    r"(?<![A-Za-z'’-])([A-J])[)*$]*\s+(?:is|may be|could be|are)\s+(?:also\s+)?(?:correct|right|better|best)"
)
_ALONE = re.compile(rf"\s*+(?:{_LABELLED}[\s:]++)?[\s(*$]*+([A-Z])[\s).*$]*+")
_LABEL_AND_TEXT = re.compile(
    r"\s*+\**+(?:\(([A-J])\)|([A-J])[).])\**+\s+(?!(?:is|are|was|and|or|not|must|can|may|might|would|could|does|seems)\b)(?:(?![.!?]\s)[^\n])*+\s*+"
)
"""A response of one line that is a choice as it was offered: C. Paris, (C) Paris."""
_ANOTHER = re.compile(
    r"[\s?.)\"']*(?:[,;/&|]|\(?\b(?i:or|and)\b)[\s,]*(?:(?i:or|and|maybe|perhaps|possibly|even)\s+)*\(?[A-HJ](?![A-Za-z0-9'’-])"
    r"|(?:[\s,.;:()]*(?<![A-Za-z])[A-HJ](?![A-Za-z0-9]))+[\s.)]*(?:$|\n)"
)
"""After a letter: another one, after a comma or a word, or as all there is."""
_LABEL = re.compile(r"(?:^|[\s,;/&|])\(?[A-HJ]\)")
_REST = 300
"""How many characters after a letter are searched for others."""
_END = 1000
"""How many of the last characters of a response are searched for a sentence that chooses."""


def score(prompt: str, response: str, answer: str) -> float:
    """Returns 1.0 if the response chooses the letter `answer`, else 0.0; a box takes precedence over "answer is"."""
    return float(chosen(response) == answer)


def chosen(response: str) -> str | None:
    """Returns the letter that a response chooses, as a capital; None if it chooses none or several."""
    if (boxed := last_boxed(response)) is not None:
        return _letter_of(boxed)
    if len(response) <= _REST:
        if found := _ALONE.fullmatch(_FORMATTING.sub(" ", response)):
            return found[1]
        found = _LABEL_AND_TEXT.fullmatch(response)
        if found and found.lastindex and not _LABEL.search(response[found.end(found.lastindex) + 1 :]):
            return found[found.lastindex]
    *_, (_, letter) = [(-1, None), *sorted(_said(response), key=lambda said: said[0])]
    return letter


def _letter_of(text: str) -> str | None:
    """Returns the letter that a text of nothing but an answer chooses."""
    beside = _BESIDE_TEXT.match(text[:_REST])
    text = _FORMATTING.sub(" ", text[:_REST])
    found = _CHOSEN.match(text)
    if not found:
        return beside[1] if beside and not _LABEL.search(text[beside.end(1) :]) else None
    rest = text[found.end() :]
    return None if _ANOTHER.match(rest) or _LABEL.search(rest) else found[1].upper()


def _said(response: str) -> Iterator[tuple[int, str | None]]:
    """Yields the places where a response says what it chooses, with the letter; None if it is several or denied."""
    *_, place = [None, *_PLACE.finditer(response)]
    if place:
        yield place.start(), _letter_of(next(group for group in place.groups() if group is not None))
    *_, said = [None, *_SAID.finditer(response)]
    if said:
        several = _ANOTHER.match(_FORMATTING.sub(" ", response[said.end() : said.end() + _REST]))
        yield said.start(), None if several else said[1]
    begin = max(len(response.rstrip()) - _END, 0)
    end = response[begin:].rstrip().rpartition("\n")[2]
    sentences = list(_SENTENCE.finditer(end))
    if sentences:
        letters = {found[1] or found[2] for found in sentences} | set(_ALSO.findall(end[sentences[-1].end() :]))
        yield len(response), letters.pop() if len(letters) == 1 else None

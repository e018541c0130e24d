"""Text from outside as it is shown to people: what a model, a template, a row, a hub, a tool or a log says can neither
command a terminal nor show itself in another order, or hide.

Programs call `guard` first, so that no print can forget it.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from io import TextIOWrapper
from types import TracebackType
from typing import Any, TextIO

_JOINERS = "\u200c\u200d"
"""They shape the letters of Persian and of Indian scripts, and make one emoji of several."""
_VARIATIONS = "".join(map(chr, range(0xFE00, 0xFE10)))
"""They choose between two looks of the character before, such as ❤ and ❤️."""
_BOTH = _JOINERS + _VARIATIONS
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")
"""Letters and marks that show nothing: Unicode's Default_Ignorable_Code_Point, as far as Python calls it printable."""


def visible(text: str) -> str:
    """Returns a text of several lines as it is shown: line breaks stay, tabs become spaces, the rest is `escaped`."""
    if text.isascii() and text.isprintable():
        return text
    return "\n".join(escaped(line.expandtabs()) for line in text.split("\n"))


def escaped(text: str) -> str:
    """Returns a text of one line in which whatever does not show itself is written as Python would: `\\x1b`.

    That is: control characters and line breaks, format characters (overrides of direction, zero width, tags), halves of
    surrogate pairs, private and unassigned characters, letters that are blank. Spaces of any width stay. Joiners and
    variation selectors stay singly where they change what is seen: after a character that is not ASCII, or a digit.
    """
    if text.isprintable() and not _BLANK.search(text):
        return text
    found, follows = [], ""
    for c in text:
        if _shows(c):
            found.append(c)
            follows = _BOTH if not c.isascii() else _VARIATIONS if c in "0123456789#*" else ""
        elif c in follows:
            found.append(c)
            follows = "" if c in _JOINERS else _JOINERS
        else:
            found.append(c.encode("unicode_escape").decode())
            follows = ""
    return "".join(found)


@lru_cache(maxsize=1 << 16)
def _shows(c: str) -> bool:
    return not _BLANK.match(c) and (c.isprintable() or unicodedata.category(c) == "Zs")


def speak_utf8() -> None:
    """Has stdout and stderr escape what the encoding of the locale lacks, and Python programs that this one starts use
    UTF-8 for all text, whatever the locale."""
    os.environ["PYTHONUTF8"] = "1"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def guard() -> None:
    """Has stdout and stderr write what is `visible` from now on; only the colours of terminal.Terminal pass. Does what
    `speak_utf8` does, too, and has Ctrl-C end the program with a word in place of a traceback."""
    speak_utf8()
    sys.excepthook = _tell
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _Guarded):
            setattr(sys, name, _Guarded(stream))


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


class _Guarded:
    """A stream that writes the visible part of a text. To libraries it is no terminal, or they would colour their
    output. A reader who leaves, as `head` does, ends no program: what comes later is written nowhere."""

    def __init__(self, unguarded: TextIO):
        self.unguarded = unguarded

    def write(self, text: str) -> int:
        try:
            self.unguarded.write(visible(text))
        except BrokenPipeError:
            self._write_nowhere()
        return len(text)

    def flush(self) -> None:
        try:
            self.unguarded.flush()
        except BrokenPipeError:
            self._write_nowhere()

    def _write_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.unguarded.fileno())
        os.close(nowhere)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)

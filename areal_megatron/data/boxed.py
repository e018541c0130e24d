"""The last \\boxed{…} of a text, in responses and in published solutions."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*+\{")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\.|\{++|\}++", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Returns the content of the last complete \\boxed{…} or \\fbox{…}, with balanced braces; None if there is none."""
    depth, opened, last = 0, [], (-1, -1)
    first = BOX.search(text)
    for found in _BRACES.finditer(text, first.start()) if first else ():
        piece = found[0]
        if piece[0] == "{":
            depth += len(piece)
        elif piece[0] == "}":
            while opened and opened[-1][0] > depth - len(piece):
                level, begin = opened.pop()
                last = max(last, (begin, found.start() + depth - level))
            depth -= len(piece)
        elif len(piece) > 2:
            depth += 1
            opened.append((depth, found.end()))
    return text[last[0] : last[1]] if last[0] >= 0 else None

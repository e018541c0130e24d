"""JSON that others have written: rows of data sets, models, messages of agents, replies of services."""

from __future__ import annotations

import json
import re
from typing import Any

MOST_LEVELS = 100
"""Most lists and objects within each other: what can be read can then also be compared, copied and written."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text, bytes of which are UTF-8.

    Raises ValueError, which says what is wrong, for anything else; also for more than MOST_LEVELS levels, and for half
    of a surrogate pair, which JSON can spell but no file, message or tokenizer takes.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    if text.count("[") + text.count("{") > MOST_LEVELS and _is_deep(value):
        raise ValueError(_too_deep())
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"\\u{ord(e.object[e.start]):04x} is half of a character") from None
    return value


def _too_deep() -> str:
    return f"more than {MOST_LEVELS} lists and objects within each other"


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS):
        within = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in within if isinstance(child, dict | list)]
        if not level:
            return False
    return True

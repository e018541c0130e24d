"""JSON that others have written: rows of data sets, models, messages of agents, replies of services, and records of
runs, whose writer may have been of another release or have died."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.errors import first_line, printable

Record = TypeVar("Record")

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


def read_record(content: bytes, kind: type[Record], place: Path | str) -> Record:
    """Returns a record of a run, JSON, as `kind`, a type that msgspec knows; a dataclass has no other fields.

    Raises ConfigError, one line that begins with `place`, the file or FILE:LINE, for anything else.
    """
    try:
        if is_dataclass(kind):
            known = {field.name for field in fields(kind)}
            if others := msgspec.json.decode(content, type=dict[str, Any]).keys() - known:
                raise ValueError(f"it has {min(others)}")
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{place} is of another release or damaged: {printable(first_line(e))}") from None


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

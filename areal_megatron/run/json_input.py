"""JSON that others have written: rows of data sets, models, messages of agents, replies of services, and records of
runs, whose writer may have been of another release or have died."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.process.errors import first_line, printable

Record = TypeVar("Record")

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""A number or size of files in a record: what a damaged byte has made of it is none of them."""
MOST_LEVELS = 100
"""Most lists and objects within each other: what can be read can then also be compared, copied and written."""
MOST_BYTES = 64 * 2**20
"""Bytes of the largest file that is read: indices of models of a thousand shards have a few of these."""
_KINDS = {str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds, of a model's description for example.

    Raises OSError, and ValueError with the fault: the file must be a regular one of at most MOST_BYTES, and its object
    must have neither a repeated key nor a number that is not finite.
    """
    content = read_regular(file)
    try:
        found = parse_json(content, exact=True)
    except ValueError as e:
        raise ValueError(f"is not JSON: {e}") from None
    if not isinstance(found, dict):
        raise ValueError("holds no JSON object")
    return found


def read_regular(file: Path, most: int = MOST_BYTES) -> bytes:
    """Returns what a file holds. Raises OSError, and ValueError for a pipe, a device or the like, which may never end,
    and for more than `most` bytes."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("is no regular file")
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"has more than {most >> 20} MiB")
    return content


def parse_json(text: str | bytes, exact: bool = False) -> Any:
    """Returns the value of a JSON text, bytes of which are UTF-8.

    Raises ValueError with the fault for anything else; also for more than MOST_LEVELS levels, and for half of a
    surrogate pair, which JSON can spell but no file, message or tokenizer takes. `exact`: also for a repeated key in
    one object, and for a number that is not finite.
    """
    text = text.decode() if isinstance(text, bytes) else text
    strict = {"object_pairs_hook": _once, "parse_constant": _no_number, "parse_float": _finite} if exact else {}
    try:
        value = json.loads(text, **strict)
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


def kind_of(value: Any) -> str:
    """Returns what a value is in the words of JSON, or the name of a type that JSON lacks."""
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def kinds_expected(kinds: Sequence[type]) -> str:
    """Returns such types as a list of words: a text, a number or a list."""
    named = [*dict.fromkeys(word for kind, word in _KINDS.items() if kind in kinds)]
    return " or ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made and made[key] != value:
            raise ValueError(f"it has {printable(repr(key), 60)} twice, with different values")
        made[key] = value
    return made


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number that can be computed with")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(printable(text, 40))


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

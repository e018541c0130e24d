"""Replaces names of libraries, for a version that has none of its own settings for what is wanted."""

from __future__ import annotations

from typing import Any


def patch(holder: Any, name: str, value: Any) -> Any:
    """Binds `name` of a library's module or class to `value`; returns what it was bound to.

    Raises RuntimeError if the library has no such name: its code has changed, and to bind it would have no effect.
    """
    try:
        original = getattr(holder, name)
    except AttributeError:
        place = ".".join(filter(None, (getattr(holder, "__module__", ""), holder.__name__)))
        raise RuntimeError(
            f"{place} has no {name}, which is to be replaced: install the versions of the lock file"
        ) from None
    setattr(holder, name, value)
    return original

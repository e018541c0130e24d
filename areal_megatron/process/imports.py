"""Imports of large libraries, in less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def uncollected() -> Iterator[None]:
    """Has no collection of garbage visit what is imported meanwhile, now or later.

    vLLM's million objects are imported in three quarters of the time, and no later collection stops this process for
    the half second that it takes to visit them all: a rank that stops has all others wait.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def absent(name: str) -> Iterator[None]:
    """Lets libraries that use the module `name` where there is one be imported without it."""
    modules = cast(dict[str, Any], sys.modules)
    held = {name: modules[name]} if name in modules else {}
    modules[name] = None  # an import then fails as if it were not installed
    try:
        yield
    finally:
        del modules[name]
        modules.update(held)

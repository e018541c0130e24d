"""What a step of the evidence is made of: parts that find figures one after another. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    device: str
    """`cuda` or `cpu`."""
    small: bool
    """Tiny sizes: the figures mean nothing, everything runs."""
    folder: Path
    """Where the step may write."""

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Finding:
    name: str
    value: float | str
    unit: str = ""
    shown: bool = True
    """Whether the table has it; the JSON file has all."""
    more: Any = None
    """What the JSON file has beside the value."""


class Skip(Exception):
    """A part cannot run here; says why."""


Part = Callable[[Options], Iterator[Finding]]
"""Yields what it finds as it finds it: a step that is ended at its limit keeps what it has. Each step is a module of
this package with `PARTS`, name → part. A part that raises ends alone; the other parts of its step still run."""

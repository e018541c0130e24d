"""Rich's console, for texts from outside: their control characters are escaped, and nothing in them is markup."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment

from areal_megatron.process.shown import visible


class Terminal(Console):
    """Prints on `stream`, stdout by default, with colours that shown.guard lets through.

    Example:
        Terminal().print(Text("what a model wrote", "dim"))
    """

    def __init__(self, stream: TextIO | None = None, **options: Any):
        stream = stream or sys.stdout
        plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
        super().__init__(file=getattr(stream, "unguarded", stream), **plain | options)

    def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

"""A launcher's output, often redirected to a file on the disk that its run fills."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO


def never_fail() -> None:
    """Makes printing on stdout and stderr succeed from now on, whatever becomes of the text: neither a full disk nor a
    closed pipe may end a launcher's run."""
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _Unfailing):
            setattr(sys, name, _Unfailing(stream))


class _Unfailing:
    """A stream that keeps unwritten text, as buffers do, and tries again at the next write."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    @property
    def unguarded(self) -> _Unfailing:
        return _Unfailing(getattr(self._stream, "unguarded", self._stream))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

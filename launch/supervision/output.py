"""What a launcher prints, which is often a file on the disk that its run fills."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO


def never_fail() -> None:
    """Makes printing on stdout and stderr succeed from now on, whatever becomes of the text: a launcher whose output
    goes to a full disk, or into a pipe that nobody reads any more, is not to end its run for that."""
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _Unfailing):
            setattr(sys, name, _Unfailing(stream))


class _Unfailing:
    """A stream that keeps what it cannot write, as buffers do, and tries again with what is written next."""

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
    def unguarded(self) -> TextIO:
        return _Unfailing(getattr(self._stream, "unguarded", self._stream))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

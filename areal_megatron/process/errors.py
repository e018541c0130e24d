"""What an error says, for messages of one line, and how often it is said."""

import logging

from areal_megatron.process.shown import escaped


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def told(error: BaseException) -> str:
    """Returns the class of an error of the user's code, and its text if it has one that can be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as e:  # its __str__ is the user's too
        return f"{type(error).__name__}, whose text raises {type(e).__name__}"


def first_cause(error: BaseException) -> BaseException:
    """Returns the first error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def printable(text: str, most: int = 200) -> str:
    """Returns the first `most` characters of a text from outside as shown.escaped does: it can neither end a line of a
    log nor command a terminal."""
    return escaped(text[:most]) + "…" * (len(text) > most)


def worth_a_line(count: int) -> bool:
    """Whether the count-th event of a kind that strangers or policies cause is logged: the first ten are, then every
    thousandth."""
    return count <= 10 or count % 1000 == 0


class Rarely(logging.Filter):
    """Lets each kind of message of one level through as often as is worth a line, and all of other levels."""

    def __init__(self, level: int):
        super().__init__()
        self._level = level
        self._counts: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != self._level:
            return True
        kind = str(record.msg).partition("\n")[0]  # asyncio has what it was about in the lines below
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return worth_a_line(self._counts[kind])

"""Why a process of a run has ended, read from its exit code and its log, and whether it would only end so again."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_megatron.process.errors import printable

if TYPE_CHECKING:
    from areal_megatron.launch.supervision.hosts import Remote
    from areal_megatron.launch.supervision.processes import Child

REFUSED = 2
"""The exit code of a process that refuses an input that the user can fix."""
_OWN = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}
"""Signals by which a process ends for an error of its own."""
_SEARCHED_BYTES = 1 << 18
_LONGEST_CAUSE = 500
_STAMP = re.compile(r"^(\([^()]*\) ?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [-\d:., ]+(\[[^]]*\])? ?)?")
"""What vLLM's log puts before each line of a traceback."""
_GROUP = re.compile(r"^(?: *(?:\+-|[|+]))+ ?")
"""What Python puts before each line of a traceback of an ExceptionGroup."""
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):$|^-{10,} \d+ -+$")
"""What precedes an exception: with its stack, or within a group."""
_RAISED = re.compile(r"^[^\W\d][\w.]*(:|$)")
_AFTERWARDS = re.compile(r"^(Exception ignored |Error in atexit)")
"""What precedes the traceback of an error of a process that ends already."""
_SAID = re.compile(r"^(?:[\w.-]+: )?error: (.+)|^(Fatal Python error: .+)|^  what\(\):  (.+)|^\S*python[\d.]*: (.+)")
_ABORTED = "Fatal Python error: Aborted"
"""What follows the reason that a library in C++ gives."""
_POINTS_UP = re.compile(r"\babove\b|ExceptionGroup|EngineDeadError")
"""Errors that only say that there has been another."""
_VARYING = re.compile(r"[\w.+-]*\d[\w.+-]*|\btmp\w{8}\b|\b([KMGT]i?B|nan|inf)\b")
"""What the same error says differently the next time: numbers and their units, addresses, ids, temporary files."""
_WORD = re.compile(r"\w+")
_ALIKE = 0.75
"""Two errors are the same if they share so much of the words that either has."""


@dataclass(frozen=True)
class Failure:
    """The end of a process that should not have ended, or not so."""

    name: str
    code: int
    """Exit code; negative if that signal ended the process."""
    log: Path
    last_lines: str
    """The end of what it has written to its log since it was started."""
    cause: str
    """The line there that says why; "" if there is none."""
    ended: str = ""
    """Why this launcher ended it, if it did."""
    out_of_memory: bool = False
    """Whether the kernel has ended processes of its machine at that time, since memory had run out."""
    repeated: bool = False
    """Whether it is an earlier failure once more (Failures)."""

    @classmethod
    def of(cls, process: Child | Remote, ended: str = "") -> Failure:
        """`process` has ended; `ended` says why, if this launcher has ended it."""
        said = cause(process.last_bytes(_SEARCHED_BYTES).decode(errors="replace"))
        lines, code, out_of_memory = process.last_lines(), process.exit_code, process.out_of_memory
        assert code is not None
        return cls(process.name, code, process.log, lines, said, ended, out_of_memory)

    @property
    def is_refusal(self) -> bool:
        return self.code == REFUSED

    @property
    def is_final(self) -> bool:
        """Whether another try would only fail again."""
        return self.is_refusal or self.repeated

    @property
    def signature(self) -> frozenset[str] | None:
        """The words that say how it failed; None if a signal from outside ended the process, which says nothing about
        its next start."""
        if self.out_of_memory:
            return frozenset({"out of memory"})
        name = signal_name(-self.code) if self.code < 0 else ""
        if name and name not in _OWN and not (self.ended and self.cause):
            return None
        if self.cause:  # of any exit code: vLLM's server ends with 0, or is ended, when its other process has failed
            return _words(self.cause)
        if name:
            return frozenset({name})
        *_, last = ["", *self.last_lines.splitlines()]
        return _words(last) | {f"exit code {self.code}"}

    @property
    def line(self) -> str:
        """One line that says who ended, how, and why."""
        if self.is_refusal and self.cause:
            return f"error: {self.name}: {self.cause}; its log: {self.log}"
        again = ", twice in the same way and at the same point; fix that, then resume=auto continues" * self.repeated
        return f"error: {self.name} {self._how}{again}; its log: {self.log}"

    @property
    def text(self) -> str:
        """The end of its log, and then `line`; that alone if it is the end of the log."""
        return self.line if self.is_refusal and self.cause else f"{self.last_lines}\n{self.line}"

    @property
    def _how(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}" + f": {self.cause}" * bool(self.cause)
        how = f"was killed by {signal_name(-self.code)}"
        if self.ended:
            how = f"{self.ended}: it was ended"
        elif self.out_of_memory:
            how += ", as the kernel does when memory runs out"
        return how + f"; its last error: {self.cause}" * bool(self.cause)


class Failures:
    """The failures of a run, by whom they are compared: a pool that is started again as a whole, or one engine.

    Example:
        failures = Failures()
        failures.repeats("trainer", failure, version=3)  # False
        failures.repeats("trainer", failure, version=3)  # True: the same at the same point
    """

    def __init__(self):
        self._known: dict[str, list[tuple[frozenset[str] | None, int]]] = {}
        """The failures since something was trained that had not been before: signature and version, whoever failed."""

    def repeats(self, whose: str, failure: Failure, version: int, served: bool = True) -> bool:
        """Notes a failure, and returns whether there has been the same without progress in between, whatever other ones
        came in between.

        `version`: how far the run had come when it failed. A later version than before is progress: the same failure
        after it is no sign of a permanent fault, except in an engine that has not `served` since.
        """
        known, now = self._known.get(whose, []), failure.signature
        if served and version > max((at for _, at in known), default=version):
            known = []
        same = [one for one in known if _is_same(one[0], now)]
        self._known[whose] = [*(one for one in known if one not in same), (now, version)]
        return any(at == version or not served for _, at in same)


def signal_name(number: int) -> str:
    """Returns what a signal is called; real-time signals have numbers alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _words(line: str) -> frozenset[str]:
    return frozenset(_WORD.findall(_VARYING.sub("", line)))


def _is_same(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    """Whether two signatures are of the same failure; sets are printed in another order each time."""
    if one is None or other is None:
        return False
    return one == other or len(one & other) >= _ALIKE * len(one | other)


def cause(text: str) -> str:
    """Returns the line of a log that says why its process has ended: the last exception or line `error: …`, unless it
    only points to one above; "" if there is none."""
    found, before, within, late = "", "", False, False
    lines = (_bare(line).rstrip() for line in text.splitlines())
    for line in lines:
        if _TRACEBACK.search(line):
            within, late = True, bool(_AFTERWARDS.match(before))
        elif within and _RAISED.match(line):
            within = False
            if not (found and (late or _POINTS_UP.search(line))):
                found = f"{line} {next(lines, '').strip()}" if line.endswith(":") else line
        elif not within and (said := _SAID.match(line)) and not (found and line == _ABORTED):
            found = next(filter(None, said.groups()))
        before = line
    return printable(found.strip(), _LONGEST_CAUSE)


def _bare(line: str) -> str:
    return _GROUP.sub("", _STAMP.sub("", line))

"""A reward worker: scores one answer after the other, in a process that can be killed. Started by workers.py.

A frame on stdin or stdout is four bytes of length and a msgpack message. The first one that a worker writes is Ready.
Then it reads lists of Answer and AnswerGroup, and writes a Scored for each as soon as it is known. Whatever the
functions print goes to stderr.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from areal_megatron.config import ConfigError, ServedModelConfig, config_file
from areal_megatron.config.user_function import place_of
from areal_megatron.data.boxed import last_boxed
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.process.shown import guard
from areal_megatron.process.streams import take_stdin, take_stdout
from areal_megatron.reward.asking import Asking, set_asking
from areal_megatron.reward.function import OWN_SHARE, PURE, WrongResult, load_function, scored, takes_row
from areal_megatron.reward.group import GroupAnswer, checked_terms, load_group_function
from areal_megatron.reward.no_score import AnswerRefused, NeverScored, ServiceAway
from areal_megatron.run.folder import RunFolder

HEADER = struct.Struct("<I")
_AWAY_PAUSE_S = 1.0
_AWAY_PAUSE_SHARE = 0.1
"""The longest pause before a service that is away is asked again, also as a share of reward.timeout_s: a worker says
something within that."""
_LONGEST_PROBLEM = 500
"""Characters of an exception's text that are logged: it may quote a response."""
MISTAKES = (TypeError, AttributeError, NameError, ImportError, ConfigError)
"""What a mistake in a function's code raises; the last, a question to a model that is not served."""
MEMORY_MB = 512
"""Memory in MB that `math` may allocate beyond its loaded worker, since it evaluates a policy's text."""


class Ready(msgspec.Struct):
    """The first message of a worker."""

    problem: str = ""
    """Why the reward function or the tokenizer cannot be loaded; empty: the worker is ready."""
    takes_row: bool = False
    """Whether the reward function wants the row of the data set."""


class Answer(msgspec.Struct, tag=True):
    """An answer to score."""

    prompt: str
    response: str
    answer: str
    """The right answer."""
    tokens: bytes | None = None
    """Token ids as int32, in place of `response`: workers decode them, to spare the controller's event loop."""
    where: str = ""
    """`path:row` of the prompt, for messages."""
    cut: bool = False
    """Whether the response ends where its tokens were used up."""
    row: dict[str, Any] | None = None
    """The columns of the prompt's row, for functions that take them."""


class AnswerGroup(msgspec.Struct, tag=True):
    """Answers to one prompt, for the group function to add terms to."""

    prompt: str
    answer: str
    """The right answer."""
    members: list[GroupAnswer]
    """Without `response` and `versions`, which workers fill in."""
    tokens: list[bytes]
    """Token ids of each member's response, as int32."""
    versions: list[bytes]
    """The policy version that sampled each token of it, as int32."""
    where: str = ""
    """`path:row` of the prompt, for messages."""


class Scored(msgspec.Struct):
    """The score of an answer, or the terms of a group."""

    score: float = 0.0
    problem: str = ""
    """Why the function failed; then there is no score."""
    feedback: str = ""
    refused: bool = False
    """Whether the reward function did not accept the form of the answer; the score is 0 then."""
    last: bool = False
    """Whether the worker must be replaced now, since an answer has used up its memory."""
    away: bool = False
    """Whether this is no score yet: the service that knows it is away, see `problem`, and will be asked again."""
    killed: bool = False
    """Whether the function failed because its process was killed from outside, as the kernel does without memory."""
    place: str = ""
    """Where in the function's code it failed, `file:line`; empty if its process ended."""
    is_mistake: bool = False
    """Whether that is a mistake of the function's author for certain."""
    may_pass: bool = False
    """Whether the function failed since a file or a connection did, which may be there later."""
    raised: bool = False
    """Whether the function raised one of MISTAKES, in place of returning something else than it may."""
    never: bool = False
    """Whether there would be no score if it were tried again."""
    ended: bool = False
    """Whether there is no score since the function ended its process, or was killed because it took too long."""
    terms: dict[str, list[float]] = {}
    """What the group function adds to the reward of each answer, by name."""


class Functions:
    """What a worker calls: the reward function and, if there is one, the group function; with the tokenizer that
    decodes answers."""

    def __init__(self, name: str, group_name: str, timeout_s: float, model: str, run: str, stand_ins: str):
        """`model` is the folder of the tokenizer and `run` the run's, or empty, and so may be `group_name`.
        `stand_ins`: the names of the served models without a run, with commas. Raises ConfigError for what cannot be
        loaded."""
        self._name, self._timeout_s = name, timeout_s
        self._function = load_function(name, timeout_s, run)
        self._group_function = load_group_function(group_name) if group_name else None
        self._tokenizer = Tokenizer(model) if model else None
        self._limit = _limit_memory() if name == "math" and sys.platform == "linux" else None
        self.takes_row = takes_row(self._function)
        self._asking = None
        if group_name or (":" in name and "://" not in name):  # the user's
            self._asking = _asking(run, stand_ins, OWN_SHARE * timeout_s)

    def results(self, requests: list[Answer | AnswerGroup]) -> Iterator[Scored]:
        """Yields the result of each request; before it, one that says `away` as often as its service is asked again."""
        self._announce(requests)
        for request in requests:
            while (result := self._result(request)).away:
                yield result
                time.sleep(min(_AWAY_PAUSE_S, _AWAY_PAUSE_SHARE * self._timeout_s))
            result.last = result.last or self._is_worn_out()
            yield result

    def _announce(self, requests: list[Answer | AnswerGroup]) -> None:
        """Tells a function that knows several scores at once which ones are wanted."""
        if expect := getattr(self._function, "expect", None):
            expect([(each.prompt, self._response(each), each.answer) for each in requests if isinstance(each, Answer)])

    def _result(self, request: Answer | AnswerGroup) -> Scored:
        is_group = isinstance(request, AnswerGroup)
        try:
            if self._asking:
                self._asking.begin()
            result = self._terms(request) if is_group else self._score(request)
            if self._asking:
                self._asking.finish()
            return result
        except ServiceAway as e:
            return Scored(problem=_problem(e, request.where), away=True)
        except (Exception, SystemExit) as e:  # the function is the user's
            raised = isinstance(e, MISTAKES)
            at_fault = self._group_function if is_group else self._function
            lacks = "" if is_group else _lacking_column(e, request)
            is_known = raised or lacks or isinstance(e, (WrongResult, SystemExit))
            return Scored(
                problem=_problem(e, request.where) + lacks,
                last=isinstance(e, MemoryError),
                place=place_of(e, at_fault) if at_fault else "",
                is_mistake=bool(at_fault and is_known),
                may_pass=any(isinstance(one, OSError) for one in _causes(e)),
                raised=raised,
                never=isinstance(e, NeverScored),
            )

    def _score(self, answer: Answer) -> Scored:
        text = self._response(answer)
        if answer.cut and self._name in PURE and last_boxed(text) is None:
            return Scored()  # whatever it says last is no final answer
        row = (answer.row or {}) if self.takes_row else None
        try:
            found, feedback = scored(self._function, answer.prompt, text, answer.answer, row)
        except AnswerRefused as e:
            return Scored(feedback=str(e).encode(errors="replace").decode(), refused=True)
        feedback.encode()  # raises for what is no Unicode, which could not be sent
        return Scored(found, feedback=feedback)

    def _terms(self, group: AnswerGroup) -> Scored:
        for member, tokens, versions in zip(group.members, group.tokens, group.versions, strict=True):
            member.response = self._text(tokens)
            member.versions = np.unique(np.frombuffer(versions, np.int32)).tolist()
        assert self._group_function is not None
        terms = self._group_function(group.prompt, group.answer, group.members)
        return Scored(terms=checked_terms(terms, len(group.tokens)))

    def _response(self, answer: Answer) -> str:
        return answer.response if answer.tokens is None else self._text(answer.tokens)

    def _text(self, tokens: bytes) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(np.frombuffer(tokens, np.int32).tolist())

    def _is_worn_out(self) -> bool:
        """Whether answers have left half of the limit in use, as after a MemoryError that the function caught."""
        return self._limit is not None and _held_bytes() > self._limit - (MEMORY_MB << 19)


def _asking(run: str, stand_ins: str, limit_s: float) -> Asking:
    """Returns what functions of the user ask served models with, and has `ask` use it. Raises ConfigError."""
    from areal_megatron.reward import served  # aiohttp takes a while to import

    if run:
        folder = RunFolder(run)
        models = served.ServedModels(config_file.load(folder.config).served_models, folder)
    else:
        models = served.StandIns({one: ServedModelConfig() for one in stand_ins.split(",") if one})
    set_asking(asking := Asking(models, limit_s))
    return asking


def serve(settings: Sequence[str], requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers requests until their stream ends; `settings`: as in Functions, as texts."""
    name, group_name, timeout_s, model, run, stand_ins = settings

    def reply(message: msgspec.Struct) -> None:
        frame = msgspec.msgpack.encode(message)
        replies.write(HEADER.pack(len(frame)) + frame)
        replies.flush()

    try:
        functions = Functions(name, group_name, float(timeout_s), model, run, stand_ins)
    except ConfigError as e:
        reply(Ready(str(e)))
        return
    reply(Ready(takes_row=functions.takes_row))
    decode = msgspec.msgpack.Decoder(list[Answer | AnswerGroup]).decode
    while header := requests.read(HEADER.size):
        for result in functions.results(decode(requests.read(HEADER.unpack(header)[0]))):
            reply(result)


def _problem(error: BaseException, where: str) -> str:
    text = " ".join(str(error)[:_LONGEST_PROBLEM].split()).encode(errors="backslashreplace").decode()
    kind = "" if isinstance(error, WrongResult) else f"{type(error).__name__}: "
    return f"{where}: {kind}{text}" if where else f"{kind}{text}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and what led to it: clients of services raise their own in place of a failed connection's."""
    seen = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__context__ if error.__cause__ is None else error.__cause__


def _lacking_column(error: BaseException, answer: Answer) -> str:
    """Returns which columns a row has, for a KeyError about another one; "" for any other error."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if answer.row is None or not isinstance(name, str) or name in answer.row:
        return ""
    return f" is no column of the row, which has {', '.join(answer.row)}"


def _limit_memory() -> int:
    """Limits this process to `MEMORY_MB` more than it holds; returns the limit in bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _held_bytes() + (MEMORY_MB << 20)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


def _held_bytes() -> int:
    """Returns what counts towards RLIMIT_DATA."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5]) * resource.getpagesize()


def main() -> None:
    guard()
    if sys.platform == "linux":
        # a worker stuck in the user's code would not notice that its controller died
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        # out of memory, the kernel ends workers before the controller, which replaces them
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    try:
        serve(sys.argv[1:], take_stdin(), take_stdout())
    except BrokenPipeError:  # the controller is gone
        os._exit(1)


if __name__ == "__main__":
    main()

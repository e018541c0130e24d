"""Calls of agents for the model, whatever API they speak, and the calls that an episode has answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_megatron.run.json_input import parse_json
from areal_megatron.workflows.tool_calls import split_thinking
from areal_megatron.workflows.transcript import Transcript

Message = dict[str, Any]
"""A message for a chat template: `role`, `content` (text) and maybe `tool_calls`, whose arguments are an object, or
`reasoning_content`."""
MODEL = "policy"


class BadCall(ValueError):
    """A call that cannot be answered. The agent is sent the text of this error."""


@dataclass(frozen=True)
class Asked:
    """A call of an agent. Sampling options are left out: the run's config decides them."""

    messages: list[Message]
    tools: list[Any] | None
    """As in OpenAI's chat completions, which chat templates want."""
    limit: int | None
    """The number of tokens that the agent allows for the answer; None: any."""
    stream: bool
    after: AnsweredCall | None = None
    """The call that the agent has named as the one before; None: the messages say it."""
    instructed: bool = False
    """Whether the first message are instructions that later calls do not keep."""
    model: str = MODEL
    """The name of the model that is asked: the policy, or one that is served beside it."""

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise BadCall(f"the most tokens of an answer must be above 0, are {self.limit}")
        if not self.messages or self.messages[-1]["role"] == "assistant":
            raise BadCall("the last message must be one that the model is to answer")


@dataclass(frozen=True)
class Answered:
    """A model's answer to a call."""

    message: Message
    """Its content has what the model thought, as it was written."""
    ended: bool
    """Whether it is complete; else it was cut at its limit of tokens."""
    before: int
    """Tokens before the answer."""
    sampled: int
    """Tokens of the answer."""
    model: str = MODEL

    @property
    def thinking(self) -> str:
        return split_thinking(self.message["content"])[0]

    @property
    def said(self) -> str:
        """The content without the thinking."""
        return split_thinking(self.message["content"])[1]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The functions that the model calls: `name` and `arguments`."""
        return [call["function"] for call in self.message.get("tool_calls", ())]


Event = tuple[str, dict[str, Any] | str]
"""An event of a stream: its name, empty for none, and what it holds."""


class Dialect(Protocol):
    """What agents speak."""

    path: str

    def read(self, body: bytes, earlier: CallTree) -> Asked:
        """Returns what a body asks. Raises BadCall, MsgspecError, UnicodeDecodeError or RecursionError."""
        ...

    def reply(self, answered: Answered) -> dict[str, Any]:
        """Returns the body of a reply."""
        ...

    def events(self, reply: dict[str, Any]) -> Iterator[Event]:
        """Yields a reply as a stream that has the whole answer in one piece."""
        ...

    def error(self, message: str, code: str) -> dict[str, Any]:
        """Returns the body of a refusal."""
        ...


def openai_error(message: str, code: str) -> dict[str, Any]:
    """Returns the body of a refusal as OpenAI's APIs have it."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def tool_call(name: Any, arguments: Any) -> dict[str, Any]:
    """Returns a call as messages have it. `arguments`: an object, or its JSON. Raises ValueError for others."""
    arguments = parse_json(arguments or "{}", exact=True) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Returns a tool as chat templates want it. Raises BadCall if it is no function with a schema."""
    if not isinstance(name, str) or not isinstance(parameters, dict | None) or not isinstance(description, str | None):
        raise BadCall("tools must be functions with a name and a schema: others are not served here")
    about = {"description": description} if description is not None else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters or {}}}


def text_of(content: Any, kinds: tuple[str, ...]) -> str:
    """Returns the text of a content: a text, or parts of these kinds. Raises BadCall."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadCall(f"the content of a message must be text, is {type(content).__name__}")
    found = [part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None for part in content]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise BadCall("a message holds a part that is no text")
    return "".join(texts)


@dataclass(frozen=True)
class AnsweredCall:
    """A call of an agent that the model has answered."""

    messages: list[Message]
    """The call's messages and the model's answer."""
    tools: str
    """As JSON."""
    context: Transcript
    instructed: bool = False


@dataclass
class CallTree:
    """The answered calls of an episode. They form a tree: a call may continue from any earlier answer."""

    _calls: list[AnsweredCall] = field(default_factory=list)
    _replies: dict[str, AnsweredCall] = field(default_factory=dict)
    _shown: dict[str, list[AnsweredCall]] = field(default_factory=dict)
    """Calls by the parts of their answers, as agents are shown them."""
    _tools: dict[str, str] = field(default_factory=dict)

    def tools_of(self, asked: Asked) -> str:
        """Returns the tools of a call as JSON: one and the same object for the same tools, so that comparing them takes
        no time."""
        return self._tools.setdefault(written := json.dumps(asked.tools), written)

    def longest_prefix(self, asked: Asked, tools: str) -> AnsweredCall | None:
        """Returns the earlier call with the longest prefix of the messages: the one named by the agent, else the latest
        one."""
        messages = asked.messages
        shorter = [call for call in reversed(self._calls) if call.tools == tools and len(call.messages) < len(messages)]
        shorter.sort(key=lambda call: len(call.messages), reverse=True)
        named = [asked.after] if asked.after and asked.after.tools == tools else []
        prefixes = (call for call in named + shorter if messages[: len(call.messages)] == call.messages)
        return next(prefixes, None)

    def add(self, call: AnsweredCall, answered: Answered, reply: str) -> None:
        """`reply`: the id of the reply."""
        self._calls.append(call)
        self._replies[reply] = call
        key = _parts(answered.thinking, answered.said, answered.message.get("tool_calls", []))
        self._shown.setdefault(key, []).append(call)

    def replied(self, reply: str) -> AnsweredCall:
        """Returns the call that a reply is of. Raises BadCall for a reply of no call of this episode."""
        if reply not in self._replies:
            raise BadCall(f"{reply[:100]!r} is no reply of this episode")
        return self._replies[reply]

    def as_written(self, before: list[Message], thinking: str, said: str, calls: list[dict[str, Any]]) -> Message:
        """Returns the message of an answer that an agent shows in parts: as the model wrote it, if these are its parts.

        before: the messages that the agent shows before it; calls: as `tool_call` makes them.
        """
        shown = self._shown.get(_parts(thinking, said, calls), ())
        here = [call.messages[-1] for call in shown if call.messages[:-1] == before]
        if found := here or [call.messages[-1] for call in shown]:
            return next((one for one in reversed(found) if split_thinking(one["content"])[1] == said), found[-1])
        more = ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thinking} if thinking else {})
        return {"role": "assistant", "content": said} | more


def _parts(thinking: str, said: str, calls: list[dict[str, Any]]) -> str:
    return json.dumps([thinking.strip(), said.strip(), calls], sort_keys=True)

"""Messages of the OpenAI API, as agents send them and as chat templates want them, and the calls of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_megatron.run.json_input import parse_json
from areal_megatron.workflows.tool_calls import find_calls
from areal_megatron.workflows.transcript import Transcript

Message = dict[str, Any]
"""A message for a chat template: `role`, `content` (text) and maybe `tool_calls`, whose arguments are an object."""


class BadCall(ValueError):
    """A call that cannot be answered. The agent is sent the text of this error."""


class Call(msgspec.Struct):
    """The body of a call to chat/completions. Sampling options are left out: the run's config decides them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    n: int | None = 1
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None

    def check(self) -> None:
        """Raises BadCall for an option that would change the answer and cannot simply be ignored."""
        refused = {
            "n": self.n not in (None, 1),
            "stop": bool(self.stop),
            "logit_bias": bool(self.logit_bias),
            "response_format": (self.response_format or {}).get("type", "text") != "text",
        }
        if wrong := [name for name, used in refused.items() if used]:
            raise BadCall(f"{', '.join(wrong)}: not served here, answers are sampled as the run's config says")
        if (limit := self.limit) is not None and limit < 1:
            raise BadCall(f"max_tokens must be above 0, is {limit}")

    @property
    def limit(self) -> int | None:
        """The number of tokens that the agent allows for the answer."""
        return self.max_completion_tokens or self.max_tokens


def normalized(message: dict[str, Any]) -> Message:
    """Returns a message without what SDKs add to it, so that equal messages compare as equal. Raises BadCall."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadCall(f"a message without a role: {str(message)[:200]}")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise BadCall("a message holds a part that is no text")
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise BadCall(f"the content of a message must be text, is {type(content).__name__}")
    kept: Message = {"role": role, "content": content or ""}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            kept[key] = message[key]
    if calls := message.get("tool_calls"):
        try:
            kept["tool_calls"] = [_normalized_tool_call(call["function"]) for call in calls]
        except (KeyError, TypeError, ValueError):
            raise BadCall("tool_calls must be a list of functions with `name` and JSON `arguments`") from None
    return kept


def _normalized_tool_call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    arguments = parse_json(arguments or "{}") if isinstance(arguments, str) else arguments
    return _tool_call(str(function["name"]), arguments)


def _tool_call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def parsed_answer(text: str, tools: Sequence[Any]) -> Message:
    """Returns the model's message. If the agent has offered tools, calls of them are taken out of the text."""
    content, calls = find_calls(text, tools) if tools else (text, [])
    message = {"role": "assistant", "content": content}
    return message | {"tool_calls": [_tool_call(call.name, call.arguments) for call in calls]} if calls else message


@dataclass(frozen=True)
class AnsweredCall:
    """A call of an agent that the model has answered."""

    messages: list[Message]
    """The call's messages and the model's answer."""
    tools: Any
    context: Transcript


class CallTree:
    """The answered calls of an episode. They form a tree: a call may continue from any earlier answer."""

    def __init__(self):
        self._calls: list[AnsweredCall] = []

    def longest_prefix(self, messages: list[Message], tools: Any) -> AnsweredCall | None:
        """Returns the call whose messages are the longest prefix of these; the latest one if there are several."""
        shorter = [call for call in reversed(self._calls) if len(call.messages) < len(messages)]
        prefixes = (
            call
            for call in sorted(shorter, key=lambda call: len(call.messages), reverse=True)
            if call.tools == tools and messages[: len(call.messages)] == call.messages
        )
        return next(prefixes, None)

    def add(self, messages: list[Message], tools: Any, context: Transcript) -> None:
        self._calls.append(AnsweredCall(messages, tools, context))

"""Messages of the OpenAI API, as chat templates and as agents have them; and which known tokens a call goes on with."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_megatron.workflows.transcript import Transcript

Message = dict[str, Any]
"""`role`, `content` (text) and maybe `tool_calls`, whose arguments are an object, as chat templates want them."""
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class BadCall(ValueError):
    """A call that cannot be answered; its text goes back to the agent."""


class Call(msgspec.Struct):
    """The body of a call to chat/completions, as far as it counts here: the run decides how tokens are sampled."""

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
        """Raises BadCall for what would change the distribution of tokens, and is not just left aside."""
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
        return self.max_completion_tokens or self.max_tokens


def plain(message: dict[str, Any]) -> Message:
    """One message without what SDKs add to it. Raises BadCall."""
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
            kept["tool_calls"] = [_plain_tool_call(call["function"]) for call in calls]
        except (KeyError, TypeError, ValueError):
            raise BadCall("tool_calls must be a list of functions with `name` and JSON `arguments`") from None
    return kept


def _plain_tool_call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return {"type": "function", "function": {"name": str(function["name"]), "arguments": arguments}}


def answer_of(text: str, with_tools: bool) -> Message:
    """The model's message. Tool calls in the form of Qwen's and Hermes' templates, if the agent has offered tools."""
    calls = [_tool_call(found) for found in _TOOL_CALL.findall(text)] if with_tools else []
    if not calls or None in calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text[: text.index("<tool_call>")].rstrip(), "tool_calls": calls}


def _tool_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return _plain_tool_call({"name": name, "arguments": arguments})


@dataclass(frozen=True)
class Known:
    messages: list[Message]
    """The last one is the model's."""
    tools: Any
    context: Transcript


class CallTree:
    """Every call of an episode. It is a tree: a call may go on from any earlier answer."""

    def __init__(self):
        self._known: list[Known] = []

    def longest(self, messages: list[Message], tools: Any) -> Known | None:
        """The answer that these messages go on from, the latest one if there are several."""
        before = [
            known
            for known in reversed(self._known)
            if len(known.messages) < len(messages)
            and known.tools == tools
            and messages[: len(known.messages)] == known.messages
        ]
        return max(before, key=lambda known: len(known.messages), default=None)

    def add(self, messages: list[Message], tools: Any, context: Transcript) -> None:
        self._known.append(Known(messages, tools, context))

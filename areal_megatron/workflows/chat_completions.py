"""OpenAI's chat completions. What the model thinks is in the content of its messages, as it writes it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from areal_megatron.workflows.agent_calls import (
    MODEL,
    Answered,
    Asked,
    BadCall,
    CallTree,
    Event,
    Message,
    openai_error,
    text_of,
    tool,
    tool_call,
)
from areal_megatron.workflows.tool_calls import find_calls


class _Body(msgspec.Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    n: int | None = 1
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    functions: Any = None
    model: str = MODEL

    def check(self) -> None:
        """Raises BadCall for an option that would change the answer and cannot simply be ignored."""
        refused = {
            "n": self.n not in (None, 1),
            "stop": bool(self.stop),
            "logit_bias": bool(self.logit_bias),
            "functions": bool(self.functions),
            "response_format": (self.response_format or {}).get("type", "text") != "text",
        }
        if wrong := [name for name, used in refused.items() if used]:
            raise BadCall(f"{', '.join(wrong)}: not served here, answers are sampled as the run's config says")
        for one in self.tools or ():
            function = one.get("function") if one.get("type") == "function" else None
            function = function if isinstance(function, dict) else {}
            tool(function.get("name"), function.get("description"), function.get("parameters"))


_decode = msgspec.json.Decoder(_Body).decode


def normalized(message: dict[str, Any]) -> Message:
    """Returns a message without what SDKs add to it, so that equal messages compare as equal. Raises BadCall."""
    role = message.get("role")
    if not isinstance(role, str):
        raise BadCall(f"a message without a role: {str(message)[:200]}")
    if role == "function" or message.get("function_call"):  # which templates leave out without a word
        raise BadCall("functions: not served here, give tools, tool_calls, and results in messages of the role tool")
    role = "system" if role == "developer" else role
    kept: Message = {"role": role, "content": text_of(message.get("content"), ("text",))}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            kept[key] = message[key]
    if calls := message.get("tool_calls"):
        try:
            functions = [call["function"] for call in calls]
            kept["tool_calls"] = [tool_call(function["name"], function["arguments"]) for function in functions]
        except (KeyError, TypeError, ValueError):
            raise BadCall("tool_calls must be a list of functions with `name` and JSON `arguments`") from None
    return kept


def parsed_answer(text: str, tools: Sequence[Any]) -> Message:
    """Returns the model's message. If the agent has offered tools, calls of them are taken out of the text."""
    content, calls = find_calls(text, tools) if tools else (text, [])
    message = {"role": "assistant", "content": content}
    return message | {"tool_calls": [tool_call(call.name, call.arguments) for call in calls]} if calls else message


class ChatCompletions:
    path = "/v1/chat/completions"

    def read(self, body: bytes, earlier: CallTree) -> Asked:
        call = _decode(body)
        call.check()
        messages = [normalized(message) for message in call.messages]
        limit = call.max_tokens if call.max_completion_tokens is None else call.max_completion_tokens
        return Asked(messages, call.tools or None, limit, bool(call.stream), model=call.model)

    def reply(self, answered: Answered) -> dict[str, Any]:
        content = answered.message["content"]
        shown = {"role": "assistant", "content": content or (None if answered.calls else "")}
        if answered.calls:
            shown["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(8)}",
                    "type": "function",
                    "function": call | {"arguments": json.dumps(call["arguments"], ensure_ascii=False)},
                }
                for call in answered.calls
            ]
        reason = "length" if not answered.ended else "tool_calls" if answered.calls else "stop"
        before, sampled = answered.before, answered.sampled
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": answered.model,
            "choices": [{"index": 0, "message": shown, "finish_reason": reason, "logprobs": None}],
            "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled},
        }

    def events(self, reply: dict[str, Any]) -> Iterator[Event]:
        """The last chunk has the usage, whether or not `stream_options` asks for it."""
        (choice,), head = reply["choices"], reply | {"object": "chat.completion.chunk", "usage": None}
        calls = [call | {"index": k} for k, call in enumerate(choice["message"].get("tool_calls", ()))]
        delta = choice["message"] | ({"tool_calls": calls} if calls else {})
        yield "", head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        end = [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]
        yield "", head | {"choices": end, "usage": reply["usage"]}
        yield "", "[DONE]"

    def error(self, message: str, code: str) -> dict[str, Any]:
        return openai_error(message, code)

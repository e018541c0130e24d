"""Anthropic's messages. What the model thinks is a block of its own."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
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
    text_of,
    tool,
    tool_call,
)

_TEXT = ("text",)
COUNT_PATH = "/v1/messages/count_tokens"


class _Body(msgspec.Struct):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    model: str = MODEL


_decode = msgspec.json.Decoder(_Body).decode


class AnthropicMessages:
    path = "/v1/messages"

    def read(self, body: bytes, earlier: CallTree) -> Asked:
        call = _decode(body)
        if call.stop_sequences:
            raise BadCall("stop_sequences: not served here, answers are sampled as the run's config says")
        system = text_of(call.system, _TEXT)
        messages = [{"role": "system", "content": system}] if system else []
        for message in call.messages:
            messages += _messages(messages, message, earlier)
        for one in call.tools or ():
            if one.get("type") not in (None, "custom"):
                raise BadCall(f"a tool of the kind {str(one['type'])[:100]!r} is not served here: give functions")
        tools = [tool(one.get("name"), one.get("description"), one.get("input_schema")) for one in call.tools or ()]
        return Asked(messages, tools or None, call.max_tokens, bool(call.stream), model=call.model)

    def reply(self, answered: Answered) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if answered.thinking:
            content.append({"type": "thinking", "thinking": answered.thinking, "signature": secrets.token_hex(8)})
        if answered.said or not answered.calls:
            content.append({"type": "text", "text": answered.said})
        for call in answered.calls:
            used = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}"}
            content.append(used | {"name": call["name"], "input": call["arguments"]})
        reason = "max_tokens" if not answered.ended else "tool_use" if answered.calls else "end_turn"
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": answered.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {"input_tokens": answered.before, "output_tokens": answered.sampled},
        }

    def events(self, reply: dict[str, Any]) -> Iterator[Event]:
        begun = reply | {"content": [], "stop_reason": None, "usage": reply["usage"] | {"output_tokens": 0}}
        yield _event("message_start", message=begun)
        for number, block in enumerate(reply["content"]):
            empty, deltas = _pieces(block)
            yield _event("content_block_start", index=number, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=number, delta=delta)
            yield _event("content_block_stop", index=number)
        ended = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=reply["usage"])
        yield _event("message_stop")

    def error(self, message: str, code: str) -> dict[str, Any]:
        kind = "authentication_error" if code == "invalid_api_key" else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": f"{code}: {message}"}}


def _event(name: str, **held: Any) -> Event:
    return name, {"type": name, **held}


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the empty block with which its stream begins, and what is added to it."""
    if block["type"] == "tool_use":
        written = json.dumps(block["input"], ensure_ascii=False)
        return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": written}]
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return block | {"thinking": "", "signature": ""}, [thought, signature]
    return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _messages(before: list[Message], message: dict[str, Any], earlier: CallTree) -> list[Message]:
    """Returns the messages of one: results of tools are messages of their own. Raises BadCall."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadCall(f"a message without a role: {str(message)[:200]}")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise BadCall("the content of a message must be text or blocks")
    if role == "assistant":
        return [_answer(before, blocks, earlier)]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    found = [
        {
            "role": "tool",
            "content": text_of(block.get("content"), _TEXT),
            "tool_call_id": str(block.get("tool_use_id")),
        }
        for block in results
    ]
    said = [block for block in blocks if block.get("type") != "tool_result"]
    return [*found, {"role": role, "content": text_of(said, _TEXT)}] if said or not found else found


def _answer(before: list[Message], blocks: list[dict[str, Any]], earlier: CallTree) -> Message:
    thinking = [block.get("thinking") for block in blocks if block.get("type") == "thinking"]
    thoughts = [thought for thought in thinking if isinstance(thought, str)]
    if len(thoughts) < len(thinking):
        raise BadCall("a block of thinking holds no text")
    used = [block for block in blocks if block.get("type") == "tool_use"]
    said = [block for block in blocks if block.get("type") not in ("thinking", "redacted_thinking", "tool_use")]
    try:
        calls = [tool_call(block["name"], block["input"]) for block in used]
    except (KeyError, ValueError):
        raise BadCall("a tool_use needs `name` and `input`") from None
    return earlier.as_written(before, "".join(thoughts), text_of(said, _TEXT), calls)

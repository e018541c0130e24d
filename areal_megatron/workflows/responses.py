"""OpenAI's Responses. What the model thinks is an item of its own."""

from __future__ import annotations

import json
import secrets
import time
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
    openai_error,
    text_of,
    tool,
    tool_call,
)

_TEXTS = ("input_text", "output_text", "text")
_OF_MODEL = ("reasoning", "function_call")


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    text: dict[str, Any] | None = None
    background: bool | None = False
    conversation: Any = None
    prompt: Any = None
    model: str = MODEL

    def check(self) -> None:
        """Raises BadCall for an option that would change the answer and cannot simply be ignored."""
        form = (self.text or {}).get("format") or {}
        refused = {
            "text.format": not isinstance(form, dict) or form.get("type", "text") != "text",
            "background": bool(self.background),
            "conversation": bool(self.conversation),
            "prompt": bool(self.prompt),
        }
        if wrong := [name for name, used in refused.items() if used]:
            raise BadCall(f"{', '.join(wrong)}: not served here")


_decode = msgspec.json.Decoder(_Body).decode


class Responses:
    path = "/v1/responses"

    def read(self, body: bytes, earlier: CallTree) -> Asked:
        call = _decode(body)
        call.check()
        after = earlier.replied(call.previous_response_id) if call.previous_response_id else None
        before = after.messages[after.instructed :] if after else []
        if call.instructions:  # those of earlier calls do not count any more
            before = [{"role": "system", "content": call.instructions}, *before]
        said = [{"role": "user", "content": call.input}] if isinstance(call.input, str) else call.input
        messages = _messages(before, said, earlier)
        tools = _tools(call.tools)
        asked = messages, tools, call.max_output_tokens, bool(call.stream), after, bool(call.instructions)
        return Asked(*asked, model=call.model)

    def reply(self, answered: Answered) -> dict[str, Any]:
        output, ended = [], answered.ended
        status = "completed" if ended else "incomplete"
        if answered.thinking:
            thought = {"type": "reasoning_text", "text": answered.thinking}
            output.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": [thought]})
        if answered.said or not answered.calls:
            part = {"type": "output_text", "text": answered.said, "annotations": [], "logprobs": []}
            message = {"type": "message", "id": _id("msg"), "role": "assistant", "status": status, "content": [part]}
            output.append(message)
        for call in answered.calls:
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            item = {"type": "function_call", "id": _id("fc"), "call_id": _id("call"), "status": status}
            output.append(item | {"name": call["name"], "arguments": arguments})
        before, sampled = answered.before, answered.sampled
        return {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": None if ended else {"reason": "max_output_tokens"},
            "instructions": None,
            "metadata": {},
            "model": answered.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": {
                "input_tokens": before,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": before + sampled,
            },
        }

    def events(self, reply: dict[str, Any]) -> Iterator[Event]:
        begun = reply | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        parts: list[tuple[str, Any]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for number, item in enumerate(reply["output"]):
            parts += _item_events(number, item)
        parts.append((f"response.{reply['status']}", {"response": reply}))
        for number, (name, held) in enumerate(parts):
            yield name, {"type": name, "sequence_number": number, **held}

    def error(self, message: str, code: str) -> dict[str, Any]:
        return openai_error(message, code)


def _item_events(number: int, item: dict[str, Any]) -> Iterator[Event]:
    at = {"output_index": number}
    open_item = item | ({"status": "in_progress"} if "status" in item else {})
    of_item, of_part = at | {"item_id": item["id"]}, at | {"item_id": item["id"], "content_index": 0}
    if item["type"] == "function_call":
        yield "response.output_item.added", at | {"item": open_item | {"arguments": ""}}
        yield "response.function_call_arguments.delta", of_item | {"delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", of_item | done
    else:
        [part] = item["content"]
        kind = part["type"]
        more = {"logprobs": []} if kind == "output_text" else {}
        yield "response.output_item.added", at | {"item": open_item | {"content": []}}
        yield "response.content_part.added", of_part | {"part": part | {"text": ""}}
        yield f"response.{kind}.delta", of_part | {"delta": part["text"], **more}
        yield f"response.{kind}.done", of_part | {"text": part["text"], **more}
        yield "response.content_part.done", of_part | {"part": part}
    yield "response.output_item.done", at | {"item": item}


def _messages(before: list[Message], items: list[dict[str, Any]], earlier: CallTree) -> list[Message]:
    """Returns the messages before a call's items, and theirs: neighbours that the model made are one message. Raises
    BadCall."""
    found = list(before)
    answer: list[dict[str, Any]] = []
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind in _OF_MODEL or (kind == "message" and role == "assistant"):
            answer.append(item)
            continue
        if answer:
            found.append(_answer(found, answer, earlier))
            answer = []
        if kind == "function_call_output":
            told = text_of(item.get("output"), _TEXTS)
            found.append({"role": "tool", "content": told, "tool_call_id": str(item.get("call_id"))})
        elif kind == "message" and isinstance(role, str):
            name = "system" if role == "developer" else role
            found.append({"role": name, "content": text_of(item.get("content"), _TEXTS)})
        else:
            raise BadCall(f"an item of the kind {str(kind)[:100]!r} is not served here")
    return [*found, _answer(found, answer, earlier)] if answer else found


def _answer(before: list[Message], items: list[dict[str, Any]], earlier: CallTree) -> Message:
    thinking, said, calls = "", "", []
    for item in items:
        if item.get("type") == "reasoning":
            thinking += text_of(item.get("content"), ("reasoning_text",))
        elif item.get("type") == "function_call":
            try:
                calls.append(tool_call(item["name"], item["arguments"]))
            except (KeyError, ValueError):
                raise BadCall("a function_call needs `name` and JSON `arguments`") from None
        else:
            said += text_of(item.get("content"), _TEXTS)
    return earlier.as_written(before, thinking, said, calls)


def _tools(tools: list[dict[str, Any]] | None) -> list[Any] | None:
    for one in tools or ():
        if one.get("type") != "function":
            raise BadCall(f"a tool of the kind {str(one.get('type'))[:100]!r} is not served here: give functions")
    return [tool(one.get("name"), one.get("description"), one.get("parameters")) for one in tools] if tools else None


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"

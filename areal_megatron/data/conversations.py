"""Conversations in rows of data sets, in the forms in which they are published, and which of their turns are trained.

Messages become what chat templates want: `role` and `content` as text; of the assistant maybe `thinking` and
`tool_calls`, whose arguments are objects. docs/supervised.md shows the forms. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.data.formats import Row, field
from areal_megatron.run.json_input import kind_of, parse_json

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    **{role: role for role in _ROLES},
    **{"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant", "function": "tool"},
}
"""Whose turn it is in `conversations`, as ShareGPT and LLaMA-Factory have it."""
_THINKING = ("thinking", "reasoning_content", "reasoning")
_MARKS = ("weight", "train")
_FIELDS = ("messages", "conversations")
_REPLIES = ("response", "completion")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_CALL_IN_TEXT = "<tool_call>"
"""Begins a call in a text of the assistant, as in Hermes' rows."""


@dataclass(frozen=True)
class Conversation:
    """Messages, of which some of the assistant's are trained."""

    messages: list[Message]
    tools: list[Any] | None
    """The tools that the assistant may call, as chat templates want them."""
    trained: tuple[int, ...]
    """The numbers of the trained messages, ascending, from 0."""


def is_conversation(row: Row) -> bool:
    """Whether a row holds a conversation; else it has a prompt and a response as text."""
    several = isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list)
    return several or any(row.get(name) is not None for name in _FIELDS)


def conversation_of(row: Row, where: str, turns: str) -> Conversation:
    """Returns the conversation of a row, also of one with a prompt and a response as text; `turns` is sft.turns.

    Raises ConfigError, which names the row (`where`) and the message, counted from 1: for one without a role or with
    content that is no text, for roles out of order, a tool's result without a call, and where nothing is to be trained.
    """
    row = given(row)
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    before = messages_of(system, "system", where)
    name = next((name for name in _FIELDS if name in row), "")
    asked = [] if name else _messages(row, "prompt", where, "user")
    name = name or ("completion" if "completion" in row and "response" not in row else "response")
    said = _messages(row, name, where, "assistant" if name in _REPLIES else "")
    before = [*(before if [*asked, *said][:1] != before else []), *asked]
    own = [*before, *said]
    if isinstance(row[name], str):
        first, turns = len(before), "all"
        _reply(row, own[-1], where)
    elif name == "messages" and isinstance(row.get("answer"), dict):  # a turn of a longer episode, as τ² data have it
        first, turns = len(own), "all"
        own.append(_message({"role": "assistant", **given(row["answer"])}, f"{where}: field 'answer'"))
    else:
        first = len(before)
        own += _reply(row, own[-1], where)
    if isinstance(row.get("answer"), str) and row["answer"].strip() and own[-1]["role"] != "assistant":
        raise ConfigError(
            f"{where}: field 'answer' is a text beside messages without an answer; rename it to 'response' if it is "
            "theirs, or leave it out"
        )
    marks = _marks(row[name] if isinstance(row[name], list) else [], len(before), where)
    if name == "messages" and isinstance(row.get("answer"), dict):
        marks |= _marks([row["answer"]], first, f"{where}: field 'answer'")
    return Conversation(own, tools_of(row, where), _trained(own, first, marks, where, turns))


def given(said: dict[str, Any]) -> dict[str, Any]:
    """Returns a row, or a message, without its own keys that are null. Arguments of calls and tools keep theirs, which
    mean something."""
    return {key: value for key, value in said.items() if value is not None}


def _reply(row: Row, last: Message, where: str) -> list[Message]:
    """Returns the answer that a row has as a text beside its messages, if these do not end with it."""
    replies = {name: row[name] for name in _REPLIES if isinstance(row.get(name), str) and row[name].strip()}
    said = {last["content"].strip()} if last["role"] == "assistant" else {*map(str.strip, [*replies.values()][:1])}
    if other := next((name for name, text in replies.items() if text.strip() not in said), ""):
        raise ConfigError(f"{where}: field {other!r} has another answer than the row has elsewhere")
    if last["role"] == "assistant" or not replies:
        return []
    name, text = next(iter(replies.items()))
    return messages_of([{"role": "assistant", "content": text}], name, where)


def messages_of(said: Sequence[Any], name: str, where: str) -> list[Message]:
    """Returns messages as chat templates want them; `name` is the field that has them. Raises ConfigError."""
    return [_message(message, f"{where}: message {number} of {name!r}") for number, message in enumerate(said, 1)]


def tools_of(row: Row, where: str) -> list[Any] | None:
    """Returns the tools of a row as templates want them: from a list, also as JSON text, of functions with or without
    `type`. Raises ConfigError."""
    said = row.get("tools")
    try:
        said = parse_json(said) if isinstance(said, str) and said.strip() else said
        said = [said] if isinstance(said, dict) else said or []
        found = [parse_json(tool) if isinstance(tool, str) else tool for tool in said]
        json.dumps(found, allow_nan=False)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{where}: field 'tools' is no list of tools: {e}") from None
    if not all(isinstance(tool, dict) for tool in found):
        raise ConfigError(f"{where}: field 'tools' must be a list of objects, or JSON text of one")
    return [_tool(tool) for tool in found] or None


def _tool(said: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool as OpenAI's chat completions have it, also of a function alone."""
    if said.get("function") is not None or not isinstance(said.get("name"), str):
        return said
    return {
        "type": "function",
        "function": {key: value for key, value in said.items() if key not in ("type", "function")},
    }


def check_order(messages: Sequence[Message], where: str) -> None:
    """Raises ConfigError for roles out of order, and for a tool's result without a call."""
    waiting: list[str | None] = []
    for number, message in enumerate(messages, 1):
        role, before = message["role"], messages[number - 2]["role"] if number > 1 else ""
        problem = ""
        if role in ("system", "developer") and number > 1 and before != "system":
            problem = f"is of {role}, which comes first"
        elif role == "assistant" and before == "assistant":
            problem = "is the assistant's, as is the one before it: put them together, or what was said between them"
        elif role == "tool":
            problem = _unasked(message, before, waiting)
        if problem:
            raise ConfigError(f"{where}: message {number} {problem}")
        if role != "tool":
            waiting = [call.get("id") for call in message.get("tool_calls", [])]
            waiting += [None] * (message["content"].count(_CALL_IN_TEXT) if role == "assistant" else 0)


def _unasked(message: Message, before: str, waiting: list[str | None]) -> str:
    """Returns what is wrong with a tool's result, "" if nothing is. Its call is taken out of `waiting`."""
    if before not in ("assistant", "tool") or not waiting:
        return "is a tool's result without a call"
    asked = message.get("tool_call_id")
    if asked is not None and None not in waiting and asked not in waiting:
        return f"is the result of call {asked!r}, of which there is none"
    waiting.remove(asked if asked in waiting else waiting[0])
    return ""


def _trained(
    messages: Sequence[Message], first: int, marks: dict[int, bool], where: str, turns: str
) -> tuple[int, ...]:
    """Returns the numbers of the trained messages, which are among those from `first` on. None that is marked with 0 is
    one of them; where messages are marked with 0 alone, as in OpenAI's rows, the others are."""
    check_order(messages, where)
    own = [number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"]
    if not own:
        raise ConfigError(f"{where}: no message is the assistant's, so that nothing can be learnt")
    if turns == "marked" and not marks:
        raise ConfigError(f"{where}: sft.turns=marked, and no message of the assistant has `weight` or `train`")
    some = turns == "marked" and any(marks.values())
    own = [number for number in own if marks.get(number, not some)]
    if not own:
        raise ConfigError(f"{where}: every message of the assistant has `weight` 0 or `train` false")
    return tuple(own[-1:] if turns == "last" else own)


def _marks(said: Sequence[Any], first: int, where: str) -> dict[int, bool]:
    """Returns which messages are marked: number, from `first` on → whether it is to be trained, which one mark of two
    forbids."""
    found = {}
    for number, message in enumerate(said, 1):
        marks = [message[key] for key in _MARKS if message.get(key) is not None]
        if other := [mark for mark in marks if mark not in (0, 1)]:
            raise ConfigError(f"{where}: message {number} has a mark of {other[0]!r}, expected 0 or 1, true or false")
        if marks:
            found[first + number - 1] = all(marks)
    return found


def _messages(row: Row, name: str, where: str, role: str = "") -> list[Message]:
    """Returns the messages of a field, which may be a text if `role` says whose."""
    said = field(row, name, (str, list) if role else (list,), where)
    return messages_of([{"role": role, "content": said}] if isinstance(said, str) else said, name, where)


def _message(said: Any, place: str) -> Message:
    if not isinstance(said, dict):
        raise ConfigError(f"{place} is {kind_of(said)}, expected an object with `role` and `content`")
    said = given(said)
    speaker, content = said.get("role", said.get("from")), said.get("content", said.get("value"))
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise ConfigError(f"{place} has the role {speaker!r}, expected one of {', '.join(_ROLES)}")
    calls = said.get("tool_calls") or said.get("function_call")
    if speaker == "function_call":
        content, calls = "", content
    text = _content(content, place)
    found: Message = {"role": role, "content": text}
    found |= {key: said[key] for key in ("name", "tool_call_id") if isinstance(said.get(key), str)}
    if role != "assistant":
        return found
    thought = next((said[key] for key in _THINKING if said.get(key)), "")
    if not isinstance(thought, str):
        raise ConfigError(f"{place} has thinking that is {kind_of(thought)}, expected a text")
    found |= {"thinking": thought} if thought.strip() else {}
    found |= {"tool_calls": own} if (own := _calls(calls, place)) else {}
    if not (text.strip() or found.get("thinking") or own):
        raise ConfigError(f"{place} is the assistant's and says nothing")
    return found


def _content(said: Any, place: str) -> str:
    if isinstance(said, list):
        parts = [_part(part) for part in said]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"{place} has a part that is no text: only text can be learnt from")
        return "".join(parts)
    if said is not None and not isinstance(said, str):
        raise ConfigError(f"{place} has a content that is {kind_of(said)}, expected a text")
    return said or ""


def _part(said: Any) -> Any:
    """Returns the text of a part of a content, None if it is none."""
    return (said.get("text") if said.get("type") in (None, "text") else None) if isinstance(said, dict) else said


def _calls(said: Any, place: str) -> list[dict[str, Any]]:
    """Returns calls from a list, also as JSON text; or from a single one, as LLaMA-Factory and older APIs have it."""
    try:
        said = parse_json(said) if isinstance(said, str) and said.strip() else said
        return [_call(call) for call in ([said] if isinstance(said, dict) else said or [])]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"{place}: its tool_calls must be a list of functions with `name`, and `arguments`, an object or JSON "
            "text without NaN"
        ) from None


def _call(said: Any) -> dict[str, Any]:
    function = said.get("function") or said
    name = function["name"]
    arguments = next((function[key] for key in _ARGUMENTS if function.get(key) is not None), None)
    arguments = (parse_json(arguments or "null") if isinstance(arguments, str) else arguments) or {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError
    json.dumps(arguments, allow_nan=False)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call | ({"id": said["id"]} if isinstance(said.get("id"), str) else {})

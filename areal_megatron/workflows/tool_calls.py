"""Calls of tools, as models write them into their answers.

Each family has a form of its own. A text is searched for all of them: each begins with words that no other has.

    Qwen, Hermes      <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen3-Coder       <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    GLM-4.5           <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    DeepSeek-V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>add, and the arguments as a block of JSON
    DeepSeek-V3.1     <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
    Kimi-K2           <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    Llama-3           {"name": "add", "parameters": {"a": 1}}, and nothing else

What is no whole call of one of these forms is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_megatron.run.json_input import parse_json

THINKING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
"""How models begin and end their thinking."""
_AROUND = (
    ("<tool_call>", "</tool_call>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
)
"""How models begin and end a call."""
_MOST_CALLS = 128
"""More calls in one answer are text."""


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


class _NoCallError(ValueError):
    """What stands between the words of a form is no call."""


Schemas = Mapping[str, Mapping[str, Any]]
"""The schemas of a tool's parameters by its name, each by the parameter's name."""


def split_thinking(text: str) -> tuple[str, str]:
    """Returns the thinking with which an answer begins, and the rest. The prompt may have begun it already."""
    for begin, end in THINKING:
        is_begun = text.lstrip().startswith(begin)
        head, found, rest = text.partition(end)
        if is_begun:
            return head.lstrip().removeprefix(begin).strip(), rest.lstrip()
        if found and begin not in head and not _is_inside_call(head):
            return head.strip(), rest.lstrip()
    return "", text


def _is_inside_call(head: str) -> bool:
    """Whether a text ends within a call, so that what follows is an argument of it."""
    return any(head.rfind(begin) > head.rfind(end) for begin, end in _AROUND)


def find_calls(text: str, tools: Sequence[Any]) -> tuple[str, list[ToolCall]]:
    """Returns the text before the calls of an answer, its thinking included, and the calls; the whole text and none,
    if there is none, or any of them is malformed. `tools`: as in OpenAI's API; they say which arguments are texts.
    """
    _, said = split_thinking(text)
    begin, schemas = len(text) - len(said), _schemas(tools)
    form, first = next(((form, at) for form in _FORMS if (at := form.begin.search(text, begin))), (None, None))
    try:
        if form is None or first is None:
            calls = _bare_calls(said, schemas)
            return (text[:begin], calls) if calls else (text, [])
        calls = [form.read(body, schemas) for body in form.bodies(text, begin)]
    except _NoCallError:
        return text, []
    return text[: first.start()].rstrip().removesuffix(form.section).rstrip(), calls


@dataclass(frozen=True)
class _Form:
    begin: re.Pattern[str]
    """Comes before each call."""
    end: re.Pattern[str]
    """Comes after it."""
    read: Callable[[str, Schemas], ToolCall]
    section: str = ""
    """What comes before the first call."""

    def bodies(self, text: str, at: int) -> Iterator[str]:
        """Yields what stands between `begin` and `end`. Raises _NoCallError if there are too many, or one that is not
        whole."""
        count = 0
        while (begin := self.begin.search(text, at)) and (end := self.end.search(text, begin.end())):
            if any(word in text[at : begin.start()] for word, _ in _AROUND):
                raise _NoCallError
            yield text[begin.end() : end.start()]
            at, count = end.end(), count + 1
            if count > _MOST_CALLS:
                raise _NoCallError
        if not count or any(word in text[at:] for word, _ in _AROUND):
            raise _NoCallError


def _json(text: str) -> Any:
    try:
        return parse_json(text, exact=True)
    except ValueError:
        raise _NoCallError from None


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise _NoCallError
    return ToolCall(name, arguments)


def _hermes(body: str, _: Schemas) -> ToolCall:
    found = _json(body)
    if not isinstance(found, dict) or ("arguments" not in found and len(found) > 1):
        raise _NoCallError
    return _call(found.get("name"), found.get("arguments", {}))


_PARAMETER = re.compile(r"\s*+<parameter=([^>\s]++)>")
_KEY = re.compile(r"\s*+<arg_key>([^<]++)</arg_key>\s*+<arg_value>")


def _coder(body: str, schemas: Schemas) -> ToolCall:
    name, closed, rest = body.partition(">")
    if not closed or not rest.rstrip().endswith("</function>"):
        raise _NoCallError
    pairs = _pairs(rest.rstrip().removesuffix("</function>"), _PARAMETER, "</parameter>")
    return _unquoted(name.strip(), {key: value.removeprefix("\n").removesuffix("\n") for key, value in pairs}, schemas)


def _glm(body: str, schemas: Schemas) -> ToolCall:
    name, key, rest = body.partition("<arg_key>")
    if any(space in name.strip() for space in " \n\t{<"):
        raise _NoCallError
    return _unquoted(name.strip(), dict(_pairs(key + rest, _KEY, "</arg_value>")), schemas)


def _pairs(text: str, begin: re.Pattern[str], end: str) -> Iterator[tuple[str, str]]:
    """Yields the names and values of arguments. Raises _NoCallError for a text that holds anything else."""
    at = 0
    while found := begin.match(text, at):
        close = text.find(end, found.end())
        if close < 0:
            raise _NoCallError
        yield found[1].strip(), text[found.end() : close]
        at = close + len(end)
    if text[at:].strip():
        raise _NoCallError


def _unquoted(name: str, written: Mapping[str, str], schemas: Schemas) -> ToolCall:
    own = schemas.get(name, {})
    return _call(name, {key: _value(value, own.get(key)) for key, value in written.items()})


def _deepseek(body: str, schemas: Schemas) -> ToolCall:
    kind, _, rest = body.partition("<｜tool▁sep｜>")
    if kind.strip() != "function":
        return _call(kind.strip(), _json(rest))
    name, fence, arguments = rest.partition("```json\n")
    if not fence or not arguments.rstrip().endswith("```"):
        raise _NoCallError
    return _call(name.strip(), _json(arguments.rstrip().removesuffix("```")))


def _kimi(body: str, schemas: Schemas) -> ToolCall:
    name, _, arguments = body.partition("<|tool_call_argument_begin|>")
    return _call(name.strip().rpartition(":")[0].removeprefix("functions."), _json(arguments))


_FORMS = (
    _Form(re.compile(r"<tool_call>\s*+(?=\{)"), re.compile(r"(?<=\})\s*+</tool_call>"), _hermes),
    _Form(re.compile(r"<tool_call>\s*+<function="), re.compile(r"(?<=</function>)\s*+</tool_call>"), _coder),
    _Form(re.compile(r"<tool_call>(?=\s*+[\w.-]++\s*+(?:<arg_key>|</tool_call>))"), re.compile(r"</tool_call>"), _glm),
    _Form(
        re.compile(r"<｜tool▁call▁begin｜>"), re.compile(r"<｜tool▁call▁end｜>"), _deepseek, "<｜tool▁calls▁begin｜>"
    ),
    _Form(
        re.compile(r"<\|tool_call_begin\|>"),
        re.compile(r"<\|tool_call_end\|>"),
        _kimi,
        "<|tool_calls_section_begin|>",
    ),
)


def _bare_calls(text: str, schemas: Schemas) -> list[ToolCall]:
    """Returns Llama's calls: an answer that is one, of a tool that there is."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if not text.startswith("{") or not text.endswith("}"):
        return []
    found = _json(text)
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or name not in schemas:
        return []
    return [_call(name, found.get("parameters", found.get("arguments")))]


def _schemas(tools: Sequence[Any]) -> Schemas:
    found = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        function = function if isinstance(function, dict) else {}
        name, parameters = function.get("name"), function.get("parameters")
        if isinstance(name, str):
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            found[name] = properties if isinstance(properties, dict) else {}
    return found


def _value(text: str, schema: Any) -> Any:
    """Returns an argument that is written without quotes: a text, unless its schema says that it is none."""
    kinds = _kinds(schema)
    if "null" in kinds and text.strip().lower() in ("null", "none"):
        return None
    if not kinds or "string" in kinds:
        return text
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        return parse_json(text.strip(), exact=True)
    except ValueError:
        return text


def _kinds(schema: Any) -> set[str]:
    """Returns the types that a schema allows."""
    if not isinstance(schema, dict):
        return set()
    own = schema.get("type")
    found = {kind for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        for one in schema[key] if isinstance(schema.get(key), list) else ():
            found |= _kinds(one)
    return found

"""Calls of tools in the forms in which models write them, beside vLLM's parsers."""

import json
import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_megatron.workflows.tool_calls import ToolCall, find_calls, split_thinking

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
    for name in ("add", "look_up")
]
CALLS = [ToolCall("add", {"a": 1, "b": "2"}), ToolCall("look_up", {"a": -3, "b": "two\nlines & <more>"})]


def hermes(call):
    return "<tool_call>\n" + json.dumps({"name": call.name, "arguments": call.arguments}) + "\n</tool_call>"


def glm(call):
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in call.arguments.items()
    )
    return f"<tool_call>{call.name}\n{pairs}</tool_call>"


def coder(call):
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{pairs}</function>\n</tool_call>"


def deepseek(call):
    inside = f"function<｜tool▁sep｜>{call.name}\n```json\n{json.dumps(call.arguments)}\n```"
    return f"<｜tool▁call▁begin｜>{inside}<｜tool▁call▁end｜>"


def deepseek31(call):
    return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{json.dumps(call.arguments)}<｜tool▁call▁end｜>"


def kimi(call):
    inside = f"functions.{call.name}:0<|tool_call_argument_begin|>{json.dumps(call.arguments)}"
    return f"<|tool_call_begin|>{inside}<|tool_call_end|>"


def llama(call):
    return json.dumps({"name": call.name, "parameters": call.arguments})


SECTIONS = {
    deepseek: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    deepseek31: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    kimi: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
}
FORMS = {
    "hermes": hermes,
    "glm45": glm,
    "qwen3_coder": coder,
    "deepseek_v3": deepseek,
    "deepseek_v31": deepseek31,
    "kimi_k2": kimi,
    "llama3_json": llama,
}
"""The name of vLLM's parser → what writes a call."""


def answer(form, calls, before="so\n"):
    begin, end = SECTIONS.get(form, ("", ""))
    return ("" if form is llama else before) + begin + "\n".join(map(form, calls)) + end


@pytest.fixture(scope="module")
def vllm_parsed():
    """What vLLM's parser of a name finds in an answer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    words = [word for pair in SECTIONS.values() for word in pair]
    words += ["<tool_call>", "</tool_call>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"]
    words += ["<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|python_tag|>", "<think>"]
    words += ["</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    library = Tokenizer(models.WordLevel({"<unk>": 0} | {chr(c): c for c in range(1, 127)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.add_tokens([AddedToken(word, normalized=False) for word in dict.fromkeys(words)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS, model="m")

    def parsed(name, text):
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request)
        calls = [ToolCall(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
        return (found.content or "").strip(), calls

    return parsed


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_calls_are_those_that_vllm_finds(vllm_parsed, name, count):
    form = FORMS[name]
    calls = CALLS[:1] if form is llama else CALLS[:count]
    if count == 0:
        text = "so\nnothing is called"
        assert find_calls(text, TOOLS) == (text, []) and vllm_parsed(name, text) == (text, [])
        return
    text = answer(form, calls)
    content, found = find_calls(text, TOOLS)
    assert found == calls
    assert (content.strip(), found) == vllm_parsed(name, text)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_damaged_calls_are_calls_or_text(form):
    """200 answers with characters left out, repeated, or cut off at their end."""
    chance = random.Random(1)
    whole, as_text = answer(form, CALLS[:1] if form is llama else CALLS), 0
    for _ in range(200):
        text = whole
        for _ in range(chance.randrange(1, 5)):
            at, length = chance.randrange(len(text)), chance.randrange(1, 12)
            text = chance.choice([text[:at] + text[at + length :], text[: at + length] + text[at:], text[:at] + "x"])
            text = text or "x"
        content, calls = find_calls(text, TOOLS)
        assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in calls)
        assert calls or content == text
        assert not calls or text.startswith(content)
        as_text += not calls
    assert 20 < as_text < 200


@pytest.mark.parametrize("form", [form for form in FORMS.values() if form is not llama])
def test_one_malformed_call_makes_all_of_the_answer_text(form):
    text = answer(form, CALLS).replace(json.dumps(CALLS[1].arguments), '{"a": }').replace("look_up", "")
    assert find_calls(text, TOOLS) == (text, [])


def test_a_call_in_the_thinking_is_none():
    thought = f"<think>maybe {hermes(CALLS[0])}?</think>"
    assert find_calls(thought + "no", TOOLS) == (thought + "no", [])
    assert find_calls(thought + hermes(CALLS[1]), TOOLS) == (thought, [CALLS[1]])


def test_json_is_a_call_only_of_a_tool_that_there_is():
    for text in ('{"name": "other", "parameters": {}}', '{"a": 1}', "[1]", "{", '{"name": "add", "parameters": 5}'):
        assert find_calls(text, TOOLS) == (text, [])
    assert find_calls('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', TOOLS) == (
        "",
        [ToolCall("add", {"a": 1})],
    )


KINDS = {
    "number": {"type": "integer"},
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "null"]},
    "list": {"type": "array"},
}


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("number", "1", 1),
        ("number", "one", "one"),
        ("text", "true", "true"),
        ("flag", "True", True),
        ("maybe", "123", "123"),
        ("maybe", "null", None),
        ("either", "5", 5),
        ("list", "[1, 2]", [1, 2]),
        ("other", "123", "123"),
    ],
)
def test_arguments_without_quotes_are_of_their_schemas_types(name, written, value):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": KINDS}}}]
    for form in (glm, coder):
        assert find_calls(form(ToolCall("add", {name: written})), tools) == ("", [ToolCall("add", {name: value})])


@pytest.mark.parametrize(
    "text",
    [
        hermes(CALLS[0]) + '\n<tool_call>\n{"name": "add", "argu',
        hermes(CALLS[0]) + "\n<tool_call>oops</tool_call>",
        "<tool_call>oops</tool_call>\n" + hermes(CALLS[0]),
        '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '{"name": ["add"], "parameters": {}}',
        '{"name": "add", "score": 3}',
        "<think>I could call " + hermes(CALLS[0]) + " but",
    ],
)
def test_what_is_not_whole_makes_all_of_the_answer_text(text):
    assert find_calls(text, TOOLS) == (text, [])


@pytest.mark.parametrize("tag", ["</think>", "</thinking>", "[/THINK]"])
def test_the_end_of_thinking_within_an_argument_is_text(tag):
    call = ToolCall("add", {"b": f"ends with {tag} tag"})
    assert find_calls(hermes(call), TOOLS) == ("", [call])
    assert find_calls("<think>so</think>" + hermes(call), TOOLS) == ("<think>so</think>", [call])


@pytest.mark.parametrize("tool", [None, 5, {}, {"function": None}, {"function": {"name": "add", "parameters": 5}}])
def test_tools_of_any_kind_do_no_harm(tool):
    assert find_calls(hermes(CALLS[0]), [tool]) == ("", CALLS[:1])


def test_an_end_of_a_call_in_a_text_ends_no_call():
    call = ToolCall("add", {"b": "a </tool_call> b"})
    assert find_calls(hermes(call), TOOLS) == ("", [call])


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        ("<think>\na\n</think>\n\nb", "a", "b"),
        ("a</think>b", "a", "b"),
        ("no thought", "", "no thought"),
        ("<think>never ends", "never ends", ""),
        ("Hello <think>x</think> world", "", "Hello <think>x</think> world"),
        ("[THINK]a[/THINK]b", "a", "b"),
        ("◁think▷a◁/think▷b", "a", "b"),
    ],
)
def test_thinking_is_split_from_what_is_said(text, thought, said):
    assert split_thinking(text) == (thought, said)

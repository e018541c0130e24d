"""Conversations in the forms in which they are published, and rows that are none."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_megatron.config import ConfigError, SFTConfig
from areal_megatron.data.conversations import conversation_of, is_conversation
from areal_megatron.data.examples import read_examples
from areal_megatron.data.prompts import LeftOut
from areal_megatron.data.tokenizer import Tokenizer
from tests.support.conversation_templates import folder_of

USER, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
AGAIN, SUM = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "S"}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [ADD]}


def calling(arguments):
    return CALLING | {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}]}


TOLD = {"role": "tool", "content": "5"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
AS_TEXT = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
FOUR = [USER, HELLO, AGAIN, SUM]

# name: (row, messages, tools, trained)
FORMS = {
    "OpenAI": ({"messages": FOUR}, FOUR, None, (1, 3)),
    "a prompt beside messages": ({"prompt": "Hi", "prompt_id": "1", "messages": FOUR}, FOUR, None, (1, 3)),
    "parts of content": (
        {"messages": [USER | {"content": [{"type": "text", "text": "H"}, {"text": "i"}]}, HELLO]},
        FOUR[:2],
        None,
        (1,),
    ),
    "thinking": (
        {"messages": [USER, HELLO | {"thinking": "t"}]},
        [USER, HELLO | {"thinking": "t"}],
        None,
        (1,),
    ),
    "reasoning_content": (
        {"messages": [USER, HELLO | {"reasoning_content": "t", "name": None}]},
        [USER, HELLO | {"thinking": "t"}],
        None,
        (1,),
    ),
    "tools, and arguments as text": (
        {
            "tools": TOOLS,
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{**ADD, "id": "c", "function": {"name": "add", "arguments": '{"a": 2}'}}],
                },
                TOLD | {"tool_call_id": "c"},
                SUM,
            ],
        },
        [USER, CALLING | {"tool_calls": [ADD | {"id": "c"}]}, TOLD | {"tool_call_id": "c"}, SUM],
        TOOLS,
        (1, 3),
    ),
    "flat calls, and tools as text": (
        {
            "tools": json.dumps(TOOLS),
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": None}}]},
                TOLD,
                SUM,
            ],
        },
        [USER, calling({"a": 2, "b": None}), TOLD, SUM],
        TOOLS,
        (1, 3),
    ),
    "AReaL's τ²": (
        {
            "messages": [SYSTEM, HELLO, AGAIN],
            "answer": {"content": "", "thinking": "t", "tool_calls": [ADD]},
            "metadata": {"turn_index": 1, "correct": 1},
        },
        [SYSTEM, HELLO, AGAIN, CALLING | {"thinking": "t"}],
        None,
        (3,),
    ),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello"},
            ]
        },
        [SYSTEM, USER, HELLO],
        None,
        (2,),
    ),
    "LLaMA-Factory": (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "5"},
                {"from": "gpt", "value": "5"},
            ],
            "tools": json.dumps(TOOLS),
        },
        [USER, CALLING, TOLD, SUM],
        TOOLS,
        (1, 3),
    ),
    "a system's message in a field of its own": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "S"},
        [SYSTEM, USER, HELLO],
        None,
        (2,),
    ),
    "Hermes, with calls as text": (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": f"{AS_TEXT}\n{AS_TEXT}"},
                {"from": "tool", "value": "5"},
                {"from": "tool", "value": "5"},
                {"from": "gpt", "value": "5"},
            ],
            "tools": json.dumps([{"name": "add"}]),
        },
        [USER, {"role": "assistant", "content": f"{AS_TEXT}\n{AS_TEXT}"}, TOLD, TOLD, SUM],
        TOOLS,
        (1, 4),
    ),
    "tools as OpenAI's responses have them": (
        {"messages": FOUR[:2], "tools": [{"type": "function", "name": "add"}]},
        FOUR[:2],
        TOOLS,
        (1,),
    ),
    "a response beside messages": ({"messages": FOUR[:3], "response": "5"}, FOUR, None, (1, 3)),
    "a response and a prompt beside messages": (
        {"prompt": "2+3?", "response": "5", "completion": "", "messages": FOUR},
        FOUR,
        None,
        (1, 3),
    ),
    "a system said twice": ({"system": "S", "messages": [SYSTEM, *FOUR[:2]]}, [SYSTEM, *FOUR[:2]], None, (2,)),
    "function_call, and its result": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
                {"role": "function", "name": "add", "content": "5"},
                SUM,
            ],
            "tools": "null",
        },
        [USER, CALLING, TOLD | {"name": "add"}, SUM],
        None,
        (1, 3),
    ),
    "arguments by other names, and one tool": (
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [{"name": "add", "parameters": {"a": 2}}]}],
            "tools": TOOLS[0],
        },
        [USER, CALLING],
        TOOLS,
        (1,),
    ),
    "the last message once more": ({"messages": FOUR, "completion": "5\n"}, FOUR, None, (1, 3)),
    "TRL, prompt and completion": ({"prompt": FOUR[:3], "completion": [SUM]}, FOUR, None, (3,)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_published_form_is_read(form):
    row, messages, tools, trained = FORMS[form]
    assert is_conversation(row)
    found = conversation_of(row, "x:1", "all")
    assert (found.messages, found.tools, found.trained) == (messages, tools, trained)
    assert conversation_of(row, "x:1", "last").trained == trained[-1:]


def test_nulls_that_json_states_stay_and_those_that_columns_add_go(tmp_path):
    tool = {
        "name": "add",
        "description": None,
        "parameters": {"type": "object", "properties": {"a": {"default": None}}},
    }
    stated = {"messages": [USER, calling({"a": None, "b": 1}), TOLD, SUM], "tools": [TOOLS[0] | {"function": tool}]}
    other = {"messages": [USER, calling({"a": 5, "b": 6, "c": 7})], "tools": TOOLS}
    path, shown = tmp_path / "rows.jsonl", {}
    path.write_text("".join(json.dumps(row) + "\n" for row in (stated, other)))
    pq.write_table(pa.Table.from_pylist([stated, other]), tmp_path / "rows.parquet")
    tokenizer = Tokenizer(folder_of(tmp_path / "model", "qwen2.5"))
    for kind in ("jsonl", "parquet"):
        example, _ = read_examples(tmp_path / f"rows.{kind}", tokenizer)
        shown[kind] = tokenizer.decode(example.samples[0].tokens.tolist(), special=True)
    assert '"arguments": {"a": null, "b": 1}' in shown["jsonl"] and '"default": null' in shown["jsonl"]
    assert '"description": null' in shown["jsonl"]
    assert '"arguments": {"b": 1}' in shown["parquet"] and "null" not in shown["parquet"]


@pytest.mark.parametrize("marks", [("weight", 0, 1), ("train", False, True), ("train", None, True)])
def test_marked_messages_alone_are_trained(marks):
    key, no, yes = marks
    messages = [USER, HELLO | {key: no}, AGAIN, SUM | {key: yes}]
    assert conversation_of({"messages": messages}, "x:1", "marked").trained == (3,)
    messages = [USER, HELLO | {key: yes}, AGAIN, SUM]
    assert conversation_of({"messages": messages}, "x:1", "marked").trained == (1,)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [HELLO, SYSTEM, USER]}, "message 2 is of system, which comes first"),
        ({"messages": [USER, HELLO, SUM]}, "message 3 is the assistant's, as is the one before it"),
        ({"messages": [USER, HELLO, TOLD, SUM]}, "message 3 is a tool's result without a call"),
        ({"messages": [USER, TOLD, SUM]}, "message 2 is a tool's result without a call"),
        ({"messages": [USER, CALLING, TOLD, TOLD, SUM]}, "message 4 is a tool's result without a call"),
        ({"messages": [USER, CALLING, AGAIN, TOLD, SUM]}, "message 4 is a tool's result without a call"),
        (
            {"messages": [USER, CALLING | {"tool_calls": [ADD | {"id": "c"}]}, TOLD | {"tool_call_id": "d"}]},
            "message 3 is the result of call 'd', of which there is none",
        ),
        ({"messages": [SYSTEM, USER]}, "no message is the assistant's"),
        (
            {"messages": FOUR, "response": "6"},
            "field 'response' has another answer than the row has elsewhere",
        ),
        ({"messages": FOUR[:3], "response": "5", "completion": "6"}, "field 'completion' has another answer"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "[]"}]}, "message 2 of 'messages' is the assistant's"),
        (
            {"messages": [USER | {"content": [{"type": "image", "text": "A cat"}]}, HELLO]},
            "message 1 of 'messages' has",
        ),
        ({"messages": "Hi"}, "field 'messages' is a text, expected a list"),
        ({"messages": []}, "field 'messages' is empty"),
        ({"messages": [USER, SYSTEM, HELLO], "system": "T"}, "message 3 is of system, which comes first"),
        ({"messages": [USER, "Hello"]}, "message 2 of 'messages' is a text, expected an object"),
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, "message 2 of 'messages' has the role 'bot', expected"),
        ({"messages": [USER, {"content": "a"}]}, "message 2 of 'messages' has the role None, expected"),
        (
            {"messages": [USER, HELLO | {"content": 5}]},
            "message 2 of 'messages' has a content that is a number, expected a text",
        ),
        ({"messages": [USER, HELLO | {"content": [{"type": "image_url"}]}]}, "message 2 of 'messages' has a part that"),
        ({"messages": [USER, HELLO | {"content": " "}]}, "message 2 of 'messages' is the assistant's and says nothing"),
        (
            {"messages": [USER, HELLO | {"thinking": ["t"]}]},
            "message 2 of 'messages' has thinking that is a list, expected a text",
        ),
        ({"messages": [USER, HELLO | {"tool_calls": [{"name": 1}]}]}, "message 2 of 'messages': its tool_calls must"),
        ({"messages": [USER, HELLO | {"tool_calls": "x"}]}, "message 2 of 'messages': its tool_calls must be a list"),
        ({"messages": [USER, HELLO], "tools": "x"}, "field 'tools' is no list of tools"),
        ({"messages": [USER, HELLO], "tools": [1]}, "field 'tools' must be a list of objects"),
        ({"messages": [USER], "answer": {"content": ""}}, "field 'answer' is the assistant's and says nothing"),
        ({"messages": [USER], "answer": "Hello"}, "field 'answer' is a text beside messages without an answer"),
        ({"messages": [USER], "answer": HELLO | {"weight": 0}}, "every message of the assistant has `weight` 0"),
        (
            {"messages": [USER, calling({"a": float("nan")})]},
            "message 2 of 'messages': its tool_calls must be a list",
        ),
        ({"messages": [USER, calling('{"a": [1e999]}')]}, "message 2 of 'messages': its tool_calls must be a list"),
        ({"messages": [USER, HELLO], "tools": '[{"name": "a", "default": NaN}]'}, "field 'tools' is no list of tools"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "bard", "value": "b"}]}, "message 2 of 'conv"),
    ],
)
def test_other_rows_are_refused_in_a_line(row, problem):
    with pytest.raises(ConfigError) as error:
        conversation_of(row, "x:1", "all")
    assert str(error.value).startswith(f"x:1: {problem}") and "\n" not in str(error.value)


THOUGHT = calling({"a": 2}) | {"thinking": "use it"}


def in_file(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("reply", ["response", "completion"])
@pytest.mark.parametrize("prompt", ["2+3?", [SYSTEM, AGAIN], [AGAIN, THOUGHT, TOLD]])
def test_a_prompt_and_a_response_are_read_as_the_messages_that_they_are(tmp_path, prompt, reply):
    path, tokenizer = tmp_path / "rows.jsonl", Tokenizer(folder_of(tmp_path / "model", "qwen3"))
    asked = [AGAIN] if isinstance(prompt, str) else prompt
    beside, whole = {"prompt": prompt, reply: "5", "tools": TOOLS}, {"messages": [*asked, SUM], "tools": TOOLS}
    [one], [other] = (
        read_examples(in_file(path, row), tokenizer, SFTConfig(turns=turns))
        for row, turns in ((beside, "marked"), (whole, "last"))
    )
    [sample], [same] = one.samples, other.samples
    assert sample.tokens.tolist() == same.tokens.tolist() and sample.trained.tolist() == same.trained.tolist()
    shown = tokenizer.decode(sample.tokens.tolist(), special=True)
    assert '"name": "add"' in shown and ("use it" in shown) == (THOUGHT in asked)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": [USER, HELLO], "response": "5"}, "message 3 is the assistant's, as is the one before it"),
        ({"prompt": [USER, TOLD, HELLO, SUM], "response": "5"}, "message 2 is a tool's result without a call"),
        ({"prompt": [USER, CALLING], "response": "5"}, "message 3 is the assistant's, as is the one before it"),
        ({"prompt": "2+3?", "response": "5", "tools": "x"}, "field 'tools' is no list of tools"),
        ({"prompt": "2+3?", "tools": TOOLS}, "field 'response' is missing"),
    ],
)
def test_a_prompt_and_a_response_that_are_no_conversation_are_refused(tmp_path, row, problem):
    path, tokenizer = in_file(tmp_path / "rows.jsonl", row), Tokenizer(folder_of(tmp_path / "model", "qwen3"))
    with pytest.raises(ConfigError) as error:
        read_examples(path, tokenizer)
    assert str(error.value).startswith(f"{path}:1: {problem}") and "\n" not in str(error.value)


def test_tools_beside_a_prompt_are_refused_where_the_template_shows_none(tmp_path):
    path = in_file(tmp_path / "rows.jsonl", {"prompt": "2+3?", "completion": "5", "tools": TOOLS})
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: has tools, and the chat template shows none"):
        read_examples(path, Tokenizer(folder_of(tmp_path / "model", "deepseek")))


def test_marks_that_are_none_and_rows_without_any_are_refused():
    with pytest.raises(ConfigError, match=r"x:1: sft.turns=marked, and no message of the assistant has"):
        conversation_of({"messages": [USER, HELLO]}, "x:1", "marked")
    with pytest.raises(ConfigError, match=r"x:1: message 2 has a mark of 0.5, expected 0 or 1"):
        conversation_of({"messages": [USER, HELLO | {"weight": 0.5}]}, "x:1", "all")


def test_unusable_conversations_are_left_out_and_counted_if_asked_for(tmp_path):
    rows = [{"messages": [USER, HELLO]}, {"messages": [USER, TOLD, SUM]}, {"messages": [USER, SUM | {"thinking": "t"}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, left_out = Tokenizer(folder_of(tmp_path / "model", "qwen2.5")), LeftOut.none()
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: message 2 is a tool's result without a call"):
        read_examples(path, tokenizer)
    [example] = read_examples(path, tokenizer, unusable="skip", left_out=left_out)
    assert example.where == f"{path}:1" and left_out.counts.total() == 2
    assert left_out.lines()[0] == f"1 × message 2 is a tool's result without a call, such as {path}:2"


@pytest.mark.parametrize("turns", ["all", "last", "marked"])
def test_one_mark_that_forbids_a_message_is_enough(turns):
    for forbidden in ({"weight": 1, "train": False}, {"weight": 0, "train": True}):
        row = {"messages": [USER, HELLO | {"weight": 1}, AGAIN, SUM | forbidden]}
        assert conversation_of(row, "x:1", turns).trained == (1,)


@pytest.mark.parametrize(
    ("marks", "turns", "trained"),
    [
        ((0, None), "all", (3,)),
        ((False, True), "all", (3,)),
        ((None, 0), "last", (1,)),
        ((0, None), "marked", (3,)),
        ((0, 1), "marked", (3,)),
        ((1, None), "marked", (1,)),
    ],
)
def test_a_message_marked_with_0_is_never_trained(marks, turns, trained):
    row = {"messages": []}
    for mark in marks:
        key = "train" if isinstance(mark, bool) else "weight"
        answer = {"role": "assistant", "content": "a"} | ({} if mark is None else {key: mark})
        row["messages"] += [{"role": "user", "content": "u"}, answer]
    assert conversation_of(row, "x:1", turns).trained == trained
    nothing = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "weight": 0}]}
    with pytest.raises(ConfigError, match=r"^x:1: every message of the assistant has `weight` 0 or `train` false"):
        conversation_of(nothing, "x:1", turns)

"""Samples of conversations: what the model will see, and of it what it is to say."""

import json
import random
import re
import time

import numpy as np
import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, SFTConfig
from areal_megatron.data.check import check_data
from areal_megatron.data.examples import read_examples
from areal_megatron.data.prompts import LeftOut
from areal_megatron.data.supervised import SupervisedData
from areal_megatron.data.tokenizer import Tokenizer
from tests.support.chat_folders import reference
from tests.support.conversation_templates import QWEN3, QWEN25, folder_of, marked

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOOL = json.dumps(TOOLS[0])
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
SYSTEM, HI = {"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}
SUM = {"role": "user", "content": "Sum?"}
HELLO = {"role": "assistant", "content": "Hello", "reasoning_content": "t1"}
CALLING = {"role": "assistant", "content": None, "reasoning_content": "t2", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "c1"}
FIVE = {"role": "assistant", "content": "It is 5", "reasoning_content": "t3"}
LONG = [SYSTEM, HI, HELLO, SUM, CALLING, RESULT, FIVE]


def unthinking(messages):
    return [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages]


Q_BEGIN = f"<|im_start|>system\nS\n\n# Tools\n{TOOL}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
Q_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
Q_SUM = "<|im_start|>user\nSum?<|im_end|>\n<|im_start|>assistant\n"
Q_RESULT = "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
Q25_BEGIN = f"<|im_start|>system\nS\n{TOOL}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
L_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
L_BEGIN = f"<s>{L_HEAD.format('system')}S<|eot_id|>{L_HEAD.format('user')}[{TOOL}]\n\nHi<|eot_id|>"
L_ASKS = L_HEAD.format("assistant")
G_BEGIN = f"[gMASK]<sop><|system|>\n# Tools\n{TOOL}<|system|>\nS<|user|>\nHi<|assistant|>"
G_ARGUMENT = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
G_CALL = f"\n<tool_call>add\n{G_ARGUMENT.format('a', 2)}{G_ARGUMENT.format('b', 3)}</tool_call>"
D_CALL = '<call>add\n{"a": 2, "b": 3}</call>'
HAND_RENDERED = {
    # thinking is dropped at a user's message, and kept over a tool's result
    "qwen3": (
        LONG,
        [
            f"{Q_BEGIN}⟦<think>\nt1\n</think>\n\nHello<|im_end|>⟧",
            f"{Q_BEGIN}Hello<|im_end|>\n{Q_SUM}⟦<think>\nt2\n</think>\n\n{Q_CALL}<|im_end|>⟧\n"
            f"{Q_RESULT}⟦<think>\nt3\n</think>\n\nIt is 5<|im_end|>⟧",
        ],
    ),
    "qwen2.5": (
        unthinking(LONG),
        [
            f"{Q25_BEGIN}⟦Hello<|im_end|>⟧\n{Q_SUM}⟦{Q_CALL}<|im_end|>⟧\n{Q_RESULT}⟦It is 5<|im_end|>⟧",
        ],
    ),
    "llama3.1": (
        unthinking(LONG),
        [
            f"{L_BEGIN}{L_ASKS}⟦Hello<|eot_id|>⟧{L_HEAD.format('user')}Sum?<|eot_id|>{L_ASKS}"
            f'⟦{{"name": "add", "parameters": {{"a": 2, "b": 3}}}}<|eot_id|>⟧'
            f'{L_HEAD.format("ipython")}"5"<|eot_id|>{L_ASKS}⟦It is 5<|eot_id|>⟧'
        ],
    ),
    "glm4.5": (
        LONG,
        [
            f"{G_BEGIN}⟦\n<think>t1</think>\nHello<|user|>⟧",
            f"{G_BEGIN}\n<think></think>\nHello<|user|>\nSum?<|assistant|>⟦\n<think>t2</think>{G_CALL}<|observation|>⟧"
            "\n<tool_response>\n5\n</tool_response><|assistant|>⟦\n<think>t3</think>\nIt is 5<|user|>⟧",
        ],
    ),
    # no tools, and each answer begins with the tag that the question ends with
    "deepseek": (
        LONG,
        [
            "<s>S<｜User｜>Hi<｜Assistant｜><think>\n⟦t1\n</think>\n\nHello<｜end▁of▁sentence｜>⟧",
            "<s>S<｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜><｜User｜>Sum?<｜Assistant｜><think>\n"
            f"⟦t2\n</think>\n\n{D_CALL}<｜end▁of▁sentence｜>⟧",
            "<s>S<｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜><｜User｜>Sum?<｜Assistant｜>"
            f"{D_CALL}<｜end▁of▁sentence｜><output>5</output><｜Assistant｜><think>\n"
            "⟦t3\n</think>\n\nIt is 5<｜end▁of▁sentence｜>⟧",
        ],
    ),
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(tmp_path, folder, *rows, left_out=None, **settings):
    return read_examples(
        write(tmp_path / "rows.jsonl", *rows), Tokenizer(folder), SFTConfig(**settings), left_out=left_out
    )


def by_hand(folder, text):
    """The tokens of a text and the places of those between ⟦ and ⟧."""
    library, ids, trained = reference(folder), [], []
    for number, piece in enumerate(re.split("[⟦⟧]", text)):
        new = library(piece, add_special_tokens=False).input_ids
        trained += range(len(ids), len(ids) + len(new)) if number % 2 else []
        ids += new
    return ids, trained


def rendered(example):
    return [(sample.tokens.tolist(), sample.trained.tolist()) for sample in example.samples]


@pytest.mark.parametrize("name", HAND_RENDERED)
def test_samples_are_those_rendered_by_hand(tmp_path, name):
    messages, expected = HAND_RENDERED[name]
    folder = folder_of(tmp_path / "model", name)
    row = {"messages": messages} | ({} if name == "deepseek" else {"tools": TOOLS})
    [example] = read(tmp_path, folder, row)
    assert rendered(example) == [by_hand(folder, text) for text in expected]
    total = sum(len(places) for _, places in rendered(example))
    assert {sample.row_tokens for sample in example.samples} == {total}
    # the last one alone is what the last sample trains last
    [last] = read(tmp_path, folder, row, turns="last")
    tokens, trained = rendered(last)[0]
    assert tokens == rendered(example)[-1][0] and set(trained) <= set(rendered(example)[-1][1])
    own = Tokenizer(folder).decode([tokens[place] for place in trained], special=True)
    assert own == re.split("[⟦⟧]", expected[-1])[-2]


@pytest.mark.parametrize("name", HAND_RENDERED)
def test_before_each_trained_message_stands_what_the_model_is_asked(tmp_path, name):
    """The prompt's tokens are those that an engine gets for the messages before."""
    messages, _ = HAND_RENDERED[name]
    folder = folder_of(tmp_path / "model", name)
    tools = None if name == "deepseek" else TOOLS
    [example] = read(tmp_path, folder, {"messages": messages, "tools": tools})
    begun = []
    for sample in example.samples:
        places = sample.trained
        starts = places[np.flatnonzero(np.diff(places, prepend=-9) > 1)]
        begun += [sample.tokens[:start].tolist() for start in starts]
    asked = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    spoken = json.loads(json.dumps(messages))
    for message in spoken:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    library = reference(folder)
    assert begun == [
        library.apply_chat_template(spoken[:number], tools=tools, add_generation_prompt=True)["input_ids"]
        for number in asked
    ]


def masks(library, messages, tools=None):
    found = library.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True, return_dict=True)
    return found["input_ids"], np.flatnonzero(found["assistant_masks"]).tolist()


def chats(seed, thinking=False, begin="a"):
    """Random conversations with texts that tokenizers merge, words that control others, and characters of several
    bytes. Answers begin with `begin`."""
    draw = random.Random(seed)
    pieces = ["is it", " 5", "naïve ∑", "\n\n x", "def f(a):", "a ", "<tool>", "∑", "日本", "user"]
    for _ in range(40):
        messages = [SYSTEM] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 4)):
            messages.append({"role": "user", "content": "".join(draw.choices(pieces, k=draw.randint(1, 4)))})
            said = begin + "".join([*draw.choices(pieces, k=draw.randint(0, 3)), "a"])
            messages.append({"role": "assistant", "content": said})
            if thinking and draw.random() < 0.7:
                messages[-1]["reasoning_content"] = "so " + draw.choice(pieces).strip()
        yield messages


@pytest.mark.parametrize(("name", "end"), [("qwen3", ""), ("qwen2.5", ""), ("llama3.1", ""), ("glm4.5", "<|user|>")])
def test_texts_that_merge_over_the_edge_of_an_answer_are_seen_and_said_as_they_are_deployed(tmp_path, name, end):
    """Each answer follows the tokens of the question that asks for it, and is the rest of the template's text."""
    folder = folder_of(tmp_path / "model", name)
    library, ours = reference(folder), Tokenizer(folder)
    rows = [*chats(5, thinking=name in ("qwen3", "glm4.5"), begin="\n ")]
    merged = 0
    for messages, example in zip(rows, read(tmp_path, folder, *({"messages": row} for row in rows)), strict=True):
        answers = iter(number for number, message in enumerate(messages) if message["role"] == "assistant")
        for sample in example.samples:
            tokens, places = sample.tokens, sample.trained
            edges = np.flatnonzero(np.diff(places, prepend=-9) > 1)
            for first, last in zip(places[edges], [*places[edges[1:] - 1], places[-1]], strict=True):
                number = next(answers)
                asked = library.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False)
                whole = library.apply_chat_template(messages[: number + 1], tokenize=False)
                before = library(asked, add_special_tokens=False).input_ids
                if first == places[0]:
                    assert tokens[:first].tolist() == before
                assert ours.decode(tokens[:first].tolist(), special=True) == asked
                said = ours.decode(tokens[first : last + 1].tolist(), special=True)
                assert said == whole.removeprefix(asked).removesuffix("\n") + end
                merged += library(whole, add_special_tokens=False).input_ids[: len(before)] != before
        assert next(answers, None) is None
    assert merged > 10 or name != "qwen2.5"


def test_marks_of_a_template_decide_as_transformers_reads_them(tmp_path):
    folder = folder_of(tmp_path / "model", "qwen2.5", template=marked(QWEN3.replace("loop.index0 > ns.asked", "false")))
    library, rows = reference(folder), [*chats(1)]
    for messages, example in zip(rows, read(tmp_path, folder, *({"messages": row} for row in rows)), strict=True):
        assert rendered(example) == [masks(library, messages)]


def test_a_message_of_which_a_template_marks_nothing_is_not_trained(tmp_path):
    template = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{- message.content }}{% endgeneration %}
{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name }}{% endfor %}
{%- else %}{{- message.content }}{% endif %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
    folder = folder_of(tmp_path / "model", "qwen2.5", template=template)
    messages = unthinking([HI, HELLO, SUM, CALLING | {"content": ""}, RESULT, FIVE])
    [example] = read(tmp_path, folder, {"messages": messages})
    assert rendered(example) == [masks(reference(folder), messages)]
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the chat template marks nothing of its trained messages"):
        read(tmp_path, folder, {"messages": messages[2:4]})


def test_a_template_may_mark_a_part_of_what_it_shows_of_a_message(tmp_path):
    template = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{- '<think>' + message.reasoning_content + '</think>' }}
{%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
    folder = folder_of(tmp_path / "model", "qwen2.5", template=template)
    messages = [HI, HELLO, SUM, FIVE]
    [whole] = read(tmp_path, folder, {"messages": messages})
    ids, trained = masks(reference(folder), messages)
    assert rendered(whole) == [(ids, trained)]
    [cut] = read(tmp_path, folder, {"messages": messages}, max_tokens=trained[-1])
    end = ids.index(Tokenizer(folder).stop_tokens[0], trained[0]) + 1
    first = [place for place in trained if place < end]
    assert rendered(cut) == [(ids[: first[-1] + 1], first)] and cut.cut == 1


def test_a_mark_around_several_messages_repeats_none(tmp_path):
    template = """\
{%- generation %}{% for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content + '<|im_end|>\\n' }}{% endfor %}{% endgeneration %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
    folder = folder_of(tmp_path / "model", "qwen2.5", template=template)
    messages = unthinking([HI, HELLO, SUM, FIVE])
    [example] = read(tmp_path, folder, {"messages": messages})
    ids, trained = masks(reference(folder), messages)
    assert rendered(example) == [(ids, trained[1:])]  # nothing is before the first token


def test_marks_of_a_template_that_drops_thinking_give_a_sample_for_each_text_that_is_seen(tmp_path):
    folder = folder_of(tmp_path / "model", "qwen3", template=marked(QWEN3))
    library, rows = reference(folder), [*chats(2, thinking=True), [*LONG[:3], SUM, FIVE]]
    for messages, example in zip(rows, read(tmp_path, folder, *({"messages": row} for row in rows)), strict=True):
        ends = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        expected = []
        for end in ends:
            ids, trained = masks(library, messages[: end + 1])
            asked = library.apply_chat_template(messages[:end], add_generation_prompt=True)["input_ids"]
            expected.append((ids, [place for place in trained if place >= len(asked)]))
        assert rendered(example) == expected


def test_control_words_in_messages_are_text_and_move_no_mask(tmp_path):
    hostile = "∑<|im_end|>\n<|im_start|>assistant\n5"
    for template in (QWEN25, marked(QWEN3)):
        folder = folder_of(tmp_path / "model", "qwen2.5", template=template)
        messages = [{"role": "user", "content": hostile}, {"role": "assistant", "content": f"so {hostile} ∑"}]
        [example] = read(tmp_path, folder, {"messages": messages})
        [sample] = example.samples
        tokenizer = Tokenizer(folder)
        end = tokenizer.stop_tokens[0]
        said = tokenizer.decode(sample.tokens[sample.trained].tolist(), special=True)
        assert said.endswith(f"so {hostile} ∑<|im_end|>") and said.count("so ") == 1
        assert sample.tokens[sample.trained].tolist().count(end) == 1


def test_thinking_with_the_words_of_the_answer_is_not_taken_for_it(tmp_path):
    same = {"role": "assistant", "content": "It is 5", "thinking": "5"}
    folder = folder_of(tmp_path / "model", "deepseek")
    [example] = read(tmp_path, folder, {"messages": [HI, same]})
    said = "<s><｜User｜>Hi<｜Assistant｜><think>\n⟦5\n</think>\n\nIt is 5<｜end▁of▁sentence｜>⟧"
    assert rendered(example) == [by_hand(folder, said)]
    speakers = "{% for m in messages %}<{{ m.role }}>{{ m.content + '</s>' }}{% endfor %}"
    speakers += "{% if add_generation_prompt %}<assistant>{% endif %}"
    for template in (None, speakers):
        folder = folder_of(tmp_path / "model", "llama3.1", template)
        with pytest.raises(ConfigError, match="message 2 has thinking, and the chat template has no place for it"):
            read(tmp_path, folder, {"messages": [HI, same]})


def test_many_tags_in_a_message_take_no_longer_than_other_texts(tmp_path):
    messages = [{"role": "user", "content": "<a>" * 30_000 + "?"}, {"role": "assistant", "content": "<think>" * 30_000}]
    begun = time.process_time()
    read(tmp_path, folder_of(tmp_path / "model", "deepseek"), {"messages": messages})
    assert time.process_time() - begun < 10


@pytest.mark.parametrize("before", ["<tool_response>a", "<s><|im_end|>"], ids=["tagged", "like a rendered text"])
def test_much_white_space_in_a_message_takes_no_longer_than_other_texts(tmp_path, before):
    end = "</tool_response>" if before.startswith("<tool") else "c"
    told = {"role": "tool", "content": before + " " * 100_000 + f"b {end}"}
    folder = folder_of(tmp_path / "model", "qwen3")
    begun = time.process_time()
    [example] = read(tmp_path, folder, {"messages": [HI, CALLING, told, FIVE]})
    assert time.process_time() - begun < 5 and len(example.samples) == 1


def test_thinking_inside_the_content_is_the_messages_thinking(tmp_path):
    folder = folder_of(tmp_path / "model", "deepseek")
    inline = HELLO | {"content": "<think>\nt1\n</think>\n\nHello", "reasoning_content": None}
    apart, within = read(tmp_path, folder, {"messages": [HI, HELLO]}, {"messages": [HI, inline]})
    assert rendered(apart) == rendered(within)


def test_what_the_template_writes_too_is_not_repeated(tmp_path):
    folder, told = folder_of(tmp_path / "model", "qwen3"), {"role": "tool", "content": '{"sum": "5"}'}
    ended = HELLO | {"content": "Hello<|im_end|>\n"}
    tagged = told | {"content": f"<tool_response>\n{told['content']}\n</tool_response>\n"}
    rows = [[HI, hello, SUM, CALLING, result] for hello, result in ((HELLO, told), (ended, told), (HELLO, tagged))]
    plain, *others = read(tmp_path, folder, *({"messages": row} for row in rows))
    assert [rendered(other) for other in others] == [rendered(plain)] * 2


def test_a_tools_result_that_the_template_shows_as_json_is_seen(tmp_path):
    row = [HI, CALLING, {"role": "tool", "content": 'Said "5"\nä'}, {"role": "assistant", "content": "It is 5"}]
    [example] = read(tmp_path, folder_of(tmp_path / "model", "llama3.1"), {"messages": unthinking(row)})
    assert len(example.samples) == 1


def test_samples_end_with_the_last_message_that_fits(tmp_path):
    folder = folder_of(tmp_path / "model", "qwen2.5")
    whole = [HI, {"role": "assistant", "content": "a"}, SUM, {"role": "assistant", "content": "b"}]
    [sample] = read(tmp_path, folder, {"messages": whole})[0].samples
    [first] = read(tmp_path, folder, {"messages": whole[:2]})[0].samples
    [example] = read(tmp_path, folder, {"messages": whole}, max_tokens=len(sample.tokens))
    assert rendered(example) == [(sample.tokens.tolist(), sample.trained.tolist())] and not example.cut
    [example] = read(tmp_path, folder, {"messages": whole}, max_tokens=len(sample.tokens) - 1)
    assert rendered(example) == [(first.tokens.tolist(), first.trained.tolist())] and example.cut == 1
    assert example.samples[0].row_tokens == len(first.trained)
    left_out = LeftOut.none()
    rows = [
        {"messages": whole},
        {"messages": [HI, {"role": "assistant", "content": "a" * 900}]},
        {"prompt": "a", "response": "b" * 900},
    ]
    found = read(tmp_path, folder, *rows, max_tokens=len(first.tokens), left_out=left_out)
    assert [example.where for example in found] == [f"{tmp_path}/rows.jsonl:1"]
    assert left_out.lines() == [f"2 × longer than sft.max_tokens={len(first.tokens)}, such as {tmp_path}/rows.jsonl:2"]
    with pytest.raises(ConfigError, match=r"no row can be used: \S+rows.jsonl:1: longer than sft.max_tokens=3"):
        read(tmp_path, folder, {"messages": whole}, max_tokens=3)


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("qwen2.5", {"messages": [HI, HELLO]}, "message 2 has thinking, and the chat template has no place for it"),
        ("llama3.1", {"messages": [HI, HELLO]}, "message 2 has thinking, and the chat template has no place for it"),
        (
            "llama3.1",
            {"messages": [HI, {**CALLING, "reasoning_content": "", "content": "Let me see."}]},
            "message 2 has content, and the chat template has no place for it",
        ),
        ("llama3.1", {"messages": [HI, CALLING | {"tool_calls": [CALL, CALL]}]}, "the chat template of "),
        (
            "qwen2.5",
            {
                "messages": [
                    {"role": "developer", "content": "Be brief."},
                    HI,
                    {"role": "assistant", "content": "Hello"},
                ]
            },
            "the chat template of",
        ),
        ("qwen3", {"messages": [HELLO, HI]}, "message 1 is the assistant's and answers nothing"),
        ("deepseek", {"messages": [HI, HELLO], "tools": TOOLS}, "has tools, and the chat template shows none"),
        (
            "qwen3",
            {
                "messages": [
                    {"role": "user", "content": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"},
                    HELLO,
                ]
            },
            "message 1 is rendered by a chat template already",
        ),
    ],
)
def test_what_a_template_does_not_show_is_refused_in_a_line(tmp_path, name, row, problem):
    folder = folder_of(tmp_path / "model", name)
    good = {"messages": [HI, {"role": "assistant", "content": "Hello"}]}
    with pytest.raises(ConfigError) as error:
        read(tmp_path, folder, good, row)
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl:2: {problem}") and "\n" not in str(error.value)


def test_a_template_that_asks_by_another_text_than_it_shows_is_refused(tmp_path):
    asks = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    template = QWEN25.replace(asks, asks.replace("assistant\\n", "assistant (now)\\n"))
    folder = folder_of(tmp_path / "model", "qwen2.5", template=template)
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: message 2 is answered after another text than"):
        read(tmp_path, folder, {"messages": [HI, {"role": "assistant", "content": "Hello"}]})


def test_thinking_is_refused_where_the_question_has_ended_it(tmp_path):
    asks = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    template = QWEN3.replace(asks, asks.replace("assistant\\n", "assistant\\n<think>\\n\\n</think>\\n\\n"))
    assert template != QWEN3
    folder = folder_of(tmp_path / "model", "qwen3", template=template)
    [example] = read(tmp_path, folder, {"messages": unthinking([HI, HELLO])})
    said = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Hello<|im_end|>⟧"
    assert rendered(example) == [by_hand(folder, said)]
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: message 2 has thinking, and the chat template asks for an"):
        read(tmp_path, folder, {"messages": [HI, HELLO]})


def test_a_conversation_for_a_model_without_a_template_is_refused(world, tmp_path):
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:1: the row is a conversation, but the model has no chat template"
    ):
        read(tmp_path, world / "model", {"messages": [HI, HELLO]})


def test_a_batch_has_all_samples_of_its_rows_and_the_launcher_says_what_is_not_trained(tmp_path):
    folder = folder_of(tmp_path / "model", "qwen3")
    short = [HI, HELLO, SUM, FIVE]
    long = [*short, HI, HELLO | {"content": "a" * 300}]
    rows = [{"messages": short}, {"messages": long}, {"messages": [HI, RESULT]}, {"prompt": "1", "response": "b" * 300}]
    path = write(tmp_path / "rows.jsonl", *rows)
    config = Config(
        name="x",
        mode="sft",
        updates=1,
        batch_size=3,
        model=ModelConfig(path=str(folder)),
        data=DataConfig(train=str(path), unusable_rows="skip"),
        sft=SFTConfig(max_tokens=200),
    )
    said = []
    assert [example.where for example in check_data(config, said.append)] == [f"{path}:1", f"{path}:2"]
    assert said[0].startswith(
        "warning: data.train: 2 of 4 rows cannot be used and are left out: 1 × message 2 is a tool"
    )
    assert said[1] == (
        "warning: data.train: 1 trained messages in 1 rows are beyond sft.max_tokens=200 and left out, such as in "
        f"{path}:2"
    )
    batch = SupervisedData(config, Tokenizer(folder)).next()  # three rows of two: one of them twice
    assert sorted({sample.where for sample in batch}) == [f"{path}:1", f"{path}:2"] and len(batch) == 6

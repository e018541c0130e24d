"""Pairs of answers, in the shapes in which they are published."""

import json

import numpy as np
import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig
from areal_megatron.data.check import check_data
from areal_megatron.data.pairs import read_pair, read_pairs
from areal_megatron.data.supervised import SupervisedData, write
from areal_megatron.data.tokenizer import Tokenizer
from tests.support.chat_folders import reference
from tests.support.conversation_templates import QWEN3, folder_of, marked

USER = {"role": "user", "content": "What is 1+1?"}
RIGHT, WRONG = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
SYSTEM = {"role": "system", "content": "Add."}
SHAPES = {
    "texts": ({"prompt": "What is 1+1?", "chosen": "2", "rejected": "3"}, "What is 1+1?"),
    "messages": ({"prompt": [SYSTEM, USER], "chosen": [RIGHT], "rejected": [WRONG]}, [SYSTEM, USER]),
    "conversations": (
        {"prompt": "What is 1+1?", "chosen": [USER, RIGHT | {"extra": 1}], "rejected": [USER, WRONG]},
        [USER],
    ),
    "no prompt": ({"chosen": [SYSTEM, USER, RIGHT], "rejected": [SYSTEM, USER, WRONG]}, [SYSTEM, USER]),
    "question and system": (
        {"system": "Add.", "question": "What is 1+1?", "chosen": "2", "rejected": "3"},
        [SYSTEM, USER],
    ),
    "a system beside conversations": (
        {"system": "Add.", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        [SYSTEM, USER],
    ),
    "a system said twice": (
        {"system": "Add.", "prompt": None, "chosen": [SYSTEM, USER, RIGHT], "rejected": [SYSTEM, USER, WRONG]},
        [SYSTEM, USER],
    ),
    "a prompt that is null beside a question": (
        {"prompt": None, "question": "What is 1+1?", "chosen": "2", "rejected": "3"},
        "What is 1+1?",
    ),
    "instruction": ({"instruction": "What is 1+1?", "system": "", "chosen": "2", "rejected": "3"}, "What is 1+1?"),
    "one text": (
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: What is 1+1?\n\nAssistant: 2",
            "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: What is 1+1?\n\nAssistant: 3",
        },
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, USER],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_published_shape_is_read(shape):
    row, prompt = SHAPES[shape]
    assert read_pair(row, "x:1") == (prompt, "2", "3")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1+1", "chosen": "2"}, "x:1: field 'rejected' is missing"),
        ({"chosen": "2", "rejected": "3"}, "x:1: field 'prompt' is missing"),
        ({"prompt": "1+1", "chosen": "", "rejected": "3"}, "x:1: field 'chosen' is empty"),
        ({"prompt": "1+1", "chosen": 2, "rejected": "3"}, "x:1: field 'chosen' is a number"),
        ({"prompt": "1+1", "chosen": [{"role": "assistant"}], "rejected": "3"}, "x:1: message 1 of 'chosen' needs"),
        ({"prompt": "1+1", "chosen": [USER], "rejected": "3"}, "x:1: the last message of 'chosen' is of role 'user'"),
        ({"chosen": [USER, RIGHT], "rejected": [SYSTEM, USER, WRONG]}, "x:1: 'chosen' and 'rejected' differ before"),
        (
            {"prompt": [USER, RIGHT], "chosen": "2", "rejected": "3"},
            "x:1: message 3 is the assistant's, as is the one before it",
        ),
        (
            {"chosen": [USER, RIGHT, RIGHT], "rejected": [USER, RIGHT, WRONG]},
            "x:1: message 3 is the assistant's, as is the one before it",
        ),
    ],
)
def test_other_rows_are_refused_in_a_line(row, problem):
    with pytest.raises(ConfigError) as error:
        read_pair(row, "x:1")
    assert str(error.value).startswith(problem) and "\n" not in str(error.value)


def save(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pairs_are_tokenized_as_examples_are(world, tmp_path):
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(3)]
    tokenizer = Tokenizer(world / "model")
    same = {"prompt": "5+1=", "chosen": "6", "rejected": "6"}
    pairs = read_pairs(save(tmp_path / "pairs.jsonl", [rows[0], same, *rows[1:]]), tokenizer)
    assert [pair.where for pair in pairs] == [f"{tmp_path}/pairs.jsonl:{line}" for line in (1, 3, 4)]
    (prompt,), (chosen,) = tokenizer.prompts(["2+1="]), tokenizer.responses(["3"])
    assert pairs[2].chosen.tolist() == prompt + chosen and pairs[2].chosen.dtype == np.int32
    assert pairs[2].rejected[: len(prompt)].tolist() == prompt and pairs[2].prompt_length == len(prompt)
    with pytest.raises(ConfigError, match="in every row `chosen` and `rejected` are the same"):
        read_pairs(save(tmp_path / "same.jsonl", [same]), tokenizer)


CALL = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALLING = {"role": "assistant", "content": None, "reasoning_content": "use it", "tool_calls": [CALL]}
GUESSING = {"role": "assistant", "content": "3", "reasoning_content": "guess"}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c"}
Q_BEGIN = (
    f"<|im_start|>system\nAdd.\n\n# Tools\n{json.dumps(TOOLS[0])}<|im_end|>\n"
    "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
)
Q_CALL = '<think>\nuse it\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
Q_TOLD = f"{Q_BEGIN}{Q_CALL}\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
Q_GUESS = "<think>\nguess\n</think>\n\n3<|im_end|>"
MESSAGES = {
    "an answer each": (
        {"prompt": [SYSTEM, USER], "chosen": [CALLING], "rejected": [GUESSING], "tools": TOOLS},
        (Q_BEGIN, Q_CALL, Q_GUESS),
    ),
    "whole conversations": (
        {
            "chosen": [SYSTEM, USER, CALLING, RESULT, RIGHT | {"thinking": "2 it is"}],
            "rejected": [SYSTEM, USER, CALLING, RESULT, GUESSING],
            "tools": json.dumps(TOOLS),
        },
        (Q_TOLD, "<think>\n2 it is\n</think>\n\n2<|im_end|>", Q_GUESS),
    ),
    "a call and its result, as older APIs have them": (
        {
            "prompt": [SYSTEM, USER],
            "chosen": [{"role": "assistant", "content": "", "function_call": CALL["function"]}],
            "rejected": [WRONG],
        },
        (
            Q_BEGIN.replace(f"\n\n# Tools\n{json.dumps(TOOLS[0])}", ""),
            Q_CALL.replace("use it", ""),
            "<think>\n\n</think>\n\n3<|im_end|>",
        ),
    ),
    "a system of parts, beside a prompt": (
        {
            "system": "Add.",
            "prompt": [SYSTEM | {"content": [{"type": "text", "text": "Add."}]}, USER],
            "chosen": [CALLING],
            "rejected": [GUESSING],
            "tools": TOOLS,
        },
        (Q_BEGIN, Q_CALL, Q_GUESS),
    ),
    "a text against a message": (
        {"prompt": "What is 1+1?", "system": "Add.", "chosen": "2", "rejected": [GUESSING], "tools": TOOLS},
        (Q_BEGIN, "<think>\n\n</think>\n\n2<|im_end|>", Q_GUESS),
    ),
}


def test_arguments_that_are_null_stay_in_pairs(tmp_path):
    called = {"role": "assistant", "content": None, "function_call": None, "tool_calls": [{"name": "add"}]}
    called["tool_calls"][0]["arguments"] = {"a": None, "b": 1}
    row = {"prompt": [USER], "chosen": [called], "rejected": [WRONG], "tools": TOOLS}
    tokenizer = Tokenizer(folder_of(tmp_path / "model", "qwen2.5"))
    [pair] = read_pairs(save(tmp_path / "pairs.jsonl", [row]), tokenizer)
    assert '{"a": null, "b": 1}' in tokenizer.decode(pair.chosen.tolist(), special=True)


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("shape", MESSAGES)
def test_messages_with_thinking_and_calls_are_rendered_by_the_template(tmp_path, shape, marks):
    row, texts = MESSAGES[shape]
    folder = folder_of(tmp_path / "model", "qwen3", template=marked(QWEN3) if marks else None)
    [pair] = read_pairs(save(tmp_path / "pairs.jsonl", [row]), Tokenizer(folder))
    prompt, better, worse = (reference(folder)(text, add_special_tokens=False).input_ids for text in texts)
    assert (pair.chosen.tolist(), pair.rejected.tolist()) == ([*prompt, *better], [*prompt, *worse])
    assert pair.prompt_length == len(prompt) and "What is 1+1?" in pair.text


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": [USER, RESULT], "chosen": [CALLING], "rejected": [GUESSING]},
            "message 2 is a tool's result without",
        ),
        (
            {"prompt": [USER], "chosen": [CALLING], "rejected": [USER]},
            "the last message of 'rejected' is of role 'user'",
        ),
        (
            {"prompt": [USER], "chosen": [GUESSING], "rejected": [WRONG | {"thinking": 1}]},
            "message 1 of 'rejected' has",
        ),
        ({"chosen": [USER, CALLING], "rejected": [SYSTEM, USER, WRONG]}, "'chosen' and 'rejected' differ before"),
        (
            {"prompt": [USER], "chosen": [GUESSING], "rejected": [WRONG]},
            "message 2 has thinking, and the chat template",
        ),
    ],
)
def test_bad_messages_of_pairs_are_refused_in_a_line(tmp_path, row, problem):
    folder = folder_of(tmp_path / "model", "qwen2.5")
    with pytest.raises(ConfigError) as error:
        read_pairs(save(tmp_path / "pairs.jsonl", [row]), Tokenizer(folder))
    assert str(error.value).startswith(f"{tmp_path}/pairs.jsonl:1: {problem}") and "\n" not in str(error.value)


@pytest.fixture
def config(world, tmp_path):
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(10)]
    held_out = [{"prompt": f"{n}+2=", "chosen": str(n + 2), "rejected": str(n)} for n in range(4)]
    data = DataConfig(train=save(tmp_path / "pairs.jsonl", rows), eval=save(tmp_path / "held-out.jsonl", held_out))
    model = ModelConfig(path=str(world / "model"))
    return Config(name="x", mode="dpo", updates=9, batch_size=4, model=model, data=data)


def test_a_resumed_run_draws_what_the_other_would_have_drawn(config, tmp_path):
    tokenizer = Tokenizer(config.model.path)
    data = SupervisedData(config, tokenizer)
    assert {name: len(items) for name, items in data.held_out.items()} == {"held-out": 4}
    before = [pair.where for _ in range(3) for pair in data.next()]
    write(data.drawing, tmp_path / "checkpoint")
    again = SupervisedData(config, tokenizer, tmp_path / "checkpoint")
    after = [[pair.where for _ in range(5) for pair in each.next()] for each in (data, again)]
    assert after[0] == after[1] and set(before[:10]) == {*before} and len(set(before)) == 10
    save(tmp_path / "pairs.jsonl", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    with pytest.raises(ConfigError, match=r"data.train: 1 rows, .* made with 10; 1 are other ones, "):
        SupervisedData(config, tokenizer, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="no readable state of a run"):
        SupervisedData(config, tokenizer, tmp_path)


def test_held_out_pairs_that_are_trained_are_refused(config, tmp_path):
    check_data(config)
    config.data.eval = f"{config.data.eval},{config.data.train}"
    with pytest.raises(ConfigError, match=r"data.eval: 10 of 14 prompts are in data.train too, such as .*pairs.jsonl:"):
        check_data(config)
    config.data.eval = save(tmp_path / "answers.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(ConfigError, match=r"answers.jsonl:1: field 'chosen' is missing"):
        check_data(config)

import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from areal_megatron.config import Config, ConfigError, Data, Model, Rollout
from areal_megatron.data.prompts import Cursor, check_data, read_examples, read_prompts
from areal_megatron.data.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}\n<|user|>{{ m['content'] | trim }}<|end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|assistant|>\n{%- endif %}{{ {'é': 1} | tojson }}{{ eos_token }}"
)


@pytest.fixture
def folder(tmp_path):
    """A model folder as transformers writes it: bytes as tokens, a beginning token, two end tokens."""
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|end|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(special + alphabet)}
    library = Library(models.BPE(vocabulary, [], unk_token="<pad>"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
                                   additional_special_tokens=special[3:])  # fmt: skip
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    return tmp_path / "model"


def reference(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def with_template(folder):
    tokenizer = reference(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write(tmp_path, *rows):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


TEXTS = ["What is 12+3?", "naïve  ∑\n x", "a"]


def test_plain_prompts_have_the_tokens_that_transformers_gives(folder):
    assert Tokenizer(folder).prompts(TEXTS) == reference(folder)(TEXTS).input_ids


def test_chat_prompts_have_the_tokens_that_transformers_gives(folder):
    with_template(folder)
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    expected = reference(folder).apply_chat_template(chats, add_generation_prompt=True).input_ids
    assert Tokenizer(folder).prompts(TEXTS) == expected


def test_decoding_leaves_special_tokens_out(folder):
    tokens = [*reference(folder)("x ∑ y").input_ids, 2]
    assert Tokenizer(folder).decode(tokens) == "x ∑ y"


def test_end_tokens_of_tokenizer_and_generation_config_both_stop(folder):
    assert Tokenizer(folder).stop_tokens == [2, 4]


def test_reading_prompts_imports_no_torch(folder):
    code = "import sys, areal_megatron.data.prompts as p; p.Tokenizer(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)


def test_prompts_carry_line_answer_and_forced_length(folder, tmp_path):
    tests = {"inputs": ["1\n"], "outputs": ["é\n"]}
    path = write(tmp_path, {"prompt": "a", "answer": 5}, "", {"prompt": "b", "answer": "x", "response_tokens": 7},
                 {"prompt": "c", "answer": tests})  # fmt: skip
    first, second, third = read_prompts(config(folder, train=path), "train", Tokenizer(folder))
    assert (first.id, first.text, first.answer, first.response_tokens) == (0, "a", "5", None)
    assert (second.id, second.text, second.answer, second.response_tokens) == (2, "b", "x", 7)
    assert second.tokens == reference(folder)("b").input_ids
    assert json.loads(third.answer) == tests


def test_an_example_is_prompt_response_and_end_token(folder, tmp_path):
    path = write(tmp_path, {"prompt": "1+1=", "response": "2 "})
    (example,) = read_examples(path, Tokenizer(folder))
    tokenizer = reference(folder)
    prompt = tokenizer("1+1=").input_ids
    response = tokenizer("2 ", add_special_tokens=False).input_ids
    assert example.tokens.tolist() == [*prompt, *response, tokenizer.eos_token_id]
    assert example.tokens.dtype == np.int32
    assert example.prompt_length == len(prompt)


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(("rows", "problem"), [
    ([], "data.jsonl: the dataset is empty"),
    ([GOOD, "{oops"], "data.jsonl:2: not JSON"),
    ([GOOD, "[1]"], "data.jsonl:2: expected an object"),
    ([GOOD, "", {"prompt": "a"}], "data.jsonl:3: field 'answer' is missing, found 'prompt'"),
    ([{"prompt": 3, "answer": "1"}], "data.jsonl:1: field 'prompt' is int, expected str"),
    ([{"prompt": "", "answer": "1"}], "data.jsonl:1: field 'prompt' is empty"),
    ([{"prompt": "a", "answer": None}], "data.jsonl:1: field 'answer' is NoneType"),
    ([{"prompt": "a", "answer": True}], "data.jsonl:1: field 'answer' is bool"),
    ([GOOD | {"response_tokens": 9}], "data.jsonl:1: response_tokens is 9"),
    ([GOOD | {"response_tokens": 0}], "data.jsonl:1: response_tokens is 0"),
    ([GOOD | {"response_tokens": "4"}], "data.jsonl:1: response_tokens is '4'"),
])  # fmt: skip
def test_bad_lines_are_named(folder, tmp_path, rows, problem):
    with pytest.raises(ConfigError, match=r"data.jsonl") as error:
        read_prompts(config(folder, train=write(tmp_path, *rows)), "train", Tokenizer(folder))
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def config(folder, **data):
    return Config(
        name="x",
        updates=1,
        model=Model(path=str(folder)),
        data=Data(**{key: str(value) if key != "max_prompt_tokens" else value for key, value in data.items()}),
        rollout=Rollout(max_new_tokens=8),
    )


def test_check_data_names_missing_files_and_prompts_that_never_fit(folder, tmp_path):
    path = str(write(tmp_path, {"prompt": "abcdef", "answer": "1"}))
    check_data(config(folder, train=path, max_prompt_tokens=7))
    with pytest.raises(ConfigError, match=r"shortest prompt has 7 tokens, data.max_prompt_tokens is 6"):
        check_data(config(folder, train=path, max_prompt_tokens=6))
    with pytest.raises(ConfigError, match=r"nowhere.jsonl: cannot read the dataset: No such file"):
        check_data(config(folder, train=path, eval="nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        check_data(config(tmp_path / "elsewhere", train=path))


def test_a_folder_without_an_end_token_is_refused(folder):
    (folder / "generation_config.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="names no end token"):
        Tokenizer(folder)


def test_the_cursor_visits_every_prompt_once_an_epoch_in_a_new_order():
    cursor = Cursor(50, seed=3)
    drawn = [cursor.next() for _ in range(150)]
    orders = [[position for e, position in drawn if e == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders} | {tuple(range(50))}) == 4
    assert drawn == [replayed.next() for replayed in [Cursor(50, seed=3)] for _ in range(150)]
    assert drawn[:50] != [other.next() for other in [Cursor(50, seed=4)] for _ in range(50)]

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from areal_megatron.config import Config, ConfigError, DataConfig, EnvironmentConfig, ModelConfig, RolloutConfig
from areal_megatron.data import files
from areal_megatron.data.check import check_data
from areal_megatron.data.examples import read_examples
from areal_megatron.data.prompts import Cursor, cursor, ranks_of, read_prompts
from areal_megatron.data.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}\n<|user|>{{ m['content'] | trim }}<|end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|assistant|>\n{%- endif %}{{ {'é': 1} | tojson }}{{ eos_token }}"
)

MASKED_TEMPLATE = """\
{%- for m in messages %}
    {%- if m['role'] == 'assistant' %}
<|assistant|>{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}

    {%- else %}
<|user|>{{ m['content'] }}<|end|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""A template that marks the tokens to train with transformers' tag."""


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
    fast = PreTrainedTokenizerFast(
        tokenizer_object=library,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=special[3:],
    )
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    return tmp_path / "model"


def reference(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def with_template(folder, template=TEMPLATE):
    tokenizer = reference(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def write(tmp_path, *rows):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


TEXTS = ["What is 12+3?", "naïve  ∑\n x", "a"]


def test_plain_prompts_have_the_tokens_that_transformers_gives(folder):
    assert Tokenizer(folder).prompts(TEXTS) == reference(folder)(TEXTS).input_ids


def test_a_teacher_with_another_tokenizer_is_refused(folder, tmp_path):
    path = write(tmp_path, {"prompt": "1", "answer": "1"})
    subject, teacher = config(folder, train=path), tmp_path / "teacher"
    shutil.copytree(folder, teacher)
    subject.ppo.penalty.kl, subject.ppo.penalty.kl_model = 1.0, str(teacher)
    check_data(subject)
    described = json.loads((teacher / "tokenizer.json").read_text())
    added = {"id": 10_000, "content": "<new>", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    described["added_tokens"].append(added)
    (teacher / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"ppo.penalty.kl_model: .*another tokenizer than .*1 tokens differ, such as"):
        check_data(subject)
    subject.ppo.penalty.kl_model, subject.served.teacher.path = "served.teacher", str(teacher)
    with pytest.raises(ConfigError, match=r"served.teacher.path: .*another tokenizer than .*1 tokens differ, such as"):
        check_data(subject)


def test_rows_name_their_teachers(folder, tmp_path):
    """In a column, or by their environment; one that is not served is refused, and so is one that nobody names."""
    named = [{"prompt": str(k), "answer": "1"} | ({"teacher": f"teacher_{k}"} if k else {}) for k in (0, 2, 3)]
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(3)]
    for path, row in zip(paths, named, strict=True):
        Path(path).write_text(json.dumps(row))
    subject = config(folder, train=",".join(paths))
    tokenizer = Tokenizer(folder)
    assert {prompt.teacher for prompt in read_prompts(subject, "train", tokenizer)} == {""}
    subject.ppo.penalty.kl, subject.ppo.penalty.kl_model = 1.0, "served.teacher"
    subject.served.teacher.path = subject.served.teacher_2.path = str(folder)
    with pytest.raises(ConfigError, match=r"2.jsonl:1: teacher is 'teacher_3', and served are teacher, teacher_2;"):
        check_data(subject)
    subject.served.teacher_3.path = str(folder)
    prompts = check_data(subject)
    assert [prompt.teacher for prompt in prompts] == ["teacher", "teacher_2", "teacher_3"]
    subject.data.train = ",".join(paths[:2])
    with pytest.raises(ConfigError, match=r"^served.teacher_3.path: no row would be taught by it: name it in a column"):
        check_data(subject)
    mixed = [EnvironmentConfig(name, path, teacher="teacher_3") for name, path in zip("ab", paths, strict=False)]
    subject.data.train, subject.environments = "", mixed
    with pytest.raises(ConfigError, match=r"^served.teacher.path: no row would be taught by it"):
        check_data(subject)
    by_environment = read_prompts(subject, "train", tokenizer)
    assert [prompt.teacher for prompt in by_environment] == ["teacher_3", "teacher_2"]
    subject.environments[0] = replace(mixed[0], teacher="")
    again = read_prompts(subject, "train", tokenizer)
    assert again[0].teacher == "teacher" and again[1].digest == by_environment[1].digest
    assert again[0].digest != by_environment[0].digest


def test_chat_prompts_have_the_tokens_that_transformers_gives(folder):
    with_template(folder)
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    expected = reference(folder).apply_chat_template(chats, add_generation_prompt=True).input_ids
    assert Tokenizer(folder).prompts(TEXTS) == expected


def test_a_template_with_generation_tags_has_the_tokens_that_transformers_gives(folder):
    with_template(folder, MASKED_TEMPLATE)
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, TEXTS, strict=True)]
    tokenizer, expected = Tokenizer(folder), reference(folder)
    whole = expected.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert tokenizer.conversation(messages) == whole
    before = expected.apply_chat_template(messages[:1], add_generation_prompt=True).input_ids
    answer = expected(TEXTS[1], add_special_tokens=False).input_ids
    assert [*before, *answer, *tokenizer.continuation(messages, answer=1)] == whole


def test_a_template_that_does_not_parse_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match="the chat template cannot be read: Unexpected end of template"):
        Tokenizer(folder)


def test_messages_have_the_tokens_that_transformers_gives(folder, tmp_path):
    with_template(folder)
    chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in TEXTS]
    path = write(tmp_path, *({"prompt": chat, "answer": "1"} for chat in chats))
    prompts = read_prompts(config(folder, train=path), "train", Tokenizer(folder))
    expected = reference(folder).apply_chat_template(chats, add_generation_prompt=True).input_ids
    assert [prompt.tokens for prompt in prompts] == expected
    assert prompts[0].text == f"Be brief.\n\n{TEXTS[0]}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system\nmessages') }}{% endif %}",
            "no system messages",
        ),
        (
            "{% if messages[0]['role'] == 'system' %}{{ messages[0]['tools'][0]['name'] }}{% endif %}",
            "no attribute 'tools'",
        ),
        ("{% if messages[0]['role'] == 'system' %}{{ 1 + 'a' }}{% endif %}", "unsupported operand"),
    ],
)
def test_a_chat_template_that_fails_names_the_line(folder, tmp_path, template, problem):
    (folder / "chat_template.jinja").write_text(template + "{{ messages[-1]['content'] }}")
    bad = {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answer": "1"}
    path = write(tmp_path, GOOD, bad)
    with pytest.raises(ConfigError, match=r"data.jsonl:2: the chat template of .* refuses the prompt") as error:
        read_prompts(config(folder, train=path), "train", Tokenizer(folder))
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_a_message_that_the_chat_template_drops_names_the_line(folder, tmp_path):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    )
    dropped = {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answer": "1"}
    path = write(tmp_path, GOOD, dropped)
    with pytest.raises(
        ConfigError, match=r"data.jsonl:2: the chat template of \S+ does not show message 1, of the role 'sy"
    ):
        read_prompts(config(folder, train=path), "train", Tokenizer(folder))


@pytest.mark.parametrize(
    "shown",
    ["m['content'].replace('/no_think', '')", "m['content'] | upper", "m['content'].split() | join(' ')", "m | tojson"],
)
def test_a_message_that_the_chat_template_shows_otherwise_is_shown(folder, tmp_path, shown):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ " + shown + " }}{% endfor %}")
    asked = [
        {"role": "system", "content": "Be  a\npirate. /no_think"},
        {"role": "user", "content": 'Say\n"2" /no_think'},
    ]
    path = write(tmp_path, GOOD, {"prompt": asked, "answer": "1"})
    assert len(read_prompts(config(folder, train=path), "train", Tokenizer(folder))) == 2


def test_a_system_that_is_dropped_is_seen_though_others_say_the_same(folder, tmp_path):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    )
    asked = [{"role": "system", "content": "Add"}, {"role": "user", "content": "Add 2"}]
    path = write(tmp_path, {"prompt": asked, "answer": "1"})
    with pytest.raises(ConfigError, match=r"data.jsonl:1: the chat template of \S+ does not show message 1"):
        read_prompts(config(folder, train=path), "train", Tokenizer(folder))


def test_messages_without_a_chat_template_are_refused(folder, tmp_path):
    path = write(tmp_path, GOOD, {"prompt": [{"role": "user", "content": "b"}], "answer": "1"})
    with pytest.raises(ConfigError, match=r"data.jsonl:2: the prompt is a list of messages, but the model has no chat"):
        read_prompts(config(folder, train=path), "train", Tokenizer(folder))


def test_decoding_leaves_special_tokens_out(folder):
    tokens = [*reference(folder)("x ∑ y").input_ids, 2]
    assert Tokenizer(folder).decode(tokens) == "x ∑ y"


def test_end_tokens_of_tokenizer_and_generation_config_both_stop(folder):
    assert Tokenizer(folder).stop_tokens == [2, 4]


def test_reading_prompts_imports_no_torch(folder):
    with_template(folder)
    code = "import sys, areal_megatron.data.prompts as p; p.Tokenizer(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)


def test_prompts_carry_line_answer_and_forced_length(folder, tmp_path):
    tests = {"inputs": ["1\n"], "outputs": ["é\n"]}
    path = write(
        tmp_path,
        {"prompt": "a", "answer": 5},
        "",
        {"prompt": "b", "answer": "x", "response_tokens": 7},
        {"prompt": "c", "answer": tests},
    )
    first, second, third = read_prompts(config(folder, train=path), "train", Tokenizer(folder))
    assert (first.id, first.text, first.answer, first.response_tokens) == (0, "a", "5", None)
    assert (second.id, second.text, second.answer, second.response_tokens) == (1, "b", "x", 7)
    assert second.tokens == reference(folder)("b").input_ids
    assert json.loads(third.answer) == tests
    assert [prompt.where for prompt in (first, second, third)] == [f"{path}:{row}" for row in (1, 3, 4)]


def test_an_example_is_prompt_response_and_end_token(folder, tmp_path):
    path = write(tmp_path, {"prompt": "1+1=", "response": "2 "})
    (example,) = read_examples(path, Tokenizer(folder))
    (sample,) = example.samples
    tokenizer = reference(folder)
    prompt = tokenizer("1+1=").input_ids
    response = tokenizer("2 ", add_special_tokens=False).input_ids
    assert sample.tokens.tolist() == [*prompt, *response, tokenizer.eos_token_id]
    assert sample.tokens.dtype == np.int32
    assert sample.trained.tolist() == [*range(len(prompt), len(sample.tokens))]


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "data.jsonl: the dataset is empty"),
        ([GOOD, "{oops"], "data.jsonl:2: not JSON"),
        ([GOOD, "[1]"], "data.jsonl:2: expected an object"),
        ([GOOD, "", {"prompt": "a"}], "data.jsonl:3: field 'answer' is missing, found 'prompt'"),
        ([{"prompt": 3, "answer": "1"}], "data.jsonl:1: field 'prompt' is a number, expected a text or a list"),
        ([{"prompt": "", "answer": "1"}], "data.jsonl:1: field 'prompt' is empty"),
        (
            [{"prompt": "a", "answer": None}],
            "data.jsonl:1: field 'answer' is null, expected a text, a number, a list or an object",
        ),
        ([{"prompt": "a", "answer": True}], "data.jsonl:1: field 'answer' is true or false, expected a text, "),
        ([GOOD | {"response_tokens": 9}], "data.jsonl:1: response_tokens is 9"),
        ([GOOD | {"response_tokens": 0}], "data.jsonl:1: response_tokens is 0"),
        ([GOOD | {"response_tokens": "4"}], "data.jsonl:1: response_tokens is '4'"),
    ],
)
def test_bad_lines_are_named(folder, tmp_path, rows, problem):
    with pytest.raises(ConfigError, match=r"data.jsonl") as error:
        read_prompts(config(folder, train=write(tmp_path, *rows)), "train", Tokenizer(folder))
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def config(folder, **data):
    return Config(
        name="x",
        updates=1,
        model=ModelConfig(path=str(folder)),
        data=DataConfig(**{key: str(value) if key != "max_prompt_tokens" else value for key, value in data.items()}),
        rollout=RolloutConfig(max_new_tokens=8),
    )


def test_a_column_that_no_worker_can_be_sent_is_named_before_the_run_if_anybody_gets_it(folder, tmp_path):
    """Times in nanoseconds, as pandas writes them, are read in microseconds, but in lists as pandas' own type."""
    path, time = tmp_path / "rows.parquet", pyarrow.array([None, 1001], pyarrow.timestamp("ns", "UTC"))
    lasted, listed = time.cast("int64").cast(pyarrow.duration("ns")), pyarrow.ListArray.from_arrays([0, 0, 2], time)
    columns = {"prompt": ["a", "b"], "answer": ["1", "2"], "at": time, "lasted": lasted}
    settings = config(folder, train=path)
    settings.reward.function = "mine:score"
    parquet.write_table(pyarrow.table(columns), path)
    check_data(settings)
    [_, row] = [record.row for record in files.records(path)]
    assert row["at"] == datetime(1970, 1, 1, microsecond=1, tzinfo=UTC) and row["lasted"] == timedelta(microseconds=1)
    parquet.write_table(pyarrow.table(columns | {"seen": listed}), path)
    with pytest.raises(ConfigError, match=r"rows\.parquet:2: column 'seen' has a value of type list, which functions"):
        check_data(settings)
    settings.reward.function = "math"
    check_data(settings)


def test_check_data_names_missing_files_and_prompts_that_never_fit(folder, tmp_path):
    path = str(write(tmp_path, {"prompt": "abcdef", "answer": "1"}))
    check_data(config(folder, train=path, max_prompt_tokens=7))
    with pytest.raises(ConfigError, match=r"shortest prompt has 7 tokens, data.max_prompt_tokens is 6"):
        check_data(config(folder, train=path, max_prompt_tokens=6))
    with pytest.raises(ConfigError, match=r"nowhere.jsonl: cannot read the dataset: No such file"):
        check_data(config(folder, train=path, eval="nowhere.jsonl"))
    with pytest.raises(ConfigError, match=rf"No such file or directory, did you mean {path}\?$"):
        check_data(config(folder, train=path, eval=f"{path[:-6]}s.jsonl"))
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        check_data(config(tmp_path / "elsewhere", train=path))


def test_a_folder_without_an_end_token_is_refused(folder):
    (folder / "generation_config.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="names no end token"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{" * 5,
        "[]",
        '{"eos_token": 5}',
        '{"eos_token": {"content": ["</s>"]}}',
        '{"eos_token": "</s>", "eos_token_id": "x", "chat_template": 5}',
        '{"eos_token": "</s>", "chat_template": [{"name": "default"}]}',
        '{"eos_token": "</s>", "chat_template": {"a": 1}}',
        '{"eos_token_id": ["x"]}',
        '{"eos_token_id": [[1]]}',
        '{"eos_token_id": -1}',
        '{"eos_token": "\\ud800"}',
        b"\xff",
    ],
)
def test_a_tokenizer_whose_settings_have_no_sense_is_refused(folder, tmp_path, text):
    broken = shutil.copytree(folder, tmp_path / "broken")
    for name in ("chat_template.jinja", "config.json", "generation_config.json"):
        (broken / name).unlink(missing_ok=True)
    text = text if isinstance(text, bytes) else text.encode()
    name = "generation_config.json" if text.startswith(b'{"eos_token_id') else "tokenizer_config.json"
    (broken / name).write_bytes(text)
    with pytest.raises(ConfigError, match=r"^model\.path: .*broken[^\n]*$"):
        Tokenizer(broken)


def test_the_cursor_visits_every_prompt_once_an_epoch_in_a_new_order():
    cursor = Cursor(50, seed=3)
    drawn = [cursor.next() for _ in range(150)]
    orders = [[position for e, position in drawn if e == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders} | {tuple(range(50))}) == 4
    assert drawn == [replayed.next() for replayed in [Cursor(50, seed=3)] for _ in range(150)]
    assert drawn[:50] != [other.next() for other in [Cursor(50, seed=4)] for _ in range(50)]


def test_the_order_of_prompts_stays_what_it_was():
    """A checkpoint stores a position in this order."""
    assert [position for _, position in (cursor.next() for cursor in [Cursor(6, seed=3)] for _ in range(12))] == [
        2,
        5,
        4,
        1,
        3,
        0,
        1,
        2,
        0,
        4,
        5,
        3,
    ]


MIXTURE = [(10, 7), (30, 3)]


def test_a_mixed_epoch_has_its_share_of_each_source_and_no_prompt_twice():
    cursor = Cursor(40, seed=3, shares=MIXTURE)
    drawn = [cursor.next() for _ in range(200)]
    assert [epoch for epoch, _ in drawn] == [epoch for epoch in range(20) for _ in range(10)]
    epochs = [[position for e, position in drawn if e == epoch] for epoch in range(20)]
    for positions in epochs:
        assert len(set(positions)) == 10 and sum(position < 10 for position in positions) == 7
    of_the_second = [{position for position in positions if position >= 10} for positions in epochs]
    for cycle in range(2):
        assert set.union(*of_the_second[10 * cycle : 10 * cycle + 10]) == set(range(10, 40)), "all before any again"
    assert of_the_second[:10] != of_the_second[10:]


@pytest.mark.parametrize("after", [0, 1, 9, 10, 11, 137])
def test_a_mixture_goes_on_exactly_where_it_was(after):
    whole, first = Cursor(40, 3, shares=MIXTURE), Cursor(40, 3, shares=MIXTURE)
    for _ in range(after):
        assert whole.next() == first.next()
    again = Cursor(40, 3, first.at, MIXTURE)
    assert [whole.next() for _ in range(60)] == [again.next() for _ in range(60)]


def test_prompts_are_drawn_easiest_first_and_a_resumed_run_goes_on_exactly():
    rates = [None, 0.5, 0.9, 0.1, 0.5, None, 1.0, 0.5]
    ordered = Config(
        name="x", updates=1, model=ModelConfig("m"), data=DataConfig("d"), rollout=RolloutConfig(easiest_first=True)
    )
    ranks = ranks_of(ordered, rates)
    whole = Cursor(8, seed=3, ranks=ranks)
    drawn = [whole.next() for _ in range(24)]
    epochs = [[position for e, position in drawn if e == epoch] for epoch in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(8))
        assert [rates[position] for position in order] == [1.0, 0.9, 0.5, 0.5, 0.5, 0.1, None, None]
    assert len({tuple(order) for order in epochs}) > 1, "those of one rate in an order of each epoch"
    for after in (3, 8, 13):
        first = Cursor(8, 3, ranks=ranks)
        for _ in range(after):
            first.next()
        again = Cursor(8, 3, first.at, ranks=ranks)
        assert [again.next() for _ in range(24 - after)] == drawn[after:]
    mixed = Cursor(8, 3, shares=[(4, 4), (4, 2)], ranks=ranks)
    order = [mixed.next()[1] for _ in range(6)]
    assert [ranks[position] for position in order] == sorted(ranks[position] for position in order)
    ordered.rollout.easiest_first = False
    assert ranks_of(ordered, rates) == [] and Cursor(8, 3).order == 0 != whole.order
    assert whole.order != Cursor(8, 3, ranks=ranks[::-1]).order


@pytest.mark.parametrize("rate", [-0.1, 1.5, "0.5", True, [0.5]])
def test_a_pass_rate_that_is_none_is_named(folder, tmp_path, rate):
    path = write(tmp_path, GOOD | {"pass_rate": 0.25}, GOOD | {"pass_rate": None}, GOOD | {"pass_rate": rate})
    with pytest.raises(ConfigError) as error:
        read_prompts(config(folder, train=path), "train", Tokenizer(folder))
    assert f"data.jsonl:3: pass_rate is {rate!r}, expected a number from 0 to 1" in str(error.value)
    write(tmp_path, GOOD | {"pass_rate": 0.25}, GOOD | {"pass_rate": None}, GOOD | {"pass_rate": 1})
    prompts = read_prompts(config(folder, train=path), "train", Tokenizer(folder))
    assert [prompt.pass_rate for prompt in prompts] == [0.25, None, 1]


def test_training_draws_from_several_files_by_weight(folder, tmp_path):
    for name, count in (("a", 4), ("b", 9)):
        rows = [json.dumps({"prompt": f"{name}{number}", "answer": "1"}) + "\n" for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    mixed = config(folder, train=f"{tmp_path / 'a.jsonl'}:2,{tmp_path / 'b.jsonl'}:1")
    check_data(mixed)
    prompts = read_prompts(mixed, "train", Tokenizer(folder))
    assert [prompt.id for prompt in prompts] == list(range(13))
    order = cursor(mixed, prompts)
    epoch = [prompts[order.next()[1]].text for _ in range(6)]
    assert sorted(text for text in epoch if text[0] == "a") == ["a0", "a1", "a2", "a3"] and order.next()[0] == 1
    with pytest.raises(ConfigError, match=r"data.eval: an evaluation asks every prompt; leave the weights out"):
        check_data(config(folder, train=mixed.data.train, eval=mixed.data.train))


def test_a_built_in_reward_for_another_format_is_refused(folder, tmp_path):
    path = write(tmp_path, GOOD, {"question": "a", "choices": ["x", "y"], "answer": 0})
    asked = config(folder, train=path)
    with pytest.raises(
        ConfigError, match=r"reward.function: math, but row 2 of data.train is .* reward.function=choice"
    ):
        check_data(asked)
    for function in ("choice", "my.module:score"):
        asked.reward.function = function
        check_data(asked)

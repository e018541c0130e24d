"""Reading rows: files of every kind, folders, the hub's cache, and mixtures."""

import json
import os
import subprocess
import sys

import pytest

from areal_megatron.config import ConfigError
from areal_megatron.data.files import Source, records, shares, source_names, sources


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [{"prompt": f"p{number}", "answer": str(number)} for number in range(5)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl", [Source("a.jsonl", None)]),
        ("a.jsonl,b/c.parquet", [Source("a.jsonl", None), Source("b/c.parquet", None)]),
        ("a.jsonl:0.7, b.parquet:3", [Source("a.jsonl", 0.7), Source("b.parquet", 3.0)]),
        ("a:b.jsonl", [Source("a:b.jsonl", None)]),
        ("a:b.jsonl:2", [Source("a:b.jsonl", 2.0)]),
        ("hf://datasets/o/n/f.parquet", [Source("hf://datasets/o/n/f.parquet", None)]),
        ("hf://datasets/o/n@main/f.parquet:1,b:2", [Source("hf://datasets/o/n@main/f.parquet", 1.0), Source("b", 2.0)]),
    ],
)
def test_sources_and_weights(text, expected):
    assert sources(text) == expected


def test_a_list_of_files_may_be_longer_than_a_name():
    names = [f"part-{number:05d}.jsonl" for number in range(1000)]
    assert sources(",".join(names)) == [Source(name, None) for name in names]


def test_a_file_with_commas_in_its_name_is_one_file(tmp_path):
    path = jsonl(tmp_path / "a,b:3", *ROWS)
    assert sources(str(path)) == [Source(str(path), None)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a.jsonl:1,b.jsonl", "gives some files a weight"),
        ("a.jsonl:0,b.jsonl:1", "the weight of a.jsonl is 0, expected one above 0"),
        ("a.jsonl:-1", "the weight of a.jsonl is -1"),
        ("a.jsonl:nan", "the weight of a.jsonl is nan"),
        ("a.jsonl:inf,b:1", "the weight of a.jsonl is inf"),
        ("a.jsonl,", "names an empty path"),
        ("a.jsonl,,b.jsonl", "names an empty path"),
        (":2", "names an empty path"),
    ],
)
def test_what_is_no_list_of_sources(text, problem):
    with pytest.raises(ConfigError) as error:
        sources(text)
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_ids_count_on_over_the_sources_and_places_name_the_file(tmp_path):
    first, second = tmp_path / "a.jsonl", jsonl(tmp_path / "b.jsonl", *ROWS[:2])
    first.write_text('{"prompt": "x"}\n\n{"prompt": "y"}\n\n')
    found = list(records(f"{first},{second}"))
    assert [(record.id, record.source) for record in found] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [record.where for record in found] == [f"{first}:1", f"{first}:3", f"{second}:1", f"{second}:2"]
    assert found[2].row == ROWS[0]


def test_the_shards_of_a_folder_are_one_data_set(tmp_path):
    jsonl(tmp_path / "train-00001-of-00002.jsonl", *ROWS[3:])
    jsonl(tmp_path / "train-00000-of-00002.jsonl", *ROWS[:3])
    (tmp_path / "README.md").write_text("…")
    found = list(records(str(tmp_path)))
    assert [record.row for record in found] == ROWS and [record.id for record in found] == list(range(5))
    jsonl(tmp_path / "test-00000-of-00001.jsonl", *ROWS)
    with pytest.raises(ConfigError, match=r"several sets, test, train: name a file"):
        list(records(str(tmp_path)))


def test_a_folder_without_data_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*.jsonl, \*.parquet or \*.arrow file"):
        list(records(str(tmp_path)))


NESTED = [
    {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2", "n": 3},
    {"prompt": [{"role": "user", "content": "2+2"}], "answer": "4", "n": None},
]


def test_parquet_files_give_the_rows_that_were_written(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(NESTED), path, row_group_size=1)
    found = list(records(str(path)))
    assert [record.row for record in found] == NESTED
    assert [record.where for record in found] == [f"{path}:1", f"{path}:2"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"a.parquet: no Parquet file"):
        list(records(str(path)))


def test_a_folder_that_the_datasets_library_saved(tmp_path):
    """Dataset.save_to_disk writes Arrow streams, state.json and dataset_info.json."""
    pyarrow = pytest.importorskip("pyarrow")
    for shard, row in enumerate(NESTED):
        table = pyarrow.Table.from_pylist([row], schema=pyarrow.Table.from_pylist(NESTED).schema)
        with pyarrow.ipc.new_stream(str(tmp_path / f"data-0000{shard}-of-00002.arrow"), table.schema) as stream:
            stream.write_table(table)
    (tmp_path / "state.json").write_text("{}")
    assert [record.row for record in records(str(tmp_path))] == NESTED
    (tmp_path / "data-00000-of-00002.arrow").write_bytes(b"no stream at all")
    with pytest.raises(ConfigError, match=r"data-00000-of-00002.arrow: no Arrow stream"):
        list(records(str(tmp_path)))


def test_without_pyarrow_parquet_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"a.parquet: reading it needs pyarrow: pip install pyarrow, or convert it"):
        list(records(str(tmp_path / "a.parquet")))


def test_files_of_the_hub_come_from_its_cache(tmp_path):
    """A cache with the layout of huggingface_hub, and no network."""
    cache = tmp_path / "datasets--owner--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots" / ("0" * 40) / "data").mkdir(parents=True)
    jsonl(cache / "snapshots" / ("0" * 40) / "data" / "test.jsonl", *ROWS)
    code = (
        "import sys\nfrom areal_megatron.data.files import records\n"
        "try: print(*(record.row['prompt'] for record in records(sys.argv[1])))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )

    def read(text):
        environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        return subprocess.check_output(
            [sys.executable, "-c", code, text], env=environment, text=True, timeout=60
        ).strip()

    assert read("hf://datasets/owner/name/data/test.jsonl") == "p0 p1 p2 p3 p4"
    assert read("hf://datasets/owner/name@main/data/test.jsonl") == "p0 p1 p2 p3 p4"
    missing = read("hf://datasets/owner/name/data/train.jsonl")
    assert missing.startswith("ConfigError hf://datasets/owner/name/data/train.jsonl: the dataset owner/name@0000")
    assert "without data/train.jsonl" in missing and "\n" not in missing
    assert "expected hf://datasets/OWNER/NAME[@REVISION]/FILE" in read("hf://datasets/owner/name")


@pytest.mark.parametrize(
    ("weights", "sizes", "drawn"),
    [
        ((1, 1), (10, 10), (10, 10)),
        ((0.5, 0.5), (10, 100), (10, 10)),
        ((0.7, 0.3), (700, 1000), (700, 300)),
        ((0.7, 0.3), (1000, 100), (233, 100)),
        ((2, 1, 1), (100, 5, 50), (10, 5, 5)),
    ],
)
def test_an_epoch_draws_by_weight_and_no_row_twice(weights, sizes, drawn):
    text = ",".join(f"{number}.jsonl:{weight}" for number, weight in enumerate(weights))
    members = [number for number, size in enumerate(sizes) for _ in range(size)]
    assert shares(sources(text), members) == list(zip(sizes, drawn, strict=True))


def test_without_weights_there_are_no_shares():
    assert shares(sources("a.jsonl,b.jsonl"), [0, 1, 1]) == []


def test_a_weight_that_leaves_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"with a weight of 0.001 not one row of b.jsonl fits into an epoch of 10"):
        shares(sources("a.jsonl:1,b.jsonl:0.001"), [0] * 10 + [1] * 10)


def test_a_file_with_a_weight_of_which_no_row_can_be_used_is_named():
    with pytest.raises(ConfigError, match=r"^data: no row of b.jsonl can be used: leave it out$"):
        shares(sources("a.jsonl:1,b.jsonl:2"), [0] * 10)


HALF = "\ud83d"
"""The first half of a character, which JSON can spell and UTF-8 cannot."""


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x", "answer": HALF},
        {"prompt": f"say {HALF}", "answer": "1"},
        {"prompt": [{"role": "user", "content": HALF}], "answer": "1"},
        {"prompt": "x", "answer": {"inputs": [HALF], "outputs": ["1"]}},
        {"prompt": "x", "answer": "1", "metadata": {"tags": ["a", {"deep": [HALF]}]}},
        {"prompt": "x", "answer": "1", "metadata": {HALF: 1}},
    ],
)
def test_half_a_character_anywhere_in_a_row_is_named(tmp_path, row):
    path = jsonl(tmp_path / "a.jsonl", ROWS[0], row)
    with pytest.raises(ConfigError) as error:
        list(records(str(path)))
    half = r"\ud83d"
    assert str(error.value) == f"{path}:2: not JSON: {half} is half of a character"


def test_whole_characters_and_a_zero_character_are_read(tmp_path):
    row = {"prompt": "\U0001f600 é \x00", "answer": "\\ud83d"}
    assert [record.row for record in records(str(jsonl(tmp_path / "a.jsonl", row)))] == [row]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_text_of_a_table_that_is_not_utf_8_is_named(tmp_path, suffix):
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.StringArray.from_buffers(
        3, pyarrow.array([0, 1, 2, 4], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"ab\xed\xa0")
    )
    table, path = pyarrow.table({"prompt": texts}), tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(ConfigError, match=rf"a{suffix}:3: a text is not UTF-8"):
        list(records(str(path)))


def deep(levels):
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (f'{{"prompt": "x", "answer": {deep(100)}}}', "more than 100 lists and objects within each other"),
        (f'{{"prompt": "x", "answer": {deep(100_000)}}}', "more than 100 lists and objects within each other"),
        ('{"a":' * 100_000, "more than 100 lists and objects within each other"),
        ('{"prompt": "a \\ud800 b", "answer": "1"}', "\\ud800 is half of a character"),
        ('{"prompt": [{"role": "user", "content": "\\uDFFF"}], "answer": "1"}', "\\udfff is half of a character"),
        ('{"prompt": "x", "answer": "1", "\\udcff": 2}', "\\udcff is half of a character"),
        ('{"prompt": "x", "answer": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
    ],
)
def test_a_row_that_nothing_could_take_is_named(tmp_path, row, problem):
    (tmp_path / "data.jsonl").write_text('{"prompt": "x", "answer": "1"}\n' + row + "\n")
    with pytest.raises(ConfigError) as error:
        list(records(tmp_path / "data.jsonl"))
    assert str(error.value).startswith(f"{tmp_path / 'data.jsonl'}:2: not JSON: ") and problem in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("name", "indent", "made", "problem"),
    [
        ("data.jsonl", None, ROWS, "data.jsonl:1: expected an object like .*; if the file is one JSON list, rename it"),
        ("data.jsonl", 2, ROWS, "data.jsonl:1: not JSON: .*; if the file is one JSON list, rename it to .json$"),
        ("data.json", None, {"data": ROWS}, "data.json: expected a list of objects, .* found one object with 'data'$"),
        ("data.json", 2, {"of": "x", "data": ROWS}, "data.json: expected a list of objects, .* with 'of', 'data'$"),
        (
            "data.json",
            2,
            ROWS[0],
            "data.json: expected a list of objects, .* found one object with 'prompt', 'answer'$",
        ),
        ("data.json", None, ROWS, ""),
        ("data.json", 2, ROWS, ""),
        ("data.json", None, ROWS[0], ""),
        ("data.json", None, {"messages": [{"role": "user", "content": "a"}]}, ""),
    ],
)
def test_a_file_of_another_shape_than_its_name_says_is_told_what_to_be(tmp_path, name, indent, made, problem):
    (tmp_path / name).write_text(json.dumps(made, indent=indent) + "\n")
    if not problem:
        assert [record.row for record in records(tmp_path / name)] == (made if isinstance(made, list) else [made])
        return
    with pytest.raises(ConfigError, match=problem):
        list(records(tmp_path / name))


def test_what_only_looks_deep_or_broken_is_read(tmp_path):
    texts = ["[" * 1000, "\U0001f600", "\\ud800 as it is written"]
    rows = [{"prompt": text, "answer": [[]] * 1000} for text in texts]
    nested = json.loads('{"prompt": "x", "answer": ' + deep(99) + "}")
    jsonl(tmp_path / "data.jsonl", *rows, nested)
    assert [record.row for record in records(tmp_path / "data.jsonl")] == [*rows, nested]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("data/aime24.jsonl", ["aime24"]),
        ("data/aime24.jsonl:0.5,data/gsm8k.v2.parquet:1", ["aime24", "gsm8k.v2"]),
        ("aime/test.jsonl,/amc/test.parquet,gsm8k/", ["aime/test", "amc/test", "gsm8k"]),
        ("hf://datasets/a/b@main/x/test.parquet,hf://datasets/a/c/x/test.parquet", ["b/x/test", "c/x/test"]),
        ("a.jsonl,a.jsonl", ["a#1", "a#2"]),
    ],
)
def test_sources_have_names_that_differ(text, names):
    assert source_names(text) == names

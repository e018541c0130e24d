"""Model folders: what is copied out of one beside its weights, and files in it that have no sense."""

import contextlib
import json
import os
import stat
import struct

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.checkpoint.hf_folder import INDEX, HfFolder, copy_description, safetensors_extents
from areal_megatron.reshard.boxes import Box

OWN = {
    "tokenizer.json": "1",
    "tokenizer_config.json": "2",
    "vocab.json": "3",
    "merges.txt": "4",
    "chat_template.jinja": "5",
    "generation_config.json": "6",
    "LICENSE": "7",
    "README.md": "8",
}


def written(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "dtype": "float32"}))
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def copied(source, folder):
    """Copies a description and returns the files by name."""
    folder.mkdir()
    copy_description(source, folder, "bfloat16")
    assert json.loads((folder / "config.json").read_text()) == {"hidden_size": 8, "dtype": "bfloat16"}
    return {file.name: file.read_text() for file in folder.iterdir() if file.name != "config.json"}


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "notes.txt"])
def test_a_link_to_a_private_file_is_not_followed(tmp_path, caplog, name):
    (tmp_path / "private").write_text("key")
    model = written(tmp_path / "model", OWN)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "private")
    assert copied(model, tmp_path / "out") == {known: text for known, text in OWN.items() if known != name}
    assert len(caplog.messages) == 1 and name in caplog.text


def test_only_files_that_describe_a_model_are_copied(tmp_path, caplog):
    others = {"modeling.py": "import os", "id_rsa": "key", "model.safetensors": "w", "pytorch_model.bin": "w"}
    model = written(tmp_path / "model", OWN | others | {".gitattributes": "x", "model.safetensors.index.json": "{}"})
    (model / "original").mkdir()
    os.mkfifo(model / "vocab.fifo")
    assert copied(model, tmp_path / "out") == OWN
    (line,) = caplog.messages
    assert "id_rsa, modeling.py, vocab.fifo;" in line and "safetensors" not in line


def test_links_within_the_folder_and_the_cache_are_copied_as_files(tmp_path, caplog):
    cache = tmp_path / "models--qwen--tiny"
    snapshot = written(cache / "snapshots" / "abc", {"LICENSE": "free"})
    (cache / "blobs").mkdir()
    (cache / "blobs" / "0123").write_text("tokens")
    (cache / "blobs" / "0123").chmod(0o600)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0123")
    (snapshot / "LICENSE.md").symlink_to("LICENSE")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    (snapshot / "vocab.json").symlink_to("../../refs/main")
    (tmp_path / "model").symlink_to(snapshot)
    before = os.umask(0o027)
    try:
        found = copied(tmp_path / "model", tmp_path / "out")
    finally:
        os.umask(before)
    assert found == {"tokenizer.json": "tokens", "LICENSE": "free", "LICENSE.md": "free"}
    for file in (tmp_path / "out").iterdir():
        assert not file.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640
    assert len(caplog.messages) == 1 and "vocab.json" in caplog.text


@pytest.mark.parametrize(
    "header", ["[" * 100_000, '{"a":' * 100_000, '{"\\ud800": 1}', "[]", "5", '{"a": 1}', '{"a": {}}']
)
def test_a_header_without_sense_is_named(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(
        CheckpointError, match=r"^.*model\.safetensors is truncated or no safetensors file: .*$"
    ) as error:
        safetensors_extents(file, ["a"])
    assert "\n" not in str(error.value)


def entry(start, stop, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 4), "b": entry(0, 4), "c": entry(4, 8)},
        {"a": entry(0, 4)},
        {"a": entry(4, 8)},
        {"a": entry(0, 8, (2,)), "b": entry(2, 6)},
        {"a": entry(0, 8, (-2, -1))},
        {"a": entry(0, 8, (1,), ["F64"])},
        {"a": entry(0, 12, (3,))},
    ],
    ids=["shared", "bytes after", "bytes before", "within another", "negative", "no dtype", "too long"],
)
def test_what_the_library_of_safetensors_refuses_is_refused(tmp_path, header):
    """An engine would, after the trainers have begun."""
    file, text = tmp_path / "model.safetensors", json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(SafetensorError), safe_open(file, "numpy"):
        pass
    with pytest.raises(CheckpointError, match=r"^.*model\.safetensors is truncated or no safetensors file: [^\n]*$"):
        safetensors_extents(file, ["a"])


def test_a_header_of_more_tensors_than_any_model_has_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_megatron.checkpoint.hf_folder.MOST_TENSORS", 3)
    file = tmp_path / "model.safetensors"
    save_file({f"data_offsets.{number}": np.zeros(1, np.float32) for number in range(3)}, file)
    assert len(safetensors_extents(file, [])[0]) == 3
    save_file({f"{number}": np.zeros(1, np.float32) for number in range(4)}, file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is .*: it has more than 3 tensors"):
        safetensors_extents(file, [])


def test_empty_tensors_take_no_place(tmp_path):
    save_file({name: np.zeros(n, np.float32) for name, n in (("a", 0), ("b", 2), ("c", 0))}, tmp_path / "x.safetensors")
    assert safetensors_extents(tmp_path / "x.safetensors", ["b"])[0] == {"a", "b", "c"}


@pytest.mark.parametrize("index", ["[" * 100_000, "[]", '{"weight_map": 5}', "\udcff"])
def test_an_index_without_sense_is_named(tmp_path, index):
    (tmp_path / INDEX).write_text(index, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"^.*index\.json cannot be read as an index of weights: [^\n]*$"):
        HfFolder(tmp_path, {"a": (1,)})


def test_a_tensor_in_files_of_two_savings_is_refused(tmp_path):
    for number in (1, 2):
        tensors = {"a": np.full(3, number, np.float32), f"b{number}": np.zeros(1, np.float32)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    index = {"a": "1.safetensors", "b1": "1.safetensors", "b2": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match=r"a is in 1.safetensors and in 2.safetensors, of two savings"):
        HfFolder(tmp_path, {"a": (3,), "b1": (1,), "b2": (1,)})


def test_a_newer_whole_file_comes_before_an_old_index(tmp_path):
    save_file({"a": np.full(3, 7, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    found = np.zeros(3, np.float32)
    with contextlib.closing(HfFolder(tmp_path, {"a": (3,)})) as folder:
        folder.read("a", Box((0,), (3,)), found, "float32")
    assert found.tolist() == [7, 7, 7]


@pytest.mark.parametrize("given", [["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"]])
def test_an_export_says_its_dtype_once(tmp_path, given):
    (tmp_path / "new").mkdir()
    copy_description(tmp_path, tmp_path / "new", "bfloat16", {"model_type": "qwen2"} | dict.fromkeys(given, "float32"))
    said = json.loads((tmp_path / "new" / "config.json").read_text())
    assert [said[key] for key in ("dtype", "torch_dtype") if key in said] == ["bfloat16"]

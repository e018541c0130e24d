"""Exports that hold only what has changed: any version is byte for byte what a whole export of it would have been."""

import json
import math
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_megatron import convert
from areal_megatron.checkpoint import delta
from areal_megatron.checkpoint.delta import base_for, remove
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.checkpoint.hf_folder import HfFolder
from areal_megatron.convert import from_hf, to_hf
from tests.support.reshard_oracle import write_model
from tests.unit.checkpoint.test_convert import assert_equal, refused

VERSIONS = 8
NEGATED = "model.layers.1.mlp.experts.3.down_proj.weight"
BITS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}
RUNS = {
    **{dtype: ("qwen3-moe", dtype, VERSIONS) for dtype in BITS},
    "glm4-moe": ("glm4-moe", "bfloat16", 2),
    "deepseek-v3-moe": ("deepseek-v3-moe", "bfloat16", 2),
}
"""Name → model, dtype and number of versions. The first layers of the last two models are dense."""


def bits(tensor):
    return tensor.view(BITS[str(tensor.dtype)[6:]])


def step(tensor, generator):
    """An element in fifty moves to a neighbouring number; a few become anything that fits, NaN included."""
    after = bits(tensor).clone()
    for share, most in ((0.02, 2), (0.001, 2**15)):
        where = torch.rand(after.shape, generator=generator) < share
        after += where * torch.randint(-most + 1, most, after.shape, generator=generator).to(after.dtype)
    return after.view(tensor.dtype)


def next_version(tensors, generator):
    """One tensor stays as it is, and of one everything changes."""
    after = {name: step(tensor, generator) for name, tensor in tensors.items()}
    after["model.norm.weight"] = tensors["model.norm.weight"]
    after[NEGATED] = -tensors[NEGATED]
    return after


@pytest.fixture(scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_ELEMENTS", 5000)
        yield


@pytest.fixture(scope="module")
def runs(small_chunks, tmp_path_factory):
    """Name → a folder of `checkpoints` of consecutive versions, `whole` exports of all, and `exports` as a run makes
    them."""
    return {name: make_run(tmp_path_factory.mktemp(name), *settings) for name, settings in RUNS.items()}


def make_run(folder, model, dtype, versions):
    written = write_model(model, folder / "model")
    kept = ("e_score_correction_bias",)  # in float32, as every export has it
    tensors = {name: t if name.endswith(kept) else t.to(getattr(torch, dtype)) for name, t in written.items()}
    (folder / "model" / "tokenizer.json").write_text('{"some": "tokenizer"}')
    generator = torch.manual_seed(1)
    for part in ("checkpoints", "whole", "exports"):
        (folder / part).mkdir()
    for version in range(versions):
        save_file(tensors, folder / "model" / "model.safetensors", {"format": "pt"})
        name = f"version-{version:06d}"
        from_hf(folder / "model", folder / "checkpoints" / name)
        to_hf(folder / "checkpoints" / name, folder / "whole" / name)
        base = base_for(folder / "exports", version, 1, VERSIONS - 1)
        to_hf(folder / "checkpoints" / name, folder / "exports" / name, base=base, verify=True)
        found = load_file(folder / "whole" / name / "model.safetensors")  # the oracle holds what was trained
        assert all(torch.equal(bits(found[key]), bits(tensor)) for key, tensor in tensors.items())
        tensors = next_version(tensors, generator)
    return folder


@pytest.fixture
def run(runs):
    return runs["bfloat16"]


@pytest.fixture
def exports(run, tmp_path):
    """Its exports, to be harmed."""
    return shutil.copytree(run / "exports", tmp_path / "exports")


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", RUNS)
def test_any_version_is_the_folder_that_a_whole_export_would_have_been(runs, name, tmp_path):
    run = runs[name]
    for whole in sorted((run / "whole").iterdir()):
        export = run / "exports" / whole.name
        assert (export / "delta.json").exists() == (whole.name != "version-000000")
        to_hf(export, tmp_path / whole.name, verify=True)
        assert files(tmp_path / whole.name) == files(whole)


@pytest.mark.parametrize("name", RUNS)
def test_only_what_has_changed_takes_room(runs, name):
    run = runs[name]
    for export in sorted((run / "exports").iterdir())[1:]:
        assert sorted(files(export)) == ["delta.json", "delta.safetensors"]
        described = json.loads((export / "delta.json").read_text())
        assert described["base"].startswith("../version-") and 0.01 < described["changed_share"] < 0.2
        assert size(export) < 0.4 * size(run / "whole" / export.name)


def test_where_everything_changes_elements_are_kept_as_they_are(small_chunks, tmp_path):
    """No more room than a whole export takes, but for the table of chunks."""
    tensors = write_model("qwen3", tmp_path / "before")
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    any_bits = {"low": -(2**31), "high": 2**31, "generator": torch.manual_seed(2), "dtype": torch.int32}
    tensors = {name: torch.randint(size=tensor.shape, **any_bits) for name, tensor in tensors.items()}
    save_file({name: t.view(torch.float32) for name, t in tensors.items()}, tmp_path / "after" / "model.safetensors")
    to_hf(tmp_path / "after", tmp_path / "changes", base=tmp_path / "before")
    to_hf(tmp_path / "changes", tmp_path / "whole")
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert_equal({name: bits(tensor) for name, tensor in found.items()}, tensors)
    weights = sum(tensor.nbytes for tensor in tensors.values())
    chunks = sum(math.ceil(tensor.numel() / 5000) for tensor in tensors.values())
    data = size(tmp_path / "changes") - 8 * chunks
    assert weights < data < weights + 300 * len(tensors)  # names and places


def test_another_dtype_of_a_version(exports, run, tmp_path):
    export = exports / "version-000007"
    to_hf(export, tmp_path / "out", dtype="float32", verify=True)
    to_hf(run / "whole" / export.name, tmp_path / "expected", dtype="float32")
    assert files(tmp_path / "out") == files(tmp_path / "expected")


def test_parts_are_those_of_a_whole_export(exports, run, tmp_path):
    to_hf(exports / "version-000007", tmp_path / "out", shard_bytes=60_000)
    to_hf(run / "checkpoints" / "version-000007", tmp_path / "expected", shard_bytes=60_000)
    assert files(tmp_path / "out") == files(tmp_path / "expected") and len(files(tmp_path / "out")) > 5


def test_a_description_that_is_another_one_is_kept(exports, run, tmp_path):
    checkpoint = shutil.copytree(run / "checkpoints" / "version-000003", tmp_path / "checkpoint")
    (checkpoint / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    to_hf(checkpoint, exports / "version-000100", base=exports / "version-000002")
    to_hf(checkpoint, exports / "version-000101", base=exports / "version-000100")
    assert not (exports / "version-000101" / "hf").exists()
    to_hf(checkpoint, tmp_path / "expected")
    to_hf(exports / "version-000101", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "expected")


def flip(file, at=None):
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4 if at is None else at] ^= 1
    file.write_bytes(content)


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


LAST, ITS_BASE, FIRST = "version-000007", "version-000006", "version-000000"


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda e: flip(e / LAST / "delta.safetensors"), f"{LAST}/delta.safetensors is damaged: "),
        (lambda e: flip(e / LAST / "delta.safetensors", -5), f"{LAST}/delta.safetensors is damaged: "),
        (lambda e: flip(e / ITS_BASE / "delta.safetensors"), f"{ITS_BASE}/delta.safetensors is damaged: "),
        (lambda e: flip(e / FIRST / "model.safetensors"), f"{FIRST} is not what "),
        (lambda e: cut(e / LAST / "delta.safetensors"), "delta.safetensors is truncated or no"),
        (lambda e: (e / LAST / "delta.safetensors").unlink(), "delta.safetensors: No such file"),
        (lambda e: (e / LAST / "delta.json").write_text("{"), "delta.json is damaged ("),
        (lambda e: (e / LAST / "delta.json").write_bytes(b"\xff"), "delta.json is damaged ("),
        (lambda e: edit(e / LAST / "delta.json", base=7), "delta.json is damaged ("),
        (lambda e: edit(e / LAST / "delta.json", format=2), "has format 2, not 1: take the release that wrote it"),
        (lambda e: edit(e / LAST / "delta.json", chunk_elements=0), "chunk_elements is 0"),
        (lambda e: edit(e / LAST / "delta.json", chunk_elements=4000), "as config.json describes it"),
        (lambda e: edit(e / LAST / "delta.json", base=f"../{FIRST}"), f"{FIRST} is not what "),
        (lambda e: edit(e / ITS_BASE / "delta.json", base=f"../{LAST}"), "as its base, which is made from it"),
        (lambda e: edit(e / ITS_BASE / "delta.json", base=f"../{ITS_BASE}"), "as its base, which is made from it"),
        (lambda e: shutil.rmtree(e / ITS_BASE), f"{ITS_BASE}, which is not there: bring it back"),
        (lambda e: shutil.rmtree(e / FIRST), f"{FIRST}, which is not there: bring it back"),
        (lambda e: (e / FIRST / "tokenizer.json").write_text("{}"), "have been changed since"),
    ],
)
def test_what_is_damaged_is_named_and_nothing_is_written(exports, tmp_path, capsys, harm, problem):
    harm(exports)
    assert problem in refused(capsys, tmp_path, "to-hf", exports / LAST, tmp_path / "out")


@pytest.mark.parametrize(
    "harm",
    [
        lambda e: (e / FIRST / "tokenizer.json").write_text("{}"),
        lambda e: edit(e / LAST / "delta.json", chunk_elements=4000),
        lambda e: cut(e / LAST / "delta.safetensors"),
    ],
)
def test_bases_are_closed_when_one_is_refused(exports, monkeypatch, harm):
    harm(exports)
    opened, closed = [], []
    open_export, close = delta.open_export, HfFolder.close
    monkeypatch.setattr(delta, "open_export", lambda *of: opened.append(open_export(*of)) or opened[-1])
    monkeypatch.setattr(HfFolder, "close", lambda folder: closed.append(folder) or close(folder))
    with pytest.raises(CheckpointError):
        delta.DeltaFolder(exports / LAST)
    whole = [base for base, _ in opened if isinstance(base, HfFolder)]
    assert len(whole) == 1 and closed == whole


def test_no_wrong_bit_gets_through(exports, run, tmp_path, capsys):
    """Each in a random place of one of the files that make up a version: it is refused, or no bit of the result."""
    places = random.Random(0)
    expected, found = files(run / "whole" / LAST), 0
    chain = [exports / FIRST / "model.safetensors"]
    chain += [exports / name / "delta.safetensors" for name in (LAST, ITS_BASE, "version-000004")]
    for number in range(80):
        file = chain[number % len(chain)]
        before, at = file.read_bytes(), places.randrange(file.stat().st_size)
        flip(file, at)
        if convert.main(["to-hf", str(exports / LAST), str(tmp_path / "out"), "--no-sync"]) == 0:
            assert files(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
        else:
            found += 1
            message = capsys.readouterr().err
            assert message.startswith("error: ") and message.count("\n") == 1
            assert [path.name for path in tmp_path.iterdir()] == ["exports"]
        file.write_bytes(before)
    assert found > 50


def test_a_base_that_does_not_fit(exports, run, tmp_path, capsys):
    checkpoint = run / "checkpoints" / LAST
    to_hf(run / "checkpoints" / FIRST, tmp_path / "wide", dtype="float32")
    write_model("qwen3", tmp_path / "other")
    for base, problem in (
        ("wide", "make a whole export"),
        ("other", "is an export of another model"),
        ("nothing", "cannot read"),
    ):
        arguments = ["to-hf", checkpoint, tmp_path / "out", "--base", tmp_path / base]
        assert problem in refused(capsys, tmp_path, *arguments)


def test_a_base_that_was_replaced_by_another_model(exports, run, tmp_path, capsys):
    """The export has a description of its own, so that nothing else tells."""
    checkpoint = shutil.copytree(run / "checkpoints" / "version-000003", tmp_path / "checkpoint")
    (checkpoint / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    to_hf(checkpoint, exports / "version-000100", base=exports / FIRST)
    shutil.rmtree(checkpoint)
    shutil.rmtree(exports / FIRST)
    write_model("qwen3", exports / FIRST)
    message = refused(capsys, tmp_path, "to-hf", exports / "version-000100", tmp_path / "out")
    assert f"{FIRST} is another model than " in message


def test_a_folder_of_changes_is_no_model(exports):
    from areal_megatron.config import ConfigError
    from areal_megatron.models.architecture import read_config

    with pytest.raises(ConfigError, match=r"^model\.path: .* holds only what has changed .* `areal convert to-hf .*$"):
        read_config(exports / LAST)


@pytest.mark.parametrize("harm", [KeyboardInterrupt, SystemExit, OSError(28, "No space left on device")])
def test_an_end_in_the_middle_leaves_nothing(exports, run, tmp_path, harm):
    before = sorted(tmp_path.rglob("*"))

    def end(done, total):
        if done > total / 2:
            raise harm

    with pytest.raises((KeyboardInterrupt, SystemExit, convert.CheckpointError)):
        to_hf(run / "checkpoints" / LAST, exports / "out", base=exports / ITS_BASE, report=end)
    assert sorted(tmp_path.rglob("*")) == before


def made(exports, version, base):
    """An export of which only the description is there."""
    folder = exports / f"version-{version:06d}"
    folder.mkdir(parents=True)
    if base:
        described = {"about": "", "format": 1, "chunk_elements": 1, "changed_share": 0.0, "description_crc": 0}
        (folder / "delta.json").write_text(json.dumps(described | {"base": f"../{base.name}"}))


@pytest.mark.parametrize("seed", range(5))
def test_whichever_exports_fail_each_has_a_base_and_a_short_way(tmp_path, seed):
    chance = random.Random(seed)
    every, deltas, way = chance.choice([1, 5]), chance.choice([0, 1, 7, 12]), {}
    for version in range(chance.randrange(40) * every, 100 * every, every):
        base = base_for(tmp_path, version, every, deltas)
        number = version // every % (deltas + 1)
        if number == 0:
            assert base is None
        group = [v for v in way if version - number * every <= v < version]
        assert (base is not None) == bool(group)
        if chance.random() < 0.7:
            way[version] = way[int(base.name[8:])] + 1 if base else 0
            made(tmp_path, version, base)
    assert max(way.values()) <= math.log2(deltas + 1) + 1 and (max(way.values()) > 1) == (deltas > 1)


def test_bases_are_near_when_nothing_fails(tmp_path):
    for version in range(8):
        made(tmp_path, version, base_for(tmp_path, version, 1, 7))
    found = [base_for(tmp_path, version, 1, 7) for version in range(9)]
    assert [base and int(base.name[8:]) for base in found] == [None, 0, 0, 2, 0, 4, 4, 6, None]


def test_an_export_goes_with_those_that_need_it(tmp_path):
    for version in range(8):
        made(tmp_path, version, base_for(tmp_path, version, 1, 7))
    remove(tmp_path / "version-000004")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"version-{v:06d}" for v in range(4)]
    remove(tmp_path / "version-000003")
    remove(tmp_path / "version-000000")
    assert [*tmp_path.iterdir()] == []

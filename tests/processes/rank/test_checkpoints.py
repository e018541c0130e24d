"""Exports beside training: as long as they need, and no longer than the trainer."""

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from areal_megatron.checkpoint.convert import from_hf
from areal_megatron.rank import checkpoints
from areal_megatron.rank.checkpoints import Export
from areal_megatron.run.folder import RunFolder
from tests.support.reshard_oracle import write_model

ROOT = Path(__file__).resolve().parents[3]
TRAINER = """
import sys
from pathlib import Path
from areal_megatron.rank import checkpoints
checkpoints._SMALL_BYTES = 0
checkpoints.Export(Path(sys.argv[1]), Path(sys.argv[2])).join()
"""


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of which nobody can read metadata.json until somebody writes it."""
    write_model("qwen2", tmp_path / "model")
    from_hf(tmp_path / "model", tmp_path / "version-000002")
    metadata = tmp_path / "version-000002" / "trainer" / "metadata.json"
    metadata.rename(tmp_path / "metadata.json")
    os.mkfifo(metadata)
    return tmp_path / "version-000002"


@pytest.fixture(params=["here", "in a process"])
def anywhere(request, monkeypatch):
    """Exports in the trainer's process, and in one of their own."""
    monkeypatch.chdir(ROOT)
    if request.param != "here":
        monkeypatch.setattr(checkpoints, "_SMALL_BYTES", 0)


def let_it_be_read(checkpoint):
    (checkpoint / "trainer" / "metadata.json").write_text((checkpoint.parent / "metadata.json").read_text())


def within(seconds, condition):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_export_takes_as_long_as_it_needs_and_the_next_one_waits(checkpoint, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(checkpoints, "_SMALL_BYTES", 0)
    monkeypatch.setattr(checkpoints, "_PROGRESS_S", 0.2)
    caplog.set_level(logging.WARNING)
    first = Export(checkpoint, tmp_path / "exports" / "first")
    second = Export(checkpoint, tmp_path / "exports" / "second", after=first)
    within(60, lambda: len(caplog.messages) > 2)
    assert all("the export of first: 0.0 GB after" in message for message in caplog.messages)
    let_it_be_read(checkpoint)
    first.join(120)
    assert not first.is_alive() and second.is_alive()
    let_it_be_read(checkpoint)
    second.join(120)
    expected = load_file(tmp_path / "model" / "model.safetensors")
    for name in ("first", "second"):
        found = load_file(tmp_path / "exports" / name / "model.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_export_that_fails_is_reported(checkpoint, tmp_path, anywhere, caplog):
    (checkpoint / "trainer" / "metadata.json").unlink()
    Export(checkpoint, tmp_path / "exports" / "out").join(120)
    assert "the export of a checkpoint failed" in caplog.text and not list((tmp_path / "exports").iterdir())


def test_an_export_for_which_there_is_no_place_is_reported(checkpoint, tmp_path, caplog):
    (tmp_path / "exports").write_bytes(b"")
    Export(checkpoint, tmp_path / "exports" / "out").join(60)
    assert "the export of out failed" in caplog.text and "exports" in caplog.text


def test_an_export_that_is_made_again_takes_the_place_of_the_old_one(checkpoint, tmp_path, anywhere):
    """As when a run goes on from an earlier checkpoint."""
    (checkpoint / "trainer" / "metadata.json").unlink()
    let_it_be_read(checkpoint)
    out = tmp_path / "exports" / "version-000002"
    out.mkdir(parents=True)
    (out / "of-the-old-one").write_bytes(b"")
    Export(checkpoint, out).join(120)
    assert [path.name for path in out.parent.iterdir()] == [out.name] and not (out / "of-the-old-one").exists()
    found, expected = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "model"))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_incarnation_that_was_replaced_removes_no_export(checkpoint, tmp_path, monkeypatch, caplog):
    """Its thread ends, and takes along the weights that it alone has."""
    monkeypatch.chdir(ROOT)
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin()
    exported = shutil.copytree(tmp_path / "model", run.exports / "version-000002")
    before = {path: path.read_bytes() for path in exported.iterdir()}
    RunFolder(run.folder).begin()
    Export(checkpoint, exported, removed=True, check_current=run.check_current).join(60)
    assert "the export of version-000002 failed: " in caplog.text and "was started again by" in caplog.text
    assert {path: path.read_bytes() for path in exported.iterdir()} == before and not checkpoint.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise, by prctl")
def test_an_export_ends_with_its_trainer(checkpoint, tmp_path):
    command = [sys.executable, "-c", TRAINER, str(checkpoint), str(tmp_path / "exports" / "out")]
    trainer = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    try:
        within(240, lambda: psutil.Process(trainer.pid).children())
        [export] = psutil.Process(trainer.pid).children()
        time.sleep(3)  # it waits for metadata.json
        assert export.is_running()
    finally:
        trainer.kill()
        trainer.wait()
    within(60, lambda: not export.is_running() or export.status() == psutil.STATUS_ZOMBIE)

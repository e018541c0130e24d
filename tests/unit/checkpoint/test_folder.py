"""Checkpoints on disk: what is whole, what is chosen, what stays."""

import os

import pytest

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import CheckpointConfig, ConfigError
from areal_megatron.run import IncarnationStart, Run
from launch import start


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    run.create()
    run.begin()
    return run


def save(run, version, batches=None):
    folder = checkpoint_folder.partial(run, version)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "0.distcp").write_bytes(b"weights" * version)
    (folder / "controller.msgpack").write_bytes(b"state")
    return checkpoint_folder.seal(run, version, version if batches is None else batches)


def test_what_was_sealed_is_read_back(run):
    run.begin()
    sealed = save(run, 12, batches=14)
    assert checkpoint_folder.read(sealed.folder) == sealed
    assert (sealed.version, sealed.batches, sealed.incarnation) == (12, 14, 1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["version-000012"]


def test_nothing_unfinished_is_chosen(run):
    save(run, 2)
    (checkpoint_folder.partial(run, 4) / "trainer").mkdir(parents=True)
    assert checkpoint_folder.newest(run)[0].version == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "trainer" / "0.distcp").unlink(), "trainer/0.distcp is missing"),
        (lambda f: (f / "trainer" / "0.distcp").write_bytes(b"wei"), "has 3 bytes, was written with 28"),
        (
            lambda f: (f / "controller.msgpack").write_bytes(b"stale"),
            r"controller.msgpack does not hold what was written",
        ),
        (lambda f: (f / "complete.json").write_text("{"), "complete.json is damaged"),
        (lambda f: (f / "complete.json").unlink(), "no complete checkpoint"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_chosen(run, damage, message):
    save(run, 2)
    damage(save(run, 4).folder)
    chosen, problems = checkpoint_folder.newest(run)
    assert chosen.version == 2 and len(problems) == 1
    with pytest.raises(ConfigError, match=message):
        checkpoint_folder.read(run.checkpoints / "version-000004")


@pytest.mark.parametrize("failure", [OSError("no space"), SystemExit("killed")])
def test_the_one_before_is_there_when_writing_the_same_version_again_breaks_off(run, monkeypatch, failure):
    before = save(run, 2)
    rename = os.rename

    def fails_at_the_second(source, target):
        if target == before.folder and source == checkpoint_folder.partial(run, 2):
            raise failure
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails_at_the_second)
    with pytest.raises(type(failure)):
        save(run, 2, batches=3)
    assert start.newest(run) == before
    assert [path.name for path in run.checkpoints.glob("version-*")] == ["version-000002"]


def test_the_last_ones_and_every_nth_stay(run):
    for version in range(1, 10):
        save(run, version)
        checkpoint_folder.tidy(run, CheckpointConfig(every=1, keep=2, keep_every=4))
    assert [folder.name[-1] for folder in checkpoint_folder.complete(run)] == ["4", "8", "9"]


def test_one_that_is_gone_when_it_is_looked_at_is_left_out(run):
    """Its run has removed it since the folder was listed. Here: what is listed and is not there."""
    save(run, 2)
    (run.checkpoints / "version-000001").symlink_to(run.checkpoints / "gone")
    assert [folder.name[-1] for folder in checkpoint_folder.complete(run)] == ["2"]


def test_after_going_back_the_newest_is_the_one_written_last(run):
    for version in (2, 4, 6):
        save(run, version)
    run.begin(version=2, batches=2, checkpoint=str(run.checkpoints / "version-000002"), after=0)
    save(run, 4)
    checkpoint, _ = checkpoint_folder.newest(run)
    assert (checkpoint.version, checkpoint.incarnation) == (4, 1)
    assert run.start == IncarnationStart(1, 2, 2, str(run.checkpoints / "version-000002"), 0)

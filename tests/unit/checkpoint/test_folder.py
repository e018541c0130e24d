"""Checkpoints on disk: what is whole, what is chosen, what stays."""

import os
import random
import shutil
import time

import pytest

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import CheckpointConfig, ConfigError
from areal_megatron.launch.supervision import start
from areal_megatron.run.folder import IncarnationStart, Replaced, RunFolder


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
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


def resume(run, checkpoint):
    """Begins an incarnation of the run from one of its checkpoints, as launchers do."""
    resumed = RunFolder(run.folder)
    start.begin(resumed, checkpoint)
    return resumed


def set_clock(folder, seconds):
    """Gives a checkpoint the times that a clock off by so many seconds would have given it."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() + seconds,) * 2)


def test_the_newest_work_is_chosen_and_kept_though_the_clock_was_set_back(run):
    for version, off in ((10, 0), (20, 0), (30, -3600), (40, -3600)):
        set_clock(save(run, version).folder, off)
        checkpoint_folder.tidy(run, CheckpointConfig(every=10, keep=2))
        assert start.newest(run).version == version
    assert [folder.name[-2:] for folder in checkpoint_folder.complete(run)] == ["30", "40"]


def test_the_newest_work_is_chosen_in_a_copy_whose_files_are_all_new(run, tmp_path):
    for version in (10, 20, 30):
        save(run, version)
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.folder, copy.folder, ignore=shutil.ignore_patterns("version-*"))
    for version in (30, 20, 10):  # the oldest is copied last
        name = f"version-0000{version}"
        shutil.copytree(run.checkpoints / name, copy.checkpoints / name, copy_function=shutil.copyfile)
        set_clock(copy.checkpoints / name, -version)
    assert start.newest(copy).version == 30


@pytest.mark.parametrize("seed", range(10))
def test_whatever_clocks_do_a_run_goes_on_from_its_newest_work(tmp_path, seed):
    """Saves, kills, resumes, damage, going back and copies in random order, and a clock that jumps by up to an hour.

    `line` is what the run itself would remember: its checkpoints (version, batches) whose work counts, oldest first.
    """
    chance = random.Random(seed)
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin()
    keep, line, batches, skipped = chance.randint(1, 3), [], 0, 0
    settings = CheckpointConfig(every=1, keep=keep)
    for step in range(30):
        action = chance.choices(("save", "resume", "damage", "back", "copy"), (8, 3, 1, 1, 1))[0]
        if action == "save":
            batches += chance.randint(1, 3)
            skipped += chance.random() < 0.2
            sealed = save(run, batches - skipped, batches)
            set_clock(sealed.folder, chance.uniform(-3600, 3600))
            checkpoint_folder.tidy(run, settings)
            line = [known for known in line if known[0] != sealed.version] + [(sealed.version, batches)]
            line = line[-keep:]
            assert sealed.folder.exists()
        elif action == "damage" and len(line) > 1:
            (run.checkpoints / f"version-{line.pop()[0]:06d}" / "controller.msgpack").write_bytes(b"staTe")
        elif action == "copy":
            copy = RunFolder(tmp_path / f"copy-{step}")
            shutil.copytree(run.folder, copy.folder, copy_function=shutil.copyfile)
            for folder in copy.checkpoints.iterdir():
                set_clock(folder, chance.uniform(-3600, 3600))
            run = copy
        chosen = start.newest(run)
        assert (chosen and (chosen.version, chosen.batches)) == (line[-1] if line else None), action
        if action in ("resume", "damage", "back", "copy"):
            if action == "back" and line:
                line = line[: chance.randint(1, len(line))]
                chosen = checkpoint_folder.read(run.checkpoints / f"version-{line[-1][0]:06d}")
            run = resume(run, chosen)
            batches = line[-1][1] if line else 0
            skipped = batches - (line[-1][0] if line else 0)


def test_of_a_line_that_was_given_up_nothing_is_chosen_or_kept_before_the_line_that_counts(run):
    for version in (10, 20, 30):
        save(run, version)
    (run.checkpoints / "version-000030" / "controller.msgpack").unlink()
    (run.checkpoints / "version-000020" / "complete.json").write_text("{")
    resumed = resume(run, start.newest(run))
    for version in (20, 30):  # as by a copy that somebody puts back: whole again, and not of this line
        shutil.copytree(save(run_of_another_line(run), version).folder, run.checkpoints / "x")
        shutil.rmtree(run.checkpoints / f"version-0000{version}")
        (run.checkpoints / "x").rename(run.checkpoints / f"version-0000{version}")
    assert start.newest(run).version == 10
    save(resumed, 12)
    checkpoint_folder.tidy(resumed, CheckpointConfig(every=1, keep=2))
    assert [folder.name[-2:] for folder in checkpoint_folder.complete(run)] == ["10", "12"]


def run_of_another_line(run):
    """A folder of its own in which incarnation 0 goes on."""
    other = RunFolder(run.folder.parent / f"other-{time.time_ns()}")
    other.create()
    other.begin()
    return other


def test_a_run_that_began_from_another_goes_on_from_there_until_it_has_a_checkpoint(run, tmp_path, capsys):
    origin = save(run, 10)
    branch = RunFolder(tmp_path / "branch")
    branch.create()
    start.begin(branch, origin)
    assert start.newest(branch) == origin
    resumed = resume(branch, origin)
    assert resumed.start.after is None
    save(resumed, 12)
    assert start.newest(branch).version == 12
    shutil.rmtree(branch.checkpoints / "version-000012")
    shutil.rmtree(origin.folder)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole"):
        start.newest(branch)


def test_work_that_was_given_up_is_taken_only_if_there_is_no_other_and_said(run, capsys):
    save(run, 10)
    begun_anew = RunFolder(run.folder)
    begun_anew.begin()
    assert checkpoint_folder.newest(run) == (None, [])
    assert start.newest(run).version == 10
    assert "are of work that was given up" in capsys.readouterr().err
    save(begun_anew, 2)
    assert start.newest(run).version == 2


def test_checkpoints_without_the_rest_of_the_run_folder_are_ordered_too(run, tmp_path):
    save(run, 10)
    save(resume(run, start.newest(run)), 12)
    alone = RunFolder(tmp_path / "alone")
    alone.create()
    shutil.copytree(run.checkpoints, alone.checkpoints, dirs_exist_ok=True)
    set_clock(alone.checkpoints / "version-000010", 60)
    assert start.newest(alone).version == 12


def begin_to_save(run, version, weights):
    folder = checkpoint_folder.partial(run, version)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "__0_0.distcp").write_bytes(weights)
    (folder / "hf").mkdir()
    (folder / "controller.msgpack").write_bytes(b"state")


def test_a_replaced_incarnation_seals_removes_and_overwrites_nothing(run):
    save(run, 2)
    begin_to_save(run, 4, b"old")
    live = resume(run, start.newest(run))
    begin_to_save(live, 4, b"new")
    settings = CheckpointConfig(every=1, keep=1)
    for forbidden in (
        lambda: checkpoint_folder.seal(run, 4, 4),
        lambda: checkpoint_folder.tidy(run, settings),
        lambda: checkpoint_folder.remove_unfinished(run),
    ):
        with pytest.raises(Replaced):
            forbidden()
    assert [folder.name[-1] for folder in checkpoint_folder.complete(run)] == ["2"]
    sealed = checkpoint_folder.seal(live, 4, 4)
    assert (sealed.folder / "trainer" / "__0_0.distcp").read_bytes() == b"new"
    for unfinished in (checkpoint_folder.weights(run, 3), run.exports / ".version-000003.partial"):
        unfinished.mkdir(parents=True)
    (run.exports / "version-000002").mkdir()
    checkpoint_folder.remove_unfinished(live)
    assert [path.name for path in run.checkpoints.glob(".*")] == []
    assert [path.name for path in run.exports.iterdir()] == ["version-000002"]
    assert start.newest(run) == sealed


def test_what_was_sealed_a_moment_before_by_one_that_is_replaced_gives_way(run):
    save(run, 2)
    begin_to_save(run, 4, b"old")
    checkpoint_folder.seal(run, 4, 4)
    live = resume(run, checkpoint_folder.read(run.checkpoints / "version-000002"))
    assert start.newest(run).version == 2
    begin_to_save(live, 4, b"new")
    sealed = checkpoint_folder.seal(live, 4, 4)
    assert start.newest(run) == sealed and sealed.incarnation == 1
    assert (sealed.folder / "trainer" / "__0_0.distcp").read_bytes() == b"new"


@pytest.fixture
def large(run, monkeypatch):
    """A checkpoint of four ranks whose shards launchers take for too large to be read, and one before it."""
    monkeypatch.setattr(checkpoint_folder, "_CRC_BYTES", 16)
    save(run, 2)
    folder = checkpoint_folder.partial(run, 4) / "trainer"
    folder.mkdir(parents=True)
    for rank in range(4):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 100)
    (folder / ".metadata").write_bytes(b"places" * 100)
    return checkpoint_folder.seal(run, 4, 4)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__3_0.distcp", ".metadata"])
@pytest.mark.parametrize("ranks", [1, 7])
def test_a_large_shard_of_another_incarnation_is_found_before_it_is_loaded(run, large, name, ranks):
    assert checkpoint_folder.newest(run) == (large, [])
    for rank in range(ranks):
        checkpoint_folder.check_share(large.folder, rank, ranks)
    path = large.folder / "trainer" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = []
    for rank in range(ranks):
        try:
            checkpoint_folder.check_share(large.folder, rank, ranks)
        except ConfigError as e:
            found.append(str(e))
    assert len(found) == 1 and f"trainer/{name} does not hold what was written (CRC)" in found[0]
    chosen, problems = checkpoint_folder.newest(run)
    assert chosen.version == 2 and len(problems) == 1 and name in problems[0]


def test_a_damaged_one_does_not_count_among_those_to_keep(run, large):
    (large.folder / "trainer" / "__1_0.distcp").write_bytes(b"?" * 100)
    with pytest.raises(ConfigError):
        checkpoint_folder.check_share(large.folder, 0, 1)
    save(run, 6)
    checkpoint_folder.tidy(run, CheckpointConfig(every=1, keep=2))
    assert [folder.name[-1] for folder in checkpoint_folder.complete(run)] == ["2", "4", "6"]


def test_a_file_that_is_shorter_than_its_writer_says_is_not_sealed(run):
    begin_to_save(run, 2, b"torn")
    known = {"trainer/__0_0.distcp": checkpoint_folder.Written(400, 1)}
    with pytest.raises(OSError, match="has 4 bytes, of 400 that were written"):
        checkpoint_folder.seal(run, 2, 2, known)
    assert checkpoint_folder.complete(run) == []


def test_what_its_writer_says_is_what_a_file_must_hold(run, large):
    """Not what is read back when the checkpoint is sealed: that may be torn already."""
    begin_to_save(run, 6, b"torn" * 100)
    known = {"trainer/__0_0.distcp": checkpoint_folder.Written(400, 1)}
    sealed = checkpoint_folder.seal(run, 6, 6, known)
    with pytest.raises(ConfigError, match="does not hold what was written"):
        checkpoint_folder.check_share(sealed.folder, 0, 1)


def test_written_again_it_is_the_one_that_the_run_began_from(run, tmp_path):
    """Not another one of the same version, from a line that was given up."""
    save(run, 2)
    other = RunFolder(tmp_path / "other")
    other.create()
    other.begin()
    begin_to_save(other, 2, b"others")
    origin = checkpoint_folder.seal(other, 2, 2)
    branch = resume(run, origin)
    known = checkpoint_folder.again(branch, 2, origin.folder)
    (checkpoint_folder.partial(branch, 2) / "controller.msgpack").write_bytes(b"interrupted")
    sealed = checkpoint_folder.seal(branch, 2, 2, known)
    assert (sealed.folder / "trainer" / "__0_0.distcp").read_bytes() == b"others"
    checkpoint_folder.check_share(sealed.folder, 0, 1)
    assert start.newest(run) == sealed


def test_too_little_room_is_said_before_it_is_used_up(run):
    settings, free = CheckpointConfig(every=1, keep=2), checkpoint_folder.free_bytes(run)
    assert checkpoint_folder.shortage(run, settings, free // 4) == ""
    line = checkpoint_folder.shortage(run, settings, free // 2)
    assert "too little for 3 more checkpoints" in line and str(run.checkpoints) in line
    for version in (2, 4):
        save(run, version)
    assert checkpoint_folder.shortage(run, settings, free // 2) == ""
    assert "too little for 1 more checkpoints" in checkpoint_folder.shortage(run, settings, free * 2)

"""Dumps of batches: written whole or not at all, in order, and removed with the work that a resume discards."""

import asyncio
import logging
import os
import shutil

import numpy as np
import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, PPOConfig, RewardConfig, RolloutConfig
from areal_megatron.controller.batches import Batches
from areal_megatron.controller.replay import Recording
from areal_megatron.data.dumps import REPLAYED, Dump, check_same, check_tokens, dumped, forget, read, recorded, write
from areal_megatron.data.trajectory import BatchPart, Trajectory, decoder, store
from areal_megatron.protocol import EncodedBatch, NextBatch, NotYet, Stop, Trained
from areal_megatron.run.folder import RunError

BATCH, GROUP = 4, 2


def trajectory(uid, version, seed=0):
    draw = np.random.default_rng([uid, seed])
    n = int(draw.integers(1, 9))
    return Trajectory(
        uid=uid,
        epoch=0,
        prompt_id=uid // GROUP,
        admission_version=max(version - 1, 0),
        prompt=draw.integers(0, 99, 3, np.int32),
        response=draw.integers(0, 99, n, np.int32),
        logprobs=-draw.random(n, np.float32),
        versions=np.full(n, version, np.int32),
        loss_mask=np.ones(n, np.uint8),
        reward=float(draw.normal()),
        truncated=bool(uid % 2),
    )


def dump(number, version=None):
    version = number if version is None else version
    return Dump(
        number=number, version=version, trajectories=[trajectory(number * BATCH + k, version) for k in range(BATCH)]
    )


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in Trajectory.__struct_fields__)


@pytest.fixture
def folder(tmp_path):
    for number in range(5):
        write(dump(number), tmp_path / "trajectories")
    return tmp_path / "trajectories"


def test_what_is_written_is_read_bit_for_bit(folder):
    for number, path in dumped(folder).items():
        found, expected = read(path), dump(number)
        assert (found.number, found.version) == (number, number)
        assert all(same(*pair) for pair in zip(found.trajectories, expected.trajectories, strict=True))
    assert sorted(path.name for path in folder.iterdir()) == [f"batch-{number:06d}.msgpack" for number in range(5)]


def test_folders_and_files_that_cannot_be_used_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere: no batch-\*.msgpack in it; a run with rollout.dump=true"):
        dumped(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"batch_size: 8, but batches of .* have 4 episodes"):
        recorded(folder, 0, 8)
    with pytest.raises(ConfigError, match="lacks batch 5"):
        recorded(folder, 5, BATCH)
    assert [path.name for path in recorded(folder, 3, BATCH)] == ["batch-000003.msgpack", "batch-000004.msgpack"]
    (folder / "batch-000002.msgpack").unlink()
    with pytest.raises(ConfigError, match="lacks batch 2; begin after it with resume=CHECKPOINT"):
        recorded(folder, 1, BATCH)
    half = folder / "batch-000003.msgpack"
    half.write_bytes(half.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"batch-000003.msgpack: no dump of a batch"):
        read(half)


def test_a_run_that_goes_back_forgets_what_came_after(folder, tmp_path):
    forget(folder, 3)
    assert list(dumped(folder)) == [0, 1, 2]
    forget(tmp_path / "nowhere", 0)


def batches(recording, first=0, dumps=None):
    config = Config(
        name="t",
        updates=5,
        batch_size=BATCH,
        model=ModelConfig("m"),
        data=DataConfig("d"),
        ppo=PPOConfig(minibatches=2),
        rollout=RolloutConfig(group_size=GROUP),
        reward=RewardConfig(wrong=-1, right=1),
    )
    return Batches(config, recording, take=lambda dump: dump.trajectories, flops=None, first=first, dumps=dumps)


async def trained(subject, number, version, applied=True):
    while isinstance(reply := await subject.next(NextBatch(0, number, version)), NotYet):
        pass
    assert isinstance(reply, EncodedBatch)
    await subject.dumped()
    assert isinstance(subject.trained(Trained(number, version, applied, {})), dict)
    return decoder(BatchPart).decode(reply.part)


def test_a_recording_gives_the_batches_in_their_order_and_they_are_dumped_again(folder, tmp_path):
    async def play():
        subject = batches(
            recording := Recording(recorded(folder, 1, BATCH), version=1), first=1, dumps=tmp_path / "again"
        )
        for number in range(1, 5):
            part = await trained(subject, number, number)
            by_uid = {t.uid: t for t in part.trajectories}
            assert all(same(by_uid[t.uid], t) for t in dump(number).trajectories) and len(by_uid) == BATCH
        assert recording.form_batch() is None and recording.version == 5
        subject.stop()
        assert isinstance(await subject.next(NextBatch(0, 5, 5)), Stop)

    asyncio.run(play())
    for number in range(1, 5):
        name = f"batch-{number:06d}.msgpack"
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_checkpoint_of_a_replay_knows_its_recording(folder, tmp_path):
    async def play():
        recording = Recording(recorded(folder, 0, BATCH), version=0)
        subject = batches(recording)
        assert recording.trained is None
        await trained(subject, 0, 0)
        await trained(subject, 1, 1)
        await subject.next(NextBatch(0, 2, 2))  # formed, and not yet trained
        return recording.trained

    last, other, checkpoint = asyncio.run(play()), tmp_path / "other", tmp_path / "version-000002"
    check_same(folder, checkpoint)  # it has trained none
    store(last, checkpoint / REPLAYED)
    shutil.copytree(folder, other)
    check_same(other, checkpoint)
    edited = dump(1)
    edited.trajectories[0].reward += 1
    write(edited, other)
    cure = rf"continue with the same folder, or have a new run begin there: name=… resume={checkpoint}$"
    with pytest.raises(ConfigError, match=rf"^data\.train: batch 1 of {other} is not the one that was trained: {cure}"):
        check_same(other, checkpoint)
    (other / "batch-000001.msgpack").unlink()
    with pytest.raises(ConfigError, match=rf"^data\.train: batch 1 of {other} is missing, .*: {cure}"):
        check_same(other, checkpoint)


def test_an_update_that_only_one_of_both_applied_is_told(folder):
    async def play():
        subject = batches(Recording(recorded(folder, 0, BATCH), version=0))
        await trained(subject, 0, 0, applied=False)
        with pytest.raises(RunError, match=r"batch-000001.msgpack trained version 1, but the replay is at version 0"):
            await subject.next(NextBatch(0, 1, 0))

    asyncio.run(play())


def test_a_disk_that_is_full_costs_the_dump_and_not_the_run(folder, tmp_path, caplog):
    async def play():
        (tmp_path / "file").write_text("in the place of the folder")
        await trained(batches(Recording(recorded(folder, 0, BATCH), version=0), dumps=tmp_path / "file"), 0, 0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(play())
    assert "batch 0 is not kept" in caplog.text


def test_no_batch_is_kept_beyond_the_bound(folder, tmp_path):
    write(dump(0), tmp_path / "bounded", most_bytes=1)
    with pytest.raises(OSError, match=r"bounded holds 0\.0 GB, the most that rollout\.dump_gb allows"):
        write(dump(1), tmp_path / "bounded", most_bytes=1)
    assert list(dumped(tmp_path / "bounded")) == [0]


def test_a_disk_that_hangs_costs_the_dump_and_not_the_run(folder, tmp_path, caplog):
    """A pipe that nobody reads in the place of the file that is written first."""

    async def play():
        slow = batches(Recording(recorded(folder, 0, BATCH), version=0), dumps=tmp_path / "hung")
        slow._config.machine.peer_timeout_s = 2
        hung = tmp_path / "hung" / f".batch-000000.msgpack.{os.getpid()}"
        hung.parent.mkdir()
        os.mkfifo(hung)
        for number in range(2):
            await trained(slow, number, number)
        reader = os.open(hung, os.O_RDONLY | os.O_NONBLOCK)
        await trained(slow, 2, 2)
        os.close(reader)

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(play(), 300))
    assert "batch 1 is not kept: the one before is still being written" in caplog.text


def test_a_token_that_the_model_does_not_have_names_the_trajectory(folder):
    path = dumped(folder)[0]
    found = read(path)
    largest = max(max(one.prompt.max(), one.response.max()) for one in found.trajectories)
    check_tokens(found, path, largest + 1)
    problem = rf"batch-000000.msgpack: trajectory \d has token {largest}, but .* vocab_size={largest}: replay it with"
    with pytest.raises(ConfigError, match=problem):
        check_tokens(found, path, largest)
    with pytest.raises(ConfigError, match=problem):
        Recording([path], version=0, vocabulary=largest).form_batch()

"""Checks of checkpoints on trainer ranks, which test_checkpoint.py starts."""

from __future__ import annotations

import json
import os
import queue
import random
import resource
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.distributed.checkpoint import FileSystemReader

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint.torch_dist_file import Image
from areal_megatron.config import CheckpointConfig, Config, CriticConfig, OptimizerConfig, PenaltyConfig, PPOConfig
from areal_megatron.data.trajectory import BatchPart
from areal_megatron.packing.partition import split
from areal_megatron.rank import checkpoints as checkpoints_module
from areal_megatron.rank.checkpoints import Checkpoints, Export
from areal_megatron.rank.weights import save_hf
from areal_megatron.run.folder import Replaced, RunError, RunFolder
from areal_megatron.train import train
from areal_megatron.trainer import checkpoint, checkpoint_tensors
from areal_megatron.trainer.patches import cpu_passes_for_cuda
from areal_megatron.trainer.trainer import Trainer
from tests.support.ranks.float16_checks import copied, part_of, scales, set_scale
from tests.support.ranks.trainer_checks import make_config, make_trajectories, open_trainer
from tests.support.transformer_engine import transformer_engine
from tools.bench.checkpoint import save_as_megatron_does

UPDATES = 4
SCALED = OptimizerConfig(lr=1e-3, warmup_steps=0, weight_decay=0.1)
"""Its rate is scaled to how stale the answers are."""
CRITIC = CriticConfig(lr=2e-3, gae_lambda=0.9, clip=0.5)
PENALTY = PenaltyConfig(entropy=0.3, kl=0.2, kl_form="k3")
REPORTED = ("loss", "grad_norm", "lr", "ratio_mean", "entropy")
OF_CRITIC = ("value_loss", "value_grad_norm", "explained_variance")


def check_all(folder: Path, rank: int, model: str, saved: dict | None, resumed: dict[str, dict], critic: bool) -> None:
    """Trains without interruption under the layout `saved`, then resumes under the layouts `resumed`.

    resumed: run folder → layout. All checks run on the same ranks, since starting them takes longer than any check.
    """
    ppo = PPOConfig(minibatches=2, penalty=PENALTY, critic=CRITIC if critic else CriticConfig())
    if saved is not None:
        check_straight(folder, rank, make_config(folder, model, saved, ppo=ppo, optimizer=SCALED))
    for run, layout in resumed.items():
        check_resumed(
            folder, rank, make_config(folder, model, layout, ppo=ppo, optimizer=SCALED), run, exact=layout == saved
        )


def check_straight(folder: Path, rank: int, config: Config) -> None:
    """Trains UPDATES updates, saves after half of them, and keeps losses and parameters in a file."""
    with open_trainer(folder, rank, config, "straight") as subject:
        saver = checkpoint.Saver(subject)
        metrics = update(subject, 0, 1, saver)
        saver.begin(folder / "early")  # the second checkpoint has the layout of the first and later values
        metrics += update(subject, 1, UPDATES // 2, saver)
        # megatron-core would start a process that imports everything, for a queue that its writers can do without
        with patch.object(filesystem_async, "_results_queue", queue.Queue()):
            save_as_megatron_does(subject, make_folder(subject, folder / "peer"))
        saver.begin(folder / "checkpoint")
        metrics += update(subject, UPDATES // 2, UPDATES, saver)
        assert metrics[-1]["lr"] < config.optimizer.lr / 2
        saver.wait()
        keep(subject, folder / "straight", metrics)
        dist.barrier()  # rank 0 has waited for the others
        same_tensors(folder / "checkpoint", folder / "peer")
        check_another_saver(subject, folder / "another")
        check_failure(subject, saver, folder / "failed")
        if subject.critic:
            check_without_critic(subject, folder / "checkpoint", make_folder(subject, folder / "plain"))


def check_another_saver(subject: Trainer, path: Path) -> None:
    """What rank 0 seals of another rank's file is of this file, though the rank told of its own of an earlier saver.

    The save leaves nothing in the store.
    """
    saver, written, store = checkpoint.Saver(subject), {}, subject.parallel.store
    keys = store.num_keys()
    dist.barrier()

    def late(image: Image, file: Path, write=Image.write) -> int:
        time.sleep(0 if subject.parallel.is_first else 2.0)
        return write(image, file)

    with patch.object(Image, "write", late):
        saver.begin(path, written.update)
        saver.wait()
    dist.barrier()
    assert store.num_keys() == keys
    assert {name: file.crc for name, file in written.items()} == {
        name: zlib.crc32((path / name).read_bytes()) for name in written
    }
    assert len(written) == (subject.parallel.world if subject.parallel.is_first else 0)


def check_failure(subject: Trainer, saver: checkpoint.Saver, path: Path) -> None:
    """If one rank cannot write its file, rank 0 names that rank, and no metadata is written for the others' files."""
    if subject.parallel.is_first:
        (path / "__1_0.distcp").mkdir(parents=True)
    dist.barrier()
    saver.begin(path)
    if subject.parallel.is_first:
        with pytest.raises(RunError, match=f"{path} could not be written by trainer-1: Is a directory"):
            saver.wait()
    else:
        saver.wait()
    dist.barrier()
    assert not (path / ".metadata").exists() and not (path / "metadata.json").exists()


def check_without_critic(subject: Trainer, saved: Path, path: Path) -> None:
    """A checkpoint of a run that had no critic is refused before anything is loaded."""
    if subject.parallel.is_first:
        common = torch.load(saved / "common.pt", weights_only=False)
        assert common.pop("critic")["schedule"]["steps"] == common["schedule"]["steps"]
        torch.save(common, path / "common.pt")
        shutil.copy(saved / "metadata.json", path)
    dist.barrier()
    with pytest.raises(
        RunError, match=f"trainer-{subject.parallel.rank}: .*{path}.* has no critic: resume it without ppo.critic"
    ):
        checkpoint.load(subject, path)


def same_tensors(found: Path, expected: Path) -> None:
    """Both have the same tensors, bit for bit, except the random generators, which megatron-core leaves to its user."""
    with cpu_passes_for_cuda():
        found, expected = (dist_checkpointing.load_plain_tensors(str(path)) for path in (found, expected))
    expected = {name: values for name, values in expected.items() if torch.is_tensor(values)}
    for name, values in expected.items():
        assert torch.equal(found.pop(name), values), name
    assert {name for name, values in found.items() if torch.is_tensor(values)} == {
        f"{checkpoint_tensors.GENERATORS}.{name}" for name in checkpoint_tensors.generators()
    }
    assert len(expected) > 30


def check_resumed(folder: Path, rank: int, config: Config, run: str, exact: bool) -> None:
    """Resumes from the checkpoint under the same or another layout: the second half is the same as before."""
    with open_trainer(folder, rank, config, run) as subject:
        checkpoint.load(subject, folder / "checkpoint")
        metrics = update(subject, UPDATES // 2, UPDATES)
        expected = json.loads((folder / "straight" / "metrics.json").read_text())[UPDATES // 2 :]
        if exact:
            assert metrics == expected, f"{metrics}\n{expected}"
            before = torch.load(folder / "straight" / f"parameters-{rank}.pt", weights_only=True)
            for name, value in held(subject).items():
                assert torch.equal(value, before[name]), name
            return
        same_metrics(metrics, expected)


LAYERS = {"local": nullcontext, "engine": transformer_engine}
RESUMED_BY = {"local": "engine", "engine": "local"}
"""Layers that saved a checkpoint → those that resume from it."""


def check_layers(folder: Path, rank: int, model: str, layout: dict, critic: bool) -> None:
    """Checkpoints of TransformerEngine's layers and of local ones have the same tensors. Each resume from the
    other's."""
    ppo = PPOConfig(minibatches=2, penalty=PENALTY, critic=CRITIC if critic else CriticConfig())
    config = make_config(folder, model, layout, ppo=ppo, optimizer=SCALED)
    expected, names = None, {}
    for saved, kind in RESUMED_BY.items():
        with LAYERS[saved](), open_trainer(folder, rank, config, f"saved-{saved}") as subject:
            saver = checkpoint.Saver(subject)
            update(subject, 0, 1, saver)
            saver.begin(folder / saved)
            metrics = update(subject, 1, 2, saver)
            saver.wait()
            dist.barrier()
        expected = expected or metrics
        same_metrics(metrics, expected)
        names[saved] = set(FileSystemReader(folder / saved).read_metadata().state_dict_metadata)
        with LAYERS[kind](), open_trainer(folder, rank, config, f"resumed-{kind}-{saved}") as subject:
            assert any("layer_norm_weight" in name for name in held(subject)) == (kind == "engine")
            checkpoint.load(subject, folder / saved)
            same_metrics(update(subject, 1, 2), expected)
    tensors = {kind: {name for name in of if "_extra_state" not in name} for kind, of in names.items()}
    assert tensors["local"] == tensors["engine"]
    assert names["local"] != names["engine"]  # TransformerEngine's norms have entries of their own


def check_on_host(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Optimizer states on the host are those that are elsewhere otherwise, after steps, in checkpoints and when they
    are resumed, whichever saved and whichever resumes. cases: dtype → model, layout."""
    for dtype, (model, layout) in cases.items():
        at_save, after, names, steps = (
            {},
            {},
            {},
            OptimizerConfig(lr=1e-3, warmup_steps=0, weight_decay=0.1, clip_grad=0.05),
        )
        critic = CRITIC if dtype == "bfloat16" else CriticConfig()
        ppo = PPOConfig(minibatches=2, penalty=PENALTY, critic=critic)

        def trainer(on_host: bool, run: str):
            optimizer = replace(steps, on_host=on_host)  # noqa: B023
            config = make_config(folder, model, layout, dtype=dtype, ppo=ppo, optimizer=optimizer)  # noqa: B023
            return open_trainer(folder, rank, config, f"{dtype}-{run}")  # noqa: B023

        for on_host in (False, True):
            path = folder / f"{dtype}-{on_host}"
            with trainer(on_host, f"saved-{on_host}") as subject:
                inner = subject.policy.optimizer.megatron.chained_optimizers
                assert {isinstance(o.optimizer, HybridDeviceOptimizer) for o in inner} == {on_host}
                saver = checkpoint.Saver(subject)
                update(subject, 0, 2, saver)
                saver.begin(path)
                at_save[on_host] = copied(subject)
                update(subject, 2, 3, saver)
                after[on_host] = copied(subject)
                saver.wait()
                if dtype == "float16":
                    check_overflow(subject)
                dist.barrier()
            names[on_host] = set(FileSystemReader(path).read_metadata().state_dict_metadata)
            groups = torch.load(path / "common.pt", weights_only=True)["optimizer"]  # no class of Megatron's in it
            assert groups
        assert names[True] == names[False]
        same_tensors_within(at_save[True], at_save[False], 1e-5)
        for saved, resumed in ((False, True), (True, False), (True, True)):
            with trainer(resumed, f"resumed-{saved}-{resumed}") as subject:
                checkpoint.load(subject, folder / f"{dtype}-{saved}")
                same_tensors_within(copied(subject), at_save[saved], 0)
                update(subject, 2, 3)
                same_tensors_within(copied(subject), after[saved], 0 if saved == resumed else 1e-5)


def check_overflow(subject: Trainer) -> None:
    """A gradient that leaves the range of float16 changes nothing but the scale of the loss."""
    before, scale = copied(subject), 2.0**20
    set_scale(subject, scale)
    assert not subject.train_batch(part_of(subject, 3)).applied
    found = copied(subject)
    assert scales(subject) == {scale / 4}
    assert all(torch.equal(value, before[name]) for name, value in found.items())


def same_tensors_within(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(value.dtype, 0.0) if tolerance else 0.0
        bound = tolerance + rounding * value.abs().float()
        assert ((found[name].float() - value.float()).abs() <= bound).all(), name


def same_metrics(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            assert abs(ours[key] - value) <= 1e-6 * max(1.0, abs(value)), (key, ours[key], value)


class Port:
    """Does what the controller does for checkpoints: writes a part of its own and takes note of how they went."""

    def __init__(self, run: RunFolder, is_first: bool):
        self._run, self._is_first = run, is_first
        self.refuses = False
        self.said: list[tuple[int, str]] = []

    def checkpoint(self, version: int, batches: int) -> None:
        if self._is_first:
            folder = checkpoint_folder.partial(self._run, version)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "controller.msgpack").write_bytes(b"state")

    def wait_for_checkpoint(self, version: int) -> None:
        if self.refuses:
            raise OSError("the controller's state cannot be written: No space left on device")

    def saved(self, version: int, stall_s: float, seconds: float, error: str = "", warning: str = "") -> None:
        self.said.append((version, error))


@contextmanager
def no_room_for_a_file(here: bool) -> Iterator[None]:
    """Lets no file of this process grow beyond 10 kB, if `here`: the write that does ends in an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if here else before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_full_disk(folder: Path, rank: int, model: str) -> None:
    """Whoever cannot write, a checkpoint is lost, named and removed, and all ranks go on, or stop if they are to."""
    config = make_config(folder, model, {"dp": 2})
    config.checkpoint = CheckpointConfig(every=1, keep=2)
    with open_trainer(folder, rank, config, "full") as subject:
        run = RunFolder(folder / "full")
        port = Port(run, rank == 0)
        checkpoints = Checkpoints(config, run, subject, port)
        assert checkpoints.resume() == (0, 0)
        update(subject, 0, 1)

        def save(version: int, action=None) -> tuple[list[str], list[tuple[int, str]]]:
            """Returns what is in the folder of checkpoints then, and what the controller was told."""
            port.said.clear()
            (action or checkpoints.after_update)(version, version, *(() if action else (False,)))
            checkpoints.finish()
            dist.barrier()
            names = sorted(path.name for path in run.checkpoints.iterdir())
            dist.barrier()
            return names, port.said

        def check(found, names: list[str], version: int, *said: str) -> None:
            assert found[0] == [f"version-{name:06d}" for name in names]
            if rank == 0:
                [(told, error)] = found[1]
                assert told == version and all(text in error for text in said) and bool(error) == bool(said), error

        check(save(1), [1], 1)
        lost = "is lost and training goes on; the last one is version-000001"
        with no_room_for_a_file(rank == 1):
            check(save(2), [1], 2, lost, "trainer-1: File too large", "GB are free in", "make room")
        with no_room_for_a_file(rank == 0):
            check(save(3), [1], 3, lost, "trainer-0: File too large")
        with no_room_for_a_file(True):
            check(save(4), [1], 4, lost, "trainer-0: File too large; so did 1 other")
        port.refuses = True
        check(save(5), [1], 5, lost, "the controller's state cannot be written: No space left on device")
        check(save(5, checkpoints.stop), [1], 5, lost)  # it was to be saved before, and is tried again
        port.refuses = False
        check(save(5, checkpoints.stop), [1, 5], 5)
        check(save(6), [5, 6], 6)


def check_exports(folder: Path, rank: int, model: str) -> None:
    """Every version is exported, though every other one alone is saved; one for which there is no room is lost."""
    config = make_config(folder, model, {"dp": 2}, dtype="bfloat16", ppo=PPOConfig(critic=CRITIC))
    config.checkpoint = CheckpointConfig(every=2, hf_every=1)
    all_may_wait = patch.object(checkpoints_module, "_MOST_PENDING", 6)
    with all_may_wait, open_trainer(folder, rank, config, "exports") as subject:
        run = RunFolder(folder / "exports")
        checkpoints = Checkpoints(config, run, subject, Port(run, rank == 0))
        assert checkpoints.resume() == (0, 0)
        for version in range(1, 7):
            update(subject, version - 1, version, checkpoints)
            save_hf(config, run, subject)
            if rank == 0:
                run.hf.rename(folder / f"version-{version:06d}")
            with no_room_for_a_file(version == 5 and rank == 1):
                checkpoints.after_update(version, version, False)
                if version == 5:
                    checkpoints.finish()
                    dist.barrier()
        checkpoints.finish()
        if rank == 0:
            exports = sorted(run.exports.iterdir())
            assert [path.name for path in exports] == [f"version-{version:06d}" for version in (1, 2, 3, 4, 6)]
            for path in exports:
                found, expected = (place / "model.safetensors" for place in (path, folder / path.name))
                assert found.read_bytes() == expected.read_bytes(), path


class HeldExport(Export):
    """An export that waits for the test."""

    go_on = threading.Event()

    def _export(self) -> None:
        assert self.go_on.wait(120)
        super()._export()


def check_slow_exports(folder: Path, rank: int, model: str) -> None:
    """While two exports have not ended no rank saves weights for another one, which is said once each time. What an
    incarnation that was replaced has yet to export is not exported."""
    config = make_config(folder, model, {"dp": 2}, dtype="bfloat16")
    config.checkpoint = CheckpointConfig(hf_every=1)
    go_on, told = HeldExport.go_on, []
    held = patch.object(checkpoints_module, "Export", HeldExport)
    listening = patch.object(checkpoints_module.log, "warning", lambda message, *of: told.append(message % of))
    with held, listening, open_trainer(folder, rank, config, "slow") as subject:
        run = RunFolder(folder / "slow", 0)
        checkpoints = Checkpoints(config, run, subject, Port(run, rank == 0))
        assert checkpoints.resume() == (0, 0)

        def saved(first: int, last: int) -> list[str]:
            for version in range(first, last + 1):
                update(subject, version - 1, version, checkpoints)
                checkpoints.after_update(version, version, False)
            checkpoints._weights.wait()
            dist.barrier()
            folders = sorted(path.name[1:15] for path in run.exports.glob(".*.weights"))
            dist.barrier()
            return folders

        assert saved(1, 5) == ["version-000001", "version-000002"]
        go_on.set()
        checkpoints.finish()
        dist.barrier()
        go_on.clear()
        assert saved(6, 9) == ["version-000006", "version-000007"]
        if rank == 0:
            assert [message[:26] for message in told] == [f"version {n} is not exported," for n in (3, 8)]
            RunFolder(run.folder).begin()
            go_on.set()
            for export in checkpoints._exports:
                export.join(60)
            names = ["version-000001", "version-000002"]
            assert sorted(path.name for path in run.exports.iterdir()) == names
        dist.barrier()


def check_no_room_for_the_model(folder: Path, rank: int, model: str) -> None:
    """A run that cannot write its model at the end fails, but has its last checkpoint, from which it can write it."""
    config = make_config(folder, model, {})
    config.checkpoint = CheckpointConfig(every=1, keep=2)
    with open_trainer(folder, rank, config, "room") as subject:
        run = RunFolder(folder / "room")
        checkpoints = Checkpoints(config, run, subject, Port(run, True))
        (run.folder / ".hf.partial").write_bytes(b"")  # nothing can be written into a file
        with pytest.raises(RunError, match=r"the trained model could not be written: .*; make room, and resume=auto"):
            train(subject, Batches(), Model(config, run, subject), checkpoints, 1)
        newest, problems = checkpoint_folder.newest(run)
        assert newest.version == 1 and not problems


class Batches:
    """Does what Experience does, without a controller."""

    def take(self, number: int, version: int, publish) -> BatchPart:
        [part] = split(
            make_trajectories(12, version, seed=1), version=version, minibatches=2, cap=128, seed=1, replicas=1
        )
        return part

    def trained(self, number: int, result) -> None:
        pass


class Model:
    """Does what Weights does, without engines."""

    def __init__(self, *of):
        self._of = of

    def publish(self, version: int) -> None:
        pass

    def wait_until_read(self) -> None:
        pass

    def save_hf(self) -> None:
        save_hf(*self._of)


def check_clock(folder: Path, rank: int, model: str) -> None:
    """The clock of the file system jumps by up to an hour at each checkpoint: the last one is the newest, and is kept.

    Then the run is begun again: one that was replaced saves nothing, and a shard of another moment is not loaded.
    """
    config = make_config(folder, model, {})
    config.checkpoint = CheckpointConfig(every=1, keep=2)
    chance = random.Random(1)
    with open_trainer(folder, rank, config, "clock") as subject:
        run = RunFolder(folder / "clock", 0)
        checkpoints = Checkpoints(config, run, subject, Port(run, True))
        checkpoints.resume()
        for version in range(1, 9):
            update(subject, version - 1, version, checkpoints)
            checkpoints.after_update(version, version, last=False)
            checkpoints.finish()
            newest, problems = checkpoint_folder.newest(run)
            assert newest.version == version and not problems
            kept = [int(path.name.removeprefix("version-")) for path in checkpoint_folder.complete(run)]
            assert kept == list(range(max(1, version - 1), version + 1))
            moment = time.time() + chance.uniform(-3600, 3600)
            for path in (*newest.folder.iterdir(), newest.folder):
                os.utime(path, (moment, moment))
        again = RunFolder(run.folder)
        again.begin(version=8, batches=8, checkpoint=str(newest.folder), after=0)
        with pytest.raises(Replaced):
            checkpoints.after_update(9, 9, last=False)
        assert checkpoint_folder.newest(run)[0] == newest

        resumed = Checkpoints(config, again, subject, Port(again, True))
        assert resumed.resume() == (8, 8)
        shard = newest.folder / "trainer" / "__0_0.distcp"
        earlier = run.checkpoints / "version-000007" / "trainer" / "__0_0.distcp"
        assert shard.stat().st_size == earlier.stat().st_size
        shutil.copy(earlier, shard)
        with pytest.raises(RunError, match=r"trainer-0: .*__0_0.distcp does not hold what was written \(CRC\)"):
            resumed.resume()
        assert checkpoint_folder.newest(run)[0].version == 7


def update(
    subject: Trainer, first: int, last: int, saver: checkpoint.Saver | Checkpoints | None = None
) -> list[dict[str, float]]:
    """Makes the updates `first` to `last` − 1; returns the metrics that are the same under every layout."""
    metrics = []
    for version in range(first, last):
        trajectories = make_trajectories(12, version, seed=20 + version)
        for t in trajectories:  # so that the rate is scaled
            t.logprobs = t.logprobs - 3 * (t.versions < version).astype("float32")
        part = split(
            trajectories,
            version=version,
            minibatches=2,
            cap=128,
            seed=version,
            replicas=subject.config.trainer.dp,
        )[subject.parallel.replica]
        result = subject.train_batch(part, before_step=saver.wait_until_read if saver else lambda: None)
        assert result.applied
        metrics.append({key: result.metrics[key] for key in (*REPORTED, *(OF_CRITIC if subject.critic else ()))})
    return metrics


def held(subject: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{learner}: {name}": values
        for learner, of in subject.learners.items()
        for name, values in of.parameters().items()
    }


def make_folder(subject: Trainer, path: Path) -> Path:
    if subject.parallel.is_first:
        path.mkdir()
    dist.barrier()
    return path


def keep(subject: Trainer, folder: Path, metrics: list[dict[str, float]]) -> None:
    torch.save(held(subject), folder / f"parameters-{subject.parallel.rank}.pt")
    if subject.parallel.is_first:
        (folder / "metrics.json").write_text(json.dumps(metrics))

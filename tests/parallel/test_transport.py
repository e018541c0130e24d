"""Weight updates between real processes over TCP: Megatron shards at TP2×PP2 to two engines of two ranks."""

import hashlib
import json
import multiprocessing
import os
import queue
import random
import threading
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from areal_megatron.models.architecture import read_config
from tests.support.link_store import open_store
from tests.support.ranks import link_rank
from tests.support.reshard_oracle import vllm_parameters, write_model

SIZES = {"tp": 2, "pp": 2}
ENGINE_TP = 2
TIMEOUT_S = 5.0
LONG_S = 16.0
AMPLE_S = 60.0


class Rank:
    """A process that runs link_rank.py."""

    def __init__(self, forks, setup):
        self.name = f"{setup['role']} {setup.get('engine', '')}/{setup['rank']}"
        commands, told = multiprocessing.Pipe(duplex=False)
        heard, events = multiprocessing.Pipe(duplex=False)
        self.process = forks.start(link_rank.main, setup, commands, events)
        for passed_on in (commands, events):
            passed_on.close()
        self._told, self._heard = (os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((told, "w"), (heard, "r")))
        for doubled in (told, heard):
            doubled.close()
        self._lines, self._kept = queue.SimpleQueue(), []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._heard:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def tell(self, **command):
        self._told.write(json.dumps(command) + "\n")
        self._told.flush()

    def hear(self, key="", timeout_s=60):
        """The next event that has `key`; events without it are kept for later."""
        deadline, kept = time.monotonic() + timeout_s, self._kept
        while True:
            for event in kept:
                if not key or key in event:
                    kept.remove(event)
                    return event
            try:
                event = self._lines.get(timeout=deadline - time.monotonic())
            except (queue.Empty, ValueError):
                pytest.fail(f"{self.name} said nothing about {key!r} within {timeout_s} s, but {kept}")
            if event is None:
                self.process.join()
                pytest.fail(f"{self.name} ended with code {self.process.exitcode}")
            kept.append(event)

    def ask(self, **command):
        self.tell(**command)
        return self.hear()

    def end(self):
        self.process.kill()
        self.process.join()
        self._told.close()


def stepped(tensor: torch.Tensor, share: float = 0.02) -> torch.Tensor:
    """The tensor in bfloat16, with `share` of its elements changed to their upper neighbours."""
    integers = tensor.bfloat16().view(torch.int16)
    return (integers + (torch.rand(tensor.shape) < share).to(torch.int16)).view(torch.bfloat16)


class World:
    """Trainers, engines and the store between them. Trainer rank 0 tells what was delivered."""

    def __init__(self, forks, folder, dtype="bfloat16", timeout_s=TIMEOUT_S, update="full"):
        self._forks = forks
        self.folders = [folder / "a", folder / "b"]
        self.tensors = [write_model("qwen3", path, seed) for seed, path in enumerate(self.folders)]
        if update != "full":  # an update changes little
            self.tensors[1] = {name: stepped(tensor) for name, tensor in self.tensors[0].items()}
            save_file(self.tensors[1], self.folders[1] / "model.safetensors")
        self.hf_config = read_config(self.folders[0])
        self.store = open_store()
        self.dtype = dtype
        self.setup = {
            "hf_config": self.hf_config,
            "sizes": SIZES,
            "engine_tp": ENGINE_TP,
            "engines": 2,
            "dtype": dtype,
            "store": f"127.0.0.1:{self.store.port}",
            "timeout_s": timeout_s,
            "bucket_elements": 4000,
            "update": update,
            "folder": str(self.folders[0]),
            "timeline": str(folder / "timeline.jsonl"),
        }
        self.trainers = [Rank(forks, self.setup | {"role": "trainer", "rank": rank}) for rank in range(4)]
        self.engines = [self._start(engine) for engine in range(2)]
        self._wait_up(self.trainers + self.engines[0] + self.engines[1])
        self.generations = [0, 0]

    def _start(self, engine):
        setup = self.setup | {"role": "engine", "engine": engine}
        return [Rank(self._forks, setup | {"rank": rank}) for rank in range(ENGINE_TP)]

    def _wait_up(self, ranks):
        for rank in ranks:
            assert rank.hear(timeout_s=120) == {"up": True}

    def restart(self, engine):
        for rank in self.engines[engine]:
            rank.end()
        self.engines[engine] = self._start(engine)
        self._wait_up(self.engines[engine])

    def join(self, engine):
        self.generations[engine] += 1
        for rank in self.engines[engine]:
            assert rank.ask(join=self.generations[engine]) == {"ok": True}

    def start(self, engine, faults=("", "")):
        for rank, fault in zip(self.engines[engine], faults, strict=True):
            assert rank.ask(start=fault) == {"ok": True}

    def publish(self, version, engines):
        for trainer in self.trainers:
            links = [(engine, self.generations[engine]) for engine in engines]
            trainer.tell(publish=version, folder=str(self.folders[version % 2]), links=links)
        for trainer in self.trainers:
            assert trainer.hear("published") == {"published": version}

    def overwrite(self):
        for trainer in self.trainers:
            trainer.tell(overwrite=True)

    def deliveries(self, number):
        """Returns what trainer 0 was told, by engine, once every trainer has overwritten its parameters."""
        for trainer in self.trainers:
            trainer.hear("overwritten")
        return sorted((self.trainers[0].hear("error") for _ in range(number)), key=lambda event: event["engine"])

    def assert_committed(self, engine, version):
        for rank, process in enumerate(self.engines[engine]):
            held = vllm_parameters(self.tensors[version % 2], self.hf_config, tp=ENGINE_TP, rank=rank)
            data = {name: t.to(getattr(torch, self.dtype)).contiguous().view(torch.uint8) for name, t in held.items()}
            expected = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in data.items()}
            assert process.ask(commit=True) == {"fingerprint": expected}

    def slice_bytes(self):
        """Returns the bytes that one engine receives: all but the vocabulary's padding, norms once on each rank."""
        whole = sum(t.numel() for t in self.tensors[0].values())
        norms = sum(t.numel() for t in self.tensors[0].values() if t.dim() == 1)
        return (whole + norms * (ENGINE_TP - 1)) * getattr(torch, self.dtype).itemsize

    def close(self):
        for rank in [*self.trainers, *self.engines[0], *self.engines[1]]:
            rank.end()


@pytest.fixture(scope="module")
def world(forks, tmp_path_factory):
    world = World(forks, tmp_path_factory.mktemp("link"))
    yield world
    world.close()


def delivered(world, engine, version):
    return {
        "engine": engine,
        "generation": world.generations[engine],
        "version": version,
        "bytes": world.slice_bytes(),
        "changed": 1.0,
        "error": "",
    }


def test_updates_arrive_exactly_and_reuse_their_buffers(world):
    for engine in (0, 1):
        world.join(engine)
    buffers = []
    for version in (1, 2, 3):
        for engine in (0, 1):
            world.start(engine)
        world.publish(version, [0, 1])
        world.overwrite()  # at once: what the engines get must be the version as it was published
        assert world.deliveries(2) == [delivered(world, engine, version) for engine in (0, 1)]
        for engine in (0, 1):
            world.assert_committed(engine, version)
        buffers.append([trainer.ask(buffers=True) for trainer in world.trainers])
    assert buffers[0] == buffers[1] == buffers[2]


def test_engine_that_dies_in_a_transfer_costs_its_link_only(world):
    for engine in (0, 1):
        world.join(engine)
    world.start(0)
    world.start(1, faults=("", "die"))
    world.publish(4, [0, 1])
    world.overwrite()
    good, bad = world.deliveries(2)
    assert good == delivered(world, 0, 4)
    assert bad["version"] == 4 and "engine 1" in bad["error"]
    world.assert_committed(0, 4)

    world.publish(5, [1])  # the controller has not given it a new generation
    assert "engine 1 needs a new generation" in world.trainers[0].hear("error")["error"]
    world.restart(1)
    world.join(1)
    for engine in (0, 1):
        world.start(engine)
    world.publish(6, [0, 1])
    world.overwrite()
    assert world.deliveries(2) == [delivered(world, engine, 6) for engine in (0, 1)]
    for engine in (0, 1):
        world.assert_committed(engine, 6)


def test_silent_engine_does_not_hold_the_trainers_beyond_the_timeout(world):
    world.join(0)
    world.join(1)
    world.start(0)
    world.start(1, faults=("hang", ""))
    world.publish(7, [0, 1])
    begin = time.monotonic()
    world.overwrite()
    good, bad = world.deliveries(2)
    assert time.monotonic() - begin < 5 * TIMEOUT_S
    assert good == delivered(world, 0, 7)
    assert bad["bytes"] == 0 and "engine 1, generation" in bad["error"]
    world.assert_committed(0, 7)
    world.restart(1)


def test_engine_that_is_given_up_holds_nobody(world):
    """Like a node that has vanished: messages to it wait for their timeout, the trainers do not."""
    world.join(0)
    world.join(1)
    for trainer in world.trainers:
        assert trainer.ask(timeout_s=LONG_S) == {"ok": True}
    world.start(0)
    world.start(1, faults=("hang", "hang"))
    world.publish(8, [0, 1])
    begin = time.monotonic()
    assert world.trainers[0].ask(give_up=[1, world.generations[1]], after_s=1) == {"ok": True}
    world.overwrite()
    for trainer in world.trainers:
        assert trainer.hear("overwritten") == {"overwritten": True}
    assert time.monotonic() - begin < LONG_S / 2
    good, bad = sorted((world.trainers[0].hear("error") for _ in range(2)), key=lambda event: event["engine"])
    assert good == delivered(world, 0, 8)
    assert bad["error"] == f"engine 1 has left generation {world.generations[1]}"
    world.assert_committed(0, 8)
    for trainer in world.trainers:
        assert trainer.ask(timeout_s=TIMEOUT_S) == {"ok": True}
    world.restart(1)


def test_abandoned_update_leaves_the_weights_and_the_next_generation_alone(world):
    world.join(0)
    world.start(0)
    for rank in world.engines[0]:
        assert rank.ask(abort=True) == {"ok": True}
        assert "cannot be committed" in rank.ask(commit=True)["error"]
    world.join(0)
    world.start(0)
    world.publish(8, [0])
    world.overwrite()
    assert world.deliveries(1) == [delivered(world, 0, 8)]
    world.assert_committed(0, 8)


def test_update_that_was_never_started_fails_by_name(world):
    world.join(0)
    world.publish(9, [0])
    world.overwrite()
    (event,) = world.deliveries(1)
    assert event["error"] == (
        f"link to engine 0, generation {world.generations[0]}: waited 5 s in vain for engine rank 0 to start "
        "update 1, engine rank 1 to start update 1"
    )


@pytest.mark.soak
@pytest.mark.parametrize("update", ["full", "delta"])
def test_no_moment_at_which_a_link_fails_ends_a_process(forks, tmp_path, update):
    """Limits of milliseconds, which pass while ranks connect, and while messages are half over."""
    world, moments, ends = World(forks, tmp_path, update=update), random.Random(3), Counter()
    for version in range(1, 301):
        for engine in (0, 1):
            world.join(engine)
        limit = moments.choice([moments.uniform(0.003, 0.06), TIMEOUT_S])
        assert all(trainer.ask(timeout_s=limit) == {"ok": True} for trainer in world.trainers)
        for engine in (0, 1):
            world.start(engine)
        world.publish(version, [0, 1])
        world.overwrite()
        found = world.deliveries(2)
        ends.update(bool(event["error"]) for event in found)
        failed = {event["engine"] for event in found if event["error"]}
        for engine in (0, 1):
            if engine not in failed:
                world.assert_committed(engine, version)
            else:
                assert all(rank.ask(abort=True) == {"ok": True} for rank in world.engines[engine])
    assert min(ends[True], ends[False]) > 100, "both ends come about"
    world.close()


def test_trainer_that_dies_leaves_the_engine_on_its_old_weights(world):
    world.join(0)
    world.start(0)
    world.trainers.pop().end()
    world.publish(10, [0])
    world.overwrite()
    (event,) = world.deliveries(1)
    assert event["bytes"] == 0 and "in vain for trainer rank 3 to send update 1" in event["error"]
    # the other rank takes nothing from trainer rank 3 and lacks nothing; a Receiver refuses for all of its engine
    assert "update 1 cannot be committed" in world.engines[0][1].ask(commit=True)["error"]


@pytest.fixture(scope="module")
def delta_world(forks, tmp_path_factory):
    world = World(forks, tmp_path_factory.mktemp("delta"), timeout_s=AMPLE_S, update="delta")
    yield world
    world.close()


def test_changes_reach_engines_at_their_own_versions(delta_world):
    """Some get no version for a while, and one that was killed gets all."""
    world, bytes_of = delta_world, {}

    def update(version, engines):
        for engine in engines:
            world.start(engine)
        world.publish(version, engines)
        world.overwrite()  # at once: changes must be those of the version as it was published
        for event in world.deliveries(len(engines)):
            assert not event["error"]
            bytes_of[version, event["engine"]] = event["bytes"]
        for engine in engines:
            world.assert_committed(engine, version)

    for engine in (0, 1):
        world.join(engine)
    for version, engines in ((1, [0, 1]), (2, [0, 1]), (3, [0]), (4, [0, 1]), (5, [0, 1])):
        update(version, engines)
    whole = world.slice_bytes()
    changes = bytes_of.pop((1, 0)), bytes_of.pop((1, 1))
    assert changes == (whole, whole)
    assert max(bytes_of.values()) < 0.05 * whole
    assert bytes_of[4, 1] < bytes_of[4, 0], "back and forth again: nothing has changed for the one that lagged"

    world.restart(1)
    world.join(1)
    update(6, [0, 1])
    assert bytes_of[6, 1] == whole and bytes_of[6, 0] < 0.05 * whole
    world.join(0)  # a new generation, but the engine has kept its weights
    update(7, [0, 1])
    assert max(bytes_of[7, 0], bytes_of[7, 1]) < 0.05 * whole


def test_an_engine_that_dies_among_changes_costs_its_link_only(delta_world):
    world = delta_world
    assert all(trainer.ask(timeout_s=TIMEOUT_S) == {"ok": True} for trainer in world.trainers)
    for engine in (0, 1):
        world.join(engine)
    world.start(0)
    world.start(1, faults=("", "die"))
    world.publish(8, [0, 1])
    world.overwrite()
    good, bad = world.deliveries(2)
    assert not good["error"] and "engine 1" in bad["error"]
    world.assert_committed(0, 8)
    assert all(trainer.ask(timeout_s=AMPLE_S) == {"ok": True} for trainer in world.trainers)
    world.restart(1)
    world.join(1)
    for engine in (0, 1):
        world.start(engine)
    world.publish(9, [0, 1])
    world.overwrite()
    good, rejoined = world.deliveries(2)
    assert good["bytes"] < 0.05 * world.slice_bytes() and rejoined["bytes"] == world.slice_bytes()
    for engine in (0, 1):
        world.assert_committed(engine, 9)

"""Random runs whose episodes have 1 to 7 samples, with kills in between: whatever happens, the audit finds nothing."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config, DataConfig, ModelConfig, PPOConfig, RolloutConfig, TrainerConfig
from areal_megatron.config.config_file import save
from areal_megatron.controller import state
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.schedule import Schedule
from areal_megatron.data.prompts import Prompt
from areal_megatron.data.trajectory import Trajectory, checksum
from areal_megatron.packing.partition import split
from areal_megatron.programs.audit import audit, rows_of, surviving
from areal_megatron.run.folder import RunFolder

ROWS, GROUP, BATCH, REPLICAS, UPDATES = 5, 2, 4, 2, 12


class RandomRun:
    """A run as its processes write it down, in an order of events that is drawn."""

    def __init__(self, folder, seed):
        folder.mkdir()
        (folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * ROWS)
        self.random = np.random.default_rng(seed)
        self.eta = int(self.random.integers(0, 4))
        self.config = Config(
            name="run",
            runs_dir=str(folder),
            updates=UPDATES,
            batch_size=BATCH,
            model=ModelConfig(path="m"),
            data=DataConfig(train=str(folder / "data.jsonl")),
            trainer=TrainerConfig(dp=REPLICAS),
            ppo=PPOConfig(minibatches=2),
            rollout=RolloutConfig(group_size=GROUP, max_staleness=self.eta),
        )
        self.run = RunFolder(folder / "run")
        self.run.create()
        save(self.config, self.run.config)
        self.checkpoint = None
        self.begin()

    def begin(self):
        """Another incarnation, from the newest checkpoint if there is one."""
        self.schedule = Schedule(batch_size=BATCH, group_size=GROUP, max_staleness=self.eta, updates=UPDATES)
        sampler = SimpleNamespace(engines=[], of=lambda _: SimpleNamespace(fits=lambda _: True))
        digests = {row.id: row.digest for row in rows_of(self.config)}
        prompts = [
            Prompt(id=n, text="1+1=", answer="2", tokens=[9], response_tokens=None, digest=digests[n])
            for n in range(ROWS)
        ]
        self.generation = Generation(self.config, self.schedule, sampler, prompts, Changed())
        self.batches, start = 0, {}
        if self.checkpoint:
            self.generation.restore(state.read(self.checkpoint.controller))
            self.batches = self.checkpoint.batches
            start = {
                "version": self.checkpoint.version,
                "batches": self.checkpoint.batches,
                "checkpoint": str(self.checkpoint.folder),
                "after": self.checkpoint.incarnation,
            }
        self.run.begin(**start)
        for engine in range(2):
            self.schedule.add_engine(engine, self.schedule.version)

    def step(self):
        """One event, of those that may happen. Returns whether there was any."""
        able = [engine for engine in (0, 1) if self.schedule.may_admit(engine)]
        events = [self.admit] * bool(able) + [self.finish] * 2 * bool(self.schedule.running) + [self.train]
        return any(event(able) for event in self.random.permutation(np.array(events, object)))

    def admit(self, able):
        self.generation._next_group(SimpleNamespace(index=int(self.random.choice(able))))
        return True

    def finish(self, _):
        group = self.schedule.running[int(self.random.choice([*self.schedule.running]))]
        end = self.random.random()
        if end < 0.1:
            self.schedule.fail(group, "rewards failed")
        elif end < 0.2:
            self.schedule.filter(group)
        else:
            found = [t for k in range(GROUP) for t in self.episode(group, group.number * GROUP + k)]
            self.generation._trajectories[group.number] = found
            self.schedule.finish(group)
        return True

    def episode(self, group, uid):
        reward = float(self.random.integers(0, 2))
        samples = int(self.random.integers(1, 8))
        for sample in range(samples):
            prompt = self.random.integers(0, 90, int(self.random.integers(1, 30)), np.int32)
            length = int(self.random.integers(1, 40))
            yield Trajectory(
                uid=uid,
                sample=sample,
                of_samples=samples,
                epoch=group.epoch,
                prompt_id=group.prompt_id,
                admission_version=group.admission_version,
                prompt=prompt,
                asked=checksum(prompt),
                response=np.zeros(length, np.int32),
                logprobs=np.zeros(length, np.float32),
                versions=np.full(length, group.admission_version, np.int32),
                loss_mask=np.ones(length, np.uint8),
                reward=reward,
                truncated=False,
            )

    def train(self, _):
        groups = self.schedule.form_batch()
        if groups is None:
            return False
        trajectories = [t for group in groups for t in self.generation.take(group)]
        version = self.schedule.version
        parts = split(trajectories, version=version, replicas=REPLICAS, minibatches=2, cap=80, seed=self.batches)
        assert len({len(m) for part in parts for m in part.minibatches}) <= 2
        for one, other in zip(*(part.minibatches for part in parts), strict=True):
            assert len(one) == len(other), "replicas have as many micro-batches"
        applied = bool(self.random.random() < 0.9)
        for replica, part in enumerate(parts):
            self.record(replica, part, applied)
        if applied:
            self.schedule.applied()
        else:
            self.schedule.rejected("non-finite gradients")
        for engine in (0, 1):
            if self.random.random() < 0.8 or engine == 0:
                self.schedule.committed(engine, self.schedule.version)
        self.batches += 1
        chance = self.random.random()
        if chance < 0.3:
            self.save()
        elif chance < 0.4:
            self.begin()  # killed
        return True

    def record(self, replica, part, applied):
        line = {
            "version": part.version,
            "max_staleness": self.eta,
            "replicas": REPLICAS,
            "group_size": GROUP,
            "applied": applied,
            "prompts": [[t.epoch, t.prompt_id] for t in part.trajectories],
            "uids": [t.uid for t in part.trajectories],
            "samples": [t.sample for t in part.trajectories],
            "of_samples": [t.of_samples for t in part.trajectories],
            "admission_versions": [t.admission_version for t in part.trajectories],
            "sampled_from": [t.asked for t in part.trajectories],
            "trained_from": [checksum(t.prompt) for t in part.trajectories],
        }
        with self.run.ledger(replica).open("a") as ledger:
            ledger.write(json.dumps(line) + "\n")

    def save(self):
        folder = checkpoint_folder.partial(self.run, self.schedule.version)
        (folder / "trainer").mkdir(parents=True)
        state.write(self.generation.save(), folder / "controller.msgpack")
        self.checkpoint = checkpoint_folder.seal(self.run, self.schedule.version, self.batches)


def check(folder, seeds):
    several = kills = 0
    for seed in seeds:
        random = RandomRun(folder / str(seed), seed)
        for _ in range(3000):
            if random.schedule.version >= random.schedule.updates:
                break
            assert random.step(), "nothing may happen any more"
        assert random.schedule.version >= random.schedule.updates, "it does not end"
        faults = [fault for fault in audit(random.run) if "checkpoint" not in fault]
        assert faults == [], seed
        batches, _ = surviving(random.run, random.config)
        for batch in batches:
            assert len({*batch.uids}) == BATCH
            several += len(batch.uids) > BATCH
            assert all(0 <= batch.version - admitted <= random.eta for admitted in batch.admitted)
        kills += len(random.run.starts()) - 1
    return several, kills


def test_episodes_of_any_number_of_samples_are_trained_whole_and_once(tmp_path):
    several, kills = check(tmp_path, range(20))
    assert several > 100 and kills > 10


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_ten_thousand_runs_of_episodes_with_samples(tmp_path):
    several, kills = check(tmp_path, range(100, 10100))
    assert several > 1000 and kills > 1000

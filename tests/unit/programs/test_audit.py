"""The audit finds nothing in a run that went well, and each planted fault by its name."""

import json

import pytest
from msgspec.structs import asdict

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config import Config, DataConfig, ModelConfig, PPOConfig, RolloutConfig, TrainerConfig
from areal_megatron.config.config_file import save
from areal_megatron.controller import state
from areal_megatron.controller.schedule import Schedule
from areal_megatron.data.prompts import Cursor, drawing_of
from areal_megatron.programs.audit import audit, main, rows_of
from areal_megatron.run.folder import RunFolder

PROMPTS, GROUP, BATCH = 7, 2, 4


class Past:
    """A run of two replicas as its processes would have written it down."""

    updates = 50

    def __init__(self, folder):
        (folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * PROMPTS)
        self.run = RunFolder(folder / "run")
        self.run.create()
        self.config = Config(
            name="run",
            runs_dir=str(folder),
            updates=self.updates,
            batch_size=BATCH,
            model=ModelConfig(path="m"),
            data=DataConfig(train=str(folder / "data.jsonl")),
            trainer=TrainerConfig(dp=2),
            ppo=PPOConfig(minibatches=1),
            rollout=RolloutConfig(group_size=GROUP, max_staleness=1),
        )
        save(self.config, self.run.config)
        self.begin(None)

    def begin(self, checkpoint):
        """Another incarnation, from the start or from a checkpoint."""
        self.schedule = Schedule(batch_size=BATCH, group_size=GROUP, max_staleness=1, updates=self.updates)
        self.cursor, self.batches, start = Cursor(PROMPTS, seed=1), 0, {}
        if checkpoint:
            saved = state.read(checkpoint.controller)
            assert not self.schedule.restore(saved.schedule)
            self.cursor, self.batches = Cursor(PROMPTS, 1, saved.cursor), checkpoint.batches
            start = {
                "version": checkpoint.version,
                "batches": checkpoint.batches,
                "checkpoint": str(checkpoint.folder),
                "after": checkpoint.incarnation,
            }
        self.run.begin(**start)
        self.schedule.add_engine(0, self.schedule.version)

    def train(self, count, applied=True):
        for _ in range(count):
            while (batch := self.schedule.form_batch()) is None:
                self.schedule.finish(self.schedule.admit(0, *self.cursor.next()))
            for replica, group in enumerate(batch):
                line = {
                    "incarnation": self.run.incarnation,
                    "version": self.schedule.version,
                    "applied": applied,
                    "uids": [group.number * GROUP + k for k in range(GROUP)],
                    "samples": [0] * GROUP,
                    "of_samples": [1] * GROUP,
                    "admission_versions": [group.admission_version] * GROUP,
                    "prompts": [[group.epoch, group.prompt_id]] * GROUP,
                    "max_staleness": 1,
                    "group_size": GROUP,
                    "replicas": 2,
                    "sampled_from": [7] * GROUP,
                    "trained_from": [7] * GROUP,
                }
                self.run.check_current()
                with self.run.ledger(replica).open("a") as ledger:
                    ledger.write(json.dumps(line) + "\n")
            if applied:
                self.schedule.applied()
            else:
                self.schedule.rejected("non-finite gradients")
            self.schedule.committed(0, self.schedule.version)
            self.batches += 1

    def save(self, change=lambda saved: saved):
        """A checkpoint of this moment."""
        saved = state.ControllerState(
            **asdict(drawing_of(self.config, rows_of(self.config))) | {"cursor": self.cursor.at},
            again=[],
            schedule=self.schedule.save(),
            trajectories={},
            group_size=GROUP,
            prompts_too_long=0,
        )
        self.run.check_current()
        folder = checkpoint_folder.partial(self.run, self.schedule.version)
        (folder / "trainer").mkdir(parents=True)
        state.write(change(saved), folder / "controller.msgpack")
        return checkpoint_folder.seal(self.run, self.schedule.version, self.batches)

    def edit(self, replica, line, **changes):
        """Changes a line of a replica; the first incarnation wrote five."""
        path = self.run.ledger(replica, line // 5)
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        lines[line % 5] |= changes
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def lose(self, replicas):
        """The third line and those after it of the first incarnation."""
        for replica in replicas:
            path = self.run.ledger(replica, 0)
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


@pytest.fixture
def past(tmp_path):
    """Five updates, a checkpoint after three of them, and a resumed line of four, one of which was not applied."""
    past = Past(tmp_path)
    past.train(3)
    checkpoint = past.save()
    past.train(2)
    past.begin(checkpoint)
    past.train(1)
    past.train(1, applied=False)
    past.train(2)
    past.save()
    return past


def test_a_run_that_went_well_is_clean(past, capsys, monkeypatch):
    assert audit(past.run) == []
    monkeypatch.setattr("sys.argv", ["audit_run.py", str(past.run.folder)])
    assert main() == 0
    assert "0 faults in 7 batches of 2 incarnations" in capsys.readouterr().out


def test_a_crash_in_the_middle_of_a_line_is_no_fault(past):
    with past.run.ledger(1).open("a") as ledger:
        ledger.write('{"incarnation": 1, "ver')
    assert audit(past.run) == []


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda past: past.edit(0, 5, uids=[0, 1]), "sample 0 of episode 0 was trained 2 times"),
        (lambda past: past.edit(0, 6, version=7), "batch 4 trained version 7, the policy was at 4"),
        (lambda past: past.edit(0, 6, applied=True), "batch 4: replicas disagree"),
        (lambda past: past.edit(1, 1, admission_versions=[-1, 1]), "admitted at version -1"),
        (
            lambda past: past.edit(1, 1, sampled_from=[7, 8], trained_from=[7, 9]),
            "episode 7 was trained after another prompt than it was sampled from",
        ),
        (lambda past: past.edit(1, 2, uids=[5, 5], samples=[0, 1], of_samples=[2, 2]), "1 episodes in batch 2"),
        (
            lambda past: past.edit(0, 5, uids=[99, 99], samples=[0, 2], of_samples=[3, 3]),
            "episode 99: sample 1 is missing in batch 3",
        ),
        (lambda past: past.edit(0, 5, of_samples=[1, 2]), "sample 1 is missing in batch 3"),
        (lambda past: past.edit(1, 2, prompts=[[9, 9]] * GROUP), "prompt 9 of epoch 9 was trained, but is unknown"),
        (lambda past: past.edit(1, 2, prompts=[[9, 9]] * GROUP), "counts as trained, but no trainer trained it"),
        (lambda past: past.lose([1]), "batch 2 is missing in the ledger of replica 1"),
        (lambda past: past.lose([0, 1]), "the ledger of incarnation 0 ends before batch 3, from which the run resumed"),
    ],
)
def test_faults_in_the_ledger_are_found(past, plant, words):
    plant(past)
    assert any(words in fault for fault in audit(past.run)), audit(past.run)


def test_each_batch_is_held_to_the_bound_of_its_incarnation(past):
    for replica in range(2):
        past.edit(replica, 2, admission_versions=[0] * GROUP, max_staleness=2)
    assert audit(past.run) == []
    past.edit(0, 2, max_staleness=1)
    assert "episode 8, admitted at version 0, was trained by version 2" in audit(past.run)


def test_each_batch_is_held_to_the_sizes_of_its_incarnation(past):
    """Another number of replicas, and of answers in a group, than the run has now."""
    past.config.trainer.dp, past.config.rollout.group_size = 1, 4
    save(past.config, past.run.config)
    assert audit(past.run) == []


def test_rows_that_have_changed_since_are_named(past):
    """The ledgers are checked all the same."""
    past.edit(0, 5, uids=[0, 1])
    rows = ['{"prompt": "1+1=", "answer": "2"}'] * (PROMPTS - 1)
    (past.run.folder.parent / "data.jsonl").write_text("\n".join([*rows, '{"prompt": "1+1=", "answer": "3"}']))
    *double, other = audit(past.run)
    assert "sample 0 of episode 0 was trained 2 times" in double
    assert other.startswith("data.train: 1 of 7 rows are not those of the checkpoint, the first is ")


def test_a_checkpoint_is_at_most_as_old_as_the_run_says(past):
    """Two are missing only if one was lost."""
    past.config.checkpoint.every = 2
    save(past.config, past.run.config)
    past.train(4)
    assert audit(past.run) == []
    past.train(1)
    (fault,) = audit(past.run)
    assert fault == (
        "the newest checkpoint, of version 6, is 5 versions older than the newest batch that was trained; "
        "checkpoint.every is 2"
    )
    past.config.checkpoint.every = 0
    save(past.config, past.run.config)
    assert audit(past.run) == []


def test_checkpoints_that_are_all_missing_are_named(tmp_path):
    past = Past(tmp_path)
    past.config.checkpoint.every = 2
    save(past.config, past.run.config)
    past.train(5)
    (fault,) = audit(past.run)
    assert fault.startswith("the newest checkpoint is missing, 5 versions before the newest batch that was trained; ")


def without_one(saved):
    saved.schedule.dispositions.pop()
    return saved


def with_one_too_many(saved):
    saved.again.append((8, 3))
    return saved


def with_one_twice(saved):
    epoch, prompt, _ = saved.schedule.dispositions[0]
    saved.again.append((epoch, prompt))
    return saved


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_one, "was drawn and is lost"),
        (with_one_too_many, "prompt 3 of epoch 8 is to be generated again, but was never drawn"),
        (with_one_twice, "is trained and to be generated again"),
    ],
)
def test_faults_in_the_controllers_state_are_found(past, change, words):
    past.train(1)
    past.save(change)
    assert any(words in fault for fault in audit(past.run)), audit(past.run)

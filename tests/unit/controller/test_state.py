"""A controller's state, with which a run goes on as it was, or under other sizes, or begins its epochs anew."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from areal_megatron.controller.changed import Changed
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.schedule import Schedule
from areal_megatron.controller.state import read, write
from tests.unit.workflows.test_seeds import PROMPTS, Asked, setting


class Telling:
    """Teachers who find every token as likely."""

    async def score(self, name, trajectories):
        for trajectory in trajectories:
            trajectory.reference = np.full(len(trajectory.response), -1, np.float32)


def generation(tmp_path, prompts, group_size=2, batch_size=4, teachers=None):
    """A run whose engine answers everything at once."""
    config, sampler = setting(tmp_path, Asked())
    config.rollout.group_size, config.batch_size = group_size, batch_size
    schedule = Schedule(batch_size=batch_size, group_size=group_size, max_staleness=2, updates=9)
    return schedule, Generation(config, schedule, sampler, prompts, Changed(), teachers=teachers)


def sampled(schedule, subject):
    """Has it sample until Eq. 3 allows no more; returns the uids of all that wait to be trained."""
    schedule.add_engine(0, schedule.version)

    async def live():
        running = asyncio.create_task(subject.run())
        await asyncio.sleep(0.05)
        running.cancel()

    asyncio.run(live())
    return [t.uid for number in schedule.finished for t in subject._trajectories[number]]


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_no_uid_is_given_twice_whatever_the_size_of_groups_becomes(tmp_path, group_size):
    schedule, subject = generation(tmp_path, PROMPTS)
    before = sampled(schedule, subject)
    assert schedule.form_batch() and schedule.applied() is None
    write(subject.save(), tmp_path / "state")
    schedule, subject = generation(tmp_path, PROMPTS, group_size)
    subject.restore(read(tmp_path / "state"))
    kept = {t.uid for answers in subject._trajectories.values() for t in answers}
    assert len(before) == 12 and len(kept) == (8 if group_size == 2 else 0)
    after = [uid for uid in sampled(schedule, subject) if uid not in kept]
    assert after and min(after) >= 12 and len({*after}) == len(after)


def test_answers_that_no_teacher_has_seen_are_sampled_again_once_there_is_one(tmp_path):
    schedule, subject = generation(tmp_path, PROMPTS)
    before = sampled(schedule, subject)
    write(subject.save(), tmp_path / "state")
    for teachers, kept in ((None, len(before)), (Telling(), 0)):
        schedule, subject = generation(tmp_path, PROMPTS, teachers=teachers)
        subject.restore(read(tmp_path / "state"))
        assert sum(len(answers) for answers in subject._trajectories.values()) == kept
    assert sampled(schedule, subject)
    write(subject.save(), tmp_path / "told")
    schedule, subject = generation(tmp_path, PROMPTS, teachers=Telling())
    subject.restore(read(tmp_path / "told"))
    answers = [t for answers in subject._trajectories.values() for t in answers]
    assert answers and all((t.reference == -1).all() and len(t.reference) == len(t.response) for t in answers)


def test_a_new_run_with_other_rows_begins_its_epochs_at_the_version_of_the_checkpoint(tmp_path):
    """What the checkpoint holds of other rows is left behind: answers, dispositions, pass rates."""
    schedule, subject = generation(tmp_path, PROMPTS)
    sampled(schedule, subject)
    assert schedule.form_batch() and schedule.applied() is None
    saved = msgspec.structs.replace(subject.save(), pass_rates={0: 1.0}, again=[(0, 5)])
    assert saved.schedule.finished and saved.trajectories and saved.cursor != (0, 0)
    other = [replace(prompt, tokens=[50 + prompt.id], digest=b"12345678") for prompt in PROMPTS[:3]]
    schedule, subject = generation(tmp_path, other)
    subject.restore(saved.anew(subject.drawing))
    assert schedule.version == 1 and not schedule.finished and not schedule.dispositions
    begun = subject.save()
    assert (begun.rows, begun.cursor, begun.digests) == (3, (0, 0), b"12345678" * 3)
    assert not begun.again and not begun.pass_rates
    uids = sampled(schedule, subject)
    answers = [t for number in schedule.finished for t in subject._trajectories[number]]
    assert min(uids) >= 12 and {int(t.prompt[0]) for t in answers} == {50, 51, 52}
    assert {t.admission_version for t in answers} == {1} and {t.epoch for t in answers} == {0, 1}

"""Whole runs beside which models are served: a user, whom episodes ask, a judge, who scores them, and a teacher."""

import json
import os
import signal
from fractions import Fraction

import numpy as np
import pytest
import torch

from areal_megatron.data.dumps import dumped
from areal_megatron.data.dumps import read as read_dump
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_run import small
from tests.support.adapter_oracle import adapted_oracle, write_adapter
from tests.support.tiny_models import load_oracle
from tests.support.training_oracle import distributions, response_logprobs

SAMPLES, BEST, TOKENS = 4, 9, 6
JUDGED = {
    "reward.function": "judge",
    "reward.judge.prompt": "1+{prompt}{response}",
    "reward.judge.verdict": r"(\d)",
    "reward.judge.best": BEST,
    "reward.judge.samples": SAMPLES,
}


def updates(run):
    return [line for line in read_metrics(run) if line["kind"] == "update"] if run.metrics.exists() else []


@pytest.mark.soak
def test_a_run_asks_a_user_and_a_judge_who_are_killed_meanwhile(local_run, world, tmp_path):
    """The untrained judge writes digits at random, the last of which is its verdict. Episodes wait for both while they
    are away: no reward fails for it, and what the user says is not trained."""
    rows = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1), "response_tokens": TOKENS} for a in range(10, 99)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "data.train": tmp_path / "rows.jsonl",
        "data.eval": "",
        "rollout.workflow": "tests.support.served_flows:asks_a_user",
        "rollout.turns": 2,
        "rollout.samples": "individual",
        "rollout.max_new_tokens": 300,  # room for the conversation
        "rollout.max_staleness": 1,
        "rollout.dump": True,
        "served.user.path": world / "model",
        "served.user.max_new_tokens": 16,
        "served.judge.path": world / "model",
        "served.judge.max_new_tokens": 350,
        "machine.slots": 4,
        "updates": 4,
    }
    changes |= JUDGED
    started = local_run("served", *small(world, **changes), "--restarts=2")
    run = RunFolder(started.folder)

    started.wait_for(lambda: updates(run))
    for name in ("user-0", "judge-0"):
        os.kill(started.pid(name), signal.SIGKILL)
    assert started.wait() == 0, started.output
    for name in ("user-0", "judge-0"):
        assert f"{name} was killed by SIGKILL" in started.output
    lines = updates(run)
    assert len(lines) == 4 and lines[-1]["workflow_failures"] == lines[-1]["reward_failures"] == 0
    assert all(line["turns_mean"] > 1.5 for line in lines)

    trajectories = judged(run)
    asked = [len(trajectory.prompt) for trajectory in trajectories]
    assert all(trajectory.loss_mask.sum() == len(trajectory.response) == TOKENS for trajectory in trajectories)
    assert max(asked) > min(asked) + TOKENS  # first answers, and second ones after what was said


def judged(run):
    """Returns the trajectories of a run, whose rewards are what verdicts can give."""
    scores = {Fraction(total, BEST * count) for count in range(2, SAMPLES + 1) for total in range(BEST * count + 1)}
    trajectories = [each for path in dumped(run.trajectories).values() for each in read_dump(path).trajectories]
    given = {round((trajectory.reward + 5) / 10, 6) for trajectory in trajectories}
    assert all(min(abs(score - possible) for possible in scores) < 1e-6 for score in given) and len(given) > 10
    return trajectories


@pytest.mark.soak
def test_the_policys_engines_are_the_judge_of_its_answers(local_run, world, tmp_path):
    """The judge is the base with an adapter of its own, beside the one that is trained."""
    changes = {
        "data.eval": "",
        "lora.rank": 8,
        "optimizer.lr": 0.01,
        "rollout.max_staleness": 0,
        "rollout.dump": True,
        "served.judge.path": world / "model",
        "served.judge.engines": 0,
        "served.judge.adapter": write_adapter(tmp_path / "adapter", world / "model", 4, 8),
        "updates": 4,
    }
    started = local_run("judged", *small(world, **changes, **JUDGED))
    assert started.wait() == 0, started.output
    run = RunFolder(started.folder)
    lines = updates(run)
    assert len(lines) == 4 and lines[-1]["reward_failures"] == 0 and len(judged(run)) == 4 * 32
    assert not list(run.folder.glob("logs/judge*")), "it has no process of its own"
    assert max(line["logprob_diff_max"] for line in lines) < 1e-4, "the judge's adapter answers for the policy"


@pytest.mark.soak
def test_a_student_learns_from_a_teacher_that_is_killed_meanwhile(local_run, world, tmp_path):
    """The teacher is the base with an adapter, and of every other row the base itself: what each says of trained tokens
    is what transformers says."""
    adapter = write_adapter(tmp_path / "adapter", world / "model", 4, 8)
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()[:40]]
    named = [row | ({"teacher": "teacher_2"} if number % 2 else {}) for number, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    changes = {
        "data.train": tmp_path / "rows.jsonl",
        "served.teacher_2.path": world / "model",
        "served.teacher.path": world / "model",
        "served.teacher.adapter": adapter,
        "ppo.penalty.kl": 1,
        "ppo.penalty.kl_form": "forward",
        "ppo.penalty.kl_top_k": 4,
        "ppo.penalty.kl_model": "served.teacher",
        "ppo.rewards": False,
        "rollout.dump": True,
        "data.eval": "",
        "machine.slots": 4,
        "updates": 4,
    }
    started = local_run("taught", *small(world, **changes), "--restarts=1")
    run = RunFolder(started.folder)

    started.wait_for(lambda: updates(run))
    os.kill(started.pid("teacher-0"), signal.SIGKILL)
    assert started.wait() == 0, started.output
    assert "teacher-0 was killed by SIGKILL" in started.output
    lines = updates(run)
    assert len(lines) == 4 and all(line["kl_reference"] > 0 for line in lines)
    teachers = adapted_oracle(world / "model", 4, 2.0, ["all-linear"]), load_oracle(world / "model")
    compared = [0, 0]
    for path in dumped(run.trajectories).values():
        for trajectory in read_dump(path).trajectories[::8]:
            teacher = teachers[second := trajectory.prompt_id % 2]
            with torch.no_grad():
                expected = response_logprobs(teacher, trajectory, 1.0)
                whole = distributions(teacher, np.concatenate((trajectory.prompt, trajectory.response)), 1.0)
            torch.testing.assert_close(torch.tensor(trajectory.reference), expected, atol=1e-4, rtol=0)
            likeliest = whole[len(trajectory.prompt) - 1 :][trajectory.loss_mask == 1].topk(4).values
            told = torch.tensor(trajectory.likely_logprobs).view(-1, 4)
            torch.testing.assert_close(told, likeliest, atol=1e-4, rtol=0)
            compared[second] += len(expected)
    assert min(compared) > 100

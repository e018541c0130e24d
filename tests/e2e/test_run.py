"""Whole runs: real Megatron trainers, real vLLM engines, started as a user starts them."""

import asyncio
import json
import stat
from collections import Counter

import pytest
from reshard_oracle import expected_checksums, held_checksums
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.reshard.architectures import read_config
from areal_megatron.rollout.client import EngineClient
from areal_megatron.run import Run
from tests.conftest import left_over


def small(world, held_out=32, **changes):
    """Overrides for a run of a few updates on the untrained model; its answers differ wildly in length.

    `held_out`: prompts of an evaluation.
    """
    evaluated = world / f"heldout-{held_out}.jsonl"
    evaluated.write_text("".join((world / "heldout.jsonl").read_text().splitlines(keepends=True)[:held_out]))
    keys = {
        "model.path": world / "model",
        "data.train": world / "train.jsonl",
        "data.eval": evaluated,
        "updates": 6,
        "batch_size": 32,
        "rollout.group_size": 4,
        "rollout.max_running": 32,
        # Random answers are never right: this reward differs within groups and says nothing else.
        "reward.function": "tests.e2e.rewards:short",
        **changes,
    }
    return [f"{key}={value}" for key, value in keys.items()]


async def engine_checksums(run: Run):
    client = EngineClient("engine-0", run.endpoint("engine-0"), run.token, timeout_s=60)
    try:
        return await held_checksums(client)
    finally:
        await client.close()


def ledger(run: Run):
    return [json.loads(line) for file in (run.folder / "ledger").iterdir() for line in file.read_text().splitlines()]


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_staleness_holds_while_groups_are_filtered(local_run, world, eta):
    """The longest one with a workflow of several turns."""
    turns = {"rollout.workflow": "{tests.e2e.workflows:twice: 2}", "rollout.max_new_tokens": 64} if eta == 4 else {}
    started = local_run(f"eta-{eta}", *small(world, **turns | {
        "reshard.staging": "streamed" if eta == 1 else "full", "rollout.max_staleness": eta, "rollout.filter_uniform_groups": True, "reward.function": "tests.e2e.rewards:coarse",
    }))  # fmt: skip
    assert started.wait() == 0, started.output
    run = Run(started.folder)
    lines = ledger(run)
    assert [line["version"] for line in lines] == list(range(6))
    staleness = [line["version"] - admitted for line in lines for admitted in line["admission_versions"]]
    assert min(staleness) >= 0 and max(staleness) <= eta
    assert Counter(uid for line in lines for uid in line["uids"]).most_common(1)[0][1] == 1
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert max(u["staleness_max"] for u in updates) == max(staleness)
    assert updates[-1]["groups_filtered"] > 0
    several = [u["turns_mean"] for u in updates]
    assert (max(several) > 1) == (eta == 4) and min(several) >= 1 and not updates[-1].get("workflow_failures")


def test_a_run_leaves_what_it_promises_and_nothing_else(local_run, world):
    """TP2×PP2 trainers with a critic, and a TP2 engine: every seam of the update path is between several ranks."""
    started = local_run("tp2-pp2", *small(world, **{
        "trainer.tp": 2, "trainer.pp": 2, "rollout.tp": 2, "machine.slots": 6,
        "rollout.max_staleness": 1, "held_out": 300, "ppo.critic": "{lr: 1e-3, lambda: 0.95, warmup: 1}",
    }))  # fmt: skip
    run = Run(started.folder)
    started.wait_for(lambda: read_status(run).get("phase") == "final evaluation")
    members = started.members()
    assert len(members) > 8
    held = asyncio.run(engine_checksums(run))
    assert started.wait() == 0, started.output
    assert not left_over(members)

    lines = read_metrics(run)
    updates = [line for line in lines if line["kind"] == "update"]
    assert len(updates) == 6
    assert ["grad_norm" in u for u in updates] == [False] + 5 * [True]  # the critic warms up
    assert all(u["value_grad_norm"] > 0 and u["explained_variance"] < 1 for u in updates)
    compared = [u["logprob_diff_max"] for u in updates if "logprob_diff_max" in u]
    assert compared and max(compared) < 1e-4  # vLLM and Megatron agree on tokens of the trained version
    (start,) = [line for line in lines if line["kind"] == "start"]
    assert (
        start["first_batch_s"]
        > max(start["engines_s"], start["trainers_s"])
        > min(start["engines_s"], start["trainers_s"])
        > 1
    )
    assert f"first batch trained {start['first_batch_s']:.0f} s after the launch" in started.output
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [e["version"] for e in evaluations] == [0, 6]
    assert all(e["items"] == 300 for e in evaluations)

    assert stat.S_IMODE((run.folder / "secret").stat().st_mode) == 0o600
    assert list((run.folder / "tensorboard").iterdir())
    for process in ("controller", "engine-0", "trainer-0", "trainer-3"):
        assert run.timeline(process).read_text()
    before = AutoModelForCausalLM.from_pretrained(world / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(run.hf).state_dict()
    assert before.keys() == after.keys()
    assert any((after[name] != before[name]).any() for name in before)
    assert held == expected_checksums(load_file(run.hf / "model.safetensors"), read_config(run.hf), tp=2)

"""Whole runs: real Megatron trainers, real vLLM engines, started as a user starts them."""

import asyncio
import json
import re
import stat
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_megatron.config.config_file import load
from areal_megatron.engine.client import EngineClient
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.programs import trajectories
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.support.living import left_over
from tests.support.reshard_oracle import expected_checksums, held_checksums
from tools.bench import staleness as staleness_bench

ROOT = Path(__file__).parents[2]


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
        "reward.function": "tests.support.rewards:short",
        **changes,
    }
    return [f"{key}={value}" for key, value in keys.items()]


async def engine_checksums(run: RunFolder):
    client = EngineClient("engine-0", run.endpoint("engine-0"), run.token, timeout_s=60)
    try:
        return await held_checksums(client)
    finally:
        await client.close()


def ledger(run: RunFolder):
    return [json.loads(line) for file in (run.folder / "ledger").iterdir() for line in file.read_text().splitlines()]


@pytest.mark.soak
@pytest.mark.parametrize("eta", (0, 1, 16))
def test_staleness_holds_while_groups_are_filtered(local_run, world, capsys, eta):
    """The longest one has a workflow of several turns, and keeps its trajectories, which are read and replayed
    afterwards."""
    changes = {
        "rollout.max_staleness": eta,
        "rollout.filter_groups": True,
        "reward.function": "tests.support.rewards:coarse",
        "reshard.staging": "streamed" if eta == 1 else "full",
        "rollout.first_weights": "trainers" if eta == 1 else "auto",
    }
    if eta == 1:
        changes |= {"trainer.cp": 2, "machine.slots": 3}
    if eta == 16:
        changes |= {
            "rollout.dump": True,
            "trainer.dp": 2,
            "machine.slots": 3,
            "rollout.max_new_tokens": 64,
            "rollout.workflow": "tests.support.workflows:twice",
            "rollout.turns": 2,
        }
    equal = [f"--python=controller={staleness_bench.EQUAL}"] if eta == 16 else []
    started = local_run(f"eta-{eta}", *small(world, **changes), *equal)
    assert started.wait() == 0, started.output
    run = RunFolder(started.folder)
    lines = ledger(run)
    replicas = 2 if eta == 16 else 1
    assert sorted(line["version"] for line in lines) == sorted([*range(6)] * replicas)
    staleness = [line["version"] - admitted for line in lines for admitted in line["admission_versions"]]
    assert min(staleness) >= 0 and max(staleness) <= eta
    assert eta != 16 or staleness == [line["version"] for line in lines for _ in line["admission_versions"]]
    assert Counter(uid for line in lines for uid in line["uids"]).most_common(1)[0][1] == 1
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert max(u["staleness_max"] for u in updates) == max(staleness)
    assert updates[-1]["groups_filtered"] > 0
    assert sum(u["filtered_tokens"] for u in updates) > 0 and all(u.get("solved_none", 0) <= 1 for u in updates)
    # However stale what is trained is, trainers and engines are compared at equal versions.
    check_compared(updates)
    named = {re.sub("/.*", "", name) for u in updates for name in u} - {"time", "kind", "version"}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in sorted(named) if f"`{name}`" not in page and f"`{name}/" not in page] == []
    if eta == 16:
        assert [u["version"] for u in updates if "logprob_diff_max" in u] == [1], "the rest is of version 0, too"
        assert [*updates[-1]["token_staleness_histogram"]] == ["5"] and updates[-1]["token_share/staleness_5-8"] == 1
    several = [u["turns_mean"] for u in updates]
    assert (max(several) > 1) == (eta == 16) and min(several) >= 1 and not updates[-1].get("workflow_failures")
    if eta == 16:
        check_ratios(run, world / "model", capsys)
        recorded = changes | {"mode": "replay", "data.train": run.trajectories}
        check_replay(run, local_run("replay", *small(world, **recorded)))


def check_compared(updates, ties=0):
    """Trainers and engines were compared, and at equal versions they agree. The engine scores a batch beside its
    training: the first update may have no comparison yet, and a later one that of a version before, where the machine
    is busy. `ties` updates may have tokens whose experts are as likely as others, up to rounding: there each side may
    take its own, and log-probabilities differ by 0.001 to 0.03."""
    compared = [update for update in updates if "mismatch_max" in update]
    assert compared and compared == updates[-len(compared) :], "there is one from the first comparison on"
    assert min(u["mismatch_tokens"] for u in compared) > 8 and max(u["mismatch_mean"] for u in compared) < 1e-3
    assert sorted(u["mismatch_max"] for u in compared)[-1 - ties] < 1e-3
    versions = [u["mismatch_version"] for u in compared]
    assert versions == sorted(versions) and len({*versions}) > 1, "of newer and newer versions"
    assert all(u["mismatch_version"] < u["version"] for u in compared)


def check_ratios(run, model, capsys):
    """What the engine's tokens of version 0 were sampled with is what Hugging Face computes with these weights."""
    assert trajectories.main([str(run.folder), "--version", "0", "--model", str(model), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 32 and all(set(answer["versions"]) == {0} for answer in found)
    assert max(abs(ratio) for answer in found for ratio in answer["log_ratios"]) < 1e-4


def check_replay(run, started):
    """Without engines the trainers compute what they did, bit for bit."""
    assert started.wait() == 0, started.output
    replay = RunFolder(started.folder)
    before, after = (load_file(folder / "model.safetensors") for folder in (run.hf, replay.hf))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for replica in range(2):
        assert replay.ledger(replica).read_text() == run.ledger(replica).read_text()
    losses = [[line["loss"] for line in read_metrics(one) if line["kind"] == "update"] for one in (run, replay)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert sorted(path.stem for path in (replay.folder / "logs").iterdir()) == ["controller", "trainer-0", "trainer-1"]


@pytest.mark.soak
def test_both_pools_run_on_the_same_slot(local_run, world):
    """The link is that of pools on one GPU."""
    changes = {"machine.shared": True, "machine.slots": 1, "reshard.link": "host"}
    changes |= {"rollout.max_staleness": 1, "held_out": 300}
    started = local_run("one-slot", *small(world, **changes))
    run = RunFolder(started.folder)
    started.wait_for(lambda: read_status(run).phase == "training")
    (core,) = psutil.Process(started.pid("engine-0")).children()
    cores = [process.cpu_affinity() for process in (psutil.Process(started.pid("trainer-0")), core)]
    started.wait_for(lambda: read_status(run).phase == "final evaluation")
    held = asyncio.run(engine_checksums(run))
    assert started.wait() == 0, started.output
    assert cores[0] == cores[1] and len(cores[0]) == 1
    assert held == expected_checksums(load_file(run.hf / "model.safetensors"), read_config(run.hf), tp=1)
    lines = ledger(run)
    assert sorted(line["version"] for line in lines) == [*range(6)]
    assert max(line["version"] - admitted for line in lines for admitted in line["admission_versions"]) <= 1
    versions = [line["version"] for line in read_metrics(run) if line["kind"] == "eval"]
    assert versions == [0, 6]


@pytest.mark.soak  # layouts of it are compared with transformers in tests/parallel
def test_experts_train_in_the_layout_of_the_235b_run(local_run, world, of_family):
    """A Qwen3 with experts on tp 2, pp 2 in virtual stages, whole experts on either rank; an engine of two ranks."""
    model = of_family("qwen3_moe")
    layout = {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1}
    changes = {f"trainer.{key}": value for key, value in layout.items()}
    changes |= {"model.path": model, "rollout.tp": 2, "machine.slots": 6, "rollout.max_staleness": 1, "held_out": 200}
    started = local_run("experts", *small(world, **changes))
    run = RunFolder(started.folder)
    started.wait_for(lambda: read_status(run).phase == "final evaluation")
    held = asyncio.run(engine_checksums(run))
    assert started.wait() == 0, started.output
    assert held == expected_checksums(load_file(run.hf / "model.safetensors"), read_config(run.hf), tp=2)
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert len(updates) == 6
    check_compared(updates, ties=2)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run.hf))
    assert before.keys() == after.keys()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert len(still) < len(before) / 10, still


@pytest.mark.soak  # what one engine makes of them is in test_vllm_options.py
def test_options_of_the_libraries_reach_their_processes(local_run, world, capsys):
    passed = {
        "rollout.vllm.speculative_config": "{method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1}",
        "rollout.vllm.enable_prefix_caching": "false",
        "rollout.vllm.max_num_batched_tokens": 512,
        "trainer.megatron.recompute_granularity": "selective",
        "trainer.megatron.recompute_modules": "[core_attn, mlp]",
    }
    started = local_run("passed", *small(world, **passed, **{"updates": 2, "data.eval": "", "rollout.dump": True}))
    assert started.wait() == 0, started.output
    assert "recomputation: core_attn, mlp by megatron-core" in started.output
    run = RunFolder(started.folder)
    config = load(run.config)
    assert config.rollout.vllm["speculative_config"]["method"] == "ngram" and len(config.rollout.vllm) == 3
    assert config.trainer.megatron["recompute_modules"] == ["core_attn", "mlp"]
    log = run.log("engine-0").read_text()
    for said in ("'speculative_config': {'method': 'ngram'", "'enable_prefix_caching': False", "_tokens': 512"):
        assert said in log
    assert sorted(line["version"] for line in ledger(run)) == [0, 1]
    check_ratios(run, world / "model", capsys)


def test_a_run_leaves_what_it_promises_and_nothing_else(local_run, world):
    """TP2 trainers with a critic, and a TP2 engine: every seam of the update path is between several ranks; those of
    several stages are in launch/test_mpi.py. Whoever starts it a second time meanwhile is refused."""
    others = world / "others.jsonl"
    others.write_text("".join((world / "heldout.jsonl").read_text().splitlines(keepends=True)[300:320]))
    changes = {
        "trainer.tp": 2,
        "rollout.tp": 2,
        "machine.slots": 4,
        "rollout.max_staleness": 1,
        "held_out": 100,
        "data.eval": f"{world / 'heldout-100.jsonl'},{others}",
        "eval.every": 6,
        "eval.n": 2,
        "eval.top_k": 20,
        "ppo.critic.lr": 1e-3,
        "ppo.critic.gae_lambda": 0.95,
        "ppo.critic.warmup": 1,
        "resume": "auto",
    }
    arguments = small(world, **changes)
    started = local_run("tp2", *arguments)
    run = RunFolder(started.folder)
    started.wait_for(lambda: list(run.leases.glob("*.json")))
    for ready in (lambda: True, lambda: run.metrics.exists() and len(read_metrics(run)) > 1):
        started.wait_for(ready)
        second = local_run("tp2", *arguments, output="second.out")
        assert second.wait(60) == 2, "it does not wait for machine.lease_s; test_lease.py: it is refused at once"
        assert f"is being run by process {started.process.pid} on" in second.output and second.output.count("\n") == 1
    started.wait_for(lambda: read_status(run).phase == "final evaluation")
    members = started.members()
    assert len(members) > 8
    held = asyncio.run(engine_checksums(run))
    assert started.wait() == 0, started.output
    assert not left_over(members)

    assert audit(run) == [] and len(run.starts()) == 1
    lines = read_metrics(run)
    updates = [line for line in lines if line["kind"] == "update"]
    assert [update["version"] for update in updates] == [1, 2, 3, 4, 5, 6]
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
    for evaluation in evaluations:
        files, items = evaluation["files"], {"heldout-100": 100, "others": 20}
        assert {name: file["items"] for name, file in files.items()} == items and evaluation["items"] == 120
        averages = {name: file["avg@2"] for name, file in files.items()}
        assert all(0 <= a["low"] <= a["value"] <= a["high"] <= 1 and a["low"] < a["high"] for a in averages.values())
        assert all(file["pass@2"]["value"] >= file["avg@2"]["value"] for file in files.values())
        mean = sum(averages[name]["value"] * count for name, count in items.items()) / 120
        assert evaluation["accuracy"] == pytest.approx(mean)
        assert evaluation["version"] <= evaluation["version_min"] <= evaluation["version_mean"]
        assert evaluation["version_mean"] <= evaluation["version_max"] <= 6
    assert evaluations[-1]["version_min"] == 6

    assert stat.S_IMODE((run.folder / "secret").stat().st_mode) == 0o600
    assert list((run.folder / "tensorboard").iterdir())
    for process in ("controller", "engine-0", "trainer-0", "trainer-1"):
        assert run.timeline(process).read_text()
    before = AutoModelForCausalLM.from_pretrained(world / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(run.hf).state_dict()
    assert before.keys() == after.keys()
    assert any((after[name] != before[name]).any() for name in before)
    assert held == expected_checksums(load_file(run.hf / "model.safetensors"), read_config(run.hf), tp=2)

"""A run with two environments: each answers, is scored and is evaluated as it alone is told to."""

import json
from collections import Counter

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from areal_megatron.data import dumps
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_run import small
from tests.support.rewards import brief, short

LONGEST = {"plain": 12, "twice": 20}


def environments(world, folder):
    """Writes the rows of two environments; returns the overrides that name them."""
    rows, held_out = ((world / f"{name}.jsonl").read_text().splitlines(True) for name in ("train", "heldout"))
    parts = {"plain": (rows[:300], held_out[:6]), "twice": (rows[300:360], held_out[6:10])}
    keys = {"plain": {"share": 3}, "twice": {"share": 1, "workflow": "tests.support.workflows:twice", "turns": 2}}
    found = ["data.train=", "data.eval="]
    for number, (name, (train, evaluated)) in enumerate(parts.items()):
        own = {"name": name, "train": folder / f"{name}.jsonl", "eval": folder / f"{name}-eval.jsonl"}
        own["train"].write_text("".join(train))
        own["eval"].write_text("".join(evaluated))
        own |= keys[name] | {"max_new_tokens": LONGEST[name]}
        found += [f"environments.{number}.{key}={value}" for key, value in own.items()]
    return [*found, "environments.1.reward=tests.support.rewards:brief"]


def test_each_environment_has_its_own_workflow_reward_limit_and_figures(local_run, world, of_family, tmp_path):
    """The model is a Qwen2 in 16 bits, as those distilled from R1, at a rate at which few of its weights change."""
    own = environments(world, tmp_path)
    changes = {"updates": 4, "rollout.dump": True, "eval.share": 1, "reshard.update": "delta"}
    changes |= {"model.path": of_family("qwen2"), "model.dtype": "bfloat16", "optimizer.lr": 1e-6}
    first = local_run("two", *small(world, **changes), *own)
    assert first.wait() == 0, first.output
    run, tokenizer = RunFolder(first.folder), AutoTokenizer.from_pretrained(world / "model")
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    later = updates[1:]  # the first one tells of the weights that an engine begins with
    sent = [update["weights_changed"] for update in later if "weights_changed" in update]
    assert len(sent) >= 2 and all(0 < share < 0.5 for share in sent), "changes were sent, and not whole weights"
    assert max(update["mismatch_max"] for update in updates if "mismatch_max" in update) < 0.1
    before, after = (load_file(model / "model.safetensors") for model in (of_family("qwen2"), run.hf))
    biases = [name for name in before if name.endswith("_proj.bias")]
    assert len(biases) == 12 and any((after[name].float() != before[name]).any() for name in biases)
    seen = Counter()
    for path, update in zip(dumps.dumped(run.trajectories).values(), updates, strict=True):
        by_name = {"plain": [], "twice": []}
        for t in dumps.read(path).trajectories:
            by_name["plain" if t.prompt_id < 300 else "twice"].append(t)
        assert all(len(t.response) <= LONGEST[name] for name, ts in by_name.items() for t in ts)
        for t in by_name["plain"]:
            score = 0 if t.truncated else short("", tokenizer.decode(t.response, skip_special_tokens=True), "")
            assert t.loss_mask.all() and t.reward == pytest.approx(-5 + 10 * score)
        for t in by_name["twice"]:
            assert t.reward in (-5, 5) and t.correct == (t.reward == 5)
            seen["said"] += not t.loss_mask.all()
        for name, ts in by_name.items():
            assert update[f"answer_share/{name}"] == len(ts) / 32
            if ts:
                assert update[f"accuracy/{name}"] == pytest.approx(np.mean([t.correct for t in ts]))
                assert update[f"reward_mean/{name}"] == pytest.approx(np.mean([t.reward for t in ts]))
                assert update[f"response_tokens_mean/{name}"] == pytest.approx(np.mean([len(t.response) for t in ts]))
                assert update[f"truncated_share/{name}"] == pytest.approx(np.mean([t.truncated for t in ts]))
            seen[name] += len(ts)
    assert min(seen.values()) > 0 and brief("", "", "") == 1
    evaluated = [line["files"] for line in read_metrics(run) if line["kind"] == "eval"]
    assert [{name: figures["items"] for name, figures in files.items()} for files in evaluated] == [
        {"plain": 6, "twice": 4}
    ] * len(evaluated)
    assert audit(run) == []


@pytest.mark.soak  # test_resume.py goes on with two files, whose rows are drawn in the same way
def test_a_run_of_environments_goes_on(local_run, world, tmp_path):
    own = environments(world, tmp_path)
    changes = {"updates": 2, "checkpoint.every": 2, "rollout.max_staleness": 2, "data.eval": ""}
    first = local_run("two", *small(world, held_out=1, **changes), *own)
    assert first.wait() == 0, first.output
    again = local_run("two", *small(world, **changes | {"updates": 6}), *own, "resume=auto", output="again")
    assert again.wait() == 0, again.output
    run = RunFolder(first.folder)
    assert audit(run) == []
    lines = [line for file in run.folder.glob("ledger/*") for line in file.read_text().splitlines()]
    assert {json.loads(line)["version"] for line in lines} == set(range(6))

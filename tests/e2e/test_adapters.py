"""A run that trains adapters: real Megatron trainers, real vLLM engines, started as a user starts them."""

import torch
from safetensors.torch import load_file

from areal_megatron.checkpoint.convert import to_hf, to_peft
from areal_megatron.checkpoint.folder import complete
from areal_megatron.checkpoint.peft import WEIGHTS
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_run import small
from tests.support.adapter_oracle import write_adapter

KEYS = {"lora.rank": 8, "optimizer.lr": 0.01, "optimizer.warmup_steps": 0, "checkpoint.every": 1}
KEYS |= {"rollout.max_staleness": 0}  # each update has answers of its own version, to compare
TOLERANCE = 1e-4
"""Largest difference between log-probabilities of trainers and engines, in float32."""


def test_engines_compute_with_the_adapters_that_are_trained_also_after_a_resume(local_run, world, tmp_path):
    """They begin with one that is there already, which engines have read from its folder when they sample version 0."""
    start = write_adapter(tmp_path / "start", world / "model", 8, 4)
    keys = KEYS | {"lora.start": start, "lora.alpha": 4, "ppo.penalty.entropy": 0.1, "ppo.penalty.kl": 0.1}
    run = local_run("adapters", *small(world, **keys, updates=3))
    assert run.wait() == 0, run.output
    own = RunFolder(run.folder)
    trained = load_file(own.adapter / WEIGHTS)
    began = load_file(start / WEIGHTS)
    moved = [(trained[name] - values).abs().max() for name, values in began.items() if ".lora_B." in name]
    assert min(moved) > TOLERANCE
    again = local_run("adapters", *small(world, **keys, updates=5), "resume=auto", output="again.out")
    assert again.wait() == 0, again.output
    updates = [line for line in read_metrics(own) if line["kind"] == "update"]
    assert [line["version"] for line in updates] == [1, 2, 3, 4, 5]
    sent = sum(tensor.nbytes for tensor in trained.values())
    assert all(0 < line["weights_bytes"] <= sent for line in updates)
    differences = {line["version"]: line["mismatch_max"] for line in updates if "mismatch_max" in line}
    assert {2, 3} & differences.keys() and {4, 5} & differences.keys(), "nothing was compared"
    assert all(0 < found < TOLERANCE for found in differences.values()), differences
    sampled = [line["logprob_diff_max"] for line in updates]
    assert len(sampled) == 5 and max(sampled) < TOLERANCE, sampled
    check_files(own, tmp_path)


def check_files(run, folder):
    """The last checkpoint becomes the adapter and the model that the run has exported."""
    factors, last = load_file(run.adapter / WEIGHTS), complete(run)[-1]
    assert all(values.any() for values in factors.values())
    to_peft(last, folder / "converted")
    converted = load_file(folder / "converted" / WEIGHTS)
    assert all(torch.equal(converted[name], values) for name, values in factors.items())
    to_hf(last, folder / "merged")
    exported, merged = (load_file(path / "model.safetensors") for path in (run.hf, folder / "merged"))
    assert exported.keys() == merged.keys()
    for name, values in exported.items():
        torch.testing.assert_close(merged[name], values, atol=1e-6, rtol=0)


def test_engines_that_get_merged_weights_wait_for_them(local_run, world, of_family, tmp_path):
    """The adapters are those of a Qwen3 with experts, which have some, too."""
    model = of_family("qwen3_moe")
    start = write_adapter(tmp_path / "start", model, 8, 4, experts=True)
    keys = KEYS | {"lora.start": start, "lora.alpha": 4, "updates": 2, "lora.merge": "true", "lora.experts": "true"}
    keys |= {"model.path": model}
    run = local_run("merged", *small(world, **keys))
    assert run.wait() == 0, run.output
    updates = [line for line in read_metrics(RunFolder(run.folder)) if line["kind"] == "update"]
    differences = [line["logprob_diff_max"] for line in updates]
    assert len(differences) == 2 and max(differences) < TOLERANCE, differences

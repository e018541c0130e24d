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


def test_engines_compute_with_the_adapters_that_are_trained_also_after_a_resume(local_run, world):
    run = local_run("adapters", *small(world, **KEYS, updates=3))
    assert run.wait() == 0, run.output
    trained = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    factors = {name: tensor for name, tensor in trained.items() if ".lora_B." in name}
    assert min(tensor.abs().max() for tensor in factors.values()) > TOLERANCE
    again = local_run("adapters", *small(world, **KEYS, updates=5), "resume=auto", output="again.out")
    assert again.wait() == 0, again.output
    updates = [line for line in read_metrics(RunFolder(run.folder)) if line["kind"] == "update"]
    assert [line["version"] for line in updates] == [1, 2, 3, 4, 5]
    sent = sum(tensor.nbytes for tensor in trained.values())
    assert all(0 < line["weights_bytes"] <= sent for line in updates)
    differences = {line["version"]: line["mismatch_max"] for line in updates if "mismatch_max" in line}
    assert {2, 3} & differences.keys() and {4, 5} & differences.keys(), "nothing was compared"
    assert all(0 < found < TOLERANCE for found in differences.values()), differences


def test_a_run_starts_from_an_adapter(local_run, world, tmp_path):
    """Engines have read it from its folder when they sample version 0; where they get merged weights, they wait."""
    start = write_adapter(tmp_path / "start", world / "model", 8, 4)
    keys = KEYS | {"lora.start": start, "lora.alpha": 4, "updates": 2}
    for merge in ("false", "true"):
        run = local_run(f"started-{merge}", *small(world, **keys, **{"lora.merge": merge}))
        assert run.wait() == 0, run.output
        updates = [line for line in read_metrics(RunFolder(run.folder)) if line["kind"] == "update"]
        differences = [line["logprob_diff_max"] for line in updates]
        assert len(differences) == 2 and max(differences) < TOLERANCE, differences


def test_engines_sample_from_the_adapters_that_trainers_save(local_run, world, tmp_path):
    """Their log-probabilities are the trainers', also of versions whose factors have moved."""
    changes = {"lora.rank": 4, "ppo.penalty.entropy": 0.1, "ppo.penalty.kl": 0.1}
    run = local_run("adapters", *small(world, **KEYS | changes))
    assert run.wait() == 0, run.output
    own = RunFolder(run.folder)
    differences = [line["logprob_diff_max"] for line in read_metrics(own) if "logprob_diff_max" in line]
    assert len(differences) > 1 and max(differences) < TOLERANCE
    factors = load_file(own.adapter / WEIGHTS)
    assert all(values.any() for values in factors.values())
    last = complete(own)[-1]
    to_peft(last, tmp_path / "converted")
    converted = load_file(tmp_path / "converted" / WEIGHTS)
    assert all(torch.equal(converted[name], values) for name, values in factors.items())
    to_hf(last, tmp_path / "merged")
    exported, merged = (load_file(folder / "model.safetensors") for folder in (own.hf, tmp_path / "merged"))
    assert exported.keys() == merged.keys()
    for name, values in exported.items():
        torch.testing.assert_close(merged[name], values, atol=1e-6, rtol=0)

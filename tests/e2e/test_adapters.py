"""A run that trains adapters: real Megatron trainers, real vLLM engines, started as a user starts them."""

from safetensors.torch import load_file

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import Run
from tests.e2e.test_run import small

KEYS = {"lora.rank": 8, "optimizer.lr": 0.01, "optimizer.warmup_steps": 0, "checkpoint.every": 1}
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
    updates = [line for line in read_metrics(Run(run.folder)) if line["kind"] == "update"]
    assert [line["version"] for line in updates] == [1, 2, 3, 4, 5]
    sent = sum(tensor.nbytes for tensor in trained.values())
    assert all(0 < line["weights_bytes"] <= sent for line in updates)
    differences = {line["version"]: line["mismatch_max"] for line in updates if "mismatch_max" in line}
    assert {2, 3} & differences.keys() and {4, 5} & differences.keys(), "nothing was compared"
    assert all(0 < found < TOLERANCE for found in differences.values()), differences

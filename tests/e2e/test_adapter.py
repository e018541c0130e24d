"""A run that trains adapters, from the launcher to its files."""

import torch
from safetensors.torch import load_file

from areal_megatron.checkpoint.convert import to_hf, to_peft
from areal_megatron.checkpoint.folder import complete
from areal_megatron.checkpoint.peft import WEIGHTS
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import Run
from tests.e2e.test_run import small


def test_engines_sample_from_the_adapters_that_trainers_save(local_run, world, tmp_path):
    """Their log-probabilities are the trainers', also of versions whose factors have moved."""
    changes = {"lora.rank": 4, "ppo.penalty.entropy": 0.1, "ppo.penalty.kl": 0.1, "checkpoint.every": 1}
    changes |= {"rollout.max_staleness": 0}  # each update has answers of its own version, to compare
    run = local_run("adapters", *small(world, **changes))
    assert run.wait() == 0, run.output
    own = Run(run.folder)
    differences = [line["logprob_diff_max"] for line in read_metrics(own) if "logprob_diff_max" in line]
    assert len(differences) > 1 and max(differences) < 1e-4
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

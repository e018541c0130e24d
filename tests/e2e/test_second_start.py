"""One run, one launcher: a second start beside a living one, and a start after one that was stopped in its tracks."""

import signal

import pytest
from safetensors.torch import load_file

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_faults import updates
from tests.e2e.test_run import check_compared, small
from tests.support.living import left_over


def test_a_second_start_is_refused_and_the_first_ends_well(local_run, world, of_family):
    """The run trains a Qwen3 with experts: trainers and engine agree on what they have learned."""
    model = of_family("qwen3_moe")
    arguments = small(world, resume="auto", updates=12, **{"checkpoint.every": 2, "model.path": model})
    first = local_run("twice", *arguments)
    run = RunFolder(first.folder)
    first.wait_for(lambda: list(run.leases.glob("*.json")))
    for ready in (lambda: True, lambda: updates(run) >= 4):
        first.wait_for(ready)
        second = local_run("twice", *arguments, output="second.out")
        assert second.wait(60) == 2, "it does not wait for machine.lease_s; test_lease.py: it is refused at once"
        assert f"is being run by process {first.process.pid} on" in second.output and second.output.count("\n") == 1
    assert first.wait() == 0, first.output
    found = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert [line["version"] for line in found] == list(range(1, 13))
    check_compared(found, ties=2)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run.hf))
    for part in ("mlp.gate.weight", "mlp.experts.7.down_proj.weight", "self_attn.q_norm.weight"):
        name = f"model.layers.2.{part}"
        assert (before[name] != after[name]).any()
    assert audit(run) == [] and len(run.starts()) == 1


@pytest.mark.soak
def test_a_run_whose_launcher_hangs_is_taken_over(local_run, world):
    """It is stopped, as by Ctrl-Z or a machine that stands still; its processes train on until they notice."""
    arguments = small(world, resume="auto", updates=40, **{"checkpoint.every": 2, "machine.lease_s": 5})
    first = local_run("hangs", *arguments)
    run = RunFolder(first.folder)
    first.wait_for(lambda: updates(run) >= 4)
    members, secret = first.members(), run.token
    first.process.send_signal(signal.SIGSTOP)
    second = local_run("hangs", *arguments, output="second.out")
    assert second.wait(400) == 0, second.output
    assert "taking over" in second.output and "resuming from" in second.output
    assert first.wait(10) == -signal.SIGKILL and not left_over(members)
    assert len(run.starts()) == 2 and audit(run) == [] and run.token != secret

"""Trackers of runs that a launcher starts."""

import pytest

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder
from tests.processes.observe.test_trackers import need, read_back


def test_a_run_without_a_key_for_its_tracker_does_not_start(world, local_run, tmp_path, monkeypatch):
    need("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    data = [f"model.path={world / 'model'}", f"data.train={world / 'sft.jsonl'}", "mode=sft", "updates=3"]
    run = local_run("keyless", *data, "track.to=wandb", "track.online=true")
    assert run.wait(60) == 2
    (line,) = run.output.splitlines()
    assert line.startswith("error: track.online: wandb has no key: set WANDB_API_KEY or run `wandb login`")
    assert not run.folder.exists()


@pytest.mark.soak  # what each tracker shows is in tests/processes/observe/test_trackers.py
def test_a_run_is_mirrored_while_it_goes_on(world, local_run):
    need("wandb", "swanlab")
    data = [f"model.path={world / 'model'}", f"data.train={world / 'sft.jsonl'}", "mode=sft", "updates=4"]
    run = local_run("tracked", *data, "data.eval=", "batch_size=16", "track.to=wandb")
    assert run.wait(240) == 0, run.output
    points, ids = read_back("wandb", run.folder / "trackers" / "wandb")
    steps = [record for record in read_metrics(RunFolder(run.folder)) if record["kind"] == "sft"]
    assert len(steps) == 4 and len(ids) == 1
    assert points["sft/loss"] == [(step["version"], step["loss"]) for step in steps]
    assert "warning" not in run.output

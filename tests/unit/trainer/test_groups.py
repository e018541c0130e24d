"""Which libraries carry the process groups of the trainer pool."""

import os

import pytest
import torch
import torch.distributed as dist

from areal_megatron.config import Config, DataConfig, MachineConfig, ModelConfig
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.gpu_settings import SETTINGS
from areal_megatron.trainer import parallel


@pytest.mark.parametrize(("device", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_megatrons_groups_are_made_once(tmp_path, monkeypatch, device, backend):
    """Megatron makes its groups with the backends of the first one: with two, each would be made twice."""
    found = []

    def stop(backend, **_):
        found.append(backend)
        assert os.environ.items() >= SETTINGS.items(), "read when a group is made, also in a rank without a launcher"
        raise RuntimeError("far enough")

    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "init_process_group", stop)
    monkeypatch.setattr(parallel, "choose_device", lambda config: torch.device(device))
    monkeypatch.setattr(parallel, "sign_objects", lambda key: None)
    run = RunFolder(tmp_path / "run")
    run.create()
    config = Config(
        name="test",
        updates=1,
        model=ModelConfig(path=""),
        data=DataConfig(train=""),
        machine=MachineConfig(peer_timeout_s=5),
    )
    with pytest.raises(RunError, match="far enough"):
        parallel.initialise(config, run, 0)
    assert found == [backend]

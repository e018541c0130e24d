"""What a PPO update makes the host wait for, found without a device."""

import pytest

from areal_megatron.run.folder import RunFolder
from tests.support.tiny_models import save_model


@pytest.mark.parametrize(
    ("model", "ppo"),
    [("qwen3", "decoupled"), ("qwen3", "everything"), ("qwen3", "sequences"), ("qwen3_moe", "decoupled")],
)
def test_a_micro_batch_waits_for_nothing_but_the_sizes_of_experts(tmp_path, on_ranks, model, ppo):
    save_model(model, tmp_path / model)
    RunFolder(tmp_path / "run").create()
    on_ranks("synchronisation_checks:check_waits", 1, model=model, ppo=ppo)

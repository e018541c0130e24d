"""Training in float16, with a loss that is scaled so that gradients stay in range."""

import pytest

from areal_megatron.run.folder import RunFolder
from tests.support.tiny_models import save_model

CASES = {
    "gradients": {1: [("qwen3_balanced", {})], 2: [("qwen2", {"pp": 2, "vpp": 2}), ("qwen3_balanced", {"pp": 2})]},
    "residual": {2: [("qwen3", {"pp": 2}), ("qwen3", {"tp": 2})]},
    "overflow": {2: [("qwen3", {"pp": 2}), ("qwen3_moe", {"dp": 2, "ep": 2})]},
    "checkpoint": {2: [("qwen3_moe", {"dp": 2, "ep": 2}), ("qwen3_moe", {"tp": 2}), ("qwen3_moe", {"dp": 2, "ep": 2})]},
}
"""What is checked → world size → models and layouts, which the same ranks try in turn."""


@pytest.mark.parametrize(
    ("check", "world"),
    [
        pytest.param(check, world, marks=[pytest.mark.soak] * (check == "checkpoint"))
        for check in CASES
        for world in CASES[check]
    ],
)
def test_float16(tmp_path, on_ranks, check, world):
    cases = {f"run-{number}": case for number, case in enumerate(CASES[check][world])}
    for run, (model, _) in cases.items():
        RunFolder(tmp_path / run).create()
        if not (tmp_path / model).exists():
            # two layers are enough for a gradient that overflows; products in float16 take long on a CPU
            save_model(model, tmp_path / model, **({"num_hidden_layers": 2} if check == "overflow" else {}))
    on_ranks(f"float16_checks:check_{check}", world, cases=cases)


def test_a_batch_whose_steps_are_all_skipped_makes_no_version(tmp_path, on_ranks):
    RunFolder(tmp_path / "run").create()
    save_model("qwen3", tmp_path / "qwen3")
    on_ranks("float16_checks:check_version", 1)

"""Training with fused kernels and grouped experts is training without them, in every layout; on CPU, where torch and
megatron-core have a form of them too."""

import math

import pytest

from areal_megatron.run.folder import RunFolder
from tests.support.soaking import with_soaked
from tests.support.tiny_models import save_model

EVERY = ["swiglu", "gradients", "experts"]
CASES = {
    "swiglu": ("layouts", ["swiglu"], [("qwen2", {}), ("qwen2", {"recompute": "mlp", "recompute_layers": 2})]),
    "gradients": ("layouts", ["gradients"], [("qwen2", {"tp": 2})]),
    "experts": (
        "layouts",
        ["experts"],
        [("qwen3_moe", {}), ("qwen3_moe", {"recompute": "full", "recompute_layers": 2})],
    ),
    "all-on-2-ranks": (
        "layouts",
        EVERY,
        [
            ("qwen3_moe", {"tp": 2}),
            ("qwen3_moe", {"pp": 2, "recompute": "mlp"}),
            ("qwen3_moe", {"dp": 2, "ep": 2, "recompute": "elementwise"}),
            ("qwen3_moe", {"cp": 2, "ep": 2}),
        ],
    ),
    "all-on-4-ranks": ("layouts", EVERY, [("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 1})]),
    "all-in-small-buckets": ("overlap", EVERY, [("qwen3_moe", {"dp": 2})]),
}
SOAKED = ("gradients", "swiglu", "experts", "all-on-2-ranks", "all-in-small-buckets")


@pytest.mark.parametrize("case", with_soaked(CASES, SOAKED))
def test_kernels_change_nothing(tmp_path, on_ranks, case):
    check, names, layouts = CASES[case]
    cases = {f"run-{number}": pair for number, pair in enumerate(layouts)}
    for run, (model, _) in cases.items():
        if not (tmp_path / model).exists():
            save_model(model, tmp_path / model)
        RunFolder(tmp_path / run).create()
    [world] = {math.prod(layout.get(size, 1) for size in ("tp", "cp", "pp", "dp")) for _, layout in layouts}
    on_ranks("kernel_checks:check_kernels", world, of=check, names=names, cases=cases)


@pytest.mark.soak
def test_fused_swiglu_keeps_less_for_the_backward_pass(tmp_path, on_ranks):
    models = ["qwen2", "qwen3_moe"]
    for model in models:
        save_model(model, tmp_path / model)
    on_ranks("kernel_checks:check_saved", 1, models=models)


def test_checkpoints_and_layouts_are_those_of_single_experts(tmp_path, on_ranks):
    save_model("qwen3_moe", tmp_path / "qwen3_moe")
    on_ranks("kernel_checks:check_names", 1, model="qwen3_moe")

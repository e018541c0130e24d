"""Steps of supervised training against plain formulas with Hugging Face models, in several layouts."""

import math
from itertools import product

import pytest

from areal_megatron.run.folder import RunFolder
from tests.support.tiny_models import save_model

LAYOUTS = {
    1: [("qwen2", {})],
    2: [("qwen3", {"tp": 2}), ("llama", {"pp": 2, "vpp": 2}), ("qwen3_moe", {"dp": 2, "ep": 2}), ("qwen2", {"cp": 2})],
    4: [("qwen2", {"tp": 2, "pp": 2})],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_lesson_is_its_formula(tmp_path, on_ranks, ranks):
    cases = [[*case, mode] for case, mode in product(LAYOUTS[ranks], ("sft", "rows", "dpo", "reward_model"))]
    for model, layout, _ in cases:
        assert math.prod(layout.get(size, 1) for size in ("tp", "pp", "cp", "dp")) == ranks
        for name, change in ((model, {}), (f"{model}-other", {"initializer_range": 0.04})):
            save_model(model, tmp_path / name, **change)
    runs = {f"run-{number}": case for number, case in enumerate(cases)}
    for name in runs:
        RunFolder(tmp_path / name).create()
    on_ranks("supervised_checks:check_lessons", ranks, cases=runs)

"""Steps of supervised training against plain formulas with Hugging Face models, in several layouts."""

import math
from itertools import product

import pytest

from areal_megatron.run.folder import RunFolder
from tests.support.soaking import with_soaked
from tests.support.tiny_models import save_model

LAYOUTS = {
    1: [("qwen2", {})],
    2: [("qwen3", {"tp": 2}), ("llama", {"pp": 2, "vpp": 2}), ("qwen3_moe", {"dp": 2, "ep": 2}), ("qwen2", {"cp": 2})],
    4: [("qwen2", {"tp": 2, "pp": 2})],
}


MODES = ("sft", "rows", "dpo", "reward_model")
LESSONS = {
    1: [*product(LAYOUTS[1], MODES)],
    # each layout has two lessons of the four, each lesson two layouts
    2: [(case, mode) for number, case in enumerate(LAYOUTS[2]) for mode in MODES[1 - number % 2 :: 2]],
    4: [*product(LAYOUTS[4], MODES)],
}
LESSONS["2-the-rest"] = [lesson for lesson in product(LAYOUTS[2], MODES) if lesson not in LESSONS[2]]


@pytest.mark.parametrize("lessons", with_soaked(LESSONS, ("2-the-rest",)))
def test_every_lesson_is_its_formula(tmp_path, on_ranks, lessons):
    cases, ranks = [[*case, mode] for case, mode in LESSONS[lessons]], 2 if lessons == "2-the-rest" else lessons
    for model, layout, _ in cases:
        assert math.prod(layout.get(size, 1) for size in ("tp", "pp", "cp", "dp")) == ranks
        for name, change in ((model, {}), (f"{model}-other", {"initializer_range": 0.04})):
            save_model(model, tmp_path / name, **change)
    runs = {f"run-{number}": case for number, case in enumerate(cases)}
    for name in runs:
        RunFolder(tmp_path / name).create()
    on_ranks("supervised_checks:check_lessons", ranks, cases=runs)

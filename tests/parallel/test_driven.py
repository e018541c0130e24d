"""What a program asks trainer ranks for (mode=driven), in every parallel layout."""

import math

import pytest

from tests.parallel.test_trainer import folder, models, numbered  # noqa: F401
from tests.support.soaking import with_soaked

CASES = {
    "tp1": [("qwen3", {}), ("llama", {})],
    "2-ranks": [("qwen2", {"dp": 2}), ("qwen3", {"tp": 2}), ("llama", {"pp": 2, "vpp": 2}), ("qwen3", {"cp": 2})],
    "4-ranks": [("qwen3", {"tp": 2, "dp": 2}), ("qwen2", {"pp": 2, "dp": 2}), ("qwen3_moe", {"dp": 4, "ep": 2})],
}


@pytest.mark.parametrize("case", with_soaked(CASES, ("tp1", "4-ranks")))
def test_losses_gradients_and_steps_are_those_of_the_formulas(folder, on_ranks, case):  # noqa: F811
    [world] = {math.prod(layout.get(size, 1) for size in ("tp", "cp", "pp", "dp")) for _, layout in CASES[case]}
    on_ranks("driven_checks:check_loop", world, cases=numbered(folder, CASES[case]))


TURNS = {
    "tp1": [("qwen3", {}, {}, "float32"), ("llama", {}, {"on_host": True}, "bfloat16")],
    "2-ranks": [("qwen2", {"dp": 2}, {}, "bfloat16"), ("llama", {"pp": 2, "vpp": 2}, {}, "float16")],
    "2-ranks-in-float32": [("qwen3", {"tp": 2}, {}, "float32"), ("qwen3", {"dp": 2}, {"on_host": True}, "float32")],
}


@pytest.mark.parametrize("case", with_soaked(TURNS, ("2-ranks-in-float32",)))
def test_adapters_that_are_trained_in_turns_become_what_each_becomes_alone(folder, on_ranks, case):  # noqa: F811
    on_ranks("driven_checks:check_turns", 1 if case == "tp1" else 2, cases=numbered(folder, TURNS[case]))

"""Trainer pools that go on from a checkpoint, under the same layout and others."""

import pytest
from tiny_models import MODELS, save_model

from areal_megatron.run import Run

CASES = {
    "dense": ("qwen3", {"tp": 2, "pp": 2}, [{"tp": 2, "pp": 2}, {}, {"dp": 2}, {"pp": 4}]),
    "replicas": ("qwen2", {"dp": 2}, [{"dp": 2}, {"tp": 2}, {"pp": 2, "vpp": 2}]),
    "experts": ("qwen3_moe", {"dp": 2, "ep": 2}, [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {}]),
}
"""A model, the layout that saves, and those that go on."""


@pytest.fixture
def folder(tmp_path):
    for name in MODELS:
        save_model(name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_as_if_it_had_never_stopped(folder, on_ranks, case):
    model, saved, others = CASES[case]
    Run(folder / "straight").create()
    on_ranks("checkpoint_checks:check_straight", ranks(saved), model=model, layout=saved)
    for number, layout in enumerate(others):
        Run(folder / f"resumed-{number}").create()
        on_ranks("checkpoint_checks:check_resumed", ranks(layout), model=model, layout=layout, run=f"resumed-{number}",
                 exact=layout == saved)  # fmt: skip


def ranks(layout):
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)

"""Trainer ranks against Hugging Face and plain training code, in every parallel layout."""

import pytest
from tiny_models import FAMILIES, save_model

from areal_megatron.run import Run

LAYOUTS = {
    "tp1": {},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "dp2": {"dp": 2},
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: save_model(family, folder / family) for family in FAMILIES}


@pytest.fixture
def folder(tmp_path, models):
    """Where ranks work: the models and the run folders they may ask for."""
    for family, path in models.items():
        (tmp_path / family).symlink_to(path)
    names = ("bad", "none", "selective", "full", "naive", "bfloat16", "decay")
    for name in (*FAMILIES, *names):
        Run(tmp_path / f"run-{name}").create()
    return tmp_path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(folder, on_ranks, layout):
    sizes = LAYOUTS[layout]
    world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    on_ranks("check_layout", world, trainer=sizes)


def test_a_gradient_that_is_not_finite_is_skipped_on_every_rank(folder, on_ranks):
    on_ranks("check_bad_gradient", 2, trainer={"dp": 2})


def test_recomputation_naive_objective_and_bfloat16(folder, on_ranks):
    on_ranks("check_variants", 1)


def test_weight_decay_spares_biases_and_norms(folder, on_ranks):
    on_ranks("check_decay", 1)

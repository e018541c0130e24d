"""Trainer ranks against Hugging Face and plain training code, in every parallel layout."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, save_model

from areal_megatron.config import Config, Data, Model, Optimizer
from areal_megatron.run import Run
from areal_megatron.trainer.optimizer import schedule

LAYOUTS = {
    "tp1": {},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "dp2": {"dp": 2},
}
SPECIAL = {
    "etp4": {"ep": 4}
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
    names = ("bad", "none", "selective", "full", "naive", "bfloat16", "decay", "memory", "alone", "cuda")
    for name in (*FAMILIES, *names):
        Run(tmp_path / f"run-{name}").create()
    return tmp_path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(folder, on_ranks, layout):
    sizes = LAYOUTS[layout]
    world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    on_ranks("check_layouts", world, cases={f"run-{family}": [family, sizes] for family in FAMILIES})


def test_a_gradient_that_is_not_finite_is_skipped_on_every_rank(folder, on_ranks):
    on_ranks("check_bad_gradient", 2, trainer={"dp": 2})


def test_recomputation_naive_objective_and_bfloat16(folder, on_ranks):
    on_ranks("check_variants", 1)


def test_weight_decay_spares_biases_and_norms(folder, on_ranks):
    on_ranks("check_decay", 1)


def test_logits_of_all_tokens_are_never_alive(folder, on_ranks):
    on_ranks("check_logprob_memory", 1)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_learning_rate_warms_up_and_falls(shape):
    config = Config(
        name="test",
        updates=25,
        model=Model(path=""),
        data=Data(train=""),
        optimizer=Optimizer(lr=0.1, schedule=shape, warmup_fraction=0.1),
    )
    optimizer = SimpleNamespace(param_groups=[{}])
    subject = schedule(config, optimizer)
    found = []
    for _ in range(100):  # 25 updates of 4 mini-batches
        subject.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    assert found[:10] == pytest.approx([0.01 * k for k in range(1, 11)])
    rest = [(k - 10) / 91 for k in range(11, 101)]
    factors = {
        "constant": [1.0] * 90,
        "linear": [1 - x for x in rest],
        "cosine": [(1 + math.cos(math.pi * x)) / 2 for x in rest],
    }
    assert found[10:] == pytest.approx([0.1 * factor for factor in factors[shape]])


def test_a_rank_that_does_not_come_is_an_error(folder, on_ranks):
    on_ranks("check_missing_peer", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", ["check_cuda_attention", "check_cuda", "check_cuda_logprob_memory"])
def test_on_cuda(folder, on_ranks, capsys, check):
    on_ranks(check, 1)
    with capsys.disabled():
        print((folder / "rank-0.out").read_text())

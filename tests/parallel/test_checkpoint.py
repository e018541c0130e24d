"""Trainer pools that resume from a checkpoint, under the same layout and others."""

import math

import pytest

from areal_megatron.run.folder import RunFolder
from tests.support.soaking import with_soaked
from tests.support.tiny_models import save_model

CASES = {
    "dense": ("qwen3", {"tp": 2, "pp": 2}, [{"tp": 2, "pp": 2}, {"dp": 2}]),
    "dense-on-one-rank-and-more-stages": ("qwen3", {"tp": 2, "pp": 2}, [{}, {"pp": 4}]),
    "replicas": ("qwen2", {"dp": 2}, [{"dp": 2}, {"tp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}]),
    "experts": ("qwen3_moe", {"dp": 2, "ep": 2}, [{"dp": 2, "ep": 2}, {}]),
    "experts-on-other-ranks": ("qwen3_moe", {"dp": 2, "ep": 2}, [{"dp": 4, "ep": 4}, {"cp": 2, "ep": 2}]),
    "sigmoid-router": ("glm4_moe", {"dp": 2, "ep": 2}, [{"dp": 2, "ep": 2}, {"tp": 2}, {"pp": 2, "vpp": 2}]),
    "latents": ("deepseek_v3", {"dp": 2, "ep": 2}, [{"tp": 2}]),
    "gated-delta-nets": ("qwen3_next", {"tp": 2}, [{"tp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}]),
    "context": ("qwen3", {"cp": 2}, [{"cp": 2}, {"dp": 2}, {"cp": 2, "tp": 2}]),
}
"""A model, the layout that saves, and those that resume."""
WITH_CRITIC = ("dense", "dense-on-one-rank-and-more-stages", "replicas")
SOAKED = ("dense-on-one-rank-and-more-stages", "experts-on-other-ranks")
SOAKED += ("context", "replicas", "sigmoid-router", "latents", "gated-delta-nets")
"""`dense` goes on with replicas, too, and `experts` on one rank. The others are more of each, and families of which
tensors are saved as those of `experts` are, by names of their own (test_convert.py)."""


@pytest.mark.parametrize("case", with_soaked(CASES, SOAKED))
def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path, on_ranks, case):
    folder = tmp_path
    model, saved, others = CASES[case]
    runs = {f"resumed-{number}": layout for number, layout in enumerate(others)}
    save_model(model, folder / model)
    for name in ("straight", *runs):
        RunFolder(folder / name).create()
    for world in sorted(set(map(ranks, others)), key=lambda world: world != ranks(saved)):
        resumed = {name: layout for name, layout in runs.items() if ranks(layout) == world}
        on_ranks(
            "checkpoint_checks:check_all",
            world,
            model=model,
            saved=saved if world == ranks(saved) else None,
            resumed=resumed,
            critic=case in WITH_CRITIC,
        )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "layout", "critic"),
    [
        ("qwen3", {"tp": 2}, True),
        ("qwen3_moe", {"dp": 2, "ep": 2}, False),
        ("glm4_moe", {"tp": 2}, False),
        ("deepseek_v3", {"tp": 2}, False),
    ],
    ids=["dense", "experts", "sigmoid-router", "latents"],
)
def test_runs_go_on_with_and_without_transformer_engine(tmp_path, on_ranks, model, layout, critic):
    save_model(model, tmp_path / model)
    for saved in ("local", "engine", "old"):
        for run in (f"saved-{saved}", f"resumed-local-{saved}", f"resumed-engine-{saved}"):
            RunFolder(tmp_path / run).create()
    on_ranks("checkpoint_checks:check_layers", 2, model=model, layout=layout, critic=critic)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("dtype", "model", "layout"),
    [
        ("float32", "qwen2", {"dp": 2}),
        ("bfloat16", "qwen3", {"tp": 2}),
        ("float16", "qwen3_moe", {"dp": 2, "ep": 2}),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_optimizer_states_on_the_host_are_the_same_states(tmp_path, on_ranks, dtype, model, layout):
    save_model(model, tmp_path / model)
    for run in ("saved-False", "saved-True", "resumed-False-True", "resumed-True-False", "resumed-True-True"):
        RunFolder(tmp_path / f"{dtype}-{run}").create()
    on_ranks("checkpoint_checks:check_on_host", 2, cases={dtype: [model, layout]})


@pytest.mark.parametrize(
    ("check", "run", "world"),
    [
        ("full_disk", "full", 2),
        ("no_room_for_the_model", "room", 1),
        ("clock", "clock", 1),
        ("exports", "exports", 2),
        ("slow_exports", "slow", 2),
    ],
)
def test_a_disk_without_room_a_clock_that_jumps_and_exports_of_all_versions(tmp_path, on_ranks, check, run, world):
    save_model("qwen3", tmp_path / "qwen3")
    run = RunFolder(tmp_path / run)
    run.create()
    run.begin()
    on_ranks(f"checkpoint_checks:check_{check}", world, model="qwen3")


def ranks(layout):
    return math.prod(layout.get(size, 1) for size in ("tp", "cp", "pp", "dp"))

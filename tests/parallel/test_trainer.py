"""Trainer ranks against Hugging Face and plain training code, in every parallel layout."""

import math
from types import SimpleNamespace

import pytest
import torch

from areal_megatron.config import CorrectionConfig, CriticConfig, OptimizerConfig, PenaltyConfig
from areal_megatron.ppo.algorithm import ALGORITHMS
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.optimizer import schedule
from tests.support.plain_results import LIKELY
from tests.support.soaking import with_soaked
from tests.support.tiny_models import MODELS, save_model

DENSE = ("qwen2", "qwen3", "llama")
CASES = {
    "tp1": [(model, {}) for model in (*DENSE, "qwen3_moe", "qwen3_balanced")],
    "sigmoid-router": [("glm4_moe", {}), ("glm4_yarn", {})],
    "sigmoid-router-made-again": [("glm4_moe", {"recompute": "full"})],
    "sigmoid-router-on-2-ranks": [
        ("glm4_moe", {"tp": 2, "recompute": "mlp"}),
        ("glm4_moe", {"pp": 2, "vpp": 2}),
        ("glm4_moe", {"dp": 2, "ep": 2, "recompute": "elementwise"}),
        ("glm4_moe", {"cp": 2, "etp": 2}),
    ],
    "sigmoid-router-on-4-ranks": [("glm4_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 1})],
    "latents": [("deepseek_v3", {}), ("moonlight", {"recompute": "full"}), ("glm4_moe_lite", {})],
    "latents-on-2-ranks": [
        ("deepseek_v3", {"tp": 2, "recompute": "mlp"}),
        ("moonlight", {"tp": 2, "etp": 1}),
        ("moonlight", {"pp": 2, "vpp": 2}),
        ("deepseek_v3", {"dp": 2, "ep": 2, "recompute": "elementwise"}),
        ("deepseek_v3", {"cp": 2, "etp": 2}),
        ("glm4_moe_lite", {"tp": 2}),
        ("glm4_moe_lite", {"pp": 2, "vpp": 2}),
    ],
    "latents-on-4-ranks": [("deepseek_v3", {"tp": 2, "dp": 2, "ep": 2, "etp": 1})],
    "gated-delta-nets": [("qwen3_5_moe", {})],
    "gated-delta-nets-of-other-cases": [("qwen3_next", {}), ("qwen3_next", {"recompute": "full"}), ("qwen3_5", {})],
    "gated-delta-nets-on-2-ranks": [
        ("qwen3_next", {"tp": 2, "recompute": "mlp"}),
        ("qwen3_5", {"cp": 2, "recompute": "full"}),
    ],
    "gated-delta-nets-and-the-rest": [
        ("qwen3_next", {"tp": 2, "etp": 1, "recompute": "full", "recompute_layers": 1}),
        ("qwen3_next", {"dp": 2, "ep": 2, "recompute": "elementwise"}),
        ("qwen3_5", {"tp": 2}),
        ("qwen3_next", {"pp": 2, "vpp": 2}),
        ("qwen3_next", {"cp": 2}),
        ("qwen3_5", {"pp": 2, "vpp": 2, "recompute": "mlp"}),
    ],
    "gated-delta-nets-on-4-ranks": [
        ("qwen3_next", {"tp": 2, "pp": 2}),
        ("qwen3_next", {"tp": 2, "dp": 2, "ep": 2}),
        ("qwen3_next", {"cp": 2, "dp": 2, "ep": 2}),
        ("qwen3_5", {"cp": 2, "pp": 2}),
        ("qwen3_5", {"tp": 2, "cp": 2}),
        ("qwen3_5_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 1}),
        ("qwen3_5", {"tp": 4}),  # more ranks than KV heads
    ],
    "tp2-sp": [(model, {"tp": 2}) for model in (*DENSE, "qwen3_moe")],
    "pp2": [(model, {"pp": 2}) for model in (*DENSE, "qwen3_moe")],
    "tp2-pp2": [
        ("qwen3", {"tp": 2, "pp": 2, "recompute": "mlp", "recompute_layers": 1}),
        ("llama", {"tp": 2, "pp": 2, "recompute": "elementwise"}),
    ],
    "tp2-pp2-and-the-rest": [("qwen2", {"tp": 2, "pp": 2, "recompute": "elementwise"}), ("llama", {"tp": 2, "pp": 2})],
    "dp2": [(model, {"dp": 2}) for model in (*DENSE, "qwen3_moe")],
    "cp2": [
        ("qwen2", {"cp": 2}),
        ("qwen3", {"cp": 2, "recompute": "mlp"}),
        ("llama", {"cp": 2, "recompute": "full", "recompute_layers": 2}),
        ("qwen3_moe", {"cp": 2, "recompute": "elementwise"}),
        ("qwen3_balanced", {"cp": 2}),
    ],
    "virtual-stages": [("qwen2", {"pp": 2, "vpp": 2})],
    "uneven-stages": [("qwen3_deep", {"pp": 2})],
    "experts-on-2-ranks": [
        ("qwen3_moe", {"dp": 2, "ep": 2}),
        ("qwen3_moe", {"dp": 2, "etp": 2}),
        ("qwen3_moe", {"tp": 2, "etp": 1}),
        ("qwen3_moe", {"cp": 2, "ep": 2}),
    ],
    "cp2-and-others": [
        ("qwen2", {"cp": 2, "tp": 2}),
        ("qwen3_moe", {"cp": 2, "dp": 2, "ep": 4}),
        ("qwen3", {"cp": 4}),
    ],
    "cp2-and-the-rest": [
        ("qwen3", {"cp": 2, "dp": 2}),
        ("llama", {"cp": 2, "pp": 2}),
        ("qwen2", {"cp": 2, "pp": 2, "vpp": 2}),
        ("qwen3_moe", {"cp": 2, "tp": 2, "ep": 2}),
        ("qwen3_balanced", {"cp": 2, "tp": 2}),
    ],
    "experts-on-4-ranks": [
        ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 1}),
        ("qwen3_moe", {"tp": 2, "pp": 2, "vpp": 2}),
        ("qwen3", {"tp": 4}),  # more ranks than KV heads
    ],
    "slices-of-experts-on-4-ranks": [
        ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2}),
        ("qwen3_balanced", {"tp": 2, "pp": 2}),
    ],
}
"""Models and layouts that the same ranks try in turn, since starting ranks takes longer than trying one."""
SOAKED = (
    "sigmoid-router-made-again",
    "sigmoid-router-on-2-ranks",
    "sigmoid-router-on-4-ranks",
    "latents-on-2-ranks",
    "latents-on-4-ranks",
    "gated-delta-nets-of-other-cases",
    "gated-delta-nets-and-the-rest",
    "gated-delta-nets-on-4-ranks",
    "tp2-sp",
    "pp2",
    "tp2-pp2-and-the-rest",
    "virtual-stages",
    "dp2",
    "cp2",
    "experts-on-2-ranks",
    "cp2-and-the-rest",
    "slices-of-experts-on-4-ranks",
)
"""Layouts that other cases have, on 4 ranks or each part of them beside another part: virtual stages are among those of
experts, stages of gated delta nets in test_adapter.py, stages beside context parallelism in PROMPTS, and full
recomputation is that of latents. Each family, on one rank or on two, and its shards in test_convert.py, are tested
always."""

DEEP = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_deep")
"""Models with gated delta nets have attention in the fourth layer only."""


def of_a_depth(model: str, layout: dict) -> str:
    """The model that a layout is tried with: two layers are enough, but for stages and where some are recomputed."""
    deep = model in DEEP or layout.get("pp", 1) > 1 or "recompute_layers" in layout
    return model if deep else f"{model}-short"


VARIANTS = {
    "run-corrected-tokens": {
        "dual_clip": 1.1,
        "correction": CorrectionConfig(
            truncate=2.0, mask_low=0.7, mask_high=1.3, sequence_mask_low=0.95, sequence_mask_high=1.1, m2po=0.03
        ),
    },
    "run-corrected-sequences": {
        "algorithm": "gspo",
        "correction": CorrectionConfig(truncate=0.0, mask_low=0.95, mask_high=1.05, m2po=0.03),
    },
    "run-corrected-products": {
        "algorithm": "boba_grpo",
        "correction": CorrectionConfig(
            product_truncate=1.4, product_mask_low=0.3, product_mask_high=2.0, negative_mask=0.1
        ),
    },
    "run-log-linear": {"objective": "loglinear", "penalty": PenaltyConfig(entropy=0.1, kl=1.0, kl_form="k1")},
    "run-penalties": {
        "algorithm": "grpo",
        "penalty": PenaltyConfig(entropy=0.1, kl=0.5, kl_form="k2", kl_cov=0.7, kl_cov_share=0.1),
    },
    "run-distilled": {"penalty": PenaltyConfig(kl=1.0, kl_form="k1", kl_model="llama"), "rewards": False},
    "run-taught": {"penalty": PenaltyConfig(kl=1.0, kl_form="k1", kl_model="served.teacher"), "rewards": False},
    **{
        f"run-taught-{form}": {
            "penalty": PenaltyConfig(kl=0.7, kl_form=form, kl_model="served.teacher", kl_top_k=LIKELY, entropy=0.1)
        }
        for form in ("forward", "reverse")
    },
    "run-critic": {"critic": CriticConfig(lr=2e-3, gamma=0.99, gae_lambda=0.9, clip=0.3)},
    "run-critic-warms-up": {"algorithm": "ppo_sequence", "critic": CriticConfig(lr=1e-3, warmup=1)},
}
"""Settings of PPO: all corrections, on tokens and on whole sequences; dual clip; the interpolated proximal policy; all
penalties; a teacher of another family, and one that engines serve, asked for tokens sampled and for the likeliest;
critics."""


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    found = {name: save_model(name, folder / name) for name in MODELS}
    for name in (name for name in MODELS if name not in DEEP):
        found[f"{name}-short"] = save_model(name, folder / f"{name}-short", num_hidden_layers=2)
    return found


@pytest.fixture
def folder(tmp_path, models):
    """The folder that ranks work in, with the models and a run folder."""
    for name, path in models.items():
        (tmp_path / name).symlink_to(path)
    RunFolder(tmp_path / "run").create()
    return tmp_path


def create_runs(folder, names):
    for name in names:
        RunFolder(folder / name).create()


def numbered(folder, cases):
    """Creates a run for each case, and returns their names with the cases."""
    runs = {f"run-{number}": case for number, case in enumerate(cases)}
    create_runs(folder, runs)
    return runs


@pytest.mark.parametrize("case", with_soaked(CASES, SOAKED))
def test_every_layout_trains_as_one_process_does(folder, on_ranks, case):
    runs = numbered(folder, [(of_a_depth(*one), one[1]) for one in CASES[case]])
    [world] = {math.prod(layout.get(size, 1) for size in ("tp", "cp", "pp", "dp")) for _, layout in CASES[case]}
    on_ranks("check_layouts", world, cases=runs)


@pytest.mark.parametrize(
    "layout",
    [{}, *(pytest.param(layout, marks=pytest.mark.soak) for layout in ({"cp": 2}, {"tp": 2, "pp": 2, "dp": 2}))],
    ids=["tp1", "cp2", "tp2-pp2-dp2"],
)
def test_every_algorithm_trains_as_its_paper_says(folder, on_ranks, layout):
    cases = {f"run-{algorithm}": {"algorithm": algorithm} for algorithm in ALGORITHMS} | VARIANTS
    create_runs(folder, cases)
    on_ranks("check_algorithms", math.prod(layout.values()), cases=cases, layout=layout)


REPLAYED = {
    "tp1": [{}, {"recompute": "full"}, {"recompute": "mlp", "recompute_layers": 2}],
    "2-ranks": [{"dp": 2, "ep": 2, "recompute": "mlp"}, {"cp": 2, "recompute": "full"}],
    "parts-of-a-model": [{"tp": 2}, {"pp": 2, "recompute": "full", "recompute_layers": 1}],
    "4-ranks": [
        {"tp": 2, "pp": 2, "vpp": 2, "recompute": "full"},
        {"tp": 2, "pp": 2, "vpp": 2, "recompute": "mlp"},
        {"tp": 2, "dp": 2, "ep": 2, "recompute": "elementwise"},
        {"tp": 2, "cp": 2, "ep": 2},
    ],
}


@pytest.mark.parametrize("case", with_soaked(REPLAYED, ("tp1", "parts-of-a-model", "4-ranks")))
def test_tokens_go_through_the_experts_that_the_engine_chose(folder, on_ranks, case):
    """Parts of a model are the next test's, of another family."""
    cases = numbered(folder, REPLAYED[case])
    [world] = {math.prod(layout.get(size, 1) for size in ("tp", "cp", "pp", "dp")) for layout in REPLAYED[case]}
    on_ranks("routing_checks:check_replay", world, cases=cases)


@pytest.mark.parametrize("family", [pytest.param("glm4_moe", marks=pytest.mark.soak), "deepseek_v3"])
def test_routes_of_layers_without_experts_are_passed_over(folder, on_ranks, family):
    cases = numbered(folder, [{"tp": 2}, {"pp": 2, "vpp": 2, "recompute": "full"}])
    on_ranks("routing_checks:check_replay", 2, cases=cases, family=family)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        pytest.param({}, {}, marks=pytest.mark.soak),
        ({}, {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}),
        ({"tp": 2, "dp": 2, "ep": 2}, {}),
    ],
    ids=["tp1", "tp1-with-a-loss", "tp2-dp2-ep2"],
)
def test_biases_of_routers_move_by_the_load_of_the_steps_taken(folder, on_ranks, layout, fields):
    create_runs(folder, ["moving"])
    ranks = layout.get("tp", 1) * layout.get("dp", 1)
    on_ranks("routing_checks:check_biases", ranks, layout=layout, fields=fields)


PROMPTS = {
    1: [
        ("qwen3", {}, None),
        ("qwen2", {"recompute": "full"}, VARIANTS["run-corrected-sequences"] | {"minibatches": 2}),
        ("qwen3_balanced", {}, None),
        ("qwen3", {}, {"minibatches": 2, "critic": CriticConfig(lr=2e-3, gae_lambda=0.9)}),
        ("qwen3_next", {"recompute": "full"}, None),
    ],
    2: [
        ("qwen3_next", {"tp": 2}, None),
        ("qwen3_next", {"cp": 2}, None),
        ("llama", {"tp": 2}, None),
        ("qwen2", {"pp": 2, "vpp": 2}, None),
        ("qwen3_moe", {"dp": 2, "ep": 2}, None),
        ("qwen3", {"cp": 2}, None),
        ("qwen3_balanced", {"cp": 2}, None),
        ("qwen3", {"cp": 2}, {"minibatches": 2, "critic": CriticConfig(lr=2e-3, gae_lambda=0.9)}),
    ],
    4: [("qwen3_moe", {"tp": 2, "cp": 2, "ep": 2}, None), ("qwen3", {"cp": 2, "pp": 2}, None)],
}
"""Ranks → models, layouts and settings of PPO."""


@pytest.mark.parametrize("ranks", with_soaked((1, 2, 4), (1, 2)))
def test_answers_that_share_a_prompt_train_as_if_each_were_alone(folder, on_ranks, ranks):
    cases = numbered(folder, PROMPTS[ranks])
    on_ranks("prompt_checks:check_prompts", ranks, cases=cases)


@pytest.mark.parametrize("layout", [{}, {"cp": 2}], ids=["tp1", "cp2"])
def test_routes_of_a_shared_prompt_are_replayed(folder, on_ranks, layout):
    on_ranks("prompt_checks:check_routes", math.prod(layout.values()), cases={"run": layout})


def test_routes_of_another_model_are_an_error(folder, on_ranks):
    on_ranks("routing_checks:check_other_model", 1)


def test_exports_are_those_of_mbridge(folder, on_ranks):
    """The model is dense: the only experts that mbridge knows are TransformerEngine's grouped ones."""
    on_ranks("export_checks:check_mbridge", 4, model="qwen3", layout={"tp": 2, "pp": 2})


@pytest.mark.parametrize("pp", with_soaked((1, 2), (1,)))
def test_communication_beside_computation_changes_nothing(folder, on_ranks, pp):
    cases = {f"run-{model}": [model, {"dp": 2, "pp": pp}] for model in ("qwen3", "qwen3_moe", "qwen3_next")}
    if pp > 1:
        cases["run-virtual"] = ["qwen2", {"dp": 2, "pp": 2, "vpp": 2}]
    create_runs(folder, cases)
    on_ranks("check_overlap", 2 * pp, cases=cases)


def test_a_gradient_that_is_not_finite_is_skipped_on_every_rank(folder, on_ranks):
    on_ranks("check_bad_gradient", 2, trainer={"dp": 2})


def test_there_is_no_step_where_there_is_nothing_to_learn(folder, on_ranks):
    create_runs(folder, ["run-penalty"])
    on_ranks("check_nothing_to_learn", 2, trainer={"dp": 2})


IDLE = {
    1: [("qwen3", {}, 0)],
    2: [
        ("qwen3_moe", {"dp": 2, "ep": 2}, 0),
        ("qwen2", {"pp": 2, "vpp": 2}, 0),
        ("qwen3", {"cp": 2}, 0),
        ("qwen2", {"dp": 2}, 0.03),
    ],
}
"""Model, layout and bound of M2PO, which masks by all tokens."""


@pytest.mark.parametrize("ranks", with_soaked((1, 2), (1,)))
def test_nothing_is_computed_of_groups_with_equal_rewards(folder, on_ranks, ranks):
    cases = numbered(folder, IDLE[ranks])
    on_ranks("check_idle_groups", ranks, cases=cases)


@pytest.mark.soak  # layouts above recompute as well, one way each
def test_recomputation_changes_no_gradient(folder, on_ranks):
    on_ranks("check_recompute", 1)


def test_recomputation_naive_objective_and_half_precision(folder, on_ranks):
    on_ranks("check_variants", 1)


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    ("model", "tp", "dtype"),
    [
        ("llama", 1, "bfloat16"),
        ("qwen2", 2, "bfloat16"),
        ("qwen3", 2, "float16"),
        *(pytest.param("qwen3", 1, dtype, marks=ON_CUDA) for dtype in ("bfloat16", "float16")),
    ],
)
def test_logits_are_not_rounded_to_the_dtype_of_the_model(folder, on_ranks, model, tp, dtype):
    create_runs(folder, ("float32-head", "model-head"))
    on_ranks("check_head", tp, model=model, tp=tp, dtype=dtype)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "dp": 2}], ids=["tp1", "tp2-dp2"])
def test_the_size_of_an_update_is_known_from_a_sample_of_the_weights(folder, on_ranks, layout):
    cases = numbered(folder, [({}, layout), ({"on_host": True}, layout)])
    on_ranks("check_update_size", math.prod(layout.values()), cases=cases)


@pytest.mark.parametrize(
    "layout", [{"dp": 2}, pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.soak)], ids=["dp2", "tp2-pp2"]
)
def test_the_rate_is_scaled_to_what_is_in_flight_on_all_ranks_alike(folder, on_ranks, layout):
    cases = numbered(folder, [({}, layout), ({"on_host": True}, layout)])
    on_ranks("check_rate_limit", math.prod(layout.values()), cases=cases)


def test_a_trainer_that_was_replaced_writes_no_ledger(folder, on_ranks):
    run = RunFolder(folder / "begun")
    run.create()
    run.begin()
    on_ranks("check_replaced", 1)


def test_weight_decay_spares_biases_and_norms(folder, on_ranks):
    on_ranks("check_decay", 1)


def test_logits_of_all_tokens_are_never_alive(folder, on_ranks):
    on_ranks("check_logprob_memory", 1)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_learning_rate_warms_up_and_falls(shape):
    optimizer = SimpleNamespace(param_groups=[{}])
    subject = schedule(OptimizerConfig(lr=0.1, schedule=shape, warmup_steps=10), 100, optimizer)
    found = []
    for _ in range(100):
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


def test_a_warm_up_longer_than_the_run_ends_with_it():
    optimizer = SimpleNamespace(param_groups=[{}])
    subject, found = schedule(OptimizerConfig(lr=0.1, warmup_steps=30), 4, optimizer), []
    for _ in range(4):
        subject.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.025, 0.05, 0.075, 0.1])


def test_a_rank_that_does_not_come_is_an_error(folder, on_ranks):
    on_ranks("check_missing_peer", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "check", ["check_cuda_attention", "check_cuda", "check_cuda_groups", "check_cuda_logprob_memory"]
)
def test_on_cuda(folder, on_ranks, capsys, check):
    on_ranks(f"cuda_checks:{check}", 1)
    with capsys.disabled():
        print((folder / "rank-0.out").read_text())

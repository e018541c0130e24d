"""Layouts, loading and plans, without processes, against tests/support/reshard_oracle.py."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, fields
from operator import attrgetter

import pytest
import torch

from areal_megatron.checkpoint import hf
from areal_megatron.config import ConfigError
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.reshard import engine_layout, plan, trainer_layout
from areal_megatron.reshard.boxes import Box, Layout, LayoutError, Piece, expand
from areal_megatron.reshard.copies import bind, pack, unpack
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.reshard_oracle import EXPERTS, MODELS, SIZES, megatron_shards, vllm_parameters, write_model

TRAINERS = [
    MegatronSizes(),
    MegatronSizes(tp=2),
    MegatronSizes(tp=4),
    MegatronSizes(pp=2),
    MegatronSizes(dp=2),
    MegatronSizes(tp=2, pp=2),
    MegatronSizes(tp=2, pp=2, dp=2),
    MegatronSizes(tp=8),
    MegatronSizes(pp=3),
    MegatronSizes(pp=2, vpp=2),
    MegatronSizes(tp=2, cp=2),
]
EXPERT_TRAINERS = [
    MegatronSizes(dp=2, ep=2),
    MegatronSizes(tp=2, dp=2, ep=2),
    MegatronSizes(tp=2, dp=2, ep=4, etp=1),
    MegatronSizes(dp=2, etp=2),
    MegatronSizes(tp=2, pp=2, dp=4, ep=2, etp=2, vpp=2),
    MegatronSizes(tp=4, dp=2, ep=8, etp=1),
    MegatronSizes(cp=2, ep=2, pp=3),
]
ENGINES = [EngineSizes(), EngineSizes(tp=2), EngineSizes(tp=8)]
EXPERT_ENGINES = [
    EngineSizes(tp=2, expert_parallel=True),
    EngineSizes(dp=3, expert_parallel=True),
    EngineSizes(tp=2, dp=2),
]


def brief(sizes) -> str:
    """Returns a test's name for sizes: those that differ from the default."""
    return (
        "-".join(f"{f.name}{getattr(sizes, f.name)}" for f in fields(sizes) if getattr(sizes, f.name) != f.default)
        or "one"
    )


def ids(value) -> str:
    return value if isinstance(value, str) else brief(value)


def of(name, dense, experts):
    return dense + experts if name in EXPERTS else dense


TWO_KINDS = (
    "glm4-moe",
    "deepseek-v3-moe",
    "moonlight-moe",
    "glm4-flash-moe",
    "qwen3-next-moe",
    "qwen3.5",
    "qwen3.5-moe",
)
"""Models with two kinds of layers, which are planned in a few layouts alone."""
LOADS = [(name, sizes) for name in MODELS for sizes in of(name, TRAINERS, EXPERT_TRAINERS)]
PLANS = [
    (name, sizes, engine)
    for name, sizes in LOADS
    for engine in of(name, ENGINES, EXPERT_ENGINES)
    if name not in TWO_KINDS
    or (sizes in TRAINERS[5:] + EXPERT_TRAINERS[1:4] and engine in ENGINES[1:2] + EXPERT_ENGINES)
]


def is_soaked(name, sizes, engine) -> bool:
    """Two of three, of each model, layout and engine."""
    return bool((LOADS.index((name, sizes)) + (ENGINES + EXPERT_ENGINES).index(engine)) % 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name → (folder, config, tensors) of a checkpoint that transformers wrote."""
    folder = tmp_path_factory.mktemp("models")
    tensors = {name: write_model(name, folder / name) for name in MODELS}
    return {name: (folder / name, read_config(folder / name), tensors[name]) for name in MODELS}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def empty(layout: Layout, dtype=torch.float32):
    return {name: torch.full(shape, math.nan, dtype=dtype) for name, shape in layout.parameters.items()}


FUSED = [MegatronSizes(tp=2, pp=2, fused_layernorm=True, grouped_experts=True)]


@pytest.mark.parametrize(("name", "sizes"), LOADS + [(name, sizes) for name in MODELS for sizes in FUSED], ids=ids)
def test_checkpoint_loads_into_megatron_ranks(models, name, sizes):
    """Ranks that hold the same have the same layout, by which one of them loads."""
    folder, config, tensors = models[name]
    loaded = {}
    for rank, expected in enumerate(megatron_shards(tensors, config, sizes)):
        layout = trainer_layout.layout(config, sizes, rank)
        if id(expected) in loaded:
            assert layout == loaded[id(expected)]
            continue
        parameters = empty(layout)
        hf.load(parameters, layout, folder)
        assert_equal(parameters, expected)
        loaded[id(expected)] = layout


@pytest.mark.parametrize(("name", "engine"), [(n, e) for n in MODELS for e in of(n, ENGINES, EXPERT_ENGINES)], ids=ids)
def test_checkpoint_loads_into_engine_ranks(models, name, engine):
    folder, config, tensors = models[name]
    for rank in range(engine.ranks):
        layout = engine_layout.layout(config, engine, rank)
        parameters = empty(layout)
        hf.load(parameters, layout, folder)
        assert_equal(parameters, vllm_parameters(tensors, config, rank=rank, **asdict(engine)))


def arriving(link: plan.Plan, engine) -> list[plan.Bucket]:
    return [bucket for rank in range(len(engine)) for bucket in link.received_by(rank)]


def execute(buckets: list[plan.Bucket], sources, engine, dtype):
    """Sends what a plan lists, in this process; returns the elements that each engine rank received."""
    received = [0] * len(engine)
    for bucket in buckets:
        flat = torch.empty(bucket.elements, dtype=dtype)
        pack(bind((t.send for t in bucket.transfers), sources[bucket.source], flat))
        unpack(bind((t.receive for t in bucket.transfers), engine[bucket.destination], flat))
        received[bucket.destination] += bucket.elements
    return received


def slice_elements(parameters, rank):
    """Returns how many elements of an engine rank's parameters the checkpoint has: all but the vocabulary's padding."""
    total = 0
    for name, tensor in parameters.items():
        rows = len(tensor)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = min(max(SIZES["vocab_size"] - rank * rows, 0), rows)
        total += rows * tensor[0].numel()
    return total


@pytest.mark.parametrize(
    ("name", "sizes", "engine"),
    [pytest.param(*case, marks=[pytest.mark.soak] * is_soaked(*case)) for case in PLANS],
    ids=ids,
)
def test_plan_delivers_each_engine_rank_exactly_its_slice(models, name, sizes, engine, monkeypatch):
    monkeypatch.setattr(plan, "_SMALLEST_CUT", 512)
    _, config, tensors = models[name]
    sources = megatron_shards(tensors, config, sizes)
    planner = Planner(config, sizes, engine, bucket_elements=8000, engines=2)
    expected = [vllm_parameters(tensors, config, rank=rank, **asdict(engine)) for rank in range(engine.ranks)]
    first, second = planner.plan(0), planner.plan(1)
    for link in [first, second] if second != first else [first]:
        held = [{name: torch.zeros_like(tensor) for name, tensor in rank.items()} for rank in expected]
        buckets = arriving(link, held)
        received = execute(buckets, sources, held, torch.float32)
        for rank in range(engine.ranks):
            assert_equal(held[rank], expected[rank])
            assert received[rank] == slice_elements(expected[rank], rank % engine.tp)
        leaving = [bucket for rank in range(sizes.ranks) for bucket in link.sent_by(rank)]
        place = attrgetter("source", "destination", "number")
        assert sorted(buckets, key=place) == sorted(leaving, key=place)
        assert max(bucket.elements for bucket in buckets) <= 8000


def test_plan_casts_to_the_engines_dtype(models):
    _, config, tensors = models["qwen2"]
    sizes = MegatronSizes(tp=2)
    sources = megatron_shards(tensors, config, sizes)
    expected = vllm_parameters(tensors, config, tp=1, rank=0)
    engine = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in expected.items()}
    execute(arriving(Planner(config, sizes, EngineSizes()).plan(0), [engine]), sources, [engine], torch.bfloat16)
    assert_equal(engine, {name: tensor.bfloat16() for name, tensor in expected.items()})


def test_what_has_a_dtype_of_its_own_keeps_it_on_the_way(models):
    """The bias of routers is float32 everywhere; routers are float32 in engines alone, to which they travel as they
    are."""
    _, config, _ = models["glm4-moe"]
    sizes, bias = MegatronSizes(tp=2, pp=2), "model.layers.{1}.mlp.gate.e_score_correction_bias"
    planner = Planner(config, sizes, EngineSizes(tp=2), bucket_elements=3000)
    assert {*planner.destinations[0].dtypes.items()} == {
        (bias, "float32"),
        (bias.replace(".e_score_correction_bias", ".weight"), "float32"),
    }
    biases = {name for layout in planner.sources for name in layout.parameter_dtypes}
    assert biases == {f"decoder.layers.{n}.mlp.router.expert_bias" for n in (0, 1)}
    plan_of_engine = planner.plan(0)
    for rank in range(2):
        buckets = plan_of_engine.received_by(rank)
        for bucket in buckets:
            assert {t.receive.tensor == bias for t in bucket.transfers} == {bucket.dtype == "float32"}
        assert sum(b.elements for b in buckets if b.dtype) == 3 * 8
        assert {b.number for b in buckets if b.source == rank} == set(range(sum(b.source == rank for b in buckets)))


QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    "sizes",
    [
        MegatronSizes(dp=2),
        MegatronSizes(tp=2, dp=2),
        MegatronSizes(pp=2, dp=2),
        MegatronSizes(tp=2, pp=2, dp=2),
        MegatronSizes(tp=4, dp=4),
        MegatronSizes(cp=2),
        MegatronSizes(tp=2, cp=2, dp=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine_tp", [1, 2])
def test_senders_carry_the_same_load(sizes, engine_tp):
    load = [0] * sizes.ranks
    for engine in range(2):
        for transfer in Planner(QWEN3_06B, sizes, EngineSizes(tp=engine_tp)).plan(engine).transfers:
            load[transfer.source] += transfer.receive.box.size
    assert max(load) / (sum(load) / len(load)) <= 1.05


def test_all_processes_derive_the_same_plan():
    here = Planner(QWEN3_06B, MegatronSizes(tp=2, dp=2), EngineSizes(tp=2)).plan(1).digest
    code = (
        "import json, sys\n"
        "from areal_megatron.reshard.plan import Planner\n"
        "from areal_megatron.reshard.trainer_layout import MegatronSizes\n"
        "from areal_megatron.reshard.engine_layout import EngineSizes\n"
        "config = json.loads(sys.argv[1])\n"
        "sizes = MegatronSizes(tp=2, dp=2, fused_layernorm=True)\n"
        "print(Planner(config, sizes, EngineSizes(tp=2)).plan(1).digest)\n"
        "assert 'torch' not in sys.modules\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", code, json.dumps(QWEN3_06B)],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "7"},
    )
    assert there.stdout.strip() == here


ORDER = "tp-cp-ep-dp-pp"
"""megatron-core's default."""


def groups(sizes, *own):
    """Returns the groups of ranks that differ only in the coordinates `own`, in Megatron's order."""
    coordinates = [sizes.coordinates(rank) for rank in range(sizes.ranks)]
    expert = set(own) & {"etp", "ep", "edp"}
    others = [name for name in (("etp", "ep", "edp", "pp") if expert else ("tp", "cp", "dp", "pp")) if name not in own]
    found = {}
    for rank, at in enumerate(coordinates):
        found.setdefault(tuple(getattr(at, name) for name in others), []).append(rank)
    return sorted(found.values())


@pytest.mark.parametrize(
    "sizes",
    [
        MegatronSizes(tp=2, pp=3, dp=2, cp=2),
        MegatronSizes(tp=2, dp=4, ep=4),
        MegatronSizes(tp=4, pp=2, dp=2, ep=4, etp=2),
        MegatronSizes(tp=2, dp=2, ep=4, etp=1),
        MegatronSizes(tp=2, cp=2, dp=2, pp=2, ep=2, etp=1),
    ],
    ids=str,
)
def test_ranks_are_numbered_as_megatron_numbers_them(sizes):
    from megatron.core.parallel_state import RankGenerator

    dense = RankGenerator(tp=sizes.tp, ep=1, dp=sizes.dp, pp=sizes.pp, cp=sizes.cp, order=ORDER)
    for name in ("tp", "cp", "dp", "pp"):
        assert groups(sizes, name) == sorted(dense.get_ranks(name))
    edp = sizes.ranks // (sizes.expert_tp * sizes.ep * sizes.pp)
    experts = RankGenerator(tp=sizes.expert_tp, ep=sizes.ep, dp=edp, pp=sizes.pp, cp=1, order=ORDER)
    for ours, theirs in (("etp", "tp"), ("ep", "ep"), ("edp", "dp")):
        assert groups(sizes, ours) == sorted(experts.get_ranks(theirs))


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "stages"),
    [
        (28, 4, 1, [7, 7, 7, 7]),
        (94, 4, 1, [23, 24, 24, 23]),
        (61, 4, 1, [15, 16, 16, 14]),
        (5, 2, 1, [3, 2]),
        (5, 4, 1, [2, 1, 1, 1]),
        (8, 2, 2, [4, 4]),
        (94, 4, 2, [24, 24, 24, 22]),
        (10, 4, 2, [4, 2, 2, 2]),
        (6, 2, 2, [4, 2]),
    ],
)
def test_layers_are_divided_over_stages_as_megatron_divides_them(layers, pp, vpp, stages):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    sizes = MegatronSizes(pp=pp, vpp=vpp)
    assert sizes.stage_sizes(layers) == stages
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
        **sizes.uneven_stages(layers),
    )
    for stage in range(pp):
        for chunk, held in enumerate(sizes.chunk_layers(layers, stage)):
            virtual = chunk if vpp > 1 else None
            assert held.start == get_transformer_layer_offset(config, virtual, stage)
            assert len(held) == get_num_layers_to_build(config, virtual, stage)
    assert sorted(layer for stage in range(pp) for held in sizes.chunk_layers(layers, stage) for layer in held) == list(
        range(layers)
    )


def test_transposed_and_stacked_parameters_are_pieces():
    canonical = torch.arange(12.0).reshape(3, 4)
    stack = torch.zeros(2, 4, 3)
    piece = Piece("experts", Box((1, 0, 0), (2, 4, 3)), "w{}", Box((5, 0, 0), (6, 3, 4)), (0, 2, 1))
    ((name, region, view),) = piece.tensors({"experts": stack})
    assert name == "w5" and canonical[region].shape == (3, 4)
    view.copy_(canonical)
    assert torch.equal(stack[1], canonical.T) and not stack[0].any()
    ((_, region, view),) = piece.narrow(Box((5, 1, 2), (6, 3, 3))).tensors({"experts": stack})
    assert torch.equal(view, canonical[region]) and view.shape == (2, 1)


def test_sources_that_do_not_tile_the_model_are_refused():
    config = dict(QWEN3_06B, num_hidden_layers=1)
    half = trainer_layout.layout(config, MegatronSizes(tp=2), 0)
    with pytest.raises(LayoutError, match=r"embed_tokens.weight of shape \[151936, 1024\]"):
        plan.needs([half], [engine_layout.layout(config, EngineSizes(), 0)])


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, {}, "config.json names 'MambaForCausalLM', which has no table"),
        ({"hidden_size": None}, {}, "needs a positive integer hidden_size"),
        ({"num_attention_heads": 15}, {}, "no multiple of num_key_value_heads=8"),
        ({"attention_bias": True}, {}, "sets attention_bias"),
        (
            {"num_hidden_layers": 2},
            {"pp": 3},
            "trainer.pp: num_hidden_layers=2 of the model cannot be divided over 3 stages",
        ),
        ({}, {"tp": 3}, "trainer.tp: 3 does not divide num_attention_heads=16"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, {"tp": 4}, "neither a divisor nor a multiple"),
    ],
)
def test_models_and_sizes_that_cannot_work_are_refused(change, sizes, message):
    with pytest.raises(ConfigError, match=message):
        trainer_layout.layouts(QWEN3_06B | change, MegatronSizes(**sizes))


def test_wrong_shapes_are_named(tmp_path):
    write_model("qwen2", tmp_path)
    config = read_config(tmp_path)
    layout = trainer_layout.layout(config, MegatronSizes(), 0)
    parameters = empty(layout)
    parameters["decoder.final_layernorm.weight"] = torch.zeros(7)
    with pytest.raises(LayoutError, match=r"decoder.final_layernorm.weight has shape \[7\], expected \[64\]"):
        hf.load(parameters, layout, tmp_path)
    other = trainer_layout.layout(config | {"vocab_size": 300}, MegatronSizes(), 0)
    with pytest.raises(
        ConfigError, match=r"embed_tokens.weight has shape \[203, 64\], config.json asks for \[300, 64\]"
    ):
        hf.load(empty(other), other, tmp_path)
    deeper = trainer_layout.layout(config | {"num_hidden_layers": 5}, MegatronSizes(), 0)
    with pytest.raises(ConfigError, match=r"has no tensor model\.layers\.4"):
        hf.load(empty(deeper), deeper, tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: .*nowhere has neither .* nor model\.safetensors"):
        hf.load(empty(layout), layout, tmp_path / "nowhere")


@pytest.mark.parametrize("name", MODELS)
def test_canonical_tensors_are_the_checkpoints(models, name):
    _, config, tensors = models[name]
    assert expand(architecture(config).canonical) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}

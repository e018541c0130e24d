"""The memory plan against models that transformers builds, staging as engines reserve it, and sums by hand."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml

from areal_megatron.config import (
    Config,
    ConfigError,
    CriticConfig,
    DataConfig,
    LoraConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    PenaltyConfig,
    PPOConfig,
    ReshardConfig,
    RolloutConfig,
    ServedConfig,
    ServedModelConfig,
    TrainerConfig,
    config_file,
)
from areal_megatron.engine import kv_cache
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.planning import plan
from areal_megatron.planning.forecast.accelerators import accelerator
from areal_megatron.planning.memory import activations, engine_memory, plan_memory
from areal_megatron.planning.memory.engine import kv_tokens
from areal_megatron.planning.memory.parts import GIB
from areal_megatron.planning.memory.served import served_memory
from areal_megatron.planning.memory.trainer import (
    checkpoint_bytes,
    held,
    published_memory,
    stage_memory,
    trainer_memory,
)
from areal_megatron.planning.pools import Node
from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.session import ROOM
from areal_megatron.reshard.staging import Full, Streamed
from areal_megatron.reshard.trainer_layout import MegatronSizes

ROOT = Path(__file__).resolve().parents[3]
HF = {
    name: read_config(ROOT / "configs/models" / name)
    for name in ("Qwen2.5-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B-Thinking-2507")
}
DENSE, EXPERTS = HF["Qwen2.5-32B"], HF["Qwen3-235B-A22B-Thinking-2507"]
CLASSES = {"Qwen2ForCausalLM": transformers.Qwen2Config, "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig}
CLUSTER = [
    "configs/tiny_cpu.yaml",
    "model.path=configs/models/Qwen2.5-32B",
    "model.dtype=bfloat16",
    "trainer.tp=8",
    "trainer.pp=2",
    "trainer.dp=12",
    "trainer.recompute=full",
    "trainer.microbatch_tokens=32768",
    "rollout.engines=24",
    "rollout.tp=8",
    "rollout.max_new_tokens=27648",
    "batch_size=512",
    "--nodes",
    "48",
    "--gpus",
    "8",
    "--gpu-gb",
    "80",
]


def config(trainer=None, rollout=None, dtype="bfloat16", device="cuda", **rest):
    return Config(
        name="x",
        updates=1,
        model=ModelConfig("m", dtype),
        data=DataConfig("t"),
        machine=MachineConfig(device=device),
        trainer=TrainerConfig(**{"recompute": "full", **(trainer or {})}),
        rollout=RolloutConfig(**(rollout or {})),
        **rest,
    )


@pytest.fixture(scope="module")
def built():
    """The number of elements of each parameter of each model, as transformers builds it."""
    result = {}
    for name, hf in HF.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(CLASSES[hf["architectures"][0]](**hf))
        result[name] = {name: p.numel() for name, p in model.named_parameters()}
    return result


@pytest.mark.parametrize(("name", "tp", "pp"), [*product(HF, (1, 2, 4), (1, 2, 4))])
def test_parameters_of_all_ranks_are_the_models(built, name, tp, pp):
    sizes = MegatronSizes(tp=tp, pp=pp)
    padding = 2 * (sizes.padded_vocabulary(HF[name]["vocab_size"]) - HF[name]["vocab_size"]) * HF[name]["hidden_size"]
    # every tensor-parallel rank has the norms and the routers
    again = (tp - 1) * sum(n for key, n in built[name].items() if "norm" in key or "mlp.gate." in key)
    found = tp * sum(held(HF[name], sizes, stage).all for stage in range(pp))
    assert found == sum(built[name].values()) + padding + again


@pytest.mark.parametrize("name", HF)
def test_parts_in_bytes_of_a_parameter(built, name):
    """Bytes per parameter: 2 of weights, 4 of gradients, 12 of optimizer states, which data parallelism shards; and 14
    in a checkpoint."""
    parameters = sum(built[name].values())
    plan = stage_memory(config({"dp": 4}), HF[name], 0, on_cuda=True)
    assert plan.of("parameters") == pytest.approx(2 * parameters, rel=1e-4)
    assert plan.of("gradients") == pytest.approx(4 * parameters, rel=0.03)
    assert plan.of("optimizer") == pytest.approx(12 * parameters / 4, rel=1e-4)
    assert plan_memory(config(), HF[name]).checkpoint == 14 * parameters
    assert plan_memory(config(dtype="float32"), HF[name]).checkpoint == 16 * parameters


@pytest.mark.parametrize(
    ("gib", "dtype", "expected"),
    [
        # 12 bytes a logit; the gradient of 76,032 rows of the output layer, and that of a tile's in float32; hidden
        # states of a micro-batch: gathered, picked, and their gradient
        (180, "bfloat16", 12 * 2**28 + (2 * 76032 + 4 * 16384) * 5120 + (2 + 2 + 4 + 2) * 32768 * 5120),
        (80, "bfloat16", 12 * 2**27 + (2 * 76032 + 4 * 8192) * 5120 + (2 + 2 + 4 + 2) * 32768 * 5120),
        (0, "float32", 12 * 2**27 + (4 * 76032 + 4 * 8192) * 5120 + (4 + 4 + 4) * 32768 * 5120),
    ],
)
def test_log_probabilities_take_more_of_a_larger_gpu(gib, dtype, expected):
    asked = config({"tp": 2, "pp": 2, "microbatch_tokens": 32768}, dtype=dtype)
    assert stage_memory(asked, DENSE, 1, True, gib).of("log-probabilities") == expected
    assert not stage_memory(asked, DENSE, 0, True, gib).of("log-probabilities")


def test_a_kl_to_the_reference_takes_a_second_copy_of_the_parameters():
    plain, asked = (
        stage_memory(config({"tp": 2}, ppo=PPOConfig(penalty=penalty)), DENSE, 0, on_cuda=True)
        for penalty in (PenaltyConfig(entropy=0.1), PenaltyConfig(kl=0.1))
    )
    assert not plain.of("reference") and asked.of("reference") == asked.of("parameters")
    assert asked.total - plain.total == asked.of("parameters")


def test_a_teacher_takes_its_own_parameters(tmp_path):
    teacher = PenaltyConfig(kl=1.0, kl_model=str(ROOT / "configs/models/Qwen3-30B-A3B"))
    asked = config({"tp": 2, "pp": 2}, ppo=PPOConfig(penalty=teacher))
    for stage in (0, 1):
        expected = 2 * held(HF["Qwen3-30B-A3B"], MegatronSizes(tp=2, pp=2), stage).all
        assert stage_memory(asked, DENSE, stage, on_cuda=True).of("reference") == expected


def test_served_models_are_counted_and_must_have_room_for_a_question(built, tmp_path):
    """Their weights and the KV cache, and nothing for updates. A quantized one may be smaller than counted."""

    def found(gpu_gib=80, **model):
        path = str(ROOT / "configs/models/Qwen2.5-32B")
        judge = ServedModelConfig(path, **{"tp": 2, "max_length": 32768, **model})
        return served_memory(config(served=ServedConfig(judge=judge), rollout={"max_new_tokens": 1000}), gpu_gib)

    judge, parameters = found()["judge"], sum(built["Qwen2.5-32B"].values())
    assert judge.of("weights") == pytest.approx(2 * parameters / 2, rel=1e-3)
    assert not judge.of("staging") and not judge.of("link")
    assert judge.total == int(0.92 * 80 * GIB)
    per_token = 2 * 2 * DENSE["num_hidden_layers"] * DENSE["num_key_value_heads"] * 128 / 2
    tokens = int(re.match(r"([\d,]+) tokens", judge.parts[-1].note)[1].replace(",", ""))
    assert judge.parts[-1].name == "KV cache" and judge.of("KV cache") / per_token == pytest.approx(tokens, rel=1e-3)
    with pytest.raises(ConfigError, match=r"^served.judge.tp: a rank has 2.\d\d GiB left for its KV cache on a GPU of"):
        found(40)
    assert found(40, max_length=4096) and found(40, tp=4) and found(40, vllm={"quantization": "fp8"})
    assert found(0)["judge"].of("weights") == judge.of("weights")


@pytest.mark.parametrize("name", HF)
def test_a_critic_is_another_model_but_for_the_output_layer(built, name):
    parameters = sum(n for key, n in built[name].items() if "lm_head" not in key) + HF[name]["hidden_size"]
    plain, asked = (config({"dp": 4}, ppo=PPOConfig(critic=CriticConfig(lr=lr))) for lr in (0, 1e-5))
    without, found = (stage_memory(each, HF[name], 0, on_cuda=True) for each in (plain, asked))
    assert not without.of("critic") and found.of("critic") == pytest.approx((2 + 4 + 12 / 4) * parameters, rel=1e-3)
    assert found.total - without.total == found.of("critic")
    checkpoints = [plan_memory(each, HF[name]).checkpoint for each in (plain, asked)]
    assert checkpoints[1] - checkpoints[0] == 14 * parameters


def test_states_of_experts_are_sharded_over_their_own_replicas(built):
    """8 ranks with ep=4 and etp=1: each expert is whole, on two ranks."""
    experts = sum(n for name, n in built["Qwen3-30B-A3B"].items() if ".experts." in name)
    dense = sum(built["Qwen3-30B-A3B"].values()) - experts
    plan = stage_memory(config({"tp": 2, "dp": 4, "ep": 4, "etp": 1}), HF["Qwen3-30B-A3B"], 0, on_cuda=True)
    assert plan.of("parameters") == pytest.approx(2 * (dense / 2 + experts / 4), rel=0.01)
    assert plan.of("optimizer") == pytest.approx(12 * (dense / 2 / 4 + experts / 4 / 2), rel=0.01)


@pytest.mark.parametrize(
    ("name", "tp", "streamed", "update"),
    [*product(HF, (1, 4, 8), (False, True), ["full"]), *product(HF, [8], [True], ["auto", "delta"])],
)
def test_engine_weights_and_staging(built, name, tp, streamed, update):
    staging = "streamed" if streamed else "full"
    asked = config(rollout={"tp": tp}, reshard=ReshardConfig(staging=staging, update=update))
    plan = engine_memory(asked, HF[name], 0, on_cuda=True)
    layout = engine_layout.layout(HF[name], EngineSizes(tp=tp), 0)
    parameters = {
        key: torch.empty(shape, dtype=torch.bfloat16, device="meta") for key, shape in layout.parameters.items()
    }
    assert plan.of("weights") == 2 * sum(p.numel() for p in parameters.values())
    assert plan.of("weights") == pytest.approx(2 * sum(built[name].values()) / tp, rel=0.02)
    kind = Streamed if streamed else Full
    assert plan.of("staging") == kind.reserve(parameters, ROOM if update == "delta" else 0).nbytes


def test_engines_stage_adapters_alone():
    """Rank 12 on query and output projections of Qwen2.5-32B over 2 ranks: 64 layers; 5,120 wide, with 40 heads and 8
    key heads of 128. vLLM's slots have rank 16, and those of keys and values too."""
    lora = LoraConfig(rank=12, targets="q_proj,o_proj")
    plain, asked = (
        engine_memory(config(rollout={"tp": 2}, **changed), DENSE, 80 * GIB, on_cuda=True)
        for changed in ({}, {"lora": lora})
    )
    received = 64 * 12 * ((5120 + 2560) + (2560 + 5120))
    slot = 64 * 16 * (3 * 5120 + 2560 + 2 * 512 + (2560 + 5120))
    assert asked.of("weights") == plain.of("weights") == plain.of("staging")
    assert asked.of("staging") == 2 * received and asked.of("adapters") == 2 * (slot + received)
    assert asked.of("KV cache") > plain.of("KV cache") + 0.9 * plain.of("staging")
    assert engine_memory(config(rollout={"tp": 2}, lora=replace(lora, merge=True)), DENSE, 0, True).of("adapters") == 0


def test_keys_and_values_by_hand():
    """Qwen2.5-32B over 8 ranks: one of 8 key heads of 128, 64 layers, two tensors, two bytes: 32 KiB a token."""
    plan = plan_memory(config({"tp": 8, "dp": 2}, {"tp": 8}), DENSE, 80)
    left = plan.engine.of("KV cache")
    assert sum(part.bytes for part in plan.engine.parts) == pytest.approx(0.92 * 80 * GIB, abs=2)
    tokens = int(re.search(r"KV cache .*?([\d,]+) tokens", plan.table())[1].replace(",", ""))
    assert tokens == left // (32 * 1024) // 16 * 16
    # 4 key heads over 16 ranks: each has a whole one
    sixteen = engine_memory(config(rollout={"tp": 16}), EXPERTS, 80 * GIB, on_cuda=True)
    assert f"{sixteen.of('KV cache') // (2 * 94 * 128 * 2) // 16 * 16:,} tokens" in sixteen.parts[-1].note


def test_states_of_linear_attention_by_hand():
    """Qwen3.5-35B-A3B over 2 ranks: 16 value heads of 128 × 128 and 3 inputs of 4,096 channels. A block has as many
    tokens of a key head of 256 as a state is large, is for the 10 layers with attention or 10 of the 30 others, and one
    is added to these 3 for an answer that goes to its next."""
    hf = read_config(ROOT / "configs/models/Qwen3.5-35B-A3B")
    asked = config(rollout={"tp": 2, "max_running": 40})
    assert kv_cache.block_tokens(asked, hf, on_cuda=True) == 1056 == 16 * -(-(16 * 2**14 * 4 + 3 * 4096 * 2) // 2**14)
    block = 1056 * 1024 * 10
    assert kv_cache.block_bytes(asked, hf, on_cuda=True) == block
    assert kv_tokens(asked, hf, 500 * block, on_cuda=True) == (500 - 3 - 3 * 40) * 1056
    assert kv_tokens(asked, hf, 500 * block, on_cuda=True, running=1) == (500 - 3 - 3) * 1056
    assert kv_tokens(asked, hf, 100 * block, on_cuda=True) == 0

    def tokens(**vllm):
        return kv_cache.block_tokens(config(rollout={"tp": 2, "vllm": vllm}), hf, on_cuda=True)

    assert tokens(mamba_ssm_cache_dtype="bfloat16") == 544
    assert tokens(speculative_config={"method": "mtp", "num_speculative_tokens": 2}) == 1072
    without = config(rollout={"tp": 2, "vllm": {"enable_prefix_caching": False}})
    assert kv_tokens(without, hf, 500 * block, on_cuda=True, running=40) == (500 - 3 * 40) * 1056
    half = read_config(ROOT / "configs/models/Qwen3-Next-80B-A3B-Instruct")
    assert kv_cache.block_tokens(asked, half, True) == 544, "states in the dtype of the model"
    assert kv_cache.block_tokens(asked, half | {"mamba_ssm_dtype": "float32"}, True) == 544


def test_a_cpu_engine_takes_what_its_requests_need_and_no_more_than_its_share():
    """Qwen2.5-32B: 256 KiB a token, 8 MiB a block of 32; an answer of 1,024 + 1,000 tokens has 64 blocks."""
    block = 8 * 2**20

    def blocks(memory, max_running=10, engines=1, tp=1, **rest):
        asked = config(
            rollout={"max_new_tokens": 1000, "max_running": max_running, "engines": engines, "tp": tp, **rest},
            device="cpu",
        )
        return kv_cache.cpu_bytes(asked, DENSE, memory) / (block // tp)

    assert blocks(10**15) == 1 + 10 * 64
    assert blocks(10**15, tp=2) == 1 + 10 * 64
    assert blocks(4 * 400 * block) == 400 and blocks(4 * 400 * block, engines=4) == 100
    assert blocks(4 * 400 * block, engines=2, tp=2) == 200, "half a block on each rank"
    assert blocks(block) == blocks(10**15, max_running=1) == 1 + 64, "one answer at least"
    asked = config(rollout={"max_new_tokens": 1000, "group_size": 1}, device="cpu")
    engine = plan_memory(asked, DENSE, memory=500 * GIB).engine
    assert engine.of("KV cache") == 125 * GIB
    with pytest.raises(
        ConfigError, match=r"rollout.max_new_tokens: an engine needs .* GiB .* this machine has 2.00: lower it"
    ):
        plan_memory(asked, DENSE, memory=2 * GIB)
    assert 2**28 < kv_cache.machine_bytes() < 2**50


def test_virtual_stages_cost_what_the_paper_says():
    """Korthikanti et al., Section 4.2.3: 1 + (p − 1)/(p · m) of all layers on the first stage of p, m virtual ones."""
    for pp, vpp in product((2, 4, 8), (1, 2, 4)):
        asked = config({"pp": pp, "vpp": vpp}, batch_size=512)
        share = activations.in_flight(asked, 0) / (pp * vpp)
        assert share == pytest.approx(1 + ((pp - 1) / (pp * vpp) if vpp > 1 else 0))
        assert activations.in_flight(asked, pp - 1) == (1 if vpp == 1 else (vpp - 1) * pp + 1)


def test_the_first_stage_holds_no_more_passes_than_there_are_micro_batches():
    assert activations.in_flight(config({"pp": 8, "dp": 2}, batch_size=16), 0) == 2


def test_full_recomputation_keeps_two_bytes_per_element_and_layer():
    """2 · s · b · h bytes per layer (Korthikanti et al., Section 5), divided by tp with sequence parallelism."""
    layer = activations.layer_of(config({"tp": 4}), architecture(DENSE), 0, True)
    assert layer.kept("full") == 2 * DENSE["hidden_size"] / 4
    kept = [layer.kept(what) for what in ("none", "elementwise", "mlp", "full")]
    assert kept == sorted(kept, reverse=True) and kept[0] > 10 * kept[-1]


@pytest.mark.parametrize(("cap", "batch", "tokens"), [(32768, 512, 32768), (8192, 512, 28672), (10**7, 4, 28672)])
def test_the_largest_micro_batch(cap, batch, tokens):
    """No smaller than the longest trajectory and no larger than a mini-batch, here a quarter of the batch."""
    assert activations.microbatch_tokens(config({"microbatch_tokens": cap}, batch_size=batch)) == tokens


def test_more_replicas_and_recomputation_never_cost_memory():
    for name, tp, pp in product(HF, (1, 4), (1, 4)):
        ep = {"ep": 8, "etp": 1} if "experts" in str(HF[name]) else {}
        totals = [
            trainer_memory(config({"tp": tp, "pp": pp, "dp": dp, **ep}), HF[name], True).total for dp in (8, 16, 64)
        ]
        assert totals == sorted(totals, reverse=True)
        full, none = (
            trainer_memory(config({"tp": tp, "pp": pp, "dp": 8, "recompute": recompute, **ep}), HF[name], True).total
            for recompute in ("full", "none")
        )
        assert full < none


@pytest.mark.parametrize(
    ("asked", "hf", "message"),
    [
        (
            config({"tp": 8, "pp": 2, "dp": 12, "recompute": "none"}, {"tp": 8}),
            DENSE,
            r"trainer rank \(stage 0 of 2, ranks 0–95\) needs 103.61 GiB \(activations 88.04.*a GPU has 80, of "
            r"which it may need 92%, 73.60: with (trainer.recompute=elementwise) it is",
        ),
        (
            config({"dp": 16}, {"tp": 8}),
            DENSE,
            r"needs .* GiB .*a GPU has 80, .*: with (trainer.pp=\d+ dp=\d+|trainer.tp=\d+ dp=\d+)",
        ),
        (
            config({"tp": 8}, {"tp": 8}),
            DENSE,
            r"needs 85.90 GiB \(optimizer 45.78.*with (trainer.dp=2 recompute=full) on 2 times as many GPUs",
        ),
        (
            config({"tp": 8, "dp": 2}, {"tp": 1}),
            DENSE,
            r"engine rank has -53.* GiB left for its KV cache .* with (rollout.tp=2 engines=1) ",
        ),
        (
            config({"tp": 8, "dp": 2}, {"tp": 2, "max_new_tokens": 100000}),
            DENSE,
            r"engine rank has .* an answer may have 101,024 with its prompt; "
            r"with (reshard.staging=streamed|rollout.tp=4 engines=1)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_advice_that_works(asked, hf, message):
    with pytest.raises(ConfigError, match=message) as error:
        plan_memory(asked, hf, 80)
    assert "\n" not in str(error.value)
    advice = re.search(message, str(error.value))[1]
    section = advice.split(".")[0]
    values = {
        key: yaml.safe_load(value) for key, value in (item.split("=") for item in advice.partition(".")[2].split())
    }
    if section:
        plan_memory(replace(asked, **{section: replace(getattr(asked, section), **values)}), hf, 80)


def test_a_tenth_less_of_a_gpu_than_a_trainer_needs_is_too_little_and_so_is_a_gap_of_a_twentieth():
    """Micro-batches of every length leave gaps in the allocator: 92% of a GPU is the most that is planned."""
    asked = config({"tp": 8, "dp": 8}, {"tp": 8, "engines": 8})
    needed = plan_memory(asked, DENSE, 43).trainer.total / GIB
    plan_memory(asked, DENSE, needed / 0.919)
    for share in (0.921, 0.95, 0.99):
        with pytest.raises(ConfigError, match=rf"needs {needed:.2f} GiB .* may need 92%, .*: with trainer\."):
            plan_memory(asked, DENSE, needed / share)


def test_links_by_hand():
    """12 replicas and 12 engines, then 24: a trainer rank sends to one or two engines, and there to one of 8 ranks for
    each of its own pipeline stage. An engine rank takes from one rank of either stage."""
    mib, hf = 2**20, DENSE | {"vocab_size": 148 * 1024}  # the eighths of the vocabulary are the same on both sides
    for engines, links in ((12, 1), (24, 2)):
        asked = config({"tp": 8, "pp": 2, "dp": 12}, {"tp": 8, "engines": engines})
        trainer, engine = stage_memory(asked, hf, 0, True), engine_memory(asked, hf, 0, True)
        assert trainer.of("links") == links * (64 + 16) * mib
        assert trainer.of("sending weights") == links * 2 * 64 * mib
        assert engine.of("link") == 2 * (64 + 2 * 16) * mib
        assert not trainer.of("looking for changes"), "nobody looks over NCCL"
        for others in ({"update": "delta"}, {"link": "host"}):
            looking = stage_memory(replace(asked, reshard=ReshardConfig(**others)), hf, 0, True)
            assert looking.of("looking for changes") == 32 * mib * (2 + 1) + 4 * mib * (8 + 4 + 4 + 4 * 2)
    assert not stage_memory(asked, hf, 0, on_cuda=False).of("links")
    assert stage_memory(asked, hf, 0, on_cuda=False).of("sending weights") == 2 * 2 * 8 * mib
    supervised = config({"tp": 8, "pp": 2, "dp": 12}, mode="sft")
    assert not {"links", "sending weights"} & {part.name for part in stage_memory(supervised, hf, 0, True).parts}


def test_what_was_published_last_is_in_blocks_of_pinned_memory():
    asked = config({"tp": 8, "pp": 2, "dp": 12}, {"tp": 8, "engines": 12})
    assert not published_memory(asked, DENSE, on_cuda=True), "nothing is kept for NCCL"
    asked = replace(asked, reshard=ReshardConfig(update="delta"))
    exact = published_memory(asked, DENSE, on_cuda=False)
    kept, pinned = exact * 16 / 17, published_memory(asked, DENSE, on_cuda=True)
    blocks = (pinned - (exact - kept)) / GIB
    assert abs(blocks - round(blocks)) < 1e-6
    assert kept / GIB < blocks < kept / GIB * 1.07 + 1
    assert not published_memory(replace(asked, reshard=ReshardConfig(update="full")), DENSE, on_cuda=True)


def test_where_nothing_helps_it_says_so():
    with pytest.raises(ConfigError, match="ask for more of them, or for larger ones"):
        plan_memory(config({"tp": 8}), DENSE, 1)
    assert plan_memory(config({"tp": 8}), DENSE, 0).gpu_gib == 0


LONG = read_config(ROOT / "configs/models/DeepSeek-R1-Distill-Qwen-7B")
"""The sizes of Qwen2.5-7B."""


def long_answers(mode, **trainer):
    rollout = {"tp": 2, "max_new_tokens": 130048, "max_running": 16}
    trainer = {"recompute": "auto", "microbatch_tokens": 131072, **trainer}
    return config(trainer, rollout, mode=mode, batch_size=64)


@pytest.mark.parametrize("mode", ["sft", "rl"])
def test_an_answer_of_131072_tokens_fits_8_gpus_with_context_parallelism_alone(mode):
    assert long_answers(mode).longest_sequence == 131072
    with pytest.raises(ConfigError, match=r"needs (79|80).\d\d GiB .*: with trainer.cp=2 dp=2 it is 5\d.\d\d$"):
        plan_memory(long_answers(mode, tp=2, dp=4), LONG, 80)
    with pytest.raises(ConfigError, match=r"needs 136.*: with trainer.tp=4 dp=2 it is"):
        plan_memory(long_answers(mode, dp=8), LONG, 80)
    for layout in ({"cp": 2, "tp": 2, "dp": 2}, {"cp": 4, "tp": 2}, {"cp": 8}):
        found = plan_memory(long_answers(mode, **layout), LONG, 80)
        assert found.trainer.total <= 0.9 * 80 * GIB, layout
        assert f"{131072 // layout['cp']:,} tokens of {layout['cp']} ranks each" in found.table()


def test_context_parallel_ranks_share_tokens_and_optimizer_states_but_no_parameters():
    one, four = (
        stage_memory(config({"cp": cp, "tp": 2, "dp": 4 // cp}, mode="sft"), LONG, 0, on_cuda=True) for cp in (1, 4)
    )
    for part in ("parameters", "gradients", "optimizer"):
        assert one.of(part) == four.of(part), "4 ranks hold the same parameters either way"
    layers = [activations.layer_of(config({"cp": cp}), architecture(LONG), 0, True) for cp in (1, 4)]
    for what in ("none", "elementwise", "mlp", "full"):
        kept = [
            activations.microbatch_tokens(asked) * activations.kept(asked, layer, 0)
            for layer, asked in zip(
                layers, (config({"cp": cp, "recompute": what}, mode="sft") for cp in (1, 4)), strict=True
            )
        ]
        assert kept[0] == 4 * kept[1]
    # keys and values of all ranks are there for one layer at a time: 4 heads of 128 each, six times
    attention = 2 * (2 * 3584 + 2 * 512) + 6 * 4 * 2 * 2 * 512
    assert layers[1].passing == max(attention, 4 * 2 * 18944)
    assert four.of("CUDA and NCCL") - one.of("CUDA and NCCL") > 0


def test_ranks_of_one_row_on_several_nodes_are_told(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = [
        *CLUSTER[:-6],
        f"model.path={ROOT}/configs/models/DeepSeek-R1-Distill-Qwen-7B",
        "mode=sft",
        "trainer.tp=4",
        "trainer.pp=1",
        "--gpus",
        "8",
        "--gpu-gb",
        "80",
    ]
    assert plan.main([*arguments, "trainer.cp=4", "trainer.dp=1", "--nodes", "2"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: trainer.cp: the 16 ranks of tp=4 × cp=4 are on 2 nodes, ")
    assert plan.main([*arguments, "trainer.cp=2", "trainer.dp=2", "--nodes", "2"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ""),
        (["rollout.max_running=500"], ""),
        (
            ["rollout.max_running=5000"],
            r"5000, but the KV cache of an engine holds \d+\.\d answers of .*staging=streamed",
        ),
        (
            ["rollout.vllm.kv_cache_memory_bytes=4000000000"],
            r"64, but the KV cache of an engine holds 4\.\d answers ",
        ),
        (
            ["rollout.max_running=5000", "reshard.staging=streamed"],
            r"a larger rollout.tp or shorter answers$",
        ),
        (["mode=sft"], ""),
    ],
)
def test_caches_for_fewer_answers_than_may_run_are_told(monkeypatch, overrides, told):
    """By the plan: the command would start a process that has vLLM check its option, too."""
    monkeypatch.chdir(ROOT)
    asked = config_file.load(CLUSTER[0], [*CLUSTER[1:-6], *overrides])
    asked.machine.device = "cuda"
    nodes = [Node(f"node{number:02}", tuple(range(8))) for number in range(1, 49)]
    said = plan.plan(asked, nodes, gpu_gib=80, weights=False).warnings
    assert len(said) == bool(told)
    assert not told or re.search(rf"^rollout\.max_running: .*{told}", said[0]), said


def test_ranks_on_cpu_that_need_more_than_the_machine_are_told(monkeypatch):
    """Qwen2.5-32B in float32: 32.8 billion parameters, each with its gradient and two moments."""
    monkeypatch.chdir(ROOT)
    sizes = ["model.path=configs/models/Qwen2.5-32B", "machine.device=cpu", "trainer.dp=2"]
    asked = config_file.load("configs/tiny_sft.yaml", sizes)
    said = plan.plan(asked, [Node("here", (0, 1))], weights=False)
    [told] = said.warnings
    needed = float(re.search(r"^memory: .* need ([\d,.]+) GiB together", told)[1].replace(",", ""))
    assert needed == pytest.approx(2 * said.memory.trainer.total / GIB, rel=1e-4)
    assert needed > 2 * 32.7e9 * (4 + 4 + 8 / 2) / GIB
    both = 2 * said.memory.trainer.total
    assert "lower trainer.microbatch_tokens=" in plan.overfull(asked, said.placement, said.memory, both - 1)
    assert not plan.overfull(asked, said.placement, said.memory, both)
    apart = plan.plan(asked, [Node("one", (0,)), Node("two", (0,))], weights=False)
    assert not plan.overfull(asked, apart.placement, apart.memory, both // 2), "each has a machine of its own"


def test_a_rate_that_contradicts_adams_epsilon_is_told(capsys, monkeypatch):
    """By default an element with a small gradient moves by a part of the rate only."""
    monkeypatch.chdir(ROOT)
    for overrides, told in (
        (["optimizer.eps=1e-8"], True),
        ([], False),
        (["optimizer.eps=1e-8", "optimizer.lr=5e-6"], False),
        (["optimizer.eps=1e-8", "mode=sft"], False),
        (["optimizer.eps=1e-8", "mode=driven"], False),
    ):
        assert plan.main([*CLUSTER, *overrides]) == 0
        said = capsys.readouterr().err
        assert said.count("\n") == told and said.startswith("warning: optimizer.lr: with optimizer.eps=1e-08 " * told)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["ppo.algorithm=gspo"], ""),
        (["ppo.algorithm=gspo", "ppo.clip_high=0.2"], "ppo.clip_high: 0.2, where gspo is published with 0.0004"),
        (["ppo.algorithm=gspo", "ppo.clip_high=3e-3"], ""),
        (["ppo.algorithm=cispo", "ppo.clip_high=0.28"], "ppo.clip_high: 0.28, where cispo is published with 4"),
        (["ppo.algorithm=dapo", "ppo.clip_low=1", "ppo.clip_high=1e9"], ""),
    ],
)
def test_a_clip_of_another_algorithm_is_told(capsys, monkeypatch, overrides, told):
    monkeypatch.chdir(ROOT)
    assert plan.main([*CLUSTER, *overrides]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {told}") and said.count("\n") == 1 if told else not said


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ""),
        (["ppo.algorithm=gspo"], "the bounds of gspo have no effect"),
        (["ppo.algorithm=sapo", "rollout.max_staleness=0"], "the bounds of sapo have no effect"),
        (["optimizer.staleness_kl=0"], "set optimizer.staleness_kl"),
        (["optimizer.staleness_kl=0", "rollout.max_staleness=0"], ""),
        (["optimizer.staleness_kl=0", "ppo.objective=naive"], ""),
    ],
)
def test_bounds_without_effect_are_told(capsys, monkeypatch, overrides, told):
    """With one mini-batch; with two, the ratio moves in between."""
    monkeypatch.chdir(ROOT)
    for count, expected in ((1, told), (2, "")):
        assert plan.main([*CLUSTER, *overrides, f"ppo.minibatches={count}"]) == 0
        said = capsys.readouterr().err
        assert said.count("\n") == bool(expected) and expected in said
        assert not expected or said.startswith("warning: ppo.minibatches: with 1 and ppo.objective=decoupled")


def test_what_limits_the_learning_rate_is_told(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for override, told in (("seed=1", True), ("rollout.max_staleness=0", False), ("optimizer.staleness_kl=0", False)):
        assert plan.main([*CLUSTER, override]) == 0
        assert ("\noptimizer.staleness_kl: rates up to 0.0001 are scaled" in capsys.readouterr().out) == told


def test_auto_recomputes_as_little_as_fits():
    asked, kinds = config({"tp": 2, "dp": 24, "recompute": "auto"}, {"tp": 2}), []
    for gib in (45, 48, 50, 55, 60, 65, 70, 75, 80, 90, 120, 180):
        found = plan_memory(asked, LONG, gib)
        decided, total = found.recompute.apply(asked), found.trainer.total
        kinds.append(found.recompute)
        assert decided.trainer.recompute != "auto" and total == plan_memory(decided, LONG, gib).trainer.total
        # one layer less would not fit
        less = decided.trainer.recompute_layers or found.recompute.layers
        if decided.trainer.recompute != "none" and less > 1 and total <= 0.9 * gib * GIB:
            lighter = replace(decided, trainer=replace(decided.trainer, recompute_layers=less - 1))
            assert trainer_memory(lighter, LONG, True).total > 0.9 * gib * GIB
    assert [each.flops for each in kinds] == sorted((each.flops for each in kinds), reverse=True)
    assert {each.recompute for each in kinds} == {"none", "elementwise", "mlp", "full"}
    assert kinds[0].flops > 1.25 and kinds[-1].flops == 1


def test_auto_says_what_it_is_and_why(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = [item for item in CLUSTER if not item.startswith("trainer.recompute")]
    assert plan.main(arguments) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("recomputation: ")]
    assert re.search(
        r"^recomputation: elementwise in \d+ of the 32 layers of a stage, none in the others \(auto\); trainer FLOPs / "
        r"useful FLOPs 1.000, with full 1.327, for sequences of 27,680 tokens; \d+.\d\d GiB of a GPU stay free$",
        line,
    )
    assert plan.main(arguments[:-2]) == 0  # without --gpu-gb
    assert "recomputation: full (auto: nobody says how much memory the GPUs have); " in capsys.readouterr().out
    on_cpu = plan_memory(config({"recompute": "auto"}, {"max_new_tokens": 100}, device="cpu"), SMALL, memory=64 * GIB)
    assert "recomputation: none (auto: nothing on CPU); " in on_cpu.table()


def test_auto_leaves_engines_on_the_same_gpus_what_they_can_use():
    """An engine that can hold all its answers leaves the rest to activations; one that cannot gets all of it."""
    plenty, scarce = (
        plan_memory(shared({"recompute": "auto", "microbatch_tokens": 8192}, {"max_running": n}), SMALL, 80)
        for n in (16, 1024)
    )
    assert plenty.recompute.recompute == "none" and scarce.recompute.recompute == "full"
    assert plenty.engine.of("KV cache") > 16 * 2048 * 28 * 1024


def test_recomputed_flops_by_hand():
    """Qwen2.5-7B, 28,672 tokens: per layer 29,360,128 parameters of attention and 203,685,888 of the MLP."""
    tokens, pairs = 28672, 28672 * 28673 / 2
    layer = 2 * tokens * (29_360_128 + 203_685_888) + 4 * 3584 * pairs
    useful = 3 * (28 * layer + 2 * 152064 * 3584 * (tokens - 1))
    for trainer, added in (
        ({"recompute": "full"}, 28 * layer),
        ({"recompute": "mlp"}, 28 * 4 * tokens * 3584 * 18944),
        ({"recompute": "mlp", "recompute_layers": 10}, 10 * 4 * tokens * 3584 * 18944),
        ({"recompute": "full", "recompute_layers": 10}, 10 * layer + 18 * 4 * tokens * 3584 * 18944),
        ({"recompute": "elementwise"}, 0),
    ):
        assert plan_memory(config(trainer), LONG).recompute.flops == pytest.approx(1 + added / useful, rel=1e-6)


@pytest.mark.parametrize("critic", [False, True])
def test_optimizer_states_on_the_host_leave_the_gpu(critic):
    """12 bytes a parameter fewer on the GPU; 16 more on the host, whose cores need the gradients too."""
    rest = {"ppo": PPOConfig(critic=CriticConfig(lr=1e-5))} if critic else {}
    here, there = (config({"tp": 2, "dp": 4}, optimizer=OptimizerConfig(on_host=on), **rest) for on in (False, True))
    on_gpu, freed = (trainer_memory(asked, LONG, on_cuda=True) for asked in (here, there))
    states = on_gpu.of("optimizer") + on_gpu.of("critic") - freed.of("critic")
    assert freed.of("optimizer") == 0 and freed.of("parameters") == on_gpu.of("parameters")
    assert plan_memory(there, LONG).host == pytest.approx(states * 16 / 12)
    assert plan_memory(here, LONG).host == 0
    assert on_gpu.total - freed.total >= 0.9 * states


def test_the_plan_prints_what_a_node_needs_for_optimizer_states(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert plan.main([*CLUSTER, "optimizer.on_host=true"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer.on_host: ")]
    rank, node = (float(figure) for figure in re.findall(r"\d+\.\d+", line))
    assert line.endswith("for the 8 of a node") and node == pytest.approx(8 * rank, rel=0.01)
    assert rank == pytest.approx(16 * 32.76e9 / 8 / 2 / 12 / GIB, rel=0.1)


def test_supervised_training_has_no_engines():
    plan = plan_memory(config({"tp": 8, "dp": 8}, mode="sft", batch_size=64), DENSE, 80)
    assert plan.engine is None and "engine" not in plan.table()


def test_login_node_plans_48_nodes_without_torch_or_vllm():
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "megatron", "transformers"):
            raise ImportError(f"{{name}} is not installed here")
sys.meta_path.insert(0, Refuse())
from areal_megatron.planning.plan import main
sys.exit(main({CLUSTER!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "48 nodes: 192 trainer ranks, 24 engines of 8; controller on node01"
    assert len(lines) < 80
    for words in ("gradients", "KV cache", "of 80, ", "checkpoint: 427.19 GiB on disk"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nodes", "40"], "need 384 slots"),
        (["--nodes", "0"], "expected at least one node"),
        (["--gpu-gb", "nan"], "expected at least one node"),
        (["trainer.tp=16"], "trainer.tp: 16 does not divide num_attention_heads=40"),
        (["--gpu-gb", "16"], "needs 21.92 GiB"),
        (["model.path=nowhere"], "model.path: there is no folder nowhere"),
    ],
)
def test_planning_refuses_in_one_line(capsys, monkeypatch, arguments, problem):
    monkeypatch.chdir(ROOT)
    pools = ["trainer.dp=6"] if arguments == ["trainer.tp=16"] else []
    assert plan.main([*CLUSTER, *pools, *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and problem in message, message


def test_json_holds_what_the_table_prints(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert plan.main([*CLUSTER, "--json", str(tmp_path / "plan.json")]) == 0
    table, found = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    lines = [line.split() for line in table.splitlines()]
    for pool in ("trainer", "engine"):
        parts = found["memory"][pool]["parts"]
        assert sum(part["bytes"] for part in parts) == found["memory"][pool]["bytes"] > 0
        for part in parts:
            line = f"{part['name']} {part['bytes'] / GIB:,.2f} {part['note']}".split()
            assert line in lines
    assert f"checkpoint: {found['memory']['checkpoint']['bytes'] / GIB:.2f} GiB" in table
    assert (found["trainer_ranks"], found["engines"], found["nodes"]) == (192, 24, 48)
    assert f"sources per engine rank {found['sources_per_engine_rank']}; communicators per engine rank 1," in table
    assert f" per trainer rank {found['communicators_per_trainer_rank']};" in table
    assert f"{found['busiest_sender_over_mean']:.3f} of the mean" in table
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_json_of_supervised_training_has_no_engines(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    arguments = [item for item in CLUSTER if not item.startswith("rollout.")]
    assert plan.main([*arguments, "mode=sft", "--json", str(tmp_path / "plan.json")]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["communicators_per_engine_rank"] == found["communicators_per_trainer_rank"] == 0
    assert found["sources_per_engine_rank"] == 0 and found["busiest_sender_over_mean"] is None
    assert found["memory"]["engine"] is None and found["memory"]["trainer"]["bytes"]


def test_a_file_that_cannot_be_written_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert plan.main([*CLUSTER, "--json", str(tmp_path / "nowhere" / "plan.json")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "nowhere/plan.json" in message


SMALL = read_config(ROOT / "configs/models/DeepSeek-R1-Distill-Qwen-1.5B")


def shared(trainer=None, rollout=None, **rest):
    asked = config({"microbatch_tokens": 2048, **(trainer or {})}, {"max_new_tokens": 1024, **(rollout or {})}, **rest)
    asked.machine.shared = True
    return asked


def test_pools_that_share_a_gpu_divide_its_memory():
    plan, through_host = plan_memory(shared(), SMALL, 80), ReshardConfig(link="host")
    alone = plan_memory(replace(shared(), machine=MachineConfig(device="cuda"), reshard=through_host), SMALL)
    assert plan.trainer == alone.trainer  # counted first, as it is on a GPU of its own
    others = sum(part.bytes for part in plan.engine.parts if part.name != "KV cache")
    assert plan.engine.of("KV cache") == int(0.92 * 80 * GIB) - plan.trainer.total - others
    (line,) = [line for line in plan.table().splitlines() if line.startswith("machine.shared: ")]
    figures = [float(figure) for figure in re.findall(r"\d+\.\d+", line)]
    assert figures == pytest.approx([plan.trainer.total / GIB, plan.engine.total / GIB, 0.92 * 80], abs=0.01)
    assert line.endswith("of 80 GiB, 92%")


@pytest.mark.parametrize(
    ("asked", "gib", "message"),
    [
        (
            shared({"recompute": "none", "microbatch_tokens": 32768}, {"max_new_tokens": 8192}),
            80,
            r"^machine.shared: a trainer rank needs \d+.\d+ GiB and an engine rank \d+.\d+ without its KV cache, "
            r"of 73.60 \(92%\) that they may use of a GPU; with (trainer.microbatch_tokens=9216) the cache has ",
        ),
        (
            shared({}, {"max_new_tokens": 65536}),
            67,
            r"of a GPU: the rest holds \d+,\d+ tokens, an answer may have 66,560 with its prompt; with "
            r"(reshard.staging=streamed) the cache has",
        ),
        (shared(), 40, r"; or with (trainer.dp=2 recompute=full) on 2 times as many GPUs the cache has"),
        (shared({"dp": 2}, {"engines": 2, "max_new_tokens": 65536}), 48, r"; with (trainer.cp=2 dp=1) the cache has"),
        (shared({}, {"max_new_tokens": 4096}), 24, r"; with (optimizer.on_host=true .*?) the cache has .*; or with "),
        (
            shared({}, {"max_new_tokens": 27648}),
            24,
            r"; with (optimizer.on_host=true rollout.max_new_tokens=6912 .*?) the cache has .*; or with ",
        ),
        (shared({"dp": 2}, {"engines": 2}), 30, r"; with (rollout.tp=2 engines=1 trainer.tp=2 dp=1) the cache has"),
    ],
)
def test_a_plan_that_does_not_fit_a_shared_gpu_is_refused_with_advice_that_works(asked, gib, message):
    with pytest.raises(ConfigError, match=message) as error:
        plan_memory(asked, SMALL, gib)
    assert "\n" not in str(error.value)
    section = ""
    for item in re.search(message, str(error.value))[1].split():
        key, value = item.split("=")
        *named, key = key.split(".")
        section = named[0] if named else section
        asked = replace(asked, **{section: replace(getattr(asked, section), **{key: yaml.safe_load(value)})})
    assert plan_memory(asked, SMALL, gib).shares.kv_cache > 0


def test_json_says_how_a_gpu_is_divided():
    plan = plan_memory(shared(), SMALL, 80)
    shares = plan.report()["memory"]["shares"]
    assert shares["kv_cache"] == plan.engine.of("KV cache")
    assert shares["engine"] * 80 * GIB == pytest.approx(plan.engine.total)
    assert shares["trainer"] + shares["engine"] == pytest.approx(0.96)
    assert plan_memory(config(), SMALL, 80).report()["memory"]["shares"] is None


def test_where_no_change_makes_pools_fit_a_gpu_it_says_so():
    with pytest.raises(ConfigError, match=r"; lower rollout.max_new_tokens, or give each pool GPUs of its own with"):
        plan_memory(shared(), SMALL, 4)


def test_memory_of_a_shared_gpu_that_is_unknown_is_planned_but_not_divided():
    plan = plan_memory(shared(), SMALL)
    assert plan.shared and plan.shares is None
    assert plan_memory(config({"tp": 8}, {"tp": 8}), DENSE).shares is None
    assert plan_memory(config({"tp": 8, "dp": 2}, {"tp": 8}), DENSE, 80).shares is None


def test_links_through_the_host_have_no_communicators():
    links = (ReshardConfig(link=link, update="full") for link in ("device", "host"))
    direct, host = (plan_memory(config(reshard=link), SMALL) for link in links)
    assert direct.trainer.of("links") > 0 and direct.engine.of("link") > 0
    for rank in (host.trainer, host.engine):
        assert rank.of("links") == rank.of("link") == 0
    assert direct.trainer.total - host.trainer.total == direct.trainer.of("links")


def test_options_of_vllm_change_the_plan_of_an_engine():
    """Sums by hand of Qwen2.5-32B: 64 layers with 8 key heads of 128, tp 8."""

    def planned(**vllm):
        asked = config(rollout={"tp": 8, "vllm": vllm})
        return asked, engine_memory(asked, DENSE, 80 * GIB, on_cuda=True)

    plain, before = planned()
    assert kv_cache.bytes_per_token(plain, DENSE) == 2 * 64 * 128 * 2
    assert kv_cache.bytes_per_token(plain, read_config(ROOT / "configs/models/DeepSeek-V3")) == 61 * (512 + 64) * 2
    eight, _ = planned(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0", "63"])
    assert kv_cache.bytes_per_token(eight, DENSE) == 2 * 128 * (62 + 2 * 2)
    _, less = planned(gpu_memory_utilization=0.5)
    assert before.total - less.total == int(0.92 * 80 * GIB) - 40 * GIB
    _, small = planned(max_num_batched_tokens=2048)
    rows = 12 * 256 * 152064
    assert small.of("a forward pass") - rows == pytest.approx((before.of("a forward pass") - rows) / 4, rel=1e-6)
    _, given = planned(kv_cache_memory_bytes=5 * GIB)
    assert given.of("KV cache") == 5 * GIB
    _, blocks = planned(num_gpu_blocks_override=1000, block_size=32)
    assert blocks.of("KV cache") == 1000 * 32 * 2 * 64 * 128 * 2


def test_a_draft_model_is_counted(tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text((ROOT / "configs/models/Qwen3-30B-A3B/config.json").read_text())
    (folder / "model.safetensors").write_bytes(b"0" * 4000)
    speculation = {"model": str(folder), "num_speculative_tokens": 4, "draft_tensor_parallel_size": 2}
    asked = config(rollout={"tp": 8, "vllm": {"speculative_config": speculation}})
    d = architecture(HF["Qwen3-30B-A3B"]).dimensions
    own = 2 * d.layers * (d.kv_heads // 2) * d.head_dim * 2
    assert kv_cache.bytes_per_token(asked, DENSE) == 2 * 64 * 128 * 2 + own
    assert engine_memory(asked, DENSE, 80 * GIB, on_cuda=True).of("draft model") == 2000


@pytest.mark.parametrize(("size", "problem"), [(2**20, "holds .* tokens, an answer may have"), (79 * GIB, "lower it")])
def test_a_given_size_of_the_kv_cache_that_cannot_work_is_refused(size, problem):
    trainer = {"tp": 8, "pp": 2, "dp": 12}
    asked = config(trainer, {"tp": 8, "engines": 24, "vllm": {"kv_cache_memory_bytes": size}})
    with pytest.raises(ConfigError, match=rf"^rollout\.vllm\.kv_cache_memory_bytes: .*{problem}"):
        plan_memory(asked, DENSE, 80)


def test_advice_for_trainers_with_megatron_cores_recomputation_keeps_it():
    modules = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    trainer = {"recompute": "none", "tp": 4, "dp": 16, "megatron": modules, "microbatch_tokens": 1}
    with pytest.raises(ConfigError, match="a GPU has 80") as refused:
        plan_memory(config(trainer, {"tp": 8, "max_new_tokens": 12800}), DENSE, 80)
    _, found, advice = str(refused.value).partition("with trainer.")
    assert found and "recompute=" not in advice


def test_recomputation_by_megatron_core_is_planned_and_costs_flops():
    """core_attn repeats the attention, mlp its three products."""
    trainer = {"tp": 8, "pp": 2, "dp": 12, "recompute": "auto"}
    modules = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    asked = config(trainer | {"megatron": modules}, {"tp": 8, "engines": 24})
    found = plan_memory(asked, DENSE, 80 * 4)
    none = plan_memory(config(trainer | {"recompute": "none"}, {"tp": 8, "engines": 24}), DENSE, 80 * 4)
    assert (found.recompute.recompute, found.recompute.modules) == ("none", ("core_attn", "mlp"))
    assert "recomputation: core_attn, mlp by megatron-core; trainer FLOPs" in found.table()
    assert found.trainer.of("activations") < none.trainer.of("activations")
    d, n = architecture(DENSE).dimensions, asked.longest_sequence
    again = d.layers * (2 * d.query * n * (n + 1) + 6 * d.hidden * d.ffn * n)
    useful = 3 * float(SequenceFlops.of(DENSE)(n, n - 1))
    assert found.recompute.flops == pytest.approx(1 + again / useful, rel=1e-9)


def with_adapters(**lora) -> Config:
    return Config(
        name="t",
        updates=1,
        model=ModelConfig(path="unused"),
        data=DataConfig(train="d"),
        machine=MachineConfig(device="cuda"),
        trainer=TrainerConfig(tp=4, dp=2, recompute="full"),
        rollout=RolloutConfig(engines=1, tp=4),
        ppo=PPOConfig(penalty=PenaltyConfig(kl=0.1)),
        lora=LoraConfig(rank=16, **lora),
    )


def factors_of_a_rank(hf, tp: int, rank: int, head_dim: int = 0) -> int:
    """Counts A and B of all linear layers by hand: A whole and B's rows, or B whole and A's columns."""
    hidden, inner = hf["hidden_size"], hf["intermediate_size"]
    d = head_dim or hidden // hf["num_attention_heads"]
    query, key = hf["num_attention_heads"] * d, hf["num_key_value_heads"] * d
    by_rows = [(query, hidden), (key, hidden), (key, hidden), (inner, hidden), (inner, hidden)]
    by_columns = [(hidden, query), (hidden, inner)]
    each = sum(rows // tp + columns for rows, columns in by_rows)
    return hf["num_hidden_layers"] * rank * (each + sum(rows + columns // tp for rows, columns in by_columns))


def test_adapters_alone_have_gradients_and_optimizer_states():
    """In bfloat16 18 bytes a parameter of an adapter, but for the sharding over replicas, and 2 of the model's."""
    memory = stage_memory(with_adapters(), DENSE, 0, on_cuda=True)
    parts = {part.name: part.bytes for part in memory.parts}
    own, base = factors_of_a_rank(DENSE, 4, 16), held(DENSE, MegatronSizes(tp=4), 0)
    assert parts["parameters"] == 2 * (base.all + own)
    assert parts["optimizer"] == 12 * own // 2  # trainer.dp=2
    largest = 16 * DENSE["intermediate_size"] // 4 * 2  # B of gate and up, [rows, 16]
    assert 4 * own < parts["gradients"] <= 4 * own + 2 * max(largest, 16 * 3 * DENSE["hidden_size"])
    assert "reference" not in parts and "merged weights" not in parts


def test_merged_weights_are_a_copy_of_those_with_adapters():
    alone, sizes = with_adapters(merge=True), MegatronSizes(tp=4)
    parts = {part.name: part.bytes for part in stage_memory(alone, DENSE, 0, on_cuda=True).parts}
    vocabulary = 2 * sizes.padded_vocabulary(DENSE["vocab_size"]) // 4 * DENSE["hidden_size"]
    linear = held(DENSE, sizes, 0).all - vocabulary
    in_float32 = 2 * 4 * DENSE["hidden_size"] * 2 * DENSE["intermediate_size"] // 4  # gate and up, and their product
    # norms and biases have no adapters
    assert parts["merged weights"] == pytest.approx(2 * linear + in_float32, rel=0.001)


def test_a_plan_tells_mfu_and_when_engines_have_adapters_and_when_all_weights(capsys, monkeypatch):
    """From the busiest of four trainer ranks to one of tp=4: its factors, or its share of the weights, in 2 bytes."""
    monkeypatch.chdir(ROOT)
    arguments = "trainer.tp=4 trainer.pp=1 trainer.cp=1 trainer.dp=1 rollout.engines=1 lora.rank=32 "
    arguments += "--nodes 1 --gpus 8 --gpu h100"
    path = ROOT / "configs/models/Qwen3-32B"
    assert plan.main([str(ROOT / "configs/qwen3_32b.yaml"), f"model.path={path}", *arguments.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        re.match(r"an update on the trainers, h100: [\d,.]+ s, MFU \d+%; .*recomputation \d+%", each) for each in lines
    )
    line = next(each for each in lines if each.startswith("new adapters for the"))
    adapters, pause, whole, whole_pause = (float(found.replace(",", "")) for found in re.findall(r"([\d,]+) ms", line))
    hf = read_config(path)
    gpu = accelerator("h100")
    rate = gpu.network * gpu.efficiencies.links / 1e3
    assert adapters == pytest.approx(2 * factors_of_a_rank(hf, 4, 32, hf["head_dim"]) / rate, abs=0.5)
    assert whole == pytest.approx(2 * 32.76e9 / 4 / rate, rel=0.01)
    assert 20 <= pause < whole_pause


def test_a_plan_tells_what_engines_prefill_again_at_an_update(capsys, monkeypatch):
    """80 answers at a time, each seen at a random moment: half of it is there, of long ones more often."""
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs/models/Qwen3-32B"
    sizes = ["--nodes=48", "--gpus=8", "--gpu=h100"]
    arguments = [str(ROOT / "configs/qwen3_32b.yaml"), f"model.path={path}", *sizes]
    assert plan.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    form = r"rollout\.kv_policy=recompute: at an update an engine prefills about (\S+) tokens again, in (\S+) s of .*"
    tokens, seconds = (float(each.replace(",", "")) for each in re.fullmatch(form, lines[-1]).groups())
    answers = np.clip(np.random.default_rng(0).lognormal(np.log(6912), 0.9, 100_000), 1, 27648)
    assert tokens == pytest.approx(80 * (200 + (answers**2).mean() / answers.mean() / 2), rel=0.1)
    products = 2 * 32e9 * tokens / (4 * accelerator("h100").flops * 0.62)
    assert products < seconds < 2 * products
    assert plan.main([*arguments, "rollout.kv_policy=keep"]) == 0
    assert "prefill" not in capsys.readouterr().out


def test_a_checkpoint_of_adapters_is_small():
    own = factors_of_a_rank(DENSE, 1, 16)
    assert checkpoint_bytes(with_adapters(), DENSE) == (2 + 12) * own

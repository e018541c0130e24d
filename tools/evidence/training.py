"""PPO steps of the trainer: speed, the longest kernels, and peak memory against the plan of `areal plan`.

Random weights, one rank, answers of equal length packed into micro-batches of 8k and 32k tokens. Then what each kernel
that is chosen by hardware (areal_megatron/trainer/hardware.py) brings.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from areal_megatron.checkpoint.hf_folder import HfTensor, hf_tensors, write_weights
from areal_megatron.config import Config, ConfigError, DataConfig, MachineConfig, ModelConfig, PPOConfig, RolloutConfig
from areal_megatron.config import TrainerConfig as Layout
from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.models.architecture import architecture
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.planning.memory import plan_memory
from areal_megatron.planning.memory.trainer import trainer_memory
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer import hardware
from areal_megatron.trainer.parallel import leave
from areal_megatron.trainer.trainer import Trainer
from tools.bench.logprobs import peak
from tools.evidence.ceilings import product_rate
from tools.evidence.parts import Finding, Options, Part, Skip

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
SMALL |= {"vocab_size": 512, "num_hidden_layers": 2}
KERNELS = 15
GIB = 2**30


@dataclass(frozen=True)
class Case:
    model: str
    """A folder of configs/models."""
    layers: int | None
    """How many of its first layers; None: all."""
    tokens: int
    """Tokens of a micro-batch."""
    sequences: int
    """Sequences of a micro-batch."""
    microbatches: int


def measure(options: Options, case: Case) -> Iterator[Finding]:
    hf = json.loads((MODELS / case.model / "config.json").read_text(encoding="utf-8"))
    hf |= {"model_type": "qwen3_moe" if "num_experts" in hf else "qwen2"}
    hf |= {"num_hidden_layers": case.layers} if case.layers else {}
    if options.small:
        hf, case = hf | SMALL, replace(case, tokens=case.tokens // 64)
    folder = options.folder / f"{case.model}-{case.tokens}"
    write_checkpoint(folder / "model", hf, torch.device(options.device))
    config, note = _that_fits(_config(folder, options.device, case), hf, options)
    part = batch(case, hf["vocab_size"])
    lengths = np.array([trajectory.length for trajectory in part.trajectories])
    trained = np.array([len(trajectory.response) for trajectory in part.trajectories])
    forward = SequenceFlops.of(hf)(lengths, trained).sum()
    run = RunFolder(folder / "run")
    run.create()
    device = torch.device(options.device)
    before = peak(device, reset=True)
    try:
        with Trainer(config, run, 0) as trainer:
            step = partial(trainer.train_batch, part)
            seconds = min(_timed(step, device) for _ in range(3))  # the first one also warms up
            layers = f", {case.layers} layers" if case.layers else ""
            name = f"{case.model.rpartition('-')[2]}{layers}, {case.tokens:,} tokens{note}"
            yield Finding(name, lengths.sum() / seconds, "tokens/s", more={"step_s": seconds})
            yield _memory(config, hf, device, before)
            rate = 3 * forward / seconds
            more = {"tflop_per_s": rate / 1e12, "recompute": config.trainer.recompute}
            yield Finding("  of the rate of large products", 100 * rate / product_rate(options), "%", more=more)
            yield _kernels(step, options)
    finally:
        leave()  # a trainer that could not be made has joined its group all the same
        trainer = step = None
        gc.collect()
        if options.on_cuda:
            torch.cuda.empty_cache()


def compare(options: Options, case: Case, names: tuple[str, ...]) -> Iterator[Finding]:
    """Finds the speed with and without the kernels of those names. Raises Skip if there are none of them."""
    plain = hardware.kernels
    absent = plain(torch.device(options.device), "bfloat16")
    used = [name for name in names if not absent[name]]
    if not used:
        raise Skip("; ".join(f"{name}: {absent[name]}" for name in names))
    for word, left_out in (("with", []), ("without", used)):
        hardware.kernels = lambda *_, off=tuple(left_out): absent | dict.fromkeys(off, "left out")
        steps = measure(replace(options, folder=options.folder / f"{word}-{'-'.join(used)}"), case)
        try:
            speed, _, share = islice(steps, 3)
        finally:
            steps.close()
            hardware.kernels = plain
        yield Finding(f"{word} {' and '.join(used)}", speed.value, "tokens/s", more=share.more)
        yield replace(share, more=None)


def write_checkpoint(folder: Path, hf: dict[str, Any], device: torch.device) -> None:
    """Writes a Hugging Face folder with random weights in bfloat16, made on `device`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    torch.manual_seed(0)

    def values(tensor: HfTensor) -> list[np.ndarray]:
        drawn = torch.randn(tensor.shape, device=device)
        drawn = 1 + 0.1 * drawn if tensor.name.endswith("norm.weight") else 0.02 * drawn
        return [drawn.bfloat16().view(torch.int16).cpu().numpy()]

    write_weights(folder, hf_tensors(architecture(hf).canonical, lambda pattern: "bfloat16"), values)


def batch(case: Case, vocabulary: int) -> BatchPart:
    """Returns a batch of one mini-batch."""
    random, length = np.random.default_rng(0), case.tokens // case.sequences
    prompt = min(256, length // 4)
    count = case.sequences * case.microbatches
    trajectories = [
        Trajectory(
            uid=uid,
            epoch=0,
            prompt_id=uid,
            admission_version=0,
            prompt=random.integers(0, vocabulary, prompt, dtype=np.int32),
            response=random.integers(0, vocabulary, length - prompt, dtype=np.int32),
            logprobs=np.full(length - prompt, -np.log(vocabulary), np.float32),
            versions=np.zeros(length - prompt, np.int32),
            loss_mask=np.ones(length - prompt, np.uint8),
            reward=float(uid % 2),
            truncated=False,
        )
        for uid in range(count)
    ]
    bundles = np.arange(count).reshape(case.microbatches, case.sequences, 1).tolist()
    return BatchPart(
        version=0,
        trajectories=trajectories,
        minibatches=[bundles],
        groups=count,
        group_of=[*range(count)],
        episodes=count,
        episode_of=[*range(count)],
    )


def _config(folder: Path, device: str, case: Case) -> Config:
    return Config(
        name="run",
        runs_dir=str(folder),
        updates=100,
        batch_size=case.sequences * case.microbatches,
        model=ModelConfig(path=str(folder / "model"), dtype="bfloat16"),
        data=DataConfig(train="", max_prompt_tokens=256),
        machine=MachineConfig(device=device, peer_timeout_s=60),
        trainer=Layout(microbatch_tokens=case.tokens),
        ppo=PPOConfig(minibatches=1),
        rollout=RolloutConfig(group_size=1, max_new_tokens=case.tokens // case.sequences - 1),
    )


def _that_fits(config: Config, hf: dict[str, Any], options: Options) -> tuple[Config, str]:
    """Returns the config, with the recomputation that the plan decides for this GPU, and a note of it."""
    try:
        size = torch.cuda.get_device_properties(0).total_memory / GIB if options.on_cuda else 0
        config = plan_memory(replace(config, mode="sft"), hf, size).recompute.apply(config)
    except ConfigError:
        config = replace(config, trainer=replace(config.trainer, recompute="full"))
    what = config.trainer.recompute
    return config, "" if what == "none" else f", {what} recomputed"


def _memory(config: Config, hf: dict[str, Any], device: torch.device, before: int) -> Finding:
    """Returns the largest memory of the process over what the plan says."""
    on_cuda, statistics = device.type == "cuda", {}
    total = torch.cuda.get_device_properties(device).total_memory if on_cuda else 0
    planned = trainer_memory(config, hf, on_cuda, total / GIB)
    found = peak(device) - before
    if on_cuda:
        free, total = torch.cuda.mem_get_info(device)
        statistics = {"allocated_gib": peak(device) / GIB, "retries": torch.cuda.memory_stats()["num_alloc_retries"]}
        found = total - free - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_reserved(device)
    more = statistics | {"plan_gib": {part.name: part.bytes / GIB for part in planned.parts}}
    return Finding("  peak memory over the plan", found / planned.total, f"of {planned.total / GIB:.1f} GiB", more=more)


def _timed(step, device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _kernels(step, options: Options) -> Finding:
    """Returns the share of a step's device time in its longest kernels."""
    with profile(activities=[ProfilerActivity.CUDA if options.on_cuda else ProfilerActivity.CPU]) as profiled:
        step()
        if options.on_cuda:
            torch.cuda.synchronize()
    kind = "self_device_time_total" if options.on_cuda else "self_cpu_time_total"
    kernels = sorted(((getattr(k, kind) / 1e3, k.count, k.key) for k in profiled.key_averages()), reverse=True)
    total = sum(ms for ms, _, _ in kernels)
    longest = [{"name": key, "ms": ms, "calls": calls, "share": ms / total} for ms, calls, key in kernels[:KERNELS]]
    return Finding(f"  time in {KERNELS} longest kernels", 100 * sum(k["share"] for k in longest), "%", False, longest)


DENSE = Case("DeepSeek-R1-Distill-Qwen-7B", 2, 16384, 1, 2)
EXPERTS = Case("Qwen3-30B-A3B", 1, 16384, 2, 2)
PARTS: dict[str, Part] = {
    "1.5B, 8k": partial(measure, case=Case("DeepSeek-R1-Distill-Qwen-1.5B", None, 8192, 2, 4)),
    "1.5B, 32k": partial(measure, case=Case("DeepSeek-R1-Distill-Qwen-1.5B", None, 32768, 2, 2)),
    "7B, 32k": partial(measure, case=Case("DeepSeek-R1-Distill-Qwen-7B", 4, 32768, 2, 2)),
    "without FlashAttention 3 or 4": partial(compare, case=DENSE, names=("fa3", "fa4")),
    "without fused SwiGLU": partial(compare, case=DENSE, names=("swiglu",)),
    "without products into gradients": partial(compare, case=DENSE, names=("gradients",)),
    "without one product for experts": partial(compare, case=EXPERTS, names=("experts",)),
    "without fused rotary embeddings": partial(compare, case=DENSE, names=("rotary",)),
    "without TransformerEngine's permutation": partial(compare, case=EXPERTS, names=("permutation",)),
}

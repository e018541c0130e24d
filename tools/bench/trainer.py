"""Speed of the trainer beside the same batch in a plain loop of transformers and torch, and what it waits for.

    python tools/bench/trainer.py [--model demo] [--layers N] [--draw short|equal|long-tail …] [--answers 256]
                                  [--group 8] [--prompt 6] [--median 24] [--sigma 1.0] [--longest 256] [--cap 2048]
                                  [--minibatches 4] [--dtype float32] [--recompute none] [--repetitions 9]
                                  [--lora RANK] [--idle SHARE] [--threads 1] [--json FILE]
    python tools/bench/trainer.py --delta-nets [--dtype float32] [--repetitions 9] [--threads 1] [--json FILE]

A folder with random weights is made; lengths are drawn and packed as in a run; then the real trainer and the plain loop
(tools/bench/plain_loop.py) train the same batch in turn, in one process. `short`: the demo's additions; `equal`: every
answer has the median; `long-tail`: lognormal. Runs on the GPU if there is one, else on `--threads` cores. There a time
is the processor's for this process, which other programs disturb less than that of the clock.

The plain loop computes each answer with its prompt, and so does the trainer beside it. `trainer, shared prompts` is the
trainer with trainer.share_prompts, where the packer finds that this pays. tokens/s counts each prompt with each answer.
MFU is that of the useful FLOPs (models/flops.py: every token once, forward, backward and in the proximal pass) against
a large product in the same repetition. Memory is what the process takes beyond what it had before, against that of
`areal plan`. With --lora the trainer then trains the batch with adapters of this rank on all linear layers. With --idle
it trains the answers by GRPO, in turn without and with this share of groups whose rewards are all equal. Last come the
lines that make the host wait for the device (tools/bench/synchronisations.py), in one update.

With --delta-nets two layers of the trainer are compared instead, one with a gated delta net and one with attention, of
a small Qwen3.5 (tools/bench/delta_net.py): forwards and backwards in turn, on a sequence of 2,048 tokens, then on as
many tokens in short ones.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import areal_megatron.trainer  # noqa: F401  (adapts megatron-core to this machine before anything imports it)
from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    LoraConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.partition import split
from areal_megatron.planning.memory.trainer import trainer_memory
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.trainer import Trainer
from tools.bench import common, delta_net
from tools.bench.common import cell, positive, spread
from tools.bench.logprobs import peak
from tools.bench.plain_loop import PlainLoop, ways
from tools.bench.synchronisations import kept_on_host, reason, synchronisations
from tools.evidence.training import MODELS, write_checkpoint
from tools.make_arithmetic import good_answer, make_model

GIB = 2**30
TINY = {"demo": {}, "experts": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}}
"""Sizes beside those of the demo's model."""
HALF_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
"""Qwen2.5-0.5B"""
PRESETS = {
    **{name: lambda name=name: tiny(name) for name in TINY},
    "0.5B": lambda: HALF_B,
    "1.5B": lambda: published("DeepSeek-R1-Distill-Qwen-1.5B"),
    "7B": lambda: published("DeepSeek-R1-Distill-Qwen-7B"),
    "30B-A3B": lambda: published("Qwen3-30B-A3B"),
}
PRODUCT = "product"
SHARED = "trainer, shared prompts"
DRAWS = ("short", "equal", "long-tail")


def tiny(name: str) -> dict[str, Any]:
    """Returns the config.json of the demo's model, in which the MLP may be experts."""
    dense = {key: value for key, value in make_model(0).config.to_dict().items() if key != "layer_types"}
    dense["pad_token_id"] = None  # transformers gives the embedding of this token no gradient
    dense["max_position_embeddings"] = 2**20
    if not TINY[name]:
        return dense | {"architectures": ["Qwen3ForCausalLM"]}
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    return dense | kind | TINY[name]


def published(name: str) -> dict[str, Any]:
    return json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Lengths:
    """What a batch is made of. Lengths are in tokens."""

    answers: int
    group: int
    prompt: int
    median: int
    sigma: float
    """Standard deviation of the logarithm of long-tailed lengths."""
    longest: int

    def draw(self, name: str, generator: np.random.Generator) -> np.ndarray:
        """Returns the lengths of the answers, int64 [answers]."""
        if name == "equal":
            return np.full(self.answers, self.median)
        if name == "long-tail":
            drawn = generator.lognormal(np.log(self.median), self.sigma, self.answers)
            return np.clip(np.round(drawn), 1, self.longest).astype(np.int64)
        pairs = generator.integers(10, 100, (self.answers, 2))
        marks = len("\\boxed{") - 1  # one token
        return np.array([len(good_answer(int(a), int(b))) - marks + 1 for a, b in pairs])  # and the end


def random_answers(lengths: Lengths, draw: str, vocabulary: int, seed: int) -> list[Trajectory]:
    """Returns answers of random tokens, with rewards of -5 and 5."""
    generator = np.random.default_rng(seed)
    prompts = generator.integers(0, vocabulary, (-(-lengths.answers // lengths.group), lengths.prompt), dtype=np.int32)
    return [
        Trajectory(
            uid=uid,
            epoch=0,
            prompt_id=uid // lengths.group,
            admission_version=0,
            prompt=prompts[uid // lengths.group],
            response=generator.integers(0, vocabulary, count, dtype=np.int32),
            logprobs=np.full(count, -np.log(vocabulary), np.float32),
            versions=np.zeros(count, np.int32),
            loss_mask=np.ones(count, np.uint8),
            reward=float(generator.choice([-5.0, 5.0])),
            truncated=False,
        )
        for uid, count in enumerate(lengths.draw(draw, generator).tolist())
    ]


def packed(answers: list[Trajectory], config: Config, hf: dict[str, Any], seed: int, **settings: bool) -> BatchPart:
    """Returns the batch as the controller packs it."""
    settings |= {"minibatches": config.ppo.minibatches, "cap": config.trainer.microbatch_tokens}
    [part] = split(answers, version=0, replicas=1, seed=seed, flops=SequenceFlops.of(hf), **settings)
    return part


def batches(
    lengths: Lengths, draw: str, vocabulary: int, config: Config, hf: dict[str, Any], seed: int
) -> tuple[BatchPart, BatchPart]:
    """Returns a batch of random tokens: without and with shared prompts."""
    answers = random_answers(lengths, draw, vocabulary, seed)
    return packed(answers, config, hf, seed), packed(answers, config, hf, seed, share_prompts=True)


def useful_flops(part: BatchPart, hf: dict[str, Any]) -> float:
    """Returns those of the forward and backward passes, and of the proximal ones: all mini-batches but the first."""
    flops = SequenceFlops.of(hf)

    def forward(minibatches) -> float:
        chosen = [part.trajectories[i] for minibatch in minibatches for members in minibatch for i in members]
        return float(flops([t.length for t in chosen], [int(t.loss_mask.sum()) for t in chosen]).sum())

    return 3 * forward(part.members) + forward(part.members[1:])


class Product:
    """A large product, for the rate that the device can reach."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._size, self._count = (8192, 10) if device.type == "cuda" else (1024, 2)
        self._left, self._right = torch.randn(2, self._size, self._size, device=device, dtype=dtype).unbind()
        self.flops = 2 * self._size**3 * self._count

    def __call__(self) -> None:
        for _ in range(self._count):
            _ = self._left @ self._right


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a call: the clock's on CUDA, else the processor's for this process."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    step()
    return time.process_time() - start


def compare(
    trainer: Trainer, plain: PlainLoop, part: BatchPart, shared: BatchPart, repetitions: int
) -> dict[str, list[float]]:
    """Returns the seconds of each side and of a large product, one value for each repetition."""
    device = trainer.device
    sides = {"trainer": partial(trainer.train_batch, part), SHARED: partial(trainer.train_batch, shared)}
    sides |= {way: partial(plain.train_batch, part, way) for way in ways(trainer.config, device)}
    sides[PRODUCT] = Product(device, getattr(torch, trainer.config.model.dtype))
    found = {name: [] for name in sides}
    for repetition in range(repetitions + 1):
        for name, step in sides.items():
            took = timed(step, device)
            if repetition:  # the first one warms up
                found[name].append(took)
    return found


def idle_ratios(
    draw: str, lengths: Lengths, config: Config, hf: dict[str, Any], options: argparse.Namespace, folder: Path
) -> list[float]:
    """Returns the time of an update by GRPO with options.idle of the groups idle over one without, for each
    repetition."""
    parts, own = [], replace(config, ppo=replace(config.ppo, algorithm="grpo"))
    for share in (options.idle, 0.0):
        answers = random_answers(lengths, draw, hf["vocab_size"], options.seed)
        for answer in answers:
            is_idle = answer.prompt_id < share * lengths.answers / lengths.group
            answer.reward = 5.0 if is_idle or answer.uid % 2 else -5.0
        parts.append(packed(answers, own, hf, options.seed, within_group=True))
    run = RunFolder(folder)
    run.create()
    with Trainer(own, run, 0) as trainer:
        took = [
            [timed(partial(trainer.train_batch, part), trainer.device) for part in parts]
            for _ in range(options.repetitions + 1)
        ]
    return [with_idle / without for with_idle, without in took[1:]]  # the first one warms up


def measure(
    draw: str, lengths: Lengths, config: Config, hf: dict[str, Any], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Returns what the table shows about one draw, for the JSON file."""
    part, shared = batches(lengths, draw, hf["vocab_size"], config, hf, options.seed)
    passes = [len(minibatch) for minibatch in part.minibatches]
    tokens = sum(t.length for t in part.trajectories)
    run, device = RunFolder(folder), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run.create()
    gc.collect()
    if device.type == "cpu":
        ctypes.CDLL(None).malloc_trim(0)  # what earlier draws have left would hide what this one takes
    before = peak(device, reset=True)
    with Trainer(config, run, 0) as trainer:
        norms = {"trainer": trainer.train_batch(part).metrics["grad_norm"]}
        memory = peak(device) - before
        plain = None
        for way in ways(config, device):
            del plain  # a large model fits once
            plain = PlainLoop(config, device)
            norms[way] = float(np.mean(plain.train_batch(part, way)))
        times = compare(trainer, plain, part, shared, options.repetitions)
        with synchronisations(kept_on_host(trainer)) as seen:
            trainer.train_batch(part)
    if options.lora:
        adapted, own = RunFolder(folder / "adapters"), replace(config, lora=LoraConfig(rank=options.lora))
        adapted.create()
        with Trainer(own, adapted, 0) as trainer:
            took = [timed(partial(trainer.train_batch, part), device) for _ in range(options.repetitions + 1)][1:]
        adapters = spread(one / whole for one, whole in zip(took, times["trainer"], strict=True))
    flops, product = useful_flops(part, hf), Product(device, torch.float32).flops
    rates = [product / took for took in times.pop(PRODUCT)]
    planned = trainer_memory(config, hf, torch.cuda.is_available()).total
    packed = min((way for way in times if way.startswith("packed")), key=lambda way: float(np.median(times[way])))
    return {
        "draw": draw,
        "tokens": tokens,
        "longest": max(t.length for t in part.trajectories),
        "microbatches": sum(passes),
        "passes": 2 * sum(passes) - passes[0],
        "gradient_norms": norms,
        "tokens_per_s": {name: spread(tokens / took for took in own) for name, own in times.items()},
        "packed": packed,
        "ratio": {
            name: spread(other / own for own, other in zip(times["trainer"], took, strict=True))
            for name, took in times.items()
            if name != "trainer"
        },
        "mfu": {
            name: spread(flops / took / rate for took, rate in zip(own, rates, strict=True))
            for name, own in times.items()
        },
        "product_flop_per_s": spread(rates),
        "adapters": adapters if options.lora else None,
        "idle": spread(idle_ratios(draw, lengths, config, hf, options, folder / "idle")) if options.idle else None,
        "memory": {"peak_bytes": memory, "planned_bytes": planned},
        "synchronisations": [site._asdict() | {"count": n, "reason": reason(site)} for site, n in sorted(seen.items())],
    }


def table(row: dict[str, Any]) -> str:
    """Returns what a person reads about one draw."""
    lines = [
        f"{row['draw']}: {row['tokens']:,} tokens, longest {row['longest']:,}, {row['microbatches']} micro-batches",
        f"{'':<26}{'tokens/s':>10} (lowest – highest)   {'MFU':>6}   trainer / this",
    ]
    for name, figure in row["tokens_per_s"].items():
        ratio = cell(row["ratio"][name]) if name in row["ratio"] else ""
        best = "  ← the fastest packed" if name == row["packed"] else ""
        lines.append(f"{name:<26}{cell(figure, 0, 10)}   {row['mfu'][name]['median']:>6.1%}   {ratio}{best}")
    if row["adapters"]:
        lines.append(f"time of an update of adapters over one of all weights: {cell(row['adapters'])}")
    if row["idle"]:
        lines.append(f"time of an update with groups of equal rewards over one without: {cell(row['idle'])}")
    norms, memory = row["gradient_norms"], row["memory"]
    lines += [
        f"gradient norm of the first update: {', '.join(f'{name} {norm:.6g}' for name, norm in norms.items())}",
        f"peak memory of the trainer: {memory['peak_bytes'] / GIB:.2f} GiB, plan: {memory['planned_bytes'] / GIB:.2f}",
        f"host synchronisations in one update of {row['passes']} passes over micro-batches:",
    ]
    for found in row["synchronisations"]:
        where = f"{found['file']}, {found['function']}: {found['operation']}"
        lines.append(f"{found['count']:>6}  {where}; {found['reason'] or 'NO REASON IS KNOWN'}")
    return "\n".join(lines)


def compare_layers(
    config: Config, hf: dict[str, Any], options: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Returns what the table shows of the two kinds of layers, for the JSON file; prints it row by row."""

    def row(count: int, length: int) -> BatchPart:
        lengths = Lengths(count, 1, 1, length - 1, 1.0, length)
        return batches(lengths, "equal", hf["vocab_size"], config, hf, options.seed)[0]

    rows = []
    for found in delta_net.compare(config, folder, row, timed, options.repetitions):
        print("\n" + delta_net.table(found), flush=True)
        rows.append(found)
    return rows


def configure(options: argparse.Namespace, folder: Path) -> Config:
    return Config(
        name="bench",
        runs_dir=str(folder),
        updates=10_000,
        batch_size=options.answers,
        model=ModelConfig(path=str(folder / "model"), dtype=options.dtype),
        data=DataConfig(train="", max_prompt_tokens=options.prompt),
        machine=MachineConfig(device="cuda" if torch.cuda.is_available() else "cpu", peer_timeout_s=60),
        trainer=TrainerConfig(microbatch_tokens=options.cap, recompute=options.recompute),
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps=0),
        ppo=PPOConfig(minibatches=options.minibatches),
        rollout=RolloutConfig(group_size=options.group, max_new_tokens=max(options.longest, options.median)),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__, repetitions=9)
    parser.add_argument("--model", choices=PRESETS, default="demo", help="whose sizes the model has")
    parser.add_argument("--layers", type=positive, help="its first N layers; default: all")
    parser.add_argument("--draw", choices=DRAWS, nargs="+", default=DRAWS, help="of the answers' lengths")
    parser.add_argument("--answers", type=positive, default=256, help="of a batch")
    parser.add_argument("--group", type=positive, default=8, help="answers of a prompt")
    parser.add_argument("--prompt", type=positive, default=6, help="tokens of a prompt")
    parser.add_argument("--median", type=positive, default=24, help="tokens of an answer, equal or long-tailed")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of long-tailed lengths")
    parser.add_argument("--longest", type=positive, default=256, help="tokens of an answer at most")
    parser.add_argument("--cap", type=positive, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--minibatches", type=positive, default=4, help="optimizer steps of a batch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--recompute", choices=("none", "elementwise", "mlp", "full"), default="none")
    parser.add_argument("--lora", type=positive, metavar="RANK", help="adapters beside all weights")
    parser.add_argument("--idle", type=float, metavar="SHARE", help="of groups whose rewards are all equal, by GRPO")
    parser.add_argument("--delta-nets", action="store_true", help="a layer with one against a layer with attention")
    parser.add_argument("--threads", type=positive, default=1, help="of torch, without a GPU")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.delta_nets:  # a batch is one row
        options.minibatches = options.prompt = options.group = 1
        options.cap = options.longest = delta_net.TOKENS
    if options.idle is not None and not (0 < options.idle < 1 and options.group > 1):
        parser.error("--idle is a share between 0 and 1 of groups of several answers")
    if options.answers < options.minibatches:
        parser.error(f"--answers {options.answers} are too few for --minibatches {options.minibatches}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hf = delta_net.SIZES if options.delta_nets else PRESETS[options.model]()
    hf |= {"num_hidden_layers": options.layers} if options.layers else {}
    lengths = Lengths(options.answers, options.group, options.prompt, options.median, options.sigma, options.longest)
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_checkpoint(folder / "model", hf, device)
        config = configure(options, folder)
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {options.threads} threads"
        name = "Qwen3.5's layers" if options.delta_nets else options.model
        print(f"{name}, {options.dtype}, on {where}; median (lowest – highest) of {options.repetitions}")
        if options.delta_nets:
            rows = compare_layers(config, hf, options, folder / "run")
        for number, draw in enumerate(() if options.delta_nets else options.draw):
            try:
                rows.append(measure(draw, lengths, config, hf, options, folder / f"run-{number}"))
            except ConfigError as e:
                print(f"error: {e}", file=sys.stderr)
                sys.exit(2)
            print("\n" + table(rows[-1]), flush=True)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    common.keep(options.json, settings | {"device": where, "rows": rows})


if __name__ == "__main__":
    main()

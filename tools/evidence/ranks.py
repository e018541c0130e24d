"""Updates on two trainer ranks that share a device, over real NCCL there, against plain code on the CPU.

NCCL refuses two ranks on one GPU unless they seem to be on different hosts; then they talk over sockets. The checks'
oracle is that of tests/parallel/test_trainer.py: two PPO updates and two supervised steps in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import areal_megatron.trainer  # noqa: F401  (adapts megatron-core to this machine before anything imports it)
from areal_megatron.config import (
    Config,
    DataConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    PenaltyConfig,
    PPOConfig,
    RolloutConfig,
)
from areal_megatron.config import TrainerConfig as Layout
from areal_megatron.packing.partition import split
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.trainer import Trainer
from tests.support.comparison import pieces
from tests.support.plain_results import plain_results, sft_examples, training_data
from tests.support.tiny_models import canonical, save_model
from tools.evidence.parts import Finding, Options, Part
from tools.evidence.processes import TIMEOUT_S, on_ranks

FAR = 3e-4
"""The largest difference of a parameter after the steps that is rounding; on CPU it is a tenth of this."""


def compare(options: Options, model: str, layout: dict[str, int]) -> Iterator[Finding]:
    folder = options.folder / "models" / model
    if not folder.exists():
        save_model(model, folder)
    run = options.folder / f"run-{model}-{'-'.join(layout)}"
    RunFolder(run).create()
    results = on_ranks(train, 2, str(folder), str(run), layout, options.device, folder=run / "ranks")
    name = f"{model}, {' '.join(f'{key} {value}' for key, value in layout.items())}: largest difference"
    worst = max(result["worst"] for result in results)
    yield Finding(name, worst, more=results)
    if options.on_cuda and layout.get("pp"):
        counts = max(result["synchronizations"] for result in results)
        yield Finding("  device-wide synchronisations of an update", counts)
    if not worst < FAR:
        raise RuntimeError(f"a parameter is off by {worst:.1e}, more than {FAR:.0e}")


def train(rank: int, model: str, run: str, layout: dict[str, int], device: str) -> dict[str, Any]:
    """Trains as one of two ranks; returns the largest difference of its parameters from the oracle's."""
    config = Config(
        name="run",
        updates=50,
        batch_size=12,
        model=ModelConfig(path=model, dtype="float32"),
        data=DataConfig(train="", max_prompt_tokens=8),
        machine=MachineConfig(device=device, peer_timeout_s=TIMEOUT_S),
        trainer=Layout(microbatch_tokens=128, **layout),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0, weight_decay=0.1),
        ppo=PPOConfig(minibatches=2, penalty=PenaltyConfig(entropy=0.3, kl=0.2, kl_form="k3")),
        rollout=RolloutConfig(group_size=4, temperature=0.7, max_new_tokens=100),
    )
    synchronised = []
    with Trainer(config, RunFolder(run), rank) as trainer:
        expected = plain_results(trainer)
        for version in range(len(expected["metrics"])):
            trajectories, _ = training_data(version)
            parts = split(
                trajectories, version=version, replicas=config.trainer.dp, minibatches=2, cap=128, seed=version
            )
            with _counted(synchronised):
                trainer.train_batch(parts[trainer.parallel.replica])
        for step in range(len(expected["sft_losses"])):
            trainer.supervised.step(sft_examples(step))
        held = pieces(trainer, trainer.parameters(), canonical(expected["parameters"]))
        worst = max(float((ours.cpu() - theirs).abs().max()) for _, ours, theirs in held)
    return {"worst": worst, "synchronizations": synchronised[-1]}


@contextmanager
def _counted(counts: list[int]) -> Iterator[None]:
    """Appends how often torch.cuda.synchronize was called inside."""
    synchronize = torch.cuda.synchronize
    counts.append(0)

    def counting(*arguments: Any) -> None:
        counts[-1] += 1
        synchronize(*arguments)

    torch.cuda.synchronize = counting
    try:
        yield
    finally:
        torch.cuda.synchronize = synchronize


PARTS: dict[str, Part] = {
    "tp 2": partial(compare, model="qwen3", layout={"tp": 2}),
    "pp 2": partial(compare, model="qwen3", layout={"pp": 2}),
    "dp 2": partial(compare, model="qwen3", layout={"dp": 2}),
    "ep 2": partial(compare, model="qwen3_moe", layout={"dp": 2, "ep": 2}),
}

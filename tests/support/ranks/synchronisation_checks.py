"""Checks of what a PPO update waits for on the device, which test_synchronisations.py starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from areal_megatron.config import CorrectionConfig, CriticConfig, PenaltyConfig, PPOConfig
from areal_megatron.packing.partition import split
from areal_megatron.trainer.trainer import Trainer
from tests.support.plain_results import make_trajectories, probed
from tests.support.ranks.trainer_checks import make_config, open_trainer
from tools.bench.synchronisations import Site, kept_on_host, reason, synchronisations

PPO = {
    "decoupled": PPOConfig(minibatches=2),
    "everything": PPOConfig(
        minibatches=2,
        algorithm="ppo",
        correction=CorrectionConfig(mask_high=1.3, sequence_mask_high=1.1, product_mask_low=0.1, m2po=0.03),
        penalty=PenaltyConfig(entropy=0.1, kl=0.2, kl_cov=0.1),
        critic=CriticConfig(lr=1e-3),
    ),
    "sequences": PPOConfig(minibatches=2, algorithm="gspo"),
}
IN_EVERY_LAYER_OF_EXPERTS = {"megatron/core/transformer/moe/token_dispatcher.py"}


def check_waits(folder: Path, rank: int, model: str, ppo: str) -> None:
    """An update waits as often however many micro-batches it has, except for experts, and always with a reason."""
    with open_trainer(folder, rank, make_config(folder, model, {}, ppo=PPO[ppo])) as subject:
        few, many = (waits(subject, cap) for cap in (400, 110))
    assert few, "gradient norms and metrics are numbers of the host"
    unexplained = [site for site in many if not reason(site)]
    assert not unexplained, unexplained
    more = {site.file for site in many if many[site] != few[site]}
    assert more == (IN_EVERY_LAYER_OF_EXPERTS if model == "qwen3_moe" else set()), many - few


def waits(subject: Trainer, cap: int) -> Counter[Site]:
    trajectories = make_trajectories(24, 0)
    [part] = split(trajectories, version=0, replicas=1, minibatches=2, cap=cap, seed=0)
    part.probe = probed(trajectories)
    part.probe_tokens = sum(int(excerpt.compared.sum()) for excerpt in part.probe)
    assert max(map(len, part.minibatches)) == (1 if cap == 400 else 2), part.minibatches
    with synchronisations(kept_on_host(subject)) as seen:
        assert subject.train_batch(part).applied
    return seen

"""Checks of training on trainer ranks, which tests start (conftest.on_ranks)."""

from __future__ import annotations

import json
import resource
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_megatron.config import (
    Config,
    CorrectionConfig,
    DataConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    PenaltyConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.models import logits as logits_limit
from areal_megatron.packing import row
from areal_megatron.packing.partition import partition, split
from areal_megatron.ppo.algorithm import ALGORITHMS, token_weights
from areal_megatron.reshard.trainer_layout import is_head
from areal_megatron.run.folder import Replaced, RunError, RunFolder
from areal_megatron.trainer import model as trainer_model
from areal_megatron.trainer import pipeline, update_size
from areal_megatron.trainer.batch import pack, pack_trajectories
from areal_megatron.trainer.learner import Steps
from areal_megatron.trainer.logprobs import Vocabulary, token_logprobs
from areal_megatron.trainer.objective import trained_logprobs
from areal_megatron.trainer.token_sums import TokenSums
from areal_megatron.trainer.trainer import Trainer
from tests.support import training_oracle as oracle
from tests.support.comparison import (
    assert_gradient,
    assert_parameters,
    gather_row,
    gather_sequence,
    gather_vocabulary,
    rounding,
    whole_gradients,
)
from tests.support.plain_results import (
    beside_model,
    critic_minibatch,
    gradients,
    make_trajectories,
    minibatch,
    once,
    plain_logits,
    plain_results,
    plain_update,
    probed,
    rows_and_batch,
    sft_examples,
    training_data,
    update_data,
)
from tests.support.tiny_models import load_oracle


def make_config(folder: Path, family: str, layout: dict, **sections) -> Config:
    sections = {
        "optimizer": OptimizerConfig(lr=1e-3, warmup_steps=0, weight_decay=0.1, staleness_kl=0),  # see check_rate_limit
        "ppo": PPOConfig(minibatches=2, penalty=PenaltyConfig(entropy=0.3, kl=0.2, kl_form="k3")),
        "rollout": RolloutConfig(group_size=4, temperature=0.7, max_new_tokens=100),
        **sections,
    }
    return Config(
        name="test",
        updates=50,
        batch_size=12,
        model=ModelConfig(path=str(folder / family), dtype=sections.pop("dtype", "float32")),
        data=DataConfig(train="", max_prompt_tokens=8),
        machine=MachineConfig(peer_timeout_s=60),
        trainer=TrainerConfig(**{"microbatch_tokens": 128, **layout}),
        **sections,
    )


@contextmanager
def open_trainer(folder: Path, rank: int, config: Config, run: str = "run"):
    """Opens a trainer in the run folder `run`, which the test has made; several ranks need a new folder each time."""
    logits_limit.PER_CORE = 50 * 50  # so that a micro-batch takes several tiles, of tokens and of columns
    row.LEAST_CUT = 8  # so that sequences of 100 tokens are cut for context parallelism
    with Trainer(config, RunFolder(folder / run), rank) as trainer:
        yield trainer


def check_layouts(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Checks everything that must not depend on the parallel layout. cases: run folder → model, layout."""
    for run, (model, trainer) in cases.items():
        with open_trainer(folder, rank, make_config(folder, model, trainer), run) as subject:
            if model.startswith("qwen3_balanced"):
                reference = load_oracle(folder / model)
                check_logits(subject, plain_logits(reference))
                check_balance(subject, reference)
                continue
            expected = plain_results(subject)
            check_logits(subject, expected["logits"])
            check_logprobs(subject, expected)
            check_gradient(subject, expected["gradient"])
            check_training(subject, expected)
            check_sharing(subject)


def check_logits(subject: Trainer, expected: dict) -> None:
    """Packed rows (of many sequences, of one) and an unpacked batch have the logits of Hugging Face."""
    rows, tokens = rows_and_batch()
    batches = [pack(row, [np.arange(0)] * len(row), subject._part) for row in rows]
    size = subject.hf_config["vocab_size"]
    weight = subject.ppo._objective._policy.output_weight if subject.parallel.is_last_stage else None

    def logits(hidden, batch):
        hidden = gather_row(gather_sequence(hidden, subject.config), batch)
        return gather_vocabulary(hidden[:, 0] @ weight.T, size)

    found = pipeline.forward(subject.policy.chunks, [(batch, partial(logits, batch=batch)) for batch in batches])
    for ours, theirs in zip(found, expected["rows"], strict=False):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    if subject.config.trainer.pp == subject.config.trainer.cp == 1:
        [model] = subject.policy.chunks
        hidden = gather_sequence(model(tokens, None, None), subject.config)
        found = gather_vocabulary(hidden.detach() @ weight.T, size).transpose(0, 1)
        torch.testing.assert_close(found, expected["batch"], atol=1e-4, rtol=0)


def check_logprobs(subject: Trainer, expected: dict) -> None:
    trajectories = make_trajectories(7, version=0)
    batch = pack_trajectories(trajectories, [0.0] * 7, [1.0] * 7, 0, "recompute", subject._part)
    objective = subject.ppo._objective
    found = partial(trained_logprobs, objective._policy, objective._sampled, microbatch=batch.microbatch)
    work = [(batch.microbatch, partial(found, entropy=True))]
    for logprobs, entropy in pipeline.forward(subject.policy.chunks, work):
        torch.testing.assert_close(logprobs, expected["logprobs"], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected["entropy"], atol=1e-5, rtol=0)
    for _, entropy in pipeline.forward(subject.policy.chunks, [(batch.microbatch, found)]):
        assert entropy is None
    part = BatchPart(
        version=0,
        trajectories=trajectories,
        minibatches=[[[[0], [1], [2]], [[3], [4], [5], [6]]]],
        groups=7,
        group_of=[*range(7)],
        episodes=7,
        episode_of=[*range(7)],
    )
    found = expected["logprobs"] if subject.parallel.is_last_stage else torch.zeros(0)
    torch.testing.assert_close(subject.ppo.logprobs(part), found, atol=1e-5, rtol=0)


def check_gradient(subject: Trainer, expected: dict[str, torch.Tensor]) -> None:
    """The gradient of a mini-batch, whatever the packing, is that of the plain formula in float64."""
    batch = MiniBatch(subject, *minibatch())
    for cap in (40, 400):
        batch.forward_backward(cap)
        assert_gradient(subject, expected)


@dataclass
class MiniBatch:
    """A mini-batch of PPO for the trainer."""

    subject: Trainer
    trajectories: list[Trajectory]
    advantages: list[np.ndarray]
    proximals: list[torch.Tensor]
    references: list[torch.Tensor]
    shares_prompts: bool = False
    """Whether a micro-batch computes the prompt of a group once."""

    def bundles(self, members: list[int]) -> list[list[int]]:
        """Returns the members of a micro-batch that share a prompt together; those of one group must have the same."""
        bundles: dict[int, list[int]] = {}
        for i in members:
            bundles.setdefault(self.trajectories[i].prompt_id if self.shares_prompts else i, []).append(i)
        return [*bundles.values()]

    def microbatches(self, cap: int) -> list[list[list[int]]]:
        """Returns the trajectories by [replica][micro-batch]; the last micro-batch is empty, which changes nothing."""
        plan = partition([t.length for t in self.trajectories], self.subject.config.trainer.dp, 1, cap, seed=cap)
        return [[*minibatch, []] for [minibatch] in plan]

    def forward_backward(self, cap: int) -> None:
        subject, batches = self.subject, []
        lengths = torch.tensor([int(t.loss_mask.sum()) for t in self.trajectories])
        weights = token_weights(
            ALGORITHMS[subject.config.ppo.algorithm].mean,
            lengths,
            int(lengths.sum()),
            int((lengths > 0).sum()),
            subject.config.rollout.max_new_tokens,
        ).tolist()
        for members in self.microbatches(cap)[subject.parallel.replica]:
            bundles = self.bundles(members)
            members = [*chain(*bundles)]
            batch = pack_trajectories(
                [self.trajectories[i] for i in members],
                [self.advantages[i] for i in members],
                [weights[i] for i in members],
                0,
                "recompute",
                subject._part,
                subject.ppo._routing,
                [len(bundle) for bundle in bundles],
                top_k=subject.config.ppo.penalty.top_k,
            )
            batch.proximal, batch.reference = (
                torch.cat([torch.zeros(0), *(values[i][self.trajectories[i].loss_mask == 1] for i in members)])
                for values in (self.proximals, self.references)
            )
            batches.append(batch)
        if threshold := subject.config.ppo.correction.m2po:
            subject.ppo._mask(batches, threshold)
        if subject.config.ppo.penalty.kl_cov:
            subject.ppo._mark(batches, subject.config.ppo.penalty.kl_cov_share)
        loss = partial(subject.ppo._objective.ppo, taken=1, sums=TokenSums())
        subject.policy.optimizer.zero_grad()
        pipeline.forward_backward(subject.policy.chunks, [(b.microbatch, partial(loss, sampled=b)) for b in batches])


def check_algorithms(folder: Path, rank: int, cases: dict[str, dict], layout: dict) -> None:
    """Checks the gradient of a mini-batch far from its proximal policy, and a whole update.

    cases: run folder → settings of PPO.
    """
    for run, settings in cases.items():
        correction = CorrectionConfig(truncate=3.0)
        ppo = PPOConfig(**{"minibatches": 2, "clip_low": 0.1, "clip_high": 0.25, "correction": correction, **settings})
        if ppo.penalty.kl_folder:
            ppo = replace(ppo, penalty=replace(ppo.penalty, kl_model=str(folder / ppo.penalty.kl_model)))
        config = make_config(folder, "qwen3-short", layout, ppo=ppo)
        with open_trainer(folder, rank, config, run) as subject:
            expected = plain_update(subject)
            MiniBatch(subject, *minibatch(ppo.algorithm)).forward_backward(100)
            assert_gradient(subject, expected["gradient"])
            if subject.critic:
                set_head(subject)
                check_critic_gradient(subject, expected["critic_gradient"])
            parts = split(update_data()[0], version=0, replicas=config.trainer.dp, minibatches=2, cap=128, seed=0)
            called = []
            result = subject.train_batch(parts[subject.parallel.replica], before_step=lambda: called.append(1))  # noqa: B023
            assert result.applied and called == [1]
            assert_parameters(subject, expected["parameters"], atol=3e-5)
            if subject.critic:
                assert_parameters(subject, expected["critic_parameters"], 3e-5, "critic")
                check_critic_metrics(result.metrics, expected)


def set_head(subject: Trainer) -> None:
    """Gives the critic's head random weights: with the zeros that it begins with, all gradients but its own are 0."""
    head = oracle.Valued(load_oracle(Path(subject.config.model.path))).head.weight.data
    for name, values in subject.critic.learner.parameters().items():
        if is_head(name):
            assert not values.any()
            values.copy_(head)


def check_critic_gradient(subject: Trainer, expected: dict[str, torch.Tensor]) -> None:
    trajectories, before, returns = critic_minibatch()
    critic = subject.critic
    for cap in (40, 400):
        plan, work = MiniBatch(subject, trajectories, [], [], []).microbatches(cap), []
        for members in plan[subject.parallel.replica]:
            ones = [1.0] * len(members)
            batch = pack_trajectories([trajectories[i] for i in members], ones, ones, 0, "recompute", subject._part)
            batch.values, batch.returns = (
                torch.cat([torch.zeros(0), *(own[i] for i in members)]) for own in (before, returns)
            )
            work.append((batch.microbatch, partial(critic._loss, sampled=batch, sums=TokenSums())))
        critic.learner.gradient(work)
        assert_gradient(subject, expected, "critic")


def check_critic_metrics(metrics: dict[str, float], expected: dict[str, torch.Tensor]) -> None:
    values, returns, advantages = (expected[name] for name in ("values", "returns", "advantages"))
    explained = 1 - (returns - values).var() / returns.var()
    assert abs(metrics["explained_variance"] - explained) < 1e-5
    assert abs(metrics["return_mean"] - returns.mean()) < 1e-5
    for name, value in {
        "mean": advantages.mean(),
        "std": advantages.std(correction=0),
        "min": advantages.min(),
        "max": advantages.max(),
    }.items():
        assert abs(metrics[f"advantage_{name}"] - value) < 1e-5


def check_balance(subject: Trainer, reference: torch.nn.Module) -> None:
    """The gradient includes the routers' load-balancing loss, over trained tokens only, if config.json asks for it."""
    content, exact = minibatch(), reference.double()
    batch = MiniBatch(subject, *content)
    members = [members for replica in batch.microbatches(100) for members in replica]
    loss = oracle.ppo_loss(exact, *content, subject.config) + oracle.balance_loss(exact, batch.trajectories, members)
    loss.backward()
    batch.forward_backward(100)
    assert_gradient(subject, gradients(exact))


def check_training(subject: Trainer, expected: dict) -> None:
    """PPO updates and supervised steps change the parameters as plain code with torch's AdamW does."""
    config = subject.config
    calls = []
    update_size.WHOLE = 2**62  # check_update_size is about samples of larger tensors
    for version, (metrics, probe) in enumerate(zip(expected["metrics"], expected["probes"], strict=True)):
        trajectories, halves = training_data(version)
        plan = {"replicas": config.trainer.dp, "minibatches": 2, "cap": 128, "seed": version}
        part = split(trajectories, version=version, **plan)[subject.parallel.replica]
        part.probe, part.probe_tokens = probed(trajectories)[subject.parallel.replica :: config.trainer.dp], len(probe)
        result = subject.train_batch(part, before_step=lambda: calls.append(version))  # noqa: B023
        assert result.applied and result.version == version and calls == list(range(version + 1))
        whole = partition([t.length for t in trajectories], *plan.values())
        assert halves == [{i for share in whole for microbatch in share[m] for i in microbatch} for m in range(2)]
        for name, value in metrics.items():
            assert result.metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-4), name
        assert len(probe) > 20
        np.testing.assert_allclose(result.probe, probe, atol=1e-4 * rounding(subject))
        assert_advantages(result.metrics, trajectories, config.ppo.algorithm)
        assert result.metrics["trained_tokens"] == sum(int(t.loss_mask.sum()) for t in trajectories)
    for step, loss in enumerate(expected["sft_losses"]):
        assert abs(subject.supervised.step(sft_examples(step))["loss"] - loss) < 1e-4
    assert_parameters(subject, expected["parameters"], atol=3e-5 * rounding(subject))
    if subject.parallel.is_leader:
        subject.settle_ledger()
        lines = [json.loads(line) for line in subject.run.ledger(subject.parallel.replica).read_text().splitlines()]
        assert [line["version"] for line in lines] == [0, 1]
        assert lines[1]["uids"] == [t.uid for t in part.trajectories]
        assert lines[1]["admission_versions"] == [t.admission_version for t in part.trajectories]


def assert_advantages(metrics: dict[str, float], trajectories: list[Trajectory], algorithm: str) -> None:
    per_token = np.concatenate(oracle.advantages(trajectories, algorithm))
    for name in ("mean", "std", "min", "max"):
        assert abs(metrics[f"advantage_{name}"] - getattr(np, name)(per_token)) < 1e-6


def check_sharing(subject: Trainer) -> None:
    value = bytes(range(256)) * 3
    assert subject.parallel.share(value if subject.parallel.is_leader else None) == value
    assert subject.parallel.share(b"" if subject.parallel.is_leader else None) == b""
    assert subject.parallel.share_all(b"to all" if subject.parallel.is_first else None) == b"to all"


def check_overlap(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Two replicas train as one process does if communication overlaps computation, in many small buckets.

    A rank has all parameters when an update ends, and not before.
    """
    trainer_model.BUCKET_ELEMENTS = 3000
    for run, (model, trainer) in cases.items():
        with open_trainer(folder, rank, make_config(folder, model, trainer), run) as subject:
            buckets = [group for chunk in subject.policy.chunks for group in chunk.bucket_groups]
            assert len(buckets) > 4 or subject.parallel.pp_rank  # Megatron divides the first stage only
            changed_by_settling, settle = [], subject.policy.optimizer.settle

            def spied():
                before = {name: value.clone() for name, value in subject.parameters().items()}
                settle()  # noqa: B023
                after = subject.parameters()
                changed_by_settling.append(sum(not torch.equal(before[name], after[name]) for name in after))  # noqa: B023

            subject.policy.optimizer.settle = spied
            check_training(subject, plain_results(subject))
            assert len(changed_by_settling) == 4 and all(changed_by_settling)


def check_bad_gradient(folder: Path, rank: int, trainer: dict) -> None:
    """A NaN in one trajectory of one replica: every rank skips that step, and takes the other one."""
    config = make_config(folder, "qwen3", trainer)
    with open_trainer(folder, rank, config) as subject:
        before = {name: value.clone() for name, value in subject.parameters().items()}
        for bad, taken in (({0, 1}, False), ({0}, True)):
            trajectories = make_trajectories(12, 0)
            parts = split(trajectories, version=0, replicas=config.trainer.dp, minibatches=2, cap=128, seed=0)
            for m in bad:
                members = [parts[-1].trajectories[i] for microbatch in parts[-1].members[m] for i in microbatch]
                spoiled = next(trajectory for trajectory in members if trajectory.loss_mask.any())
                spoiled.logprobs = np.full_like(spoiled.logprobs, np.nan)
            called = []
            result = subject.train_batch(parts[subject.parallel.replica], before_step=lambda: called.append(1))  # noqa: B023
            assert (result.applied, result.metrics["skipped_steps"], len(called)) == (taken, len(bad), int(taken))
            same = all(torch.equal(value, before[name]) for name, value in subject.parameters().items())
            assert same != taken
        assert all(torch.isfinite(value).all() for value in subject.parameters().values())


def check_nothing_to_learn(folder: Path, rank: int, trainer: dict) -> None:
    """Mini-batches whose advantages are all 0, or without trained tokens, change nothing, nor does Adam see them.

    Rewards of a group are equal, also where no float is their mean.
    """
    config = make_config(folder, "qwen3", trainer, ppo=PPOConfig(minibatches=2, algorithm="boba_grpo"))

    def train(subject: Trainer, trajectories: list[Trajectory]) -> dict[str, float]:
        called = []
        parts = split(trajectories, version=0, replicas=config.trainer.dp, minibatches=2, cap=128, seed=0)
        result = subject.train_batch(parts[subject.parallel.replica], before_step=lambda: called.append(1))
        assert result.applied and called == [1]
        return result.metrics

    equal, graded, blank, half = (update_data()[0] for _ in range(4))
    first, second = update_data()[1]
    for trajectory in (*equal, *graded, *blank, *half):
        trajectory.returns = []
    for trajectory in equal:
        trajectory.reward = 5.0
    for trajectory in graded:
        trajectory.reward = 0.7 / (1 + trajectory.prompt_id)
    for trajectory in (*blank, *(half[i] for i in first)):
        trajectory.loss_mask = np.zeros_like(trajectory.loss_mask)
    with open_trainer(folder, rank, config) as subject:
        before = {name: value.clone() for name, value in subject.parameters().items()}
        for trajectories in (equal, graded, blank):
            metrics = train(subject, trajectories)
            assert metrics["idle_steps"] == 2 and metrics["skipped_steps"] == 0 and "grad_norm" not in metrics
            assert (metrics["entropy"] > 0) == (trajectories is not blank)
            assert all(torch.equal(value, before[name]) for name, value in subject.parameters().items())
        assert train(subject, half)["idle_steps"] == 1
        learner = oracle.Learner(load_oracle(folder / "qwen3"), config)
        learner.ppo_update(half, [second])
        assert_parameters(subject, learner.model.state_dict(), atol=3e-5)

    config.ppo.penalty = PenaltyConfig(entropy=0.1)
    with open_trainer(folder, rank, config, "run-penalty") as subject:
        assert train(subject, equal)["idle_steps"] == 0


def check_idle_groups(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """An update with groups of equal rewards is plain code's, and nothing is computed of their answers, but for M2PO.

    cases: run folder → model, layout, bound of M2PO.
    """
    trajectories = make_trajectories(24, 0, seed=4, group=4)
    for trajectory in trajectories:
        if trajectory.prompt_id not in (1, 2, 3):
            trajectory.reward = 0.1
    masked = [int(t.loss_mask.sum()) for t in trajectories]
    idle = [t.prompt_id not in (1, 2, 3) for t in trajectories]
    for run, (model, layout, m2po) in cases.items():
        ppo = PPOConfig(minibatches=2, algorithm="grpo", correction=CorrectionConfig(m2po=m2po))
        config = make_config(folder, model, {"microbatch_tokens": 40, **layout}, ppo=ppo)
        plan = {"replicas": config.trainer.dp, "minibatches": 2, "cap": 40, "seed": 0, "within_group": True}
        with open_trainer(folder, rank, config, run) as subject:
            found = {"forward": [], "forward_backward": []}
            parts = split(trajectories, version=0, multiple=config.trainer.microbatch_multiple, **plan)
            with ExitStack() as stack:
                for pass_, tokens in found.items():
                    stack.enter_context(watched(pipeline, pass_, tokens))
                result = subject.train_batch(parts[subject.parallel.replica])
            halves = minibatches_of(parts)
            expected = once(
                subject, subject.run.folder / "plain.pt", partial(plain_steps, config, trajectories, halves)
            )
            assert_parameters(subject, expected["parameters"], atol=3e-5)
            metrics = result.metrics
            assert metrics["grad_norm"] == pytest.approx(expected["norm"], rel=1e-3)  # Adam hardly sees the size
            assert metrics["trained_tokens"] == sum(masked) and metrics["idle_steps"] == 0
            share = sum(own for own, without in zip(masked, idle, strict=True) if without) / sum(masked)
            assert metrics["zero_advantage_share"] == pytest.approx(share)
            lengths = [sum(trajectories[i].length for i in half if m2po or not idle[i]) for half in halves]
            assert all(lengths)  # each half has something to learn
            for pass_, least in (("forward", sum(lengths[0 if m2po else 1 :])), ("forward_backward", sum(lengths))):
                tokens = subject.parallel.sum_over_replicas(torch.tensor([float(sum(found[pass_]))])).item()
                assert least <= config.trainer.cp * tokens < 1.2 * least  # rows are padded for their layout


def minibatches_of(parts: list[BatchPart]) -> list[list[int]]:
    """The numbers of the trajectories of each mini-batch, of all replicas."""
    return [
        [part.trajectories[i].uid for part in parts for i in chain(*part.members[number])]
        for number in range(len(parts[0].minibatches))
    ]


def plain_steps(config: Config, trajectories: list[Trajectory], minibatches: list[list[int]]) -> dict:
    """Returns the parameters after an update, and the mean norm of its gradients."""
    learner = oracle.Learner(load_oracle(Path(config.model.path)), config)
    norms = learner.ppo_update(trajectories, minibatches)
    return {"parameters": learner.model.state_dict(), "norm": float(np.mean(norms))}


@contextmanager
def watched(module, name: str, found: list[int]):
    """Has the tokens of each call's micro-batches appended to `found`."""
    called = getattr(module, name)

    def spied(chunks, work, *others):
        found.append(pipeline.token_count(work))
        return called(chunks, work, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, spied)
        yield


def check_recompute(folder: Path, rank: int) -> None:
    """Whatever is recomputed, of all layers or of the first two, or by megatron-core, losses are equal and gradients
    but for the order in which they are added up."""
    settings = [(what, layers) for what in ("none", "elementwise", "mlp", "full") for layers in (0, 2)]
    settings.remove(("none", 2))
    settings += [("auto", 0)]  # with what megatron-core recomputes
    for model in ("qwen2", "qwen3", "qwen3_moe", "qwen3_balanced"):
        expected = {}
        for what, layers in settings:
            layout = {"recompute": what, "recompute_layers": layers}
            if what == "auto":
                modules = ["core_attn", "layernorm", "moe" if "3_" in model else "mlp"]
                layout["megatron"] = {"recompute_granularity": "selective", "recompute_modules": modules}
            with open_trainer(folder, rank, make_config(folder, model, layout)) as subject:
                MiniBatch(subject, *minibatch()).forward_backward(40)
                found = {name: value.clone() for name, value in whole_gradients(subject.policy).items()}
                loss = subject.supervised.step(sft_examples(0))["loss"]
                expected = expected or {"loss": loss, "gradient": found}
            assert loss == expected["loss"]
            norm = torch.stack([gradient.norm() for gradient in expected["gradient"].values()]).norm()
            for name, gradient in expected["gradient"].items():
                assert (found[name] - gradient).norm() <= 1e-6 * norm, (model, what, layers, name)
            if not layers and what in ("none", "full"):
                assert all(torch.equal(found[name], gradient) for name, gradient in expected["gradient"].items())


def check_variants(folder: Path, rank: int) -> None:
    """Recomputation changes nothing, naive PPO and sequence weighting follow the formula, half precision works."""
    weights = {}
    for model, recompute in product(("qwen3-short", "qwen3_moe-short"), ("none", "full")):
        with open_trainer(folder, rank, make_config(folder, model, {"recompute": recompute})) as subject:
            train_once(subject)
            weights[model, recompute] = subject.parameters()
    for (model, _), changed in weights.items():
        for name, value in weights[model, "none"].items():
            torch.testing.assert_close(changed[name], value, atol=1e-7, rtol=0)

    settings = PPOConfig(minibatches=2, objective="naive", algorithm="ppo_sequence")
    config = make_config(folder, "llama-short", {}, ppo=settings)
    with open_trainer(folder, rank, config) as subject:
        reference = load_oracle(folder / "llama-short")
        trajectories, plan = train_once(subject)
        oracle.Learner(reference, config).ppo_update(trajectories, plan)
        assert_parameters(subject, reference.state_dict(), atol=3e-5)

    for model, dtype in product(("qwen2-short", "qwen3_moe-short"), ("bfloat16", "float16")):
        config = make_config(folder, model, {}, dtype=dtype)
        with open_trainer(folder, rank, config) as subject:
            assert {value.dtype for value in subject.parameters().values()} == {getattr(torch, dtype)}
            examples = sft_examples(0)
            learner = oracle.Learner(load_oracle(folder / model), config)
            for _ in range(3):
                assert abs(subject.supervised.step(examples)["loss"] - learner.sft_step(examples)) < 0.05


def check_head(folder: Path, rank: int, model: str, tp: int, dtype: str) -> None:
    """Log-probabilities and their gradient are those of Hugging Face's output layer in float32, from the same hidden
    states. With logits of the model's dtype they are not.

    The log-probabilities of large logits are nearly exact, the gradient but for its last rounding.
    """
    for run, head_dtype in (("float32-head", "float32"), ("model-head", "model")):
        config = make_config(folder, model, {"tp": tp}, dtype=dtype)
        config.model.head_dtype = head_dtype
        with open_trainer(folder, rank, config, run) as subject:
            sequences = [np.concatenate((t.prompt, t.response)) for t in make_trajectories(12, 0)]
            trained = [np.arange(1, len(sequence)) for sequence in sequences]
            microbatch = pack(sequences, trained, subject._part)
            [hidden] = pipeline.forward(subject.policy.chunks, [(microbatch, lambda hidden: hidden)])
            hidden = hidden.detach().requires_grad_()
            weight = (20 * subject.ppo._objective._policy.output_weight.detach()).requires_grad_()
            vocabulary = subject.ppo._objective._sampled
            logprobs, entropies = token_logprobs(
                hidden, weight, microbatch.rows, microbatch.labels, vocabulary, entropy=True
            )
            (logprobs.sum() + 0.1 * entropies.sum()).backward()

            plain_hidden = gather_sequence(hidden.detach(), config).float().requires_grad_()
            head = load_oracle(folder / model).lm_head.to(subject.device)
            head.weight.data = gather_sequence(weight.detach(), config)[: subject.hf_config["vocab_size"]].float()
            logits = head(plain_hidden[microbatch.rows, 0]) / vocabulary.temperature
            plain = torch.distributions.Categorical(logits=logits)
            error = (logprobs - plain.log_prob(microbatch.labels)).abs().max()
            if head_dtype == "model":
                assert error > 1e-2, error
                continue
            assert error < 1e-3, error
            (plain.log_prob(microbatch.labels).sum() + 0.1 * plain.entropy().sum()).backward()
            for own, expected in ((hidden, plain_hidden), (weight, head.weight)):
                found = gather_sequence(own.grad, config)[: len(expected)]
                assert (found - expected.grad).norm() < 2 * torch.finfo(own.dtype).eps * expected.grad.norm()


def train_once(subject: Trainer) -> tuple[list[Trajectory], list[list[int]]]:
    trajectories = make_trajectories(12, 0)
    [plan] = partition([t.length for t in trajectories], 1, 2, 128, seed=0)
    [part] = split(trajectories, version=0, replicas=1, minibatches=2, cap=128, seed=0)
    assert subject.train_batch(part).applied
    return trajectories, [[i for microbatch in minibatch for i in microbatch] for minibatch in plan]


def check_decay(folder: Path, rank: int) -> None:
    """Without a gradient only weight decay changes parameters: matrices, but no bias and no norm."""
    optimizer = OptimizerConfig(lr=0.1, weight_decay=0.5, warmup_steps=0)
    config = make_config(folder, "qwen2", {}, ppo=PPOConfig(minibatches=2), optimizer=optimizer)
    with open_trainer(folder, rank, config) as subject:
        before = {name: value.clone() for name, value in subject.parameters().items()}
        optimizer = subject.policy.optimizer
        for _ in range(2):
            optimizer.zero_grad()
            assert optimizer.gradient_norm() == 0
            subject.policy.step(0.0, Steps())
        optimizer.settle()
        for name, value in subject.parameters().items():
            factor = 1.0 if name.endswith("bias") or "norm" in name else (1 - 0.1 * 0.5) ** 2
            torch.testing.assert_close(value, before[name] * factor, msg=lambda m, n=name: f"{n}: {m}")


def check_update_size(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """The size of an update is that of all weights, on the device or on the host; that of a sample is about as large.

    cases: run folder → settings of the optimizer, layout.
    """
    for run, (settings, layout) in cases.items():
        optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, warmup_steps=0, **settings)
        with open_trainer(folder, rank, make_config(folder, "qwen3", layout, optimizer=optimizer), run) as subject:
            found = []
            for update_size.WHOLE, update_size.STRIDE in ((2**16, 61), (100, 7)):
                before = [w.clone() for w in subject.policy.optimizer.main_weights()]
                trajectories = make_trajectories(12, 0)
                parts = split(trajectories, version=0, replicas=layout.get("dp", 1), minibatches=2, cap=128, seed=0)
                metrics = subject.train_batch(parts[subject.parallel.replica]).metrics
                after = [*subject.policy.optimizer.main_weights()]
                sums = [
                    sum((now - own).double().square().sum() for now, own in zip(after, before, strict=True)),
                    sum(own.double().square().sum() for own in before),
                ]
                change, size = subject.parallel.sum_over_ranks(torch.stack(sums)).tolist()
                found.append(metrics["update_size"] / (change / size) ** 0.5)
            assert found[0] == pytest.approx(1, abs=1e-5)
            assert 1e-4 < abs(found[1] - 1) < 0.15, found


def check_rate_limit(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Updates take the steps of the schedule, times what the plain formula says of the first mini-batch: with Hugging
    Face's log-probabilities, token by token. Every rank scales alike.

    cases: run folder → settings of the optimizer, layout.
    """
    for run, (settings, layout) in cases.items():
        keys = {"lr": 1e-3, "warmup_steps": 0, "weight_decay": 0.1, "schedule": "linear", "staleness_kl": 0.01}
        config = make_config(
            folder,
            "qwen3",
            layout,
            optimizer=OptimizerConfig(**keys, **settings),
            rollout=RolloutConfig(group_size=4, temperature=0.7, max_new_tokens=100, max_staleness=2),
            ppo=PPOConfig(minibatches=2),
        )
        with open_trainer(folder, rank, config, run) as subject:
            expected = once(subject, beside_model(subject, "rates"), partial(plain_rates, config))
            factors = expected["factors"]
            for version, (factor, last_rate) in enumerate(zip(factors, expected["last_rates"], strict=True)):
                trajectories, _ = training_data(version)
                for t, versions, logprobs in zip(
                    trajectories, expected["versions"][version], expected["logprobs"][version], strict=True
                ):
                    t.versions, t.logprobs = versions.numpy(), logprobs.numpy()
                plan = {"replicas": config.trainer.dp, "minibatches": 2, "cap": 128, "seed": version}
                part = split(trajectories, version=version, **plan)[subject.parallel.replica]
                metrics = subject.train_batch(part).metrics
                assert metrics["lr_factor"] == pytest.approx(factor, rel=1e-3)
                assert metrics["lr"] == pytest.approx(last_rate, rel=1e-3)
                found = subject.parallel.gather(np.float64(metrics["lr_factor"]).tobytes())
                assert len(set(found)) <= 1
            assert factors[0] == 1 and max(factors[2:]) < 0.5 and len(set(factors)) == 4, factors
            assert_parameters(subject, expected["parameters"], atol=3e-5)


def plain_rates(config: Config) -> dict:
    """Makes four updates on answers that get staler, with rates that are scaled by the plain formula.

    Returns the versions and log-probabilities of each update's answers, its factor and the rate of its last step, and
    the parameters after all of them.
    """
    eta, target, lr = config.rollout.max_staleness, config.optimizer.staleness_kl, config.optimizer.lr
    learner, random, seen = oracle.Learner(load_oracle(Path(config.model.path)), config), np.random.default_rng(3), []
    results = {"versions": [], "logprobs": [], "factors": [], "last_rates": []}
    paths, factors, step, steps = [], results["factors"], learner.step, config.updates * 2
    for version in range(4):
        trajectories, halves = training_data(version)
        ages, away, entropies = [], [], []
        for i, t in enumerate(trajectories):
            age = random.integers(0, min(version, eta) + 1, len(t.response)).astype(np.int32)
            with torch.no_grad():
                now, entropy = (own.numpy() for own in oracle.response(learner.model, t, 0.7))
            far = random.normal(0, 0.02 + 0.5 * age, len(now)).astype(np.float32)
            t.versions, t.logprobs = version - age, now - far
            if i in halves[0]:
                trained = t.loss_mask == 1
                ages += age[trained].tolist()
                away += far[trained].tolist()
                entropies += entropy[trained].tolist()
        ages, away = np.array(ages), np.array(away).clip(-2, 2)
        seen.append((ages, np.exp(away) - 1 - away, np.mean(entropies)))
        scheduled = [lr * (1 - k / (steps + 1)) for k in (2 * version + 1, 2 * version + 2)]
        found, rise = plain_factor(seen, paths, eta, target, 2 * scheduled[0])
        factors.append(float(min(found, rise * factors[-1]) if factors else found))
        rates = iter([factors[-1] * rate for rate in scheduled])

        def scaled(loss):
            rate = next(rates)  # noqa: B023
            for group in learner.optimizer.param_groups:
                group["lr"] = rate
            return step(loss)

        learner.step = scaled
        learner.ppo_update(trajectories, [sorted(half) for half in halves])
        paths.insert(0, sum(factors[-1] * rate for rate in scheduled))
        results["last_rates"].append(factors[-1] * scheduled[1])
        for name in ("versions", "logprobs"):
            results[name].append([torch.from_numpy(getattr(t, name)) for t in trajectories])
    return results | {"parameters": learner.model.state_dict()}


def plain_factor(seen: list, paths: list[float], eta: int, target: float, scheduled: float) -> tuple[float, float]:
    """Returns the factor of an update's rates, and how many times the last factor it may be, from (ages, divergences,
    mean entropy) of the first mini-batch of each update up to it, and the sums of the rates of the updates before it,
    the last one first."""
    now = len(seen) - 1
    divergence = path = age = entropy = count = tokens = differing = 0.0
    for update, (ages, divergences, mean_entropy) in enumerate(seen):
        weight, before = 0.8 ** (now - update), paths[now - update :]
        tokens, differing = 0.8 * tokens + np.sum(ages == 0), 0.8 * differing + divergences[ages == 0].sum()
        moved = divergences - differing / tokens
        divergence += weight * moved[ages > 0].sum() / len(ages)
        path += weight * np.mean([sum(before[:a]) ** 2 for a in ages])
        age += weight * np.mean(ages**2)
        entropy += weight * mean_entropy
        count += weight
    old = eta**2 if now < eta else age / count
    rise = 1.5 ** (1 / max(1, old**0.5))
    if not divergence > 0:
        return 1.0, rise
    largest = (target * entropy / count * path / divergence / old) ** 0.5
    return min(1.0, max(0.01, largest / scheduled)), rise


def check_replaced(folder: Path, rank: int) -> None:
    """A trainer whose run was started again writes nothing into any ledger."""
    run = RunFolder(folder / "begun", incarnation=0)
    with Trainer(make_config(folder, "qwen2", {}), run, rank) as subject:
        train_once(subject)
        subject.settle_ledger()
        before = {path: path.read_text() for path in (run.folder / "ledger").iterdir()}
        assert len(before) == 1
        RunFolder(run.folder).begin()
        with pytest.raises(Replaced, match="was started again"):
            train_once(subject)
        assert {path: path.read_text() for path in (run.folder / "ledger").iterdir()} == before


def check_logprob_memory(folder: Path, rank: int) -> None:
    """Log-probabilities of T tokens over V columns, and their gradient, need far less than T × V floats."""
    config = make_config(folder, "qwen3", {})
    tokens, columns = 8192, 16384
    with open_trainer(folder, rank, config):
        hidden = torch.randn(tokens, 1, 64, requires_grad=True)
        weight = torch.randn(columns, 64, requires_grad=True)
        labels = torch.randint(columns - 7, (tokens,))
        vocabulary = Vocabulary(size=columns - 7, temperature=1.0, tile=2**20, sequence_parallel=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        logprobs, entropies = token_logprobs(hidden, weight, torch.arange(tokens), labels, vocabulary, entropy=True)
        (logprobs + entropies).sum().backward()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < tokens * columns * 4 / 4, f"{grown / 2**20:.0f} MiB more"
        assert not weight.grad[columns - 7 :].any() and weight.grad[: columns - 7].any()


def check_missing_peer(folder: Path, rank: int) -> None:
    config = make_config(folder, "qwen3", {"dp": 2})
    config.machine.peer_timeout_s = 3
    with pytest.raises(RunError, match="trainer-0: not all 2 trainer ranks joined within 3 s"):
        Trainer(config, RunFolder(folder / "run"), rank)

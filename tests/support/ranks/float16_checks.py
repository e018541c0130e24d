"""Checks of training in float16 on trainer ranks, which test_float16.py starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_megatron.config import CriticConfig, PPOConfig
from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.packing.partition import split
from areal_megatron.run.folder import RunError
from areal_megatron.train import train
from areal_megatron.trainer import checkpoint, optimizer, pipeline
from areal_megatron.trainer.ppo import BatchResult
from areal_megatron.trainer.trainer import Trainer
from tests.support import training_oracle as oracle
from tests.support.comparison import pieces, whole_gradients
from tests.support.plain_results import gradients, make_trajectories, minibatch
from tests.support.ranks.pipeline_checks import work_of
from tests.support.ranks.trainer_checks import MiniBatch, make_config, open_trainer
from tests.support.tiny_models import canonical, load_oracle

TOO_LARGE = 2.0**20
"""A scale with which every gradient of the tiny models overflows."""


def scales(subject: Trainer) -> set[float]:
    """The scales of all learners and of all of Megatron's optimizers of each."""
    learners = subject.learners.values()
    return {float(scaler.scale) for learner in learners for scaler in learner.optimizer._scalers}


def set_scale(subject: Trainer, scale: float) -> None:
    for learner in subject.learners.values():
        for scaler in learner.optimizer._scalers:
            scaler._scale.fill_(scale)


def part_of(subject: Trainer, version: int) -> BatchPart:
    plan = {"replicas": subject.config.trainer.dp, "minibatches": 2, "cap": 128, "seed": version}
    return split(make_trajectories(12, version, seed=version), version=version, **plan)[subject.parallel.replica]


def copied(subject: Trainer) -> dict[str, torch.Tensor]:
    """All that a step changes: the parameters of all learners, and the main values and moments of their optimizers."""
    found = {}
    for name, learner in subject.learners.items():
        found |= {f"{name} {key}": value.clone() for key, value in learner.parameters().items()}
        for number, own in enumerate(learner.optimizer.own().values()):
            found |= {f"{name} {number} {state}": value.clone() for state, value in own.states.items()}
    return found


def check_gradients(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """The gradient is that of the plain formula in float64, whatever the scale of the loss; with the routers' loss too.

    cases: run folder → model, layout.
    """
    for run, (model, layout) in cases.items():
        with open_trainer(folder, rank, make_config(folder, model, layout, dtype="float16"), run) as subject:
            content, exact = minibatch(), load_oracle(folder / model).half().double()
            batch = MiniBatch(subject, *content)
            loss = oracle.ppo_loss(exact, *content, subject.config)
            if subject.hf_config.get("output_router_logits"):
                members = [members for replica in batch.microbatches(100) for members in replica]
                loss = loss + oracle.balance_loss(exact, batch.trajectories, members)
            loss.backward()
            expected = gradients(exact)
            norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
            for scale in (1.0, 32.0):
                set_scale(subject, scale)
                batch.forward_backward(100)
                error = abs(subject.policy.optimizer.gradient_norm() / norm - 1)
                assert error < 2e-3, f"the norm is off by {error:.1e} at scale {scale}"
                assert scales(subject) == {scale}
                for name, ours, theirs in pieces(subject, whole_gradients(subject.policy), canonical(expected)):
                    assert ours.dtype == torch.float32
                    error = float((ours - theirs).norm() / norm)
                    assert error < 2e-3, f"{name} is off by {error:.1e} of the norm at scale {scale}"


def check_residual(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """The largest activation that is reported is one between layers of the plain model, and 65,504 once the stream has
    left the range of float16.

    cases: run folder → model, layout.
    """
    for run, (model, layout) in cases.items():
        exact = load_oracle(folder / model).half().double()
        config = make_config(folder, model, layout, dtype="float16")
        with open_trainer(folder, rank, config, run) as subject:
            scale_embedding(subject, 100)
            with torch.no_grad():
                exact.get_input_embeddings().weight.mul_(100)
            part = part_of(subject, 0)
            largest = [largest_between_layers(exact, trajectory) for trajectory in part.trajectories]
            found = subject.train_batch(part).metrics["residual_max"]
            assert 0.99 * min(largest) < found < 1.01 * max(largest), (found, largest)
            scale_embedding(subject, float("inf"))
            assert subject.train_batch(part_of(subject, 1)).metrics["residual_max"] == 65504
            hooks = [len(module._forward_hooks) for chunk in subject.policy.chunks for module in chunk.modules()]
            for number in range(4):  # as a program has that anneals a setting
                subject.ppo_with({"clip_low": 0.1 + number / 100})
            assert hooks == [len(each._forward_hooks) for chunk in subject.policy.chunks for each in chunk.modules()]


@torch.no_grad()
def scale_embedding(subject: Trainer, times: float) -> None:
    for name, parameter in subject.policy.parameters().items():
        if "word_embeddings" in name:
            parameter.mul_(times)


@torch.no_grad()
def largest_between_layers(model: torch.nn.Module, trajectory: Trajectory) -> float:
    """Returns the largest absolute value that a layer hands on."""
    seen = []

    def look(_layer, _inputs, output):
        seen.append(float((output[0] if isinstance(output, tuple) else output).abs().max()))

    hooks = [layer.register_forward_hook(look) for layer in model.model.layers]
    model(torch.from_numpy(np.concatenate([trajectory.prompt, trajectory.response]).astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return max(seen)


def check_overflow(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """A gradient beyond the range of float16 changes nothing but the scale; the steps after it are taken.

    cases: run folder → model, layout.
    """
    for run, (model, layout) in cases.items():
        ppo = PPOConfig(minibatches=2, critic=CriticConfig(lr=1e-3))
        config = make_config(folder, model, layout, dtype="float16", ppo=ppo)
        with open_trainer(folder, rank, config, run) as subject:
            assert subject.train_batch(part_of(subject, 0)).applied  # so that there are moments that could change
            assert scales(subject) == {optimizer.LOSS_SCALING["initial_loss_scale"]}
            before = copied(subject)
            set_scale(subject, TOO_LARGE)
            refused = lambda: pytest.fail("a step was taken")  # noqa: E731
            result = subject.train_batch(part_of(subject, 1), before_step=refused)
            assert not result.applied and result.version == 1
            assert result.metrics["skipped_steps"] == result.metrics["value_skipped_steps"] == 2
            assert result.metrics["loss_scale"] == result.metrics["value_loss_scale"] == TOO_LARGE / 4
            assert scales(subject) == {TOO_LARGE / 4}
            for name, value in copied(subject).items():
                assert torch.equal(value, before[name]), name
            check_one_rank(subject)
            set_scale(subject, 1.0)
            result = subject.train_batch(part_of(subject, 1))
            assert result.applied and result.metrics["loss_scale"] == 1.0
            check_smallest(subject)


def check_one_rank(subject: Trainer) -> None:
    """All ranks, and Megatron's optimizers of experts and of all else, halve the scale if one element overflows."""
    set_scale(subject, 64.0)
    assert not math.isfinite(spoiled_norm(subject))
    assert {float(scaler.scale) for scaler in subject.policy.optimizer._scalers} == {32.0}


def check_smallest(subject: Trainer) -> None:
    """A run whose gradients overflow at every scale ends, and says what to do."""
    set_scale(subject, 2 * optimizer.LOSS_SCALING["min_loss_scale"])
    assert not math.isfinite(spoiled_norm(subject))
    with pytest.raises(RunError, match=r"train it with model\.dtype=bfloat16$"):
        spoiled_norm(subject)


def spoiled_norm(subject: Trainer) -> float:
    """Returns the norm of a gradient of which one element, on one rank, is infinite; of an expert if there are any."""
    subject.policy.optimizer.zero_grad()
    pipeline.forward_backward(subject.policy.chunks, work_of(subject))
    if subject.parallel.is_first:
        chunk = subject.policy.chunks[0]
        (chunk.expert_parallel_buffers or chunk.buffers)[0].grad_data[0] = torch.inf
    return subject.policy.optimizer.gradient_norm()


def check_version(folder: Path, rank: int) -> None:
    """A run whose first steps overflow counts them as batches, not as versions, and publishes nothing for them."""
    optimizer.LOSS_SCALING["initial_loss_scale"] = TOO_LARGE
    config = make_config(folder, "qwen3", {}, dtype="float16", ppo=PPOConfig(minibatches=1))
    with open_trainer(folder, rank, config) as subject:
        run, batches = Recorder(), 20
        train(subject, run, run, run, batches)
        applied = sum(run.applied)
        assert not any(run.applied[:4]) and 0 < applied < batches
        assert run.taken == [sum(run.applied[:number]) for number in range(batches)]
        assert run.published == list(range(applied + 1))
        assert scales(subject) == {TOO_LARGE / 2 ** (batches - applied)}


class Recorder:
    """Does what Experience, Weights and Checkpoints do, without a controller, engines and a disk."""

    def __init__(self):
        self.taken: list[int] = []
        self.applied: list[bool] = []
        self.published: list[int] = []

    def resume(self) -> tuple[int, int]:
        return 0, 0

    def take(self, number: int, version: int, publish: Callable[[int], None]) -> BatchPart:
        self.taken.append(version)
        [part] = split(make_trajectories(12, version), version=version, minibatches=1, cap=128, seed=1, replicas=1)
        return part

    def trained(self, number: int, result: BatchResult) -> None:
        self.applied.append(result.applied)

    def publish(self, version: int) -> None:
        self.published.append(version)

    def nothing(self, *_, **__) -> None: ...

    wait_until_read = after_update = save_hf = wait_until_delivered = finish = nothing
    in_place_of_the_model = staticmethod(nullcontext)


def check_checkpoint(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """A resumed run goes on with the scale of the loss, and with what is known of the steps since it changed.

    cases: run folder → model, layout; each resumes where the one before it has stopped, and the last is like the first.
    """
    expected, where = {}, None
    for run, (model, layout) in cases.items():
        config = make_config(folder, model, layout, dtype="float16", ppo=PPOConfig(minibatches=2))
        with open_trainer(folder, rank, config, run) as subject:
            if where is None:
                set_scale(subject, 64.0)
                assert subject.train_batch(part_of(subject, 0)).applied
            else:
                checkpoint.load(subject, where)
            states = [scaler.state_dict() for scaler in subject.policy.optimizer._scalers]
            assert all(state == states[0] for state in states)
            assert (float(states[0]["scale"]), states[0]["growth_tracker"]) == (64.0, 2)
            where = folder / f"checkpoint-{run}"
            saver = checkpoint.Saver(subject)
            saver.begin(where)
            saver.wait()
            subject.parallel.barrier()  # rank 0 has waited for the others
            for scaler in subject.policy.optimizer._scalers:
                scaler._growth_tracker = scaler.growth_interval - 1
            result = subject.train_batch(part_of(subject, 1))
            assert result.applied and result.metrics["loss_scale"] == 128.0 and scales(subject) == {128.0}
            after = copied(subject)
            for name, value in expected.setdefault(str(layout), after).items():
                assert torch.equal(value, after[name]), name

"""Checks of adapters on trainer ranks, which tests start (conftest.on_ranks)."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config, CorrectionConfig, LoraConfig, PenaltyConfig, PPOConfig
from areal_megatron.data.examples import Sample
from areal_megatron.models.adapter import Adapter
from areal_megatron.models.pattern import numbers
from areal_megatron.packing.partition import split
from areal_megatron.planning.memory.trainer import stage_memory
from areal_megatron.reshard.boxes import Box
from areal_megatron.run.folder import RunError
from areal_megatron.trainer import checkpoint, pipeline
from areal_megatron.trainer.batch import pack_trajectories
from areal_megatron.trainer.objective import trained_logprobs
from areal_megatron.trainer.parallel import seed_generators
from areal_megatron.trainer.trainer import Trainer
from tests.support import training_oracle as oracle
from tests.support.adapter_oracle import adapted_oracle, factors_among, value
from tests.support.comparison import rounding, whole_gradients
from tests.support.plain_results import TOKENS, beside_model, make_trajectories, minibatch, once, update_data
from tests.support.ranks.checkpoint_checks import update
from tests.support.ranks.prompt_checks import with_prompts
from tests.support.ranks.supervised_checks import DPO, STILL, dpo_figures, make_pairs
from tests.support.ranks.trainer_checks import MiniBatch, make_config, open_trainer
from tests.support.tiny_models import load_oracle

LORA = LoraConfig(rank=4, alpha=10.0)


def adapter_config(folder: Path, family: str, layout: dict, lora: LoraConfig | None = None, **sections) -> Config:
    """By default all linear layers have adapters, those of experts, too."""
    lora = lora or (replace(LORA, rank=8, experts=True) if family == "qwen3_moe" else LORA)
    penalty = PenaltyConfig(entropy=0.3, kl=0.2, kl_form="k3")
    ppo = PPOConfig(minibatches=2, correction=CorrectionConfig(truncate=3.0), penalty=penalty)
    return make_config(folder, family, layout, **{"lora": lora, "ppo": ppo, **sections})


def set_random(subject: Trainer) -> None:
    """Gives the factors the oracle's random values, as a run does that starts from its folder."""
    fill(subject, value)
    for optimizer in subject.policy.optimizer._distributed():
        optimizer._copy_model_params_to_main_params()


def fill(subject: Trainer, of: Any) -> None:
    layout = subject.policy.adapters
    for piece in layout.pieces:
        for name, region, view in piece.tensors(subject.policy.factors()):
            view.copy_(of(name, layout.canonical[piece.tensor][numbers(piece.tensor) :])[region])


def plain(subject: Trainer, name: str) -> dict[str, Any]:
    """Returns what plain code gives for all layouts of a model."""
    return once(subject, beside_model(subject, name), lambda: compute(subject.config))


def content() -> tuple:
    """Returns a mini-batch whose groups have a prompt each."""
    trajectories, *others = minibatch()
    return with_prompts(trajectories), *others


def compute(config: Config) -> dict[str, Any]:
    folder = Path(config.model.path)
    lora = config.lora
    model = adapted_oracle(folder, lora.rank, Adapter.of(lora).scale, lora.names, lora.experts)
    trajectories, temperature = make_trajectories(7, version=0), config.rollout.temperature
    with torch.no_grad():
        logprobs = [oracle.response_logprobs(model, t, temperature)[t.loss_mask == 1] for t in trajectories]
    exact = copy.deepcopy(model).double()
    oracle.ppo_loss(exact, *content(), config).backward()
    gradient = {name: parameter.grad for name, parameter in exact.named_parameters() if parameter.requires_grad}
    learner = oracle.Learner(model, config)
    learner.reference = load_oracle(folder)  # without adapters
    learner.ppo_update(*update_data())
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {"logprobs": torch.cat(logprobs), "gradient": factors_among(gradient), "trained": factors_among(trained)}


def pieces(subject: Trainer, held: dict, expected: dict):
    assert {*held} >= {*subject.policy.adapters.parameters}
    for piece in subject.policy.adapters.pieces:
        for name, region, view in piece.tensors(held):
            yield name, view.double(), expected[name][region].double()


def check_layouts(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Log-probabilities, gradients, their norm and an update with adapters are those of plain code, in every layout.

    cases: run folder → model, layout, settings of lora. Each starts from a PEFT folder.
    """
    for run, (model, layout, settings) in cases.items():
        lora = LoraConfig(**{"rank": 4, "alpha": 10.0, **settings, "start": str(folder / f"{run}-start")})
        with open_trainer(folder, rank, adapter_config(folder, model, layout, lora), run) as subject:
            expected = plain(subject, f"adapters-{lora.targets}-{Adapter.of(lora).scale}-{lora.experts}")
            check_logprobs(subject, expected["logprobs"])
            check_frozen(subject)
            alone = subject.parallel.world == 1  # where both caps are tried both ways
            for shares, cap in ((False, 40), (True, 400), *(((False, 400), (True, 40)) if alone else ())):
                check_gradient(subject, expected["gradient"], cap, shares)
            check_update(subject, expected["trained"])


def check_dropout(folder: Path, rank: int, cases: dict[str, dict]) -> None:
    """Gradients drop parts of what adapters get, the same where they are recomputed; log-probabilities are whole.

    cases: run folder → layout, of a model of which the first one recomputes nothing.
    """
    found = []
    for run, layout in cases.items():
        lora = replace(LORA, dropout=0.25, start=str(folder / f"{run}-start"))
        with open_trainer(folder, rank, adapter_config(folder, "qwen3", layout, lora), run) as subject:
            expected = plain(subject, "whole")
            check_logprobs(subject, expected["logprobs"])
            norm = torch.stack([gradient.norm() for gradient in expected["gradient"].values()]).norm()
            for seed in (rank, rank, 7 + rank):
                seed_generators(seed)
                MiniBatch(subject, *content()).forward_backward(400)
                held = whole_gradients(subject.policy)
                found.append({name: view.clone() for name, view, _ in pieces(subject, held, expected["gradient"])})
                apart = [
                    (ours - theirs).norm() / norm for _, ours, theirs in pieces(subject, held, expected["gradient"])
                ]
                assert max(apart) > 0.01
    apart = [max(float((each[name] - values).abs().max()) for name, values in found[0].items()) for each in found[1:]]
    same, others = [a for n, a in enumerate(apart, 1) if n % 3 < 2], [a for n, a in enumerate(apart, 1) if n % 3 == 2]
    assert max(same) < 1e-6 and min(others) > 1e-3, (same, others)


def check_begin(subject: Trainer) -> None:
    """An adapter begins as nothing at all, but can be trained: A is not zero."""
    held = subject.policy.factors()
    assert all(values.any() == name.endswith("lora_A") for name, values in held.items())
    base = subject.policy.parameters()
    assert all(torch.equal(values, base[name]) for name, values in subject.parameters().items())


def check_frozen(subject: Trainer) -> None:
    """Nothing but the factors has a gradient, a buffer or a state in the optimizer."""
    own = sum(values.numel() for values in subject.policy.factors().values())
    buffers = [buffer for chunk in subject.policy.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    padded = sum(buffer.numel for buffer in buffers)
    padding = padded - own
    assert 0 <= padding <= 0.1 * own + 4096 * len(buffers)
    states = sum(run.stop - run.start for run in subject.policy.optimizer.own().values())
    assert states <= own


def check_logprobs(subject: Trainer, expected: torch.Tensor) -> None:
    batch = pack_trajectories(make_trajectories(7, version=0), [0.0] * 7, [1.0] * 7, 0, "recompute", subject._part)
    objective = subject.ppo._objective
    found = partial(trained_logprobs, objective._policy, objective._sampled, microbatch=batch.microbatch)
    for logprobs, _ in pipeline.forward(subject.policy.chunks, [(batch.microbatch, found)]):
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def check_gradient(subject: Trainer, expected: dict[str, torch.Tensor], cap: int, shares: bool) -> None:
    """Each part is within 3e-6 of the norm of the whole gradient, or somewhat more of gated delta nets (`rounding`);
    it is also the norm for clipping."""
    MiniBatch(subject, *content(), shares_prompts=shares).forward_backward(cap)
    compare_gradients(subject, expected)


def compare_gradients(subject: Trainer, expected: dict[str, torch.Tensor]) -> None:
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert norm > 0.1
    assert (error := abs(subject.policy.optimizer.gradient_norm() / norm - 1)) < 1e-5, f"the norm is off by {error:.1e}"
    for name, ours, theirs in pieces(subject, whole_gradients(subject.policy), expected):
        error, most = float((ours - theirs).norm() / norm), 3e-6 * rounding(subject)
        assert error < most, f"{name} is off by {error:.1e} of the norm"


def check_update(subject: Trainer, expected: dict[str, torch.Tensor]) -> None:
    config, before = subject.config, {name: each.clone() for name, each in subject.policy.parameters().items()}
    parts = split(update_data()[0], version=0, replicas=config.trainer.dp, minibatches=2, cap=128, seed=0)
    assert subject.train_batch(parts[subject.parallel.replica]).applied
    for name, ours, theirs in pieces(subject, subject.policy.factors(), expected):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert all(torch.equal(values, before[name]) for name, values in subject.policy.parameters().items())


def check_preferences(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """A step of DPO with adapters, whose reference is the model without them, is that of plain code.

    cases: run folder → model, layout. Each starts from a PEFT folder.
    """
    for run, (model, layout) in cases.items():
        lora = replace(LORA, start=str(folder / f"{run}-start"))
        config = replace(make_config(folder, model, layout, optimizer=STILL, lora=lora), mode="dpo", dpo=DPO)
        policy = adapted_oracle(folder / model, lora.rank, Adapter.of(lora).scale, lora.names).double()
        pairs = make_pairs(7, seed=1)
        expected = dpo_figures(policy, load_oracle(folder / model).double(), pairs)
        expected.pop("objective").backward()
        expected = {name: float(value) for name, value in expected.items()}
        gradient = factors_among({name: p.grad for name, p in policy.named_parameters() if p.requires_grad})
        with open_trainer(folder, rank, config, run) as subject:
            metrics = subject.supervised.step(pairs)
            assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
            compare_gradients(subject, gradient)


def check_memory(folder: Path, rank: int, model: str, cases: dict[str, tuple]) -> None:
    """Factors, their gradients and optimizer states take 18 bytes a parameter, and the peak of a step is the plan's.

    cases: run folder → dtype, recompute.
    """
    tokens = np.random.default_rng(1).integers(0, TOKENS, 512, dtype=np.int32)
    sample = Sample(tokens, np.arange(1, len(tokens)), len(tokens) - 1)
    for run, (dtype, recompute) in cases.items():
        layout = {"microbatch_tokens": len(tokens), "recompute": recompute}
        config = replace(make_config(folder, model, layout, lora=LoraConfig(rank=16), dtype=dtype), mode="sft")
        with open_trainer(folder, rank, config, run) as subject:
            subject.supervised.step([sample])  # the optimizer makes its states in its first step
            with Alive() as made:
                subject.supervised.step([sample])
            trained = sum(values.numel() for values in subject.policy.factors().values())
            held = sum(states_of(subject).values())
            assert held == pytest.approx((18 if dtype == "bfloat16" else 16) * trained, rel=0.01)
            base = sum(values.nbytes for values in subject.policy.parameters().values())
            plan = stage_memory(config, subject.hf_config, 0, on_cuda=False)
            assert base + held + made.peak == pytest.approx(plan.total, rel=0.1), (run, plan)


def states_of(subject: Trainer) -> dict[str, int]:
    """Returns the bytes of what is trained, of its gradients, and of the optimizer's states."""
    optimizer = subject.policy.optimizer
    buffers = [buffer for chunk in subject.policy.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    states = [moments[name] for moments in optimizer._moments() for name in ("exp_avg", "exp_avg_sq")]
    if subject.config.model.dtype != "float32":
        states += [main for group in optimizer.megatron.param_groups for main in group["params"]]
    return {
        "parameters": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(each.nbytes for each in states),
    }


class Alive(TorchDispatchMode):
    """Finds the most bytes that are alive at a time of what is computed within it."""

    def __init__(self):
        super().__init__()
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {storage.cdata for storage, _ in self._storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        made = {storage.cdata: (storage, size) for storage, size in self._storages(result)}
        alive = self._alive | {key: each for key, each in made.items() if key not in given}
        self._alive = {key: each for key, each in alive.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result

    @staticmethod
    def _storages(tree):
        tensors = (each for each in tree_leaves(tree) if isinstance(each, torch.Tensor))
        return [(StorageWeakRef(each.untyped_storage()), each.untyped_storage().nbytes()) for each in tensors]


def check_straight(folder: Path, rank: int, family: str, layout: dict) -> None:
    """Makes four updates, saves after two of them, and keeps metrics and factors in files."""
    with open_trainer(folder, rank, adapter_config(folder, family, layout), "straight") as subject:
        check_begin(subject)
        set_random(subject)
        saver = checkpoint.Saver(subject)
        metrics = update(subject, 0, 2, saver)
        saver.begin(folder / "saved")
        metrics += update(subject, 2, 4, saver)
        saver.begin(folder / "last" / "trainer")
        saver.wait()
        torch.save([*own_pieces(subject)], folder / f"factors-{rank}.pt")
        for name, mapping in {"once": subject.exported(), "kept": subject.parameters()}.items():
            export(subject, folder / name, mapping)
        hf.export_adapter(
            subject.policy.factors(),
            adapter=Adapter.of(subject.config.lora),
            base=subject.config.model.path,
            path=folder / "adapter",
            **of_rank(subject),
        )
        if subject.parallel.is_first:
            (folder / "metrics.json").write_text(json.dumps(metrics))


def of_rank(subject: Trainer) -> dict[str, Any]:
    return {"hf_config": subject.hf_config, "sizes": subject.sizes, "rank": subject.parallel.rank}


def export(subject: Trainer, path: Path, parameters: Mapping[str, torch.Tensor]) -> None:
    hf.export(parameters, source=subject.config.model.path, path=path, **of_rank(subject))


def check_resumed(folder: Path, rank: int, family: str, cases: dict[str, dict], exact: bool) -> None:
    """The rest of those updates from the checkpoint, under other layouts, ends where they ended."""
    expected = json.loads((folder / "metrics.json").read_text())
    files = [torch.load(file, weights_only=True) for file in folder.glob("factors-*.pt")]
    whole = {}
    for name, start, stop, values in (piece for file in files for piece in file):
        whole.setdefault(name, {})[tuple(start), tuple(stop)] = values
    for run, layout in cases.items():
        with open_trainer(folder, rank, adapter_config(folder, family, layout), run) as subject:
            checkpoint.load(subject, folder / "saved")
            metrics = update(subject, 2, 4)
            for found, straight in zip(metrics, expected[2:], strict=True):
                assert found == pytest.approx(straight, rel=0 if exact else 1e-4, abs=0 if exact else 1e-6)
            for name, start, stop, ours in own_pieces(subject):
                for (first, last), theirs in whole[name].items():
                    common = Box(tuple(start), tuple(stop)).intersection(Box(first, last))
                    if common:
                        of = [
                            values[common.within(Box(tuple(at), tuple(end))).slices]
                            for values, at, end in ((ours, start, stop), (theirs, first, last))
                        ]
                        torch.testing.assert_close(*of, atol=0 if exact else 1e-6, rtol=0)


def check_other(folder: Path, rank: int, family: str) -> None:
    """A checkpoint of other adapters is refused in one line, and so is one of adapters by a run without any."""
    saved = re.escape(Adapter.of(adapter_config(folder, family, {}).lora).settings)
    wider = adapter_config(folder, family, {}, LoraConfig(rank=8, alpha=10.0))
    cases = {
        "other": (wider, f"it has {saved}, and the config asks for lora.rank=8"),
        "none": (make_config(folder, family, {}), "config asks for no adapters"),
    }
    for run, (config, problem) in cases.items():
        with open_trainer(folder, rank, config, run) as subject, pytest.raises(RunError, match=problem):
            checkpoint.load(subject, folder / "saved")
    common = folder / "saved" / "common.pt"
    held = torch.load(common, weights_only=False)
    if not held["adapter"].pop("experts"):  # as it was saved when there was no such key
        torch.save(held, common)
        with open_trainer(folder, rank, adapter_config(folder, family, {}), "other") as subject:
            checkpoint.load(subject, folder / "saved")


def own_pieces(subject: Trainer):
    """Yields (name, start, stop, values) of each piece of a factor on this rank."""
    for piece in subject.policy.adapters.pieces:
        for name, region, view in piece.tensors(subject.policy.factors()):
            yield name, [s.start for s in region], [s.stop for s in region], view.clone()

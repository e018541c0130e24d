"""Checks of supervised training on trainer ranks, which test_supervised.py starts: against plain formulas with Hugging
Face models in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from areal_megatron.checkpoint import hf
from areal_megatron.config import DPOConfig, OptimizerConfig, SFTConfig
from areal_megatron.data.examples import Sample
from areal_megatron.data.pairs import Pair
from areal_megatron.rank.weights import save_hf
from areal_megatron.reshard.trainer_layout import is_head, layout
from areal_megatron.trainer import pipeline
from areal_megatron.trainer.model import tensors
from areal_megatron.trainer.trainer import Trainer
from tests.support.comparison import assert_gradient
from tests.support.plain_results import TOKENS, gradients, sft_examples
from tests.support.ranks.trainer_checks import make_config, open_trainer
from tests.support.tiny_models import load_oracle
from tests.support.training_oracle import distributions

STILL = OptimizerConfig(lr=0.0, clip_grad=0.0, warmup_steps=0)
"""A step moves nothing, so that its gradient stays to be looked at."""
DPO = DPOConfig(beta=0.3, label_smoothing=0.1)


def check_lessons(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """cases: run folder → model, layout, mode. Each model has another of its kind beside it, named `<model>-other`."""
    for run, (model, trainer, mode) in cases.items():
        config = replace(make_config(folder, model, trainer, optimizer=STILL), mode=mode, dpo=DPO)
        if mode == "rows":
            config = replace(config, mode="sft", sft=SFTConfig(mean="row"))
        checks = {"sft": check_examples, "rows": check_rows, "dpo": check_dpo, "reward_model": check_reward_model}
        with open_trainer(folder, rank, config, run) as subject:
            checks[mode](subject, folder / model)


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Random pairs whose answers are of very different lengths."""
    random, pairs = np.random.default_rng(seed), []
    for number in range(count):
        prompt, *answers = (
            random.integers(0, TOKENS, length, dtype=np.int32) for length in (*random.integers(1, 9, 2), 1)
        )
        answers[number % 2] = random.integers(0, TOKENS, 5 + 8 * number, dtype=np.int32)
        pairs.append(Pair(*(np.concatenate((prompt, answer)) for answer in answers), len(prompt)))
    return pairs


def check_examples(subject: Trainer, folder: Path) -> None:
    """Held-out loss and the share of tokens that are the likeliest, of one file with fewer examples than replicas."""
    plain = load_oracle(folder).double()
    files = {"some": sft_examples(3), "one": [greedy(plain, sft_examples(4)[2])]}
    found = subject.supervised.evaluate(files)
    measured = []
    for name, examples in files.items():
        own = []
        for example in examples:
            with torch.no_grad():
                logprobs = distributions(plain, example.tokens, 1.0)[example.trained - 1]
            labels = torch.from_numpy(example.tokens[example.trained].astype(np.int64))
            own.append(torch.stack([-logprobs.gather(1, labels[:, None])[:, 0], (logprobs.argmax(1) == labels) + 0.0]))
        measured.append(torch.cat(own, 1))
        loss, accuracy = measured[-1].mean(1).tolist()
        assert found["files"][name] == pytest.approx(
            {"loss": loss, "accuracy": accuracy, "items": len(examples)}, abs=1e-5
        )
    loss, accuracy = torch.cat(measured, 1).mean(1).tolist()
    assert found["loss"] == pytest.approx(loss, abs=1e-5) and found["items"] == 9
    assert found["accuracy"] == pytest.approx(accuracy) and 0 < accuracy < found["files"]["one"]["accuracy"]


def greedy(model: torch.nn.Module, example: Sample) -> Sample:
    """Returns the sample with a response of the likeliest tokens, but for the last one, all of which is trained."""
    begin = int(example.trained[0])
    tokens = example.tokens[:begin]
    with torch.no_grad():
        for _ in range(6):
            logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
            tokens = np.append(tokens, np.int32(logits.argmax()))
    tokens[-1] = (tokens[-1] + 1) % TOKENS
    return Sample(tokens.astype(np.int32), np.arange(begin, len(tokens)), len(tokens) - begin)


def check_rows(subject: Trainer, folder: Path) -> None:
    """The mean over rows of the mean of each, where rows have several samples, which replicas divide between them."""
    plain, samples, rows = load_oracle(folder).double(), sft_examples(5), []
    for number, first in enumerate((0, 3, 4, 6)):
        own = samples[first : (3, 4, 6, 8)[number]]
        rows.append([replace(sample, row_tokens=sum(len(each.trained) for each in own)) for sample in own])
    losses = []
    for own in rows:
        logprobs = [
            distributions(plain, sample.tokens, 1.0)[sample.trained - 1].gather(
                1, torch.from_numpy(sample.tokens[sample.trained].astype(np.int64))[:, None]
            )
            for sample in own
        ]
        losses.append(-torch.cat(logprobs).mean())
    expected = torch.stack(losses).mean()
    expected.backward()
    metrics = subject.supervised.step([sample for own in rows for sample in own])
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["trained_tokens"] == sum(len(sample.trained) for sample in samples)
    assert_gradient(subject, gradients(plain))


def check_dpo(subject: Trainer, folder: Path) -> None:
    """The policy has moved away from its reference: it has the weights of another model."""
    other = folder.with_name(f"{folder.name}-other")
    hf.load(subject.parameters(), layout(subject.hf_config, subject.sizes, subject.parallel.rank), other)
    pairs, plain = make_pairs(7, seed=1), load_oracle(other).double()
    expected = dpo_figures(plain, load_oracle(folder).double(), pairs)
    expected.pop("objective").backward()
    expected = {name: float(value) for name, value in expected.items()}
    metrics = subject.supervised.step(pairs)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert metrics["trained_tokens"] == sum(len(t) - p.prompt_length for p in pairs for t in (p.chosen, p.rejected))
    assert_gradient(subject, gradients(plain))
    found = subject.supervised.evaluate({"some": pairs, "none": []})
    assert {name: found["files"]["some"][name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


def dpo_figures(policy: torch.nn.Module, reference: torch.nn.Module, pairs: list[Pair]) -> dict[str, Tensor]:
    """Returns the loss of DPO by Equation 7 of its paper, once more to differentiate it, and what is said of it."""

    def logprobs(model, tokens, prompt):
        labels = torch.from_numpy(tokens[prompt:].astype(np.int64))[:, None]
        return distributions(model, tokens, 1.0)[prompt - 1 :].gather(1, labels)[:, 0]

    rewards, divergences, likelihoods, losses = [], [], [], []
    for pair in pairs:
        own = []
        for tokens in (pair.chosen, pair.rejected):
            now = logprobs(policy, tokens, pair.prompt_length)
            with torch.no_grad():
                before = logprobs(reference, tokens, pair.prompt_length)
            own.append(DPO.beta * (now.sum() - before.sum()))
            divergences.append(((before - now).exp() - 1 - (before - now)).detach())
            likelihoods += [now.detach()] if tokens is pair.chosen else []
        rewards.append(torch.stack(own))
        right = 1 / (1 + (own[1] - own[0]).exp())
        losses.append(-(1 - DPO.label_smoothing) * right.log() - DPO.label_smoothing * (1 - right).log())
    chosen, rejected = torch.stack(rewards).T
    loss = torch.stack(losses).mean()
    return {
        "objective": loss,
        "loss": loss.detach(),
        "accuracy": (chosen > rejected).double().mean(),
        "margin": (chosen - rejected).mean().detach(),
        "reward_chosen": chosen.mean().detach(),
        "reward_rejected": rejected.mean().detach(),
        "kl": torch.cat(divergences).mean(),
        "logprob_chosen": torch.cat(likelihoods).mean(),
    }


def check_reward_model(subject: Trainer, folder: Path) -> None:
    """The head is zero at first; with random weights, the exported model gives the trainer's scores in transformers."""
    pairs = make_pairs(7, seed=2)
    assert subject.supervised.step(pairs)["loss"] == pytest.approx(math.log(2))
    described = AutoConfig.from_pretrained(folder, num_labels=1)
    plain = AutoModelForSequenceClassification.from_config(described, experts_implementation="eager")
    plain.model.load_state_dict(load_oracle(folder).model.state_dict())
    plain = plain.double().eval()
    plain.score.weight.data = torch.randn(plain.score.weight.shape, generator=torch.Generator().manual_seed(3)).double()
    for name, values in tensors(subject.policy.chunks).items():
        if is_head(name):
            assert not values.any()
            values.copy_(plain.score.weight.data)

    scores = torch.stack([score(plain, tokens) for pair in pairs for tokens in (pair.chosen, pair.rejected)])
    margins = scores[0::2] - scores[1::2]
    loss = (1 + (-margins).exp()).log().mean()
    loss.backward()
    metrics = subject.supervised.step(pairs)
    expected = {
        "loss": loss,
        "accuracy": (margins > 0).double().mean(),
        "margin": margins.mean(),
        "score_mean": scores.mean(),
        "score_std": scores.std(correction=0),
    }
    expected = {name: float(value.detach()) for name, value in expected.items()}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert_gradient(subject, gradients(plain))

    save_hf(subject.config, subject.run, subject)
    subject.parallel.barrier()
    loaded = AutoModelForSequenceClassification.from_pretrained(subject.run.hf, dtype=torch.float32).eval()
    assert loaded.config.num_labels == 1
    rows = subject.supervised._rows(pairs)
    found = pipeline.forward(subject.policy.chunks, [(own.microbatch, partial(_scores, own=own)) for own in rows])
    with torch.no_grad():
        again = torch.stack([score(loaded, tokens) for pair in pairs for tokens in (pair.chosen, pair.rejected)])
    torch.testing.assert_close(again.double(), scores.detach(), atol=1e-5, rtol=0)
    for own in found:
        assert torch.isclose(own[:, None], again, atol=1e-5, rtol=0).any(1).all()


def score(model: torch.nn.Module, tokens: np.ndarray) -> Tensor:
    return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, 0]


def _scores(output: Tensor, own) -> Tensor:
    return own.microbatch.of_all_ranks(output.index_select(0, own.microbatch.rows))

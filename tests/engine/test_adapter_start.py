"""`areal evaluate` of adapters in PEFT's folders, with a real engine, against transformers and the formula of LoRA."""

import asyncio
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from areal_megatron.engine.adapters import Named, told
from areal_megatron.engine.client import EngineError
from areal_megatron.engine.environment import ADAPTERS
from areal_megatron.launch import evaluate
from areal_megatron.models.adapter import Adapter
from tests.conftest import ROOT
from tests.support.adapter_oracle import adapted_oracle, write_adapter
from tests.support.engines import ask, make_run, started_engine
from tests.support.likeliest import likeliest
from tests.support.tiny_models import load_oracle

ITEMS, LENGTH = 6, 12


def evaluated(*arguments):
    command = [sys.executable, "-m", "areal_megatron.launch.evaluate", *map(str, arguments)]
    command += ["--temperature", "0", "--max-new-tokens", str(LENGTH), "--reward", "tests.support.rewards:coarse"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240, env=environment)


@pytest.mark.soak  # what one of several answers is compared below
def test_an_adapter_is_evaluated_on_its_base(world, tmp_path):
    """Its name of the base may be of another machine; the same command resumes, another adapter is refused."""
    adapter = write_adapter(tmp_path / "adapter", world / "model", 5, 12, base_model_name_or_path="elsewhere/model")
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join((world / "heldout.jsonl").read_text().splitlines(keepends=True)[:ITEMS]))
    arguments = adapter, data, "--base", world / "model", "--out", out
    done = evaluated(*arguments)
    assert done.returncode == 0, done.stderr
    options = evaluate._options([str(world / "model"), str(data), "--max-new-tokens", str(LENGTH)])
    asked = evaluate.OfflineEvaluation(options)
    answers = {line["item"]: line for line in map(json.loads, (out / "answers.jsonl").read_text().splitlines())}
    adapted = adapted_oracle(world / "model", 5, 12 / 5, ["all-linear"])
    base, differs = load_oracle(world / "model"), 0
    for prompt in asked.prompts:
        expected = likeliest(adapted, prompt.tokens, asked.tokenizer.stop_tokens, LENGTH)
        assert answers[prompt.id]["response"] == asked.tokenizer.decode(expected)
        assert answers[prompt.id]["tokens"] == len(expected)
        differs += expected != likeliest(base, prompt.tokens, asked.tokenizer.stop_tokens, LENGTH)
    assert len(answers) == ITEMS and differs == ITEMS

    again = evaluated(*arguments)
    assert again.returncode == 0 and f"continuing after {ITEMS} answers" in again.stderr
    shutil.rmtree(adapter)
    write_adapter(adapter, world / "model", 5, 12, ["q_proj"])
    refused = evaluated(*arguments)
    assert refused.returncode == 2 and "was begun with other files of the adapter" in refused.stderr


SEVERAL = {"all": (5, 12.0, ["all-linear"]), "values": (16, 8.0, ["v_proj"]), "mlp": (1, 3.0, ["up_proj", "down_proj"])}
"""Adapters of other ranks, scales and targets."""


def oracles(base):
    """Transformers' models: the base, and with each adapter."""
    adapted = {
        name: adapted_oracle(base, rank, alpha / rank, targets) for name, (rank, alpha, targets) in SEVERAL.items()
    }
    return {"": load_oracle(base)} | adapted


def test_several_adapters_are_asked_at_the_same_time_as_the_model_without_one(world, tmp_path):
    """What each samples has the log-probabilities that transformers gives it: no request has another one's adapter."""
    run, _ = make_run(tmp_path / "run", world, rollout={"first_weights": "model"})
    named = [
        Named(name, str(write_adapter(tmp_path / name, world / "model", *own)), Adapter(own[0], own[1], tuple(own[2])))
        for name, own in SEVERAL.items()
    ]
    prompts = [[3, 5, 1 + k, 7] for k in range(4)]
    ways = [(name, prompt) for prompt in prompts for name in ("", *SEVERAL)]

    async def sampled(client):
        def sample(number, name, prompt):
            options = {"max_tokens": 200, "temperature": 1.0, "stop_tokens": [], "request_id": f"{number}"}
            return client.generate(prompt, n=1, adapter=name, **options)

        with pytest.raises(EngineError, match="no adapter 'other' is served"):
            await sample(-1, "other", prompts[0])
        asking = asyncio.gather(*(sample(number, *way) for number, way in enumerate(ways)))
        most = 0
        while not asking.done():
            most = max(most, (await client.load()).running)
            await asyncio.sleep(0.05)
        return most, await asking

    with started_engine(run, **{ADAPTERS: told(named)}):
        most, found = ask(run, sampled)
    assert most == len(ways) == 16
    models = oracles(world / "model")
    for (name, prompt), (answer,) in zip(ways, found, strict=True):
        tokens = torch.tensor([*prompt, *answer.tokens.tolist()])
        with torch.no_grad():
            logprobs = {each: model(tokens[None]).logits[0].log_softmax(-1) for each, model in models.items()}
        own = {each: of[range(3, len(tokens) - 1), tokens[4:]] for each, of in logprobs.items()}
        apart = {each: float((of - torch.from_numpy(answer.logprobs.copy())).abs().max()) for each, of in own.items()}
        assert apart.pop(name) < 1e-5 and min(apart.values()) > 1e-2, (name, apart)


@pytest.mark.soak
def test_adapters_are_evaluated_side_by_side(world, tmp_path):
    folders = {name: write_adapter(tmp_path / name / "adapter", world / "model", *own) for name, own in SEVERAL.items()}
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join((world / "heldout.jsonl").read_text().splitlines(keepends=True)[:ITEMS]))
    arguments = world / "model", data, "--out", out, "--adapters", *folders.values()
    done = evaluated(*arguments)
    assert done.returncode == 0, done.stderr
    options = evaluate._options([str(world / "model"), str(data), "--max-new-tokens", str(LENGTH)])
    asked = evaluate.OfflineEvaluation(options)
    for name, model in oracles(world / "model").items():
        folder = out / (f"{name}-adapter" if name else "base")
        answers = {line["item"]: line for line in map(json.loads, (folder / "answers.jsonl").read_text().splitlines())}
        for prompt in asked.prompts:
            expected = likeliest(model, prompt.tokens, asked.tokenizer.stop_tokens, LENGTH)
            assert answers[prompt.id]["response"] == asked.tokenizer.decode(expected)
        assert len(answers) == ITEMS
        correct = sum(each["correct"] for each in answers.values()) / ITEMS
        assert json.loads((folder / "result.json").read_text())["avg@1"]["value"] == correct
        assert f"{folder.name:<14}  {correct:>8.2%}" in done.stdout

    again = evaluated(*arguments)
    assert again.returncode == 0 and f"continuing after {4 * ITEMS} answers" in again.stderr
    assert again.stdout == done.stdout
    shutil.rmtree(folders["mlp"])
    write_adapter(folders["mlp"], world / "model", 5, 12, ["q_proj"])
    refused = evaluated(*arguments)
    assert refused.returncode == 2 and "mlp-adapter: was begun with other files of the adapter" in refused.stderr

"""`areal evaluate` of adapters in PEFT's folders, with a real engine, against transformers and the formula of LoRA."""

import json
import os
import shutil
import subprocess
import sys

import torch

from areal_megatron.launch import evaluate
from tests.conftest import ROOT
from tests.support.adapter_oracle import adapted_oracle, write_adapter
from tests.support.tiny_models import load_oracle

ITEMS, LENGTH = 6, 12


def evaluated(*arguments):
    command = [sys.executable, "-m", "areal_megatron.launch.evaluate", *map(str, arguments)]
    command += ["--temperature", "0", "--max-new-tokens", str(LENGTH), "--reward", "tests.support.rewards:coarse"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240, env=environment)


def likeliest(model, prompt, stop):
    """Returns the likeliest answer of transformers' model, with the token that ends it."""
    tokens = torch.tensor(prompt)
    with torch.no_grad():
        for _ in range(LENGTH):
            tokens = torch.cat((tokens, model(tokens[None]).logits[0, -1].argmax()[None]))
            if int(tokens[-1]) in stop:
                break
    return tokens[len(prompt) :].tolist()


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
        expected = likeliest(adapted, prompt.tokens, asked.tokenizer.stop_tokens)
        assert answers[prompt.id]["response"] == asked.tokenizer.decode(expected)
        assert answers[prompt.id]["tokens"] == len(expected)
        differs += expected != likeliest(base, prompt.tokens, asked.tokenizer.stop_tokens)
    assert len(answers) == ITEMS and differs == ITEMS

    again = evaluated(*arguments)
    assert again.returncode == 0 and f"continuing after {ITEMS} answers" in again.stderr
    shutil.rmtree(adapter)
    write_adapter(adapter, world / "model", 5, 12, ["q_proj"])
    refused = evaluated(*arguments)
    assert refused.returncode == 2 and "was begun with other files of the adapter" in refused.stderr

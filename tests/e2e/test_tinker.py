"""The server for programs of the tinker package, asked by that package as it is published."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tools.smollm2 import installed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker") / "packages"
    assert installed(ROOT / "requirements-tinker.lock", folder) == ""
    return folder


@pytest.fixture(scope="module")
def server(world, tmp_path_factory):
    """A server, with its address and key, and its run."""
    runs = tmp_path_factory.mktemp("runs")
    keys = ["name=served", f"runs_dir={runs}", f"model.path={world / 'model'}", "lora.rank=8", "lora.adapters=2"]
    command = [sys.executable, "-m", "areal_megatron.api.tinker", "configs/tiny_cpu.yaml", *keys]
    command += ["trainer.dp=2", "machine.slots=3"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    line = ""
    while not (found := re.search(r"TINKER_BASE_URL=(\S+) TINKER_API_KEY=(\S+)", line)):
        line = process.stdout.readline()
        assert line, "the server did not start"
    yield found[1], found[2], RunFolder(runs / "served")
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0


@pytest.fixture
def loop(server, packages):
    """Runs a loop of tests/support/tinker_loops.py and returns what it prints."""
    address, key, _ = server

    def run(what):
        own = {"TINKER_BASE_URL": address, "TINKER_API_KEY": key, "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.tinker_loops", what],
            cwd=ROOT,
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_log_probabilities_of_prompts_are_those_of_transformers(loop, world):
    found, model = loop("scored"), AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32)
    tokens = torch.tensor(found["prompt"])
    with torch.no_grad():
        table = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    own = table.gather(1, tokens[1:, None])[:, 0].numpy()
    assert found["computed"][0] is None and found["sampled"] == [2, 2]
    np.testing.assert_allclose(found["computed"][1:], own, atol=1e-4)
    np.testing.assert_allclose(found["included"][1:], own, atol=1e-4)
    best = table.topk(3)
    assert found["likely"][0] is None
    for row, tokens_of, logprobs in zip(found["likely"][1:], best.indices, best.values, strict=True):
        assert [token for token, _ in row] == tokens_of.tolist()
        np.testing.assert_allclose([logprob for _, logprob in row], logprobs.numpy(), atol=1e-4)
    last, likely = found["last"]
    assert last[:-2] == likely[:-2] == [None] * (len(tokens) - 2)
    np.testing.assert_allclose(last[-2:], own[-2:], atol=1e-4)
    assert [row[0][0] for row in likely[-2:]] == best.indices[-2:, 0].tolist()
    assert found["likely_alone"][0] is None and len(found["likely_alone"][1]) == len(tokens)
    assert found["single"] == [None]
    for line, pattern in zip(
        found["wrong"], ["top_k: 21, and", "topk_sample_logprobs: this", "last_n: 7, and"], strict=True
    ):
        assert re.search(pattern, line), line


def test_a_supervised_loop_learns(loop):
    losses = np.array(loop("supervised"))
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-3)
    assert losses[0, 0] > 3.5 and losses[-5:, 0].mean() < 0.5 * losses[0, 0]


def test_a_loop_with_rewards_learns(loop):
    """No token can have more than a fifth: the model's head is not trained, and its rows are short."""
    rewards = loop("reinforced")
    assert rewards[0] < 0.03 and np.mean(rewards[-3:]) > 0.15


def test_wrong_input_is_told_in_a_line_and_states_come_back(loop):
    found = loop("mistakes")
    for name, pattern in {
        "loss": "loss_fn: dro: here are cross_entropy",
        "lacking": "data 0: ppo needs logprobs",
        "length": "data 0: target_tokens: has 3 elements, and model_input 2 tokens",
        "shift": r"data 0: target_tokens\[0\] is not the token that follows",
        "adam": "optim_step: beta2 is 0.95 here, not 0.5: start with optimizer.beta2=0.5",
        "rank": "rank: the adapters of this server have rank 8, not 9",
        "base": "base_model: this server has",
        "path": "is no path of weights for samplers",
    }.items():
        assert re.search(pattern, found["wrong"][name]), found["wrong"][name]
    assert found["begun"][0] == found["begun"][1] and found["saved"][0] == found["saved"][1]
    assert found["begun"][0] != found["saved"][0] and len(found["sampled"]) == 2
    older, later = found["told"]
    assert older == pytest.approx(found["saved"][0][0], abs=1e-4) and abs(older - later) > 1e-4


def test_models_are_trained_side_by_side_as_each_alone(loop, server, world):
    """Whatever is trained between two calls of a model, it goes on as it was: weights, moments and gradient. Trainers,
    engines and transformers, with the sampler's factors added to its weights here, agree on every step."""
    found = loop("side_by_side")
    for alone, in_turns in zip(found["alone"], found["turns"], strict=True):
        np.testing.assert_allclose(in_turns, alone, atol=1e-4)
    steps = np.array(found["turns"])
    np.testing.assert_allclose(steps[:, :, 0], steps[:, :, 1], atol=1e-4)
    assert (np.abs(np.diff(steps[:, :, 0], axis=1)).max(axis=-1) > 1e-3).all()
    assert np.abs(steps[0, :, 0] - steps[1, :, 0]).max() > 1e-2
    assert "lora.adapters: 2 models are trained here" in found["crowded"]
    np.testing.assert_allclose(found["after"][0], found["after"][1], atol=1e-4)
    of_folders = [with_adapter(world / "model", folder) for folder in sorted((server[2].folder / "samplers").iterdir())]
    for last in steps[:, -1, 1]:
        assert min(np.abs(np.array(own) - last).max() for own in of_folders) < 1e-4


def with_adapter(model, folder):
    """Returns what transformers says of the prompt of the lessons, with PEFT's factors added by hand."""
    described, factors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(next(folder.glob("*.safetensors"))),
    )
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor([3, 4, 5, 11, 3, 8])
    with torch.no_grad():
        for name, a in factors.items():
            if name.endswith(".lora_A.weight"):
                b = factors[name.replace("lora_A", "lora_B")]
                layer = exact.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                layer.weight += described["lora_alpha"] / described["r"] * b @ a
        table = exact(tokens[None]).logits[0, :-1].log_softmax(-1)
    return table.gather(1, tokens[1:, None])[:, 0].numpy()


def test_a_request_is_carried_out_once_and_strangers_get_nothing(server):
    address, key, run = server

    def post(route, own=key, **body):
        headers = {"X-API-Key": own, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/api/v1/{route}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    with pytest.raises(urllib.error.HTTPError, match="401"):
        post("create_session", own="tml-guessed")
    session = post("create_session")["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": {"rank": 8}}
    created = post("create_model", **asked)
    model = post("retrieve_future", **created)["model_id"]
    saved = [post("save_weights", model_id=model, seq_id=1, path="twice") for _ in range(2)]
    assert saved[0] == saved[1] and post("retrieve_future", **saved[0])["path"] == f"tinker://{model}/weights/twice"
    failed = post("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.1})
    assert "there is no gradient" in post("retrieve_future", **failed)["error"]
    for route in ("train_for_me", "sessions"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            post(route)
    assert all(line["kind"] in ("update", "checkpoint") for line in read_metrics(run))

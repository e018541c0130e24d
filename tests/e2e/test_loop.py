"""A program that drives trainers and engines: areal.Policy."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

import areal_megatron as areal
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT


@pytest.fixture
def keys(world, tmp_path):
    return {"name": "mine", "runs_dir": tmp_path, "model": {"path": world / "model"}, "updates": 8}


def refused(pattern, call):
    with pytest.raises(areal.ConfigError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sizes",
    [
        {"machine": {"slots": 3}, "trainer": {"dp": 2}},
        pytest.param({"machine": {"slots": 5}, "trainer": {"tp": 2, "pp": 2}}, marks=pytest.mark.soak),
        pytest.param({"machine": {"slots": 2}, "lora": {"rank": 4}}, marks=pytest.mark.soak),
    ],
    ids=["dp2", "tp2-pp2", "adapters"],
)
def test_a_program_samples_trains_saves_and_goes_back(keys, tmp_path, sizes):
    """What trainers say of answers is what engines sampled them with, before and after each way in which weights
    change, in every layout by the same path."""
    with areal.Policy("configs/tiny_cpu.yaml", **keys, **sizes) as policy:

        def differences(version):
            [found] = policy.sample(["12+34="], n=4)
            assert all((answer.versions == version).all() for answer in found)
            told = policy.forward(found).logprobs
            return max(np.abs(answer.logprobs - own).max() for answer, own in zip(found, told, strict=True))

        assert differences(0) < 1e-3
        refused("this process has a policy already", lambda: areal.Policy("configs/tiny_cpu.yaml", name="other"))
        both = policy.sample(["12+34=", [4, 5, 13, 6]], n=2, seed=5)
        again = policy.sample(["12+34=", [4, 5, 13, 6]], n=2, seed=5)
        assert [a.tokens for group in both for a in group] == [a.tokens for group in again for a in group]
        samples = [answer for group in both for answer in group]
        for place, sample in enumerate(samples):
            sample.advantage = float(place % 2) - 0.5
        refused("there is no gradient to step by", policy.step)
        first = policy.forward(samples)
        assert policy.forward_backward(samples, "grpo").metrics["logprob_diff_max"] < 1e-3
        metrics = policy.step(lr=1e-3)
        assert metrics["lr"] == 1e-3 and metrics["grad_norm"] > 0 and policy.version == 1
        [stale] = policy.sample(["12+34="])
        assert (stale[0].versions == 0).all()  # until it is published
        assert policy.publish() == 1 and differences(1) < 1e-3
        saved, at_save = policy.save(), policy.forward(samples)
        assert saved == policy.save() and (saved / "complete.json").exists()

        def train():
            policy.forward_backward(samples, "sft")
            policy.step(lr=1e-2)
            return policy.forward(samples).logprobs

        once = train()
        assert np.abs(once[0] - at_save.logprobs[0]).max() > 0.01
        assert np.abs(at_save.logprobs[0] - first.logprobs[0]).max() > 0.01
        policy.forward_backward(samples, "sft")  # which is forgotten with the load
        policy.load(saved)
        refused("there is no gradient to step by", policy.step)
        assert all(map(np.array_equal, policy.forward(samples).logprobs, at_save.logprobs))
        assert policy.publish() == policy.version == 3 and differences(3) < 1e-3
        assert all(map(np.array_equal, train(), once))  # the optimizer's moments are those of the checkpoint, too
        last = policy.save()
        assert last.name == "version-000004"
    run = RunFolder(policy.folder)
    assert [line["version"] for line in read_metrics(run) if line["kind"] == "update"] == [1, 2, 4]
    refused("a program has driven this run", lambda: audit(run))
    refused("is closed", policy.step)
    with areal.Policy("configs/tiny_cpu.yaml", **keys, **sizes, resume="auto") as policy:
        assert policy.version == 4 and all(map(np.array_equal, policy.forward(samples).logprobs, once))
        assert differences(4) < 1e-3


@pytest.mark.soak
def test_wrong_input_costs_nothing(keys):
    with areal.Policy("configs/tiny_cpu.yaml", **keys) as policy, ThreadPoolExecutor() as pool:
        refused("mode=driven has no critic", lambda: areal.load("configs/tiny_cpu.yaml", mode="driven", ppo=CRITIC))
        [[good]] = policy.sample(["1+2="])
        sampling = pool.submit(policy.sample, ["12+34="] * 20, n=8)  # beside all that follows
        for pattern, changes in {
            "sample 0: logprobs: has the shape": {"logprobs": [0.0]},
            "sample 0: versions: has the shape": {"versions": [0, 0]},
            "sample 0: advantage: has the shape": {"advantage": [1.0, 2.0, 3.0]},
            "sample 0: mask: has the shape": {"mask": [True]},
            "sample 0: weight: must be finite": {"weight": float("nan")},
            "sample 0: advantage: must be a number": {"advantage": "much"},
            "has no logprobs, which grpo compares with": {"logprobs": ()},
            "needs one of each": {"tokens": []},
            "has 57 tokens, and": {"tokens": [1] * 53, "logprobs": 0.0 * np.ones(53), "versions": ()},
        }.items():
            own = {"prompt": good.prompt, "tokens": good.tokens, "logprobs": good.logprobs, "versions": good.versions}
            refused(pattern, lambda own=own | changes: policy.forward_backward([areal.Response(**own)], "grpo"))
        refused("loss: must be one of", lambda: policy.forward_backward([good], "gpro"))
        refused("clip: is no setting", lambda: policy.forward_backward([good], "grpo", clip=0.1))
        refused("0 samples cannot be split", lambda: policy.forward_backward([], "grpo"))
        refused("and may get 100 more", lambda: policy.sample(["1+2="], max_tokens=100))
        for call in (
            lambda t: policy.sample([t]),
            lambda t: policy.score([t]),
            lambda t: policy.forward([of_tokens(t)]),
        ):
            refused("token 999999: the model has 0 to", lambda call=call: call([5, 999999, 7]))
            refused("has -1, which is no token id", lambda call=call: call([5, -1, 7]))
        refused("and fewer than", lambda: policy.score([[5]]))
        refused("top_k: 21, and engines tell 0 to 20", lambda: policy.score(["1+2="], top_k=21))
        refused("lora.rank: without adapters", lambda: policy.turn_to(0))
        refused("lora.rank: there is no adapter to save", lambda: policy.save_adapter(policy.folder / "adapters"))
        refused("adapter: engines apply adapters with lora.rank", lambda: policy.sample(["1+2="], adapter="x"))
        refused("there is no such folder", lambda: policy.load(policy.folder / "nothing"))
        assert [len(group) for group in sampling.result()] == [8] * 20
        policy.forward_backward([good], "grpo")  # after all that it works


def of_tokens(tokens):
    return areal.Response(prompt=tokens[:1], tokens=tokens[1:])


CRITIC = {"critic": {"lr": 1e-3}}


@pytest.mark.soak
def test_two_adapters_are_trained_published_and_sampled_from_in_turns(keys, tmp_path):
    """What engines say with an adapter from its folder, or with one that was published, is what trainers say of it; the
    one that was published answers also after others have had its slot."""
    with areal.Policy("configs/tiny_cpu.yaml", **keys, lora={"rank": 4, "adapters": 2}) as policy:
        text, folders, told = [4, 5, 13, 6, 9], [], []

        def trainers():
            [logprobs] = policy.forward([of_tokens(text)]).logprobs
            return logprobs

        def engines(**adapter):
            [score] = policy.score([text], **adapter)
            return score.logprobs

        refused("adapter 2: there are 2, counted from 0", lambda: policy.turn_to(2))
        for number in range(2):
            policy.turn_to(number)
            policy.forward_backward([of_tokens(text[:: 1 - 2 * number])], "sft")
        refused("adapter: there is none in", lambda: policy.score([text], adapter=tmp_path))
        for number in range(2):
            policy.turn_to(number)
            policy.step(lr=2e-2)
            folders.append(policy.save_adapter(tmp_path / "adapters" / str(number)))
            told.append(trainers())
        refused("is there already, and engines may have read it", lambda: policy.save_adapter(folders[0]))
        assert np.abs(told[0] - told[1]).max() > 0.01 and np.abs(engines() - told[1]).max() > 0.01
        policy.publish()
        policy.turn_to(1, new=True)
        folders.append(policy.save_adapter(tmp_path / "adapters" / "2"))
        told.append(trainers())
        assert np.abs(told[2] - told[1]).max() > 0.01
        for _ in range(2):
            for folder, own in zip(folders, told, strict=True):
                np.testing.assert_allclose(engines(adapter=folder), own, atol=1e-3)
            np.testing.assert_allclose(engines(), told[1], atol=1e-3)
        [answers] = policy.sample([text], n=2, adapter=folders[0])
        policy.turn_to(0)
        found = policy.forward(answers).logprobs
        assert max(np.abs(a.logprobs - own).max() for a, own in zip(answers, found, strict=True)) < 1e-3


@pytest.mark.soak
def test_a_policy_ends_with_its_program_and_tells_of_a_process_that_failed(keys, tmp_path):
    script = "import sys, areal_megatron as areal, pathlib\n"
    script += f"policy = areal.Policy('configs/tiny_cpu.yaml', name='killed', runs_dir={str(tmp_path)!r}, "
    script += f"model={{'path': {str(keys['model']['path'])!r}}})\nprint('ready', flush=True)\nsys.stdin.read()"
    program = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert program.stdout.readline() == "ready\n"
    program.kill()
    program.wait()
    assert not eventually_left(tmp_path / "killed")
    with (
        pytest.raises(areal.RunFailed, match="trainer-0"),
        areal.Policy("configs/tiny_cpu.yaml", **keys) as policy,
    ):
        [trainer] = [process for process in of_run(policy.folder) if "areal_megatron.train" in process.cmdline()]
        trainer.kill()
        [answers] = policy.sample(["1+2="], n=2)
        policy.forward_backward(answers, "sft")
    assert not eventually_left(policy.folder)


def of_run(folder):
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def eventually_left(folder, seconds=60):
    deadline = time.monotonic() + seconds
    while (left := of_run(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_grpo_in_a_loop_of_ones_own_learns_the_demo(world, tmp_path):
    lines = (ROOT / "examples" / "own_loop" / "grpo.py").read_text().splitlines()
    assert len(lines) <= 60
    keys = {"name": "sft", "runs_dir": tmp_path, "model": {"path": world / "model"}}
    warm = areal.Run("configs/tiny_sft.yaml", data={"train": world / "sft.jsonl"}, **keys)
    warm.start()
    warm.wait()
    arguments = [warm.folder / "hf", world / "train.jsonl", world / "heldout.jsonl", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "examples.own_loop.grpo", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"held-out accuracy (.*)", done.stdout))
    assert before < 0.6 and after >= 0.9

"""Wrong input: one line that says what is wrong, exit code 2, and nothing has been started."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from areal_megatron.config import config_file
from areal_megatron.launch import local
from areal_megatron.launch.supervision import start
from areal_megatron.launch.supervision.lease import Lease
from areal_megatron.planning.pools import Node
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.support.hostile import WITHOUT_NAMESPACES


def arguments_of(world, tmp_path, *overrides):
    return [
        str(ROOT / "configs/tiny_cpu.yaml"),
        f"runs_dir={tmp_path}",
        "name=x",
        f"model.path={world / 'model'}",
        f"data.train={world / 'train.jsonl'}",
        f"data.eval={world / 'heldout.jsonl'}",
        *overrides,
    ]


def launch(world, tmp_path, *overrides):
    return local.main(arguments_of(world, tmp_path, *overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=2"], ["rollout.engine", "did you mean 'rollout.engines'"]),
        (["rollout.engines=5", "machine.slots=4"], ["need 6 slots", "there are 4"]),
        (["trainer.tp=3", "machine.slots=8"], ["trainer.tp", "num_attention_heads=4"]),
        (["trainer.pp=5", "machine.slots=8"], ["trainer.pp", "num_hidden_layers=4"]),
        (["rollout.tp=3", "machine.slots=8"], ["rollout.tp", "num_attention_heads=4"]),
        (["model.path=nowhere"], ["model.path", "nowhere"]),
        (["data.train=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["reward.function=no.such:thing"], ["reward.function", "no.such"]),
        (["reward.function=http://"], ["reward.function", "is no address"]),
        (["reward.group_function=tests.support.rewards:short_of"], ["reward.group_function", "no function short_of"]),
        (["reward.group_function=builtins:len"], ["reward.group_function", "cannot be called with (prompt, answer, a"]),
        (["rollout.workflow=multi_trun", "rollout.turns=2"], ["rollout.workflow", "did you mean 'multi_turn'"]),
        (["reward.function=choice"], ["train.jsonl:1", "reward.function=choice cannot use the answer"]),
        (["rollout.workflow=no.such:thing"], ["rollout.workflow", "no.such"]),
        (["rollout.workflow=multi_turn"], ["rollout.turns", "multi_turn needs at least 2"]),
        (["rollout.max_new_tokens=100000"], ["rollout.max_new_tokens", "max_position_embeddings=512"]),
        (["rollout.easiest_first=true"], ["rollout.easiest_first", "train.jsonl has a pass_rate to order by"]),
        (["rollout.pass_rate=[0.1]"], ["rollout.pass_rate", "unknown key"]),
        (["trainer.recompute=selective"], ["trainer.recompute", "one of auto, none, elementwise, mlp, full"]),
        (["rollout.vllm.tensor_parallel_size=2"], ["rollout.vllm.tensor_parallel_size", "use rollout.tp"]),
        (["rollout.vllm.block_size=large"], ["rollout.vllm.block_size", "a whole number above 0, is 'large'"]),
        (["rollout.vllm.enforce_eager=false"], ["rollout.vllm.enforce_eager", "on CPU"]),
        (
            ["rollout.vllm.kv_cache_memory_bytes=9"],
            ["kv_cache_memory_bytes", "holds 0 tokens", "raise it"],
        ),
        (["trainer.megatron.moe_z_loss_coeff=small"], ["trainer.megatron.moe_z_loss_coeff", "Expected `float | null`"]),
        (["trainer.megatron.hidden_size=8"], ["trainer.megatron.hidden_size", "model.path/config.json decides it"]),
        (
            ["trainer.megatron.recompute_modules=[mlp]"],
            ["trainer.megatron.recompute_modules", "change nothing"],
        ),
        (["trainer.recompute_layers=2"], ["trainer.recompute_layers", "has no meaning with trainer.recompute=auto"]),
        (["mode=replay"], ["train.jsonl", "rollout.dump=true"]),
        (["data.max_prompt_tokens=2"], ["train.jsonl", "data.max_prompt_tokens is 2"]),
    ],
)
def test_wrong_values(world, tmp_path, capsys, overrides, words):
    assert launch(world, tmp_path, *overrides) == 2
    _expect_one_line(capsys.readouterr().err, words)
    assert not (tmp_path / "x").exists()


def test_an_evaluation_of_prompts_that_are_trained(world, tmp_path, capsys):
    assert launch(world, tmp_path, f"data.eval={world / 'heldout.jsonl'},{world / 'train.jsonl'}") == 2
    row = f"{world}/train.jsonl:1, which is {world}/train.jsonl:1: take them out"
    _expect_one_line(capsys.readouterr().err, ["7100 of 8100 prompts are in data.train too", row])
    assert not (tmp_path / "x").exists()


def test_too_little_room_for_checkpoints_is_said_at_the_start(world, tmp_path, capsys):
    assert launch(world, tmp_path, "--dry-run", "checkpoint.every=1", "checkpoint.keep=1000000000") == 0
    _expect_one_line(
        capsys.readouterr().err.replace("warning:", "error:"), ["GB are free", "checkpoint.keep", "make room"]
    )
    assert launch(world, tmp_path, "--dry-run", "checkpoint.every=1") == 0
    assert "free" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["data.jsonl", "empty"]),
        ('{"prompt": "1+1=", "answer": "2"}\nnot json\n', ["data.jsonl:2", "not JSON"]),
        ('{"prompt": "1+1="}\n', ["data.jsonl:1", "'answer'"]),
        ('{"prompt": "\\ud800", "answer": "2"}\n', ["data.jsonl:1", "half of a character"]),
        ('{"prompt": "1+1=", "answer": ' + "[" * 100_000, ["data.jsonl:1", "more than 100 lists and objects"]),
    ],
)
def test_wrong_data(world, tmp_path, capsys, text, words):
    (tmp_path / "data.jsonl").write_text(text)
    assert launch(world, tmp_path, f"data.train={tmp_path / 'data.jsonl'}") == 2
    _expect_one_line(capsys.readouterr().err, words)


def test_code_rewards_where_nothing_isolates_programs(world, tmp_path):
    data = tmp_path / "code.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": {"inputs": ["1"], "outputs": ["2"]}}) + "\n")
    arguments = arguments_of(world, tmp_path, "reward.function=code", f"data.train={data}", "data.eval=")
    code = f"{WITHOUT_NAMESPACES}\nfrom launch import local\nraise SystemExit(local.main({arguments!r}))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert process.returncode == 2
    _expect_one_line(process.stderr, ["reward.function", "cannot be isolated", "unshare"])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"num_hidden_layers": 10**9}, ["config.json", "num_hidden_layers=1000000000"]),
    ],
)
def test_a_model_that_cannot_be(world, tmp_path, capsys, changes, words):
    model = shutil.copytree(world / "model", tmp_path / "model")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | changes))
    assert launch(world, tmp_path, f"model.path={model}") == 2
    _expect_one_line(capsys.readouterr().err, words)


def test_a_config_json_that_is_too_deep(world, tmp_path, capsys):
    model = shutil.copytree(world / "model", tmp_path / "model")
    (model / "config.json").write_text("[" * 100_000)
    assert launch(world, tmp_path, f"model.path={model}") == 2
    _expect_one_line(capsys.readouterr().err, ["config.json", "more than 100 lists and objects"])


def test_a_run_that_exists_is_not_overwritten(world, tmp_path, capsys):
    (tmp_path / "x").mkdir()
    for more in ([], ["--dry-run"]):
        assert launch(world, tmp_path, *more) == 2
        _expect_one_line(capsys.readouterr().err, ["exists", "name="])


def test_dry_run_says_who_gets_what_and_starts_nothing(world, tmp_path, capsys):
    overrides = ["--dry-run", "machine.slots=6", "trainer.tp=2", "rollout.engines=2", "rollout.tp=2"]
    assert launch(world, tmp_path, *overrides) == 0
    table = capsys.readouterr().out
    assert [name in table for name in ("trainer-0", "trainer-1", "engine-0", "engine-1", "controller")] == [True] * 5
    assert "localhost:4 localhost:5" in table
    for words in ("gradients", "optimizer", "activations", "staging", "KV cache", "tokens", "checkpoint:"):
        assert words in table
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("device", "gib", "decided"), [("cuda", 80, "none"), ("cuda", 0, "full"), ("cpu", 0, "none")])
@pytest.mark.parametrize("mode", ["rl", "sft"])
def test_trainers_are_handed_what_was_decided_for_auto(world, few_examples, tmp_path, mode, device, gib, decided):
    data = [f"mode={mode}", *([f"data.train={few_examples}", "data.eval="] if mode == "sft" else [])]
    config = config_file.load(*arguments_of(world, tmp_path, *data)[:1], arguments_of(world, tmp_path, *data)[1:])
    config.machine.device = device
    run = RunFolder(config.run_dir)
    run.create()
    beginning = start.check(config, [Node("a", (0, 1))], gpu_gib=gib, run=run)
    with Lease(run, 90):
        beginning.begin()
    handed = config_file.load(run.config).trainer
    assert config.trainer.recompute == "auto" and (handed.recompute, handed.recompute_layers) == (decided, 0)


def one_gpu(world, tmp_path, mebibytes, *overrides):
    """Plans on a machine with one GPU of that memory (None: unknown): nvidia-smi is a script."""
    if mebibytes is not None:
        program = tmp_path / "nvidia-smi"
        gpu = f"0, GPU-1, 00000000:3B:00.0, {mebibytes}"
        program.write_text(f'#!/bin/sh\ncase "$*" in *index*) echo "{gpu}";; *) echo {mebibytes};; esac\n')
        program.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "areal_megatron.launch.local",
        *arguments_of(world, tmp_path, "--dry-run", *overrides),
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_one_gpu_is_enough_for_both_pools(world, tmp_path):
    planned = one_gpu(world, tmp_path, 81559, "machine.shared=true", "machine.device=cuda")
    assert planned.returncode == 0, planned.stderr
    assert re.search(r"trainer-0 +trainer +localhost:0\nengine-0 +rollout +localhost:0\n", planned.stdout)
    assert re.search(
        r"machine.shared: a trainer rank \d+.\d+ \+ an engine rank \d+.\d+ = 73.\d+ of 79.\d+ GiB, 92%\n",
        planned.stdout,
    )


@pytest.mark.parametrize(
    ("mebibytes", "overrides", "words"),
    [
        (81559, [], ["need 2 slots", "there are 1", "or set machine.shared=true to let both pools share them"]),
        (81559, ["machine.shared=true", "reshard.link=device"], ["reshard.link", "set it to host, or leave it out"]),
        (3072, ["machine.shared=true"], ["machine.shared: a trainer rank needs", "of 2.76 (92%) that they may use"]),
        (None, ["machine.shared=true"], ["machine.shared", "nvidia-smi does not say how much memory"]),
    ],
)
def test_one_gpu_that_is_not_enough(world, tmp_path, mebibytes, overrides, words):
    refused = one_gpu(world, tmp_path, mebibytes, "machine.device=cuda", *overrides)
    assert refused.returncode == 2
    _expect_one_line(refused.stderr, words)


def test_the_launcher_needs_neither_torch_nor_vllm():
    imports = "import sys; from areal_megatron.launch import local"
    code = f"{imports}; print(*{{'torch', 'vllm', 'megatron', 'transformers'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == ""


def _expect_one_line(message: str, words: list[str]) -> None:
    assert message.startswith("error: ") and message.count("\n") == 1, message
    for word in words:
        assert word in message

"""Engines of a model whose layers are gated delta nets and attention in turn, against transformers."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_megatron.checkpoint import peft
from areal_megatron.checkpoint.convert import to_hf
from areal_megatron.config.config_file import load, save
from areal_megatron.engine.adapters import Named, told
from areal_megatron.engine.environment import ADAPTERS
from areal_megatron.engine.kv_cache import block_tokens, cpu_bytes
from areal_megatron.models.architecture import architecture, read_config
from tests.conftest import ROOT
from tests.support.adapter_oracle import adapt, random_adapter, write_adapter
from tests.support.engines import ask, make_run, started_engine
from tests.support.tiny_models import load_oracle, save_model

ALL = ["all-linear"]
PROMPT, LIMIT = [3 + 7 * n % 20 for n in range(70)], 40


@pytest.fixture(scope="module")
def model(world, tmp_path_factory):
    """A random model in float32, with the tokenizer of the demo's."""
    folder = tmp_path_factory.mktemp("models") / "float32"
    save_model("qwen3_next", folder, vocab_size=read_config(world / "model")["vocab_size"])
    for file in (world / "model").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def half(model):
    """The same in bfloat16, as `areal convert` writes it."""
    to_hf(model, model.with_name("bfloat16"), dtype="bfloat16")
    return model.with_name("bfloat16")


@pytest.fixture(scope="module")
def run(world, half, tmp_path_factory):
    settings = {"max_new_tokens": LIMIT, "max_running": 8}
    run, config = make_run(tmp_path_factory.mktemp("runs") / "engine", world, rollout=settings)
    config.model.path, config.model.dtype, config.data.max_prompt_tokens = str(half), "bfloat16", len(PROMPT)
    save(config, run.config)
    with started_engine(run):
        yield run


def expected(folder, dtype, tokens, factors=None):
    """Returns transformers' log-probabilities of all tokens but the first, perhaps with an adapter of scale 2."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    adapt(model, factors or {}, 2.0)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_log_probabilities_are_those_of_transformers_but_for_rounding(run, half):
    """In the prompt, which is computed at once, and in the answer, which is computed from states that are kept: as far
    from float32 as transformers in bfloat16 is, where another kernel may choose other experts for a few tokens."""

    async def answered(client):
        options = {"n": 1, "max_tokens": LIMIT, "temperature": 1.0, "stop_tokens": [], "request_id": "answer"}
        (completion,) = await client.generate(PROMPT, **options)
        tokens = [*PROMPT, *completion.tokens.tolist()]
        return tokens, completion.logprobs, (await client.score(tokens[:-1], request_id="scored")).logprobs

    tokens, sampled, scored = ask(run, answered)
    exact = expected(half, torch.float32, tokens)
    rounding = (expected(half, torch.bfloat16, tokens) - exact).abs().mean()
    own = slice(len(PROMPT) - 1, None)
    assert len(sampled) == LIMIT and rounding < 0.02
    assert (torch.from_numpy(scored.copy()) - exact[:-1]).abs().mean() < 3 * rounding
    assert (torch.tensor(sampled) - exact[own]).abs().mean() < 3 * rounding


@pytest.mark.soak
def test_adapters_are_applied_to_every_linear_layer(world, half, tmp_path):
    """The same, in one batch with a request without an adapter."""
    folder = write_adapter(tmp_path / "adapter", half, 8, 16.0, dtype=torch.bfloat16)
    adapter = peft.for_engines(folder, architecture(read_config(half)))
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "down_proj"} < {*adapter.targets}
    run, config = make_run(tmp_path / "run", world, rollout={"max_new_tokens": LIMIT, "max_running": 8})
    config.model.path, config.model.dtype, config.data.max_prompt_tokens = str(half), "bfloat16", len(PROMPT)
    save(config, run.config)

    async def answered(client):
        options = {"n": 1, "max_tokens": LIMIT, "temperature": 1.0, "stop_tokens": []}
        names = ("", "adapter")
        asked = (client.generate(PROMPT, adapter=name, request_id=f"for-{name}", **options) for name in names)
        return [(answer.tokens.tolist(), answer.logprobs) for (answer,) in await asyncio.gather(*asked)]

    with started_engine(run, **{ADAPTERS: told([Named("adapter", str(folder), adapter)])}):
        answers = ask(run, answered)
    factors = {name: each.bfloat16() for name, each in random_adapter(load_oracle(half).state_dict(), ALL, 8).items()}
    own = slice(len(PROMPT) - 1, None)
    for (sampled, logprobs), held in zip(answers, ({}, factors), strict=True):
        tokens = [*PROMPT, *sampled]
        exact, rounded, other = (
            expected(half, dtype, tokens, {name: each.to(dtype) for name, each in of.items()})[own]
            for dtype, of in ((torch.float32, held), (torch.bfloat16, held), (torch.float32, {} if held else factors))
        )
        apart, rounding = (torch.tensor(logprobs) - exact).abs().mean(), (rounded - exact).abs().mean()
        assert apart < 3 * rounding and (other - exact).abs().mean() > 10 * rounding


def test_the_cache_has_the_blocks_that_were_planned(run, half):
    config, hf_config = load(run.config), read_config(half)
    log = run.log("engine-0").read_text()
    tokens = block_tokens(config, hf_config, on_cuda=False)
    assert f"Setting attention block size to {tokens} tokens" in log
    # The one layer with attention has blocks for its keys and values; each of the other three takes one for its state.
    blocks = cpu_bytes(config, hf_config, 10**15) / (tokens * 2 * 2 * 64 * 2)
    assert blocks == 1 + 8 * (3 + -(-(len(PROMPT) + LIMIT) // tokens))
    assert re.search(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", log)[1] >= "8"


def evaluate(model, data, out):
    command = [
        sys.executable,
        "-m",
        "areal_megatron.launch.evaluate",
        str(model),
        str(data),
        "--max-new-tokens",
        str(LIMIT),
    ]
    command += ["--reward", "tests.support.rewards:coarse", "--temperature", "0", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment)


@pytest.mark.soak
def test_such_a_model_is_evaluated(world, model, half, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join((world / "heldout.jsonl").read_text().splitlines(keepends=True)[:6]))
    refused = evaluate(model, data, tmp_path / "refused")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "--dtype bfloat16` makes another" in refused.stderr
    done = evaluate(half, data, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert sorted(answer["item"] for answer in answers) == list(range(6))
    assert all(0 < answer["tokens"] <= LIMIT for answer in answers)

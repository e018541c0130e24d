"""Every engine layout against what vLLM builds and loads by itself from the same checkpoint."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from reshard_oracle import MODELS, write_model

CASES = [
    *((name, tp, False) for tp in (1, 2) for name in MODELS),
    ("qwen2-two-kv-heads", 4, False),
    ("qwen3-moe", 4, False),
    ("qwen3-moe", 2, True),
    ("qwen3-moe-five", 2, True),
    ("qwen3-moe-five", 4, True),
]
"""(model, tp, expert parallel)"""
RANKS = 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What each vLLM rank says of each case."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        write_model(name, folder / name, head_dim=32, hidden_size=256)
    write_model("qwen2", folder / "qwen2-two-kv-heads", num_key_value_heads=2, hidden_size=256)
    # The experts of five do not divide evenly, and the kernel pads the width of each to a multiple of 32.
    write_model("qwen3-moe", folder / "qwen3-moe-five", num_local_experts=5, moe_intermediate_size=48, hidden_size=256)
    (folder / "cases.json").write_text(json.dumps(CASES))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("loaded_parameters.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_DIST_IDENT": f"layouts-{port}"}
    outputs = [(folder / f"{rank}.out").open("w+") for rank in range(RANKS)]
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(port), folder], stdout=output,
                         stderr=subprocess.STDOUT, env=environment)
        for rank, output in enumerate(outputs)
    ]  # fmt: skip
    try:
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, code in enumerate(codes):
        assert code == 0, (folder / f"{rank}.out").read_text()[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(("name", "tp", "expert_parallel"), CASES)
def test_layout_is_what_vllm_loads(loaded, name, tp, expert_parallel):
    for rank in range(tp):
        by_vllm, by_us = loaded[rank][f"{name} {tp} {expert_parallel}"]
        assert by_us == by_vllm

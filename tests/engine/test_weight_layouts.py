"""Every engine layout against what vLLM builds and loads by itself from the same checkpoint."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reshard_oracle import MODELS, write_model

from areal_megatron.reshard import hf, vllm
from areal_megatron.reshard.architectures import read_config

CASES = [(name, tp) for tp in (1, 2) for name in MODELS] + [("qwen2-one-kv-head", 2)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Folder with the models, and what each of two vLLM ranks says of each case."""
    folder = tmp_path_factory.mktemp("models")
    for name, _ in CASES[: len(MODELS)]:
        write_model(name, folder / name, head_dim=32, hidden_size=256)
    write_model("qwen2", folder / "qwen2-one-kv-head", num_key_value_heads=1, hidden_size=256)
    (folder / "cases.json").write_text(json.dumps(CASES))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("loaded_parameters.py")
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(port), folder], stdout=subprocess.PIPE, text=True,
                         stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                              "VLLM_DIST_IDENT": f"layouts-{port}"})
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        output, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0, output[-3000:]
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_layout_is_what_vllm_loads(loaded, name, tp):
    folder, ranks = loaded
    for rank in range(tp):
        layout = vllm.layout(read_config(folder / name), vllm.EngineSizes(tp=tp), rank)
        parameters = {parameter: torch.full(shape, -7.0) for parameter, shape in layout.parameters.items()}
        hf.load(parameters, layout, folder / name)
        ours = {
            parameter: [list(t.shape), "torch.float32", True, hashlib.sha256(t.numpy().tobytes()).hexdigest()]
            for parameter, t in parameters.items()
        }
        assert ranks[rank][f"{name} {tp}"] == ours

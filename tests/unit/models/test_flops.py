"""The cost of a sequence against torch's own count of what transformers' models compute."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3NextConfig

from areal_megatron.models.architecture import read_config
from areal_megatron.models.flops import SequenceFlops
from tests.support import tiny_models

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"


def count(folder, tokens: int, trained: int) -> int:
    """Returns the FLOPs of a forward pass with every query against every key, as eager attention computes it."""
    model = tiny_models.load_oracle(folder)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros((1, tokens), dtype=torch.long), logits_to_keep=trained, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "llama", "qwen3_moe", "glm4_moe", "deepseek_v3", "moonlight", "glm4_moe_lite"]
)
def test_flops_are_those_that_torch_counts(name, tmp_path):
    folder = tiny_models.save_model(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    flops = SequenceFlops.of(config)
    for tokens, trained in ((1, 1), (5, 2), (16, 16)):
        expected = flops.token * tokens + flops.trained * trained + flops.pair * tokens**2
        assert count(folder, tokens, trained) == expected
        causal = flops([tokens], [trained])[0]
        assert causal == expected - flops.pair * tokens * (tokens - 1) / 2  # no query with a key after it


def test_a_bundle_costs_what_its_mask_has():
    """Builds the mask of a prompt without its last token and of answers that each begin with that token."""
    flops, random = SequenceFlops(token=5.0, trained=7.0, pair=11.0), np.random.default_rng(0)
    for _ in range(20):
        prompt, answers = int(random.integers(1, 12)), random.integers(1, 9, int(random.integers(1, 5)))
        owner = np.repeat(np.arange(len(answers) + 1), [prompt - 1, *(1 + answers)])  # 0: the prefix
        place = np.concatenate([np.arange(prompt - 1), *(prompt - 1 + np.arange(1 + n) for n in answers)])
        mask = (owner[:, None] == owner) & (place[:, None] >= place) | (owner[:, None] > 0) & (owner == 0)
        expected = flops.token * len(owner) + flops.trained * answers.sum() + flops.pair * mask.sum()
        assert flops(prompt - 1, 0) + flops(1 + answers, answers, prompt - 1).sum() == expected
        if len(answers) == 1:
            assert expected == flops(prompt + answers, answers)[0]


def test_a_published_model_by_hand():
    """Qwen3-30B-A3B: 48 layers, hidden 2048, 32 query and 4 key-value heads of 128, 8 of 128 experts of 768."""
    flops = SequenceFlops.of(read_config(MODELS / "Qwen3-30B-A3B"))
    attention = 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048
    experts = 8 * 3 * 2048 * 768 + 2048 * 128
    assert flops == SequenceFlops(token=2 * 48 * (attention + experts), trained=2 * 151936 * 2048, pair=48 * 4 * 4096)
    # 3.3 billion active parameters without the embedding and the output layer's 0.6 billion leave 2.7
    assert flops.token / 2 == pytest.approx(2.73e9, rel=0.01)
    cost = flops(np.array([1000, 1000, 2000]), np.array([0, 900, 0]))
    assert cost[1] - cost[0] == 900 * flops.trained
    assert cost[2] - 2 * cost[0] == flops.pair * 1000**2


def test_a_model_with_linear_attention_by_hand():
    """Qwen3-Next-80B-A3B: 36 layers with 16 key and 32 value heads of 128, 12 with 16 query heads of 256 with gates and
    2 key-value heads, 10 of 512 experts and a shared one of 512."""
    flops = SequenceFlops.of(Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]).to_dict())
    projections = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048
    linear = projections + 4 * (2 * 2048 + 4096) + 3 * 32 * 128 * 128
    full = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048
    experts = 11 * 3 * 2048 * 512 + 2048 * 512
    assert flops.token == 2 * (36 * linear + 12 * full + 48 * experts)
    assert flops.pair == 2 * 12 * 2 * 4096
    # 3 billion active parameters, 0.6 of which are the embedding and the output layer
    assert flops.token / 2 == pytest.approx(3e9, rel=0.2)

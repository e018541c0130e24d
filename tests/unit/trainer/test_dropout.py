"""Dropout of adapters: what LowRank gives with it, by its definition."""

from types import SimpleNamespace

import torch

from areal_megatron.models.adapter import Adapter
from areal_megatron.models.table import Cut
from areal_megatron.trainer.adapter import LowRank, dropping


def test_a_share_of_what_an_adapter_gets_is_dropped_and_the_rest_is_larger():
    wide, share = 64, 0.25
    weight, config = torch.zeros(wide, wide), SimpleNamespace(sequence_parallel=False)
    subject = LowRank(config, weight, Adapter(wide, float(wide), ("q_proj",)), Cut.WHOLE, 1, [(0, wide)], share)
    with torch.no_grad():  # the product is the identity
        subject.lora_A.copy_(torch.eye(wide))
        subject.lora_B.copy_(torch.eye(wide))
    x = torch.rand(500, 1, wide) + 0.5
    torch.manual_seed(0)
    torch.testing.assert_close(subject(x), x)
    with dropping():
        found = subject(x)
    kept = found != 0
    torch.testing.assert_close(found[kept], x[kept] / (1 - share))
    assert abs(kept.float().mean() - (1 - share)) < 0.01
    torch.testing.assert_close(subject(x), x)

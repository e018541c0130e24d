"""Packing, casting and unpacking of every message of an update, in one process, on each kind of device."""

import pytest
import torch

from areal_megatron.models.architecture import read_config
from areal_megatron.reshard.copies import bind, pack, unpack
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.reshard_oracle import megatron_shard, vllm_parameters, write_model

TP = 2
SIZES = MegatronSizes(tp=2, pp=2)


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_messages_carry_every_parameter(tmp_path, device, dtype):
    """The parameters are cast from float32 or sent as they are. Packing runs on a stream of its own, and messages go
    through pinned memory where there is any."""
    tensors = write_model("qwen2", tmp_path, hidden_size=256, intermediate_size=512)
    config = read_config(tmp_path)
    sources = [_on(device, megatron_shard(tensors, config, SIZES, rank)) for rank in range(SIZES.ranks)]
    expected = [vllm_parameters(tensors, config, tp=TP, rank=rank) for rank in range(TP)]
    received = [
        {name: torch.zeros_like(tensor, dtype=dtype, device=device) for name, tensor in held.items()}
        for held in expected
    ]
    stream = torch.cuda.Stream() if device == "cuda" else None
    plan = Planner(config, SIZES, EngineSizes(tp=TP), bucket_elements=2**15).plan(0)
    for bucket in (bucket for rank in range(TP) for bucket in plan.received_by(rank)):
        sent, arrived = (torch.empty(bucket.elements, dtype=dtype, device=device) for _ in range(2))
        packing = bind((t.send for t in bucket.transfers), sources[bucket.source], sent)
        unpacking = bind((t.receive for t in bucket.transfers), received[bucket.destination], arrived)
        wire = torch.empty(bucket.elements, dtype=dtype, pin_memory=device == "cuda")
        with torch.cuda.stream(stream):  # does nothing without a stream
            pack(packing)
            wire.copy_(sent, non_blocking=True)
            arrived.copy_(wire, non_blocking=True)
            unpack(unpacking)
    if stream:
        stream.synchronize()
    for held, wanted in zip(received, expected, strict=True):
        for name, tensor in wanted.items():
            assert torch.equal(held[name].cpu(), tensor.to(dtype)), name


def _on(device, parameters):
    return {name: tensor.to(device) for name, tensor in parameters.items()}

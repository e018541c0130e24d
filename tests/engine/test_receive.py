"""Experts that vLLM keeps in an order of its own are refused before anything is written into them."""

from types import SimpleNamespace

import pytest
import torch

from areal_megatron.reshard.boxes import LayoutError


@pytest.mark.parametrize(("backend", "refused"), [("TRITON", False), ("FLASHINFER_CUTLASS", True)])
def test_only_experts_as_they_are_loaded_are_taken_on_cuda(monkeypatch, backend, refused):
    from areal_megatron.reshard import receive

    experts = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 3))
    experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(value=backend))
    model = torch.nn.Module()
    model.experts = experts
    monkeypatch.setattr(receive, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    if refused:
        with pytest.raises(LayoutError, match=r"experts.w13_weight as FLASHINFER_CUTLASS .* --moe-backend triton"):
            receive.live_parameters(model)
    else:
        parameters, _ = receive.live_parameters(model)
        assert parameters["experts.w13_weight"] is experts.w13_weight

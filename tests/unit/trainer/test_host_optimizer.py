"""The optimizer on the host: bit by bit what torch's AdamW makes of each parameter alone, by few copies."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_megatron.trainer import host_optimizer
from areal_megatron.trainer.host_optimizer import HostOptimizer

SIZES = [7, 64, 1, 300, 129, 64, 5000, 2]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5}


def parts_of(flat, gap):
    """Parameters one after another in a buffer, after every second one a gap."""
    parts, start = [], 0
    for number, size in enumerate(SIZES):
        parts.append(flat[start : start + size])
        start += size + gap * (number % 2)
    return parts


def subject_of(parts):
    groups = [{"params": parts[::2], "weight_decay": 0.1}, {"params": parts[1::2], "weight_decay": 0.0}]
    places = {"offload_fraction": 1.0, "pin_cpu_grads": False, "pin_cpu_params": False, "param_update_in_fp32": True}
    adam = torch.optim.AdamW
    return HostOptimizer(groups, cpu_optimizer_cls=adam, gpu_optimizer_cls=adam, fused=True, **SETTINGS, **places)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("bucket", [100, 2**25])
def test_steps_are_those_of_each_parameter_alone(monkeypatch, dtype, gap, bucket):
    monkeypatch.setattr(host_optimizer, "_BUCKET", bucket)
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(sum(SIZES) + gap * len(SIZES), generator=generator).to(dtype)
    before = flat.clone()
    parts = parts_of(flat, gap)
    alone = [part.float().clone() for part in parts]
    references = [
        torch.optim.AdamW([main], fused=True, weight_decay=0.1 * (n % 2 == 0), **SETTINGS)
        for n, main in enumerate(alone)
    ]
    with torch.no_grad():
        subject = subject_of(parts)
    assert len(subject.cpu_optimizers) == (1 if bucket > len(flat) else 4)
    for step in range(3):
        for part, main in zip(parts, alone, strict=True):
            part.decoupled_grad = torch.randn(part.shape, generator=generator)
            main.grad = part.decoupled_grad.clone()
        for group in (*subject.param_groups, *(g for reference in references for g in reference.param_groups)):
            group["lr"] = 1e-2 / (1 + step)  # as the schedule sets it
        subject.step()
        for reference in references:
            reference.step()
        for part, main in zip(parts, alone, strict=True):
            assert torch.equal(part, main.to(dtype))
            assert torch.equal(subject.gpu_params_map_cpu_copy[part], main)
    for part, main, reference in zip(parts, alone, references, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(subject.state[part][name], reference.state[main][name])
    covered = torch.zeros(len(flat), dtype=torch.bool)
    for part in parts:
        covered[part.storage_offset() : part.storage_offset() + part.numel()] = True
    assert torch.equal(flat[~covered], before[~covered]), "what lies between them belongs to others"


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("gap", "copies"), [(0, 1), (3, 4)])
def test_a_bucket_is_one_copy_unless_there_are_gaps_in_it(gap, copies):
    flat = torch.randn(sum(SIZES) + gap * len(SIZES)).bfloat16()
    parts = parts_of(flat, gap)
    with torch.no_grad():
        subject = subject_of(parts)
    for part in parts:
        part.decoupled_grad = torch.randn(part.shape)
    subject.step()
    with Copies() as seen:
        subject.step()
    assert seen.count == copies, "from the host's main values; gradients are there already"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_steps_of_parameters_on_a_gpu_are_those_of_the_host(monkeypatch, dtype):
    monkeypatch.setattr(host_optimizer, "_BUCKET", 100)
    flat = torch.randn(sum(SIZES)).to(dtype)
    here, there = parts_of(flat.clone(), 0), parts_of(flat.cuda(), 0)
    with torch.no_grad():
        subjects = subject_of(here), subject_of(there)
    for _ in range(3):
        for part, on_device in zip(here, there, strict=True):
            part.decoupled_grad = torch.randn(part.shape)
            on_device.decoupled_grad = part.decoupled_grad.cuda()
        for subject in subjects:
            subject.step()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))

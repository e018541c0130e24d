"""A step of AdamW on the host: the trainer's own, a bucket at a time, and megatron-core's, a parameter at a time.

    python tools/bench/host_optimizer.py [--elements 100000000] [--parameters 300] [--dtype bfloat16] [--json FILE]

Both begin with the same parameters and take the same steps in turns. Parameters lie one after another, as in a buffer
of Megatron's; every second one has no weight decay. On a CPU, where nothing is copied between devices, seconds are of
processor time, which other processes change little; on a GPU they are of the wall. The first step of each makes its
states and is left out. Prints the largest difference of a parameter after all steps as well.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from areal_megatron.trainer.host_optimizer import HostOptimizer, HybridDeviceOptimizer
from tools.bench import common


class ByParameter(HybridDeviceOptimizer):
    """megatron-core's, but for the choice of what is on the host: everything, also where there is no GPU."""

    def _get_sub_optimizer_param_groups(self, _fraction: float) -> tuple[list, list, dict, dict, dict]:
        copy_of = {}
        for group in self.param_groups:
            for part in group["params"]:
                copy = torch.empty_like(part, dtype=torch.float32, device="cpu", pin_memory=self.pin_cpu_params)
                copy_of[part] = copy.copy_(part)
        groups = [group | {"params": [copy_of[part] for part in group["params"]]} for group in self.param_groups]
        return groups, [], copy_of, {copy: part for part, copy in copy_of.items()}, dict(copy_of)


def optimizer(kind: type[HybridDeviceOptimizer], parts: list[Tensor], gradients: list[Tensor]) -> HybridDeviceOptimizer:
    """Returns one over `parts`, whose gradients have been computed."""
    for part, gradient in zip(parts, gradients, strict=True):
        part.decoupled_grad = gradient
    groups = [{"params": parts[::2], "weight_decay": 0.1}, {"params": parts[1::2], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    adam, pinned = torch.optim.AdamW, parts[0].is_cuda
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "fused": True, "param_update_in_fp32": True}
    places = {"offload_fraction": 1.0, "pin_cpu_grads": pinned, "pin_cpu_params": pinned}
    return kind(
        [g for g in groups if g["params"]], cpu_optimizer_cls=adam, gpu_optimizer_cls=adam, **settings, **places
    )


def main(arguments: list[str]) -> int:
    parser = common.parser(__doc__, repetitions=5)
    parser.add_argument("--elements", type=common.positive, default=100_000_000)
    parser.add_argument("--parameters", type=common.positive, default=300)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    size = max(1, options.elements // options.parameters)
    values = torch.randn(size * options.parameters, device=device).to(getattr(torch, options.dtype))
    gradients = list((torch.randn(size * options.parameters, device=device) * 1e-3).split(size))
    buffers = {"a parameter at a time": values, "a bucket at a time": values.clone()}
    kinds = dict(zip(buffers, (ByParameter, HostOptimizer), strict=True))
    subjects = {name: optimizer(kinds[name], list(flat.split(size)), gradients) for name, flat in buffers.items()}
    seconds = [
        {name: timed(subject, device) for name, subject in subjects.items()} for _ in range(1 + options.repetitions)
    ]
    slow, fast = subjects
    ratios = [once | {"times as fast": once[slow] / once[fast]} for once in seconds[1:]]
    figures = common.spreads(ratios[1:])
    figures["largest difference of a parameter"] = common.spread([float((buffers[slow] - buffers[fast]).abs().max())])
    print(common.report(figures, digits=3))
    common.keep(options.json, figures)
    return 0


def timed(subject: HybridDeviceOptimizer, device: str) -> float:
    """Returns the seconds of a step."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    begun = clock()
    subject.step()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - begun


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

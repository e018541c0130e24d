"""Adam as Megatron's distributed optimizer has it, with its schedule."""

from __future__ import annotations

import math

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from areal_megatron.config import Config
from areal_megatron.trainer.cpu import cpu_passes_for_cuda
from areal_megatron.trainer.pipeline import Chunks


class PolicyOptimizer:
    """Optimizer states are float32 and divided over the ranks that hold the same parameters; biases and norms
    do not decay."""

    def __init__(self, config: Config, chunks: Chunks):
        settings, dtype = config.optimizer, chunks[0].config.params_dtype
        with cpu_passes_for_cuda():
            self.megatron = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=settings.lr,
                    min_lr=0.0,
                    weight_decay=settings.weight_decay,
                    adam_beta1=settings.beta1,
                    adam_beta2=settings.beta2,
                    adam_eps=settings.eps,
                    use_distributed_optimizer=True,
                    params_dtype=dtype,
                    bf16=dtype == torch.bfloat16,
                    clip_grad=0.0,  # done in `step`, once the gradient is known to be finite
                    overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
                ),
                chunks,
                use_gloo_process_groups=False,
            )
        self._clip_grad = settings.clip_grad
        self._schedule = schedule(config, self.megatron)
        self._chunks = chunks

    @property
    def lr(self) -> float:
        """Of the last step."""
        return self.megatron.param_groups[0]["lr"]

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Of the whole gradient, the same on all ranks; not finite if any part of it is not."""
        self.megatron.prepare_grads()
        return self.megatron.get_grad_norm()

    @torch.no_grad()
    def step(self, norm: float) -> None:
        """Clips the gradient of that (finite) norm and changes the parameters.

        With data parallelism each rank has changed its part of them afterwards; the others' arrive during the
        next forward pass, or in `settle`.
        """
        if 0 < self._clip_grad < norm:
            parameters = (p for group in self.megatron.param_groups for p in group["params"])
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, self._clip_grad / norm)
        self._schedule.step(1)
        self.megatron.step_with_ready_grads()

    def settle(self) -> None:
        """Returns when the parameters of this rank are whole. Collective."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def schedule(config: Config, optimizer) -> OptimizerParamScheduler:
    """Step k of n (k from 1) gets lr · k/warmup at first, then the schedule, which would reach 0 at step n + 1.

    `optimizer` needs param_groups only.
    """
    settings = config.optimizer
    steps = config.updates * (config.ppo.minibatches if config.mode == "rl" else 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=math.ceil(settings.warmup_fraction * steps),
        lr_decay_steps=steps + 1,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )

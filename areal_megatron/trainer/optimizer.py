"""Adam as Megatron's distributed optimizer has it, with its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from areal_megatron.config import OptimizerConfig
from areal_megatron.trainer.cpu import cpu_passes_for_cuda
from areal_megatron.trainer.pipeline import Chunks


class Own(NamedTuple):
    """Elements start to stop of a parameter, and their main values and moments, flat and float32."""

    start: int
    stop: int
    states: dict[str, torch.Tensor]


class ModelOptimizer:
    """Optimizer states are float32 and divided over the ranks that hold the same parameters; biases and norms
    do not decay. `steps`: of the whole run."""

    def __init__(self, settings: OptimizerConfig, chunks: Chunks, steps: int):
        dtype = chunks[0].config.params_dtype
        with cpu_passes_for_cuda():
            self.megatron = get_megatron_optimizer(
                MegatronOptimizerConfig(
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
        self._schedule = schedule(settings, steps, self.megatron)
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

    def sharded_state(self, model: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
        """What megatron-core's dist_checkpointing is to load; `model` is the sharded state of all chunks.
        Collective."""
        self._allocate()
        with cpu_passes_for_cuda():
            return self.megatron.sharded_state_dict(model, True, metadata=metadata)

    def own(self) -> dict[torch.nn.Parameter, Own]:
        """Each parameter of this rank → the part of it that this rank's optimizer changes."""
        result = {}
        for optimizer in self._distributed():
            for buffer in optimizer.buffers:
                result |= dict.fromkeys(buffer.param_index_map, Own(0, 0, {}))
            for ranges in (r for by_dtype in optimizer.gbuf_ranges for buckets in by_dtype.values() for r in buckets):
                for parameter, places in ranges["param_map"].items():
                    states = optimizer._get_main_param_and_optimizer_states(parameter)
                    states = {name: values.detach() for name, values in states.items() if name != "step"}
                    result[parameter] = Own(places["param"].start, places["param"].end, states)
        return result

    def common_state(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """What is the same on all ranks, as `sharded_state` finds it in a checkpoint: settings and step of each
        group."""
        kind = metadata["distrib_optim_sharding_type"]
        optimizers = self.megatron.chained_optimizers
        if len(optimizers) > 1:
            self.megatron._synchronize_steps()
        states = [o.state_dict() | {"param_state": {}, "param_state_sharding_type": kind} for o in optimizers]
        return dict(enumerate(states)) if len(states) > 1 else states[0]

    def schedule_state(self) -> dict[str, Any]:
        return {"steps": self._schedule.num_steps}

    def load(self, state: dict[str, Any], schedule: dict[str, Any]) -> None:
        """Moments and main parameters, and the schedule after as many steps; rates and decay are this config's."""
        own = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in self.megatron.param_groups]
        for optimizer in self.megatron.chained_optimizers:
            optimizer._set_main_param_and_optimizer_states = partial(_set_all_but_step, optimizer)
        self.megatron.load_state_dict(state)
        for state in self._moments():
            if "step" in state:
                state["step"] = state["step"].clone()  # Megatron gives all of them the same tensor to count in
        for group, settings in zip(self.megatron.param_groups, own, strict=True):
            group |= settings
        self._schedule.num_steps = 0
        self._schedule.step(schedule["steps"])

    def _allocate(self) -> None:
        """Makes the moments, which optimizers do at their first step."""
        for optimizer in self._distributed():
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for state in self._moments(of=torch.optim.AdamW):
            state.setdefault("step", torch.zeros(()))

    def _moments(self, of: type = object) -> Iterator[dict[str, Any]]:
        """The state of each parameter in the optimizers of that type."""
        for optimizer in self._distributed():
            if isinstance(optimizer.optimizer, of):
                yield from optimizer.optimizer.state.values()

    def _distributed(self) -> list[DistributedOptimizer]:
        """Without those that have nothing to do on this rank."""
        return [optimizer for optimizer in self.megatron.chained_optimizers if not optimizer.is_stub_optimizer]

    def settle(self) -> None:
        """Returns when the parameters of this rank are whole. Collective."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def _set_all_but_step(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
    """Takes main parameter and moments from a checkpoint. torch's AdamW keeps its step count beside them, where
    Megatron would look for it in the checkpoint too."""
    group, place = optimizer.model_param_group_index_map[parameter]
    own = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][place]]
    kept = {"step": own["step"]} if "step" in own else {}
    DistributedOptimizer._set_main_param_and_optimizer_states(optimizer, parameter, tensors | kept)


def schedule(settings: OptimizerConfig, steps: int, optimizer) -> OptimizerParamScheduler:
    """Step k of n (k from 1) gets lr · k/warmup at first, then the schedule, which would reach 0 at step n + 1.

    `optimizer` needs param_groups only.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=math.ceil(settings.warmup * steps),
        lr_decay_steps=steps + 1,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )

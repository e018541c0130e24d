"""Megatron's distributed Adam optimizer, with its learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple, cast

import torch
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from areal_megatron.config import OptimizerConfig
from areal_megatron.ppo.in_flight import InFlight, restored
from areal_megatron.run.folder import RunError
from areal_megatron.trainer.host_optimizer import HostOptimizer
from areal_megatron.trainer.patches import cpu_passes_for_cuda
from areal_megatron.trainer.pipeline import Chunks

LOSS_SCALING = {"initial_loss_scale": 16.0, "min_loss_scale": 2.0**-15, "loss_scale_window": 200, "hysteresis": 1}
"""How float16 gradients are kept in range: a gradient that is not finite halves the scale of the loss, 200 finite ones
in a row double it. What is scaled is the sum over a micro-batch's tokens, where other trainers scale a mean: 16 for
32,768 tokens is as much as 2^19 there, and 2^-15 as little as 1."""


_HYBRID_KEYS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)
"""What HostOptimizer keeps of its own in the groups of parameters, and no checkpoint is to hold."""


class Own(NamedTuple):
    """A run of a parameter's elements, with their main values and moments, flat and float32."""

    start: int
    stop: int
    states: dict[str, torch.Tensor]


class ModelOptimizer:
    """Adam with float32 states, sharded over the ranks that hold the same parameters. Biases and norms do not decay.

    `steps`: the number of optimizer steps in the whole run, for the schedule.
    """

    def __init__(self, settings: OptimizerConfig, chunks: Chunks, steps: int):
        dtype = chunks[0].config.params_dtype
        megatron = MegatronOptimizerConfig(
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
            fp16=dtype == torch.float16,
            **LOSS_SCALING,
            clip_grad=0.0,  # done in `step`, once the gradient is known to be finite
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        )
        if settings.on_host:
            _put_on_host(megatron, on_cuda=next(chunks[0].parameters()).is_cuda)
        # Without gradients the parts of float32 parameters are leaves, as HostOptimizer wants.
        with cpu_passes_for_cuda(), torch.set_grad_enabled(not settings.on_host):
            made = get_megatron_optimizer(megatron, [*chunks], use_gloo_process_groups=False)
        assert isinstance(made, ChainedOptimizer)  # as always but with Megatron's FSDP
        self.megatron = made
        self._chained = cast(list[DistributedOptimizer], made.chained_optimizers)  # of experts, and of all else
        for settings_of in self._groups(of=torch.optim.AdamW):
            settings_of |= {"fused": True, "foreach": False}
        self._scalers = [optimizer.grad_scaler for optimizer in self._chained if optimizer.grad_scaler]
        """In float16 one for each of them."""
        if self.loss_scale is not None:
            chunks[0].config.grad_scale_func = self.megatron.scale_loss  # the chunks share their config
        self._clip_grad = settings.clip_grad
        self._schedule = schedule(settings, steps, self.megatron)
        self._chunks = chunks
        self.factor = 1.0
        """What the next steps' scheduled rates are multiplied by."""
        self.in_flight = InFlight()
        """What the factor follows from; a checkpoint keeps it."""

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.megatron.param_groups[0]["lr"]

    @property
    def scheduled_lr(self) -> float:
        """The learning rate that the schedule has for the next step."""
        self._schedule.num_steps += 1
        lr = self._schedule.get_lr(self.megatron.param_groups[0])
        self._schedule.num_steps -= 1
        return lr

    @property
    def loss_scale(self) -> float | None:
        """What the next loss is multiplied by before its gradient is computed, in float16; None in other dtypes."""
        return float(self._scalers[0].scale) if self._scalers else None

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Returns the memory in which this rank has its gradient: after a backward pass, the part that it changes is
        summed over replicas."""
        chunks: list[Any] = list(self._chunks)  # whose `buffers` is a list, and of torch's modules a method
        return [b.grad_data for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Returns the norm of the whole gradient, the same on all ranks; not finite if any part of it is not.

        In float16 it divides the gradient by the scale of the loss, and changes that scale for the next one. To be
        called once for each gradient. Raises RunError if the scale cannot be lowered any more.
        """
        used = [scaler.scale for scaler in self._scalers]
        overflows = [optimizer.prepare_grads() for optimizer in self._chained]
        if any(overflows):  # Megatron's optimizers each have a scale; the loss has one
            if float(used[0]) <= LOSS_SCALING["min_loss_scale"]:
                raise RunError(
                    "gradients are not finite even with the smallest scale of the loss; if the model leaves the range "
                    "of float16, train it with model.dtype=bfloat16"
                )
            state: Any = self._scalers[overflows.index(True)].state_dict()
            with cpu_passes_for_cuda():
                for scaler in self._scalers:
                    scaler.load_state_dict(state)
        return self.megatron.get_grad_norm()

    @torch.no_grad()
    def step(self, norm: float, rate: float | None = None) -> None:
        """Clips the gradient, whose finite norm is `norm`, and changes the parameters. `rate`: the learning rate, in
        place of the schedule's.

        With data parallelism each rank changes its own part of them; the parts of the others arrive during the next
        forward pass, or in `settle`.
        """
        if 0 < self._clip_grad < norm:
            parameters = (p for group in self.megatron.param_groups for p in group["params"])
            # on the host Megatron steps from the gradients on the device, which it keeps apart
            gradients = (getattr(p, "decoupled_grad", p.grad) for p in parameters)
            torch._foreach_mul_([g for g in gradients if g is not None], self._clip_grad / norm)
        self._schedule.step(1)
        for group in self.megatron.param_groups:
            group["lr"] = group["lr"] * self.factor if rate is None else rate
        self.megatron.step_with_ready_grads()

    def sharded_state(self, model: dict[Any, Any], metadata: dict[str, Any]) -> dict[str, Any]:
        """Returns the sharded state that megatron-core's dist_checkpointing loads. Collective.

        `model` is the sharded state of all chunks.
        """
        self._allocate()
        with cpu_passes_for_cuda():
            return self.megatron.sharded_state_dict(model, True, metadata=metadata)

    def own(self) -> dict[Tensor, Own]:
        """Returns, for each parameter of this rank, the part that this rank's optimizer changes."""
        self._allocate()
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

    def states(self) -> list[Tensor]:
        """Returns the memory in which this rank has its main values, moments and counts of steps."""
        own = self.own()  # first: it makes the counts too, if there was no step yet
        counts = [state["step"] for state in self._moments() if isinstance(state.get("step"), Tensor)]
        return [*(values for part in own.values() for values in part.states.values()), *counts]

    @torch.no_grad()
    def begin(self) -> None:
        """Makes this the optimizer of the present values of the parameters, before any step."""
        for parameter, own in self.own().items():
            for name, values in own.states.items():
                values.copy_(parameter.view(-1)[own.start : own.stop]) if name == "param" else values.zero_()
        for state in self._moments():
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()
        for group in self.megatron.param_groups:
            if "step" in group:
                group["step"] = 0
        self._set_steps(0)
        self.in_flight = InFlight()

    def counters(self) -> dict[str, Any]:
        """Returns what it goes on from beside tensors, for `set_counters`."""
        return {
            "schedule": self.schedule_state(),
            "groups": [group.get("step") for group in self.megatron.param_groups],
            "scales": [scaler.state_dict() for scaler in self._scalers],
        }

    def set_counters(self, counters: dict[str, Any]) -> None:
        self._set_steps(counters["schedule"]["steps"])
        self.in_flight = restored(counters["schedule"]["in_flight"])
        for group, step in zip(self.megatron.param_groups, counters["groups"], strict=True):
            if step is not None:
                group["step"] = step
        with cpu_passes_for_cuda():
            for scaler, scale in zip(self._scalers, counters["scales"], strict=True):
                scaler.load_state_dict(scale)

    def _set_steps(self, steps: int) -> None:
        self._schedule.num_steps = 0
        self._schedule.step(steps)

    def main_weights(self) -> Iterator[Tensor]:
        """Yields the float32 weights that this rank changes; over all ranks, each weight of the model once."""
        for optimizer in self._distributed():
            on_host = getattr(optimizer.optimizer, "gpu_params_map_cpu_copy", {})
            for weight in (weight for group in optimizer.optimizer.param_groups for weight in group["params"]):
                if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight):
                    yield on_host.get(weight, weight)

    def common_state(self, metadata: dict[str, Any]) -> dict[Any, Any]:
        """Returns the settings and the step of each group, the same on all ranks, as a checkpoint has them."""
        kind = metadata["distrib_optim_sharding_type"]
        if len(self._chained) > 1:
            self.megatron._synchronize_steps()
        states = [o.state_dict() | {"param_state": {}, "param_state_sharding_type": kind} for o in self._chained]
        for group in (group for state in states for group in state["optimizer"]["param_groups"]):
            for name in _HYBRID_KEYS:
                group.pop(name, None)
        return dict(enumerate(states)) if len(states) > 1 else states[0]

    def schedule_state(self) -> dict[str, Any]:
        return {"steps": self._schedule.num_steps, "in_flight": asdict(self.in_flight)}

    def load(self, state: dict[str, Any], schedule: dict[str, Any]) -> None:
        """Loads moments, main parameters, the scale of the loss and the schedule's step; learning rate and weight decay
        stay the config's."""
        own = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in self.megatron.param_groups]
        with cpu_passes_for_cuda():
            self.megatron.load_state_dict(state)
        for state in self._moments():
            if "step" in state:  # Megatron makes all of them count in the same tensor
                state["step"] = state["exp_avg"].new_full((), float(state["step"]))
        for group, settings in zip(self.megatron.param_groups, own, strict=True):
            group |= settings
        self._set_steps(schedule["steps"])
        self.in_flight = restored(schedule.get("in_flight", {}))

    def _allocate(self) -> None:
        """Makes the moments, which optimizers otherwise do at their first step."""
        for optimizer in self._distributed():
            if isinstance(optimizer.optimizer, HostOptimizer):
                _allocate_on_host(optimizer.optimizer)
            else:
                optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for state in self._moments(of=torch.optim.AdamW):
            state.setdefault("step", state["exp_avg"].new_zeros(()))

    def _moments(self, of: type = object) -> Iterator[dict[str, Any]]:
        """The state of each parameter in the optimizers of the type `of`."""
        for optimizer in self._distributed():
            if isinstance(optimizer.optimizer, of):
                yield from optimizer.optimizer.state.values()

    def _groups(self, of: type) -> Iterator[dict[str, Any]]:
        """The parameter groups of the optimizers of the type `of`."""
        for optimizer in self._distributed():
            if isinstance(optimizer.optimizer, of):
                yield from optimizer.optimizer.param_groups

    def _distributed(self) -> list[DistributedOptimizer]:
        """The optimizers that have parameters on this rank."""
        return [optimizer for optimizer in self._chained if not optimizer.is_stub_optimizer]

    def settle(self) -> None:
        """Waits until this rank has all of its parameters as changed by the last step. Collective."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def _put_on_host(config: MegatronOptimizerConfig, on_cuda: bool) -> None:
    """Makes Megatron keep main parameters and moments in the host's memory, and step there; see patches.py."""
    config.optimizer_cpu_offload, config.optimizer_offload_fraction = True, 1.0
    config.overlap_cpu_optimizer_d2h_h2d = True
    config.pin_cpu_grads = config.pin_cpu_params = on_cuda
    # Without this Megatron keeps another copy of the main parameters on the device. The config asks for a version of
    # TransformerEngine where it is set from the start.
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def _allocate_on_host(optimizer: HostOptimizer) -> None:
    """Makes the moments as zeros, where there was no step yet."""
    for inner in optimizer.sub_optimizers:
        for group in inner.param_groups:
            for main in group["params"]:
                if not inner.state[main]:
                    moments = {name: torch.zeros_like(main) for name in ("exp_avg", "exp_avg_sq")}
                    inner.state[main] = {"step": torch.zeros(()), **moments}
    optimizer._sync_sub_optimizers_state_to_hdo()


def schedule(settings: OptimizerConfig, steps: int, optimizer) -> OptimizerParamScheduler:
    """Returns the learning rate schedule of `optimizer`, of which only param_groups are needed.

    Step k (from 1) of n has lr · k / warmup_steps during warm-up, then follows the shape, which would reach 0 at step
    n + 1.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=min(settings.warmup_steps, steps),
        lr_decay_steps=steps + 1,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )

"""vLLM's weight transfer backend "areal": the engine's side of weight updates, the partner of publish.py.

Publisher there and Receiver here are what their processes call; publish.py lists the partners of both sides. vLLM stops
generation during every call into the Receiver, so everything but the commit runs on background threads (reception.py).
A failed update leaves the old weights complete.

A call may raise on the last rank only: vLLM (0.32, multiproc_executor.py) stops reading replies at the first failure,
and an unread reply is then taken for the reply to the next call. So the ranks agree on a problem before one of them
raises, and all have the same idea of whether vLLM's session is open.

vLLM rearranges experts after loading. On CUDA the Triton kernels compute from the loaded weights as they are, and any
other is refused. On CPU the kernels compute from a packed form, which replaces the loaded one: here updates are written
into plain tensors of their own and packed again after each. So are the convolutions of gated delta nets. What latent
attention derives from its projections is a view of them, or recomputed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from areal_megatron.config import ConfigError
from areal_megatron.models.adapter import VARIABLE, Adapter
from areal_megatron.reshard.boxes import LayoutError
from areal_megatron.reshard.carriers.base import LinkError
from areal_megatron.reshard.carriers.streams import Listener
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.policy_slot import PolicySlot
from areal_megatron.reshard.reception import Inlet, Reception
from areal_megatron.reshard.session import ROOM, LinkInfo
from areal_megatron.reshard.staging import Full, Live, Shard, Streamed
from areal_megatron.run.credentials import Credentials
from areal_megatron.run.network import CREDENTIALS_FILE, Site, address

log = init_logger("vllm.areal_megatron.receive")

_PROBLEM_BYTES = 2000
"""As much of a problem as the ranks of an engine tell each other."""


@dataclass
class InitInfo(LinkInfo, WeightTransferInitInfo):
    """The body of /init_weight_transfer_engine (session.init_body)."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The body of /update_weights, whose only use is to abandon an update."""

    action: Literal["abort"]


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives and commits the weights of one vLLM worker, with `full` staging.

    vLLM makes one in each worker and calls it for the routes that session.py lists.

    Example:
        receiver.init_transfer_engine(init_info)  # joins a generation of the link, in the background
        receiver.start_weight_update()            # receives the next version into staging, in the background
        ...                                       # the trainers report that all ranks have received it
        receiver.finish_weight_update()           # generation is paused: staging becomes the live parameters
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    kind, room = Full, 0.0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Reserved before vLLM sizes its KV cache, so that the cache leaves room.
        told = os.environ.get(VARIABLE)
        self._adapter = Adapter.of_told(json.loads(told)) if told else None
        if self._adapter:
            slot = PolicySlot(self.model.lora_manager, self._adapter)
            self._parameters, self._repack = slot.tensors, slot.write
        else:
            self._parameters, self._repack = live_parameters(self.model)
            _clear_padding(self.model)
        self._staging = self.kind.reserve(self._parameters, self.room)
        self._live = Live()
        self._site = _listener(self._rank)
        self._inlet: Inlet | None = None
        self._update: Reception | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins a new generation of the link in the background.

        Raises LayoutError if vLLM's parameters differ from the layout's.
        """
        if self._inlet:
            self._inlet.end()
        parallel, problem = self.parallel_config, ""
        tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
        sizes = EngineSizes(tp, dp, parallel.enable_expert_parallel)
        held = self._parameters, self._staging, sizes, self._rank
        shard = Shard(*held, self.kind, self._repack, self._live, self._site, self._adapter)
        try:
            if parallel.pipeline_parallel_size != 1:
                raise LayoutError("an engine with pipeline parallelism has no layout; use rollout.tp")
            self._inlet = Inlet(shard, init_info, log=log.error)
        except (LayoutError, ConfigError) as e:
            problem = str(e)
        self._refuse(LayoutError, problem)

    @property
    def _rank(self) -> int:
        parallel = self.parallel_config
        return parallel.data_parallel_rank * parallel.tensor_parallel_size + parallel.rank

    def start_weight_update(self) -> None:
        """Starts to receive the next update of this generation; the trainers hear of failures over the link."""
        self._update = Reception(self._inlet, after=self._update) if self._inlet else None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Abandons the update; the /finish_weight_update that follows closes vLLM's session."""
        if self._update:
            self._update.abandon()

    def finish_weight_update(self) -> None:
        """Commits: copies staging into the live parameters, on all ranks or on none; after an abort, on none.

        Generation must be paused. Raises LinkError, with the old weights untouched, if the update is not complete; with
        tp above 1 vLLM's session cannot be closed any more then, so ask the trainers first.
        """
        if self._update and self._update.abandoned:
            return
        problem = self._update.problem() if self._update else "no link: /init_weight_transfer_engine comes first"
        if not self._refuse(LinkError, problem) and self._update:
            self._update.commit()

    def shutdown(self) -> None:
        if self._update:
            self._update.abandon()
        if self._inlet:
            self._inlet.end()
        self._inlet = self._update = None

    def _refuse(self, error: type[Exception], problem: str) -> bool:
        """Returns whether any rank has a problem; if so, raises `error` on the last rank."""
        said = torch.frombuffer(bytearray(problem.encode()[:_PROBLEM_BYTES].ljust(_PROBLEM_BYTES)), dtype=torch.uint8)
        problems = [torch.empty_like(said) for _ in range(self.parallel_config.tensor_parallel_size)]
        dist.all_gather(problems, said, group=get_tp_group().cpu_group)
        texts = (bytes(row.numpy()).decode(errors="replace").rstrip() for row in problems)
        first = next(filter(None, texts), "")
        if first and self.parallel_config.rank == len(problems) - 1:
            raise error(first)
        return bool(first)


class ReceiverExtension:
    """A method for /collective_rpc that every vLLM worker of an engine has in addition (--worker-extension-cls)."""

    # of the worker
    _weight_update_active: bool
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def close_update(self) -> None:
        """Abandons the update that a controller which is gone has left open, if there is one."""
        if self._weight_update_active:
            self.update_weights({"action": "abort"})
            self.finish_weight_update()


class StreamedReceiver(Receiver):
    """A Receiver with `streamed` staging: generation is paused from before the first message to the commit."""

    kind = Streamed


class ChangesReceiver(StreamedReceiver):
    """A Receiver with `streamed` staging that is large enough for changes: while there are few, generation is paused
    for the commit alone."""

    room = ROOM


def _listener(rank: int) -> Listener | None:
    """Returns where a rank of an engine at another site takes the trainers' streams; None for any other engine's."""
    if (site := Site.of(os.environ)) is None:
        return None
    tls = Credentials(Path(os.environ[CREDENTIALS_FILE])).listening()
    return Listener(address(site.listens), site.port + 1 + rank, tls)


def live_parameters(model: torch.nn.Module) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Returns the tensors to write updates into, by vLLM's names, and a function to call when all are written.

    Raises LayoutError if vLLM keeps experts in an order that no layout describes.
    """
    latents = dict(_latents(model))
    derived = {f"{name}.{own}" for name, module in latents.items() for own, _ in module.named_parameters(recurse=False)}
    parameters: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if name not in derived
    }
    packed: list[_Plain | _PlainConvolution] = []
    for name, module in model.named_modules():
        if hasattr(module, _PlainConvolution.KEPT):
            convolution = _PlainConvolution(module)
            parameters[f"{name}.weight"] = convolution.tensor
            packed.append(convolution)
    for name, experts in _experts(model):
        if current_platform.is_cpu():
            plain = _Plain(experts)
            parameters |= {f"{name}.{kind}": tensor for kind, tensor in plain.tensors.items()}
            packed.append(plain)
        elif (backend := experts.quant_method.unquantized_backend.value) != "TRITON":
            raise LayoutError(f"vLLM keeps {name}.w13_weight as {backend} wants it; start it with --moe-backend triton")

    def repack() -> None:
        for plain in packed:
            plain.repack()
        for attention in latents.values():
            _derive(attention)

    return parameters, repack


@torch.no_grad()
def _clear_padding(model: torch.nn.Module) -> None:
    """Zeroes the rows beyond the vocabulary, as loading a model does: no update writes them, and where no model was
    loaded they hold random numbers."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            cast(Tensor, module.weight)[module.shard_indices.num_org_elements :] = 0


def _experts(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return (
        (name, module)
        for name, module in model.named_modules()
        if "w13_weight" in dict(module.named_parameters(recurse=False))
    )


def _latents(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "W_UK_T"))


def _derive(attention: Any) -> None:
    """Makes what latent attention computes from of the projection that an update has been written into, unless it is a
    part of it, as without quantisation."""
    weight = attention.kv_b_proj.weight
    if attention.W_UK_T.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
        attention.process_weights_after_loading(weight.dtype)


class _PlainConvolution:
    """The weight of a short convolution as it was loaded, which vLLM keeps beside the packed one."""

    KEPT = "_cpu_unpacked_conv_weight"

    def __init__(self, layer: Any):
        self._layer, self._plain = layer, getattr(layer, self.KEPT)
        self.tensor = self._plain.unsqueeze(1)

    @torch.no_grad()
    def repack(self) -> None:
        from vllm._custom_ops import causal_conv1d_weight_pack

        self._layer.weight.copy_(causal_conv1d_weight_pack(self._plain))


class _Plain:
    """The experts of one layer as they were loaded, beside the packed ones that the CPU computes from."""

    def __init__(self, experts: Any):
        self._experts = experts
        self._isa = experts.quant_method.moe_kernel.fused_experts.isa
        self._width = experts.moe_config.intermediate_size_per_partition
        w13, w2 = experts.w13_weight, experts.w2_weight
        self.tensors = {
            "w13_weight": torch.zeros(w13.shape[0], 2 * self._width, w13.shape[2], dtype=w13.dtype),
            "w2_weight": torch.zeros(*w2.shape[:2], self._width, dtype=w2.dtype),
        }

    @torch.no_grad()
    def repack(self) -> None:
        from vllm._custom_ops import cpu_prepack_moe_weight

        w13, w2 = self._experts.w13_weight, self._experts.w2_weight
        padding = w2.shape[2] - self._width  # zeros, in the gate's rows, in the up's rows and in the columns of down
        pad = torch.nn.functional.pad
        halves = (pad(half, (0, 0, 0, padding)) for half in self.tensors["w13_weight"].chunk(2, dim=1))
        w13.copy_(cpu_prepack_moe_weight(torch.cat(list(halves), dim=1), self._isa))
        w2.copy_(cpu_prepack_moe_weight(pad(self.tensors["w2_weight"], (0, padding)), self._isa))

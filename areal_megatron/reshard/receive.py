"""vLLM's weight transfer backend "areal": the engine's side of weight updates.

Every call of vLLM into it stops generation while it runs, so all but the commit goes on in background
threads (staging.py). A failed update leaves the old weights whole.

A call may raise on the last rank only: vLLM (0.32, multiproc_executor.py) stops reading replies at the first
failure, and an unread reply is then taken for the reply to the next call. So the ranks agree on a problem
before one of them raises, and what vLLM counts as an open session never differs between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from areal_megatron.config import ConfigError
from areal_megatron.reshard.boxes import LayoutError
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.live import live_parameters
from areal_megatron.reshard.plan import BUCKET_ELEMENTS
from areal_megatron.reshard.session import ABORT_BODY
from areal_megatron.reshard.staging import Inlet, Reception, Shard, reserve
from areal_megatron.reshard.transport import LinkError

log = init_logger("vllm.areal_megatron.receive")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine (session.init_body)."""

    engine: int
    generation: int
    store: str
    hf_config: dict[str, Any]
    sizes: dict[str, Any]
    engine_sizes: dict[str, Any]
    dtype: str
    timeout_s: float
    bucket_elements: int = BUCKET_ELEMENTS


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of /update_weights, whose only use is to abandon an update."""

    action: Literal["abort"]


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The backend of one vLLM worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    streamed = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Here, before vLLM sizes its KV cache, so that the cache leaves room for it.
        self._parameters, self._repack = live_parameters(self.model)
        self._staging = reserve(self._parameters, self.streamed)
        self._inlet: Inlet | None = None
        self._update: Reception | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins a new generation in the background. Raises LayoutError if vLLM's parameters are not the layout's."""
        parallel, problem = self.parallel_config, ""
        tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
        sizes = EngineSizes(tp, dp, parallel.enable_expert_parallel)
        rank = parallel.data_parallel_rank * tp + parallel.rank
        shard = Shard(self._parameters, self._staging, sizes, rank, self.streamed, self._repack)
        try:
            if parallel.pipeline_parallel_size != 1:
                raise LayoutError("an engine with pipeline parallelism has no layout; use rollout.tp")
            self._inlet = Inlet(shard, **vars(init_info), log=log.error)
        except (LayoutError, ConfigError) as e:
            problem = str(e)
        self._refuse(LayoutError, problem)

    def start_weight_update(self) -> None:
        """Starts to receive the next update of this generation; what goes wrong, the trainers hear over the link."""
        self._update = Reception(self._inlet, after=self._update) if self._inlet else None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Abandons the update; vLLM's session ends with the /finish_weight_update that follows."""
        if self._update:
            self._update.abandon()

    def finish_weight_update(self) -> None:
        """Commits: staging → live parameters, on all ranks or on none; after an abort, on none.

        Generation must be paused. Raises LinkError, with the old weights untouched, if an update is not
        complete; with tp above 1 vLLM's session is then beyond repair, so ask the trainers first.
        """
        if self._update and self._update.abandoned:
            return
        problem = self._update.problem() if self._update else "no link: /init_weight_transfer_engine comes first"
        if not self._refuse(LinkError, problem):
            self._update.commit()

    def shutdown(self) -> None:
        if self._update:
            self._update.abandon()
        self._inlet = self._update = None

    def _refuse(self, error: type[Exception], problem: str) -> bool:
        """Whether any rank has a problem; if so, raises on the last one."""
        problems = [""] * self.parallel_config.tensor_parallel_size
        dist.all_gather_object(problems, problem, group=get_tp_group().cpu_group)
        first = next(filter(None, problems), "")
        if first and self.parallel_config.rank == len(problems) - 1:
            raise error(first)
        return bool(first)


class ReceiverExtension:
    """What every vLLM worker of an engine can do in addition (--worker-extension-cls)."""

    def close_update(self) -> None:
        """Abandons the update that is open, if one is: whoever opened it is gone."""
        if self._weight_update_active:
            self.update_weights(ABORT_BODY["update_info"])
            self.finish_weight_update()


class StreamedReceiver(Receiver):
    """The same with streamed staging: generation is paused from before the first message to the commit."""

    streamed = True

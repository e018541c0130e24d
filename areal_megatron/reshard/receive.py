"""vLLM's weight transfer backend "areal": the engine's side of weight updates.

Every call of vLLM into it stops generation while it runs, so all but the commit goes on in background
threads (staging.py). A failed update leaves the old weights whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from areal_megatron.reshard.layout import LayoutError
from areal_megatron.reshard.plan import BUCKET_ELEMENTS
from areal_megatron.reshard.staging import Incoming, Inlet, Shard, reserve
from areal_megatron.reshard.transport import LinkError

log = init_logger("vllm.areal_megatron.receive")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine (session.init_body)."""

    engine: int
    epoch: int
    store: str
    hf_config: dict[str, Any]
    sizes: dict[str, Any]
    dtype: str
    timeout_s: float
    bucket_elements: int = BUCKET_ELEMENTS


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of /update_weights."""

    action: str


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The backend of one vLLM worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Here, before vLLM sizes its KV cache, so that the cache leaves room for it.
        self._staging = reserve(dict(self.model.named_parameters()))
        self._inlet: Inlet | None = None
        self._update: Incoming | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins a new epoch in the background. Raises LayoutError if vLLM's parameters are not the layout's."""
        parallel = self.parallel_config
        if parallel.pipeline_parallel_size != 1 or parallel.data_parallel_size != 1:
            raise LayoutError("an engine with pipeline or data parallelism has no layout yet; use rollout.tp")
        shard = Shard(dict(self.model.named_parameters()), self._staging, parallel.tensor_parallel_size, parallel.rank)
        self._inlet = Inlet(shard, **vars(init_info), log=log.error)

    def start_weight_update(self) -> None:
        """Starts to receive the next update of this epoch. Raises LinkError if the epoch has failed."""
        if self._inlet is None:
            raise LinkError("no link: /init_weight_transfer_engine comes before /start_weight_update")
        self._update = Incoming(self._inlet, after=self._update)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Abandons the update; vLLM's session ends with the /finish_weight_update that follows."""
        if update_info.action != "abort":
            raise ValueError(f"update_weights: unknown action {update_info.action!r}, expected 'abort'")
        self._update.abandon()

    def finish_weight_update(self) -> None:
        """Commits: staging → live parameters; after an abort, nothing. Generation must be paused.

        Raises LinkError, with the old weights untouched, if the update failed or is not complete.
        """
        if not self._update.abandoned:
            self._update.commit()

    def shutdown(self) -> None:
        if self._update is not None:
            self._update.abandon()
        self._inlet = self._update = None

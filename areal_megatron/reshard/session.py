"""What the controller tells an engine about a link: the bodies of vLLM's routes and of /commit. Imports no torch.

One update of one engine:

| route | body | effect |
|---|---|---|
| /init_weight_transfer_engine | init_body(…) | once per generation: joins the link in the background, returns at once |
| /start_weight_update | {} | receives the next version of this generation into staging, in the background |
| /commit | see engine/middleware.py | only after the trainer reported the delivery: pauses, copies, resumes |

The updates of a generation are numbered: the n-th /start_weight_update receives what the n-th `publish` with this
generation sends. After a failed or abandoned update post {"update_info": {"action": "abort"}} to /update_weights, then
{} to /finish_weight_update (this closes vLLM's session and changes no weight), and give the link a new generation: its
process group cannot be used again. Never post /commit on a guess: an engine with tp above 1 refuses it, but vLLM's
session cannot be closed any more then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from areal_megatron.config import Config
from areal_megatron.models.adapter import Adapter, served
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import BUCKET_ELEMENTS, Planner, largest_bucket
from areal_megatron.reshard.trainer_layout import MegatronSizes

ROOM = 0.1
"""The share of a shard's elements for which `streamed` staging has room at least, if trainers may send changes. With
their places in 32 bits, changes of 3% of 16-bit elements fit in there."""
HISTORY = 1 / 16
"""The bytes of changes of earlier versions that trainers keep of a message for engines which lag, over its own."""
LISTED = 8
"""A device lists the changes of a message if at most one in 8 of its elements has changed."""
HOST_BLOCK = 2**30
"""Bytes of a piece of pinned memory, in which trainers keep what they published last, if parameters are on a device."""
FEW_CHANGES = 0.02
"""If no more of the elements were sent in the last update, the next one is expected to fit in there too."""


def looking_bytes(elements: int, itemsize: int) -> int:
    """Returns the bytes of a device that comparing a message with its last publication takes (changes.py): the
    publication and a byte an element; and for each listed element its place, in 64 and in 32 bits, the bits of both,
    and the difference."""
    return elements * (itemsize + 1) + elements // LISTED * (8 + 2 * 4 + 4 * itemsize)


class LinkRef(msgspec.Struct, frozen=True):
    """One engine as a destination of weights; a new generation means a new process group."""

    engine: int
    generation: int
    trial: bool = False
    """Weights did not reach the engine lately: no optimizer step waits for it."""
    may_send_changes: bool = True
    """Whether reshard.update applies; else the engine gets whole messages (Config.may_send_changes)."""
    few_changes: bool = False
    """The engine generates until all has arrived, for which it has little room."""
    site: str = ""
    """host:port of the engine's server, if it is at another site."""


@dataclass
class LinkInfo:
    """What the ranks of an engine need to join a new generation of their link."""

    engine: int
    """Its number among the engines of the run."""
    generation: int
    store: str
    """The trainers' TCPStore, host:port."""
    hf_config: dict[str, Any]
    sizes: dict[str, Any]
    """Fields of the trainers' MegatronSizes."""
    engine_sizes: dict[str, Any]
    """Fields of EngineSizes."""
    dtype: str
    """What the trainers send."""
    timeout_s: float
    """How long an update may take."""
    bucket_elements: int = BUCKET_ELEMENTS
    engines: int = 1
    """How many engines the run has by its config, among which the trainer ranks are divided."""

    link: str = "device"
    """The setting of that name: what messages travel through."""
    may_send_changes: bool = False
    """Whether trainers may send what has changed."""
    adapter: dict[str, Any] | None = None
    """Adapter.told of what the trainers send in place of weights; None if they send those."""

    def planner(self) -> Planner:
        """Returns the planner that the trainers have too. Raises ConfigError if the sizes do not fit the model."""
        sizes = MegatronSizes(**self.sizes), EngineSizes(**self.engine_sizes)
        return Planner(self.hf_config, *sizes, self.bucket_elements, self.engines, self.sent_adapter)

    @property
    def sent_adapter(self) -> Adapter | None:
        return None if self.adapter is None else Adapter.of_told(self.adapter)


def init_body(
    *,
    config: Config,
    engine: int,
    generation: int,
    store: str,
    hf_config: Mapping[str, Any],
    at_other_site: bool = False,
) -> dict[str, Any]:
    """Returns the body that has engine number `engine` join a new generation of its link at `store` (host:port)."""
    adapter = served(config, hf_config)
    info = LinkInfo(
        engine=engine,
        generation=generation,
        store=store,
        hf_config=dict(hf_config),
        sizes=asdict(MegatronSizes.of(config.trainer)),
        engine_sizes=asdict(EngineSizes.of(config.rollout)),
        dtype=config.model.dtype,
        timeout_s=config.reshard.timeout_s,
        bucket_elements=largest_bucket(not config.machine.is_cpu),
        engines=config.rollout.engines,
        link=config.link,
        may_send_changes=config.may_send_changes(at_other_site),
        adapter=adapter and adapter.told,
    )
    return {"init_info": asdict(info)}

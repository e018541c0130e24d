"""What the controller tells an engine about a link, as bodies of its routes: vLLM's own, and /commit. No torch.

One update of one engine:

| route | body | effect |
|---|---|---|
| /init_weight_transfer_engine | init_body(…) | once per generation: joins the link in the background, returns at once |
| /start_weight_update | {} | receives the next version of this generation into staging, in the background |
| /commit | commit_body(…) | only after the trainer reported the delivery: pauses, copies, resumes (engine/middleware) |

A link numbers its updates: the n-th /start_weight_update of a generation receives the n-th `publish` that
names this generation on the trainer's side. After a failed or abandoned update post ABORT_BODY to
/update_weights, then {} to /finish_weight_update (closes vLLM's session, changes no weight), and give the
link a new generation: its process group cannot be used again. Never post /commit on a guess: an engine with tp
above 1 refuses it, but then vLLM's session cannot be closed any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from areal_megatron.config import Config
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.trainer_layout import MegatronSizes

ABORT_BODY = {"update_info": {"action": "abort"}}


def init_body(
    *, config: Config, engine: int, generation: int, store: str, hf_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Joins engine number `engine` to the trainers' store (host:port) in a new generation of its link."""
    return {
        "init_info": {
            "engine": engine,
            "generation": generation,
            "store": store,
            "hf_config": dict(hf_config),
            "sizes": asdict(MegatronSizes.of(config.trainer)),
            "engine_sizes": asdict(EngineSizes.of(config.rollout)),
            "dtype": config.model.dtype,
            "timeout_s": config.reshard.timeout_s,
        }
    }


def commit_body(version: int, clear_cache: bool) -> dict[str, Any]:
    """Commits staging; tokens sampled from here on carry `version`."""
    return {"version": str(version), "clear_cache": clear_cache}

"""The losses of the `tinker` package in terms of this project's: samples and settings of a request for one."""

from __future__ import annotations

import numpy as np

from areal_megatron.api.policy import Response
from areal_megatron.api.tinker_wire import LossRequest
from areal_megatron.config import ConfigError
from areal_megatron.process.errors import printable

_UNCLIPPED = 1e9
_INPUTS = ("target_tokens", "weights", "logprobs", "advantages")


def samples_of(asked: LossRequest) -> tuple[list[Response], str, dict[str, float | str]]:
    """Returns the samples of a request, the loss and its settings by the names of this project. All losses are sums
    over tokens. Raises ConfigError."""
    if not asked.data:
        raise ConfigError("forward_backward: no data")
    settings = dict(asked.settings)
    loss, kept = "sft", {}
    if asked.loss == "importance_sampling":
        loss, kept = "ppo", {"objective": "naive", "clip_low": 1.0, "clip_high": _UNCLIPPED, "dual_clip": 0.0}
    elif asked.loss in ("ppo", "cispo"):
        low, high = (
            float(settings.pop(f"clip_{name}_threshold", default)) for name, default in (("low", 0.8), ("high", 1.2))
        )
        loss, kept = asked.loss, {"objective": "naive", "clip_low": 1 - low, "clip_high": high - 1, "dual_clip": 0.0}
    elif asked.loss != "cross_entropy":
        raise ConfigError(
            f"loss_fn: {printable(asked.loss)}: here are cross_entropy, importance_sampling, ppo and cispo"
        )
    if settings:
        raise ConfigError(f"loss_fn_config: {printable(next(iter(settings)))} is no setting of {asked.loss} here")
    needed = ("target_tokens",) if loss == "sft" else ("target_tokens", "logprobs", "advantages")
    samples = []
    for place, datum in enumerate(asked.data):
        where = f"data {place}"
        if lacking := [name for name in needed if name not in datum.inputs]:
            raise ConfigError(f"{where}: {asked.loss} needs {lacking[0]}")
        if not datum.tokens:
            raise ConfigError(f"{where}: model_input has no tokens")
        targets, ones = datum.inputs["target_tokens"], np.ones(len(datum.tokens), np.float32)
        weights = datum.inputs.get("weights", ones)
        counts = weights if loss == "sft" else datum.inputs["advantages"] * weights
        if unknown := sorted(datum.inputs.keys() - set(_INPUTS)):
            raise ConfigError(f"{where}: {printable(unknown[0])} is no input of a loss; these are {', '.join(_INPUTS)}")
        tokens = np.append(np.asarray(datum.tokens[1:], np.int64), targets[-1:])
        if len(differ := np.flatnonzero((tokens != targets) & (counts != 0))):
            raise ConfigError(f"{where}: target_tokens[{differ[0]}] is not the token that follows in model_input")
        samples.append(
            Response(
                prompt=datum.tokens[:1],
                tokens=tokens,
                logprobs=datum.inputs["logprobs"] if loss != "sft" else (),
                advantage=datum.inputs["advantages"] if loss != "sft" else 0.0,
                weight=weights,
            )
        )
    return samples, loss, kept

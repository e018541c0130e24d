"""The FLOPs that a model spends on a sequence, from its config.json. Imports numpy, not torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from areal_megatron.models.architecture import Dimensions, architecture


@dataclass(frozen=True)
class SequenceFlops:
    """The FLOPs of a forward pass; a multiplication with its addition counts as two.

    The backward pass takes twice as many of each kind and recomputation as many again, so neither changes how the costs
    of sequences compare. Norms, activations, rotations and softmax are left out.
    """

    token: float
    """For each token: projections, and the MLP, or the router and the experts chosen for the token."""
    trained: float
    """For each trained token: the output layer, which runs for no other."""
    pair: float
    """For each query and each key that it attends to."""

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> SequenceFlops:
        """Returns the costs of the model. Raises ConfigError if it has no table, as `architecture` does."""
        model = architecture(hf_config)
        sizes, attention = model.dimensions, model.attention_weights
        routers = sizes.sparse_layers * sizes.hidden * sizes.experts
        return cls(
            token=2.0 * (attention + _recurrent(sizes) + 3 * sizes.hidden * _inner(hf_config, sizes) + routers),
            trained=2.0 * sizes.vocabulary * sizes.hidden,
            pair=2.0 * sizes.full_layers * (sizes.query + sizes.attended),  # q·k, and its weight times v, of every head
        )

    def __call__(self, tokens: ArrayLike, trained: ArrayLike, before: np.ndarray | int = 0) -> np.ndarray:
        """Returns float64 [n], the FLOPs of n sequences of int [n] tokens, `trained` of them trained, under causal
        attention.

        They also attend to `before` tokens, int [n], computed already: where answers share a prompt, all of it but its
        last token, since each answer begins with a copy of that one. So a bundle of k answers of a tokens, all trained,
        to a prompt of p costs `flops(p - 1, 0) + k * flops(1 + a, a, p - 1)`.
        """
        tokens = np.asarray(tokens, dtype=np.float64)
        pairs = tokens * before + tokens * (tokens + 1) / 2
        return self.token * tokens + self.trained * np.asarray(trained) + self.pair * pairs


def _recurrent(sizes: Dimensions) -> int:
    """What linear attention multiplies a token with beside its weights, in all layers: each head reads its state for
    the key, adds to it, and reads it for the query."""
    return 3 * sizes.linear_layers * sizes.linear_value * sizes.linear_key_dim


def _inner(hf_config: Mapping[str, Any], sizes: Dimensions) -> int:
    """The inner activations of a token in the MLPs of all layers: dense, shared, and of the experts chosen for it."""
    chosen = hf_config["num_experts_per_tok"] if sizes.experts else 0
    return sizes.dense_layers * sizes.ffn + sizes.sparse_layers * (sizes.shared_ffn + chosen * sizes.expert_ffn)


def recomputed_flops(hf_config: Mapping[str, Any], tokens: int) -> dict[str, float]:
    """Returns the FLOPs that recomputing a layer adds for a sequence of `tokens` tokens, by kind of recomputation (a
    value of trainer.recompute, or a megatron-core module); where layers differ, the mean. Raises ConfigError if the
    model has no table, as `architecture` does."""
    sizes, whole = architecture(hf_config).dimensions, SequenceFlops.of(hf_config)
    gate_and_up = 2 * sizes.hidden * _inner(hf_config, sizes) / sizes.layers
    feed_forward = 1.5 * gate_and_up + sizes.hidden * sizes.experts
    return {
        "none": 0.0,
        "layernorm": 0.0,
        "core_attn": whole.pair * tokens * (tokens + 1) / 2 / sizes.layers,
        "moe": 2.0 * feed_forward * tokens,
        "elementwise": 0.0,
        "mlp": 2.0 * gate_and_up * tokens,
        "full": float(whole(tokens, 0)) / sizes.layers,
    }

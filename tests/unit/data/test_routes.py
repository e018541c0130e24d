"""Which routes of experts are a model's."""

import numpy as np
import pytest

from areal_megatron.config import ConfigError
from areal_megatron.data.routes import Routing
from areal_megatron.data.trajectory import Trajectory


def routed(routes: list[list[list[int]]], dtype=np.uint8) -> Trajectory:
    """Returns a trajectory of three tokens with these routes, [tokens, layers, k]."""
    return Trajectory(
        uid=7,
        epoch=0,
        prompt_id=0,
        admission_version=0,
        prompt=np.ones(1, np.int32),
        response=np.ones(2, np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
        loss_mask=np.ones(2, np.uint8),
        reward=0.0,
        truncated=False,
        routes=np.array(routes, dtype).reshape(-1),
    )


def test_a_token_goes_to_an_expert_once():
    """Permutations of tokens count on it (trainer/experts.py). What is said of a dense layer is of no account."""
    routing = Routing(layers=2, experts=4, chosen=3, dense=1)
    whole = routed([[[0, 0, 0], [3, 1, 0]], [[0, 0, 0], [1, 2, 3]]])
    assert routing.joined([whole])[:2, 1].tolist() == [[3, 1, 0], [1, 2, 3]]
    for twice in ([2, 2, 0], [0, 1, 0], [0, 3, 3]):
        wrong = routed([[[0, 1, 2], [3, 1, 0]], [[0, 1, 2], twice]])
        with pytest.raises(ConfigError, match="trajectory 7: a layer sends a token to the same expert twice"):
            routing.joined([wrong])
    assert Routing(layers=2, experts=4, chosen=3).problem(whole)


def test_experts_have_numbers_of_the_model():
    routing = Routing(layers=1, experts=4, chosen=2)
    assert "are of another model" in routing.problem(routed([[[0, 4]]]))
    assert "are of another model" in routing.problem(routed([[[0, -1]]], np.int32))
    assert "are of another model" in routing.problem(routed([[[0, 1]]] * 4))
    assert routing.problem(routed([[[0, 1]]] * 3)) == ""

"""A small model, and the two pools of a run that hold it."""

import pytest

from areal_megatron.models.architecture import read_config
from tests.support.links import Pools
from tests.support.reshard_oracle import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_model("qwen3", folder), read_config(folder)


@pytest.fixture
def pools(tmp_path, model):
    made = []

    def make(**settings):
        made.append(Pools(tmp_path, *model, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()

"""What a publisher refuses before it sends anything, and what its links are made of."""

import queue
import threading
import time
from dataclasses import asdict

import pytest
import torch

from areal_megatron.config import ReshardConfig
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard import carriers, engine_layout, trainer_layout
from areal_megatron.reshard.boxes import LayoutError
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.outlet import TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.reception import Inlet, Reception
from areal_megatron.reshard.session import LinkInfo, LinkRef
from areal_megatron.reshard.staging import Full, Shard
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run.folder import RunError
from tests.support.link_store import open_store
from tests.support.reshard_oracle import CONFIG


def publisher(parameters, check_finite=False):
    return Publisher(
        TrainerRank(
            parameters=lambda: parameters,
            planner=Planner(CONFIG, MegatronSizes(), EngineSizes()),
            rank=0,
            dtype=torch.bfloat16,
            store="127.0.0.1:1",
            on_delivered=None,
            timeline=None,
            reshard=ReshardConfig(check_finite=check_finite, timeout_s=1, update="full"),
        )
    )


@pytest.fixture
def parameters():
    shapes = trainer_layout.layout(CONFIG, MegatronSizes(), 0).parameters
    return {name: torch.ones(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(parameters, value):
    name = "decoder.layers.1.self_attention.linear_qkv.bias"
    checked, unchecked = publisher(parameters, check_finite=True), publisher(parameters)
    checked.publish(1, [])
    parameters[name][3] = value
    with pytest.raises(RunError, match=rf"trainer-0, version 2: {name} holds NaN or Inf"):
        checked.publish(2, [])
    unchecked.publish(2, [])


def test_large_weights_are_finite(parameters):
    for tensor in parameters.values():
        tensor.fill_(3e38)
    publisher(parameters, check_finite=True).publish(1, [])


def test_parameters_that_are_not_the_layouts_are_refused(parameters):
    parameters["decoder.final_layernorm.weight"] = torch.ones(63)
    with pytest.raises(
        LayoutError, match=r"trainer rank 0: decoder.final_layernorm.weight has shape \[63\], expected \[64\]"
    ):
        publisher(parameters)


@pytest.mark.parametrize("first", ["trainer", "engine"])
def test_two_versions_of_nccl_are_named_on_both_sides_at_once(parameters, tmp_path, monkeypatch, first):
    def library():
        return "NCCL 2.27.5" if threading.current_thread().name.startswith("join") else "NCCL 2.29.3"

    monkeypatch.setattr(carriers.nccl, "library", library)
    monkeypatch.setitem(carriers.CARRIERS, "device", carriers.Nccl)
    store, delivered, begun = open_store(), queue.Queue(), time.monotonic()
    planner = Planner(CONFIG, MegatronSizes(), EngineSizes())
    timeline = Timeline(tmp_path / "timeline.jsonl", "trainer-0")
    address = f"127.0.0.1:{store.port}"
    shapes = engine_layout.layout(CONFIG, EngineSizes(), 0).parameters
    shard = Shard(held := {n: torch.zeros(s) for n, s in shapes.items()}, Full.reserve(held), EngineSizes(), 0)
    sizes = asdict(MegatronSizes()), asdict(EngineSizes())

    def publish():
        Publisher(
            TrainerRank(
                parameters=lambda: parameters,
                planner=planner,
                rank=0,
                dtype=torch.float32,
                store=address,
                on_delivered=lambda *report: delivered.put(report[-1]),
                timeline=timeline,
                reshard=ReshardConfig(timeout_s=60, update="full"),
            )
        ).publish(1, [LinkRef(0, 1)])

    def receive():
        return Reception(Inlet(shard, LinkInfo(0, 1, address, CONFIG, *sizes, "float32", 60), lambda _: None), None)

    if first == "trainer":
        publish()
        time.sleep(0.5)
        update = receive()
    else:
        update = receive()
        time.sleep(0.5)
        publish()
    error = delivered.get(timeout=20)
    update._thread.join(20)
    versions = {"trainer": "engine rank 0 has NCCL 2.27.5, but trainer rank 0 has NCCL 2.29.3"}
    versions["engine"] = "trainer rank 0 has NCCL 2.29.3, but engine rank 0 has NCCL 2.27.5"
    for said in (error, update.problem()):
        assert f"link to engine 0, generation 1: {versions[first]}; install the same torch" in said
        assert "\n" not in said
    assert time.monotonic() - begun < 20

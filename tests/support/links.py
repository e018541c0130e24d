"""Both ends of links in one process: trainer ranks and engine ranks on threads, with real parameters."""

import functools
import queue
from dataclasses import asdict

import torch

from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.session import LinkInfo
from areal_megatron.reshard.staging import Inlet, Reception, Shard, reserve
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.link_store import open_store
from tests.support.reshard_oracle import megatron_shard, vllm_parameters

BUCKET = 4000
"""Elements of a message: dozens of them for each engine rank."""


class Pools:
    """Trainer ranks that hold the checkpoint `tensors`, and engine 0, which holds zeros until it commits."""

    def __init__(
        self, folder, tensors, config, *, sizes, tp, link="device", staging="full", device="cpu", timeout_s=20.0
    ):
        self.tensors, self.config, self.sizes, self.tp = tensors, config, MegatronSizes(**sizes), tp
        self.store, self.delivered = open_store(), queue.Queue()
        self._address = f"127.0.0.1:{self.store.port}"
        self.planner = Planner(config, self.sizes, EngineSizes(tp=tp), BUCKET)
        self._link, self._timeout_s = link, timeout_s
        shards = [megatron_shard(tensors, config, self.sizes, rank) for rank in range(self.sizes.ranks)]
        sent = [{name: tensor.to(device) for name, tensor in held.items()} for held in shards]
        self.publishers = [
            Publisher(
                parameters=functools.partial(sent.__getitem__, rank),
                planner=self.planner,
                rank=rank,
                engines=1,
                dtype="float32",
                store=self._address,
                timeout_s=timeout_s,
                on_delivered=lambda *report: self.delivered.put(report),
                timeline=Timeline(folder / "timeline.jsonl", f"trainer-{rank}"),
                link=link,
            )
            for rank in range(self.sizes.ranks)
        ]
        self.held = []
        self.shards = []
        for rank in range(tp):
            wanted = vllm_parameters(tensors, config, tp=tp, rank=rank)
            held = {name: torch.zeros(tensor.shape, device=device) for name, tensor in wanted.items()}
            place = reserve(held)[: 2 * BUCKET] if staging == "streamed" else reserve(held)
            self.held.append(held)
            self.shards.append(Shard(held, place, EngineSizes(tp=tp), rank, staging == "streamed"))
        self.inlets = []
        self.updates = [None] * tp

    def join(self, generation):
        info = LinkInfo(
            engine=0,
            generation=generation,
            store=self._address,
            hf_config=self.config,
            sizes=asdict(self.sizes),
            engine_sizes=asdict(EngineSizes(tp=self.tp)),
            dtype="float32",
            timeout_s=self._timeout_s,
            bucket_elements=BUCKET,
            link=self._link,
        )
        self.inlets = [Inlet(shard, info, log=lambda _: None) for shard in self.shards]

    def start(self):
        self.updates = [Reception(inlet, after) for inlet, after in zip(self.inlets, self.updates, strict=True)]

    def publish(self, version, generation=1):
        for publisher in self.publishers:
            publisher.publish(version, [(0, generation)])

    def update(self, version, generation=1):
        """Makes one update; returns how many bytes arrived."""
        self.start()
        self.publish(version, generation)
        *_, size, error = self.delivered.get(timeout=60)
        assert not error, error
        for update in self.updates:
            assert not update.problem()
            update.commit()
        return size

    def assert_committed(self):
        for rank, held in enumerate(self.held):
            wanted = vllm_parameters(self.tensors, self.config, tp=self.tp, rank=rank)
            for name, tensor in wanted.items():
                assert torch.equal(held[name].cpu(), tensor), name

    def close(self):
        for publisher in self.publishers:
            publisher.close()

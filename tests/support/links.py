"""Both ends of links in one process: trainer ranks and engine ranks on threads, with real parameters."""

import functools
import queue
from dataclasses import asdict, replace

import torch

from areal_megatron.config import ReshardConfig
from areal_megatron.engine.server import reserve_ports
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.carriers.streams import Listener
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.outlet import TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.reception import Inlet, Reception
from areal_megatron.reshard.session import LinkInfo, LinkRef
from areal_megatron.reshard.staging import Full, Shard, Streamed
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.link_store import open_store
from tests.support.reshard_oracle import megatron_shards, vllm_parameters

BUCKET = 4000
"""Elements of a message: dozens of them for each engine rank."""


class Pools:
    """Trainer ranks that hold the checkpoint `tensors`, and engine 0, which holds zeros until it commits."""

    def __init__(
        self,
        folder,
        tensors,
        config,
        *,
        sizes,
        tp,
        link="device",
        staging="full",
        device="cpu",
        timeout_s=20.0,
        update="full",
        dtype=torch.float32,
        compress=None,
        credentials=None,
        trainer_credentials=None,
        may_send_changes=True,
    ):
        """`credentials`: of a run whose engine is at another site; the trainers may have others."""
        self.dtype = dtype
        self.tensors, self.config, self.sizes, self.tp = tensors, config, MegatronSizes(**sizes), tp
        self.store, self.delivered = open_store(), queue.Queue()
        self._address = f"127.0.0.1:{self.store.port}"
        self.planner = Planner(config, self.sizes, EngineSizes(tp=tp), BUCKET)
        self._link, self._timeout_s = link, timeout_s
        self._may_send_changes = may_send_changes and update != "full"
        self._sent = sent = [
            {
                name: t.to(device, torch.float32 if name.endswith("expert_bias") else dtype, copy=True)
                for name, t in held.items()
            }
            for held in megatron_shards(tensors, config, self.sizes)
        ]
        self.publishers = [
            Publisher(
                TrainerRank(
                    parameters=functools.partial(sent.__getitem__, rank),
                    planner=self.planner,
                    rank=rank,
                    dtype=dtype,
                    store=self._address,
                    on_delivered=lambda *report: self.delivered.put(report),
                    timeline=Timeline(folder / "timeline.jsonl", f"trainer-{rank}"),
                    link=link,
                    tls=(trainer_credentials or credentials).calling() if credentials else None,
                    reshard=ReshardConfig(
                        compression="zstd" if compress else "none", timeout_s=timeout_s, update=update
                    ),
                )
            )
            for rank in range(self.sizes.ranks)
        ]
        self.held = []
        self.shards = []
        self.listeners = []
        self._site, self._ports = "", []
        if credentials:
            port, self._ports = reserve_ports("127.0.0.1", 0, 1 + tp)
            self._site = f"127.0.0.1:{port}"
            self.listeners = [Listener("127.0.0.1", port + 1 + rank, credentials.listening()) for rank in range(tp)]
        for rank in range(tp):
            wanted = vllm_parameters(tensors, config, tp=tp, rank=rank)
            held = {name: torch.zeros(t.shape, device=device, dtype=self._held_in(name)) for name, t in wanted.items()}
            place = Streamed.reserve(held)[: 2 * (4 * BUCKET + 16)] if staging == "streamed" else Full.reserve(held)
            self.held.append(held)
            self.shards.append(
                Shard(held, place, EngineSizes(tp=tp), rank, Streamed if staging == "streamed" else Full)
            )
        for number, listener in enumerate(self.listeners):
            self.shards[number] = replace(self.shards[number], site=listener)
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
            dtype=str(self.dtype).removeprefix("torch."),
            timeout_s=self._timeout_s,
            bucket_elements=BUCKET,
            link=self._link,
            may_send_changes=self._may_send_changes,
        )
        for inlet in self.inlets:
            inlet.end()
        self.inlets = [Inlet(shard, info, log=lambda _: None) for shard in self.shards]

    def start(self):
        self.updates = [Reception(inlet, after) for inlet, after in zip(self.inlets, self.updates, strict=True)]

    def train(self, tensors):
        """Gives the trainers the checkpoint `tensors`."""
        for publisher in self.publishers:
            publisher.wait_until_read()
        self.tensors = tensors
        for held, trained in zip(self._sent, megatron_shards(tensors, self.config, self.sizes), strict=True):
            for name, tensor in trained.items():
                held[name].copy_(tensor)

    def publish(self, version, generation=1, few_changes=False):
        how = {"may_send_changes": self._may_send_changes, "few_changes": few_changes}
        for publisher in self.publishers:
            publisher.publish(version, [LinkRef(0, generation, site=self._site, **how)])

    def deliver(self, version, generation=1, few_changes=False):
        """Sends a version; returns what arrived, and why it did not, or ""."""
        self.start()
        self.publish(version, generation, few_changes)
        *_, received, error = self.delivered.get(timeout=60)
        return received, error

    def update(self, version, generation=1, few_changes=False):
        """Makes one update; returns what arrived."""
        received, error = self.deliver(version, generation, few_changes)
        assert not error, error
        for update in self.updates:
            assert not update.problem()
            update.commit()
        return received

    def assert_committed(self):
        for rank, held in enumerate(self.held):
            wanted = vllm_parameters(self.tensors, self.config, tp=self.tp, rank=rank)
            for name, tensor in wanted.items():
                sent = tensor if name.endswith("e_score_correction_bias") else tensor.to(self.dtype)
                assert torch.equal(held[name].cpu(), sent.to(held[name].dtype)), name

    def _held_in(self, parameter):
        """The dtype of an engine's parameter: GLM's routers are float32 in models of any dtype."""
        wide = "n_routed_experts" in self.config and ".mlp.gate." in parameter
        return torch.float32 if wide else self.dtype

    def close(self):
        for publisher in self.publishers:
            publisher.close()
        for one in (*self.listeners, *self._ports):
            one.close()

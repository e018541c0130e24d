"""Both ends of what reshard.py compares weight updates with, and the trainer ranks that it starts.

*Gather and broadcast*, as slime, verl and AReaL do it: mbridge brings full Hugging Face tensors together on the
trainers (a broadcast over pp, an all-gather over tp), trainer rank 0 broadcasts them in buckets to all engine workers
over one gloo group, and each worker hands them to vLLM's own `model.load_weights`.

*Raw link*: the bytes of our plan between the same pairs in the same processes, as one message each, from and into
existing buffers: no packing, no casting, no staging, no commit, nothing over the store.

Trainer ranks read orders from stdin and answer on stdout, a JSON object a line. vLLM's workers get `EngineWorker` by
--worker-extension-cls; its methods are called over /collective_rpc.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config, ReshardConfig
from areal_megatron.config.config_file import load
from areal_megatron.models.adapter import served
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.timeline import Timeline
from areal_megatron.process.streams import take_stdout
from areal_megatron.reshard import outlet, trainer_layout
from areal_megatron.reshard.carriers.base import Deadline, LinkEnd, Members, connect
from areal_megatron.reshard.outlet import Received
from areal_megatron.reshard.plan import Bucket, Planner
from areal_megatron.reshard.policy_slot import POLICY
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.session import LinkInfo, LinkRef
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.reshard.transport import Link, Message
from areal_megatron.run.folder import RunFolder, from_command_line

BUCKET_BYTES = 2**30
"""The size of a bucket of gather and broadcast, as in slime and verl."""
TENSORS = "peer/tensors"
"""The key of [[name, shape], …] of each bucket in the trainers' store."""
RAW = 1000
"""Added to an engine's number for its raw link, so that its keys differ from those of the measured link."""


def merged(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Returns one bucket for each pair of ranks, of everything that they exchange."""
    of_pair: dict[tuple[int, int], list[Bucket]] = defaultdict(list)
    for bucket in buckets:
        of_pair[bucket.source, bucket.destination].append(bucket)
    return [
        Bucket(*pair, 0, tuple(t for bucket in own for t in bucket.transfers), sum(bucket.elements for bucket in own))
        for pair, own in of_pair.items()
    ]


class RawLink:
    """One rank's end of the raw link to one engine; engine rank R is `rank` trainers.ranks + R.

    `init_info` is what /init_weight_transfer_engine gets.
    """

    def __init__(self, init_info: Mapping[str, Any], rank: int):
        trainers = MegatronSizes(**init_info["sizes"])
        plan = LinkInfo(**init_info).planner().plan(init_info["engine"])
        self._sends = rank < trainers.ranks
        own = merged(plan.sent_by(rank) if self._sends else plan.received_by(rank - trainers.ranks))
        dtype = getattr(torch, init_info["dtype"])
        self._buffers = [(bucket, torch.ones(bucket.elements, dtype=dtype)) for bucket in own]
        self._timeout_s = init_info["timeout_s"]
        self._link = Link(
            LinkEnd(
                engine=RAW + init_info["engine"],
                generation=init_info["generation"],
                store=init_info["store"],
                device=torch.device("cpu"),
                timeout_s=self._timeout_s,
            )
        )
        members = Members.of(plan)
        if not self._sends:
            self._link.join(members, members.engine(rank - trainers.ranks))
        elif rank in members.senders:
            self._link.join(members, members.trainer(rank))

    def start(self) -> list[Message]:
        deadline, exchange = Deadline(self._timeout_s), self._link.send if self._sends else self._link.receive
        return [exchange(flat, bucket, deadline) for bucket, flat in self._buffers]

    def finish(self, messages: Iterable[Message]) -> None:
        deadline = Deadline(self._timeout_s)
        for message in messages:
            message.wait(deadline)


class Broadcast:
    """One end of the group of trainer rank 0, which has rank 0 in it, and all engine workers."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float):
        self._store, self._rank, self._size, self._timeout = store, rank, size, timedelta(seconds=timeout_s)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("peer", store), rank, size, self._timeout)
        self._updates = 0

    def run(self, tensors: Iterable[Tensor]) -> None:
        """Broadcasts all tensors of a bucket from rank 0 at once."""
        works = [self._group.broadcast([tensor], dist.BroadcastOptions()) for tensor in tensors]
        for work in works:
            work.wait(self._timeout)

    def say_loaded(self, problem: str) -> None:
        self._updates += 1
        self._store.set(f"peer/loaded/{self._updates}/{self._rank}", problem)

    def wait_until_loaded(self) -> None:
        """Waits until every worker has loaded this update. Raises RuntimeError if one fails."""
        self._updates += 1
        keys = [f"peer/loaded/{self._updates}/{rank}" for rank in range(1, self._size)]
        self._store.wait(keys, self._timeout)
        for key in keys:
            if problem := self._store.get(key).decode():
                raise RuntimeError(f"{key}: {problem}")


class Gathering:
    """The trainers' side of gather and broadcast: every rank gathers, rank 0 holds and broadcasts the result."""

    def __init__(self, config: Config, model: torch.nn.Module, rank: int):
        self._model, self._rank = model, rank
        self._bridge = bridge_of(config)
        self.buckets: list[list[tuple[str, Tensor]]] = []

    @torch.no_grad()
    def gather(self) -> None:
        self.buckets = []
        exported = self._bridge.export_weights([self._model])
        if self._rank:
            for _ in exported:
                pass
        else:
            self.buckets = list(_in_buckets(exported))

    def tensors(self) -> str:
        """Returns names and shapes of each bucket as JSON."""
        return json.dumps([[(name, list(tensor.shape)) for name, tensor in bucket] for bucket in self.buckets])


def _in_buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    bucket, size = [], 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.contiguous()))
        size += tensor.nbytes
    yield bucket


def bridge_of(config: Config) -> Any:
    """Returns mbridge's bridge for the model, adapted to layer norms that are not fused into linear layers."""
    import mbridge.core.util
    from mbridge import AutoBridge
    from megatron.core import parallel_state

    # mbridge refers to CUDA as megatron-core does; without a device it gets the same stand-in from trainer/cpu.py.
    mbridge.core.util.torch = parallel_state.torch
    bridge = AutoBridge.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
    layer = "model.layers.{layer_number}."
    bridge._OTHER_MAPPING = {"input_layernorm.weight": [layer + "input_layernorm.weight"]}
    bridge._MLP_MAPPING = bridge._MLP_MAPPING | {
        "pre_mlp_layernorm.weight": [layer + "post_attention_layernorm.weight"]
    }
    return bridge


class TrainerRank:
    """A Megatron rank with the weights of model.path. Its public methods are the orders that reshard.py gives.

    `say` sends an answer or an event to reshard.py; it may be called on any thread.
    """

    def __init__(self, run: RunFolder, rank: int, say: Callable[..., None]):
        from areal_megatron.trainer.model import build_model, parallel_sizes
        from areal_megatron.trainer.parallel import STORE, initialise

        self.config = config = load(run.config)
        self.rank, self._say, self._timeout_s = rank, say, config.machine.peer_timeout_s
        self._parallel = initialise(config, run, rank)
        sizes = parallel_sizes(config, self._parallel.device)
        (self._model,) = build_model(config, sizes, self._parallel.device)
        self._parameters = {name: parameter.data for name, parameter in self._model.module.named_parameters()}
        hf_config = read_config(config.model.path)
        if adapter := served(config, hf_config):
            shapes = trainer_layout.layout(hf_config, sizes, rank, adapter).parameters
            self._parameters = {name: torch.randn(shape) for name, shape in shapes.items()}
        else:
            hf.load(self._parameters, trainer_layout.layout(hf_config, sizes, rank), config.model.path)
        self._publishers = {
            link: Publisher(
                outlet.TrainerRank(
                    parameters=lambda: self._parameters,
                    planner=Planner.of(config, hf_config, sizes),
                    rank=rank,
                    dtype=getattr(torch, config.model.dtype),
                    store=run.endpoint(STORE),
                    on_delivered=self._delivered,
                    timeline=Timeline(run.timeline(f"trainer-{rank}"), f"trainer-{rank}"),
                    link=link,
                    reshard=ReshardConfig(timeout_s=self._timeout_s, update="full"),
                )
            )
            for link in ("device", "host")
        }
        self._gathering = Gathering(config, self._model, rank)

    def join(self, init_infos: list[dict[str, Any]]) -> None:
        """Opens the raw links and the broadcast group; waits until the engines' workers have joined it."""
        self._raw = [RawLink(init_info, self.rank) for init_info in init_infos]
        self._gathering.gather()
        if self.rank == 0:
            self._parallel.store.set(TENSORS, self._gathering.tensors())
            workers = sum(init_info["engine_sizes"]["tp"] for init_info in init_infos)
            self._broadcast = Broadcast(self._parallel.store, 0, 1 + workers, self._timeout_s)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies every weight by `factor`, a power of two, so that it can be undone exactly. In place of an
        optimizer step."""
        torch._foreach_mul_(list(self._parameters.values()), factor)

    def publish(self, version: int, link: tuple[int, str]) -> float:
        """Publishes our way, over links of this generation and kind; returns, once the parameters have been read, the
        monotonic time at which it began."""
        start = time.monotonic()
        generation, kind = link
        publisher = self._publishers[kind]
        publisher.publish(version, [LinkRef(engine, generation) for engine in range(self.config.rollout.engines)])
        publisher.wait_until_read()
        return start

    def gather(self) -> None:
        self._gathering.gather()

    def broadcast(self) -> None:
        """Broadcasts what was gathered; on rank 0 waits until every worker has loaded it."""
        if self.rank == 0:
            for bucket in self._gathering.buckets:
                self._broadcast.run(tensor for _, tensor in bucket)
            self._broadcast.wait_until_loaded()

    def send_raw(self) -> float:
        """Sends everything; returns the monotonic time at which it began."""
        start = time.monotonic()
        messages = [link.start() for link in self._raw]
        for link, sent in zip(self._raw, messages, strict=True):
            link.finish(sent)
        return start

    def processor(self) -> float:
        """Returns the processor seconds of this process so far."""
        return time.process_time()

    def close(self) -> None:
        from areal_megatron.trainer.parallel import leave

        for publisher in self._publishers.values():
            publisher.close()
        leave()

    def _delivered(
        self, engine: int, generation: int, version: int, seconds: float, received: Received, error: str
    ) -> None:
        self._say(engine=engine, version=version, at=time.monotonic(), error=error)


class EngineWorker:
    """A base that vLLM adds to its worker class: `self` is the worker. Every method returns a JSON object."""

    def bench_join(self, init_info: dict[str, Any], workers: int) -> dict[str, Any]:
        """Opens this worker's end of the raw link and of the broadcast group; waits for the trainers.

        `workers` is the number of workers of all engines.
        """
        engine, tp, timeout_s = init_info["engine"], init_info["engine_sizes"]["tp"], init_info["timeout_s"]
        dtype = getattr(torch, init_info["dtype"])
        self._raw_link = RawLink(init_info, MegatronSizes(**init_info["sizes"]).ranks + self.rank)
        store = connect(init_info["store"], timeout_s)
        store.wait([TENSORS], timedelta(seconds=timeout_s))
        self._peer_buckets = [
            [(name, torch.empty(shape, dtype=dtype)) for name, shape in bucket]
            for bucket in json.loads(store.get(TENSORS))
        ]
        self._peer_broadcast = Broadcast(store, 1 + engine * tp + self.rank, 1 + workers, timeout_s)
        _reduce_without_spinning()
        return {"rank": self.rank}

    def bench_load(self) -> dict[str, Any]:
        """Receives every bucket of the broadcast and loads it, on a thread that tells the trainers when it ends."""

        def load() -> None:
            problem = ""
            try:
                for bucket in self._peer_buckets:
                    self._peer_broadcast.run(tensor for _, tensor in bucket)
                    self.model_runner.model.load_weights(bucket)
            except Exception as e:  # a thread's traceback would be lost
                problem = repr(e)
            self._peer_broadcast.say_loaded(problem)

        threading.Thread(target=load, daemon=True).start()
        return {"rank": self.rank}

    def bench_receive_raw(self) -> dict[str, Any]:
        """Posts the receives of the raw link, on a thread, since the first one waits for its sender to connect."""

        def receive() -> None:
            self._raw_link.finish(self._raw_link.start())
            self._raw_ended = time.monotonic()

        self._raw_waiting = threading.Thread(target=receive, daemon=True)
        self._raw_waiting.start()
        return {"rank": self.rank}

    def bench_raw_received(self) -> dict[str, Any]:
        """Waits for the last byte of the raw link; `at` is the monotonic time at which it came."""
        self._raw_waiting.join()
        return {"rank": self.rank, "at": self._raw_ended}

    def bench_receive_on(self, cores: list[int]) -> dict[str, Any]:
        """Restricts every thread but the one that computes to these cores."""
        computes = threading.main_thread().native_id
        for thread in map(int, os.listdir("/proc/self/task")):
            if thread != computes:
                os.sched_setaffinity(thread, cores)
        return {"rank": self.rank}

    def bench_processor(self) -> dict[str, Any]:
        return {"rank": self.rank, "seconds": time.process_time()}

    def bench_slot(self) -> dict[str, Any]:
        """Returns the sha256 of what the slot of the policy's adapter has in each layer."""
        manager = self.model_runner.get_model().lora_manager
        slot = manager.lora_index_to_id.index(POLICY)
        held: dict[str, str] = {}
        for layer, module in manager.modules.items():
            for number, stack in enumerate((*module.lora_a_stacked, *module.lora_b_stacked)):
                own = stack[slot].contiguous().view(torch.uint8).numpy().tobytes()
                held[f"{self.rank}:{layer}:{number}"] = hashlib.sha256(own).hexdigest()
        return held

    def bench_bytes(self) -> dict[str, Any]:
        return {"rank": self.rank, "bytes": received_bytes()}


def _reduce_without_spinning() -> None:
    """Makes the ranks of this worker's engine reduce over gloo, instead of busy waiting in shared memory."""
    from vllm.distributed.parallel_state import get_tp_group

    if communicator := get_tp_group().device_communicator:
        communicator.dist_module = dist


def received_bytes() -> int:
    """Returns the bytes that this process's open TCP connections have received, as the kernel counts them."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # no TCP connection, or closed by another thread meanwhile
            if os.readlink(descriptor).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += struct.unpack_from("<Q", info, 128)[0]  # tcpi_bytes_received of linux/tcp.h
    return total


def main() -> None:
    run, rank = from_command_line("reshard_peers")
    answers = io.TextIOWrapper(take_stdout(), encoding="utf-8", line_buffering=True)
    one_at_a_time = threading.Lock()

    def say(**message: Any) -> None:
        with one_at_a_time:
            answers.write(json.dumps(message) + "\n")

    trainer = TrainerRank(run, rank, say)
    say(answer=None)
    for line in sys.stdin:
        order = json.loads(line)
        say(answer=getattr(trainer, order.pop("order"))(**order))
    trainer.close()


if __name__ == "__main__":
    main()

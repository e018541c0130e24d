"""Links of two ranks on one device: what one costs, and what a waiting receive costs a product.

On CUDA the ranks seem to be on different hosts (processes.py), so that NCCL's messages go over sockets: times of
messages mean nothing, memory and the behaviour of streams do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil
import torch

from areal_megatron.reshard.carriers.base import Deadline, LinkEnd, Members, connect
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Bucket, Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.reshard.transport import Link, Message
from tests.support.link_store import open_store
from tools.bench.reshard_device import QWEN_1_5B, SMALL
from tools.evidence.ceilings import product_rate
from tools.evidence.parts import Finding, Options, Part
from tools.evidence.processes import as_found, on_ranks
from tools.evidence.queues import gpu_or_cpu

COUNTS = (1, 8, 32, 64)
CONNECTIONS = ("1", "8", "32")
LINK_TIMEOUT_S = 30.0
MIB = 2**20


def communicators(options: Options) -> Iterator[Finding]:
    """Memory and time of the first message of each of several links between the same two ranks."""
    counts = COUNTS[:2] if options.small else COUNTS
    store = open_store()
    arguments = options.device, _address(store), counts
    for count, mib, took in as_found(open_links, 2, *arguments, folder=options.folder / "communicators"):
        ends = count in (counts[0], counts[-1])
        yield Finding(f"{count} links: memory of a rank each", mib, "MiB", ends)
        yield Finding(f"{count} links: first message each", 1e3 * took, "ms", ends)


def open_links(rank: int, device: str, store: str, counts: list[int]) -> Iterator[list[float]]:
    """Yields (links, MiB a link, seconds a link) for each of `counts`."""
    bucket, target = _buckets(small=True)[0], gpu_or_cpu(device)
    flat, links = torch.zeros(bucket.elements, device=target, dtype=torch.bfloat16), []
    keys = connect(store, LINK_TIMEOUT_S)
    keys.set(f"ready/{rank}", "")
    keys.wait(["ready/0", "ready/1"])  # both hold memory of the device beside their links
    used, start = _used(target), time.perf_counter()
    for number in range(max(counts)):
        links.append(_link(rank, target, store, number))
        _message(links[-1], rank, flat, bucket).wait(Deadline(LINK_TIMEOUT_S))
        links[-1].settle()
        if number + 1 in counts:
            # On a GPU both ranks have grown by then, or nearly so.
            grown = (_used(target) - used) / (2 if target.type == "cuda" else 1)
            yield [number + 1, grown / MIB / (number + 1), (time.perf_counter() - start) / (number + 1)]


def beside_receive(options: Options, connections: str) -> Iterator[Finding]:
    """The rate of products while a receive waits whose sender sends nothing yet."""
    store = open_store()
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    arguments = options.device, options.small, _address(store)
    folder = options.folder / f"receive-{connections}"
    _, share = on_ranks(product_share, 2, *arguments, folder=folder, settings=settings)
    yield Finding(f"products beside a receive, {connections} connections", 100 * share, "%")


def product_share(rank: int, device: str, small: bool, store: str) -> float:
    """Returns on rank 1 the rate of products beside a receive that waits, over their rate alone."""
    options, bucket, target = Options(device, small, None), _buckets(small)[0], gpu_or_cpu(device)
    link, flat = _link(rank, target, store, 0), torch.zeros(bucket.elements, device=target, dtype=torch.bfloat16)
    _message(link, rank, flat, bucket).wait(Deadline(LINK_TIMEOUT_S))  # the communicator exists
    share = 0.0
    if rank:
        alone = product_rate(options)
        waiting = _message(link, rank, flat, bucket)
        share = product_rate(options) / alone
        link.say("measured")
    else:
        link.wait({"measured": "the receiver"}, Deadline(LINK_TIMEOUT_S), update=1, stop=lambda: None)
        waiting = _message(link, rank, flat, bucket)
    waiting.wait(Deadline(LINK_TIMEOUT_S))
    return share


def _link(rank: int, device: torch.device, store: str, number: int) -> Link:
    link = Link(LinkEnd(engine=number, generation=1, store=store, device=device, timeout_s=LINK_TIMEOUT_S))
    link.join(Members(senders=[0], engine_ranks=1), rank)
    link.meet(Deadline(LINK_TIMEOUT_S), update=1, stop=lambda: None)
    return link


def _message(link: Link, rank: int, flat: torch.Tensor, bucket: Bucket) -> Message:
    with link.stream():
        return (link.receive if rank else link.send)(flat, bucket, Deadline(LINK_TIMEOUT_S))


def _buckets(small: bool) -> list[Bucket]:
    """Returns the messages of a model from one trainer rank to an engine of one."""
    return Planner(SMALL if small else QWEN_1_5B, MegatronSizes(), EngineSizes()).plan(0).sent_by(0)


def _used(device: torch.device) -> int:
    """Returns the bytes in use of the GPU, by whomever, or of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return psutil.Process().memory_info().rss


def _address(store: Any) -> str:
    return f"127.0.0.1:{store.port}"


PARTS: dict[str, Part] = {
    **{f"receive, {count} connections": partial(beside_receive, connections=count) for count in CONNECTIONS},
    "communicators": communicators,
}

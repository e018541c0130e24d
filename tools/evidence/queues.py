"""What decides how links live beside computation: a dead peer, a full queue, a circle of messages, an update given up.

Every part runs on several ranks of one device. On CUDA they share the GPU in turns and their messages go over sockets
(processes.py): compare a time with the one beside it, never with a network's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from areal_megatron.process.files import write_json
from areal_megatron.reshard.carriers.base import Carrier, Deadline, LinkEnd, LinkError, Members
from areal_megatron.reshard.changes import find
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Bucket, Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.reshard.transport import Link, Message
from areal_megatron.run.gpu_settings import WATCHDOG
from tests.support.link_store import open_store
from tools.bench.reshard_device import QWEN_1_5B, SMALL
from tools.evidence.parts import Finding, Options, Part, Skip
from tools.evidence.processes import TIMEOUT_S, on_ranks

LINK_TIMEOUT_S = 60.0
STUCK_S = 10.0
"""After this long messages of which none arrives are taken to wait for each other."""
ALIVE_S = 60.0
"""How long a process must live after its peer's death: torch's monitor needs five seconds' silence here, then dumps."""
HEARTBEAT_S = 5
LAUNCHES = 45
"""Kernels of a layer: together as much as a GPU holds in its queue is more than a thousand of them."""
REPEATS = 5
CONNECTIONS = ("1", "8", "32")
CIRCLES = ("1", "32")
MIB = 2**20
SETTINGS: dict[str, dict[str, str]] = {"torch's settings": {}, "no dump, no monitor": WATCHDOG}


# ---- a dead peer


def killed_peer(options: Options) -> Iterator[Finding]:
    """A process whose peer dies inside a message, beside a default group as every trainer and engine has one."""
    store = open_store()
    folder = options.folder / "killed"
    arguments = options.device, options.small, f"127.0.0.1:{store.port}", str(folder)
    everybody, limit_s = range(2 * len(SETTINGS)), TIMEOUT_S + ALIVE_S
    on_ranks(lose_peer, len(everybody), *arguments, folder=folder, killed=everybody, timeout_s=limit_s)
    for number, name in enumerate(SETTINGS):
        path = folder / f"lived-{number}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"noticed": -1.0, "alive": 0.0}
        yield Finding(f"{name}: a killed peer is noticed after", found["noticed"], "s", more=found)
        yield Finding(f"{name}: the link is aborted and dropped in", found.get("dropped", -1.0), "s")
        yield Finding(f"{name}: the process lives on for", found["alive"], f"of {ALIVE_S:.0f} s")


def lose_peer(rank: int, device: str, small: bool, store: str, folder: str) -> None:
    """Ranks 0 and 1 share a link, and 2 and 3: the first of a pair kills itself in place of its second message; the
    second one writes how long it lives after that."""
    number, member = divmod(rank, 2)
    os.environ.update(list(SETTINGS.values())[number])
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(HEARTBEAT_S)
    target = gpu_or_cpu(device)
    default_group(target, dist.HashStore(), 0, 1)
    first, second = buckets(small, 1)[0][:2]
    flat = buffer(target, first, second)
    link = open_link(member, target, store, number, senders=[0])
    message(link, member, flat, first).wait(Deadline(LINK_TIMEOUT_S))
    if member == 0:
        time.sleep(1)
        die()
    start, found = time.monotonic(), {"noticed": 0.0, "alive": 0.0}
    try:
        message(link, member, flat, second).wait(Deadline(5))
        link.settle()
        found["error"] = "none: the message of a dead peer has arrived"
    except LinkError as e:
        found["error"] = str(e)
    found["noticed"] = time.monotonic() - start
    start = time.monotonic()
    link.abort()
    found["aborted"] = time.monotonic() - start
    del link
    found["dropped"] = time.monotonic() - start
    start, path = time.monotonic(), Path(folder) / f"lived-{number}.json"
    while found["alive"] < (3 if small else ALIVE_S):
        dist.all_reduce(flat[:1])
        found["alive"] = time.monotonic() - start
        write_json(path, found)
        time.sleep(0.2)
    die()


# ---- a full queue


def beside_full_queue(options: Options, connections: str) -> Iterator[Finding]:
    """What a publication does on the GPU, alone and while another thread keeps the GPU's queue full."""
    only_on_a_gpu(options, connections)
    store = open_store()
    arguments = options.device, options.small, f"127.0.0.1:{store.port}"
    folder, settings = options.folder / f"full-{connections}", {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    found, _ = on_ranks(measure_publication, 2, *arguments, folder=folder, settings=settings)
    for name, (alone, beside) in found.items():
        yield Finding(f"{connections:>2} connections: {name}", 1e3 * beside, f"ms, alone {1e3 * alone:.3g}")


def measure_publication(rank: int, device: str, small: bool, store: str) -> dict[str, list[float]]:
    """Returns on rank 0: what → median seconds alone, and beside layers that fill the queue. Rank 1 receives."""
    target, bucket = gpu_or_cpu(device), buckets(small, 1)[0][0]
    flat, link = buffer(target, bucket), open_link(rank, target, store, 0, senders=[0])

    def carry() -> None:
        message(link, rank, flat, bucket).wait(Deadline(LINK_TIMEOUT_S))
        link.settle()

    for _ in range(1 + 2 * REPEATS if rank else 1):  # the first one connects
        carry()
    if rank:
        return {}
    earlier = flat.cpu().pin_memory() if target.type == "cuda" else flat.clone()
    flat[::1000] += 1  # what a look finds
    room = torch.empty_like(flat)
    steps: dict[str, Callable[[], object]] = {f"a message of {flat.nbytes / MIB:.0f} MiB": carry}
    for word, priority in (("", 0), (", high priority", -1)):
        beside = partial(on_stream, target, priority)
        steps |= {
            f"packing{word}": beside(lambda: room.copy_(flat)),
            f"a look for changes in {len(flat) / MIB:.0f} Mi{word}": beside(lambda: find(earlier, flat)),
        }
    alone = {name: seconds(step) for name, step in steps.items()}
    with full_queue(target, small):
        return {name: [alone[name], seconds(step)] for name, step in steps.items()}


def on_stream(device: torch.device, priority: int, step: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that calls `step` on a stream of its own and waits until the stream has done it."""
    stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None

    def run() -> None:
        with torch.cuda.stream(stream):
            step()
        if stream:
            stream.synchronize()

    return run


def seconds(step: Callable[[], object]) -> float:
    """Returns the median time of a step."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return median(times)


@contextlib.contextmanager
def full_queue(device: torch.device, small: bool) -> Iterator[None]:
    """Launches layers of LAUNCHES products, of a third of a millisecond each on a GPU of 800 TFLOP/s, as fast as the
    device's queue takes them."""
    rows, width = (64, 64) if small else (8192, 4096)
    rows_in = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    weight, stop = torch.randn(width, width, device=device, dtype=torch.bfloat16), threading.Event()

    def train() -> None:
        while not stop.is_set():
            for _ in range(LAUNCHES):
                torch.mm(rows_in, weight)

    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(0.1 if small else 2)
    try:
        yield
    finally:
        stop.set()
        thread.join()


# ---- a circle


def circle(options: Options, connections: str) -> Iterator[Finding]:
    """Two trainer ranks with an all-reduce between them that send to one engine rank, in opposite orders."""
    only_on_a_gpu(options, connections)
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    for word, handshake in (("sent at once", False), ("sent as here, once its receive is posted", True)):
        stores = open_store(), open_store()
        addresses = [f"127.0.0.1:{store.port}" for store in stores]
        folder = options.folder / f"circle-{connections}-{handshake:d}"
        arguments = options.device, options.small, handshake, *addresses, str(folder)
        on_ranks(go_round, 3, *arguments, folder=folder, settings=settings, killed=range(3))
        took = [json.loads((folder / f"took-{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]
        value = "stuck" if min(took) < 0 else 1e3 * max(took)
        yield Finding(
            f"{connections:>2} connections, a circle {word}", value, "" if value == "stuck" else "ms", more=took
        )


def go_round(rank: int, device: str, small: bool, handshake: bool, store: str, others: str, folder: str) -> None:
    """Ranks 0 and 1 send, 2 receives from 1 first. Rank 0 launches its message before the all-reduce, rank 1 after it,
    or, with `handshake`, both once their receive is posted.

    Writes the seconds until all of the rank was done, or -1 if it was not after STUCK_S.
    """
    target = gpu_or_cpu(device)
    host, _, port = others.rpartition(":")
    keys = dist.TCPStore(host, int(port), None, False, timedelta(seconds=LINK_TIMEOUT_S), wait_for_workers=False)
    trainers = rank < 2
    default_group(target, dist.PrefixStore("trainers", keys) if trainers else dist.HashStore(), rank % 2, 1 + trainers)
    sent = [of_rank[0] for of_rank in buckets(small, 2)]
    flat = torch.zeros((2 if small else 128) * MIB, device=target, dtype=torch.bfloat16)  # more than NCCL has room for
    gradient = torch.ones(MIB if small else 64 * MIB, device=target, dtype=torch.bfloat16)
    link = open_link(rank, target, store, 0, senders=[0, 1])
    mine = [sent[rank]] if trainers else [sent[1], sent[0]]
    for bucket in reversed(mine):  # connects, without an all-reduce in between
        message(link, rank, flat, bucket, senders=2, elements=len(flat)).wait(Deadline(LINK_TIMEOUT_S))
    dist.all_reduce(gradient)
    if target.type == "cuda":
        torch.cuda.synchronize()
    keys.add("ready", 1)
    while keys.add("ready", 0) < 3:
        time.sleep(0.001)

    if not handshake:
        link.carrier.send = partial(Carrier.send, link.carrier)
    start, deadline = time.monotonic(), Deadline(STUCK_S)
    post = partial(message, link, rank, flat, senders=2, elements=len(flat), limit_s=STUCK_S)
    try:
        if not trainers:
            for bucket in mine:
                post(bucket).wait(deadline)
        elif rank == 0 and not handshake:
            sending, work = post(mine[0]), dist.all_reduce(gradient, async_op=True)
            sending.wait(deadline)
            wait_for(work, deadline)
        else:
            work = dist.all_reduce(gradient, async_op=True)
            time.sleep(0.05)
            post(mine[0]).wait(deadline)
            wait_for(work, deadline)
        took = time.monotonic() - start
    except (LinkError, RuntimeError):
        took = -1.0
    write_json(Path(folder) / f"took-{rank}.json", took)
    die()


def wait_for(work: dist.Work, deadline: Deadline) -> None:
    """Waits as a link does, without an entry in the GPU's queues."""
    while work.is_completed() is False and not deadline.passed and dist.get_backend() == "nccl":
        time.sleep(0.001)
    work.wait(deadline.left)


# ---- an update given up


def giving_up(options: Options) -> Iterator[Finding]:
    """How long a wait for the whole device takes to end once a receive is given up whose sender sends nothing."""
    store = open_store()
    arguments = options.device, options.small, f"127.0.0.1:{store.port}"
    _, found = on_ranks(give_up, 2, *arguments, folder=options.folder / "giving-up", killed={0})
    yield Finding("a wait for the device ends after the link is aborted in", 1e3 * found["waited"], "ms", more=found)
    yield Finding("the abort itself takes", 1e3 * found["aborted"], "ms")


def give_up(rank: int, device: str, small: bool, store: str) -> dict[str, float]:
    """Rank 1 receives what rank 0 does not send, waits for the whole device in a thread, and aborts after a second."""
    os.environ.update(WATCHDOG)
    target = gpu_or_cpu(device)
    first, second = buckets(small, 1)[0][:2]
    flat = buffer(target, first, second)
    link = open_link(rank, target, store, 0, senders=[0])
    message(link, rank, flat, first).wait(Deadline(LINK_TIMEOUT_S))
    if rank == 0:
        time.sleep(15)
        die()
    waiting, ended = message(link, rank, flat, second), []

    def wait_for_device() -> None:
        torch.accelerator.synchronize() if target.type == "cuda" else _settled(waiting)
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait_for_device, daemon=True)
    thread.start()
    time.sleep(1)
    start, early = time.monotonic(), bool(ended)
    link.abort()
    aborted = time.monotonic() - start
    thread.join(12)
    return {"aborted": aborted, "waited": (ended[0] if ended else time.monotonic()) - start, "early": float(early)}


def _settled(waiting: Message) -> None:
    with contextlib.suppress(LinkError):
        waiting.wait(Deadline(5))


# ---- what the parts share


def only_on_a_gpu(options: Options, connections: str) -> None:
    """Raises Skip where all numbers of connections are alike, but for the last."""
    if not options.on_cuda and connections != CONNECTIONS[-1]:
        raise Skip("a CPU has no connections")


def die() -> None:
    """Ends the process with groups that have lost a peer, or wait for one."""
    os.kill(os.getpid(), signal.SIGKILL)


def default_group(device: torch.device, store: dist.Store, rank: int, world: int) -> None:
    """Makes the process's default group, and its communicator."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    dist.all_reduce(torch.ones(1, device=device))


def open_link(member: int, device: torch.device, store: str, number: int, senders: list[int]) -> Link:
    link = Link(LinkEnd(engine=number, generation=1, store=store, device=device, timeout_s=LINK_TIMEOUT_S))
    link.join(Members(senders=senders, engine_ranks=1), member)
    link.meet(Deadline(LINK_TIMEOUT_S), update=1, stop=lambda: None)
    return link


def message(
    link: Link,
    member: int,
    flat: torch.Tensor,
    bucket: Bucket,
    senders: int = 1,
    elements: int = 0,
    limit_s: float = LINK_TIMEOUT_S,
) -> Message:
    """Posts a bucket, or as many elements in its place: the first members are trainer ranks, which send."""
    with link.stream():
        post = link.receive if member >= senders else link.send
        return post(flat[: elements or bucket.elements], bucket, Deadline(limit_s))


def buckets(small: bool, tp: int) -> list[list[Bucket]]:
    """Returns for each rank of a tensor-parallel trainer its messages to an engine of one, the largest first."""
    plan = Planner(SMALL if small else QWEN_1_5B, MegatronSizes(tp=tp), EngineSizes()).plan(0)
    return [sorted(plan.sent_by(rank), key=lambda bucket: -bucket.elements) for rank in range(tp)]


def gpu_or_cpu(device: str) -> torch.device:
    """Returns the device with its number, by which NCCL finds the communicator of a link."""
    return torch.device("cuda", 0) if device == "cuda" else torch.device(device)


def buffer(device: torch.device, *carried: Bucket) -> torch.Tensor:
    return torch.zeros(max(bucket.elements for bucket in carried), device=device, dtype=torch.bfloat16)


PARTS: dict[str, Part] = {
    "killed peer": killed_peer,
    "giving up": giving_up,
    **{f"circle, {count} connections": partial(circle, connections=count) for count in CIRCLES},
    **{f"full queue, {count} connections": partial(beside_full_queue, connections=count) for count in CONNECTIONS},
}

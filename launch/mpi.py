"""Launches a run over the slots of an MPI job: `mpirun -n W python -m areal_megatron.launch.mpi CONFIG [key=value …]`.

Every MPI process is a slot, a GPU or a core, and supervises what is started there; the first one also watches the run.
Orders and events are MPI messages. The processes of the run know nothing of MPI, so that one may die without the
others. MPI itself does not survive the loss of one of its own processes, as with a node: mpirun then ends them all.
Exit codes are the same as areal train's. Imports neither torch nor vllm.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from os import environ

import msgspec

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.launch.supervision import dry_run, start
from areal_megatron.launch.supervision.hosts import HostError, Nodes
from areal_megatron.launch.supervision.node import POLL_S, Supervisor, hello
from areal_megatron.launch.supervision.orders import Alive, End, Event, NodeHello, Order, StartOrder
from areal_megatron.launch.supervision.start import Beginning
from areal_megatron.launch.supervision.supervise import Outcome, supervise
from areal_megatron.planning.pools import Node, Process
from areal_megatron.process.shown import guard
from areal_megatron.process.silence import SIGN_S, Repeater
from areal_megatron.programs.fetch import fetch_all
from areal_megatron.run.folder import Replaced, RunFolder
from areal_megatron.run.network import check_network

_encode = msgspec.json.encode
_decode_order = msgspec.json.Decoder(Order | None).decode
_decode_event = msgspec.json.Decoder(Event).decode


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = start.parser("areal_megatron.launch.mpi", __doc__)
    dry_run.add_flags(parser)
    options = parser.parse_intermixed_args(arguments)
    try:
        if sizes := dry_run.imagined(options, here=False):
            return dry_run.show_imagined(options, sizes)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:  # RuntimeError: there is no MPI library
        print(f"error: areal_megatron.launch.mpi needs mpi4py and an MPI library: {e}", file=sys.stderr)
        return 2
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        print(
            "error: areal_megatron.launch.mpi needs an MPI library that several threads may call in turn",
            file=sys.stderr,
        )
        return 2
    world = Messages(MPI.COMM_WORLD)
    own = hello(str(world.rank))
    own.node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    if world.rank:
        follow(world, own)
        return 0
    channel = MpiChannel(world, own)
    try:
        config = config_file.load(options.config, options.overrides)
        places: dict[tuple[str, int | str | None], str] = {}
        nodes = Nodes(channel, config.machine.silence_s, lambda process: places[_slot(process)])
        if options.dry_run:
            print(dry_run.text(_check(config, options, nodes, world.size, places), options.python), flush=True)
            channel.close()
            return 0
        with start.lease(config) as lease:
            fetch_all(config, lease.run)
            start.check_input(config)
            beginning = _check(config, options, nodes, world.size, places, lease.run)
            print(beginning.plan.table(), flush=True)
            beginning.begin()
            return supervise(beginning, nodes, options, lease)
    except (ConfigError, HostError, Replaced) as e:
        channel.close()
        print(f"error: {e}", file=sys.stderr)
        return {ConfigError: 2, HostError: Outcome.LOST, Replaced: Outcome.REPLACED}[type(e)]


def _check(
    config: Config,
    options: argparse.Namespace,
    nodes: Nodes,
    count: int,
    places: dict[tuple[str, int | str | None], str],
    run: RunFolder | None = None,
) -> Beginning:
    """Waits for all `count` MPI processes, checks everything, and fills `places` as `slots` returns them. `run`: None
    if nothing is to be started. Raises ConfigError or HostError."""
    found = nodes.gather([str(rank) for rank in range(count)], config.machine.gather_s)
    gpus = {f"{own.node} (MPI process {own.supervisor})": own.gpus for own in found}
    config.machine.device = start.decide_device(config, gpus)
    if config.machine.device == "cpu":
        print("the run computes on CPU cores, not on GPUs", flush=True)
    start.check_packages(config, options.python)
    check_network(config.machine.host, {hello.machine for hello in found})
    machines, found_places = slots(found, config)
    places |= found_places
    gpu_gib = min(slot.gpu_gib for slot in found)
    return start.check(config, machines, gpu_gib=gpu_gib, run=run, python=options.python)


def slots(found: Sequence[NodeHello], config: Config) -> tuple[list[Node], dict[tuple[str, int | str | None], str]]:
    """Returns the nodes, and by node and slot the MPI process (its rank) that has the slot. Slot None is for processes
    without a slot: the node's first MPI process.

    Raises ConfigError if a node has more MPI processes than GPUs that they see, or an engine more slots than the
    process that starts it may open.
    """
    ranks = defaultdict(list)
    for own in found:
        ranks[own.node].append(own)
    nodes, places = [], {}
    for name, members in ranks.items():
        own_slots = _gpus(name, members, config) if config.machine.device == "cuda" else range(len(members))
        nodes.append(Node(name, tuple(own_slots), files=min(own.files for own in members)))
        places |= {(name, slot): own.supervisor for slot, own in zip(own_slots, members, strict=True)}
        places[name, None] = members[0].supervisor
    return nodes, places


def _gpus(node: str, members: Sequence[NodeHello], config: Config) -> list[int | str]:
    """Returns a GPU for each MPI process of a node: the first that it sees and no other has. They may all see the same
    ones or, as with --gpus-per-task, each its own, which a cgroup may have each of them call GPU 0: then GPUs go by
    their UUIDs. Raises ConfigError."""
    seen = [dict(zip(own.gpus, own.uuids or [""] * len(own.gpus), strict=True)) for own in members]
    meant = {(name, uuid) for own in seen for name, uuid in own.items() if uuid}
    if by_uuid := len(meant) > len({name for name, _ in meant}):
        seen = [{uuid or name: uuid for name, uuid in own.items()} for own in seen]
    taken: list[int | str] = []
    for own in seen:
        taken += [name for name in own if name not in taken][:1]
    if len(taken) < len(members):
        count = len({name for own in seen for name in own})
        raise ConfigError(
            f"node {node} has {len(members)} MPI processes and {count} GPUs: start one for each GPU, e.g. mpirun "
            "--map-by ppr:8:node"
        )
    if by_uuid and config.has_engines and config.rollout.tp > 1:
        raise ConfigError(
            f"rollout.tp: an engine takes {config.rollout.tp} GPUs, but each MPI process of node {node} may open one "
            "alone: let each see all GPUs of its node, e.g. by --gpus-per-node=8 in place of --gpus-per-task=1"
        )
    return taken


def _slot(process: Process) -> tuple[str, int | str | None]:
    return (process.node, process.slots[0].id if process.slots else None)


class Messages:
    """Messages of bytes between the processes of a communicator. Receiving never waits; sending takes a moment. Threads
    take turns."""

    def __init__(self, communicator):
        from mpi4py import MPI

        self._mpi, self._communicator = MPI, communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self._lock = threading.Lock()

    def send(self, data: bytes, rank: int) -> None:
        with self._lock:
            self._communicator.Send([data, self._mpi.BYTE], dest=rank)

    def receive(self) -> list[bytes]:
        """Returns the messages that have arrived."""
        status, received = self._mpi.Status(), []
        with self._lock:
            while self._communicator.Iprobe(status=status):
                data = bytearray(status.Get_count(self._mpi.BYTE))
                self._communicator.Recv([data, self._mpi.BYTE], source=status.Get_source())
                received.append(bytes(data))
        return received


class MpiChannel:
    """The connection of the first process to all supervisors, including its own."""

    def __init__(self, world: Messages, own: NodeHello):
        self._world, self._supervisor = world, Supervisor(own.supervisor)
        self._orders: list[Order] = []
        self._events: list[Event] = [own]

    def send(self, order: Order) -> None:
        addressed = isinstance(order, StartOrder | End)
        if not addressed or order.supervisor == "0":
            self._orders.append(order)
        for rank in {int(order.supervisor)} - {0} if addressed else range(1, self._world.size):
            self._world.send(_encode(order), rank)

    def receive(self) -> list[Event]:
        orders, self._orders = self._orders, []
        events, self._events = self._events, []
        own = [*self._supervisor.step(orders), Alive("0")]
        return [*events, *own, *map(_decode_event, self._world.receive())]

    def close(self) -> None:
        for rank in range(1, self._world.size):
            self._world.send(_encode(None), rank)
        self._supervisor.__exit__()


def follow(world: Messages, own: NodeHello) -> None:
    """Supervises the slot of any process but the first, until the first says that the run is over. Signs of life come
    from a thread of their own, since this one waits for the shared folder of the logs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # mpirun passes it on to all; only the first process acts on it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    world.send(_encode(own), 0)
    alive = Repeater(lambda: world.send(_encode(Alive(own.supervisor)), 0), SIGN_S)
    with alive, Supervisor(own.supervisor) as supervisor:
        while None not in (orders := [_decode_order(data) for data in world.receive()]):
            for event in supervisor.step(orders):
                world.send(_encode(event), 0)
            time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())

"""Which process runs where: pure functions from nodes and a config to the pools.

A slot is a GPU, or a CPU core on machines without. The trainer pool takes slots in the order of the nodes, rank by
rank: ranks are numbered as Megatron numbers them (tensor parallelism fastest, then data and expert parallelism, then
pipeline stages; see reshard.trainer_layout.MegatronSizes), so a stage is a run of neighbouring slots and the next stage
follows right after it. Engines take what is left or, with machine.shared, the same slots again: each pool is then
placed as if it were alone, so that a slot has at most one trainer rank and one engine rank. A tensor-parallel group or
an engine is placed inside one node if a node has room for it, and takes whole nodes if it is larger than one. The
controller runs on the first node, without a slot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from areal_megatron.config import SERVED, Config, ConfigError
from areal_megatron.run.process_names import engine_name, served_name, trainer_name

_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_LISTED = 16
"""The most processes that the table has a line for each of; if there are more, it has a line for each node."""


@dataclass(frozen=True)
class Node:
    name: str
    slots: tuple[int | str, ...]
    """Numbers or names of GPUs (gpus.py), or core numbers where the pools run on cores."""
    cpus: int = 0
    """The number of cores beside the slots; 0 if unknown, or if the slots are cores."""
    files: int = 0
    """How many files a process there may have open; 0 if unknown."""


@dataclass(frozen=True)
class Slot:
    node: str
    id: int | str
    """Number or name of a GPU of its node, or the number of a core."""


@dataclass(frozen=True)
class Process:
    name: str
    """`controller`, `engine-E`, `trainer-RANK`, or `judge-E` and the like, as in the run folder."""
    pool: str
    """`trainer`, `rollout`, `controller`, or the name of a model that is served beside the policy."""
    index: int
    node: str
    """Where the process is started; the first node of an engine that has slots on several."""
    slots: tuple[Slot, ...]
    part: int = 0
    """Index of this part of an engine on several nodes; part 0 serves the requests."""
    of: int = 1
    """The number of parts."""

    @property
    def parts(self) -> tuple[Process, ...]:
        """The processes to start: an engine on several nodes has one on each, `engine-E`, `engine-E.1`, …"""
        nodes = list(dict.fromkeys(slot.node for slot in self.slots))
        if len(nodes) < 2:
            return (self,)
        return tuple(
            replace(
                self,
                name=f"{self.name}.{part}" if part else self.name,
                node=node,
                part=part,
                of=len(nodes),
                slots=tuple(slot for slot in self.slots if slot.node == node),
            )
            for part, node in enumerate(nodes)
        )


def whole(name: str) -> str:
    """Returns the name of the engine that a process is a part of; other names are returned as they are."""
    return name.partition(".")[0]


@dataclass(frozen=True)
class Placement:
    nodes: tuple[Node, ...]
    processes: tuple[Process, ...]

    def pool(self, name: str) -> tuple[Process, ...]:
        return tuple(p for p in self.processes if p.pool == name)

    def on(self, node: str) -> tuple[Process, ...]:
        """Returns the processes that are started, or have a slot, on that node."""
        return tuple(p for p in self.processes if p.node == node or any(s.node == node for s in p.slots))

    @property
    def idle(self) -> int:
        """The number of slots that no process has."""
        taken = {slot for p in self.processes for slot in p.slots}
        return sum(len(node.slots) for node in self.nodes) - len(taken)

    def table(self) -> str:
        """Returns a line for each process, or for each node if there are many processes."""
        return _by_process(self) if len(self.processes) <= _LISTED else _by_node(self)


def allocate(config: Config, nodes: Sequence[Node], rollout_nodes: Sequence[Node] = ()) -> Placement:
    """Returns the pools of the config's trainers, engines and served models: disjoint, unless machine.shared.
    Supervised runs have no engines and no controller, a replay no engines.

    All pools are on `nodes`, unless the engines have `rollout_nodes` of their own. Raises ConfigError, one line with
    the nodes found, the sizes asked for and the remedy, for: malformed or repeated node names, nodes without slots or
    with too few cores, too few slots, nodes of several sizes in one pool, sizes that leave a part of each node unused,
    and shared slots on different nodes.
    """
    everyone = (*nodes, *rollout_nodes)
    _check_nodes(nodes, rollout_nodes)
    places = {}
    for pools, own in _together(config, nodes, rollout_nodes):
        _check_count(config, pools, own)
        free = {node.name: list(node.slots) for node in own}
        for pool in pools:
            places[pool.name] = _place(pool, own, free, pools)
            _check_alike(pool, own, places[pool.name])
    processes = [Process("controller", "controller", 0, nodes[0].name, ())] if not config.is_supervised else []
    ranks = [slot for group in places["trainer"] for slot in group]
    processes += [Process(trainer_name(rank), "trainer", rank, slot.node, (slot,)) for rank, slot in enumerate(ranks)]
    engines = enumerate(places.get("rollout", []))
    processes += [Process(engine_name(e), "rollout", e, slots[0].node, tuple(slots)) for e, slots in engines]
    for model in SERVED:
        for e, slots in enumerate(places.get(model, [])):
            process = Process(served_name(model, e), model, e, slots[0].node, tuple(slots))
            if (nodes_of := len(process.parts)) > 1:
                raise ConfigError(
                    f"served.{model}.tp: {process.name} would be on {nodes_of} nodes, and has to be on one"
                )
            processes.append(process)
    placement = Placement(everyone, tuple(processes))
    _check_cores(placement)
    return placement


@dataclass(frozen=True)
class _Pool:
    """`count` groups of `size` slots, each on as few nodes as possible."""

    name: str
    size: int
    count: int
    key: str
    """Config key of `size`."""
    asked: str
    """The sizes as the config has them, for messages."""

    @property
    def slots(self) -> int:
        return self.size * self.count


def _wanted(config: Config) -> list[_Pool]:
    t, r = config.trainer, config.rollout
    divided = f" × cp={t.cp}" if t.cp > 1 else ""
    asked = f"trainer.tp={t.tp}{divided} × pp={t.pp} × dp={t.dp} is {config.trainer_ranks}"
    pools = [_Pool("trainer", t.tp, t.cp * t.pp * t.dp, "trainer.tp", asked)]
    if config.has_engines:
        asked = f"rollout.engines={r.engines} × tp={r.tp} is {r.engines * r.tp}"
        pools.append(_Pool("rollout", r.tp, r.engines, "rollout.tp", asked))
    for name, model in config.served_models.items():
        if not model.engines:  # the policy's serve it
            continue
        asked = f"served.{name}.engines={model.engines} × tp={model.tp} is {model.engines * model.tp}"
        pools.append(_Pool(name, model.tp, model.engines, f"served.{name}.tp", asked))
    return pools


def _together(
    config: Config, nodes: Sequence[Node], rollout_nodes: Sequence[Node]
) -> list[tuple[list[_Pool], Sequence[Node]]]:
    """Returns the pools that divide slots among them, each time with the nodes that have these slots."""
    pools = _wanted(config)
    if config.machine.shared and rollout_nodes and len(pools) > 1:
        raise ConfigError(
            "machine.shared: this job has nodes for the engines alone, so the pools have no slot in common: set it to "
            "false, or ask for one group of nodes"
        )
    if not config.machine.shared and not rollout_nodes:
        return [(pools, nodes)]
    if rollout_nodes:
        return [(pools[:1], nodes), (pools[1:], rollout_nodes)][: len(pools)]
    return [([pool], nodes) for pool in pools]


def _place(
    pool: _Pool, nodes: Sequence[Node], free: dict[str, list[int | str]], sharing: Sequence[_Pool]
) -> list[list[Slot]]:
    """Takes the pool's slots out of `free`, group by group in the order of the nodes. Raises ConfigError if they do not
    suffice."""
    groups: list[list[Slot]] = []
    spanning: list[Slot] = []
    for node in nodes:
        left = free[node.name]
        while len(groups) < pool.count and len(left) >= pool.size:
            groups.append([Slot(node.name, left.pop(0)) for _ in range(pool.size)])
        if len(groups) == pool.count:
            return groups
        if pool.size > len(node.slots) == len(left):  # larger than a node: whole nodes that follow each other
            spanning += [Slot(node.name, left.pop(0)) for _ in node.slots]
            if len(spanning) > pool.size:
                break
            if len(spanning) == pool.size:
                groups.append(spanning)
                spanning = []
    if len(groups) == pool.count:
        return groups
    raise ConfigError(_does_not_fit(pool, nodes, len(groups), sharing))


def _does_not_fit(pool: _Pool, nodes: Sequence[Node], placed: int, sharing: Sequence[_Pool]) -> str:
    sizes = sorted({len(node.slots) for node in nodes})
    found = (
        f"{pool.name} pool: {placed} of {pool.count} groups of {pool.key}={pool.size} fit on {_count(nodes)} of "
        f"{' or '.join(map(str, sizes))} slots"
    )
    if any(size % pool.size and pool.size % size for size in sizes):
        return f"{found} without dividing a group: set {pool.key} to one of {_divisors(sizes[-1])}"
    needed = max(_nodes_needed(sharing, sizes[-1]), len(nodes) + 1)
    return f"{found} without dividing a group: ask for {needed} nodes, or lower {pool.key}"


def _divisors(slots: int) -> str:
    return ", ".join(str(n) for n in range(1, slots + 1) if slots % n == 0) + f" or a multiple of {slots}"


def _check_nodes(nodes: Sequence[Node], rollout_nodes: Sequence[Node]) -> None:
    if not nodes:
        raise ConfigError("no node to run on: the node list is empty")
    own = {node.name for node in nodes}
    if both := sorted(own & {node.name for node in rollout_nodes}):
        raise ConfigError(f"the pools overlap: {_some(both)} in the list of both; a node belongs to one of the lists")
    for group in (nodes, rollout_nodes):
        names = Counter(node.name for node in group)
        for node in group:
            if not _NODE_NAME.fullmatch(node.name):
                raise ConfigError(f"node name {node.name!r} is malformed: expected letters, digits, '.', '_' and '-'")
            if not node.slots:
                raise ConfigError(f"node {node.name} has no GPU to run on: ask for nodes with GPUs, or leave it out")
            if len(set(node.slots)) < len(node.slots):
                raise ConfigError(f"node {node.name} has a slot twice: {list(node.slots)}")
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise ConfigError(f"the node list has {_some(twice)} more than once: name every node once")


def _check_count(config: Config, pools: Sequence[_Pool], nodes: Sequence[Node]) -> None:
    needed, found = sum(pool.slots for pool in pools), sum(len(node.slots) for node in nodes)
    if needed <= found:
        return
    change, largest = "make a pool smaller", max(len(node.slots) for node in nodes)
    if len(nodes) > 1:
        change += f", or ask for {_nodes_needed(pools, largest)} nodes of {largest}"
    elif config.machine.device != "cuda":
        change += f", or let processes share cores with machine.slots={needed}"
    if config.machine.device == "cuda" and len(pools) > 1 and max(pool.slots for pool in pools) <= found:
        change += ", or set machine.shared=true to let both pools share them"
    where = f" on {_count(nodes)}" if len(nodes) > 1 else ""
    raise ConfigError(
        f"the pools need {needed} slots ({', '.join(pool.asked for pool in pools)}) but there are "
        f"{found}{where}: {change}"
    )


def _nodes_needed(pools: Sequence[_Pool], slots: int) -> int:
    """Returns how many nodes of `slots` slots the pools take, one pool after another."""
    used, left = 0, 0
    for pool in pools:
        if pool.size > slots:
            used, left = used + pool.count * -(-pool.size // slots), 0
            continue
        here, each = min(left // pool.size, pool.count), slots // pool.size
        more = -(-(pool.count - here) // each)
        used += more
        left = slots - (pool.count - here - (more - 1) * each) * pool.size if more else left - pool.slots
    return used


def _check_alike(pool: _Pool, nodes: Sequence[Node], groups: Sequence[Sequence[Slot]]) -> None:
    """Raises ConfigError if the pool has nodes of several sizes, or several nodes of which it cannot use all slots."""
    names = {slot.node for group in groups for slot in group}
    used = [node for node in nodes if node.name in names]
    by_size = {len(node.slots): node.name for node in reversed(used)}
    if len(by_size) > 1:
        mixed = ", ".join(f"{size} ({name})" for size, name in sorted(by_size.items(), reverse=True))
        raise ConfigError(
            f"{pool.name} pool: its nodes have different numbers of slots: {mixed}; ask for nodes of one "
            "type, or give each pool nodes of its own type"
        )
    size = next(iter(by_size))
    if len(used) > 1 and size % pool.size and pool.size % size:
        raise ConfigError(
            f"{pool.key}: {pool.size} does not divide the {size} slots of a node, and the {pool.name} pool "
            f"is on {len(used)} of them: set it to one of {_divisors(size)}"
        )


def _check_cores(placement: Placement) -> None:
    """Raises ConfigError if a node has fewer cores than processes: srun and sbatch give a task one core by default."""
    needed = {node.name: 0 for node in placement.nodes}
    for process in placement.processes:
        for name in [slot.node for slot in process.slots] or [process.node]:
            needed[name] += 1
    for node in placement.nodes:
        if 0 < node.cpus < needed[node.name]:
            raise ConfigError(
                f"node {node.name} gives {node.cpus} CPU cores for {needed[node.name]} processes: ask for at "
                "least one each, e.g. sbatch --exclusive or --cpus-per-task"
            )


def _by_process(placement: Placement) -> str:
    rows = [("process", "pool", "slots")]
    for p in placement.processes:
        slots = " ".join(f"{s.node}:{s.id}" for s in p.slots) or f"{p.node}, no slot of its own"
        rows.append((p.name, p.pool, slots))
    return "\n".join(_aligned(rows))


def _by_node(placement: Placement) -> str:
    trainers, engines = placement.pool("trainer"), placement.pool("rollout")
    summary = f"{_count(placement.nodes)}: {len(trainers)} trainer ranks"
    if engines:
        summary += f", {len(engines)} engines of {len(engines[0].slots)}"
        for model in SERVED:
            if own := placement.pool(model):
                summary += f", {len(own)} engines of served.{model} of {len(own[0].slots)}"
        summary += f"; controller on {placement.nodes[0].name}"
    indices: dict[str, dict[str, list[int]]] = {node.name: {} for node in placement.nodes}
    taken = dict.fromkeys(indices, 0)
    for process in placement.processes:
        for slot in process.slots:
            found = indices[slot.node].setdefault(process.pool, [])
            found += [process.index] if process.index not in found[-1:] else []
            taken[slot.node] += 1
    pools = {"trainer": "trainer ranks", "rollout": "engines"} | {model: model for model in SERVED}
    pools = {pool: title for pool, title in pools.items() if placement.pool(pool)}
    rows = [("node", *pools.values(), *(["idle slots"] if placement.idle else []))]
    for node in placement.nodes:
        own = indices[node.name]
        cells = [_runs(own.get(pool, [])) for pool in pools]
        rows.append((node.name, *cells, *([str(len(node.slots) - taken[node.name])] if placement.idle else [])))
    return "\n".join([summary + (f"; {placement.idle} idle slots" if placement.idle else ""), *_aligned(rows)])


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _runs(numbers: list[int]) -> str:
    """Formats numbers, consecutive ones as `first–last`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs) or "-"


def _count(nodes: Sequence[Node]) -> str:
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")

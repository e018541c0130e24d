"""Which process runs where: pure functions from slots and a config to disjoint pools.

A slot is a GPU, or a CPU core on a machine without. The trainer pool takes its slots first, rank by
rank, then each engine takes a run of neighbouring slots. The controller needs no slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_megatron.config import Config, ConfigError


@dataclass(frozen=True)
class Slot:
    node: str
    index: int
    """GPU or core number on its node."""


@dataclass(frozen=True)
class Process:
    name: str
    """`controller`, `engine-E` or `trainer-RANK`, as in the run folder."""
    pool: str
    """`trainer`, `rollout` or `controller`."""
    index: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Placement:
    processes: tuple[Process, ...]

    def pool(self, name: str) -> tuple[Process, ...]:
        return tuple(p for p in self.processes if p.pool == name)

    def table(self) -> str:
        """One readable line a process."""
        rows = [("process", "pool", "slots")]
        for p in self.processes:
            rows.append((p.name, p.pool, " ".join(f"{s.node}:{s.index}" for s in p.slots) or "(no slot of its own)"))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def allocate(config: Config, slots: list[Slot]) -> Placement:
    """Disjoint pools for the config's trainers and engines (SFT has no engines and no controller).

    Raises ConfigError when the pools do not fit, with both numbers and what to change.
    """
    trainer, rollout = config.trainer, config.rollout
    engines = rollout.engines if config.mode == "rl" else 0
    needed = config.trainer_ranks + engines * rollout.tp
    if needed > len(slots):
        parts = f"trainer.tp={trainer.tp} × pp={trainer.pp} × dp={trainer.dp} is {config.trainer_ranks}"
        if engines:
            parts += f", rollout.engines={engines} × tp={rollout.tp} is {engines * rollout.tp}"
        raise ConfigError(f"the pools need {needed} slots ({parts}) but there are {len(slots)}: make a pool smaller, "
                          f"or let processes share cores with machine.slots={needed}")  # fmt: skip

    free = iter(slots)
    processes = [Process("controller", "controller", 0, ())] if engines else []
    processes += [Process(f"trainer-{rank}", "trainer", rank, (next(free),)) for rank in range(config.trainer_ranks)]
    for engine in range(engines):
        own = tuple(next(free) for _ in range(rollout.tp))
        processes.append(Process(f"engine-{engine}", "rollout", engine, own))
    return Placement(tuple(processes))

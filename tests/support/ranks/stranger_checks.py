"""Checks of a trainer pool that a process without the run's keys has joined, which test_strangers.py starts."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.parallel import STORE, initialise, leave
from tests.support.ranks.trainer_checks import make_config

STRANGER = 1


class Hostile:
    """Leaves a file, named by the process, wherever it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return exec, (f"import os; open({str(self.folder)!r} + f'/owned-{{os.getpid()}}', 'w')",)


def check_objects(folder: Path, rank: int) -> None:
    """Rank 1 is a stranger, who knows the address of the store and sends objects that run code where they are read."""
    run = RunFolder(folder / "run")
    if rank == STRANGER:
        own = RunFolder(folder / "stranger")
        own.create()
        own.announce(STORE, run.endpoint(STORE, 60))
        run = own
    initialise(make_config(folder, "qwen2", {"dp": 2}), run, rank)
    meet(folder, rank)  # signed with other keys
    if rank == STRANGER:
        distributed_c10d._pickler, distributed_c10d._unpickler = pickle.Pickler, pickle.Unpickler
    meet(folder, rank)  # not signed
    leave()


def meet(folder: Path, rank: int) -> None:
    sent = Hostile(folder) if rank == STRANGER else "an honest object"
    for share in (gathered_everywhere, gathered, broadcast):
        if rank == STRANGER:
            with suppress(Exception):
                share(sent)
        else:
            with pytest.raises(RuntimeError, match="a process without the run's keys is among the trainer ranks"):
                share(sent)
            assert not (folder / f"owned-{os.getpid()}").exists()


def gathered_everywhere(value: object) -> None:
    dist.all_gather_object([None, None], value)


def gathered(value: object) -> None:
    dist.gather_object(value, [None, None] if dist.get_rank() == 0 else None)


def broadcast(value: object) -> None:
    dist.broadcast_object_list([value], src=STRANGER)

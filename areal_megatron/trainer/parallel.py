"""The process groups of the trainer pool: Megatron's tp, cp, pp, dp, ep and etp, and two small ones for control.

Megatron's carry what lies on the device, by NCCL on CUDA: what they share of objects, torch puts there too. CPU tensors
go through the groups for control, by gloo, and through no others: a gloo group connects each rank with each other one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from areal_megatron.config import Config, ConfigError
from areal_megatron.process.errors import first_line
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run import gpu_settings
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.network import address, socket_settings
from areal_megatron.trainer.patches import sign_objects

STORE = "trainer-store"
"""The name under which rank 0 announces host:port of the trainers' TCPStore in the run folder."""


@dataclass(frozen=True)
class Parallel:
    """A rank's place in the trainer pool, and its process groups.

    Ranks are numbered in Megatron's order, see reshard.trainer_layout.MegatronSizes.
    """

    device: torch.device
    rank: int
    world: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    replica: int
    """The data-parallel rank."""
    is_leader: bool
    """Whether this is the first rank of its replica, which gets batches from the controller and writes the ledger."""
    is_last_stage: bool
    control: dist.ProcessGroup
    """The gloo group of all ranks, for small CPU tensors only."""
    replica_control: dist.ProcessGroup
    """The gloo group of this replica's tp × cp × pp ranks."""
    store: dist.Store
    """The TCPStore of the pool."""

    @property
    def is_first(self) -> bool:
        """Whether this is global rank 0."""
        return self.rank == 0

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the element-wise sum of a CPU tensor over all ranks, the same on each of them."""
        if self.world > 1:
            dist.all_reduce(values, group=self.control)
        return values

    def max_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the element-wise maximum of a CPU tensor over all ranks, the same on each of them."""
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control)
        return values

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over replicas of values that all ranks of a replica hold alike."""
        return self.sum_over_ranks(values if self.is_leader else torch.zeros_like(values))

    def sum_of_last_stages(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over replicas of values that the tp × cp ranks of a last stage hold alike."""
        is_first = self.tp_rank == self.cp_rank == 0
        return self.sum_over_ranks(values if self.is_last_stage and is_first else torch.zeros_like(values))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def share(self, value: bytes | None) -> bytes:
        """Returns the bytes of this replica's leader on every rank of the replica; the others pass None."""
        return self._broadcast(value, self.replica_control)

    def share_all(self, value: bytes | None) -> bytes:
        """Returns the bytes of global rank 0 on every rank; the others pass None."""
        return self._broadcast(value, self.control)

    def gather(self, value: bytes) -> list[bytes]:
        """Returns the bytes of every rank on global rank 0, an empty list on the others."""
        if self.world == 1:
            return [value]
        longest = int(self.max_over_ranks(torch.tensor([len(value)])))
        row = torch.frombuffer(bytearray(value.ljust(longest, b"\0") + len(value).to_bytes(8)), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self.world)] if self.is_first else None
        dist.gather(row, rows, group=self.control)
        found = (gathered.numpy().tobytes() for gathered in rows or ())
        return [data[: int.from_bytes(data[-8:])] for data in found]

    def _broadcast(self, value: bytes | None, group: dist.ProcessGroup) -> bytes:
        source = dist.get_global_rank(group, 0)
        if (value is not None) != (self.rank == source):
            raise ValueError(f"trainer-{self.rank}: only trainer-{source} has a value to share here")
        if group.size() == 1:
            assert value is not None  # it is the source's
            return value
        try:
            size = torch.tensor([0 if value is None else len(value)])
            dist.broadcast(size, source, group=group)
            if not size:
                return b""
            buffer = torch.empty(int(size), dtype=torch.uint8)
            if value is not None:
                buffer[:] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            dist.broadcast(buffer, source, group=group)
        except RuntimeError as e:
            raise RunError(
                f"trainer-{self.rank}: lost trainer-{source}, or a rank between, while it shared data: {first_line(e)}"
            ) from e
        return buffer.numpy().tobytes()


def tensor_parallel_group() -> dist.ProcessGroup:
    """Returns the group of the ranks that have this one's layers, each a part of the weights."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def context_parallel_group() -> dist.ProcessGroup:
    """Returns the group of the ranks that have this one's part of the model, each with a part of every row."""
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """Returns the group of this rank's pipeline stages."""
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def replicas() -> dist.ProcessGroup:
    """Returns the group of the ranks that hold the same part of the model."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))


def seed_generators(seed: int) -> None:
    """Sets this rank's random generators: torch's, and Megatron's for the layers under tensor parallelism, from the
    same seed another one on each tensor-parallel rank."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def initialise(config: Config, run: RunFolder, rank: int) -> Parallel:
    """Joins this process to the trainer pool.

    Raises ConfigError if this machine does not have machine.device or its environment a setting that does not go with
    GPUs, RunError if rank 0 does not open the store or a
    rank does not join within machine.peer_timeout_s.
    """
    gpu_settings.set_defaults()
    device = choose_device(config)
    if device.type == "cuda":
        gpu_settings.check(os.environ)
    world, timeout = config.trainer_ranks, timedelta(seconds=config.machine.peer_timeout_s)
    for name, value in socket_settings(config.machine.host).items():
        os.environ.setdefault(name, value)
    backend = "nccl" if device.type == "cuda" else "gloo"
    sign_objects(run.keys.trainers)
    store = _open_store(config, run, rank, timeout)
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("world", store), rank=rank, world_size=world, timeout=timeout
        )
    except RuntimeError as e:
        raise RunError(
            f"trainer-{rank}: not all {world} trainer ranks joined within {config.machine.peer_timeout_s:.0f} s "
            f"({first_line(e)}); see the logs of the others in {run.folder / 'logs'}"
        ) from e
    sizes = MegatronSizes.of(config.trainer)
    parallel_state.initialize_model_parallel(
        sizes.tp,
        sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.expert_tp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(config.machine.peer_timeout_s / 60)),
    )
    seed_generators(config.seed)
    replica, replica_control = _replica_group(sizes, rank, timeout)
    return Parallel(
        device=device,
        rank=rank,
        world=world,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        replica=replica,
        is_leader=rank == dist.get_global_rank(replica_control, 0),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        control=_gloo_group(None, timeout),
        replica_control=replica_control,
        store=store,
    )


def leave() -> None:
    """Takes this process out of all groups; without error if others are gone already."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def choose_device(config: Config) -> torch.device:
    """Returns the device that machine.device names, made current. Raises ConfigError if this machine has none."""
    visible = torch.cuda.is_available()
    if config.machine.device == "cuda" and not visible:
        raise ConfigError("machine.device: cuda, but torch sees no CUDA device")
    if config.machine.device == "cpu" and visible:
        raise ConfigError("machine.device: cpu, but CUDA devices are visible; hide them with CUDA_VISIBLE_DEVICES=''")
    if not visible:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _open_store(config: Config, run: RunFolder, rank: int, timeout: timedelta) -> dist.Store:
    """Returns the TCPStore of the pool, which takes orders from anybody who reaches it (docs/security.md)."""
    if rank > 0:
        host, _, port = run.endpoint(STORE, config.machine.peer_timeout_s).rpartition(":")
        try:
            return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        except dist.DistError as e:
            raise RunError(f"trainer-{rank}: cannot reach trainer-0 at {host}:{port}: {first_line(e)}") from e
    # A TCPStore that makes its own socket listens on every interface.
    host = address(config.machine.host)
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    store = dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
    )
    run.announce(STORE, f"{host}:{port}")
    return store


def _replica_group(sizes: MegatronSizes, rank: int, timeout: timedelta) -> tuple[int, dist.ProcessGroup]:
    """Returns this rank's replica and its gloo group; every rank makes every group, as torch requires."""
    replica_of = [sizes.coordinates(member).dp for member in range(sizes.ranks)]
    groups = []
    for replica in range(sizes.dp):
        members = [member for member in range(sizes.ranks) if replica_of[member] == replica]
        groups.append(_gloo_group(members, timeout))
    return replica_of[rank], groups[replica_of[rank]]


def _gloo_group(members: list[int] | None, timeout: timedelta) -> dist.ProcessGroup:
    """Returns the group of `members`, or of all ranks; of use to the members alone."""
    return cast(dist.ProcessGroup, dist.new_group(members, backend="gloo", timeout=timeout))

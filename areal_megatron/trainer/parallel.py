"""Process groups of the trainer pool: Megatron's tp, pp, dp, ep and etp, and two small groups for control."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from areal_megatron.config import Config, ConfigError
from areal_megatron.errors import first_line
from areal_megatron.network import address, socket_settings
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run import Run, RunError

STORE = "trainer-store"
"""Name under which rank 0 announces host:port of the trainers' TCPStore in the run folder."""


@dataclass(frozen=True)
class Parallel:
    """Where this rank stands. Ranks lie in Megatron's order, see reshard.trainer_layout.MegatronSizes."""

    device: torch.device
    rank: int
    world: int
    tp_rank: int
    pp_rank: int
    replica: int
    """Data-parallel rank."""
    is_leader: bool
    """First rank of its replica: the one that talks to the controller."""
    is_last_stage: bool
    control: dist.ProcessGroup
    """All ranks, gloo: small CPU tensors only."""
    replica_control: dist.ProcessGroup
    """The tp × pp ranks of this replica, gloo."""
    store: dist.Store

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum of a CPU tensor over all ranks, the same on each of them."""
        if self.world > 1:
            dist.all_reduce(values, group=self.control)
        return values

    def max_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control)
        return values

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of what each replica holds, where all ranks of a replica hold the same."""
        return self.sum_over_ranks(values if self.is_leader else torch.zeros_like(values))

    def sum_of_last_stages(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of what the last stage of each replica holds, where its tensor-parallel ranks hold the same."""
        return self.sum_over_ranks(values if self.is_last_stage and self.tp_rank == 0 else torch.zeros_like(values))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def share(self, value: bytes | None) -> bytes:
        """The bytes that the leader of this replica passes, on every rank of the replica."""
        return self._broadcast(value, self.replica_control)

    def share_all(self, value: bytes | None) -> bytes:
        """The bytes that global rank 0 passes, on every rank."""
        return self._broadcast(value, self.control)

    def _broadcast(self, value: bytes | None, group: dist.ProcessGroup) -> bytes:
        source = dist.get_global_rank(group, 0)
        if (value is not None) != (self.rank == source):
            raise ValueError(f"trainer-{self.rank}: only trainer-{source} has a value to share here")
        if group.size() == 1:
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


def initialise(config: Config, run: Run, rank: int) -> Parallel:
    """Joins this process to the trainer pool.

    Raises ConfigError where machine.device cannot be had, RunError if rank 0 does not open the store or a
    rank does not join within machine.timeout_s.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # sequence parallelism overlaps only in this order
    device = choose_device(config)
    world, timeout = config.trainer_ranks, timedelta(seconds=config.machine.timeout_s)
    for name, value in socket_settings(config.machine.host).items():
        os.environ.setdefault(name, value)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = _open_store(config, run, rank, timeout)
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("world", store), rank=rank, world_size=world, timeout=timeout
        )
    except RuntimeError as e:
        raise RunError(
            f"trainer-{rank}: not all {world} trainer ranks joined within {config.machine.timeout_s:.0f} s "
            f"({first_line(e)}); see the logs of the others in {run.folder / 'logs'}"
        ) from e
    sizes = MegatronSizes.of(config.trainer)
    parallel_state.initialize_model_parallel(
        sizes.tp,
        sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.expert_tp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(config.machine.timeout_s / 60)),
    )
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    replica, replica_control = _replica_group(sizes, rank, timeout)
    return Parallel(
        device=device,
        rank=rank,
        world=world,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        replica=replica,
        is_leader=rank == dist.get_global_rank(replica_control, 0),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        control=dist.new_group(backend="gloo", timeout=timeout),
        replica_control=replica_control,
        store=store,
    )


def leave() -> None:
    """Takes this process out of all groups; without error if others are gone already."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def choose_device(config: Config) -> torch.device:
    """The device of machine.device, made current. Raises ConfigError if this machine does not have it."""
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


def _open_store(config: Config, run: Run, rank: int, timeout: timedelta) -> dist.Store:
    if rank > 0:
        host, _, port = run.endpoint(STORE, config.machine.timeout_s).rpartition(":")
        try:
            return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        except dist.DistError as e:
            raise RunError(f"trainer-{rank}: cannot reach trainer-0 at {host}:{port}: {first_line(e)}") from e
    # A TCPStore that makes its own socket listens on every interface.
    host = address(config.machine.host)
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    run.announce(STORE, f"{host}:{port}")
    return store


def _replica_group(sizes: MegatronSizes, rank: int, timeout: timedelta) -> tuple[int, dist.ProcessGroup]:
    """This rank's replica and its gloo group; every rank makes every group, as torch requires."""
    replica_of = [sizes.coordinates(member).dp for member in range(sizes.ranks)]
    groups = [
        dist.new_group(
            [member for member, at in enumerate(replica_of) if at == replica], backend="gloo", timeout=timeout
        )
        for replica in range(sizes.dp)
    ]
    return replica_of[rank], groups[replica_of[rank]]

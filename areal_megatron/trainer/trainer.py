"""A trainer rank: its models and their optimizers, which trainer/ppo.py or trainer/supervised.py trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config
from areal_megatron.data.trajectory import BatchPart, checksum
from areal_megatron.model_check import check_model, trained_config
from areal_megatron.models.adapter import Adapter
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.observe.background import AppendedFile
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.trainer_layout import is_head, layout, without_head
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer import attention_kernels, hardware, pipeline
from areal_megatron.trainer import parallel as process_groups
from areal_megatron.trainer.adapter import Merged, begin
from areal_megatron.trainer.batch import RowPart
from areal_megatron.trainer.critic import Critic
from areal_megatron.trainer.learner import Learner
from areal_megatron.trainer.lessons import lesson_of
from areal_megatron.trainer.logprobs import Vocabulary, tile_of
from areal_megatron.trainer.model import PolicyModel, ValueModel, build_model, factors, parallel_sizes, tensors
from areal_megatron.trainer.optimizer import ModelOptimizer
from areal_megatron.trainer.ppo import PPO, BatchResult
from areal_megatron.trainer.recompute import decided
from areal_megatron.trainer.reference import Reference
from areal_megatron.trainer.residual import Residual
from areal_megatron.trainer.supervised import Supervised
from areal_megatron.trainer.turns import Turns


class Trainer:
    """One rank of the trainer pool, which begins with the weights of model.path. A context manager.

    Raises ConfigError for a model that does not fit the config, RunError if the ranks do not find each other.

    Example:
        with Trainer(config, run, rank) as trainer:
            result = trainer.train_batch(part, before_step=weights.wait_until_read)
            if result.applied:
                weights.publish(result.version + 1)
    """

    def __init__(self, config: Config, run: RunFolder, rank: int, pad_token: int | None = None):
        """`pad_token`: of the reward model that mode reward_model trains, see `as_reward_model`."""
        check_model(replace(config, mode="replay") if config.has_engines else config)  # what engines need is not asked
        config = decided(config)
        self.config, self.run = config, run
        self.parallel = process_groups.initialise(config, run, rank)
        self.device = self.parallel.device
        event = partial(torch.cuda.Event, blocking=True) if self.device.type == "cuda" else None
        self.timeline = Timeline(run.timeline(f"trainer-{rank}"), f"trainer-{rank}", event)
        self.sizes = parallel_sizes(config, self.device)
        self.hf_config = trained_config(config, pad_token)
        self._choose_kernels()
        self._flops = SequenceFlops.of(self.hf_config)
        self.adapter = Adapter.of(config.lora)
        self._adapters = self.adapter and layout(self.hf_config, self.sizes, self.parallel.rank, self.adapter)
        chunks = self._chunks()
        self._reference, self.critic = None, None
        if config.has_critic:
            self.critic = Critic(config, self.sizes, self.parallel, self.timeline)
        self.policy = Learner(chunks, ModelOptimizer(config.optimizer, chunks, self._steps()), self._adapters)
        vocabulary = Vocabulary(
            size=self.hf_config["vocab_size"],
            temperature=1.0 if config.is_supervised else config.rollout.temperature,
            tile=tile_of(self.device),
            sequence_parallel=self.sizes.tp > 1,
            rounded=config.model.head_dtype == "model",
        )
        if config.has_reference:  # copied before a checkpoint brings other weights
            self._reference = Reference(config, self.parallel, vocabulary, chunks)
        self._vocabulary, self._part = vocabulary, RowPart.of(chunks[0].config, self.device, self._flops)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_) -> None:
        if self.parallel.is_leader:
            self._ledger.close()
        process_groups.leave()
        self.timeline.close()

    @cached_property
    def ppo(self) -> PPO:
        """The updates of an RL run or a replay."""
        return self._ppo(self.config)

    def ppo_with(self, changes: Mapping[str, float | str]) -> PPO:
        """Returns the losses with other values for some keys of the config's section `ppo`."""
        return self._ppo(replace(self.config, ppo=replace(self.config.ppo, **changes))) if changes else self.ppo

    def _ppo(self, config: Config) -> PPO:
        models = self.policy, self.critic, self._reference
        return PPO(config, *models, self._vocabulary, self.parallel, self._part, self._residual, self.timeline)

    @cached_property
    def _residual(self) -> Residual:
        return Residual(self.policy.chunks)

    @cached_property
    def supervised(self) -> Supervised:
        """The steps of a supervised run."""
        lesson = lesson_of(self.config, self.policy.chunks, replace(self._vocabulary, temperature=1.0))
        settings, models = self.config.trainer, (self.policy, lesson, self._reference)
        return Supervised(settings, *models, self.parallel, self._part, self._flops, self._residual, self.timeline)

    def parameters(self) -> Mapping[str, Tensor]:
        """Returns the policy's parameters on this rank, as `reshard.trainer_layout.layout` names them.

        They change only in optimizer steps. If adapters are trained, they are added to copies of the weights, which
        change in the next call.
        """
        return self._merged.kept() if self._adapters else self.policy.parameters()

    def exported(self) -> Mapping[str, Tensor]:
        """Returns the same to be read once, without copies for all weights at a time."""
        if not self._adapters:
            return self.policy.parameters()
        self._merged.forget()
        return self._merged

    @cached_property
    def turns(self) -> Turns:
        """Which of several adapters is in the model; there are adapters."""
        return Turns(self.policy, lambda: self._begin_adapter(self.policy.factors()))

    @cached_property
    def _merged(self) -> Merged:
        return Merged(self.policy.chunks, self.policy.parameters())

    @property
    def learners(self) -> dict[str, Learner]:
        """The models that are trained, by name: `policy` and, if there is one, `critic`."""
        return {"policy": self.policy, **({"critic": self.critic.learner} if self.critic else {})}

    def _chunks(self) -> pipeline.Chunks:
        """Builds the policy, with the weights of model.path and the adapter of lora.start; in mode reward_model a value
        model, whose head is zero unless model.path has one."""
        config, held = self.config, layout(self.hf_config, self.sizes, self.parallel.rank)
        kind = ValueModel if config.mode == "reward_model" else PolicyModel
        chunks = build_model(config, self.sizes, self.device, kind, replays_routes=True, base=held)
        loaded, own = tensors(chunks), architecture(read_config(config.model.path))
        if kind is ValueModel and not own.is_reward_model:
            held, loaded = without_head(held), {name: each for name, each in loaded.items() if not is_head(name)}
        hf.load(loaded, held, config.model.path)
        if self._adapters:
            self._begin_adapter(factors(chunks))
        if config.lora.dropout:
            process_groups.seed_generators(config.seed + 100_003 * self.parallel.rank)  # no two ranks drop the same
        return chunks

    def _begin_adapter(self, of: Mapping[str, Tensor]) -> None:
        """Gives factors the values of lora.start, or values that change nothing yet."""
        assert self._adapters is not None  # there are factors
        if self.config.lora.start:
            hf.load_adapter(of, self._adapters, self.config, self.hf_config)
        else:
            begin(of, self._adapters, self.config.seed)

    def _choose_kernels(self) -> None:
        """Chooses what computes attention, and says on the first rank which kernels are used."""
        config, d = self.config, architecture(self.hf_config).dimensions
        absent = hardware.kernels(self.device, config.model.dtype)
        hardware.check_dispatch(config.trainer.expert_dispatch, absent)
        shape = d.heads // self.sizes.tp, max(d.kv_heads // self.sizes.tp, 1), d.head_dim
        attention = attention_kernels.activate(
            config.trainer.attention, self.device, getattr(torch, config.model.dtype), shape, absent
        )
        if self.parallel.is_first and self.device.type == "cuda":
            print(f"kernels: {attention}; {hardware.describe(absent, d, self.sizes.grouped_experts)}", flush=True)

    def _steps(self) -> int:
        """The number of optimizer steps of the policy in the whole run."""
        config = self.config
        if config.is_supervised:
            return config.updates
        if config.is_driven:
            return config.updates
        return (config.updates - (self.critic.warmup if self.critic else 0)) * config.ppo.minibatches

    def train_batch(self, part: BatchPart, before_step: Callable[[], None] = lambda: None) -> BatchResult:
        """Makes one PPO update on this replica's part of the batch, and writes what it trained into the ledger.

        `before_step` is called right before parameters change for the first time. Raises Replaced.
        """
        result = self.ppo.update(part, before_step)
        self._record(part, result.applied)
        return result

    def _record(self, part: BatchPart, applied: bool) -> None:
        """Has the trajectories that this replica has trained written as a line of its ledger, in the background.

        The ledger is independent of what the controller records. Raises Replaced.
        """
        if not self.parallel.is_leader:
            return
        self.run.check_current()
        line = {
            "incarnation": self.run.incarnation,
            "version": part.version,
            "max_staleness": self.config.rollout.max_staleness,
            "replicas": self.config.trainer.dp,
            "group_size": self.config.rollout.group_size,
            "applied": applied,
            "prompts": [[t.epoch, t.prompt_id] for t in part.trajectories],
            "uids": [t.uid for t in part.trajectories],
            "samples": [t.sample for t in part.trajectories],
            "of_samples": [t.of_samples for t in part.trajectories],
            "admission_versions": [t.admission_version for t in part.trajectories],
            "sampled_from": [t.asked for t in part.trajectories],
            "trained_from": [checksum(t.prompt) for t in part.trajectories],
            "tokens": sum(int(t.loss_mask.sum()) for t in part.trajectories),
        }
        self._ledger.write(json.dumps(line).encode() + b"\n")

    @cached_property
    def _ledger(self) -> AppendedFile:
        return AppendedFile(self.run.ledger(self.parallel.replica), kept=True, check=self.run.look)

    def settle_ledger(self) -> None:
        """Returns when all trained batches are in the ledger, which a checkpoint that holds them asks for.

        Raises OSError if the disk does not take them, and Replaced.
        """
        if self.parallel.is_leader and not self._ledger.flush():
            raise OSError(f"the ledger cannot be written, see the log of trainer-{self.parallel.rank}")

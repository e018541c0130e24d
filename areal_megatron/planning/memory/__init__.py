"""Estimates the memory that a run needs, from its config and the model's config.json: pure functions without torch.

Figures are for the fullest rank of each pool. What this project and Megatron allocate is counted from the layout tables
of models; what CUDA, NCCL and vLLM take besides is an allowance, and the table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from areal_megatron.config import Config, ConfigError, TrainerConfig
from areal_megatron.engine.kv_cache import machine_bytes
from areal_megatron.planning.memory.activations import longest_row, microbatch_tokens
from areal_megatron.planning.memory.engine import UTILIZATION, engine_memory, given_size, kv_tokens
from areal_megatron.planning.memory.parts import FILLED, GIB, USABLE, GpuShares, MemoryPart, RankMemory
from areal_megatron.planning.memory.recompute import Recompute, decide, with_recompute
from areal_megatron.planning.memory.traffic import weight_traffic
from areal_megatron.planning.memory.trainer import checkpoint_bytes, host_memory, published_memory, trainer_memory
from areal_megatron.reshard.plan import Traffic

_Smaller = Callable[[Config], Iterable[tuple[str, Config]]]
"""Yields runs that need less memory than one, each with what was changed, as overrides."""


@dataclass(frozen=True)
class MemoryPlan:
    trainer: RankMemory
    engine: RankMemory | None
    """None in supervised training."""
    checkpoint: int
    """The size of one on disk, in bytes."""
    checkpoints: int
    """How many are on disk at a time, including the one being written; checkpoint.keep_every adds to them."""
    gpu_gib: float
    """Memory of one GPU in GiB; 0 if unknown."""
    traffic: Traffic | None
    """Who sends how much in an update of all engines; None without engines."""
    host: int
    """Bytes of the host's memory in which a trainer rank keeps its optimizer states; 0 if they are not there."""
    published: int
    """Bytes of the host's memory in which a trainer rank keeps what it published last; 0 if it sends no changes."""
    recompute: Recompute
    """What the trainers recompute; where the config says `auto`, what it was decided to be."""
    shared: bool = False
    """Whether both pools are on the same GPUs."""
    served: Mapping[str, RankMemory] = field(default_factory=dict)
    """A rank of each served model's engines, by name."""

    @property
    def shares(self) -> GpuShares | None:
        """How the ranks on a GPU divide it; None if each has its own, and if its memory is unknown."""
        if not (self.shared and self.gpu_gib and self.engine):
            return None
        # Half of what the plan leaves free is the trainer's, so that a small error of the plan ends nothing. Bounded,
        # its allocator gives memory back that it keeps for later instead of taking what a starting engine needs.
        gpu = self.gpu_gib * GIB
        return GpuShares(
            trainer=self.trainer.total / gpu + (1 - UTILIZATION) / 2,
            engine=self.engine.total / gpu,
            kv_cache=self.engine.of("KV cache"),
        )

    def report(self) -> dict[str, Any]:
        """Returns the figures of `table` for a JSON file."""
        traffic = self.traffic
        return {
            "communicators_per_engine_rank": int(traffic is not None),
            "communicators_per_trainer_rank": max(map(len, traffic.peers)) if traffic else 0,
            "sources_per_engine_rank": traffic.sources if traffic else 0,
            "busiest_sender_over_mean": traffic.busiest_over_mean if traffic else None,
            "busiest_sender_over_least": traffic.busiest_over_least if traffic else None,
            "memory": {
                "gpu_gib": self.gpu_gib,
                "trainer": asdict(self.trainer) | {"bytes": self.trainer.total},
                "engine": asdict(self.engine) | {"bytes": self.engine.total} if self.engine else None,
                "served": {name: asdict(rank) | {"bytes": rank.total} for name, rank in self.served.items()},
                "shares": asdict(self.shares) if self.shares else None,
                "recompute": asdict(self.recompute),
                "trainer_on_host": self.host,
                "published_on_host": self.published,
                "checkpoint": {"bytes": self.checkpoint, "at_a_time": self.checkpoints},
            },
        }

    def table(self) -> str:
        """Returns a line for each part, in GiB, and one each for recomputation, the checkpoint, and how weights
        travel."""
        ranks = (self.trainer, self.engine, *self.served.values())
        lines = [line for rank in ranks if rank for line in _lines(rank, self.gpu_gib)]
        free = f"; {_gib(round(self.gpu_gib * GIB) - self.trainer.total)} GiB of a GPU stay free"
        lines += [f"{self.recompute}{free if self.gpu_gib and not self.shared else ''}"]
        if self.shares and self.engine:
            used = self.trainer.total + self.engine.total
            lines += [
                f"machine.shared: a trainer rank {_gib(self.trainer.total)} + an engine rank {_gib(self.engine.total)} "
                f"= {_gib(used)} of {self.gpu_gib:g} GiB, {used / GIB / self.gpu_gib:.0%}"
            ]
        disk = f"checkpoint: {_gib(self.checkpoint)} GiB on disk"
        if self.checkpoints:
            disk += f", up to {self.checkpoints} at a time ({_gib(self.checkpoint * self.checkpoints)} GiB)"
        return "\n".join([*lines, disk, *([self._weights()] if self.traffic else [])])

    def _weights(self) -> str:
        found = self.report()
        return (
            f"weights: sources per engine rank {found['sources_per_engine_rank']}; communicators per engine rank "
            f"{found['communicators_per_engine_rank']}, per trainer rank {found['communicators_per_trainer_rank']}; "
            f"the busiest sender has {found['busiest_sender_over_mean']:.3f} of the mean, "
            f"{found['busiest_sender_over_least']:.3f} of the least that the layouts allow"
        )


def plan_memory(config: Config, hf_config: Mapping[str, Any], gpu_gib: float = 0, memory: int = 0) -> MemoryPlan:
    """Returns the memory that a run of `config` takes, whose machine.device must be decided.

    `gpu_gib` is the memory of a GPU in GiB; if it is 0, unknown, nothing is checked on CUDA. With machine.shared a
    trainer rank and an engine rank divide it: the trainer takes what it needs, the engine what is left.
    trainer.recompute=auto is decided: on CPU nothing is recomputed, and without `gpu_gib` whole layers are. Raises
    ConfigError with the figure, the limit and the remedy for trainers that need more than USABLE of it, and for engines
    whose KV cache cannot hold one answer of full length. On CPU only the latter is checked, against the `memory` in
    bytes shared by all engines (0: this machine's).
    """
    on_cuda = config.machine.device == "cuda"
    recompute = _recompute(config, hf_config, gpu_gib)
    config = recompute.apply(config)
    trainer = trainer_memory(config, hf_config, on_cuda, gpu_gib)
    if on_cuda and gpu_gib and not _fits(trainer, gpu_gib) and not config.shares_gpus:
        raise ConfigError(_trainer_too_large(config, hf_config, trainer, gpu_gib))
    engine = None
    if config.has_engines:
        memory = int(gpu_gib * GIB) if on_cuda else memory or machine_bytes()
        engine = engine_memory(config, hf_config, memory, on_cuda, trainer.total if config.shares_gpus else 0)
        if name := given_size(config):
            _check_given(name, config, hf_config, engine, on_cuda, memory)
        if on_cuda and gpu_gib and not _holds_an_answer(config, hf_config, engine):
            if config.shares_gpus:
                raise ConfigError(_too_large_to_share(config, hf_config, trainer, engine, gpu_gib))
            raise ConfigError(_engine_too_small(config, hf_config, engine, gpu_gib))
        if not on_cuda and engine.total * config.rollout.tp > memory:
            raise ConfigError(_machine_too_small(config, engine, memory))
    checkpoint, settings = checkpoint_bytes(config, hf_config), config.checkpoint
    traffic = weight_traffic(config, hf_config) if engine else None
    kept = settings.keep + 1 if settings.every else 0
    host = host_memory(config, hf_config)
    published = published_memory(config, hf_config, on_cuda)
    return MemoryPlan(
        trainer, engine, checkpoint, kept, gpu_gib, traffic, host, published, recompute, config.shares_gpus
    )


def _recompute(config: Config, hf_config: Mapping[str, Any], gpu_gib: float) -> Recompute:
    if config.trainer.recompute != "auto":
        return Recompute.of(config, hf_config)
    if config.trainer.recompute_modules:
        return Recompute.of(with_recompute(config, "none"), hf_config)
    if config.machine.device != "cuda":
        return Recompute.of(with_recompute(config, "none"), hf_config, True, "nothing on CPU")
    if not gpu_gib:
        why = "nobody says how much memory the GPUs have"
        return Recompute.of(with_recompute(config, "full"), hf_config, True, why)

    def fits(each: Config) -> bool:
        trainer = trainer_memory(each, hf_config, True, gpu_gib)
        if trainer.total > FILLED * gpu_gib * GIB or not config.shares_gpus:
            return trainer.total <= FILLED * gpu_gib * GIB
        engine = engine_memory(each, hf_config, int(gpu_gib * GIB), on_cuda=True, taken=trainer.total)
        answers = kv_tokens(each, hf_config, engine.of("KV cache"), on_cuda=True) // each.longest_sequence
        return answers >= each.rollout.max_running  # memory that the engine can use is left to it

    return decide(config, hf_config, fits)


def _fits(trainer: RankMemory, gpu_gib: float) -> bool:
    return trainer.total <= USABLE * gpu_gib * GIB


def _trainer_too_large(config: Config, hf_config: Mapping[str, Any], found: RankMemory, gpu_gib: float) -> str:
    largest = sorted(found.parts, key=lambda part: -part.bytes)[:3]
    problem = (
        f"a {found.holder} needs {_gib(found.total)} GiB "
        f"({', '.join(f'{part.name} {_gib(part.bytes)}' for part in largest)}), a GPU has {gpu_gib:g}, of which "
        f"it may need {USABLE:.0%}, {USABLE * gpu_gib:.2f}"
    )

    def room(changed: Config) -> str | None:
        smaller = trainer_memory(changed, hf_config, True, gpu_gib)
        return f"it is {_gib(smaller.total)}" if _fits(smaller, gpu_gib) else None

    advice = _advice(config, _runs_with_smaller_trainers, room)
    return f"{problem}: {advice or 'nothing on these GPUs is enough; ask for more of them, or for larger ones'}"


def _advice(config: Config, smaller: _Smaller, room: Callable[[Config], str | None]) -> str:
    """Returns the changes that make a run fit, and the memory then; if they need more GPUs, also changes to fit the
    same ones with slower updates or shorter answers. Empty if there are none."""

    def first(changes: Iterable[tuple[str, Config]]) -> tuple[str, Config] | None:
        for text, changed in changes:
            with suppress(ConfigError):
                if found := room(changed):
                    return f"with {text} {found}", changed
        return None

    found = first(smaller(config))
    if found and found[1].trainer_ranks <= config.trainer_ranks:
        return found[0]
    here = first(
        (text, changed) for text, changed in _roomier(config, smaller) if changed.trainer_ranks <= config.trainer_ranks
    )
    return "; or ".join(each[0] for each in (here, found) if each)


def _roomier(config: Config, smaller: _Smaller) -> Iterator[tuple[str, Config]]:
    """Yields runs with the optimizer's states on the hosts, and then with ever shorter answers."""
    on_host, longest = replace(config.optimizer, on_host=True), config.rollout.max_new_tokens
    for part in (1, 2, 4, 8, 16) if config.has_engines else (1,):
        less = replace(config, optimizer=on_host, rollout=replace(config.rollout, max_new_tokens=longest // part))
        text = "optimizer.on_host=true" + f" rollout.max_new_tokens={longest // part}" * (part > 1)
        yield text, less
        for more, changed in smaller(less):
            yield f"{text} {more}", changed


def _runs_with_smaller_trainers(config: Config) -> Iterator[tuple[str, Config]]:
    for text, trainer in _smaller_trainers(config):
        yield text, replace(config, trainer=trainer)


def _smaller_trainers(config: Config) -> Iterator[tuple[str, TrainerConfig]]:
    """Yields trainers that need less memory, the smallest loss of speed first; only the last need more GPUs."""
    t, longest = config.trainer, longest_row(config)
    is_long = config.is_supervised or microbatch_tokens(config) * t.cp <= longest + t.tp * t.cp
    small = replace(t, microbatch_tokens=longest)
    if not is_long:
        yield f"trainer.microbatch_tokens={longest}", small
    kinds, part = ("none", "elementwise", "mlp", "full"), t.recompute_layers
    if t.recompute_modules:  # megatron-core's recomputation goes with none
        kinds = kinds[:1]
    most = kinds[-1]
    t, small = replace(t, recompute_layers=0), replace(small, recompute_layers=0)
    more_recompute = kinds[kinds.index(t.recompute) + (not part) :]
    for recompute in more_recompute:
        yield f"trainer.recompute={recompute}{' recompute_layers=0' * (part > 0)}", replace(t, recompute=recompute)
    for recompute in more_recompute if not is_long and not part else ():
        yield f"trainer.microbatch_tokens={longest} recompute={recompute}", replace(small, recompute=recompute)
    for recompute in dict.fromkeys((t.recompute, most)):
        extra = f" trainer.recompute={recompute}" if recompute != t.recompute else ""
        for factor in (2, 4, 8, 16, 32, 64):
            if t.dp % factor:
                continue
            less = replace(t, dp=t.dp // factor, recompute=recompute)
            if is_long and t.tp * t.cp * factor <= 8:
                yield f"trainer.cp={t.cp * factor} dp={less.dp}{extra}", replace(less, cp=t.cp * factor)
            if t.tp * t.cp * factor <= 8:
                yield f"trainer.tp={t.tp * factor} dp={less.dp}{extra}", replace(less, tp=t.tp * factor)
            yield f"trainer.pp={t.pp * factor} dp={less.dp}{extra}", replace(less, pp=t.pp * factor)
    t = replace(t, recompute=most)
    for factor in (2, 4, 8):
        more = f"recompute={most} on {factor} times as many GPUs"
        yield f"trainer.dp={t.dp * factor} {more}", replace(t, dp=t.dp * factor)
        if is_long:
            yield f"trainer.cp={t.cp * factor} {more}", replace(t, cp=t.cp * factor)
        yield f"trainer.pp={t.pp * factor} {more}", replace(t, pp=t.pp * factor)


def _holds_an_answer(config: Config, hf_config: Mapping[str, Any], engine: RankMemory) -> bool:
    """Returns whether the KV cache holds one answer of full length; vLLM refuses to start otherwise."""
    return kv_tokens(config, hf_config, engine.of("KV cache"), on_cuda=True, running=1) >= config.longest_sequence


def _check_given(
    name: str, config: Config, hf_config: Mapping[str, Any], engine: RankMemory, on_cuda: bool, memory: int
) -> None:
    """Checks the size of the KV cache that the option `name` gives."""
    size, longest = engine.of("KV cache"), config.longest_sequence
    tokens = kv_tokens(config, hf_config, size, on_cuda, running=1)
    if memory and tokens < longest:
        raise ConfigError(
            f"rollout.vllm.{name}: a KV cache of {_gib(size)} GiB holds {tokens:,} tokens, an answer may have "
            f"{longest:,} with its prompt: raise it, or lower rollout.max_new_tokens"
        )
    needed = engine.total * (1 if on_cuda else config.rollout.tp)
    if memory and needed > memory:
        raise ConfigError(
            f"rollout.vllm.{name}: {_gib(size)} GiB for the KV cache of a rank make {_gib(needed)} GiB with all that "
            f"an engine has beside it, {'a GPU' if on_cuda else 'this machine'} has {_gib(memory)}: lower it"
        )


def _machine_too_small(config: Config, found: RankMemory, memory: int) -> str:
    return (
        f"rollout.max_new_tokens: an engine needs {_gib(found.total * config.rollout.tp)} GiB with a KV cache for "
        f"one answer of {config.longest_sequence:,} tokens with its prompt, this machine has {_gib(memory)}: lower it"
    )


def _engine_too_small(config: Config, hf_config: Mapping[str, Any], found: RankMemory, gpu_gib: float) -> str:
    left, longest = found.of("KV cache"), config.longest_sequence
    tokens = kv_tokens(config, hf_config, left, on_cuda=True, running=1)
    used = ", ".join(f"{part.name} {_gib(part.bytes)}" for part in found.parts if part.name != "KV cache")
    problem = (
        f"an engine rank has {_gib(left)} GiB left for its KV cache on a GPU of {gpu_gib:g} ({used}): {tokens:,} "
        f"tokens, an answer may have {longest:,} with its prompt"
    )
    for text, changed in _smaller_engines(config):
        try:
            engine = engine_memory(changed, hf_config, int(gpu_gib * GIB), on_cuda=True)
        except ConfigError:
            continue
        if _holds_an_answer(changed, hf_config, engine):
            return f"{problem}; with {text} it has {_gib(engine.of('KV cache'))}"
    return f"{problem}; raise rollout.tp, or lower rollout.max_new_tokens"


def _too_large_to_share(
    config: Config, hf_config: Mapping[str, Any], trainer: RankMemory, engine: RankMemory, gpu_gib: float
) -> str:
    left = engine.of("KV cache")
    problem = (
        f"machine.shared: a trainer rank needs {_gib(trainer.total)} GiB and an engine rank "
        f"{_gib(engine.total - left)} without its KV cache, of {_gib(round(UTILIZATION * gpu_gib * GIB))} "
        f"({UTILIZATION:.0%}) that they may use of a GPU"
    )
    if left > 0:
        tokens = kv_tokens(config, hf_config, left, on_cuda=True, running=1)
        longest = config.longest_sequence
        problem += f": the rest holds {tokens:,} tokens, an answer may have {longest:,} with its prompt"

    def room(changed: Config) -> str | None:
        taken = trainer_memory(changed, hf_config, True, gpu_gib).total
        engine = engine_memory(changed, hf_config, int(gpu_gib * GIB), on_cuda=True, taken=taken)
        holds = _holds_an_answer(changed, hf_config, engine)
        return f"the cache has {_gib(engine.of('KV cache'))}" if holds else None

    advice = _advice(config, _smaller_pools, room)
    less = "lower rollout.max_new_tokens, or give each pool GPUs of its own with machine.shared=false"
    return f"{problem}; {advice or less}"


def _smaller_pools(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields runs that need less memory: changes of the trainers, of the engines, then of both; runs on more GPUs come
    last."""
    slots = config.rollout.engines * config.rollout.tp
    made = [
        (" ".join(filter(None, (text, also))), replace(changed, trainer=trainer))
        for text, changed in _smaller_engines(config)
        if changed.rollout.engines * changed.rollout.tp <= slots
        for also, trainer in [("", config.trainer), *_smaller_trainers(config)]
    ]
    yield from sorted(made[1:], key=lambda change: change[1].trainer_ranks)


def _smaller_engines(config: Config) -> Iterator[tuple[str, Config]]:
    r = config.rollout
    for staging in dict.fromkeys((config.reshard.staging, "streamed")):
        reshard = replace(config.reshard, staging=staging)
        extra = " reshard.staging=streamed" if staging != config.reshard.staging else ""
        for tp in (r.tp * factor for factor in (1, 2, 4, 8, 16)):
            engines = max(r.engines * r.tp // tp, 1)
            text = (f"rollout.tp={tp} engines={engines}" if tp != r.tp else "") + extra
            yield text.strip(), replace(config, reshard=reshard, rollout=replace(r, tp=tp, engines=engines))


def _lines(rank: RankMemory, gpu_gib: float) -> Iterator[str]:
    yield f"memory of the fullest {rank.holder}, GiB"
    width = max(len(part.name) for part in rank.parts)
    share = f"of {gpu_gib:g}, {rank.total / GIB / gpu_gib:.0%}" if gpu_gib else ""
    for part in (*rank.parts, MemoryPart("total", rank.total, share)):
        yield f"  {part.name:<{width}} {_gib(part.bytes):>9}  {part.note}".rstrip()


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"

"""Searches the sizes with which a run is fastest on a cluster: formulas rank all of them, the simulator the best few.

Searched are the GPUs of either pool, the trainers' tp, cp, pp, vpp, dp, ep and etp, the engines' number, tp and
staging, rollout.max_running and rollout.max_staleness. What fits is what the memory plan says. Pure: neither torch nor
a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from areal_megatron.config import Config, ConfigError, TrainerConfig, check
from areal_megatron.model_check import check_model, trained_config
from areal_megatron.planning.forecast.accelerators import Accelerator
from areal_megatron.planning.forecast.checkpoint_interval import checkpoint_interval, updates_between
from areal_megatron.planning.forecast.layouts import Cluster, EngineOption, TrainerOptions, engine_options
from areal_megatron.planning.forecast.lengths import AnswerLengths
from areal_megatron.planning.forecast.pace import FULL, BatchLengths, Pace, draw_batches, pace
from areal_megatron.planning.forecast.simulator import Circumstances, SimulatedRun, Simulator, Times
from areal_megatron.planning.forecast.step_limit import StepLimit
from areal_megatron.planning.forecast.times import times_of
from areal_megatron.planning.forecast.weights_time import WeightsTime
from areal_megatron.planning.memory.trainer import checkpoint_bytes
from areal_megatron.planning.option_check import check_for_device
from areal_megatron.planning.pools import Node, allocate

MOST_RUNNING = 512
"""The most answers that an engine is given at once: the largest batch for which vLLM has a CUDA graph by default."""
ALIKE = 0.01
"""The difference between two speeds that decides nothing: less stale answers do, where they differ by less."""
_SIMULATED_ANSWERS = 400_000
"""Answers simulated in total for the best few sizes by the formulas, unless _FEWEST sizes have more."""
_FEWEST, _MOST = 3, 6
"""How many these are."""
_CHECKED = 8
"""How many sizes the planner has to accept, tried in the order of the formulas."""
_SPLITS = 24
"""Numbers of trainer ranks with which something fits that are looked at, at most."""


@dataclass(frozen=True)
class SearchBounds:
    """What the search keeps to beside the memory of the GPUs."""

    max_staleness: int
    """The largest rollout.max_staleness."""
    node_mtbf_s: float = inf
    """Mean time between two failures of a node; if it is finite, checkpoint.every is chosen by it."""
    steps: StepLimit = field(default_factory=StepLimit)
    """What is fastest is what trains most tokens a second, times this share of the learning rate."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or not self.node_mtbf_s > 0:
            raise ConfigError(
                f"--max-staleness {self.max_staleness} --mtbf-hours {self.node_mtbf_s / 3600:g}: expected a whole "
                "number of at least 0 and a time above 0"
            )


@dataclass(frozen=True)
class Candidate:
    """Sizes that fit, by the planner's own word."""

    config: Config
    """As the search was given it, with these sizes; trainer.recompute is not decided."""
    times: Times
    pace: Pace


@dataclass(frozen=True)
class Proposal:
    """Sizes that fit and what the simulator says of them."""

    candidate: Candidate
    run: SimulatedRun
    batch_tokens: float
    """Tokens of a batch's answers, the mean."""
    steps: float
    """The share of the learning rate that its staleness leaves."""

    @property
    def progress(self) -> float:
        """By what proposals are compared: trained tokens a second, times the share of the rate by which they count."""
        return self.run.tokens_per_s * self.steps

    @property
    def config(self) -> Config:
        return self.candidate.config

    @property
    def update_s(self) -> float:
        """Seconds for a batch of the mean length; the few that were simulated may be shorter or longer."""
        return self.batch_tokens / self.run.tokens_per_s

    @property
    def hours(self) -> float:
        """Hours of the whole run, without failures and what it begins with."""
        return self.config.updates * self.update_s / 3600

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which trainers have nothing to do, once the run has begun."""
        last = self.run.steady
        return max(0.0, 1 - sum(update.training for update in last) / len(last) / self.run.update_s)

    @property
    def binds(self) -> str:
        """What the run would have to have more of to be faster: memory (for answers at a time), decoding, training,
        tail (staleness that is allowed, while the longest answers end) or network."""
        found, last, of_update = self.candidate.pace, self.run.steady, self.run.update_s
        training = sum(update.training for update in last) / len(last)
        straggling = sum(update.straggler_wait for update in last) / len(last)
        if training + found.network > 0.9 * of_update:
            return "network" if found.network > 0.1 * training else "training"
        if straggling > (of_update - training) / 2 or self.run.engine_busy < 0.8:
            return "tail"
        return {"memory": "memory", "staleness": "tail"}.get(found.engines_lack, "decoding")


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    proposals: list[Proposal]
    """The best first: the least stale of those that are about as fast as the fastest, then by their progress."""
    own: Proposal | None
    """The config's own sizes; None if they do not fit the cluster."""
    own_problem: str
    """Why not."""


@dataclass(frozen=True)
class _Guess:
    """Sizes and their pace, by the formulas."""

    trainer: TrainerConfig
    engine: EngineOption
    engines: int
    staleness: int
    running: int
    pace: Pace
    update: float
    """Seconds of an update, over the share of the rate that this staleness would leave."""


class Search:
    """Searches for one run.

    Example:
        found = Search(config, nodes, Cluster(48, 8, 80), accelerator("h100"), lengths, SearchBounds(4)).best(4)
        print(found.proposals[0].run.tokens_per_s, found.proposals[0].config.trainer)
    """

    def __init__(
        self,
        config: Config,
        nodes: Sequence[Node],
        cluster: Cluster,
        gpu: Accelerator,
        lengths: AnswerLengths,
        bounds: SearchBounds,
    ):
        """`nodes` are the cluster's. Raises ConfigError for a run without two pools, and where no engine has room for
        an answer."""
        if config.mode != "rl":
            raise ConfigError(f"--best: a run of mode={config.mode} has no schedule; there is nothing to divide")
        if config.machine.shared:
            raise ConfigError("--best: divides GPUs between the pools, and with machine.shared both have all of them")
        config.machine.device = "cuda"
        self._config, self._nodes, self._cluster, self._gpu = config, nodes, cluster, gpu
        self._lengths, self._bounds, self._hf_config = lengths, bounds, trained_config(config)
        check_model(replace(config, trainer=TrainerConfig(), rollout=replace(config.rollout, tp=1)), weights=False)
        self._engines, nearest = engine_options(config, self._hf_config, gpu, cluster)
        if not self._engines:
            assert nearest is not None
            raise ConfigError(
                f"--best: no engine has room for an answer of {config.longest_sequence:,} tokens with its prompt on "
                f"GPUs of {cluster.gib:g} GiB; the nearest, {nearest.layout}, lacks {nearest.gib:.2f} GiB: lower "
                "rollout.max_new_tokens, or take larger GPUs"
            )
        batches = draw_batches(lengths, config)
        self._batch = BatchLengths.of(batches)
        smallest = min(option.tp for option in self._engines)
        self._trainers = TrainerOptions(config, self._hf_config, gpu, cluster, batches, smallest)
        self._saved = checkpoint_bytes(config, self._hf_config)

    def best(self, count: int) -> Found:
        """Returns the best sizes that differ in more than rollout.max_running and the staleness bound. Raises
        ConfigError if none fits, with those that come nearest."""
        own, problem = self._own()
        candidates = self._checked(self._ranked(), [own] if own else [])
        updates, places = self._effort()
        simulated = [self._simulated(each, updates) for each in candidates[:places]]
        simulated += [self._simulated(each, updates) for each in self._variants(ordered(simulated)[0])]
        beside = self._simulated(own, updates) if own else None
        proposals: dict[tuple[object, ...], Proposal] = {}
        for each in ordered([*simulated, *([beside] if beside else [])]):
            t, r = each.config.trainer, each.config.rollout
            proposals.setdefault((t.tp, t.cp, t.pp, t.vpp, t.dp, t.ep, t.etp, r.tp, r.engines), each)
        return Found(list(proposals.values())[:count], beside, problem)

    # All sizes, by the formulas

    def _ranked(self) -> list[_Guess]:
        """Returns the best guess for each layout of the trainers and size of the engines, the fastest first.

        Numbers of trainer ranks are tried in the order of their lower bounds, until the bound exceeds the times of
        enough others.
        """
        least = []
        for ranks in self._cluster.splits():
            seconds = self._trainers.least_seconds(ranks)
            guesses = self._guesses(replace(self._config.trainer, tp=1, cp=1, pp=1, dp=ranks), ranks, seconds)
            if isfinite(seconds) and guesses:
                least.append((min(each.update for each in guesses), ranks))
        found: list[_Guess] = []
        looked_at = 0
        for bound, ranks in sorted(least) or [(inf, self._cluster.size)]:
            enough = len(found) >= _CHECKED and bound > found[_CHECKED - 1].update
            if enough or looked_at == _SPLITS:
                break
            options = self._trainers.fastest(ranks)
            looked_at += bool(options)
            for option in options:
                found += self._guesses(option.trainer, ranks, option.seconds)
            found.sort(key=lambda guess: guess.update)
        return found

    def _nothing_fits(self) -> str:
        cluster, nearest = self._cluster, self._trainers.nearest
        where = f"--best: on {cluster.nodes} × {cluster.gpus} GPUs of {cluster.gib:g} GiB"
        if nearest is None:
            return f"{where} there is no room for both trainers and an engine: take more nodes"
        return (
            f"{where} no trainers fit beside an engine; the nearest, {nearest.layout}, need {nearest.gib:.2f} GiB of a "
            "GPU: take more nodes or larger GPUs, lower trainer.microbatch_tokens or rollout.max_new_tokens, or set "
            "optimizer.on_host"
        )

    def _guesses(self, trainer: TrainerConfig, ranks: int, seconds: float) -> list[_Guess]:
        """Returns the best guess for each size of the engines, where trainers take `seconds` seconds."""
        found = []
        for option in self._engines:
            served = sum(model.engines * model.tp for model in self._config.served_models.values())
            engines = self._cluster.engines(ranks + served, option.tp)
            if engines < 1:
                continue
            weights = self._weights(ranks, option, engines)
            guesses = []
            for running in self._running(option):
                for staleness in self._staleness():
                    config = self._sized(trainer, option, engines, staleness, running)
                    found_pace = pace(config, self._batch, option.time, weights, option.holds(running), seconds)
                    update = self._slowed(found_pace, staleness)
                    guesses.append(_Guess(trainer, option, engines, staleness, running, found_pace, update))
            fastest = min(guess.update for guess in guesses)
            alike = [guess for guess in guesses if guess.update <= (1 + ALIKE) * fastest]
            found.append(min(alike, key=lambda guess: (guess.staleness, guess.running)))
        return found

    def _slowed(self, found: Pace, staleness: int) -> float:
        """Returns an update's seconds over the share of the rate that is left where answers are as stale as they may
        be, or by one version where trainers are the slower part: engines are no further ahead then."""
        stale = min(staleness, 1) if found.binds in ("training", "network") else staleness
        return found.update / self._bounds.steps.share({stale: 1})

    def _weights(self, ranks: int, option: EngineOption, engines: int) -> WeightsTime:
        """Returns the time of an update of the engines if all trainer ranks send as much."""
        sent = engines * option.shard * option.tp / ranks
        config = replace(self._config, reshard=replace(self._config.reshard, staging=option.staging))
        return WeightsTime.of_bytes(config, self._gpu, sent, option.shard, self._saved / ranks)

    def _running(self, option: EngineOption) -> list[int]:
        """Returns the values of rollout.max_running that are tried: whole groups, up to what has room if all answers
        have the mean length."""
        n = self._config.rollout.group_size
        most = min(MOST_RUNNING, FULL * option.kv_tokens / (self._batch.context + FULL * option.state_tokens))
        return list(dict.fromkeys(max(int(most * share) // n, 1) * n for share in (1, 0.75, 0.5, 0.25)))

    def _staleness(self) -> list[int]:
        most = self._bounds.max_staleness
        return [*(eta for eta in (0, 1, 2, 4, 8, 16) if eta < most), most]

    def _sized(
        self, trainer: TrainerConfig, option: EngineOption, engines: int, staleness: int, running: int
    ) -> Config:
        rollout = replace(
            self._config.rollout, engines=engines, tp=option.tp, max_staleness=staleness, max_running=running
        )
        reshard = replace(self._config.reshard, staging=option.staging)
        return replace(self._config, trainer=trainer, rollout=rollout, reshard=reshard)

    # The best of them, by the planner

    def _checked(self, ranked: list[_Guess], otherwise: list[Candidate]) -> list[Candidate]:
        """Returns the first that fit, with their exact times, the fastest first; if none does, `otherwise`. Raises
        ConfigError if that is empty, too."""
        found, problem = [], ""
        for guess in ranked[: 8 * _CHECKED]:
            config = self._sized(guess.trainer, guess.engine, guess.engines, guess.staleness, guess.running)
            try:
                found.append(self._candidate(config))
            except ConfigError as e:
                problem = problem or str(e)
            if len(found) == _CHECKED:
                break
        if not (found or otherwise):
            refused = f"--best: nothing fits; the nearest is refused with: {problem}"
            raise ConfigError(refused if problem else self._nothing_fits())
        return sorted(found or otherwise, key=lambda each: self._slowed(each.pace, each.config.rollout.max_staleness))

    def _candidate(self, config: Config) -> Candidate:
        """Returns the sizes with their exact times. Raises ConfigError for what the planner refuses."""
        check(config)
        check_model(config, weights=False)
        check_for_device(config)
        allocate(config, self._nodes)
        decided, times = times_of(config, self._gpu, self._cluster.gpus, self._cluster.gib)
        training = self._trainers.seconds(times.trainer, decided.trainer)
        found = pace(decided, self._batch, times.engine, times.weights, times.kv_tokens, training, times.reward_s)
        if isfinite(self._bounds.node_mtbf_s):
            nodes = -(-config.trainer_ranks // self._cluster.gpus)
            interval = checkpoint_interval(times.weights.checkpoint, self._bounds.node_mtbf_s / nodes)
            every = min(updates_between(interval, found.update), config.updates)
            config = replace(config, checkpoint=replace(config.checkpoint, every=every))
        return Candidate(config, times, found)

    def _own(self) -> tuple[Candidate | None, str]:
        config = self._config
        if config.rollout.max_staleness > self._bounds.max_staleness:
            return None, f"rollout.max_staleness is above {self._bounds.max_staleness}"
        try:
            return self._candidate(config), ""
        except ConfigError as e:
            return None, str(e)

    # The best few, by the simulator

    def _effort(self) -> tuple[int, int]:
        """Returns how many updates are simulated, and of how many sizes."""
        updates = max(self._bounds.max_staleness + 6, min(60, 40_000 // self._config.batch_size))
        updates = min(updates, self._config.updates)
        return updates, min(max(_SIMULATED_ANSWERS // (updates * self._config.batch_size), _FEWEST), _MOST)

    def _simulated(self, candidate: Candidate, updates: int) -> Proposal:
        # as if the run went on: at its end engines have nothing more to do, which is no part of its pace
        config = replace(candidate.config, updates=candidate.config.updates + updates)
        around = Circumstances(node_gpus=self._cluster.gpus)
        run = Simulator(config, candidate.times, self._lengths, around).run(updates)
        steps = self._bounds.steps.share(run.staleness)
        return Proposal(candidate, run, self._config.batch_size * self._batch.answer, steps)

    def _variants(self, best: Proposal) -> Iterator[Candidate]:
        """Yields the best with other bounds of staleness and of running answers, which formulas know least of."""
        config, n = best.config, best.config.rollout.group_size
        r, most = config.rollout, self._bounds.max_staleness
        stale = {eta for eta in (r.max_staleness // 2, most) if eta != r.max_staleness}
        running = {max(int(r.max_running * share) // n, 1) * n for share in (0.5, 0.75, 1.25)} - {r.max_running}
        for changed in (*({"max_staleness": eta} for eta in stale), *({"max_running": number} for number in running)):
            try:
                yield self._candidate(replace(config, rollout=replace(r, **changed)))
            except ConfigError:
                continue


def ordered(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Returns the proposals, the best first: of those that are about as fast as the fastest the least stale ones, then
    the others by their progress."""
    fastest = max(each.progress for each in proposals)

    def place(each: Proposal) -> tuple[bool, int, float]:
        slower = each.progress < (1 - ALIKE) * fastest
        return slower, 0 if slower else each.config.rollout.max_staleness, -each.progress

    return sorted(proposals, key=place)

"""Compares trainers and engines at equal versions: a few excerpts of each batch are scored by both.

The trainers score them right before they train the batch, whose version they hold then. An engine scores them once it
has committed that version, as a prompt whose log-probabilities it returns. So what is compared has nothing to do with
staleness, and there is a comparison of every version that an engine gets, however stale the answers are. It costs an
engine the prefill of EXCERPTS · SCORED_TOKENS tokens at most, and the trainers a forward pass over them.

The first comparisons of an engine are a test: of its kernels with the weights that it began with, and of its first
update. What model.dtype does not explain is a fault, and ends the run. Later on, weights at which the two differ more
are no fault.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import numpy as np

from areal_megatron.config import Config
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.data.trajectory import Excerpt, Trajectory
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.models.logits import SCORED_TOKENS
from areal_megatron.observe.status import EngineState
from areal_megatron.run.folder import RunError
from areal_megatron.workflows.sampling import cache_salt

log = logging.getLogger(__name__)
EXCERPTS = 8
EXPLAINED = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.15}
"""dtype → the largest mean difference of log-probabilities that it explains: several times what sound engines have,
also where some tokens go to other experts."""


class Probe:
    """The comparison for each batch, one after the other, and what the last one found."""

    def __init__(self, config: Config, engines: Sequence[Engine], changed: Changed):
        """`engines` is shared with the fleet, which adds to it; `changed` is notified when an engine commits."""
        self._rollout, self._engines, self._changed = config.rollout, engines, changed
        self._updated = config.engines_start_empty
        """Whether engines get version 0, too, from the trainers."""
        is_tested = config.reshard.check_logprobs and config.rollout.vllm.get("kv_cache_dtype", "auto") == "auto"
        self._explained = EXPLAINED[config.model.dtype] if is_tested else math.inf
        self._dtype = config.model.dtype
        self._tested: set[tuple[EngineClient, bool]] = set()
        """Engines, and whether an update of theirs was compared."""
        self._fault = ""
        self._longest = min(SCORED_TOKENS, config.longest_sequence - 1)  # vLLM has to have room for another token
        self._number, self._version = 0, -1
        self._excerpts: list[Excerpt] = []
        """Excerpts of the newest batch, until an engine is asked about them."""
        self._trainers: dict[int, np.ndarray] = {}
        self._engine: dict[int, np.ndarray] = {}
        """Log-probabilities of compared tokens, by number of the batch, of which the other side has yet to tell."""
        self._asked: EngineClient | None = None
        """The engine that gave them."""
        self._found: dict[str, float] = {}

    def begin(self, version: int, trajectories: Sequence[Trajectory]) -> list[Excerpt]:
        """Returns the excerpts of the batch that `version` trains, for the trainers; an engine is asked about them as
        soon as one has that version."""
        self._number, self._version = self._number + 1, version
        self._excerpts = excerpts(trajectories, self._longest)
        self._changed.notify()
        return self._excerpts

    async def run(self) -> None:
        """Asks engines for ever, about one batch at a time. Raises RunError for one that does not pass its test."""
        while True:
            if self._fault:
                raise RunError(self._fault)
            if self._excerpts and (engine := self._at_version()):
                number, version, asked, self._excerpts = self._number, self._version, self._excerpts, []
                client = engine.client
                if (scored := await self._ask(engine, version, asked)) is not None:
                    self._engine, self._asked = {number: scored}, client
                    self._compare(number, version)
            else:
                await self._changed.wait()

    def trained(self, version: int, logprobs: np.ndarray) -> None:
        """Takes what the trainers found for the excerpts of the newest batch, which they have trained; nothing if they
        scored none."""
        if len(logprobs):
            self._trainers = {self._number: logprobs}
            self._compare(self._number, version)

    def account(self) -> dict[str, float]:
        """Returns the newest comparison; {} before the first."""
        return dict(self._found)

    def _at_version(self) -> Engine | None:
        able = [e for e in self._engines if e.version == self._version and e.state == EngineState.READY]
        updated = self._updated or self._version > 0
        return min(able, key=lambda e: ((e.client, updated) in self._tested, e.running), default=None)

    async def _ask(self, engine: Engine, version: int, asked: Sequence[Excerpt]) -> np.ndarray | None:
        """Returns the engine's log-probabilities of the compared tokens; None if it fails, or has gone on to another
        version before the last excerpt was scored."""
        salt = cache_salt(self._rollout, version)
        requests = (
            engine.client.score(excerpt.tokens.tolist(), request_id=f"probe-{version}-{number}", cache_salt=salt)
            for number, excerpt in enumerate(asked)
        )
        try:
            answered = await asyncio.gather(*requests)
        except EngineError as e:
            log.warning("version %d is not compared with the trainers': %s", version, e)
            return None
        if any(scored.version != version for scored in answered):
            return None
        pairs = zip(answered, asked, strict=True)
        return np.concatenate([scored.logprobs[excerpt.compared[1:] == 1] for scored, excerpt in pairs])

    def _compare(self, number: int, version: int) -> None:
        if number not in self._trainers or number not in self._engine:
            return
        differences = np.abs(self._trainers[number] - self._engine[number])
        self._found = {
            "mismatch_mean": float(differences.mean()),
            "mismatch_p99": float(np.quantile(differences, 0.99, method="inverted_cdf")),
            "mismatch_max": float(differences.max()),
            "mismatch_tokens": len(differences),
            "mismatch_version": version,
        }
        assert self._asked is not None  # as there are log-probabilities of an engine
        self._test(self._asked, version, self._found["mismatch_mean"])

    def _test(self, engine: EngineClient, version: int, mean: float) -> None:
        subject = engine, self._updated or version > 0
        if subject in self._tested:
            return
        self._tested.add(subject)
        if self._explained < math.inf and not mean <= self._explained:  # which NaN is not, either
            self._fault = (
                f"{engine.name} gives tokens other log-probabilities than the trainers at version {version}: they "
                f"differ by {mean:.2g} in the mean, and {self._dtype} explains {self._explained:g}; its kernels or its "
                "weights are wrong, see docs/metrics.md (reshard.check_logprobs=false goes on with it)"
            )
            self._changed.notify()


def excerpts(trajectories: Sequence[Trajectory], longest: int) -> list[Excerpt]:
    """Returns the beginnings of a few answers, evenly chosen, each after the end of its prompt: `longest` tokens at
    most together."""
    trained = [t for t in trajectories if t.loss_mask[: longest - longest // 4].any()]
    chosen = [trained[k * len(trained) // EXCERPTS] for k in range(EXCERPTS)] if len(trained) > EXCERPTS else trained
    found, at = [], 0
    for t in chosen:
        before = t.prompt[-max(longest // 4, 1) :]
        tokens = np.concatenate((before, t.response))[:longest]
        compared = np.concatenate((np.zeros(len(before), np.uint8), t.loss_mask))[:longest]
        found.append(Excerpt(tokens=tokens, compared=compared, at=at))
        at += int(compared.sum())
    return found

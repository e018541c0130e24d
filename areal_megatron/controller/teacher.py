"""Asks served teachers how likely they find what was sampled, and what they find likeliest, for the KL divergence from
them (ppo.penalty.kl_model)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from areal_megatron.config import Config
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.engine.client import EngineClient, EngineError, ScoredText
from areal_megatron.models.architecture import read_config
from areal_megatron.process.lateness import now
from areal_megatron.reward.served import engines_of
from areal_megatron.run.folder import RunError, RunFolder

log = logging.getLogger(__name__)
_AT_ONCE = 32
"""Most requests to an engine at the same time: more would wait there, and their time would run out."""
_RETRY_S = 1.0
_REMIND_S = 60.0
_UNKNOWN = -100.0
"""The log-probability of a token of the teacher's that the policy does not have, and the least of any token."""


class Teachers:
    """The engines of the teachers of a run. Make and use it in one event loop.

    Example:
        teachers = Teachers(config, RunFolder(config.run_dir))
        await teachers.score("teacher", trajectories)
        print(trajectories[0].reference)
    """

    def __init__(self, config: Config, run: RunFolder):
        self._all = {name: _Teacher(name, config, run) for name in config.teachers}

    async def score(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Sets `reference` of all trajectories with trained tokens to what this teacher says and, where they are asked,
        the likeliest tokens. While its engines are away they are waited for; raises RunError if that takes longer than
        reward.away_s."""
        async with asyncio.TaskGroup() as group:
            for trajectory in trajectories:
                if trajectory.loss_mask.any():
                    group.create_task(self._all[name].score(trajectory))

    async def close(self) -> None:
        for teacher in self._all.values():
            await teacher.close()


class _Teacher:
    def __init__(self, name: str, config: Config, run: RunFolder):
        self._name, self._model = name, config.served_models[name]
        self._away_s, self._run, self._token = config.reward.away_s, run, run.token
        self._adapter = name if self._model.adapter or not self._model.engines else ""
        self._top_k, self._vocabulary = config.ppo.penalty.top_k, read_config(config.model.path)["vocab_size"]
        self._clients: dict[str, EngineClient] = {}
        """By endpoint, which is another one when an engine has been started again."""
        self._room = asyncio.Semaphore(_AT_ONCE * (self._model.engines or config.rollout.engines))
        self._asked = 0

    async def score(self, trajectory: Trajectory) -> None:
        tokens = [*trajectory.prompt.tolist(), *trajectory.response.tolist()]
        async with self._room:
            found = await self._scored(tokens)
        first = len(trajectory.prompt) - 1
        trajectory.reference = found.logprobs[first:]
        if self._top_k:
            trained = trajectory.loss_mask == 1
            likely, logprobs = found.likely_tokens[first:][trained], found.likely_logprobs[first:][trained]
            known = likely < self._vocabulary
            trajectory.likely_tokens = np.where(known, likely, np.int32(-1)).ravel()
            trajectory.likely_logprobs = np.where(known, logprobs, np.float32(_UNKNOWN)).clip(_UNKNOWN).ravel()

    async def _scored(self, tokens: list[int]) -> ScoredText:
        began = reminded = now()
        while True:
            problem = ""
            for engine in self._engines():
                try:
                    client, self._asked = self._client(engine), self._asked + 1
                    request_id = f"{self._name}-{self._asked}"
                    return await client.score(tokens, request_id=request_id, top_k=self._top_k, adapter=self._adapter)
                except (EngineError, RunError) as e:
                    problem = str(e)
            if (away_s := now() - began) > self._away_s:
                raise RunError(f"served.{self._name}: away for {away_s:.0f} s (reward.away_s): {problem}")
            if now() - reminded > _REMIND_S:
                reminded = now()
                log.warning("answers have waited %.0f s for served.%s: %s", away_s, self._name, problem)
            await asyncio.sleep(_RETRY_S)

    def _engines(self) -> list[str]:
        try:
            return engines_of(self._name, self._model, self._run)
        except RunError:  # none is there: it is waited for
            return []

    def _client(self, engine: str) -> EngineClient:
        endpoint = self._run.endpoint(engine)
        if endpoint not in self._clients:
            self._clients[endpoint] = EngineClient(engine, endpoint, self._token, self._model.timeout_s)
        return self._clients[endpoint]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

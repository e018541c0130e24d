"""The process in which a workflow is tried (trial.py): `python -m areal_megatron.workflows.trial_process`.

Reads what it is asked on stdin, and writes what is wrong with the workflow on stdout, both as JSON.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.config.user_function import place_of
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import Completion, EngineClient
from areal_megatron.process.errors import first_cause, printable, told
from areal_megatron.process.shown import guard
from areal_megatron.process.streams import take_stdout
from areal_megatron.reward.function import WrongResult
from areal_megatron.reward.no_score import RewardFailed
from areal_megatron.reward.served import WRONG, StandIns
from areal_megatron.reward.worker import MISTAKES, Answer, Scored
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.run.credentials import Credentials, new_credentials
from areal_megatron.run.network import address
from areal_megatron.workflows.endpoint import AgentEndpoint
from areal_megatron.workflows.episode import Episode, EpisodeOver, EpisodeSpec, RunResources
from areal_megatron.workflows.program import ProgramError
from areal_megatron.workflows.runner import without_exit
from areal_megatron.workflows.sampling import Sampling
from areal_megatron.workflows.scoring import Scorer, scores_of
from areal_megatron.workflows.trial import TrialAsked, TrialFound
from areal_megatron.workflows.workflow import load_workflow


class _Engine:
    """The client of an engine that samples the same answer each time."""

    name = "the engine of the trial"

    def __init__(self, tokens: Sequence[int]):
        self._tokens = np.array(tokens, np.int32)

    async def generate(self, prompt: Sequence[int], *, n: int, max_tokens: int, **_) -> list[Completion]:
        tokens = self._tokens[:max_tokens]
        reason = "stop" if len(tokens) == len(self._tokens) else "length"
        return [Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), reason)] * n


class _Judge:
    """In the place of reward workers."""

    async def judge(self, answers: Sequence[Answer]) -> list[Scored]:
        return [Scored(float(answer.response == answer.answer)) for answer in answers]


def _endpoint(config: Config, tokenizer: Tokenizer, folder: Path) -> AgentEndpoint:
    """Returns an endpoint that listens beyond the loopback, with credentials of its own, if the run's will."""
    if config.rollout.endpoint == "loopback":
        return AgentEndpoint(tokenizer)
    path = folder / "agents.pem"
    path.write_bytes(new_credentials())
    return AgentEndpoint(tokenizer, address(config.machine.host), Credentials(path))


async def tried(asked: TrialAsked, folder: Path) -> TrialFound:
    """Tries the workflow; `folder` is for this alone."""
    config, prompt = asked.config, asked.prompt
    workflow, tokenizer = load_workflow(config.rollout), Tokenizer(config.model.path)
    assert workflow is not None
    endpoint = _endpoint(config, tokenizer, folder)
    scorer = Scorer(config.reward, cast(RewardWorkers, _Judge()), config.rollout.max_new_tokens)
    served = StandIns(config.served_models)
    resources = RunResources(config, tokenizer, scorer, endpoint.serve, workflow.turns, served)
    try:
        for number, text in enumerate((prompt.answer, WRONG)):
            (tokens,) = tokenizer.responses([text])
            engine = cast(EngineClient, _Engine(tokens))
            sampling = Sampling(engine, config.rollout, tokenizer.stop_tokens, None)
            episode = Episode(resources, sampling, EpisodeSpec(prompt, 0, f"trial-{number}", 0, "train"))
            try:
                async with asyncio.timeout(asked.patience_s):
                    result = await without_exit(workflow.run(episode))
                if result is not None:
                    scores_of(result, episode.answers)
            except (EpisodeOver, RewardFailed):
                continue
            except TimeoutError:
                return TrialFound(f"it has not ended within {asked.patience_s:g} s")
            except Exception as e:  # the workflow is the user's
                cause = first_cause(e)
                is_mistake = isinstance(cause, (*MISTAKES, WrongResult)) or isinstance(episode.failure, ConfigError)
                is_mistake = is_mistake or (isinstance(cause, ProgramError) and cause.is_mistake)
                bug = place_of(cause, workflow.run) if is_mistake else ""
                return TrialFound(printable(told(cause), 500), bug)
            if not episode.answers:
                return TrialFound("it ended without an answer of the model")
    finally:
        await endpoint.close()
    return TrialFound()


def main() -> None:
    guard()
    reply = take_stdout()
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialAsked)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(tried(asked, Path(folder)))
    reply.write(msgspec.json.encode(found))
    reply.flush()
    os._exit(0)  # threads of the workflow's may go on


if __name__ == "__main__":
    main()

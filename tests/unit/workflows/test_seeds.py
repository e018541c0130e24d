"""Seeds: a prompt is sampled with the same one whenever, wherever and however often it is asked."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from areal_megatron.config import Config, DataConfig, ModelConfig, RolloutConfig
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.environment import Environment
from areal_megatron.controller.evaluation import Evaluation
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.sampler import Sampler
from areal_megatron.controller.schedule import Schedule
from areal_megatron.controller.state import read as read_state
from areal_megatron.controller.state import write as write_state
from areal_megatron.data.prompts import Prompt
from areal_megatron.data.trajectory import checksum
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.observe.status import EngineState
from areal_megatron.observe.timeline import Timeline
from areal_megatron.workflows import single_turn
from areal_megatron.workflows.sampling import Decoding, Sampling, sampling_seed
from areal_megatron.workflows.scoring import Score
from areal_megatron.workflows.single_turn import SingleTurn
from tests.unit.controller.test_evaluation import Kept

PROMPTS = [Prompt(id=number, text="", answer="", tokens=[1 + number], response_tokens=None) for number in range(6)]


class Asked:
    """An engine's client that records (prompt, seed) of each request, and never answers the prompts of `silent`."""

    name = "engine-0"

    def __init__(self, silent=()):
        self.silent, self.seeds = silent, []

    async def generate(self, prompt, *, n, seed, **_):
        self.seeds.append((prompt[0] - 1, seed))
        while prompt[0] - 1 in self.silent:
            await asyncio.sleep(3600)
        return [Completion(np.ones(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")] * n


class Right:
    async def score(self, prompt, completions):
        return [Score(reward=5.0, correct=True, truncated=False, trained=True) for _ in completions]

    async def with_terms(self, prompt, episodes):
        return episodes


async def never(*_):
    raise AssertionError("no engine is lost here")


def setting(tmp_path, client):
    config = Config(
        name="x",
        updates=3,
        batch_size=4,
        seed=11,
        model=ModelConfig(path="x"),
        data=DataConfig(train="x", eval="x"),
        rollout=RolloutConfig(group_size=2, max_running=64, max_staleness=2),
    )
    timeline = Timeline(tmp_path / "timeline", "controller")
    return config, Sampler(
        engines=[Engine(0, client, timeline)],
        is_lost=never,
        stop_tokens=[0],
        environments=[Environment(config, scorer := Right(), SingleTurn(scorer))],
        timeline=timeline,
        evaluation=Decoding(1.0),
    )


def admitted(tmp_path, client, state=None):
    """Returns the state of a run of two epochs of three prompts when all its six groups have been admitted."""
    config, sampler = setting(tmp_path, client)
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=2, updates=3)
    subject = Generation(config, schedule, sampler, PROMPTS[:3], Changed())
    if state is not None:
        subject.restore(state)
    schedule.add_engine(0, 0)

    async def live():
        running = asyncio.create_task(subject.run())
        await asyncio.sleep(0.05)
        running.cancel()

    asyncio.run(live())
    return subject.save()


def test_a_seed_depends_on_run_purpose_epoch_and_prompt_alone():
    assert sampling_seed(1, "train", 0, 0) == 1702166561818053080
    seeds = [
        sampling_seed(seed, "train", epoch, prompt) for seed in range(3) for epoch in range(10) for prompt in range(100)
    ]
    seeds += [sampling_seed(seed, "eval", prompt) for seed in range(3) for prompt in range(1000)]
    assert len({seed + answer for seed in seeds for answer in range(16)}) == 16 * len(seeds)
    assert 0 <= min(seeds) < 2**58 and 2**62 - 2**58 < max(seeds) < 2**62
    assert len({seed % 2**32 for seed in seeds}) == len(seeds), "torch's generator of the CPU drops the upper half"


def test_prompts_that_are_asked_again_after_a_resume_have_the_seeds_they_had(tmp_path):
    first, again = Asked(silent={0, 2}), Asked()
    state = admitted(tmp_path, first)
    assert sorted(state.again) == [(epoch, prompt) for epoch in (0, 1) for prompt in (0, 2)]
    admitted(tmp_path, again, state)
    everything = [(prompt, sampling_seed(11, "train", epoch, prompt)) for epoch in (0, 1) for prompt in range(3)]
    assert sorted(first.seeds) == sorted(everything)
    assert sorted(again.seeds) == sorted(pair for pair in everything if pair[0] in first.silent)


class Slow(Asked):
    """Answers nothing until it is told to abort; then one answer of two is complete, the other has three tokens."""

    def __init__(self):
        super().__init__()
        self.aborted = asyncio.Event()

    async def generate(self, prompt, *, seed, **_):
        self.seeds.append((prompt[0] - 1, seed))
        await self.aborted.wait()
        return [
            Completion(
                np.full(tokens, seed % 97, np.int32),
                np.full(tokens, -0.5, np.float32),
                np.zeros(tokens, np.int32),
                reason,
            )
            for tokens, reason in ((5, "stop"), (3, "abort"))
        ]

    async def abort(self, prefix):
        self.aborted.set()


class Resuming(Asked):
    """Adds two tokens of version 1 to every answer."""

    async def generate(self, prompt, *, n, seed, max_tokens, **_):
        assert n == 1 and len(prompt) == 4 and max_tokens == 24 - 3
        self.seeds.append((prompt[0] - 1, seed))
        return [Completion(np.full(2, 98, np.int32), np.full(2, -1.0, np.float32), np.ones(2, np.int32), "stop")]


def test_answers_that_were_interrupted_are_resumed_with_random_numbers_of_their_own(tmp_path):
    """And after the tokens that they were sampled from, although the prompts are rendered otherwise now."""
    config, sampler = setting(tmp_path, Slow())
    config.rollout.max_new_tokens = 24

    def generation(prompts):
        schedule = Schedule(batch_size=4, group_size=2, max_staleness=2, updates=3)
        return schedule, Generation(config, schedule, sampler, prompts, Changed())

    async def stopped():
        schedule, subject = generation(PROMPTS[:3])
        schedule.add_engine(0, 0)
        running = asyncio.create_task(subject.run())
        await asyncio.sleep(0.05)
        await subject.interrupt()
        running.cancel()
        return subject.save()

    write_state(asyncio.run(stopped()), tmp_path / "state")
    state = read_state(tmp_path / "state")
    assert not state.again and len(state.schedule.interrupted) == len(state.resumable) == 6
    (engine,) = sampler.engines
    first, client = engine.client.seeds, Resuming()
    engine.client = client

    async def resumed():
        schedule, subject = generation([replace(prompt, tokens=[7, *prompt.tokens]) for prompt in PROMPTS[:3]])
        subject.restore(state)
        schedule.version = 1
        schedule.add_engine(0, 1)
        running = asyncio.create_task(subject.run())
        await asyncio.sleep(0.05)
        running.cancel()
        return [(group, subject.take(group)) for group in schedule.finished.values()]

    finished = asyncio.run(resumed())
    assert len(finished) == 6 and len(client.seeds) == 6 and not {s for _, s in first} & {s for _, s in client.seeds}
    for group, (whole, joined) in finished:
        mark = sampling_seed(11, "train", group.epoch, group.prompt_id) % 97
        assert whole.response.tolist() == [mark] * 5 and joined.response.tolist() == [mark] * 3 + [98] * 2
        for answer in (whole, joined):
            assert answer.prompt.tolist() == PROMPTS[group.prompt_id].tokens and answer.asked == checksum(answer.prompt)
        assert joined.versions.tolist() == [0, 0, 0, 1, 1] and joined.logprobs.tolist() == [-0.5] * 3 + [-1.0] * 2
        assert whole.admission_version == joined.admission_version == group.admission_version == 0


def test_a_request_that_is_repeated_has_the_seed_it_had(monkeypatch):
    monkeypatch.setattr("areal_megatron.workflows.sampling._RETRY_S", 0)
    seeds = []

    async def broken(*_, seed, **__):
        seeds.append(seed)
        if len(seeds) < 3:
            raise EngineError("broken")
        return []

    sampling = Sampling(SimpleNamespace(name="engine-0", generate=broken), RolloutConfig(), [], cache_salt=None)
    assert asyncio.run(single_turn.sample(sampling, PROMPTS[0], 2, "x", seed=5)) == []
    assert seeds == [5, 5, 5]


def test_every_evaluation_asks_with_the_same_seeds(tmp_path):
    client = Asked()
    config, sampler = setting(tmp_path, client)
    for version in (0, 3):
        sampler.engines[0].version = version
        asyncio.run(Evaluation(config, sampler, PROMPTS, Changed(), str, Kept()).run(version))
    assert sorted(client.seeds) == sorted([(p.id, sampling_seed(11, "eval", p.id)) for p in PROMPTS] * 2)


def test_engines_that_take_no_prompts_for_long_have_no_share_of_them(tmp_path):
    config, sampler = setting(tmp_path, Asked())
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=2, updates=3)
    subject = Generation(config, schedule, sampler, PROMPTS[:3], Changed())
    engines = sampler.engines
    engines += [Engine(index, Asked(), engines[0].timeline) for index in range(1, 6)]
    assert subject._sharing() == 6  # all of them start
    for engine in engines[:5]:
        engine.state = EngineState.READY
    engines[1].state, engines[2].unreached, engines[3].draining = EngineState.TORN, True, True
    engines[4].leave(EngineState.LOST)
    assert subject._sharing() == 2
    schedule.version = 1  # engines that start now may take minutes
    assert subject._sharing() == 1

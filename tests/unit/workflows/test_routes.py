"""Routes, the experts that engines chose: from their answers into trajectories."""

import asyncio

import numpy as np
import pytest

from areal_megatron.config import RolloutConfig
from areal_megatron.controller.generation import _sample
from areal_megatron.controller.schedule import Group
from areal_megatron.data.prompts import Prompt
from areal_megatron.data.trajectory import decoder, encoder
from areal_megatron.engine.answers import RawAnswer, RawArray
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.workflows import multi_turn
from areal_megatron.workflows.sampling import INTERRUPTED, Sampling
from areal_megatron.workflows.single_turn import sample
from tests.support.chat_world import END, World, spelled
from tests.support.generating import generated

LAYERS, CHOSEN = 3, 2


def routes_of(places, call):
    """Returns uint8 [places, layers, k], with different experts at each place and in each call."""
    places = np.asarray(places)[:, None, None]
    return ((places * 7 + call * 50 + np.arange(LAYERS * CHOSEN).reshape(LAYERS, CHOSEN)) % 256).astype(np.uint8)


def generate(routes, routes_from, tokens=(5, 6, 7)):
    """Returns what the client makes of an answer to a prompt of four tokens, and where it asked for routes from."""
    answer = RawAnswer(
        tokens=np.array(tokens, np.int32).tobytes(),
        logprobs=np.full(len(tokens), -1, np.float32).tobytes(),
        versions=[("3", 0, len(tokens))],
        finish_reason="stop",
        routes=routes if routes is None or isinstance(routes, RawArray) else RawArray.of(routes),
    )
    [completion], body = generated(
        [answer], [1, 2, 3, 4], n=1, max_tokens=7, temperature=1.0, stop_tokens=[], routes_from=routes_from
    )
    return completion, body["sampling_params"].get("routed_experts_prompt_start")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("start", [0, 3])
def test_routes_come_with_the_answer_from_the_token_that_was_asked_for(start, dtype):
    routes = routes_of(range(start, 4 + 3 - 1), 0).astype(dtype)
    completion, asked = generate(routes, start)
    assert asked == start and completion.routes.dtype == dtype
    np.testing.assert_array_equal(completion.routes, routes.reshape(-1))


def test_no_routes_are_asked_for_without_replay():
    completion, asked = generate(None, None)
    assert asked is None and len(completion.routes) == 0


@pytest.mark.parametrize(
    "routes",
    [
        None,
        routes_of(range(5), 0),
        routes_of(range(7), 0),
        routes_of(range(6), 0)[0],
        routes_of(range(6), 0) + 0.5,
        RawArray("u1", [6, LAYERS, CHOSEN], bytes(6 * LAYERS * CHOSEN - 1)),
    ],
)
def test_other_routes_than_were_asked_for_are_an_error_of_the_engine(routes):
    with pytest.raises(EngineError, match=r"engine-7 .* unreadable answer to x: (no )?routed_experts"):
        generate(routes, 0)


def test_an_answer_that_was_aborted_at_once_has_no_routes():
    completion, _ = generate(None, 0, tokens=())
    assert len(completion.routes) == 0


class Routed:
    """An engine that returns routes; it interrupts the first call after `begun` tokens."""

    name = "engine-0"

    def __init__(self, begun):
        self.calls, self.begun = 0, begun

    async def generate(self, prompt, *, n, routes_from, **_):
        count, reason = (self.begun, INTERRUPTED) if not self.calls else (4, "stop")
        places = range(routes_from, len(prompt) + count - 1) if count else []
        routes = routes_of(list(places), self.calls) if places else np.zeros(0, np.uint8)
        self.calls += 1
        return [
            Completion(
                np.arange(count, dtype=np.int32),
                np.zeros(count, np.float32),
                np.zeros(count, np.int32),
                reason,
                routes.reshape(-1),
            )
        ] * n


@pytest.mark.parametrize("begun", [0, 1, 3])
def test_answers_that_are_resumed_keep_the_routes_they_had(begun):
    rollout = RolloutConfig(group_size=1, max_new_tokens=9, replay_routes=True)
    client, prompt = Routed(begun), Prompt(id=0, text="", answer="", tokens=[1, 2, 3], response_tokens=None)
    sampling = Sampling(client, rollout, [0], None, lambda: True)

    async def sampled():
        first = await sample(sampling, prompt, 1, "group-0", 5)
        return await sample(sampling, prompt, 1, "group-0", 5, first)

    [whole] = asyncio.run(sampled())
    kept = 3 + begun - 1 if begun else 0
    expected = [routes_of(range(kept), 0)] * bool(kept) + [routes_of(range(kept, 3 + begun + 4 - 1), 1)]
    assert len(whole.tokens) == begun + 4
    np.testing.assert_array_equal(whole.routes, np.concatenate(expected).reshape(-1))


def test_tokens_of_several_turns_keep_the_routes_of_the_turn_that_first_saw_them(tmp_path):
    world = World(tmp_path, multi_turn.run, lambda _, number: ["no", "right"][number])
    world.config.rollout.replay_routes = True
    plain, calls = world.client.generate, []

    async def generate(prompt, *, routes_from, **options):
        [completion] = await plain(prompt, **options)
        end = len(prompt) + len(completion.tokens) - 1
        calls.append((routes_from, end))
        routes = routes_of(range(routes_from, end), len(calls) - 1).reshape(-1)
        return [
            Completion(completion.tokens, completion.logprobs, completion.versions, completion.finish_reason, routes)
        ]

    world.client.generate = generate
    (ended,) = asyncio.run(world.sample())
    first = len(ended.context.prompt) + len([*spelled("no"), END]) - 1
    assert calls == [(0, first), (first, len(ended.context.prompt) + ended.context.length - 1)]
    expected = np.concatenate([routes_of(range(*calls[0]), 0), routes_of(range(*calls[1]), 1)]).reshape(-1)

    group = Group(number=1, epoch=0, prompt_id=7, admission_version=0, engine=0, deadline=1)
    trajectory = _sample(group, 1, 0, ended, [])
    sent = decoder(type(trajectory)).decode(encoder().encode(trajectory))
    np.testing.assert_array_equal(sent.routes, expected)
    assert sent.routes.dtype == np.uint8

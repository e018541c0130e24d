"""What a run that a program drives answers to requests that nothing can come of."""

import asyncio

import numpy as np
import pytest
from aiohttp import web

from areal_megatron.config.fields import ModelConfig
from areal_megatron.controller.driven import Driven
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.engine import answers
from areal_megatron.protocol import GivePrompt, GiveSamples, ProgramReply
from tests.support.engines import make_run

REFUSAL = "This model's maximum context length is 8 tokens"


def asked(folder, world, *messages, model="") -> tuple[list[ProgramReply], int]:
    """What the controller replies with an engine that refuses all requests, and how many that has got."""
    run, config = make_run(folder / "run", world, mode="driven")
    config.model = ModelConfig(path=str(model or world / "model"), dtype="float32")
    run.begin()
    refused = []

    async def answer(request):
        if request.path != answers.PATH:
            return web.Response()
        refused.append(request)
        return web.json_response({"error": REFUSAL}, status=400)

    async def play():
        app = web.Application()
        app.router.add_route("*", "/{route:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        run.announce("engine-0", site.name)
        driven = Driven(config, run)
        life = asyncio.create_task(driven.live())
        try:
            return [await driven._attend(message) for message in messages]
        finally:
            assert not life.done()
            driven._bye.set()
            await life
            await driven.close()
            await runner.cleanup()

    return asyncio.run(play()), len(refused)


def prompt(*tokens):
    return GivePrompt(tokens=[*tokens], n=1, max_tokens=9, temperature=1.0, top_p=1.0, top_k=0, stop_tokens=[], seed=0)


def test_what_an_engine_refuses_is_wrong_input_at_once_and_what_nobody_foresaw_is_a_failed_request(world, tmp_path):
    unforeseen = {
        "GivePrompt: ValueError: ": prompt(),
        "GiveSamples: ValueError: ": GiveSamples(samples=[], loss="sft", advantages=[], weights=[]),
        "GivePrompt: UFuncTypeError: ": prompt("a"),
    }
    [refused, *others, again], requests = asked(tmp_path, world, prompt(3, 4), *unforeseen.values(), prompt(3, 4))
    assert REFUSAL in refused.wrong and refused.wrong == again.wrong and requests == 2
    for reply, begun in zip(others, unforeseen, strict=True):
        assert reply.failed.startswith(begun) and not reply.wrong


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (np.zeros(4 * 4 * 2 - 1, np.uint8), "31 expert numbers up to 0 for 5 tokens"),
        (np.zeros(6 * 4 * 2, np.uint8), "48 expert numbers up to 0 for 5 tokens"),
        (np.full(4 * 4 * 2, 8, np.uint16), "32 expert numbers up to 8 for 5 tokens"),
    ],
)
def test_routes_of_another_model_reach_no_trainer(of_family, world, tmp_path, routes, problem):
    sample = Trajectory(
        uid=0,
        epoch=0,
        prompt_id=0,
        admission_version=0,
        prompt=np.array([3, 4], np.int32),
        response=np.array([5, 6, 7], np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        loss_mask=np.ones(3, np.uint8),
        reward=0.0,
        truncated=False,
        routes=routes,
    )
    given = GiveSamples(samples=[sample], loss="grpo", advantages=[np.ones(3, np.float32)], weights=[])
    [reply], _ = asked(tmp_path, world, given, model=of_family("qwen3_moe"))
    assert reply.wrong == (
        f"sample 0: routes: {problem} are of another model: this one has 4 layers that choose 2 of 8"
    )

"""What a run that a program drives answers to requests that nothing can come of."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web

from areal_megatron import protocol
from areal_megatron.config import ConfigError
from areal_megatron.config.fields import ModelConfig
from areal_megatron.controller.driven import Driven
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.engine import answers
from areal_megatron.protocol import Await, ControllerClient, GivePrompt, GiveSamples, ProgramReply, Ticket
from tests.support.engines import make_run

REFUSAL = "This model's maximum context length is 8 tokens"


def asked(folder, world, *messages, model="") -> tuple[list[ProgramReply], int]:
    """What the controller replies with an engine that refuses all requests, and how many that has got. A function among
    the messages sends some itself."""
    run, config = make_run(folder / "run", world, mode="driven")
    config.model = ModelConfig(path=str(model or world / "model"), dtype="float32")
    run.begin()
    refused = []

    async def answer(request):
        if request.path != answers.PATH:
            return web.Response()
        refused.append(request)
        return web.json_response({"error": REFUSAL}, status=400)

    async def told(driven, message: Any) -> ProgramReply:
        if callable(message):
            found: Any = await asyncio.to_thread(message, driven._service.endpoint, run.keys)
            return found
        return await driven._attend(message)

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
            return [await told(driven, message) for message in messages]
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


def samples(*response, **columns):
    length = len(response)
    sample = Trajectory(
        uid=0,
        epoch=0,
        prompt_id=0,
        admission_version=0,
        prompt=np.array([3, 4], np.int32),
        response=np.array(response, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        loss_mask=np.ones(length, np.uint8),
        reward=0.0,
        truncated=False,
        **columns,
    )
    return GiveSamples(samples=[sample], loss="grpo", advantages=[np.ones(length, np.float32)], weights=[])


def test_a_batch_of_many_tokens_arrives_and_one_that_is_too_long_is_not_sent(world, tmp_path, monkeypatch):
    """A controller answers trainers and its program over a socket that takes no message beyond a bound."""
    long = samples(*[5] * 10**6, 999)

    def send(endpoint, keys):
        with ControllerClient(endpoint, keys, "program", 60) as client:
            found = client.request(Await(cast(Ticket, client.request(long)).number))
            monkeypatch.setattr(protocol, "LONGEST_BYTES", 10 * 2**20)
            with pytest.raises(ConfigError, match=r"^GiveSamples: 16 MiB at once, and 10 are the most: give fewer$"):
                client.request(long)
        return found

    [reply], _ = asked(tmp_path, world, send)
    assert reply.wrong == "token 999: the model has 0 to 63"


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (np.zeros(4 * 4 * 2 - 1, np.uint8), "31 expert numbers up to 0 for 5 tokens"),
        (np.zeros(6 * 4 * 2, np.uint8), "48 expert numbers up to 0 for 5 tokens"),
        (np.full(4 * 4 * 2, 8, np.uint16), "32 expert numbers up to 8 for 5 tokens"),
    ],
)
def test_routes_of_another_model_reach_no_trainer(of_family, world, tmp_path, routes, problem):
    [reply], _ = asked(tmp_path, world, samples(5, 6, 7, routes=routes), model=of_family("qwen3_moe"))
    assert reply.wrong == (
        f"sample 0: routes: {problem} are of another model: this one has 4 layers that choose 2 of 8"
    )

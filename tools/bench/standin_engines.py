"""Stand-in engines that compute nothing: the routes of an engine that the controller uses, with random answers.

    python tools/bench/standin_engines.py ENGINES SECONDS TOKENS GROUP

Prints the port of 127.0.0.1 that it listens on; engine E is http://127.0.0.1:PORT/E. A request takes half to one and a
half times SECONDS and has GROUP answers of TOKENS tokens. tools/bench/controller.py uses it to measure the controller.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from functools import cache

import numpy as np
from aiohttp import web

from areal_megatron.engine.answers import CONTENT_TYPE, PATH, RawAnswer, encode
from areal_megatron.process import lifeline

_VOCABULARY = 15
_VARIANTS = 8


class StandIn:
    def __init__(self, seconds: float, tokens: int, group: int):
        self._seconds, self._tokens, self._group = seconds, tokens, group
        self._version = "default"
        self._running = 0
        self._sampled = 0
        self._served = 0
        self._random = random.Random(0)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "prompt_logprobs" in body["sampling_params"]:
            return web.Response(body=scores(self._version, len(body["token_ids"])), content_type=CONTENT_TYPE)
        self._running += self._group
        await asyncio.sleep(self._seconds * self._random.uniform(0.5, 1.5))
        self._running -= self._group
        self._sampled += self._group * self._tokens
        self._served += 1
        body = answers(self._version, self._tokens, self._group, self._served % _VARIANTS)
        return web.Response(body=body, content_type=CONTENT_TYPE)

    async def label(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._version = body.get("new_version") or body["version"]
        return web.json_response({"seconds": 0.0})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:num_requests_running{{e="0"}} {self._running}\nvllm:num_requests_waiting{{e="0"}} 0\n'
            f'vllm:generation_tokens_total{{e="0"}} {self._sampled}\n'
        )


@cache
def answers(version: str, tokens: int, group: int, variant: int) -> bytes:
    """Returns the body of an answer to POST /sample."""
    rng = np.random.default_rng(variant)
    return encode(
        [
            RawAnswer(
                tokens=rng.integers(3, _VOCABULARY, tokens, np.int32).tobytes(),
                logprobs=(-rng.exponential(1.0, tokens)).astype(np.float32).tobytes(),
                versions=[(version, 0, tokens)],
                finish_reason="stop",
            )
            for _ in range(group)
        ]
    )


@cache
def scores(version: str, tokens: int) -> bytes:
    """Returns the body of an answer to POST /sample that asks for the log-probabilities of a prompt."""
    sampled = {"tokens": bytes(4), "logprobs": bytes(4), "versions": [(version, 0, 1)], "finish_reason": "length"}
    scored = {"prompt_logprobs": np.full(tokens - 1, -1.0, np.float32), "prompt_tokens": np.zeros(tokens - 1, np.int32)}
    return encode([RawAnswer(**sampled, **{name: values.tobytes() for name, values in scored.items()})])


async def nothing(_: web.Request) -> web.Response:
    return web.json_response({})


async def serve(engines: int, seconds: float, tokens: int, group: int) -> None:
    application = web.Application(client_max_size=2**24)
    for engine in range(engines):
        standin = StandIn(seconds, tokens, group)
        prefix = f"/{engine}"
        application.router.add_post(prefix + PATH, standin.generate)
        application.router.add_post(f"{prefix}/commit", standin.label)
        application.router.add_post(f"{prefix}/update_weight_version", standin.label)
        application.router.add_get(f"{prefix}/metrics", standin.metrics)
    application.router.add_route("*", "/{rest:.*}", nothing)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2**15).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engines", type=int, help="number of engines")
    parser.add_argument("seconds", type=float, help="mean time of a request")
    parser.add_argument("tokens", type=int, help="tokens of an answer")
    parser.add_argument("group", type=int, help="answers to a request")
    lifeline.hold(guardian_s=0)
    asyncio.run(serve(**vars(parser.parse_args())))

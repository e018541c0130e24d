"""A web server in place of an engine, which the product's client asks to generate once."""

import asyncio

from aiohttp import web

from areal_megatron.engine import answers
from areal_megatron.engine.answers import RawAnswer
from areal_megatron.engine.client import Completion, EngineClient


def generated(sampled: list[RawAnswer], prompt: list[int], **options) -> tuple[list[Completion], dict]:
    """Returns what the client makes of these answers, and the body of its request."""
    bodies = []

    async def answer(request):
        bodies.append(await request.json())
        return web.Response(body=answers.encode(sampled))

    async def ask():
        app = web.Application()
        app.router.add_post(answers.PATH, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        client = EngineClient("engine-7", site.name, "secret", timeout_s=5)
        try:
            return await client.generate(prompt, request_id="x", **options)
        finally:
            await client.close()
            await runner.cleanup()

    completions = asyncio.run(ask())
    [body] = bodies
    return completions, body

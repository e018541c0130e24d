"""A web server in an engine's place that is asked to generate once, by the product's client."""

import asyncio

from aiohttp import web

from areal_megatron.engine.client import Completion, EngineClient


def generated(choices: list[dict], prompt: list[int], **options) -> tuple[list[Completion], dict]:
    """What the client makes of an answer with these choices, and the body of what it asked for."""
    bodies = []

    async def answer(request):
        bodies.append(await request.json())
        return web.json_response({"choices": choices})

    async def ask():
        app = web.Application()
        app.router.add_post("/inference/v1/generate", answer)
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

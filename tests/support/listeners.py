"""Servers as a run has them, each in a process of its own that may open few descriptors, for tests with strangers.

    python -m tests.support.listeners engine|site|agents|agents-tls|page FOLDER

`engine` is uvicorn with the options, middleware and event loop of an engine, around a stand-in for vLLM's routes;
`site` is one of an engine at another site, with the credentials site.pem in the folder; `agents` is the endpoint of an
episode, `agents-tls` one for agents on other machines, with such credentials; `page` is the live page of a run. Writes
the address of a route and its secret as one line; ends when its stdin does.
"""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import uvloop

from areal_megatron.run import network

SECRET = "the-secret-of-this-test"
DESCRIPTORS = 800
STRANGER_S = 1.5


class Listener:
    """A server process, and what its strangers find in its log."""

    def __init__(self, process, log, address, secret):
        self.process, self._log, self.secret = psutil.Process(process.pid), log, secret
        self.host, self.port = urlsplit(address).hostname, urlsplit(address).port
        self.path = urlsplit(address).path

    @property
    def log(self):
        return self._log.read_text()


@contextmanager
def listening(kind, folder):
    log = folder / "listener.log"
    command = [sys.executable, "-m", "tests.support.listeners", kind, str(folder)]
    with log.open("wb") as errors:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
    try:
        line = process.stdout.readline().split()
        assert len(line) == 2, log.read_text()
        yield Listener(process, log, *line)
        assert process.poll() is None, log.read_text()
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.stdout.close()


async def site(folder, told):
    os.environ[network.CREDENTIALS_FILE] = str(folder / "site.pem")
    await engine(folder, told, "https")


async def engine(folder, told, scheme="http"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from areal_megatron.engine.environment import SECRET_FILE

    (folder / "secret").write_text(SECRET)
    os.environ[SECRET_FILE] = str(folder / "secret")
    from areal_megatron.engine.guard import TokenGuard, uvicorn_options
    from areal_megatron.engine.middleware import CommitRoute

    async def generate(request: Request):
        return PlainTextResponse(str(len(await request.body())))

    app = Starlette(routes=[Route("/models", generate, methods=["GET", "POST"])])
    app.add_middleware(CommitRoute)
    app.add_middleware(TokenGuard)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(app, access_log=False, timeout_keep_alive=network.KEEP_ALIVE_S, **uvicorn_options())
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/models", SECRET, flush=True)
    await told.wait()
    server.should_exit = True
    await serving


async def agents(folder, told, credentials=None):
    from areal_megatron.workflows.endpoint import AgentEndpoint
    from tests.support.chat_world import World

    async def workflow(episode):
        async with episode.openai() as api:
            print(f"{api.url}/models", api.key, flush=True)
            with episode.busy():
                await told.wait()

    world = World(folder / "model", workflow, lambda *_: "right")
    world.serve_at(AgentEndpoint(world.tokenizer, "127.0.0.1", credentials))
    await world.sample()


async def agents_tls(folder, told):
    from areal_megatron.run.credentials import Credentials

    await agents(folder, told, Credentials(folder / "site.pem"))


async def page(folder, told):
    from areal_megatron.page.server import Page
    from areal_megatron.page.watched import Watched
    from areal_megatron.run.folder import RunFolder

    page = Page(Watched(RunFolder(folder / "run")), SECRET)
    await page.server.start(socket.create_server(("127.0.0.1", 0), backlog=network.backlog()))
    print(f"http://127.0.0.1:{page.server.port}/api/overview", SECRET, flush=True)
    await told.wait()
    await page.server.close()


async def main(kind, folder):
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait():
        sys.stdin.read()
        loop.call_soon_threadsafe(told.set)

    threading.Thread(target=wait, daemon=True).start()
    await {"engine": engine, "site": site, "agents": agents, "agents-tls": agents_tls, "page": page}[kind](folder, told)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    network.STRANGER_S = STRANGER_S
    run = uvloop.run if sys.argv[1] in ("engine", "site") else asyncio.run
    run(main(sys.argv[1], Path(sys.argv[2])))

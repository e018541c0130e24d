import asyncio
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections import Counter

import pytest
from aiohttp import web

from areal_megatron.engine.client import Committed, EngineClient, EngineError, versions_of_tokens
from tests.support.generating import generated
from tests.support.probing import probed


def test_spans_become_versions_of_tokens():
    assert versions_of_tokens([("default", 0, 2), ("3", 2, 3), ("5", 3, 6)], 6).tolist() == [0, 0, 3, 5, 5, 5]
    assert versions_of_tokens([], 0).tolist() == []


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [("0", 0, 3)],
        [("0", 0, 2), ("1", 3, 4)],
        [("0", 0, 3), ("1", 2, 4)],
        [("0", 1, 4)],
        [("0", 0, 5)],
        [("new", 0, 4)],
    ],
)
def test_spans_that_do_not_cover_the_tokens_in_order_are_refused(spans):
    with pytest.raises(ValueError):
        versions_of_tokens(spans, 4)


@pytest.mark.parametrize("seed", [None, 0, 2**62])
def test_a_request_says_what_it_was_asked_for(seed):
    completions, body = generated(
        [], [5, 9], n=3, max_tokens=7, temperature=0.5, top_p=0.9, top_k=20, stop_tokens=[1], cache_salt="v2", seed=seed
    )
    assert completions == []
    sampling = {
        "n": 3,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "stop_token_ids": [1],
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
    } | ({} if seed is None else {"seed": seed})
    assert body == {"request_id": "x", "token_ids": [5, 9], "cache_salt": "v2", "sampling_params": sampling}


def in_turns(burst):
    """Returns in which turn of an event loop each call was done that `burst(clients, done)` makes of two clients."""

    async def run():
        turn, turns = 0, []

        async def count():
            nonlocal turn
            while True:
                await asyncio.sleep(0)
                turn += 1

        counting = asyncio.create_task(count())
        clients = [EngineClient(f"engine-{number}", "http://127.0.0.1:9", "secret", timeout_s=5) for number in range(2)]
        await burst(clients, lambda: turns.append(turn))
        counting.cancel()
        for client in clients:
            await client.close()
        return turns

    return asyncio.run(run())


def test_answers_of_all_engines_are_decoded_one_in_each_turn_of_the_event_loop(monkeypatch):
    async def answer(*_, **__):
        return b""

    async def burst(clients, done):
        monkeypatch.setattr(EngineClient, "_completions", lambda *_: done())
        monkeypatch.setattr(EngineClient, "_call", answer)
        asked = {"n": 1, "max_tokens": 1, "temperature": 1.0, "stop_tokens": []}
        await asyncio.gather(*(c.generate([1], request_id=str(k), **asked) for c in clients for k in range(3)))

    decoded = in_turns(burst)
    assert len(decoded) == 6 and decoded == sorted(set(decoded))


def test_requests_to_all_engines_are_begun_a_few_in_each_turn_of_the_event_loop(monkeypatch):
    async def burst(clients, done):
        async def answer(*_):
            done()
            return 200, b""

        monkeypatch.setattr(EngineClient, "_answer", answer)
        await asyncio.gather(*(client.start_update() for client in clients for _ in range(50)))

    begun = Counter(in_turns(burst))
    assert begun.total() == 100 and max(begun.values()) <= 16


def test_an_engine_that_is_not_there_is_named():
    async def call():
        client = EngineClient("engine-7", "http://127.0.0.1:9", "secret", timeout_s=5)
        try:
            await client.resume()
        finally:
            await client.close()

    with pytest.raises(EngineError, match=r"engine-7 at http://127.0.0.1:9: POST /resume"):
        asyncio.run(call())


def test_waiting_for_an_engine_ends(tmp_path):
    async def wait():
        client = EngineClient("engine-7", "http://127.0.0.1:9", "secret", timeout_s=5)
        try:
            await client.wait_until_healthy(0.5)
        finally:
            await client.close()

    with pytest.raises(EngineError, match=r"engine-7 does not serve after"):
        asyncio.run(wait())


def test_a_connection_that_the_engine_just_closed_costs_no_request():
    """The engine stands still after each answer, and closes the connection when another request comes over it."""
    asked = []

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.split(" HTTP")[0])
        if length := re.search("Content-Length: (.*)\r", head):
            await reader.readexactly(int(length[1]))
        body = b'{"seconds": 0.5}' if "/commit" in head else b"vllm:num_requests_running{} 3.0"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await reader.read(1)
        writer.close()

    async def calls():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = EngineClient("engine-0", f"http://{host}:{port}", "secret", timeout_s=5)
        try:
            first = await client.load()
            assert await client.commit(3, clear_cache=True) == Committed(0.5)
            assert first == await client.load() and first.running == 3
        finally:
            await client.close()
            server.close()

    asyncio.run(calls())
    assert asked == ["GET /metrics", "POST /commit", "GET /metrics"]


POLLING = """
import asyncio, sys
from areal_megatron.config import Config
from areal_megatron.controller.engine import Engine
from areal_megatron.engine.client import EngineClient, EngineError

async def main():
    client = EngineClient("engine-0", sys.argv[1], "secret", timeout_s=60)
    engine = Engine(0, client, timeline=None)
    watching = asyncio.create_task(engine.watch(timeout_s=60, silence_s=1.5))
    await asyncio.wait([watching], timeout=float(sys.argv[2]))
    print(watching.exception() if watching.done() else "serves")
    watching.cancel()
    await client.close()

asyncio.run(main())
"""


def test_an_engine_that_answered_while_its_controller_was_stopped_is_not_lost():
    """The controller is stopped for twice the silence it allows, each time with a poll in flight. One that does not
    answer is lost."""

    async def play(answers):
        polled = asyncio.Event()

        async def metrics(request):
            polled.set()
            await asyncio.sleep(0.7 if answers else 60)
            return web.Response(text="vllm:num_requests_running 0\nvllm:generation_tokens_total 1\n")

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", POLLING, endpoint, "9", stdout=-1)
        for _ in range(2 if answers else 1):
            polled.clear()
            await asyncio.wait_for(polled.wait(), 300)
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3)
            process.send_signal(signal.SIGCONT)
        said, _ = await process.communicate()
        await runner.cleanup()
        return said.decode().strip()

    async def both():
        return await asyncio.wait_for(asyncio.gather(play(True), play(False)), 300)

    answered, silent = asyncio.run(both())
    assert answered == "serves" and silent.endswith("did not answer GET /metrics in time")


def test_a_call_waits_for_a_descriptor_and_does_not_blame_the_engine(tmp_path):
    """All descriptors of this process are taken when it calls, and given back a second later."""
    (tmp_path / "health").touch()
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "-d", str(tmp_path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        port = server.stdout.readline().split()[5]

        async def play():
            client = EngineClient("engine-0", f"http://127.0.0.1:{port}", "secret", timeout_s=5)
            await client.wait_until_healthy(5)
            await asyncio.sleep(0.1)  # until that connection is closed
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(map(int, os.listdir("/proc/self/fd")))  # other tests' may be many
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
            taken = []
            try:
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))
                call = asyncio.ensure_future(client.wait_until_healthy(0))
                await asyncio.wait([call], timeout=1)
                assert taken and not call.done(), "it waits"
                for descriptor in taken:
                    os.close(descriptor)
                taken.clear()
                await call
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in taken:
                    os.close(descriptor)
                await client.close()

        try:
            asyncio.run(asyncio.wait_for(play(), 300))
        finally:
            server.kill()


def test_a_connection_over_which_an_answer_is_long_in_coming_is_probed():
    """Or firewalls forget it, and the answer never comes."""

    async def play():
        async def say_nothing(reader, writer):
            await reader.read(100)
            asked.set()
            await asyncio.sleep(60)

        asked = asyncio.Event()
        async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = EngineClient("engine-0", f"http://127.0.0.1:{port}", "secret", timeout_s=5)
            call = asyncio.ensure_future(client.load(60))
            await asked.wait()
            while not probed(port):
                await asyncio.sleep(0.05)
            call.cancel()
            await client.close()

    asyncio.run(asyncio.wait_for(play(), 300))

import asyncio
import re

import pytest

from areal_megatron.engine.client import EngineClient, EngineError, versions_of_tokens
from tests.support.generating import generated


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
        [], [5, 9], n=3, max_tokens=7, temperature=0.5, stop_tokens=[1], cache_salt="v2", seed=seed
    )
    assert completions == []
    sampling = {
        "n": 3,
        "max_tokens": 7,
        "temperature": 0.5,
        "stop_token_ids": [1],
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
    } | ({} if seed is None else {"seed": seed})
    assert body == {"request_id": "x", "token_ids": [5, 9], "cache_salt": "v2", "sampling_params": sampling}


def test_answers_of_all_engines_are_decoded_one_in_each_turn_of_the_event_loop(monkeypatch):
    async def answer(*_, **__):
        return b'{"choices":[]}'

    async def burst():
        turn, decoded = 0, []

        async def count():
            nonlocal turn
            while True:
                await asyncio.sleep(0)
                turn += 1

        counting = asyncio.create_task(count())
        clients = [EngineClient(f"engine-{number}", "http://127.0.0.1:9", "secret", timeout_s=5) for number in range(2)]
        monkeypatch.setattr(EngineClient, "_completions", lambda *_: decoded.append(turn))
        monkeypatch.setattr(EngineClient, "_call", answer)
        asked = {"n": 1, "max_tokens": 1, "temperature": 1.0, "stop_tokens": []}
        await asyncio.gather(*(c.generate([1], request_id=str(k), **asked) for c in clients for k in range(3)))
        counting.cancel()
        for client in clients:
            await client.close()
        return decoded

    decoded = asyncio.run(burst())
    assert len(decoded) == 6 and decoded == sorted(set(decoded))


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
            assert await client.commit(3, clear_cache=True) == 0.5
            assert first == await client.load() and first.running == 3
        finally:
            await client.close()
            server.close()

    asyncio.run(calls())
    assert asked == ["GET /metrics", "POST /commit", "GET /metrics"]

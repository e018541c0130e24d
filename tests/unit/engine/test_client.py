import asyncio

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

"""What the server for clients of tinker refuses, and which results it keeps. Its policy is one that does nothing."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import aiohttp
import pytest

from areal_megatron.api import tinker
from areal_megatron.api.tinker import TinkerServer, config_of
from areal_megatron.config import ConfigError

KEY = "tml-secret"


def asked(world, folder, talk, *overrides):
    """What `talk(post)` returns, with `post(route, **body)` for a server."""
    keys = ["name=served", f"model.path={world / 'model'}", "lora.rank=8", *overrides]
    config = config_of("configs/tiny_cpu.yaml", keys)
    policy = SimpleNamespace(config=config, folder=folder, turn_to=lambda *_, **__: None, save_adapter=lambda own: own)

    async def play():
        server = TinkerServer(policy, {"model"}, KEY)
        await server.http.start(socket.create_server(("127.0.0.1", 0)))
        address = f"http://127.0.0.1:{server.http.port}/api/v1/"
        async with aiohttp.ClientSession(address, headers={"X-API-Key": KEY}) as session:

            async def post(route, **body):
                async with session.post(route, json=body) as reply:
                    return await (reply.json() if reply.content_type == "application/json" else reply.read())

            try:
                return await talk(server, post)
            finally:
                await server.http.close()
                server.close()

    return asyncio.run(play())


DEFAULTS = {"rank": 8, "seed": None, "train_unembed": True, "train_mlp": True, "train_attn": True}


@pytest.mark.parametrize(
    ("changes", "overrides", "problem"),
    [
        ({}, [], ""),
        ({"seed": 1}, [], ""),
        ({"train_unembed": False}, [], ""),
        ({"train_mlp": False}, ["lora.targets='q_proj,v_proj'"], ""),
        ({"seed": 7}, [], "seed: adapters begin with the server's, 1, not 7: start it with seed=7"),
        ({"train_mlp": False}, [], "train_mlp: the adapters of this server have gate_proj, up_proj, down_proj: start"),
        ({"train_attn": False}, [], "train_attn: the adapters of this server have q_proj, k_proj, v_proj, o_proj: "),
        ({"rank": 9}, [], "rank: the adapters of this server have rank 8, not 9: start it with lora.rank=9"),
    ],
)
def test_an_adapter_that_is_not_the_servers_is_refused(world, tmp_path, changes, overrides, problem):
    async def talk(server, post):
        session = (await post("create_session"))["session_id"]
        own = {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": DEFAULTS | changes}
        return await post("create_model", **own)

    reply = asked(world, tmp_path, talk, *overrides)
    assert reply.get("detail", "").startswith(problem) and ("request_id" in reply) == (not problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seq_id": float("inf")}, "cannot convert float infinity to integer"),
        ({"sampling_params": {"temperature": 10**400}}, "int too large to convert to float"),
        ({"num_samples": 10**9}, "num_samples: must be a whole number from 1 to 16384, is 1000000000"),
        ({"num_samples": -1}, "num_samples: must be a whole number from 1 to 16384, is -1"),
        (
            {"topk_prompt_logprobs": 10**6},  # arrays of that size would be filled
            "top_k: 1000000, and engines tell 0 to 20; rollout.vllm.max_logprobs is the most",
        ),
        ({"topk_prompt_logprobs": -1}, "top_k: must be a whole number from 0 to 2147483647, is -1"),
    ],
)
def test_numbers_without_a_sense_are_refused_at_once(world, tmp_path, changes, problem):
    async def talk(server, post):
        session = (await post("create_session"))["session_id"]
        own = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
        name = (await post("create_sampling_session", **own))["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
        asked = {"sampling_session_id": name, "seq_id": 0, "prompt": prompt, "sampling_params": {}}
        return await post("asample", **asked | changes)

    assert asked(world, tmp_path, talk) == {"detail": problem}


def test_a_key_that_is_no_text_is_wrong_or_right_as_any_other(world, tmp_path):
    async def talk(server, post):
        found = []
        for server._key in (KEY, "\udcff"):  # as the second comes out of the environment
            reader, writer = await asyncio.open_connection("127.0.0.1", server.http.port)
            writer.write(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\nX-API-Key: \xff\r\n\r\n")
            found.append((await reader.readline()).split()[1])
            writer.close()
        return found

    assert asked(world, tmp_path, talk) == [b"401", b"200"]


def test_what_a_program_that_is_gone_has_asked_for_is_not_sampled(world, tmp_path):
    at = [0.0]

    async def talk(server, post):
        server._models._now, server._policy.sample = lambda: at[0], lambda *_, **__: [[]]
        session = (await post("create_session"))["session_id"]
        own = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
        name = (await post("create_sampling_session", **own))["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}

        async def ask(number, silent_s):
            """A sample that is begun only after a silence."""
            server._sampling, free = ThreadPoolExecutor(1), threading.Event()
            server._sampling.submit(free.wait)
            asked = {"sampling_session_id": name, "seq_id": number, "prompt": prompt, "sampling_params": {}}
            begun = await post("asample", **asked)
            at[0] += silent_s
            free.set()
            return await asyncio.wait_for(server._requests[begun["request_id"]], 10)

        for number in range(3):
            await ask(number, 40.0)
        with pytest.raises(ConfigError, match=f"^session {session} has finished, or nothing was heard of .* for 45 s$"):
            await ask(3, 46.0)
        await ask(4, 0.0)
        await post(f"sessions/{session}/finish")
        with pytest.raises(ConfigError, match="has finished"):
            await ask(5, 0.0)

    asked(world, tmp_path, talk)


def test_the_last_results_are_kept_up_to_a_number_and_a_size(world, tmp_path, monkeypatch):
    monkeypatch.setattr(tinker, "_KEPT_REQUESTS", 3)
    monkeypatch.setattr(tinker, "_KEPT_BYTES", 100)

    async def talk(server, post):
        async def kept(*sizes):
            """Which results there are when all of them have been made."""
            for number, size in enumerate(sizes):
                server._begin(str(number), server._training, lambda size=size: bytes(size))
                await post("retrieve_future", request_id=str(number))
            found = [await post("retrieve_future", request_id=str(number)) for number in range(len(sizes))]
            server._requests.clear()
            server._sizes.clear()
            return [number for number, one in enumerate(found) if one == bytes(sizes[number])]

        return await kept(1, 1, 1, 1), await kept(60, 40, 40), await kept(1, 500), await kept(500, 1)

    assert asked(world, tmp_path, talk) == ([1, 2, 3], [1, 2], [1], [1])


def test_a_port_that_cannot_be_had_is_refused_before_anything_is_started(world, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port, problem in ((99999, "must be from 0 to 65535, is 99999"), (taken.getsockname()[1], "in use")):
            keys = ["name=served", f"runs_dir={tmp_path}", f"model.path={world / 'model'}", "lora.rank=8"]
            assert tinker.main(["configs/tiny_cpu.yaml", *keys, f"--port={port}"]) == 2
            error = capsys.readouterr().err
            assert error.startswith("error: --port: ") and problem in error and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]

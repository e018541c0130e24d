"""The endpoint of agents on other machines: real TLS and HTTP, on a scripted engine."""

import asyncio
import os
import ssl
import sys
import time

import aiohttp
import httpx
import openai
import pytest

from areal_megatron.config import ConfigError
from areal_megatron.run.credentials import Credentials, new_credentials
from areal_megatron.run.folder import RunFolder
from areal_megatron.workflows.endpoint import AgentEndpoint
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import Sampling
from areal_megatron.workflows.workers import EpisodeWorkers, WorkflowRunner
from tests.support.chat_world import World
from tests.support.served_engine import TEXTS

EPISODES = 1000


def credentials(folder, name="agents.pem"):
    (folder / name).write_bytes(new_credentials())
    return Credentials(folder / name)


def world(folder, workflow, answer, **settings):
    made = World(folder / "model", workflow, answer, **{"turns": 10, "timeout_s": 120.0} | settings)
    made.serve_at(AgentEndpoint(made.tokenizer, "127.0.0.1", credentials(folder)))
    return made


async def post(session, api, key, text):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{api.url}/chat/completions", json=body, headers=headers, ssl=api.tls) as response:
        return response.status, await response.json()


def test_a_client_with_the_credentials_and_the_key_is_served(tmp_path):
    """As a program of another machine has them: an address, a key and a file."""

    async def workflow(episode):
        async with episode.openai() as api:
            assert api.url.startswith("https://127.0.0.1:")
            shown = api.environment
            tls = Credentials(shown["AREAL_AGENT_CREDENTIALS"]).calling()
            async with openai.AsyncOpenAI(
                base_url=shown["OPENAI_BASE_URL"],
                api_key=shown["OPENAI_API_KEY"],
                http_client=httpx.AsyncClient(verify=tls),
            ) as client:
                said = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1"}])
            assert said.choices[0].message.content == "right"

    made = world(tmp_path, workflow, lambda *_: "right")
    (ended,) = asyncio.run(made.sample())
    assert ended.score.correct and made.episodes.failures == 0


def test_who_lacks_the_credentials_gets_no_handshake_whatever_his_key(tmp_path):
    """With none, with those of another run, and without TLS."""
    others, seen = credentials(tmp_path, "other.pem").calling(), []
    nobody = ssl.create_default_context()
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE

    async def workflow(episode):
        async with episode.openai() as api, aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {api.key}"}
            for url, tls in ((api.url, nobody), (api.url, others), (api.url.replace("https", "http"), True)):
                try:
                    async with session.get(f"{url}/models", headers=headers, ssl=tls) as response:
                        seen.append(response.status)
                except aiohttp.ClientError:
                    seen.append(None)
            assert (await post(session, api, api.key, "1"))[0] == 200

    made = world(tmp_path, workflow, lambda *_: "right")
    asyncio.run(made.sample())
    assert seen == [None, None, None] and made.episodes.failures == 0


def test_a_thousand_episodes_at_once_get_their_own_answers_and_nothing_with_keys_that_have_ended(tmp_path):
    """Each over a connection of its own; the scripted engine answers with what was asked."""
    arrived, ended, done = [], [], []
    gate, calling = asyncio.Event(), asyncio.Semaphore(50)  # agents and endpoint share a core here

    async def workflow(episode):
        async with episode.openai() as api:
            arrived.append(api.key)
            if len(arrived) == EPISODES:
                gate.set()
            await gate.wait()  # all are open
            text = str(len(done))
            done.append(text)
            async with calling, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
                status, reply = await post(session, api, api.key, text)
                assert (status, reply["choices"][0]["message"]["content"]) == (200, f"{text}!")
                if len(done) % 100 == 0 and ended:
                    status, reply = await post(session, api, ended[-1], "1")
                    assert status == 401 and reply["error"]["code"] == "invalid_api_key"
        ended.append(api.key)

    def answer(prompt, _):
        text = "".join(TEXTS[token] for token in prompt)
        return text.split("user\n")[1].split("<|im_end|>")[0] + "!"

    made = world(tmp_path, workflow, answer, batch_size=EPISODES)
    began = time.monotonic()
    found = asyncio.run(made.sample(n=EPISODES))
    print(f"{EPISODES} episodes in {time.monotonic() - began:.1f} s")
    assert len(found) == len({*arrived}) == EPISODES and made.episodes.failures == 0
    assert len(made.client.calls) == EPISODES


AGENT = """
import aiohttp
async def run(episode):
    async with episode.openai() as api, aiohttp.ClientSession(headers={"Authorization": f"Bearer {api.key}"}) as client:
        assert api.url.startswith("https://127.0.0.1:") and api.credentials.path.name == "agents.pem"
        body = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
        async with client.post(f"{api.url}/chat/completions", json=body, ssl=api.tls) as reply:
            said = (await reply.json())["choices"][0]["message"]["content"]
    return float(said == "right")
"""


def test_the_workers_of_a_run_serve_with_its_credentials_for_agents(tmp_path, monkeypatch):
    (tmp_path / "calling.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    run = RunFolder(tmp_path / "run")
    run.create()
    made = World(tmp_path / "model", None, lambda *_: "right")
    rollout, made.config.machine.host = made.config.rollout, "127.0.0.1"
    rollout.workflow, rollout.turns, rollout.endpoint = "calling:run", 1, "tls"

    async def live():
        workers = EpisodeWorkers([made.config], None, run.folder)
        await workers.start()
        try:
            sampling = Sampling(made.client, rollout, made.tokenizer.stop_tokens, None, lambda: False)
            spec = EpisodeSpec(made.prompt(), 0, "group-3", 100, "train")
            return await WorkflowRunner(workers, made.scorer).sample(sampling, spec, 2)
        finally:
            await workers.close()

    found = asyncio.run(asyncio.wait_for(live(), 120))
    assert [ended.score.score for ended in found] == [1, 1]


def test_credentials_that_are_none_are_refused_before_anything_listens(tmp_path):
    (tmp_path / "agents.pem").write_text("nothing")
    made = World(tmp_path / "model", None, lambda *_: "right")
    with pytest.raises(ConfigError, match=r"agents.pem holds no key with its certificate"):
        AgentEndpoint(made.tokenizer, "127.0.0.1", Credentials(tmp_path / "agents.pem"))

"""Mistakes of a workflow, found before a run without an engine."""

import asyncio
import datetime
import os
import shlex
import sys
from dataclasses import replace

import pytest

from areal_megatron.config import ConfigError
from areal_megatron.workflows import trial_process
from areal_megatron.workflows.trial import TrialAsked, try_workflows
from tests.support.chat_world import World

FUNCTIONS = """
import asyncio, os, re, aiohttp
async def right(episode):
    for _ in range(episode.turns):
        await episode.sample()
        if (await episode.score()).score == 1: return 1.0
        episode.say("again")
    return 0.0
async def none(episode):
    print("one", flush=True)
    await episode.sample()
async def agent(episode):
    async with episode.openai() as api, aiohttp.ClientSession() as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi?"}]}
        key = {"Authorization": "Bearer " + api.key}
        async with client.post(api.url + "/chat/completions", json=body, headers=key, ssl=api.tls or True) as r:
            said = (await r.json())["choices"][0]["message"]["content"]
    if said not in ("right", "I do not know."): raise TypeError(said)
    return float(said == episode.prompt.answer)
async def matches(episode):
    return float(re.match("rig", await episode.sample()).end() == 3)
async def calls(episode): await episode.sample(1)
async def says(episode):
    await episode.sample()
    episode.say(3)
async def imports(episode): import nowhere
async def grouped(episode):
    async with asyncio.TaskGroup() as g: g.create_task(calls(episode))
async def text(episode):
    await episode.sample()
    return "right"
async def parses(episode): return int(await episode.sample())
async def asks(episode):
    heard = await episode.served("user").chat([{"role": "user", "content": await episode.sample()}])
    return float(heard == "I do not know.")
async def mistaken(episode):
    await episode.sample()
    await episode.served("usr").chat([])
async def silent(episode): return 1.0
async def exits(episode): exit(3)
async def dies(episode): os._exit(3)
async def hangs(episode): await asyncio.sleep(1000)
"""
MISTAKES = {
    "matches": "AttributeError: 'NoneType' object has no attribute 'end'",
    "calls": "TypeError: Episode.sample() takes 1 positional argument but 2 were given",
    "says": "TypeError: ",
    "imports": "ModuleNotFoundError: No module named 'nowhere'",
    "grouped": "TypeError: Episode.sample() takes",
    "mistaken": "ConfigError: no model 'usr' is served beside the policy, but user: see served.usr.path",
    "text": "WrongResult: the workflow returned 'right', expected a finite number",
}
DOUBTS = {
    "parses": "ValueError: invalid literal for int() with base 10: 'right'",
    "silent": "it ended without an answer of the model",
    "exits": "RuntimeError: it called exit(3)",
    "hangs": "it has not ended within 0.5 s",
}


@pytest.fixture
def world(tmp_path, monkeypatch):
    (tmp_path / "flows.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flows", raising=False)
    made = World(tmp_path / "model", None, None, timeout_s=1.0)
    made.config.served.user.path = str(tmp_path / "model")
    return made


def of(world, name):
    """The config of a run with this workflow."""
    return replace(world.config, rollout=replace(world.config.rollout, workflow=f"flows:{name}", turns=2))


def tried(world, name, **row):
    """What is said of a workflow, and with which error it is refused."""
    said = []
    try:
        try_workflows(of(world, name), [replace(world.prompt(), row=row or None)], said.append)
    except ConfigError as e:
        return said, str(e)
    return said, ""


def test_mistakes_end_the_launch_and_doubts_are_told(world):
    assert tried(world, "agent") == ([], "")
    said, refused = tried(world, "matches")
    line = next(k for k, text in enumerate(FUNCTIONS.splitlines(), 2) if "def matches" in text)
    assert said == [] and refused.startswith("rollout.workflow: flows:matches fails for ") and "\n" not in refused
    assert f"{MISTAKES['matches']} (" in refused and f"flows.py:{line})" in refused
    said, refused = tried(world, "dies")
    assert said == [] and "it ended its process with code 3, as it would end those of the run" in refused
    (told,), refused = tried(world, "parses")
    assert refused == "" and told.startswith("warning: rollout.workflow: flows:parses fails for ")


@pytest.mark.parametrize("odd", [object(), float("nan"), datetime.datetime(2026, 1, 2)], ids=["object", "nan", "time"])
def test_a_row_that_the_trial_cannot_show_as_it_is_makes_a_mistake_a_doubt(world, odd):
    assert tried(world, "agent", odd=odd) == ([], "")
    (told,), refused = tried(world, "matches", odd=odd)
    assert refused == "" and told.startswith("warning: rollout.workflow: flows:matches fails for ")


def test_an_agent_is_tried_with_credentials_if_the_run_asks_for_them(world):
    world.config.rollout.endpoint, world.config.machine.host = "tls", "127.0.0.1"
    assert tried(world, "agent") == ([], "")


@pytest.mark.parametrize("name", ["right", "none", "agent", "asks", *MISTAKES, *DOUBTS])
def test_what_is_a_mistake(world, tmp_path, name):
    found = asyncio.run(trial_process.tried(TrialAsked(of(world, name), world.prompt(), 0.5), tmp_path))
    first = next(k for k, text in enumerate(FUNCTIONS.splitlines(), 1) if f"def {name}(" in text)
    assert (MISTAKES | DOUBTS).get(name, "") in found.problem and bool(found.problem) == (name in {*MISTAKES, *DOUBTS})
    places = [f"flows.py:{first + more}" for more in range(3)] if name != "grouped" else ["flows.py:"]
    assert any(place in found.bug for place in places) if name in MISTAKES else not found.bug


@pytest.mark.parametrize(("says", "is_mistake"), [("hello", True), ("", True), ("exit 3", False)])
def test_a_program_that_answers_nothing_is_a_mistake(world, tmp_path, says, is_mistake):
    command = "exit 3" if says == "exit 3" else f"echo {says}"
    world.config.rollout.workflow_program = shlex.join(["sh", "-c", f"read line && {command}"])
    rollout = replace(world.config.rollout, workflow="program", turns=2)
    asked = TrialAsked(replace(world.config, rollout=rollout), world.prompt(), 10)
    found = asyncio.run(trial_process.tried(asked, tmp_path))
    assert "rollout.workflow_program ended with code" in found.problem and bool(found.bug) == is_mistake

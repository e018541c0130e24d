"""Workflows leave the event loop to others, whatever the model says: a tokenizer and a parser work on other threads."""

import asyncio
import time

import numpy as np
import pytest

from areal_megatron.engine.client import Completion
from areal_megatron.workflows import multi_turn, tool_use
from tests.support.chat_world import World, spelled
from tests.unit.workflows.test_endpoint import TOOLS, ask, user

LENGTH = 1_000_000
BUSIEST_S = 0.05
LATEST_S = 0.25
TEXTS = {
    "fences": "```python\n",
    "open boxes": "\\boxed{",
    "tool calls": "<tool_call>{}",
    "tool calls that end": "<tool_call>{}</tool_call>",
    "blanks": " ",
    "digits": "1",
}


def endless(piece):
    """Returns an answer of LENGTH tokens."""
    tokens = np.resize(np.array(spelled(piece), np.int32), LENGTH)
    zeros = np.zeros(LENGTH, np.float32)
    return Completion(tokens, zeros, zeros.astype(np.int32), "stop")


async def agent(episode):
    """Answers the model's text with the same text, and offers tools."""
    async with episode.openai() as api:
        message = await ask(api, [user("hi?")], tools=TOOLS)
        assert message["content"] is not None or message["tool_calls"]
    return 0.0


async def held(work):
    """Returns the most CPU time that the loop's thread takes between two turns of a task that sleeps while `work` runs,
    and how late its latest turn is, in seconds. A busy machine makes turns late too; a thread that keeps the
    interpreter's lock does it for as long as it works."""
    busiest, latest, running = 0.0, 0.0, asyncio.ensure_future(work)
    while not running.done():
        began, cpu = time.monotonic(), time.thread_time()
        await asyncio.sleep(0.001)
        busiest, latest = max(busiest, time.thread_time() - cpu), max(latest, time.monotonic() - began - 0.001)
    await running
    return busiest, latest


@pytest.mark.parametrize("workflow", [tool_use.run, multi_turn.run, agent], ids=["tool_use", "multi_turn", "agent"])
@pytest.mark.parametrize("name", TEXTS)
def test_an_endless_answer_does_not_hold_the_loop(tmp_path, workflow, name):
    answer = endless(TEXTS[name])
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        world = World(folder, workflow, lambda *_: answer, turns=1, max_new_tokens=LENGTH + 10, reward=lambda *_: 0.0)
        busiest, latest = asyncio.run(held(world.sample()))
        assert world.episodes.failures == 0
        if busiest < BUSIEST_S and latest < LATEST_S:
            return
    pytest.fail(f"the loop's thread worked for {busiest:.3f} s, and a turn was {latest:.3f} s late")

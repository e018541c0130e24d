"""Agents that speak the OpenAI API, over real HTTP, on a scripted engine."""

import asyncio
import json
import subprocess
import sys
import time

import aiohttp
import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from areal_megatron.workflows.agent_calls import BadCall
from areal_megatron.workflows.chat_completions import normalized, parsed_answer
from tests.support.chat_world import END, TEMPLATE, World, spelled

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def user(text):
    return {"role": "user", "content": text}


async def post(api, key=None, **body):
    headers = {"Authorization": f"Bearer {api.key if key is None else key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{api.url}/chat/completions", json=body) as response,
    ):
        return response.status, await response.json()


async def ask(api, messages, **body):
    """Returns the message with which the model answers, as it came."""
    status, reply = await post(api, messages=messages, model="policy", **body)
    assert status == 200, reply
    return reply["choices"][0]["message"]


def run(tmp_path, agent, answer, **settings):
    """Returns the trajectory of an episode with this agent, and its world."""

    async def workflow(episode):
        async with episode.openai() as api:
            return await agent(api, episode)

    world = World(tmp_path, workflow, answer, **{"turns": 10} | settings)
    (ended,) = asyncio.run(world.sample())
    return ended, world


def text_of(world, context):
    return world.tokenizer._tokenizer.decode([*context.prompt, *context.tokens.tolist()], skip_special_tokens=False)


def rendered(world, messages, tools=None):
    [text], _ = render_jinja_template([messages], tools=tools, chat_template=TEMPLATE)
    return text.removesuffix("\n")


def test_a_conversation_is_one_trajectory_of_exact_tokens(tmp_path):
    """`ab` is sampled as two tokens; what agents and their SDKs add to messages does not count."""

    async def agent(api, episode):
        messages = [{"role": "system", "content": "calm"}, user("one")]
        first = await ask(api, messages)
        assert first == {"role": "assistant", "content": "ab"}
        messages += [
            first | {"refusal": None, "annotations": []},
            {"role": "user", "content": [{"type": "text", "text": "ab"}]},
        ]
        messages.append(await ask(api, messages))
        messages.append(user("three"))
        messages.append(await ask(api, messages, temperature=0.1, max_tokens=100))

    ended, world = run(tmp_path, agent, lambda _, number: ["ab", "two", "right"][number])
    context = ended.context
    messages = [
        {"role": "system", "content": "calm"},
        user("one"),
        {"role": "assistant", "content": "ab"},
        user("ab"),
        {"role": "assistant", "content": "two"},
        user("three"),
        {"role": "assistant", "content": "right"},
    ]
    assert text_of(world, context) == rendered(world, messages)
    sampled = [token for text in ("ab", "two", "right") for token in [*spelled(text), END]]
    assert context.tokens[context.loss_mask == 1].tolist() == sampled
    assert context.versions[context.loss_mask == 1].tolist() == [0] * 3 + [1] * 4 + [2] * 6
    assert (np.diff(context.versions) >= 0).all() and set(context.versions[context.loss_mask == 0]) == {0, 1}
    assert (
        world.client.calls[2].prompt == [*context.prompt, *context.tokens.tolist()][: len(world.client.calls[2].prompt)]
    )
    assert ended.score.correct and world.judge.asked == ["right"]
    assert world.episodes.account() == {"workflow_failures": 0, "refused_calls": 0}


def test_every_answer_is_trained_once_in_the_longest_histories(tmp_path):
    """A call that continues from no answer begins another sample, as does a second call that continues from one."""

    async def agent(api, episode):
        first = await ask(api, [user("one")])
        await ask(api, [user("one"), first, user("two")])
        await ask(api, [user("summarise: one")])  # a history of its own
        branch = await ask(api, [user("one"), first, user("other")])  # continues from the first answer again
        await ask(api, [user("one"), first | {"content": "edited"}, user("x")])
        await ask(api, [user("one"), first, user("other"), branch, user("last")])
        return 1.0

    ended, world = run(tmp_path, agent, lambda _, number: f"a{number}")
    histories = [
        ["one", "a0", "two", "a1"],
        ["summarise: one", "a2"],
        ["one", "edited", "x", "a4"],
        ["one", "a0", "other", "a3", "last", "a5"],
    ]
    trained = [["a0", "a1"], ["a2"], ["a4"], ["a3", "a5"]]
    for sample, texts, own in zip(ended.samples, histories, trained, strict=True):
        roles = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
        assert text_of(world, sample) == rendered(world, roles)
        tokens = [token for text in own for token in [*spelled(text), END]]
        assert sample.tokens[sample.loss_mask == 1].tolist() == tokens
    assert ended.context is ended.samples[-1] and ended.answers == 6
    assert ended.score.reward == 5 and not world.judge.asked


def test_tools_are_offered_called_and_answered(tmp_path):
    async def agent(api, episode):
        message = await ask(api, [user("1+2")], tools=TOOLS)
        ((call,), content) = message["tool_calls"], message["content"]
        assert content == "so" and call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        final = await ask(api, [user("1+2"), message, result], tools=TOOLS)
        assert final == {"role": "assistant", "content": "right"}

    ended, world = run(tmp_path, agent, lambda _, number: ["so\n" + CALL, "right"][number])
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
    messages = [
        user("1+2"),
        {"role": "assistant", "content": "so", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "right"},
    ]
    assert text_of(world, ended.context) == rendered(world, messages, TOOLS)
    assert ended.context.answers == 2 and len(ended.samples) == 1


def test_a_template_that_refuses_the_answer_without_its_tool_calls_begins_a_sample(tmp_path):
    strict = TEMPLATE.replace(
        "{%- for call",
        "{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('what tool?') }}{% endif %}\n{%- for call",
    )

    async def agent(api, episode):
        message = await ask(api, [user("1+2")], tools=TOOLS)
        await ask(api, [user("1+2"), message, {"role": "tool", "content": "3"}], tools=TOOLS)

    ended, _ = run(tmp_path, agent, lambda _, number: [CALL, "right"][number], template=strict)
    assert [sample.answers for sample in ended.samples] == [1, 1] and ended.score.correct


def test_a_stream_carries_the_whole_answer(tmp_path):
    events = []

    async def agent(api, episode):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api.key}"}) as session:
            body = {"messages": [user("one")], "stream": True, "tools": TOOLS}
            async with session.post(f"{api.url}/chat/completions", json=body) as response:
                assert response.content_type == "text/event-stream"
                events.extend((await response.text()).strip().split("\n\n"))

    run(tmp_path, agent, lambda *_: CALL)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:2]]
    first, last = (chunk["choices"][0] for chunk in chunks)
    assert chunks[0]["usage"] is None and chunks[1]["usage"]["completion_tokens"] == len(CALL) + 1
    assert events[2] == "data: [DONE]" and first["finish_reason"] is None and last["finish_reason"] == "tool_calls"
    assert first["delta"]["tool_calls"][0]["index"] == 0 and last["delta"] == {}


def test_an_answer_that_the_agent_cuts_is_continued_with_its_end_token(tmp_path):
    async def agent(api, episode):
        _, reply = await post(api, messages=[user("one")], max_completion_tokens=3)
        assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 3
        await ask(api, [user("one"), reply["choices"][0]["message"], user("on")])

    ended, world = run(tmp_path, agent, lambda _, number: ["x…", "right"][number])
    messages = [
        user("one"),
        {"role": "assistant", "content": "xxx"},
        user("on"),
        {"role": "assistant", "content": "right"},
    ]
    assert text_of(world, ended.context) == rendered(world, messages)
    assert ended.context.loss_mask[:5].tolist() == [1, 1, 1, 0, 0] and not ended.score.truncated


def test_an_answer_that_the_agent_cuts_is_scored_as_it_stands(tmp_path):
    async def agent(api, episode):
        await ask(api, [user("one")], max_tokens=5)

    ended, world = run(tmp_path, agent, lambda *_: "right and more")
    assert world.judge.asked == ["right"] and ended.score.correct and not ended.score.truncated


MALFORMED = [
    ({}, "Object missing required field `messages`"),
    ({"messages": []}, "the last message must be one that the model is to answer"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message must be"),
    ({"messages": [{"content": "x"}]}, "a message without a role"),
    ({"messages": [{"role": "user", "content": 5}]}, "the content of a message must be text, is int"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part that is no text"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}, user("x")]},
        "tool_calls",
    ),
    ({"messages": [user("x")], "n": 2}, "n: not served here"),
    ({"messages": [user("x")], "stop": ["\n"]}, "stop: not served here"),
    ({"messages": [user("x")], "max_tokens": 0}, "the most tokens of an answer must be above 0"),
    ({"messages": [user("x")], "max_completion_tokens": 0}, "the most tokens of an answer must be above 0"),
    ({"messages": [user("x")], "functions": [{"name": "x"}]}, "functions: not served here"),
    ({"messages": [user("x"), {"role": "function", "name": "x", "content": "5"}]}, "functions: not served here"),
    (
        {
            "messages": [
                {"role": "assistant", "content": None, "function_call": {"name": "x", "arguments": "{}"}},
                user("x"),
            ]
        },
        "functions: not served here",
    ),
    ({"messages": [user("x")], "tools": [{"type": "function", "function": None}]}, "tools must be functions"),
    ({"messages": [user("x")], "tools": [{"type": "custom", "name": "x"}]}, "tools must be functions"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": None, "arguments": "{}"}}]},
                user("x"),
            ]
        },
        "tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "5"}}]}, user("x")]},
        "tool_calls",
    ),
    ({"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format: not served"),
    ({"messages": [user("raise")]}, "the chat template of"),
    ({"messages": "x"}, "Expected `array`, got `str`"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": '{"a":' * 10_000}}]},
                user("x"),
            ]
        },
        "tool_calls",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": '{"a": "\\ud800"}'}}]},
                user("x"),
            ]
        },
        "tool_calls",
    ),
]


def test_malformed_calls_are_refused_and_counted(tmp_path):
    async def agent(api, episode):
        for body, problem in MALFORMED:
            status, reply = await post(api, **body)
            assert status == 400 and problem in reply["error"]["message"], reply
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api.key}"}) as session:
            deep = b'{"messages": [{"role": "user", "content": %s}]}' % (b"[" * 10_000)
            for body in (b"{", b"\xff\xfe", b'{"messages": "\xff"}', deep):
                async with session.post(f"{api.url}/chat/completions", data=body) as response:
                    assert response.status == 400
            async with session.get(f"{api.url}/models") as response:
                assert (await response.json())["data"][0]["id"] == "policy"
        await ask(api, [user("one")])

    template = "{% if messages[0].content == 'raise' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    ended, world = run(tmp_path, agent, lambda *_: "right", template=template)
    assert ended.score.correct and world.episodes.account()["refused_calls"] == len(MALFORMED) + 4


def test_only_the_key_of_a_running_episode_opens_it(tmp_path):
    kept = []

    async def agent(api, episode):
        kept.append(api)
        assert api.url.startswith("http://127.0.0.1:")
        for key in ("", "guess", api.key[:-1], "policy"):
            status, reply = await post(api, key=key, messages=[user("one")])
            assert status == 401 and reply["error"]["code"] == "invalid_api_key"
        await ask(api, [user("one")])

    async def workflow(episode):
        async with episode.openai() as api:
            await agent(api, episode)
        status, _ = await post(api, messages=[user("one")])
        assert status == 401, "the key outlives its episode"

    world = World(tmp_path, workflow, lambda *_: "right", turns=10)
    asyncio.run(world.sample(n=2))
    assert world.episodes.failures == 0 and len({api.key for api in kept}) == 2 and len(world.client.calls) == 2
    assert world.episodes.account()["refused_calls"] == 2 * 5


def test_an_agent_that_goes_away_leaves_its_answered_calls(tmp_path):
    """The agent gives up a call, and ends while another is running."""
    started, cancelled = [], []

    async def reached(calls):
        async with asyncio.timeout(30):
            while len(calls) < 2:
                await asyncio.sleep(0.01)

    async def slow(world, prompt):
        started.append(prompt)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(prompt)
            raise

    async def workflow(episode):
        async with episode.openai() as api:
            await ask(api, [user("one")])
            original, world.client.generate = world.client.generate, lambda prompt, **_: slow(world, prompt)
            calls = [asyncio.create_task(ask(api, [user(text)])) for text in ("slow", "slower")]
            await reached(started)
            calls[0].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await reached(cancelled)
        world.client.generate = original

    world = World(tmp_path, workflow, lambda *_: "right", turns=10)
    (ended,) = asyncio.run(world.sample())
    assert ended.score.correct and ended.context.answers == 1 and len(cancelled) == 2


def test_turns_and_tokens_that_are_used_up_are_told_to_the_agent(tmp_path):
    codes = []

    async def agent(api, episode):
        messages = [user("one")]
        while True:
            status, reply = await post(api, messages=messages)
            if status != 200:
                codes.append((status, reply["error"]["code"]))
                return 1.0
            messages += [reply["choices"][0]["message"], user("more")]

    ended, _ = run(tmp_path, agent, lambda *_: "right", turns=2)
    assert ended.context.answers == 2 and ended.score.reward == 5
    ended, world = run(tmp_path, agent, lambda *_: "right", max_new_tokens=60)
    assert ended.score.truncated and ended.score.reward == -5 and len(ended.context.tokens) <= 60
    assert world.episodes.account()["refused_calls"] == 0  # docs/agents.md: others are counted
    assert codes == [(400, "turns_exceeded"), (400, "context_length_exceeded")]


def test_a_first_call_longer_than_the_prompt_leaves_fewer_tokens_for_answers(tmp_path):
    async def agent(api, episode):
        await ask(api, [user("x" * 500)])
        status, reply = await post(api, messages=[user("x" * 800)])
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"

    ended, _ = run(tmp_path, agent, lambda *_: "x…", max_new_tokens=400, truncated="scored")
    assert len(ended.context.prompt) > 400 and len(ended.context.prompt) + len(ended.context.tokens) == 800
    assert ended.score.truncated


@pytest.mark.parametrize("characters", [600_000, 6_000_000])
def test_a_long_text_is_refused_and_holds_up_nobody(tmp_path, characters):
    """The longest text that 100,000 tokens could be has 1.2 million characters; a shorter one has to be tokenized."""
    late = []

    async def tick():
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - began - 0.01)

    async def agent(api, episode):
        body = json.dumps({"messages": [user("x " * (characters // 2))]})
        ticking = asyncio.create_task(tick())
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {api.key}"}) as session,
            session.post(f"{api.url}/chat/completions", data=body) as response,
        ):
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
        ticking.cancel()
        await ask(api, [user("one")])

    ended, _ = run(tmp_path, agent, lambda *_: "right", max_new_tokens=100_000, timeout_s=100)
    assert ended.score.correct and max(late, default=0) < 0.5, max(late)


def test_an_agent_gets_few_variables_of_the_controller_and_those_that_the_config_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "private")
    monkeypatch.setenv("SEARCH_URL", "http://search")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    seen = []

    async def agent(api, episode):
        command = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
        seen.append(json.loads(await asyncio.to_thread(subprocess.check_output, command, env=api.environment)))
        await ask(api, [user("one")])

    run(tmp_path, agent, lambda *_: "right")
    run(tmp_path, agent, lambda *_: "right", environment="SEARCH_URL, NOT_SET")
    without, named = seen
    assert "HF_TOKEN" not in without and "SLURM_JOB_ID" not in without and "SEARCH_URL" not in without
    assert {"PATH", "HOME", "OPENAI_BASE_URL", "OPENAI_API_KEY"} <= without.keys()
    assert named.keys() - without.keys() == {"SEARCH_URL"} and named["SEARCH_URL"] == "http://search"


def test_an_agent_in_a_process_of_its_own_finds_the_model_in_its_environment(tmp_path):
    program = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "one"}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
                                 {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""

    async def agent(api, episode):
        command = [sys.executable, "-c", program]
        said = await asyncio.to_thread(subprocess.check_output, command, env=api.environment, text=True)
        return float(said == "right\n")

    ended, _ = run(tmp_path, agent, lambda *_: "right")
    assert ended.score.reward == 5


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        CALL.replace('{"a": 1, "b": 2}', "[1]"),
        "<tool_call>\n{nonsense}\n</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>",
        "<tool_call>" + '{"a":' * 10_000 + "}" * 10_000 + "</tool_call>",
    ],
)
def test_what_is_no_tool_call_stays_text(text):
    assert parsed_answer(text, TOOLS) == {"role": "assistant", "content": text}


def test_without_tools_nothing_is_a_tool_call():
    assert parsed_answer(CALL, [])["content"] == CALL
    assert parsed_answer(CALL, TOOLS) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
    }


def test_messages_are_compared_without_what_sdks_add():
    sent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
        ],
    }
    assert normalized(sent) == parsed_answer(CALL, TOOLS)
    with pytest.raises(BadCall):
        normalized({"role": None})

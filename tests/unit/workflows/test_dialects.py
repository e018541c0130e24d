"""Agents that speak OpenAI's Responses or Anthropic's messages, by the vendors' own packages, over real HTTP."""

import asyncio
import json

import aiohttp
import numpy as np
import pytest

from areal_megatron.engine.client import Completion
from tests.support.chat_world import END, IDS, World, spelled

THINKING = """\
{%- set last = namespace(at=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.reasoning_content %}{% set content = '<think>' + message.reasoning_content + '</think>' + content %}
{%- endif %}
{%- if message.role == 'assistant' and loop.index0 < last.at %}
{%- set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops what was thought before the last message of the user; after a tool's result the conversation goes on."""
CALLS = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
]
ANSWERS = [f"<think>I add</think>so\n{CALLS[0]}\n{CALLS[1]}", "<think>3 and 7</think>10", "<think>easy</think>right"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def anthropic_client(api):
    import anthropic  # 3,000 modules, which only the worker with these tests loads

    return anthropic.AsyncAnthropic(base_url=api.anthropic_url, api_key=api.key, max_retries=0)


def openai_client(api):
    import openai

    return openai.AsyncOpenAI(base_url=api.url, api_key=api.key, max_retries=0)


def run(tmp_path, agent, answers=ANSWERS, template=THINKING):
    """Returns the episode of this agent, and its world."""

    async def workflow(episode):
        async with episode.openai() as api:
            await agent(api)

    world = World(tmp_path, workflow, lambda _, number: answers[number], turns=10, template=template)
    (ended,) = asyncio.run(world.sample())
    return ended, world


def text_of(world, sample):
    return world.tokenizer._tokenizer.decode([*sample.prompt, *sample.tokens.tolist()], skip_special_tokens=False)


async def by_anthropic(api, stream):
    """Asks, adds by a tool, and asks again; returns the messages of the model."""
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    messages, said = [{"role": "user", "content": "1+2+3+4"}], []
    async with anthropic_client(api) as client:

        async def ask():
            body = {"model": "policy", "max_tokens": 300, "system": "calm", "messages": messages, "tools": tools}
            if stream:
                async with client.messages.stream(**body) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(**body)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
            said.append(reply)
            return reply

        counted = await client.messages.count_tokens(model="policy", messages=messages, system="calm", tools=tools)
        used = [block for block in (await ask()).content if block.type == "tool_use"]
        assert counted.input_tokens == said[0].usage.input_tokens
        sums = [
            {"type": "tool_result", "tool_use_id": one.id, "content": str(one.input["a"] + one.input["b"])}
            for one in used
        ]
        messages.append({"role": "user", "content": sums})
        await ask()
        messages.append({"role": "user", "content": [{"type": "text", "text": "sure?"}]})
        await ask()
    return said


async def by_responses(api, stream):
    tools = [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}]
    items, said = [{"role": "user", "content": "1+2+3+4"}], []
    async with openai_client(api) as client:

        async def ask():
            body = {"model": "policy", "instructions": "calm", "input": items, "tools": tools, "max_output_tokens": 300}
            if stream:
                async with client.responses.stream(**body) as events:
                    reply = await events.get_final_response()
            else:
                reply = await client.responses.create(**body)
            items.extend(item.model_dump(exclude={"parsed_arguments"}) for item in reply.output)
            said.append(reply)
            return reply

        for call in [item for item in (await ask()).output if item.type == "function_call"]:
            given = json.loads(call.arguments)
            result = {"type": "function_call_output", "call_id": call.call_id, "output": str(given["a"] + given["b"])}
            items.append(result)
        await ask()
        items.append({"role": "user", "content": [{"type": "input_text", "text": "sure?"}]})
        await ask()
    return said


def check(ended, world):
    """The first two answers are one sample, as after a tool's result the template goes on; the third begins another,
    without what was thought before. All tokens are the sampled ones."""
    first, second = ended.samples
    tools = json.dumps(
        [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
    )
    head = f"<|im_start|>system\n{tools}<|im_end|>\n<|im_start|>system\ncalm<|im_end|>\n"
    asked = head + "<|im_start|>user\n1+2+3+4<|im_end|>\n<|im_start|>assistant\n"
    results = "".join(f"<|im_start|>tool\n{number}<|im_end|>\n" for number in (3, 7))
    assert text_of(world, first) == (
        f"{asked}{ANSWERS[0]}<|im_end|>\n{results}<|im_start|>assistant\n{ANSWERS[1]}<|im_end|>"
    )
    kept = f"{asked}so\n{CALLS[0]}\n{CALLS[1]}<|im_end|>\n{results}<|im_start|>assistant\n10<|im_end|>\n"
    again = f"{kept}<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n{ANSWERS[2]}<|im_end|>"
    assert text_of(world, second) == again
    sampled = [[*spelled(ANSWERS[0]), END, *spelled(ANSWERS[1]), END], [*spelled(ANSWERS[2]), END]]
    assert [sample.tokens[sample.loss_mask == 1].tolist() for sample in ended.samples] == sampled
    assert world.episodes.account() == {"workflow_failures": 0, "refused_calls": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_anthropics_package(tmp_path, stream):
    found = []

    async def agent(api):
        found.extend(await by_anthropic(api, stream))

    check(*run(tmp_path, agent))
    calls, result, last = found
    assert [block.type for block in calls.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (calls.content[0].thinking, calls.content[1].text) == ("I add", "so")
    assert [block.input for block in calls.content[2:]] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert [reply.stop_reason for reply in found] == ["tool_use", "end_turn", "end_turn"]
    assert result.content[-1].text == "10" and last.content[-1].text == "right"
    assert calls.usage.output_tokens == len(ANSWERS[0]) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_openais_package_that_speaks_responses(tmp_path, stream):
    found = []

    async def agent(api):
        found.extend(await by_responses(api, stream))

    check(*run(tmp_path, agent))
    calls, result, last = found
    assert [item.type for item in calls.output] == ["reasoning", "message", "function_call", "function_call"]
    assert calls.output[0].content[0].text == "I add" and calls.output_text == "so"
    assert [json.loads(item.arguments) for item in calls.output[2:]] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert {reply.status for reply in found} == {"completed"}
    assert (result.output_text, last.output_text) == ("10", "right") and last.usage.output_tokens == len(ANSWERS[2]) + 1


def test_a_response_goes_on_from_an_earlier_one(tmp_path):
    import openai

    async def agent(api):
        async with openai_client(api) as client:
            first = await client.responses.create(model="policy", input="one", instructions="calm")
            more = {"previous_response_id": first.id, "instructions": "wild"}
            await client.responses.create(model="policy", input="two", **more)
            with pytest.raises(openai.BadRequestError, match="'resp_x' is no reply of this episode"):
                await client.responses.create(model="policy", input="x", previous_response_id="resp_x")

    ended, world = run(tmp_path, agent, ["<think>t</think>a", "right"])
    assert text_of(world, ended.samples[-1]) == (
        "<|im_start|>system\nwild<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nright<|im_end|>"
    )


def test_instructions_count_for_one_response(tmp_path):
    async def agent(api):
        async with openai_client(api) as client:
            first = await client.responses.create(model="policy", input="one", instructions="calm")
            await client.responses.create(model="policy", input="two", previous_response_id=first.id)

    ended, world = run(tmp_path, agent, ["a", "right"])
    assert "calm" not in text_of(world, ended.samples[-1]) and "one" in text_of(world, ended.samples[-1])


def test_a_response_goes_on_from_the_one_that_it_names(tmp_path):
    """Two answers with the same text, one of them of two tokens and the other of one."""
    answers = [[*spelled("ab"), END], [IDS["ab"], END], [*spelled("right"), END]]

    async def workflow(episode):
        async with episode.openai() as api, openai_client(api) as client:
            first = await client.responses.create(model="policy", input="one")
            await client.responses.create(model="policy", input="one")
            await client.responses.create(model="policy", input="two", previous_response_id=first.id)

    def answered(_, number):
        tokens = np.array(answers[number], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")

    world = World(tmp_path, workflow, answered, turns=10, template=THINKING)
    (ended,) = asyncio.run(world.sample())
    assert sorted(sample.answers for sample in ended.samples) == [1, 2]
    assert ended.samples[-1].tokens[:3].tolist() == answers[0]


def test_answers_with_the_same_parts_are_told_by_what_is_before_them(tmp_path):
    """The second answer is shown as the first, after another question."""

    async def agent(api):
        async with anthropic_client(api) as client:
            asked = [{"role": "user", "content": text} for text in ("one", "two")]
            body = {"model": "policy", "max_tokens": 300}
            replies = [await client.messages.create(messages=[one], **body) for one in asked]
            shown = [{"role": "assistant", "content": [b.model_dump() for b in one.content]} for one in replies]
            await client.messages.create(messages=[asked[0], shown[0], {"role": "user", "content": "x"}], **body)

    answers = ["<think>A</think>yes", "A</think>yes", "right"]
    template = "{%- for m in messages %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
    ended, world = run(tmp_path, agent, answers, template=template)
    assert text_of(world, ended.samples[-1]) == "one<|im_end|><think>A</think>yes<|im_end|>x<|im_end|>right<|im_end|>"
    assert sorted(sample.answers for sample in ended.samples) == [1, 2]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_an_agent_that_gives_up_a_call_leaves_no_sample_of_it(tmp_path, path):
    """Clients of OpenAI and Anthropic give up after a time, and ask again."""
    asked = {"messages": [{"role": "user", "content": "slow"}], "input": "slow", "max_tokens": 50}
    body = {key: asked[key] for key in (["input"] if path == "responses" else ["messages", "max_tokens"])}
    gone = asyncio.Event()

    async def workflow(episode):
        original = episode.answer

        async def slow(*arguments):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                gone.set()
                raise

        async with episode.openai() as api, aiohttp.ClientSession(headers={"x-api-key": api.key}) as session:
            episode.answer = slow
            with pytest.raises(TimeoutError):
                async with session.post(f"{api.url}/{path}", json=body, timeout=aiohttp.ClientTimeout(0.2)):
                    pass
            await asyncio.wait_for(gone.wait(), 300)
            episode.answer = original
            async with session.post(f"{api.url}/{path}", json=body) as response:
                assert response.status == 200

    world = World(tmp_path, workflow, lambda *_: "right", turns=10, template=THINKING)
    (ended,) = asyncio.run(world.sample())
    assert ended.answers == 1 and ended.score.correct


def test_what_fails_here_is_asked_once(tmp_path, monkeypatch, caplog):
    """A client repeats what is answered with 500, unless it is told not to, and each repetition would be trained."""

    async def agent(api):
        body = {"messages": [{"role": "user", "content": "x"}]}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"bearer {api.key}"}) as session,
            session.post(f"{api.url}/chat/completions", json=body) as response,
        ):
            assert (response.status, response.headers["x-should-retry"]) == (500, "false")

    def broken(*_):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr("areal_megatron.workflows.endpoint.parsed_answer", broken)
    ended, _ = run(tmp_path, agent, ["right"])
    assert ended.answers == 1 and sum("a call of an agent" in record.message for record in caplog.records) == 1


def test_a_damaged_body_is_refused(tmp_path):
    async def agent(api):
        own = {"x-api-key": api.key}
        damaged = {"data": b"no gzip", "headers": own | {"Content-Encoding": "gzip"}}
        good = {"json": {"messages": [{"role": "user", "content": "x"}]}, "headers": own, "expect100": True}
        for request, status in ((damaged, 400), (good, 200)):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{api.url}/messages", **request) as response,
            ):
                assert response.status == status

    ended, _ = run(tmp_path, agent, ["right"])
    assert ended.score.correct


def test_an_agent_that_shows_no_thinking_gets_none(tmp_path):
    """Its calls are trained as the model would see them in use."""

    async def agent(api):
        async with anthropic_client(api) as client:
            body = {"model": "policy", "max_tokens": 300, "tools": [{"name": "add", "input_schema": SCHEMA}]}
            asked = {"role": "user", "content": "1+2"}
            reply = await client.messages.create(messages=[asked], **body)
            shown = [block.model_dump() for block in reply.content if block.type != "thinking"]
            result = {"type": "tool_result", "tool_use_id": shown[-1]["id"], "content": "3"}
            messages = [asked, {"role": "assistant", "content": shown}, {"role": "user", "content": [result]}]
            await client.messages.create(messages=messages, **body)

    ended, world = run(tmp_path, agent, [f"<think>I add</think>so\n{CALLS[0]}", "3"])
    assert len(ended.samples) == 2 and "<think>" not in text_of(world, ended.samples[1])


REFUSED = {
    "messages": [
        ({"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["\n"]}, "stop_sequences: not served here"),
        ({"messages": []}, "the last message must be one that the model is to answer"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "a message without a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part that is no text"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be text or blocks"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "must be above 0"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search"}]},
            "a tool of the kind 'web_search' is not served here",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "a tool_use needs"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "", "input": {}}]}]},
            "a tool_use needs",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "a block of thinking holds no text"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": 5}]}, "tools must be functions"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "a", "description": [1]}]},
            "tools must be functions",
        ),
        ({}, "missing required field `messages`"),
    ],
    "responses": [
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format: not served here"),
        ({"input": "x", "background": True}, "background: not served here"),
        ({"input": []}, "the last message must be one that the model is to answer"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of the kind 'item_reference' is not served"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a part that is no text"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "a tool of the kind 'web_search' is not served"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{"}]}, "a function_call needs"),
        ({"input": [{"type": "function_call", "name": None, "arguments": "{}"}]}, "a function_call needs"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "[1]"}]}, "a function_call needs"),
        ({"input": "x", "max_output_tokens": 0}, "must be above 0"),
        ({}, "missing required field `input`"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_answered_is_refused_and_counted(tmp_path, path):
    async def agent(api):
        async with aiohttp.ClientSession(headers={"x-api-key": api.key}) as session:
            for body, problem in REFUSED[path]:
                async with session.post(f"{api.url}/{path}", json=body) as response:
                    assert response.status == 400 and problem in json.dumps(await response.json())
            async with session.post(f"{api.url}/{path}", json={}, headers={"x-api-key": "other"}) as response:
                assert response.status == 401 and "invalid_api_key" in await response.text()
            chat = {"messages": [{"role": "user", "content": "x"}]}
            async with session.post(f"{api.url}/chat/completions", json=chat) as response:
                assert response.status == 200

    ended, world = run(tmp_path, agent, ["right"])
    assert ended.score.correct and world.episodes.account()["refused_calls"] == len(REFUSED[path]) + 1

"""Workflows of whole runs with served models."""

from areal_megatron.workflows.episode import Episode
from tests.unit.workflows.test_endpoint import post


async def asks_a_user(episode: Episode) -> None:
    """Two turns: what the served user says is the second question. An agent's call asks it once more. A reward is to
    score the last answer."""
    first = await episode.sample()
    said = [{"role": "user", "content": episode.prompt.text}, {"role": "user", "content": first}]
    heard = await episode.served("user").chat(said, most_tokens=8)
    async with episode.openai() as api:
        status, reply = await post(api, model="user", messages=said, max_tokens=4)
    assert status == 200 and reply["usage"]["completion_tokens"] <= 4
    episode.say(heard or "?")
    await episode.sample()

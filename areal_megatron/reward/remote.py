"""Asks a service for scores: POST {"prompt", "response", "answer"}, answered by {"score": number}, optionally with a
text "feedback".

A service that is away is no reason to call an answer wrong. It is away while it cannot be connected to or says so
itself (statuses 429, 502, 503 and 504). Where it hangs up it may have been stopped, so it is asked again; but an answer
at which it hangs up three times is one that it cannot bear.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from areal_megatron.config import ConfigError
from areal_megatron.process.lateness import within
from areal_megatron.reward.no_score import ServiceAway
from areal_megatron.run.json_input import parse_json

_REPLY_BYTES = 1 << 20
_AWAY = {429, 502, 503, 504}
_HANG_UPS = 3
_PAUSE_S = 0.1
Answered = TypeVar("Answered")


def function(url: str, limit_s: float):
    """Returns the reward function that asks the service at `url` and waits up to `limit_s` seconds.

    Raises ConfigError for a bad address.
    """
    parts = None
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        named = False
    if parts is None or not named:
        raise ConfigError(f"reward.function: {url!r} is no address, expected http://host:port/path")
    if parts.username is not None:
        raise ConfigError(
            "reward.function: the address holds a user name, which everybody would read in the list of "
            "processes; put a function of yours between that reads it from a file"
        )
    return functools.partial(score, url=url, limit_s=limit_s)


def score(prompt: str, response: str, answer: str, *, url: str, limit_s: float) -> tuple[Any, Any]:
    """Returns the service's score and feedback, unchecked. Raises as `ask` does."""
    question = {"prompt": prompt, "response": response, "answer": answer}
    read, expected = (lambda reply: (reply["score"], reply.get("feedback"))), '{"score": number}'
    return asyncio.run(ask(url, question, limit_s, read, expected))


async def ask(
    url: str,
    question: dict[str, Any],
    limit_s: float,
    read: Callable[[Any], Answered],
    expected: str,
    token: str = "",
    most_bytes: int = _REPLY_BYTES,
) -> Answered:
    """Returns what `read` makes of a service's answer to a question, both JSON; it raises ValueError, KeyError,
    TypeError or IndexError for what is not `expected`. `token`: the secret that the service asks for; `most_bytes`: of
    its answer.

    Raises ServiceAway, ValueError for any other reply, and OSError (TimeoutError among them) if there is no reply.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = await _asked(url, question, limit_s, headers, most_bytes)
    try:
        return read(parse_json(body))
    except (ValueError, KeyError, TypeError, IndexError):
        raise ValueError(f"{url} answered {body[:100]!r}, expected {expected}") from None


async def _asked(url: str, question: dict[str, Any], limit_s: float, headers: dict[str, str], most_bytes: int) -> bytes:
    try:
        return bytes(await within(limit_s, _reply(url, question, headers, most_bytes)))
    except TimeoutError:
        raise TimeoutError(f"{url} did not answer within {round(limit_s, 1):g} s") from None
    except aiohttp.ClientConnectorError as e:
        raise ServiceAway(f"{url}: {e}") from None
    except aiohttp.ClientError as e:
        raise OSError(f"{url}: {e}") from None


async def _reply(url: str, question: dict[str, Any], headers: dict[str, str], most_bytes: int) -> bytearray:
    for _ in range(_HANG_UPS - 1):
        try:
            return await _post(url, question, headers, most_bytes)
        except aiohttp.ClientConnectorError:
            raise
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(_PAUSE_S)
    return await _post(url, question, headers, most_bytes)


async def _post(url: str, question: dict[str, Any], headers: dict[str, str], most_bytes: int) -> bytearray:
    body = bytearray()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        session.post(url, json=question, headers=headers, allow_redirects=False) as reply,
    ):
        if reply.status in _AWAY:
            raise ServiceAway(f"{url} answered with status {reply.status}")
        if reply.status != 200:
            raise ValueError(f"{url} answered with status {reply.status}, expected 200")
        async for chunk in reply.content.iter_any():
            body += chunk
            if len(body) > most_bytes:
                raise ValueError(f"{url} answered with more than {most_bytes} bytes")
    return body

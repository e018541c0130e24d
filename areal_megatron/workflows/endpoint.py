"""Serves the policy to agents as an OpenAI endpoint on the loopback, and records the samples of their episodes.

Every episode has a key of its own, which is valid as long as the episode lasts. If a call continues from an earlier
answer of its episode, which the chat template shows as it was, its tokens are the sampled ones, followed by the
template's continuation: text is never tokenised again. Any other call begins a sample of its own (rollout.samples).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from areal_megatron.config import ConfigError
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import EngineError
from areal_megatron.run.http_server import HttpServer
from areal_megatron.run.network import backlog
from areal_megatron.workflows.episode import Api, Episode, EpisodeOver, Interrupted
from areal_megatron.workflows.chat_completions import (
    AnsweredCall,
    BadCall,
    Call,
    CallTree,
    Message,
    normalized,
    parsed_answer,
)
from areal_megatron.workflows.transcript import Transcript

log = logging.getLogger(__name__)
MODEL = "policy"
_TOO_LONG = "context_length_exceeded"
_BODY_BYTES = 16 << 20
_OTHER_BYTES = 1 << 16
"""Bytes that a body may have beside its messages, e.g. for tools. Those may take four times their own length, for
escaped characters."""
_decode = msgspec.json.Decoder(Call).decode


@dataclass(eq=False)
class _Session:
    episode: Episode
    tokenizer: Tokenizer
    longest_text: int
    """No longer text fits into the context, whatever it says. UTF-8 bytes, and characters too."""
    answered: CallTree = field(default_factory=CallTree)
    running: set[asyncio.Task] = field(default_factory=set)


class AgentEndpoint:
    """An HTTP server that listens from the first `serve` to `close`, on a port that the system chooses."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._sessions: dict[str, _Session] = {}
        self._server = HttpServer(self._serve_request)
        self._url = ""
        self._starting = asyncio.Lock()

    @property
    def refused(self) -> int:
        """The number of calls without a valid key or with a malformed body."""
        return self._server.refusals

    @asynccontextmanager
    async def serve(self, episode: Episode) -> AsyncIterator[Api]:
        """Serves the model to the episode's agent. At the end, calls that are still running are cancelled."""
        url, key = await self._started(), secrets.token_urlsafe(24)
        longest_text = episode.longest_sequence * self._longest_token
        session = self._sessions[key] = _Session(episode, self._tokenizer, longest_text)
        try:
            yield Api(url, key, episode.agent_variables)
        finally:
            del self._sessions[key]
            for task in session.running:
                task.cancel()

    async def close(self) -> None:
        await self._server.close()

    async def _started(self) -> str:
        """Returns the address of the endpoint, which listens from now on."""
        async with self._starting:
            if not self._url:
                self._longest_token = await asyncio.to_thread(self._tokenizer.longest_token)
                await self._server.start(socket.create_server(("127.0.0.1", 0), backlog=backlog()))
                self._url = f"http://127.0.0.1:{self._server.port}/v1"
        return self._url

    async def _serve_request(self, request: web.BaseRequest) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key) if scheme == "Bearer" else None
        if session is None:
            refusal = self._refuse(401, "this route asks for the key of a running episode", "invalid_api_key")
            refusal.force_close()
            return refusal
        self._server.welcome(request)
        if (request.method, request.path) == ("POST", "/v1/chat/completions"):
            return await self._complete(session, request)
        if (request.method, request.path) == ("GET", "/v1/models"):
            model = {"id": MODEL, "object": "model", "owned_by": "areal"}
            return web.json_response({"object": "list", "data": [model]})
        return _error(404, "served are POST /v1/chat/completions and GET /v1/models", "not_found")

    async def _complete(self, session: _Session, request: web.BaseRequest) -> web.StreamResponse:
        session.running.add(task := asyncio.current_task())
        try:
            body = await _body(request, min(_BODY_BYTES, _OTHER_BYTES + 4 * session.longest_text))
            call, messages = await asyncio.to_thread(_read, body, session.longest_text)
            message, context = await _answer(session, call, messages)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, BadCall, ConfigError) as e:
            return self._refuse(400, str(e), "invalid_request")
        except EpisodeOver as e:
            return _error(400, str(e), e.code)
        except (EngineError, Interrupted) as e:
            return _error(503, f"the episode is over: {e}", "engine_failed")
        finally:
            session.running.discard(task)
        reply = _reply(message, context)
        return await _stream(request, reply) if call.stream else web.json_response(reply)

    def _refuse(self, status: int, message: str, code: str) -> web.Response:
        return self._server.refused(f"a call of an agent: {message}", _error(status, message, code))


async def _body(request: web.BaseRequest, most: int) -> bytes:
    """Returns the body of a request. Raises EpisodeOver if it has more bytes than `most`."""
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > most:
            raise EpisodeOver(f"a body of more than {most} bytes does not fit into the context", _TOO_LONG)
    return bytes(body)


def _read(body: bytes, longest_text: int) -> tuple[Call, list[Message]]:
    """Returns the call and its messages.

    Raises EpisodeOver if they are longer than `longest_text`; BadCall, MsgspecError, UnicodeDecodeError or
    RecursionError if they cannot be read.
    """
    call = _decode(body)
    call.check()
    if len(call.messages) > longest_text:
        raise EpisodeOver(f"{len(call.messages)} messages do not fit into the context", _TOO_LONG)
    messages = [normalized(message) for message in call.messages]
    if (length := sum(len(message["content"]) for message in messages)) > longest_text:
        raise EpisodeOver(f"{length} characters do not fit into the context", _TOO_LONG)
    if not messages or messages[-1]["role"] == "assistant":
        raise BadCall("the last message must be one that the model is to answer")
    return call, messages


async def _answer(session: _Session, call: Call, messages: list[Message]) -> tuple[Message, Transcript]:
    """Returns the model's message, and the transcript that ends with it.

    Raises BadCall, ConfigError, EpisodeOver, EngineError or Interrupted.
    """
    tools = call.tools
    earlier = session.answered.longest_prefix(messages, tools)
    context = await session.episode.answer(await _context(session, earlier, messages, tools), call.limit)
    message = await asyncio.to_thread(_message, session.tokenizer, context.answer, tools or [])
    before = earlier.messages if earlier else []  # the same objects, so that equal messages are held once
    session.answered.add([*before, *messages[len(before) :], message], tools, context)
    return message, context


def _message(tokenizer: Tokenizer, answer: list[int], tools: Sequence[Any]) -> Message:
    return parsed_answer(tokenizer.decode(answer), tools)


async def _context(session: _Session, earlier: AnsweredCall | None, messages: list[Message], tools: Any) -> Transcript:
    """Returns the transcript up to where the model answers. `earlier`: the call that the messages continue from.

    Text is tokenized on another thread: a megabyte takes a second.
    """
    tokenizer, episode = session.tokenizer, session.episode
    if earlier:
        answer = len(earlier.messages) - 1
        try:
            asked = await asyncio.to_thread(episode.next_prompt, earlier.context, messages, answer, tools)
        except ConfigError as e:  # the template refuses an answer without its tool calls
            log.debug("a call begins a new sample: %s", e)
        else:
            return episode.followed(earlier.context, asked)
    return episode.new_transcript(await asyncio.to_thread(tokenizer.conversation, messages, tools))


def _reply(message: Message, context: Transcript) -> dict[str, Any]:
    shown = {"role": "assistant", "content": message["content"] or None}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(8)}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in calls
        ]
    elif not shown["content"]:
        shown["content"] = ""
    sampled = len(context.answer)
    before = len(context.prompt) + context.length - sampled
    reason = "length" if not context.ended else "tool_calls" if calls else "stop"
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": shown, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled},
    }


async def _stream(request: web.BaseRequest, reply: dict[str, Any]) -> web.StreamResponse:
    """Sends the whole answer as one piece of a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    (choice,), head = reply["choices"], reply | {"object": "chat.completion.chunk"}
    calls = [call | {"index": k} for k, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    for part, reason in ((delta, None), ({}, choice["finish_reason"])):
        event = head | {"choices": [{"index": 0, "delta": part, "finish_reason": reason}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def _error(status: int, message: str, code: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})

"""Serves the policy to agents, as OpenAI and Anthropic do, and records the samples of their episodes;
also the models that are served beside it, whose answers are no samples.

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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from areal_megatron.config import ConfigError
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import EngineError
from areal_megatron.process.errors import printable
from areal_megatron.reward.served import ServedModelError
from areal_megatron.run.credentials import Credentials
from areal_megatron.run.folder import RunError
from areal_megatron.run.http_server import HttpServer
from areal_megatron.run.network import backlog, join_address
from areal_megatron.workflows.agent_calls import (
    MODEL,
    Answered,
    AnsweredCall,
    Asked,
    BadCall,
    CallTree,
    Dialect,
    Message,
)
from areal_megatron.workflows.anthropic_messages import COUNT_PATH, AnthropicMessages
from areal_megatron.workflows.chat_completions import ChatCompletions, parsed_answer
from areal_megatron.workflows.episode import Api, Episode, EpisodeOver, Interrupted
from areal_megatron.workflows.responses import Responses
from areal_megatron.workflows.transcript import Transcript

log = logging.getLogger(__name__)
_TOO_LONG = "context_length_exceeded"
_BODY_BYTES = 16 << 20
_OTHER_BYTES = 1 << 16
"""Bytes that a body may have beside its messages, e.g. for tools. Those may take four times their own length, for
escaped characters."""
_CHAT, _ANTHROPIC = ChatCompletions(), AnthropicMessages()
_DIALECTS = {dialect.path: dialect for dialect in (_CHAT, Responses(), _ANTHROPIC)}


@dataclass(eq=False)
class _Session:
    episode: Episode
    tokenizer: Tokenizer
    longest_text: int
    """No longer text fits into the context, whatever it says. UTF-8 bytes, and characters too."""
    calls: CallTree = field(default_factory=CallTree)
    running: set[asyncio.Task] = field(default_factory=set)


class AgentEndpoint:
    """An HTTP server that listens from the first `serve` to `close`, on a port that the system chooses."""

    def __init__(self, tokenizer: Tokenizer, host: str = "127.0.0.1", credentials: Credentials | None = None):
        """`host`: the address that it listens on; beyond the loopback it speaks with holders of `credentials` alone."""
        self._tokenizer, self._host, self._credentials = tokenizer, host, credentials
        self._sessions: dict[str, _Session] = {}
        self._server = HttpServer(self._serve_request, credentials.listening() if credentials else None)
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
        longest_text = episode.longest_question * self._longest_token
        session = self._sessions[key] = _Session(episode, self._tokenizer, longest_text)
        try:
            yield Api(url, key, episode.agent_variables, self._credentials)
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
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                await self._server.start(socket.create_server((self._host, 0), family=family, backlog=backlog()))
                scheme = "https" if self._credentials else "http"
                self._url = f"{scheme}://{join_address(self._host, self._server.port)}/v1"
        return self._url

    async def _serve_request(self, request: web.BaseRequest) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key if scheme.lower() == "bearer" else request.headers.get("x-api-key", ""))
        dialect = _ANTHROPIC if request.path == COUNT_PATH else _DIALECTS.get(request.path)
        if session is None:
            refusal = self._refuse(dialect, 401, "this route asks for the key of a running episode", "invalid_api_key")
            refusal.force_close()
            return refusal
        self._server.welcome(request)
        if (request.method, request.path) == ("GET", "/v1/models"):
            names = [MODEL, *session.episode.served_names]
            models = [{"id": name, "object": "model", "owned_by": "areal"} for name in names]
            return web.json_response({"object": "list", "data": models})
        if request.method != "POST" or dialect is None:
            served = ", ".join([*(f"POST {path}" for path in (*_DIALECTS, COUNT_PATH)), "GET /v1/models"])
            return _error(dialect, 404, f"served are {served}", "not_found")
        task = asyncio.current_task()
        assert task is not None
        session.running.add(task)
        try:
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0
            body = await _body(request, min(_BODY_BYTES, _OTHER_BYTES + 4 * session.longest_text))
            asked = await asyncio.to_thread(_read, dialect, body, session)
            if request.path == COUNT_PATH:
                tokens = await asyncio.to_thread(session.tokenizer.conversation, asked.messages, asked.tools)
                return web.json_response({"input_tokens": len(tokens)})
            of_model = _reply if asked.model == MODEL else _reply_of_served
            reply = await of_model(dialect, session, asked)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, BadCall, ConfigError) as e:
            return self._refuse(dialect, 400, str(e), "invalid_request")
        except EpisodeOver as e:
            return _error(dialect, 400, str(e), e.code)
        except (EngineError, Interrupted, RunError) as e:
            return _error(dialect, 503, f"the episode is over: {e}", "engine_failed")
        except ServedModelError as e:
            return _error(dialect, 503, str(e), "no_answer")
        except Exception:  # a client would repeat what is answered with 500, and each repetition is trained
            log.exception("a call of an agent")
            return _error(dialect, 500, "the call failed here, see the log", "internal_error")
        finally:
            session.running.discard(task)
        return await _stream(request, dialect, reply) if asked.stream else web.json_response(reply)

    def _refuse(self, dialect: Dialect | None, status: int, message: str, code: str) -> web.StreamResponse:
        return self._server.refused(f"a call of an agent: {message}", _error(dialect, status, message, code))


async def _body(request: web.BaseRequest, most: int) -> bytes:
    """Returns the body of a request. Raises EpisodeOver if it has more bytes than `most`, BadCall if it is damaged."""
    body = bytearray()
    try:
        async for part in request.content.iter_any():
            body += part
            if len(body) > most:
                raise EpisodeOver(f"a body of more than {most} bytes does not fit into the context", _TOO_LONG)
    except (web.RequestPayloadError, ClientPayloadError, HttpProcessingError) as e:
        raise BadCall(f"the body cannot be read: {printable(str(e), 200)}") from None
    return bytes(body)


def _read(dialect: Dialect, body: bytes, session: _Session) -> Asked:
    """Raises EpisodeOver if the messages are longer than any text may be, and what `Dialect.read` does."""
    asked = dialect.read(body, session.calls)
    if asked.model not in (names := [MODEL, *session.episode.served_names]):
        raise BadCall(f"model {asked.model[:100]!r} is not served here: ask for {' or '.join(names)}")
    if len(asked.messages) > session.longest_text:
        raise EpisodeOver(f"{len(asked.messages)} messages do not fit into the context", _TOO_LONG)
    if (length := sum(len(message["content"]) for message in asked.messages)) > session.longest_text:
        raise EpisodeOver(f"{length} characters do not fit into the context", _TOO_LONG)
    return asked


async def _reply(dialect: Dialect, session: _Session, asked: Asked) -> dict[str, Any]:
    """Returns the body of the reply. Raises BadCall, ConfigError, EpisodeOver, EngineError or Interrupted."""
    messages, tools, written = asked.messages, asked.tools, session.calls.tools_of(asked)
    earlier = session.calls.longest_prefix(asked, written)
    context = await session.episode.answer(await _context(session, earlier, messages, tools), asked.limit)
    answered, reply = await asyncio.to_thread(_answered, dialect, session.tokenizer, context, tools or [])
    before = earlier.messages if earlier else []  # the same objects, so that equal messages are held once
    call = AnsweredCall([*before, *messages[len(before) :], answered.message], written, context, asked.instructed)
    session.calls.add(call, answered, reply["id"])
    return reply


def _answered(
    dialect: Dialect, tokenizer: Tokenizer, context: Transcript, tools: Sequence[Any]
) -> tuple[Answered, dict[str, Any]]:
    sampled = len(context.answer)
    before = len(context.prompt) + context.length - sampled
    answered = Answered(parsed_answer(tokenizer.decode(context.answer), tools), context.ended, before, sampled)
    return answered, dialect.reply(answered)


async def _reply_of_served(dialect: Dialect, session: _Session, asked: Asked) -> dict[str, Any]:
    """Returns the body of the reply of a served model, which no later call continues from. Raises ServedModelError,
    Interrupted or RunError."""
    [said] = await session.episode.ask_served(asked.model, asked.messages, 1, asked.tools, asked.limit)
    message = parsed_answer(said.text, asked.tools or [])
    return dialect.reply(Answered(message, said.ended, said.before, said.sampled, asked.model))


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


async def _stream(request: web.BaseRequest, dialect: Dialect, reply: dict[str, Any]) -> web.StreamResponse:
    """Sends the whole answer as one piece of a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    with suppress(ConnectionError):  # the agent has gone
        await response.prepare(request)
        for name, held in dialect.events(reply):
            data = held if isinstance(held, str) else json.dumps(held)
            await response.write((f"event: {name}\n" * bool(name) + f"data: {data}\n\n").encode())
    return response


def _error(dialect: Dialect | None, status: int, message: str, code: str) -> web.Response:
    body = (dialect or _CHAT).error(message, code)
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})

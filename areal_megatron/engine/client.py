"""A client of one engine over HTTP: token ids in, tokens with log-probabilities and versions out; weight updates.

Answers are not streamed and come as raw arrays (answers.py). Imports no torch.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import os
import socket
import ssl
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
import numpy as np

from areal_megatron.engine import answers
from areal_megatron.engine.answers import RawAnswer, RawArray
from areal_megatron.process.errors import printable
from areal_megatron.process.lateness import now, within
from areal_megatron.run.network import KEEP_ALIVE_S, keep_alive

log = logging.getLogger(__name__)

_JSON = {"Content-Type": "application/json"}
_FIRST_LABEL = "default"  # vLLM's name of the weights it has loaded itself
_UNLIMITED = aiohttp.ClientTimeout(total=None)  # limits are lateness.py's
_HEALTH_S = 10.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_DESCRIPTORS_S = 0.5
"""How long a call waits for descriptors that other calls give back."""
NO_ROUTES = np.zeros(0, np.uint8)


class EngineError(RuntimeError):
    """An engine refused a request, failed in it or did not answer in time."""


class RequestRefused(EngineError):
    """An engine says that a request is wrong: it would refuse it again, as others would."""


@dataclass(frozen=True)
class Completion:
    """One sampled answer of R tokens."""

    tokens: np.ndarray
    """int32 [R], with the stop token where it ended with one"""
    logprobs: np.ndarray
    """float32 [R], of the distribution each token was sampled from"""
    versions: np.ndarray
    """int32 [R], the engine's policy version at each token"""
    finish_reason: str
    """`stop`, `length` (cut at max_tokens) or `abort`."""
    routes: np.ndarray = field(default_factory=lambda: NO_ROUTES)
    """uint8 or uint16 [tokens, layers, k], flat: the experts of the tokens from `routes_from` to the last but one."""
    asked: int | None = None
    """`checksum` (data/trajectory.py) of the tokens before the first one, as workflows note it."""


@dataclass(frozen=True)
class ScoredText:
    """What a model says of a text of n tokens: how likely it finds each but the first, given those before it."""

    logprobs: np.ndarray
    """float32 [n − 1], at temperature 1"""
    version: int
    """The policy version that computed them or, if it changed meanwhile, the last one."""
    likely_tokens: np.ndarray
    """int32 [n − 1, k], the likeliest tokens in the place of each, the likeliest first"""
    likely_logprobs: np.ndarray
    """float32 [n − 1, k]"""


@dataclass(frozen=True)
class Load:
    """How busy an engine is: its requests, and the tokens that it has generated."""

    running: int
    waiting: int
    generated_tokens: int
    """Since the engine started."""


@dataclass(frozen=True)
class _Turns:
    """What all clients of an event loop do only so much of in a turn of it: with thousands of engines, work that comes
    for all of them at once would hold the loop for seconds. Each holder stays for one turn."""

    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One answer: a group takes milliseconds."""
    beginning: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(16))
    """16 requests, 0.1 ms each: a weight update sends two to every engine."""


class Committed(msgspec.Struct):
    """What an engine says of a commit."""

    seconds: float
    """For how long nothing was generated."""
    prefilled_again: int = 0
    """Tokens that it has computed again since the last commit, for answers under way at earlier ones."""


_encode = msgspec.json.encode


def versions_of_tokens(spans: list[tuple[str, int, int]], tokens: int) -> np.ndarray:
    """Returns int32 [tokens], the version of each token, from (version, start, end) spans that cover them in order.

    Raises ValueError for a gap, an overlap or a label that is not a policy version.
    """
    versions, covered = np.empty(tokens, np.int32), 0
    for label, start, end in spans:
        if start != covered or end < start:
            raise ValueError(f"weight version spans {spans} do not cover {tokens} tokens in order")
        versions[start:end] = 0 if label == _FIRST_LABEL else int(label)
        covered = end
    if covered != tokens:
        raise ValueError(f"weight version spans {spans} do not cover {tokens} tokens in order")
    return versions


class EngineClient:
    """A connection to one engine. Make and use it in one event loop.

    `name` names the engine in every error, `token` is the run's secret. `timeout_s` bounds every call except
    `generate`, whose length is the model's to choose. `tls` is for an https endpoint. Every call may raise EngineError.

    Example:
        client = EngineClient("engine-0", "http://10.0.0.2:8000", token, timeout_s=60)
        await client.wait_until_healthy(timeout_s=600)
        answers = await client.generate(
            [9707, 11], n=4, max_tokens=64, temperature=1.0, stop_tokens=[151645], request_id="group-0"
        )
        print(answers[0].tokens, answers[0].logprobs, answers[0].versions)
        await client.close()
    """

    _turns: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns]] = WeakKeyDictionary()

    def __init__(self, name: str, endpoint: str, token: str, timeout_s: float, tls: ssl.SSLContext | None = None):
        self.name, self.endpoint, self.timeout_s = name, endpoint, timeout_s
        options = {"limit": 0, "ssl": tls or True, "socket_factory": _socket}  # True is aiohttp's default
        kept = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S / 4, **options)
        self._session = self._session_over(kept, token)
        """For frequent calls; keeps connections, but never as long as the engine does."""
        self._fresh = self._session_over(aiohttp.TCPConnector(force_close=True, **options), token)
        """For all others: a new connection for each. What comes over one that the engine is closing fails, and a commit
        cannot simply be sent again."""
        self._generating: set[str] = set()
        """Requests of `generate` without an answer yet."""
        self._turn = self._turns.setdefault(asyncio.get_running_loop(), _Turns())

    def _session_over(self, connector: aiohttp.TCPConnector, token: str) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {token}"}
        return aiohttp.ClientSession(headers=headers, connector=connector, timeout=_UNLIMITED)

    async def generate(
        self,
        prompt: list[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        stop_tokens: list[int],
        request_id: str,
        top_p: float = 1.0,
        top_k: int = 0,
        cache_salt: str | None = None,
        seed: int | None = None,
        routes_from: int | None = None,
        adapter: str = "",
    ) -> list[Completion]:
        """Returns n independent answers to one prompt, sampled in one request: half the engine's cost of n requests.

        Tokens are drawn from the `top_k` likeliest (0: from all), of these from the fewest that have the probability
        `top_p` together. Answers end with one of `stop_tokens` or after `max_tokens`; an aborted request returns what
        it has sampled.
        With a `seed` (workflows/sampling.py) the k-th answer is a function of weights, prompt and seed + k. With
        `routes_from` the answers carry the experts of all tokens from that index of the prompt on. `adapter`: the name
        of one of several that the engine serves.
        """
        sampling = {
            "n": n,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
            "stop_token_ids": stop_tokens,
        }
        if seed is not None:
            sampling["seed"] = seed
        if routes_from is not None:
            sampling["routed_experts_prompt_start"] = routes_from
        body = {"request_id": request_id, "token_ids": prompt, "sampling_params": sampling}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        if adapter:
            body["adapter"] = adapter
        self._generating.add(request_id)
        try:
            raw = await self._call("POST", answers.PATH, body, limit_s=math.inf, keep_alive=True)
        finally:
            self._generating.discard(request_id)
        async with self._turn.decoding:
            await asyncio.sleep(0)
            return self._completions(raw, request_id, None if routes_from is None else len(prompt) - routes_from)

    def _completions(self, raw: bytes, request_id: str, routed: int | None) -> list[Completion]:
        """`routed` is the number of prompt tokens with routes, beside the answers' tokens; None for no routes."""
        try:
            return [_completion(answer, routed) for answer in answers.decode(raw)]
        except (msgspec.MsgspecError, ValueError) as e:
            raise EngineError(f"{self.name} at {self.endpoint}: unreadable answer to {request_id}: {e}") from None

    async def score(
        self, tokens: list[int], *, request_id: str, top_k: int = 0, cache_salt: str | None = None, adapter: str = ""
    ) -> ScoredText:
        """Returns the log-probability of each token but the first, and of the `top_k` likeliest ones in its place.
        `adapter`: see `generate`."""
        sampling = {"max_tokens": 1, "logprobs": 0, "prompt_logprobs": top_k, "detokenize": False, "ignore_eos": True}
        body = {"request_id": request_id, "token_ids": tokens, "sampling_params": sampling}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        if adapter:
            body["adapter"] = adapter
        raw = await self._call("POST", answers.PATH, body)
        try:
            (answer,) = answers.decode(raw)
            (version,) = versions_of_tokens(answer.versions, 1)
            logprobs = np.frombuffer(answer.prompt_logprobs, np.float32).reshape(-1, 1 + top_k)
            found = np.frombuffer(answer.prompt_tokens, np.int32).reshape(-1, 1 + top_k)
            if not len(logprobs) == len(found) == len(tokens) - 1:
                raise ValueError(f"{len(logprobs)} log-probabilities of {len(tokens)} tokens")
        except (msgspec.MsgspecError, ValueError) as e:
            raise EngineError(f"{self.name} at {self.endpoint}: unreadable answer to {request_id}: {e}") from None
        return ScoredText(logprobs[:, 0], int(version), found[:, 1:], logprobs[:, 1:])

    async def abort(self, prefix: str) -> None:
        """Ends the requests of `generate` whose ids begin with `prefix`; each returns what it has sampled."""
        ids = [request_id for request_id in self._generating if request_id.startswith(prefix)]
        await self._call("POST", "/inference/v1/abort_requests", {"request_ids": ids})

    async def pause(self, *, clear_cache: bool) -> None:
        """Pauses running requests; with `clear_cache` they are prefilled again under the next weights."""
        await self._call("POST", f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}")

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def set_version(self, version: int) -> None:
        """Labels the weights that the engine holds with `version`; tokens sampled from here on carry it."""
        await self._call("POST", "/update_weight_version", {"new_version": str(version)})

    async def join_link(self, init_body: dict[str, Any]) -> None:
        """Has the engine join a new generation of its link (reshard.session); returns before the group has formed."""
        await self._call("POST", "/init_weight_transfer_engine", init_body)

    async def take_over(self) -> None:
        """Resets an engine that another controller has left, in whatever state, to a new engine's."""
        await self._call("POST", "/collective_rpc", {"method": "close_update"})
        await self.pause(clear_cache=True)
        await self.resume()

    async def start_update(self) -> None:
        """Has the engine receive the next weights into staging; it generates meanwhile."""
        await self._call("POST", "/start_weight_update")

    async def commit(self, version: int, *, clear_cache: bool) -> Committed:
        """Makes the staged weights live and labels them `version`, under a pause; `clear_cache` as in `pause`. After an
        error the engine stays paused."""
        raw = await self._call("POST", "/commit", {"version": str(version), "clear_cache": clear_cache})
        return msgspec.json.decode(raw, type=Committed)

    async def abandon_update(self) -> None:
        """Closes an update that failed; the engine keeps its old weights."""
        await self._call("POST", "/update_weights", {"update_info": {"action": "abort"}})
        await self._call("POST", "/finish_weight_update", {})

    async def wait_until_healthy(self, timeout_s: float) -> None:
        """Returns when the engine serves requests, at most after `timeout_s`."""
        deadline = now() + timeout_s
        while True:
            try:
                await self.check_health(_HEALTH_S)
                return
            except EngineError as e:
                if now() > deadline:
                    raise EngineError(f"{self.name} does not serve after {timeout_s:.0f} s: {e}") from None
            await asyncio.sleep(0.2)

    async def check_health(self, limit_s: float) -> None:
        """Returns if the engine says within `limit_s` that it serves requests."""
        await self._call("GET", "/health", limit_s=limit_s)

    async def load(self, timeout_s: float | None = None) -> Load:
        """Returns the engine's own gauges. A dead engine raises EngineError here as in any other call."""
        text = (await self._call("GET", "/metrics", limit_s=timeout_s, keep_alive=True)).decode()
        values = {
            "vllm:num_requests_running": 0.0,
            "vllm:num_requests_waiting": 0.0,
            "vllm:generation_tokens_total": 0.0,
        }
        for line in text.splitlines():
            name = line.partition("{")[0]
            if name in values:
                values[name] += float(line.rpartition(" ")[2])
        return Load(*(int(value) for value in values.values()))

    async def close(self) -> None:
        await self._session.close()
        await self._fresh.close()

    async def _call(
        self, method: str, path: str, body: Any = None, *, limit_s: float | None = None, keep_alive: bool = False
    ) -> bytes:
        """Returns the body of the answer. `limit_s`: instead of `timeout_s`.

        If a kept connection turns out to be closed, aiohttp repeats a GET over a new one; `generate` is the only other
        call over such a connection, and its callers repeat it. A call for which this process has no descriptor left
        says nothing about the engine, and is repeated until there is one.
        """
        limit_s = self.timeout_s if limit_s is None else limit_s
        sent = None if body is None else _encode(body)
        while True:
            async with self._turn.beginning:
                await asyncio.sleep(0)
            try:
                status, content = await within(limit_s, self._answer(method, path, sent, keep_alive))
                break
            except TimeoutError:
                raise EngineError(f"{self.name} at {self.endpoint} did not answer {method} {path} in time") from None
            except (aiohttp.ClientError, OSError) as e:
                number = getattr(e, "errno", None)
                if number not in _OUT_OF_DESCRIPTORS:
                    what = e or type(e).__name__
                    raise EngineError(f"{self.name} at {self.endpoint}: {method} {path}: {what}") from None
                _tell_of_descriptors(os.strerror(number))
            await asyncio.sleep(_DESCRIPTORS_S)
        if status != 200:
            problem = printable(" ".join(content[:500].decode(errors="replace").split()), 500)
            kind = RequestRefused if status == 400 else EngineError
            raise kind(f"{self.name} at {self.endpoint}: {method} {path}: status {status}: {problem}")
        return content

    async def _answer(self, method: str, path: str, body: bytes | None, keep_alive: bool) -> tuple[int, bytes]:
        connections = self._session if keep_alive else self._fresh
        headers = None if body is None else _JSON
        async with connections.request(method, self.endpoint + path, data=body, headers=headers) as response:
            return response.status, await response.read()


def _socket(place: tuple[Any, ...]) -> socket.socket:
    """An answer may take hours, in which nothing else comes over its connection."""
    made = socket.socket(*place[:3])
    keep_alive(made)
    return made


@functools.cache  # once a process
def _tell_of_descriptors(problem: str) -> None:
    log.error("%s: requests to engines wait for one another; raise the limit (ulimit -n)", problem)


def _completion(answer: RawAnswer, routed: int | None) -> Completion:
    # copies: an array over the bytes would keep those of the whole group
    tokens = np.frombuffer(answer.tokens, np.int32).copy()
    logprobs = np.frombuffer(answer.logprobs, np.float32).copy()
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
    routes = NO_ROUTES if routed is None else _routes(answer.routes, len(tokens), routed)
    return Completion(tokens, logprobs, versions_of_tokens(answer.versions, len(tokens)), answer.finish_reason, routes)


def _routes(raw: RawArray | None, answered: int, routed: int) -> np.ndarray:
    """Returns Completion.routes. `raw` is None if nothing was sampled."""
    if not answered:
        return NO_ROUTES
    if raw is None:
        raise ValueError("no routed_experts, although rollout.replay_routes asks for them")
    if len(raw.shape) != 3 or raw.shape[0] != routed + answered - 1 or raw.dtype not in ("u1", "u2"):
        raise ValueError(f"routed_experts {raw.dtype} {raw.shape} of {routed} and {answered} tokens")
    routes = np.frombuffer(raw.data, raw.dtype).copy()
    if len(routes) != math.prod(raw.shape):
        raise ValueError(f"routed_experts {raw.shape} in {len(raw.data)} bytes")
    return routes

"""Talks to one engine over HTTP: token ids in, tokens with log-probabilities and versions out; weight verbs.

Answers are not streamed: a decoded token then costs the controller about a microsecond. Imports no torch.
"""

from __future__ import annotations

import asyncio
import base64
import io
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
import numpy as np

from areal_megatron.reshard import session

_JSON = {"Content-Type": "application/json"}
_FIRST_LABEL = "default"  # vLLM's name of the weights it has loaded itself
NO_ROUTES = np.zeros(0, np.uint8)


class EngineError(RuntimeError):
    """An engine refused a request, failed in it or did not answer in time."""


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
    """uint8 or uint16 [tokens, layers, k], flat: the experts of the tokens that were asked for, up to the last but
    one."""


@dataclass(frozen=True)
class Load:
    running: int
    waiting: int
    generated_tokens: int
    """Since the engine started."""


# gc=False: an answer is thousands of these, which point at nothing; the collector would look at each again and again.
class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_TokenLogprob]


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str
    routed_experts: str | None = None


class _Generated(msgspec.Struct, gc=False):
    choices: list[_Choice]


class _Committed(msgspec.Struct):
    seconds: float


_decode = msgspec.json.Decoder(_Generated).decode
_logprob = attrgetter("logprob")
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""Answers that arrive together are read one in each turn of the event loop: a group of them takes milliseconds."""
_encode = msgspec.json.encode


def versions_of_tokens(spans: list[tuple[str, int, int]], tokens: int) -> np.ndarray:
    """int32 [tokens] from (version, start, end) spans that cover them in order.

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
    """Connection to one engine, which `name` names in every error. Use it in one event loop."""

    def __init__(self, name: str, endpoint: str, token: str, timeout_s: float):
        """`timeout_s` bounds every call except `generate`, whose length is the model's to choose."""
        self.name, self.endpoint, self.timeout_s = name, endpoint, timeout_s
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )
        self._generating: set[str] = set()
        """Requests of `generate` without an answer yet."""

    async def generate(
        self,
        prompt: list[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        stop_tokens: list[int],
        request_id: str,
        cache_salt: str | None = None,
        seed: int | None = None,
        routes_from: int | None = None,
    ) -> list[Completion]:
        """n independent answers to one prompt, as one request: half the engine's cost of n requests.

        Answers end with one of `stop_tokens` or after `max_tokens`; an aborted request returns what it has. With a
        `seed` (workflows/sampling.py) the k-th answer is a function of weights, prompt and seed + k. With `routes_from`
        the experts of all tokens from that place on come along. Raises EngineError.
        """
        sampling = {
            "n": n,
            "temperature": temperature,
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
        unlimited = aiohttp.ClientTimeout(total=None)
        self._generating.add(request_id)
        try:
            raw = await self._call("POST", "/inference/v1/generate", body, timeout=unlimited, keep_alive=True)
        finally:
            self._generating.discard(request_id)
        async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await asyncio.sleep(0)
            return self._completions(raw, request_id, None if routes_from is None else len(prompt) - routes_from)

    def _completions(self, raw: bytes, request_id: str, routed: int | None) -> list[Completion]:
        """`routed`: how many tokens of the prompt are to have routes, with those of the answers; None: no token."""
        try:
            return [_completion(choice, routed) for choice in _decode(raw).choices]
        except (msgspec.MsgspecError, ValueError) as e:
            raise EngineError(f"{self.name} at {self.endpoint}: unreadable answer to {request_id}: {e}") from None

    async def abort(self, prefix: str) -> None:
        """Ends the requests of `generate` whose ids begin so; each returns what it has sampled."""
        prefixed = [f"generate-tokens-{request_id}" for request_id in self._generating if request_id.startswith(prefix)]
        await self._call("POST", "/inference/v1/abort_requests", {"request_ids": prefixed})

    async def pause(self, *, clear_cache: bool) -> None:
        """Freezes running requests where they are; `clear_cache` re-prefills them under the next weights."""
        await self._call("POST", f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}")

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def set_version(self, version: int) -> None:
        """Labels the weights that the engine holds."""
        await self._call("POST", "/update_weight_version", {"new_version": str(version)})

    async def join_link(self, init_body: dict[str, Any]) -> None:
        """A new generation of the engine's link (reshard/session.py); returns before the group has formed."""
        await self._call("POST", "/init_weight_transfer_engine", init_body)

    async def take_over(self) -> None:
        """Brings an engine that another controller has left, whatever it was doing, to where a new one is."""
        await self._call("POST", "/collective_rpc", {"method": "close_update"})
        await self.pause(clear_cache=True)
        await self.resume()

    async def start_update(self) -> None:
        """The engine receives the next weights into staging while it generates."""
        await self._call("POST", "/start_weight_update")

    async def commit(self, version: int, *, clear_cache: bool) -> float:
        """Staging becomes live and is labelled `version`, under a pause of its own; `clear_cache` as in `pause`.

        Returns for how many seconds nothing was generated. An engine that raises stays paused.
        """
        raw = await self._call("POST", "/commit", session.commit_body(version, clear_cache))
        return msgspec.json.decode(raw, type=_Committed).seconds

    async def abandon_update(self) -> None:
        """Closes an update that failed; the old weights stay."""
        await self._call("POST", "/update_weights", session.ABORT_BODY)
        await self._call("POST", "/finish_weight_update", {})

    async def wait_until_healthy(self, timeout_s: float) -> None:
        """Returns when the engine serves. Raises EngineError after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                await self._call("GET", "/health", timeout=aiohttp.ClientTimeout(total=10))
                return
            except EngineError as e:
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineError(f"{self.name} does not serve after {timeout_s:.0f} s: {e}") from None
            await asyncio.sleep(0.2)

    async def load(self, timeout_s: float | None = None) -> Load:
        """The engine's own gauges; they fail like any call when the engine is dead."""
        timeout = aiohttp.ClientTimeout(total=timeout_s or self.timeout_s)
        text = (await self._call("GET", "/metrics", timeout=timeout, keep_alive=True)).decode()
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

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: aiohttp.ClientTimeout | None = None,
        keep_alive: bool = False,
    ) -> bytes:
        """The body of the answer. Only frequent calls keep their connection: vLLM drops one on which it failed."""
        headers = {} if body is None else dict(_JSON)
        if not keep_alive:
            headers["Connection"] = "close"
        try:
            async with self._session.request(
                method,
                self.endpoint + path,
                data=None if body is None else _encode(body),
                headers=headers,
                timeout=timeout or self._session.timeout,
            ) as response:
                content = await response.read()
        except TimeoutError:
            raise EngineError(f"{self.name} at {self.endpoint} did not answer {method} {path} in time") from None
        except aiohttp.ClientError as e:
            raise EngineError(f"{self.name} at {self.endpoint}: {method} {path}: {e or type(e).__name__}") from None
        if response.status != 200:
            problem = " ".join(content[:500].decode(errors="replace").split())
            raise EngineError(f"{self.name} at {self.endpoint}: {method} {path}: status {response.status}: {problem}")
        return content


def _completion(choice: _Choice, routed: int | None) -> Completion:
    tokens = np.array(choice.token_ids, np.int32)
    logprobs = np.fromiter(map(_logprob, choice.logprobs.content), np.float32, len(choice.logprobs.content))
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
    spans = [(span.version, span.start, span.end) for span in choice.weight_versions]
    routes = NO_ROUTES if routed is None else _routes(choice.routed_experts, len(tokens), routed)
    return Completion(tokens, logprobs, versions_of_tokens(spans, len(tokens)), choice.finish_reason, routes)


def _routes(encoded: str | None, answered: int, routed: int) -> np.ndarray:
    """Flat. `encoded`: base64 of a file of numpy; nothing where no token was answered."""
    if not answered:
        return NO_ROUTES
    if encoded is None:
        raise ValueError("no routed_experts, although rollout.experts asks for replay")
    routes = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if routes.ndim != 3 or len(routes) != routed + answered - 1 or routes.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"routed_experts {routes.dtype} {list(routes.shape)} of {routed} and {answered} tokens")
    return routes.reshape(-1)

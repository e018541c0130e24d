"""Serves a run to programs that use the `tinker` package: `areal tinker CONFIG [key=value …]` (docs/tinker.md).

Several models are trained side by side, each an adapter of its own that is in the trainers for one call after the
other; engines sample from the adapters' folders. The server listens on loopback, and answers whoever shows the key that
it prints. Exit code 0 after SIGINT or SIGTERM, 1 if the run fails, 2 for wrong input.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from areal_megatron.api import given, tinker_wire
from areal_megatron.api.policy import Policy, Response
from areal_megatron.api.run import RunFailed
from areal_megatron.api.tinker_losses import samples_of
from areal_megatron.api.tinker_models import Models, Samplers
from areal_megatron.api.tinker_wire import LossRequest, PromptScore
from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.models.adapter import Adapter, linear_rows, module_of
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.process.errors import first_line, printable
from areal_megatron.process.shown import guard
from areal_megatron.run.arguments import Parser, count
from areal_megatron.run.http_server import HttpServer
from areal_megatron.run.json_input import parse_json

ADAPTERS = 4
"""How many models are trained side by side, where lora.adapters says nothing else."""
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "clip_grad": 0.0}
"""What clients ask for where a program says nothing else, by the names of the config's section optimizer."""
_AT_CLIENTS = {"clip_grad": "grad_clip_norm"}
_LARGEST_BYTES = 256 * 2**20
_KEPT_REQUESTS, _KEPT_BYTES = 10_000, 2**30
"""How many of the last results, and bytes of them, can still be fetched, also once more after a lost connection."""
_WAIT_S = 20.0
_SAMPLING_THREADS = 64
_PROTO, _JSON = "application/x-protobuf", "application/json"
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "fwdbwd_max_chunk_len": 1_000_000,
    "fwdbwd_max_chunk_bytes_count": _LARGEST_BYTES // 4,
}
"""How clients are to speak: plain keys and HTTP, and a call's samples in one request, as far as they fit."""
Answer = dict[str, Any] | bytes


class TinkerServer:
    """Does with a policy what clients ask for: training in the order of the requests, sampling beside it."""

    def __init__(self, policy: Policy, names: set[str], key: str):
        """`names`: what clients may call the model; `key`: what they have to show."""
        self._policy, self._names, self._key = policy, names, key
        self._training, self._sampling = ThreadPoolExecutor(1), ThreadPoolExecutor(_SAMPLING_THREADS)
        self._requests: dict[str, asyncio.Future[Answer]] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of the results that are there, the oldest first."""
        self._models = Models(policy.config.lora.adapters)
        self._samplers = Samplers(policy.folder / "samplers")
        policy.turn_to(0, new=True)
        self._untrained = policy.save_adapter(self._samplers.new_folder())
        """An adapter as every model begins with it."""
        self._trained = _trained(policy.config)
        self._saved: dict[str, Path] = {}
        """Path of weights → checkpoint."""
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the run has failed."""
        self.http = HttpServer(self._answer)
        self._routes: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "client/config": lambda _: _CLIENT_CONFIG,
            "client/dynamic_config": lambda _: {},
            "telemetry": lambda _: {"status": "accepted"},
            "create_session": lambda _: {"type": "create_session", "session_id": self._models.begin_session()},
            "cancel_future": lambda _: {},
            "get_info": self._info,
            "create_model": self._create,
            "load_weights": self._load,
            "save_weights": self._save,
            "optim_step": self._step,
            "save_weights_for_sampler": self._publish,
            "create_sampling_session": self._sampler,
            "asample": self._sample,
        }

    def close(self) -> None:
        self._training.shutdown(wait=False, cancel_futures=True)
        self._sampling.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        given = request.headers.get("X-API-Key", "").encode(errors="surrogateescape")  # need not be UTF-8
        if not hmac.compare_digest(given, self._key.encode(errors="surrogateescape")):
            return self.http.refused(request.path, _error(401, "the key is not the one that the server has printed"))
        self.http.welcome(request)
        route = request.path.removeprefix("/api/v1/")
        try:
            if request.method == "GET":
                return _reply(self._told(route))
            body = await self._body(request)
            if route == "forward_backward":
                return _reply(self._compute(await asyncio.to_thread(tinker_wire.read_request, body)))
            asked = parse_json(body) if body else {}
            if not isinstance(asked, dict):
                raise ConfigError(f"{route}: the body is no JSON object")
            if route == "retrieve_future":
                return await self._result(str(asked.get("request_id")))
            if route == "session_heartbeat":
                if not self._models.hear(str(asked.get("session_id"))):
                    return _error(410, "the session is none of this server, or it has finished")
                return _reply({"type": "session_heartbeat"})
            if route.startswith("sessions/") and route.endswith("/finish"):
                self._models.finish(route.split("/")[1])
                return _reply({})
            if route not in self._routes:
                return _error(404, f"{request.path}: this server does not have that, see docs/tinker.md")
            return _reply(self._routes[route](asked))
        except (ConfigError, ValueError, TypeError, AttributeError, OverflowError) as e:  # of no such type or size
            return _error(422, first_line(e))
        except KeyError as e:
            return _error(422, f"{route}: lacks {e.args[0]}")

    async def _body(self, request: web.BaseRequest) -> bytes:
        parts, size = [], 0
        async for part in request.content.iter_any():
            size += len(part)
            if size > _LARGEST_BYTES:
                raise ConfigError(
                    f"{request.path}: more than {_LARGEST_BYTES // 2**20} MiB: send fewer samples at once"
                )
            parts.append(part)
        return b"".join(parts)

    def _told(self, route: str) -> Answer:
        if route == "healthz":
            return {"status": "ok"}
        if route == "get_server_capabilities":
            longest = self._policy.config.longest_sequence
            return {"supported_models": [{"model_name": n, "max_context_length": longest} for n in sorted(self._names)]}
        name = route.removeprefix("samplers/")
        if self._samplers.has(name):
            return {"sampler_id": name, "base_model": self._name, "model_path": self._samplers.path_of(name) or None}
        raise ConfigError(f"{printable(route)}: this server does not have that, see docs/tinker.md")

    async def _result(self, number: str) -> web.StreamResponse:
        if number not in self._requests:
            return _error(422, f"nothing was asked for as {printable(number)}, or it was long ago")
        self._models.hear(_session(number))
        future = self._requests[number]
        done, _ = await asyncio.wait([future], timeout=_WAIT_S)
        if not done:
            return _reply({"type": "try_again", "request_id": number, "queue_state": "active"})
        if (error := future.exception()) is None:
            return _reply(future.result())
        wrong = isinstance(error, ConfigError)
        if isinstance(error, RunFailed) and not self.failed.done():
            self.failed.set_result(str(error))
        return _reply({"error": first_line(error), "category": "user" if wrong else "server"})

    def _begin(self, number: str, pool: ThreadPoolExecutor, act: Callable[[], Answer]) -> dict[str, Any]:
        """Has this done, once, whoever asks again for the same number as after a connection that was lost."""
        if number not in self._requests:
            future = asyncio.get_running_loop().run_in_executor(pool, act)
            self._requests[number] = future
            future.add_done_callback(lambda done: self._keep(number, done))
        return {"request_id": number}

    def _keep(self, number: str, done: asyncio.Future[Answer]) -> None:
        """Notes a result, and forgets the oldest ones where they are too many. An error is told when somebody asks for
        it, which may be never."""
        answer = None if done.cancelled() or done.exception() else done.result()
        self._sizes[number] = len(answer) if isinstance(answer, bytes) else 0
        while len(self._sizes) > 1 and (len(self._sizes) > _KEPT_REQUESTS or sum(self._sizes.values()) > _KEPT_BYTES):
            oldest = next(iter(self._sizes))
            del self._sizes[oldest], self._requests[oldest]

    @property
    def _name(self) -> str:
        return min(self._names, key=len)

    def _info(self, asked: dict[str, Any]) -> Answer:
        self._models.place(asked["model_id"])
        folder = str(Path(self._policy.config.model.path).absolute())
        described = {"arch": "", "model_name": self._name, "tokenizer_id": folder}
        rank = self._policy.config.lora.rank
        return {"model_data": described, "model_id": asked["model_id"], "is_lora": True, "lora_rank": rank}

    def _check_base(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise ConfigError(f"base_model: this server has {' or '.join(sorted(self._names))}, not {printable(name)}")

    def _create(self, asked: dict[str, Any]) -> Answer:
        self._check_base(asked["base_model"])
        wanted = asked.get("lora_config") or {}
        has, rank = self._policy.config.lora.rank, wanted.get("rank")
        if rank != has:
            raise ConfigError(
                f"rank: the adapters of this server have rank {has}, not {rank}: start it with lora.rank={rank}"
            )
        own, seed = self._policy.config.seed, wanted.get("seed")
        if seed not in (None, own):
            raise ConfigError(f"seed: adapters begin with the server's, {own}, not {seed}: start it with seed={seed}")
        for part, modules in self._trained.items():
            if modules and wanted.get(part) is False:
                raise ConfigError(
                    f"{part}: the adapters of this server have {', '.join(modules)}: start it with other lora.targets"
                )
        return self._begin_model(asked, lambda name: {"type": "create_model", "model_id": name})

    def _begin_model(self, asked: dict[str, Any], act: Callable[[str], Answer]) -> Answer:
        """Has a new model begun, and something done with it, once."""
        name = f"{asked['session_id']}:train:{int(asked['model_seq_id'])}"
        if (number := f"{name}:0") in self._requests:
            return {"request_id": number}
        place, lost = self._models.begin(asked["session_id"], name)

        def begin() -> Answer:
            if lost:
                self._samplers.forget(lost)
            self._policy.turn_to(place, new=True)
            return act(name)

        return self._begin(number, self._training, begin)

    def _load(self, asked: dict[str, Any]) -> Answer:
        path = str(asked["path"])
        if path not in self._saved:
            raise ConfigError(f"{printable(path)} is no path of weights that this server has saved")
        if not asked.get("optimizer"):
            raise ConfigError(
                "load_weights: checkpoints are loaded with the optimizer's state: use the call with optimizer"
            )
        self._check_base(asked.get("base_model"))
        folder = self._saved[path]

        def load(name: str) -> Answer:
            self._policy.load(folder)
            return {"type": "load_weights", "path": path, "model_id": name}

        if asked.get("session_id"):
            return self._begin_model(asked, load)
        name = asked["model_id"]
        return self._in_turn(name, int(asked["seq_id"]), lambda: load(name))

    def _in_turn(self, name: str, number: int, act: Callable[[], Answer]) -> Answer:
        """Has something done with a model."""
        self._models.place(name)

        def turned() -> Answer:
            self._policy.turn_to(self._models.place(name))
            return act()

        return self._begin(f"{name}:{number}", self._training, turned)

    def _save(self, asked: dict[str, Any]) -> Answer:
        name, number = asked["model_id"], int(asked["seq_id"])
        path = f"tinker://{name}/weights/{asked.get('path') or number}"
        if path in self._saved and f"{name}:{number}" not in self._requests and not asked.get("overwrite"):
            raise ConfigError(f"{printable(path)} is there already: give another name, or overwrite=True")

        def save() -> Answer:
            self._saved[path] = self._policy.save()
            return {"type": "save_weights", "path": path}

        return self._in_turn(name, number, save)

    def _publish(self, asked: dict[str, Any]) -> Answer:
        name, number, label = asked["model_id"], int(asked["seq_id"]), asked.get("path")

        def publish() -> Answer:
            folder = self._policy.save_adapter(self._samplers.new_folder())
            if label is None:
                session = f"{name}:sample:{asked.get('sampling_session_seq_id')}"
                self._samplers.begin(session, "", folder, owner=name)
                return {"type": "save_weights_for_sampler", "sampling_session_id": session}
            path = f"tinker://{name}/sampler_weights/{label}"
            self._samplers.name(path, folder)
            return {"type": "save_weights_for_sampler", "path": path}

        return self._in_turn(name, number, publish)

    def _sampler(self, asked: dict[str, Any]) -> Answer:
        self._check_base(asked.get("base_model"))
        path = asked.get("model_path")
        folder = self._untrained if path is None else self._samplers.of_path(str(path))
        name = f"{asked['session_id']}:sample:{int(asked['sampling_session_seq_id'])}"
        self._samplers.begin(name, path or "", folder)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _sample(self, asked: dict[str, Any]) -> Answer:
        name, number = str(asked["sampling_session_id"]), int(asked["seq_id"])
        self._samplers.path_of(name)
        self._models.hear(_session(name))
        for key in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if asked.get(key):
                raise ConfigError(f"{key}: this server tells log-probabilities of sampled tokens and of prompts alone")
        prompt = []
        for chunk in asked["prompt"]["chunks"]:
            if chunk.get("type") != "encoded_text":
                raise ConfigError("prompt: has something else than tokens; here are texts alone")
            prompt += chunk["tokens"]
        n = given.whole(asked.get("num_samples", 1), "num_samples", 1, given.MOST_ANSWERS)
        settings = asked["sampling_params"]
        stop = settings.get("stop")
        if stop is not None and (isinstance(stop, str) or any(not isinstance(token, int) for token in stop)):
            raise ConfigError("stop: give token ids; this server does not look for texts")
        keys = {
            "max_tokens": settings.get("max_tokens") or self._policy.config.longest_sequence - len(prompt),
            "temperature": float(settings.get("temperature", 1.0)),
            "top_p": float(settings.get("top_p", 1.0)),
            "top_k": max(int(settings.get("top_k", -1)), 0),
            "stop_tokens": stop,
            "seed": settings.get("seed"),
        }
        score = self._scorer(asked, prompt)

        def sample() -> Answer:
            self._models.check(_session(name))
            with self._samplers.using(name) as adapter:
                scored = score(adapter)  # first: engines keep its prefill for the answers
                [answers] = self._policy.sample([prompt], n, adapter=adapter, **keys)
            cut = [answer.finish_reason == "length" for answer in answers]
            pairs = zip(answers, cut, strict=True)
            return tinker_wire.sample_reply([(answer.tokens, answer.logprobs, was) for answer, was in pairs], scored)

        ids = [f"{name}:{number}:{k}" for k in range(n)]
        return self._begin(f"{name}:{number}", self._sampling, sample) | {"sample_sequence_ids": ids}

    def _scorer(self, asked: dict[str, Any], prompt: list[int]) -> Callable[[Path], PromptScore | None]:
        """Returns what finds out the log-probabilities of the prompt that are asked for, of an adapter. Raises
        ConfigError."""
        length, top_k = len(prompt), given.top_k(asked.get("topk_prompt_logprobs") or 0, self._policy.config.rollout)
        last = asked.get("prompt_logprobs_last_n")
        if not asked.get("prompt_logprobs") and not top_k:
            return lambda _: None
        if last is not None and not 1 <= last < length:
            raise ConfigError(f"prompt_logprobs_last_n: {last}, and the prompt has {length} tokens")
        first = 1 if last is None else length - last

        def score(adapter: Path) -> PromptScore:
            logprobs, tokens = np.full(length, np.nan, np.float32), np.zeros((length, top_k), np.int32)
            likely = np.full(tokens.shape, np.nan, np.float32)
            if length > 1:
                [told] = self._policy.score([prompt], top_k, adapter)
                columns = (logprobs, told.logprobs), (tokens, told.likely_tokens), (likely, told.likely_logprobs)
                for column, values in columns:
                    column[first:] = values[first - 1 :]
            return PromptScore(logprobs if asked.get("prompt_logprobs") else None, tokens, likely)

        return score

    def _step(self, asked: dict[str, Any]) -> Answer:
        settings = asked.get("adam_params")
        if settings is None:
            raise ConfigError("optim_step: this server has Adam, and no other optimizer")
        optimizer = self._policy.config.optimizer
        for key in ADAM:
            own, wanted = getattr(optimizer, key), settings.get(_AT_CLIENTS.get(key, key), ADAM[key])
            if own != wanted:
                raise ConfigError(
                    f"optim_step: {key} is {own:g} here, not {wanted:g}: start with optimizer.{key}={wanted:g}"
                )
        rate = float(settings["learning_rate"])
        return self._in_turn(
            asked["model_id"], int(asked["seq_id"]), lambda: {"metrics": _numbers(self._policy.step(lr=rate))}
        )

    def _compute(self, asked: LossRequest) -> Answer:
        samples, loss, settings = samples_of(asked)
        least = self._policy.config.trainer.dp
        filling = [Response(samples[0].prompt, samples[0].tokens, samples[0].logprobs, weight=0.0)] * (
            least - len(samples)
        )

        def compute() -> Answer:
            call = self._policy.forward_backward if asked.learns else self._policy.forward
            found = call([*samples, *filling], loss, **settings)
            return tinker_wire.loss_reply(found.logprobs[: len(samples)], {"loss:sum": found.loss})

        return self._in_turn(asked.model, asked.number, compute)


def _trained(config: Config) -> dict[str, list[str]]:
    """Returns which layers have adapters, by the names that clients have for parts of a model."""
    model, found = architecture(read_config(config.model.path)), {"train_attn": [], "train_mlp": []}
    adapter = Adapter.of(config.lora)
    modules = adapter.modules(model) if adapter else []
    for row in linear_rows(model):
        part = "train_mlp" if "mlp." in row.megatron else "train_attn"
        found[part] += [name for name in map(module_of, row.tensors) if name in modules and name not in found[part]]
    return found


def _session(name: str) -> str:
    """Returns the session of a model, a sampling session or a request."""
    return name.split(":")[0]


def _numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def _reply(answer: Answer) -> web.Response:
    if isinstance(answer, bytes):
        return web.Response(body=answer, content_type=_PROTO)
    return web.Response(body=msgspec.json.encode(answer), content_type=_JSON)


def _error(status: int, problem: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode({"detail": problem}), content_type=_JSON)


def config_of(file: str, overrides: list[str]) -> Config:
    """Returns the config of a server: its Adam is set as clients set theirs, unless an override says otherwise.
    Raises ConfigError."""
    own = ["mode=driven", "checkpoint.keep_every=1", *(f"optimizer.{name}={value}" for name, value in ADAM.items())]
    if not config_file.load(file, [*own, *overrides]).lora.rank:
        raise ConfigError("lora.rank: clients of tinker train adapters: give their rank")
    config = config_file.load(file, [*own, f"lora.adapters={ADAPTERS}", *overrides])
    if config.lora.merge:
        raise ConfigError("lora.merge: engines answer clients of tinker with adapters beside the model: leave it out")
    if config.rollout.temperature != 1:
        raise ConfigError("rollout.temperature: clients of tinker take losses at temperature 1: leave it out")
    return config


async def serve(policy: Policy, names: set[str], key: str, listening: socket.socket) -> str:
    """Serves over a bound socket until a signal comes; returns "" then, or why the run has failed."""
    server, over = TinkerServer(policy, names, key), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    await server.http.start(listening)
    print(f"export TINKER_BASE_URL=http://127.0.0.1:{server.http.port} TINKER_API_KEY={key}", flush=True)
    try:
        ending = asyncio.ensure_future(over.wait())
        await asyncio.wait([ending, server.failed], return_when=asyncio.FIRST_COMPLETED)
        return server.failed.result() if server.failed.done() else ""
    finally:
        await server.http.close()
        server.close()


def _listening(port: int) -> socket.socket:
    """Returns a socket that is bound, before the run is started. Raises ConfigError."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as e:
        raise ConfigError(f"--port: {port}: {os.strerror(e.errno or 0)}") from None
    except OverflowError:
        raise ConfigError(f"--port: must be from 0 to 65535, is {port}") from None


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.api.tinker", (__doc__ or "").split("\n")[0])
    parser.add_config()
    parser.add_argument("--port", type=count, default=0, help="the port to listen on; 0, the default: a free one")
    options = parser.parse_intermixed_args(arguments)
    key = os.environ.get("TINKER_API_KEY") or f"tml-{secrets.token_urlsafe(32)}"
    try:
        config = config_of(options.config, options.overrides)
        listening = _listening(options.port)
        with closing(listening), Policy(config, quiet=False) as policy:
            names = {config.model.path, Path(config.model.path).name}
            if problem := asyncio.run(serve(policy, names, key, listening)):
                raise RunFailed(problem)
    except (ConfigError, RunFailed, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

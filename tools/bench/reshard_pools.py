"""What reshard.py measures, as its main process sees it: a model, trainer ranks, engines and their answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from areal_megatron.config import (
    Config,
    DataConfig,
    LoraConfig,
    MachineConfig,
    ModelConfig,
    ReshardConfig,
    RolloutConfig,
    TrainerConfig,
)
from areal_megatron.config.config_file import save
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.engine.server import reserve_port, server_command, server_environment
from areal_megatron.launch.supervision.orders import ON_CPU
from areal_megatron.launch.supervision.processes import Children
from areal_megatron.run.folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 16384,
}
"""A Qwen3 of 336 million parameters, 672 MB in bfloat16."""
SMALL = SIZES | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}
ANSWERS, PROMPT_TOKENS, MAX_TOKENS = 8, 64, 4000
"""Answers that an engine generates at once, tokens of their prompt, and the most tokens of an answer."""
START_TIMEOUT_S = 300.0
ENVIRONMENT = os.environ | ON_CPU | {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


def prepare(
    out: Path, sizes: dict[str, int], core_each: bool, staging: str, device: str = "cpu", lora: int = 0
) -> tuple[RunFolder, Config]:
    """Writes a model and a run folder; `core_each`: for one trainer rank and one engine rank; `lora`: lora.rank."""
    from torch import bfloat16, manual_seed
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    from tools.make_arithmetic import make_tokenizer

    logging.disable_progress_bar()
    manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=8192, tie_word_embeddings=False))
    model.to(bfloat16).save_pretrained(out / "model")
    make_tokenizer().save_pretrained(out / "model")
    config = Config(
        name="run",
        runs_dir=str(out),
        updates=1,
        model=ModelConfig(path=str(out / "model"), dtype="bfloat16"),
        lora=LoraConfig(rank=lora),
        data=DataConfig(train="none", max_prompt_tokens=PROMPT_TOKENS),
        machine=MachineConfig(device=device, peer_timeout_s=120),
        trainer=TrainerConfig() if core_each else TrainerConfig(tp=2, pp=2),
        rollout=RolloutConfig(
            first_weights="model",
            engines=1 if core_each else 2,
            tp=1 if core_each else 2,
            max_new_tokens=MAX_TOKENS,
            max_running=16,
        ),
        reshard=ReshardConfig(staging=staging, update="full"),
    )
    run = RunFolder(config.run_dir)
    run.create()
    save(config, run.config)
    return run, config


class Trainers:
    """The trainer ranks, all of which get the same orders. A context manager that starts and ends them."""

    def __init__(self, run: RunFolder, count: int, timeout_s: float, cores: list[int]):
        self._run, self._timeout_s, self.cores = run, timeout_s, cores
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task] = []
        self._answers: list[asyncio.Queue] = [asyncio.Queue() for _ in range(count)]
        self._deliveries: defaultdict[tuple[int, int], asyncio.Future] = defaultdict(asyncio.Future)

    async def __aenter__(self) -> Trainers:
        for rank in range(len(self._answers)):
            command = [
                sys.executable,
                str(Path(__file__).with_name("reshard_peers.py")),
                "--run",
                str(self._run.folder),
            ]
            with self._run.log(f"trainer-{rank}").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--index",
                    str(rank),
                    env=ENVIRONMENT,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    preexec_fn=partial(os.sched_setaffinity, 0, self.cores),
                )
            self._processes.append(process)
            self._readers.append(asyncio.create_task(self._read(rank, process.stdout)))
        return self

    async def __aexit__(self, *_) -> None:
        for process in self._processes:
            process.stdin.close()  # the order to end
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
                await process.wait()

    async def ready(self, timeout_s: float) -> None:
        await self._answer_of_each(timeout_s)

    async def order(self, name: str, **arguments: Any) -> list[Any]:
        """Gives an order and returns the answer of each rank. Raises RuntimeError if a rank has ended."""
        for process in self._processes:
            process.stdin.write(json.dumps({"order": name} | arguments).encode() + b"\n")
        return await self._answer_of_each(self._timeout_s)

    async def delivered(self, engine: int, version: int) -> float:
        """Returns the monotonic time at which rank 0 knew that the engine has this version.

        Raises RuntimeError if the engine does not get it.
        """
        message = await asyncio.wait_for(self._deliveries[engine, version], self._timeout_s)
        if message["error"]:
            raise RuntimeError(message["error"])
        return message["at"]

    async def _answer_of_each(self, timeout_s: float) -> list[Any]:
        async with asyncio.timeout(timeout_s):
            messages = [await answers.get() for answers in self._answers]
        if None in messages:
            rank = messages.index(None)
            raise RuntimeError(f"trainer-{rank} has ended; see {self._run.log(f'trainer-{rank}')}")
        return [message["answer"] for message in messages]

    async def _read(self, rank: int, output: asyncio.StreamReader) -> None:
        async for text in output:
            message = json.loads(text)
            if "answer" in message:
                self._answers[rank].put_nowait(message)
            else:
                self._deliveries[message["engine"], message["version"]].set_result(message)
        self._answers[rank].put_nowait(None)


class Engine(EngineClient):
    """A vLLM server, one of `children`, with reshard_peers.EngineWorker in its workers, and a client of it."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        index: int,
        children: Children,
        cores: list[int],
        settings: Mapping[str, str] = MappingProxyType({}),
    ):
        """`settings`: more variables of its environment."""
        port, self._reservation = reserve_port(config.machine.host)
        super().__init__(
            f"engine-{index}", f"http://{config.machine.host}:{port}", run.token, config.machine.peer_timeout_s
        )
        self.index = index
        python, _, _, *arguments = server_command(config, config.machine.host, port)
        command = [python, str(Path(__file__).with_name("reshard_engine.py")), *arguments]
        command += ["--worker-extension-cls", "tools.bench.reshard_peers.EngineWorker"]
        environment = dict(ENVIRONMENT if config.machine.is_cpu else os.environ)
        environment |= {**server_environment(config, run, cores), **settings}
        environment["PYTHONPATH"] = str(ROOT)
        self._process = children.start(self.name, command, environment, run.log(self.name), set(cores))

    async def ready(self, timeout_s: float) -> None:
        """Waits until the server is healthy. Raises RuntimeError if it ends, EngineError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._process.exit_code is None:
            try:
                return await self.wait_until_healthy(1.0)
            except EngineError:
                if time.monotonic() > deadline:
                    raise
        raise RuntimeError(f"{self.name} has ended; its log: {self._process.log}\n{self._process.last_lines()}")

    async def rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Calls a method of reshard_peers.EngineWorker in each worker; returns their answers."""
        body = {"method": method, "args": arguments, "timeout": self.timeout_s}
        return json.loads(await self._call("POST", "/collective_rpc", body))["results"]

    async def checksums(self) -> dict[str, str]:
        """Returns the sha256 of every parameter of every rank, as vLLM computes it."""
        return json.loads(await self._call("POST", "/weight_checker", {"action": "checksum"}))["checksums"]

    async def stream(self, prompt: list[int], seen: Callable[[int], None]) -> None:
        """Generates ANSWERS answers; calls `seen` with the number of each as its tokens come, one by one."""
        sampling = {"n": ANSWERS, "max_tokens": MAX_TOKENS, "detokenize": False, "ignore_eos": True}
        body = {"token_ids": prompt, "stream": True, "sampling_params": sampling}
        url, unlimited = self.endpoint + "/inference/v1/generate", aiohttp.ClientTimeout(total=None)
        async with self._session.post(url, json=body, timeout=unlimited) as response:
            response.raise_for_status()
            async for text in response.content:
                if text.startswith(b"data: {"):
                    for choice in json.loads(text[6:])["choices"]:
                        for _ in choice["token_ids"]:
                            seen(choice["index"])


@asynccontextmanager
async def pools(run: RunFolder, config: Config) -> AsyncIterator[tuple[Trainers, list[Engine]]]:
    """Starts trainer ranks and engines, waits until they are ready, and ends them. One of each share no core."""
    cores = sorted(os.sched_getaffinity(0))
    apart = config.trainer_ranks + config.rollout.engines * config.rollout.tp == 2
    with Children() as children:
        engines = [
            Engine(run, config, index, children, cores[:1] if apart else cores)
            for index in range(config.rollout.engines)
        ]
        try:
            async with Trainers(
                run, config.trainer_ranks, config.machine.peer_timeout_s, cores[-1:] if apart else cores
            ) as trainers:
                ready = (engine.ready(START_TIMEOUT_S) for engine in engines)
                await asyncio.gather(trainers.ready(START_TIMEOUT_S), *ready)
                yield trainers, engines
        finally:
            for engine in engines:
                await engine.close()


class Generation:
    """Answers that the engines are sampling, and when each token came. A context manager."""

    def __init__(self, engines: list[Engine], vocabulary: int):
        self._engines, self._vocabulary = engines, vocabulary
        self._tokens: list[list[tuple[float, int]]] = [[] for _ in engines]
        self._streams: list[asyncio.Task] = []

    async def __aenter__(self) -> Generation:
        for engine, tokens in zip(self._engines, self._tokens, strict=True):
            prompt = random.choices(range(3, self._vocabulary), k=PROMPT_TOKENS)
            self._streams.append(asyncio.create_task(engine.stream(prompt, self._recorder(tokens))))
        await self.each_has_token([0.0] * len(self._engines))
        return self

    async def __aexit__(self, *_) -> None:
        for stream in self._streams:
            stream.cancel()  # vLLM ends a request whose client has gone
        await asyncio.gather(*self._streams, return_exceptions=True)
        for engine in self._engines:
            while (load := await engine.load()).running + load.waiting:
                await asyncio.sleep(0.05)

    def rate(self, start: float, end: float) -> float:
        """Returns tokens/s of all engines together."""
        return sum(start <= when < end for tokens in self._tokens for when, _ in tokens) / (end - start)

    def context(self) -> float:
        """Returns the mean length of an answer so far in tokens, prompt included."""
        return PROMPT_TOKENS + sum(map(len, self._tokens)) / len(self._tokens) / ANSWERS

    async def each_has_token(self, since: list[float]) -> float:
        """Waits until every answer has a token after its engine's time in `since`; returns the longest wait in
        seconds."""
        took = 0.0
        for stream, tokens, start in zip(self._streams, self._tokens, since, strict=True):
            while len(first := self._first(tokens, start)) < ANSWERS:
                if stream.done():
                    raise RuntimeError(f"the answers ended: {stream.exception()}")
                await asyncio.sleep(0.01)
            took = max(took, max(first.values()) - start)
        return took

    @staticmethod
    def _first(tokens: list[tuple[float, int]], start: float) -> dict[int, float]:
        first: dict[int, float] = {}
        for when, answer in reversed(tokens):
            if when < start:
                break
            first[answer] = when
        return first

    @staticmethod
    def _recorder(tokens: list[tuple[float, int]]) -> Callable[[int], None]:
        return lambda answer: tokens.append((time.monotonic(), answer))

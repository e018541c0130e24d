"""A real engine for tests: a run folder with one vLLM server on one core."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from areal_megatron.config import Config, DataConfig, MachineConfig, ModelConfig, RolloutConfig
from areal_megatron.config.config_file import save
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.launch.supervision.orders import start_order
from areal_megatron.planning.pools import Process, Slot
from areal_megatron.process.lifeline import DESCRIPTOR
from areal_megatron.run.folder import RunFolder

START_TIMEOUT_S = 240
_HELD, _END = os.pipe()
"""Engines hold the first; the other is this process's alone."""


def make_run(folder, world, *, rollout=None, **keys):
    """A run folder with the config of a tiny run of `world` (tools/make_arithmetic.py)."""
    config = Config(
        name=folder.name,
        runs_dir=str(folder.parent),
        **{"updates": 3, "batch_size": 16} | keys,
        model=ModelConfig(path=str(world / "model"), dtype="float32"),
        data=DataConfig(train=str(world / "train.jsonl"), max_prompt_tokens=32),
        machine=MachineConfig(device="cpu", peer_timeout_s=60),
    )
    settings = {"group_size": 4, "max_new_tokens": 24, "max_running": 16, "temperature": 0.7}
    config.rollout = RolloutConfig(**settings | (rollout or {}))
    run = RunFolder(folder)
    run.create()
    save(config, run.config)
    return run, config


def lengthened(world, folder):
    """A copy of the world in `folder`, of a model that takes longer texts."""
    shutil.copytree(world, folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


def cores_of_part(part, ranks):
    """AREAL_CPUS of a part of an engine, as launchers give it: a core for each of its ranks.

    Without it each rank has as many threads as the machine has cores. On a busy machine every product then waits for
    one that has no core.
    """
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(str(cores[rank % len(cores)]) for rank in range(part * ranks, (part + 1) * ranks))


def tied(command, environment=None, **options):
    """Starts a process, in a session of its own, that sees the end of this one, whatever that was, as it would see its
    launcher's."""
    options |= {"env": os.environ | (environment or {}) | {DESCRIPTOR: str(_HELD)}, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, pass_fds=[_HELD], start_new_session=True, **options)


@contextmanager
def standin_engine(run):
    """engine-0 of `run`, where no vLLM is needed: a request has 4 answers of 24 tokens, after 0.05 s."""
    program = Path(__file__).parents[2] / "tools" / "bench" / "standin_engines.py"
    command = [sys.executable, program, "1", "0.05", "24", "4"]
    with tied(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            run.announce("engine-0", f"http://127.0.0.1:{engine.stdout.readline().strip()}/0")
            yield
        finally:
            engine.kill()


def started_engine(run, **environment):
    """engine-0 of `run`, healthy; ended afterwards."""
    command = [sys.executable, "-m", "areal_megatron.engine.server", "--run", str(run.folder), "--index", "0"]
    return _started(run, "engine-0", command, environment)


def started_beside(run, config, name):
    """The first engine of the served model `name` of `run`, with the launcher's settings, healthy; ended afterwards."""
    process = Process(f"{name}-0", name, 0, "here", (Slot("here", 0),))
    command = [sys.executable, "-m", "areal_megatron.engine.served", "--run", str(run.folder), "--index", "0"]
    return _started(run, process.name, command, start_order(config, run, process, "here").settings)


@contextmanager
def _started(run, name, command, environment):
    with (
        run.log(name).open("wb") as log,
        tied(command, environment | {"AREAL_CPUS": "0"}, stdout=log, stderr=log) as process,
    ):
        server = psutil.Process(process.pid)
        members: set[psutil.Process] = {server}
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not ask(run, is_healthy, name=name):
                assert process.poll() is None, run.log(name).read_text()[-2000:]
                assert time.monotonic() < deadline, f"no engine after {START_TIMEOUT_S} s"
                time.sleep(0.5)
            # Now, since vLLM's EngineCore is nobody's child any more if a test kills the server.
            members.update(server.children(recursive=True))
            yield process
        finally:
            grace_s = 1  # for an engine core whose server a test has killed: it may not notice
            if process.poll() is None:
                members.update(server.children(recursive=True))
                grace_s = 30
            process.terminate()
            _, left = psutil.wait_procs(members, grace_s)
            for member in left:
                member.kill()
            process.wait(10)


async def is_healthy(client):
    try:
        await client.wait_until_healthy(0)
    except EngineError:
        return False
    return True


def ask(run, call, token=None, name="engine-0"):
    """The result of `call(client)` for a client of an engine."""

    async def answer():
        client = EngineClient(name, run.endpoint(name, 30), run.token if token is None else token, 60)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(answer())

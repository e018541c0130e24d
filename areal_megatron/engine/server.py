"""One engine: becomes vLLM's own OpenAI-compatible server, unpatched, on the cores or GPUs of this process.

    python -m areal_megatron.engine.server --run RUN_DIR --index E

The launcher starts it with AREAL_CPUS (comma-separated cores) or CUDA_VISIBLE_DEVICES, and one at another site with
AREAL_SITE (network.Site): then the server speaks TLS, and only with holders of the run's credentials. It announces
`engine-E` before vLLM has loaded: clients wait for /health. Every route asks for the run's secret (engine/guard.py), so
any OpenAI client works that sends it as its API key; the policy is served as the model `policy`.

If an engine spans several nodes, each node runs one part of it, by vLLM's own multi-node executor. The first part
serves; the others only hold ranks, and meet the first at the address that it announces as AREAL_RENDEZVOUS. AREAL_PART
says which part this is, and of how many: 1/2 is the second of two.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_megatron.config import Config, ConfigError
from areal_megatron.config.config_file import load
from areal_megatron.engine import adapters, kv_cache
from areal_megatron.engine.adapters import Named
from areal_megatron.engine.environment import (
    ADAPTERS,
    CPUS,
    EMPTY,
    GPU_SHARE,
    KV_CACHE_BYTES,
    PART,
    RENDEZVOUS,
    SECRET_FILE,
)
from areal_megatron.models.adapter import VARIABLE, served
from areal_megatron.models.architecture import architecture, for_engines, read_config
from areal_megatron.process.shown import guard
from areal_megatron.run import gpu_settings
from areal_megatron.run.folder import RunFolder, from_command_line, one_line
from areal_megatron.run.network import (
    CREDENTIALS_FILE,
    KEEP_ALIVE_S,
    Site,
    address,
    join_address,
    socket_settings,
)
from areal_megatron.run.process_names import engine_name
from areal_megatron.run.versions import require

SERVED_MODEL = "policy"
PASSED_THROUGH = "--passed-through"
"""What follows it on the command line of our servers is rollout.vllm as JSON."""
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 16 * 2**20
"""Bytes: locks of processes, and the messages to the ranks of an engine."""
_SCORED = 1024
"""Tokens of a teacher's step on a GPU: of their logits vLLM holds several copies beside what it has planned."""
_TRIES = 100
"""How often ports in a row are looked for."""


@dataclass(frozen=True)
class NodePart:
    """The part of an engine that one node runs."""

    number: int = 0
    of: int = 1
    master: str = ""
    """host:port on the node of part 0, where the parts meet; empty if the engine has one part."""

    @property
    def arguments(self) -> list[str]:
        """The options of vLLM's command line that describe the part."""
        if self.of == 1:
            return []
        host, _, port = self.master.rpartition(":")
        arguments = ["--distributed-executor-backend", "mp", "--nnodes", str(self.of), "--node-rank", str(self.number)]
        return [*arguments, "--master-addr", host, "--master-port", port]


def server_command(
    config: Config,
    host: str,
    port: int,
    part: NodePart = NodePart(),
    named: Sequence[Named] = (),
    at_other_site: bool = False,
) -> list[str]:
    """Returns vLLM's command line for an engine, or its first part, that listens on host and port. `named`: adapters in
    files that it serves beside the trainers', if it gets one from them."""
    command = [sys.executable, "-m", "areal_megatron.engine.serving"]
    command += ["--model", _model(config)]
    folders = {one.name: str(Path(one.folder).absolute()) for one in named}
    if config.engines_adapt:
        first = str(Path(config.lora.start).absolute()) if config.lora.start else adapters.IN_MEMORY
        without = [name for name, model in config.lodgers.items() if not model.adapter]
        command += adapters.served({SERVED_MODEL: first} | folders, without)
    elif named:
        command += adapters.served(folders)
    else:
        command += ["--served-model-name", SERVED_MODEL]
    if config.lodgers.keys() & {*config.teachers}:
        command += teaching_arguments(config)
    command += ["--host", host, "--port", str(port)]
    command += ["--middleware", "areal_megatron.engine.sample_route.SampleRoute"]
    command += ["--middleware", "areal_megatron.engine.middleware.CommitRoute"]
    command += ["--middleware", "areal_megatron.engine.guard.TokenGuard"]  # the last is outermost
    command += ["--enable-scale-out", "--disable-uvicorn-access-log"]
    return command + engine_arguments(config, named, at_other_site) + part.arguments


def headless_command(
    config: Config, part: NodePart, named: Sequence[Named] = (), at_other_site: bool = False
) -> list[str]:
    """Returns the command line for a part that serves no requests."""
    command = [sys.executable, "-m", "areal_megatron.engine.headless", _model(config), "--headless"]
    return command + engine_arguments(config, named, at_other_site) + part.arguments


def _model(config: Config) -> str:
    return str(Path(config.model.path).absolute())


def passed_through(config: Config) -> list[str]:
    """Returns the end of the command line of our servers, from which engine/vllm_options.py reads rollout.vllm."""
    return [PASSED_THROUGH, json.dumps(config.rollout.vllm)] if config.rollout.vllm else []


def engine_arguments(config: Config, named: Sequence[Named] = (), at_other_site: bool = False) -> list[str]:
    """Returns the options of vLLM's command line that are ours to set, of each part of an engine."""
    rollout, hf_config = config.rollout, read_config(config.model.path)
    command = ["--dtype", config.model.dtype, "--tensor-parallel-size", str(rollout.tp)]
    command += ["--hf-overrides", json.dumps(overrides(config))]
    command += ["--max-model-len", str(config.longest_in_engine)]
    command += ["--max-num-seqs", str(rollout.max_running), "--seed", str(config.seed)]
    backend = {"full": "areal", "streamed": "areal-streamed"}[config.reshard.staging]
    if backend == "areal-streamed" and config.may_send_changes(at_other_site):
        backend = "areal-changes"
    command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    command += ["--worker-extension-cls", "areal_megatron.reshard.receive.ReceiverExtension"]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    # Files that other programs left beside the model's own would decide otherwise.
    command += ["--config-format", "hf", "--load-format", "dummy" if config.engines_start_empty else "hf"]
    if rollout.expert_parallel:
        command += ["--enable-expert-parallel"]
    if rollout.replay_routes:
        command += ["--enable-return-routed-experts"]
    own = served(config, hf_config)
    if together := [*([own] * config.lora.adapters if own else []), *(one.adapter for one in named)]:
        command += adapters.slots(together, architecture(hf_config), config.is_driven).arguments
    if config.machine.is_cpu:
        command += cpu_arguments(config, hf_config)
    else:
        command += ["--moe-backend", "triton"]  # leaves experts as they are loaded; updates are written into them
    return command


def cpu_arguments(config: Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Returns the options of vLLM's command line that an engine needs on CPU."""
    size = kv_cache.cpu_bytes(config, hf_config, kv_cache.machine_bytes())
    command = ["--enforce-eager", "--kv-cache-memory-bytes", str(size)]
    if architecture(hf_config).dimensions.latent:
        # The other kernel of CPUs keeps no weights that an update could be written into.
        command += ["--attention-backend", "CPU_MLA"]
    else:
        command += ["--block-size", str(kv_cache.CPU_BLOCK_TOKENS)]
    # A step that prefills part of a prompt rewinds its random generator, which is impossible on CPU.
    command += ["--no-enable-chunked-prefill"]
    if architecture(hf_config).dimensions.linear:
        command += ["--no-enable-prefix-caching"]  # which needs chunks where layers keep a state
    if config.rollout.tp == 1:
        command += ["--distributed-executor-backend", "uni"]
    return command


def teaching_arguments(config: Config) -> list[str]:
    """Returns the options of vLLM's command line for an engine of a model that says how likely it finds tokens, if the
    run asks for that."""
    penalty = config.ppo.penalty
    words = ["--max-logprobs", str(penalty.top_k)] if penalty.top_k else []
    scores = penalty.asks_teacher and not config.machine.is_cpu
    return [*words, "--max-num-batched-tokens", str(_SCORED)] if scores else words


def overrides(config: Config) -> dict[str, Any]:
    """What vLLM is to read in config.json."""
    return {"head_dtype": config.model.head_dtype} | for_engines(config.model.path)


def memory_arguments(environment: Mapping[str, str]) -> list[str]:
    """Returns the options of vLLM's command line for an engine that shares its GPUs with trainers: nothing in the
    environment of any other.

    vLLM refuses to start unless that share is free, which it is at any time while the trainers keep to theirs. The size
    of the KV cache is given, because trainers that allocate and release memory meanwhile would falsify what vLLM
    measures. So the forward pass must not be larger than the one that was planned.
    """
    if GPU_SHARE not in environment:
        return []
    sizes = ["--gpu-memory-utilization", environment[GPU_SHARE], "--kv-cache-memory-bytes", environment[KV_CACHE_BYTES]]
    return [*sizes, "--max-num-batched-tokens", str(kv_cache.BATCHED_TOKENS)]  # unless rollout.vllm says


def server_environment(config: Config, run: RunFolder, cpus: list[int], parts: int = 1) -> dict[str, str]:
    """Returns the variables that vLLM needs beside this process's own. `cpus` are the cores of this one of `parts`."""
    environment = {
        SECRET_FILE: str(run.folder / "secret"),
        "VLLM_SERVER_DEV_MODE": "1",  # adds the routes of pause, resume and weight transfer
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.rollout.start_timeout_s)),  # its own limit is 600 s
    }
    if config.engines_start_empty:
        environment[EMPTY] = "1"
    if config.engines_adapt:
        adapter = served(config, read_config(config.model.path))
        assert adapter is not None
        environment[VARIABLE] = json.dumps(adapter.told)
    if config.rollout.replay_routes:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the one that returns routes
    if not config.machine.is_cpu:
        return environment
    environment["TORCHDYNAMO_DISABLE"] = "1"  # the first request with log-probabilities would compile for seconds
    tp = config.rollout.tp
    if tp == 1:
        # The worker inside EngineCore: no third process to import and feed. vLLM allows it on CPU only with this
        # variable, because its own thread binding needs a child process; here EngineCore binds itself (plugin.py).
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["OMP_NUM_THREADS"] = str(len(cpus))
    else:
        here = tp // parts
        shares = [cpus[rank * len(cpus) // here : (rank + 1) * len(cpus) // here] or cpus for rank in range(here)]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return environment


def reserve_port(host: str, port: int = 0) -> tuple[int, socket.socket]:
    """Returns a port, a free one if none is given, and a socket that keeps it until vLLM binds it: the socket survives
    exec, never listens. Raises OSError if the port is not to be had."""
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((host, port))
        reservation.set_inheritable(True)
        return reservation.getsockname()[1], reservation
    except OSError:
        reservation.close()
        raise


def reserve_ports(host: str, first: int, count: int) -> tuple[int, list[socket.socket]]:
    """Returns the first of `count` ports in a row and what keeps them, as `reserve_port` does; `first` 0: wherever they
    are free. Raises OSError."""
    for left in reversed(range(1 if first else _TRIES)):
        with contextlib.ExitStack() as stack:
            try:
                port, reservation = reserve_port(host, first)
                kept = [stack.enter_context(reservation)]
                kept += [stack.enter_context(reserve_port(host, port + n)[1]) for n in range(1, count)]
            except OSError:
                if not left:
                    raise
            else:
                stack.pop_all()
                return port, kept
    raise AssertionError("a try returns or raises")


def own_cores() -> list[int]:
    """Returns the cores that the launcher gave this engine to compute on (plugin.py keeps it there on CPU)."""
    allowed = os.environ.get(CPUS) or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return [int(cpu) for cpu in allowed.split(",")]


def check_shared_memory(folder: Path = SHARED_MEMORY, least: int = LEAST_SHARED) -> None:
    """Raises ConfigError if this machine has less than `least` bytes of shared memory left, without which vLLM's
    processes fail before they can say why. A machine without the folder is not looked at."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if free < least:
        raise ConfigError(
            f"{folder} on {socket.gethostname()} has {free / 2**20:.1f} MiB free, an engine needs {least / 2**20:.0f}: "
            "remove what ended programs left there, or mount it larger (docker: --shm-size)"
        )


def url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://{join_address(host, port)}"


@one_line()
def main() -> None:
    guard()
    run, index = from_command_line("areal_megatron.engine.server")
    config = load(run.config)
    require("rollout", config)
    check_shared_memory()
    site = Site.of(os.environ)
    cpus, host = own_cores(), address(site.listens if site else config.machine.host)
    number, parts = map(int, os.environ.get(PART, "0/1").split("/"))
    named = adapters.read(os.environ.get(ADAPTERS, ""))
    if number:
        part = NodePart(number, parts, run.endpoint(os.environ[RENDEZVOUS], config.machine.peer_timeout_s))
        command = headless_command(config, part, named, bool(site))
    else:
        port, _reservations = reserve_ports(host, *((site.port, 1 + config.rollout.tp) if site else (0, 1)))
        site = site and site._replace(port=port)
        part = NodePart()
        if parts > 1:
            master_port, _master_reservation = reserve_port(host)
            part = NodePart(0, parts, f"{host}:{master_port}")
            run.announce(os.environ[RENDEZVOUS], part.master)
        command = server_command(config, host, port, part, named, bool(site))
        run.announce(engine_name(index), url(site.host, port, "https") if site else url(host, port))
    command += memory_arguments(os.environ) + passed_through(config)
    gpu_settings.set_defaults()
    if not config.machine.is_cpu:
        gpu_settings.check(os.environ)
    environment = socket_settings(host) | os.environ | server_environment(config, run, cpus, parts)
    if site:
        environment |= site.settings | {CREDENTIALS_FILE: str(run.credentials.path)}
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()

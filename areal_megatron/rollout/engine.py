"""One engine: becomes vLLM's own OpenAI-compatible server, unpatched, on the cores or GPUs of this process.

    python -m areal_megatron.rollout.engine --run RUN_DIR --index E

The launcher starts it with AREAL_CPUS (comma-separated cores) or CUDA_VISIBLE_DEVICES. It announces
`engine-E` before vLLM has loaded: whoever talks to it waits for /health. Every route asks for the run's
secret (rollout/guard.py), so any OpenAI client works that sends it as its API key; the policy is served
as the model `policy`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from areal_megatron.address import address, socket_settings
from areal_megatron.config import Config, load
from areal_megatron.reshard.architectures import read_config
from areal_megatron.rollout import kv_cache
from areal_megatron.run import Run, from_command_line

SERVED_MODEL = "policy"


def server_command(config: Config, host: str, port: int) -> list[str]:
    """vLLM's command line for one engine of `config` that listens on an address."""
    rollout = config.rollout
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(Path(config.model.path).absolute()), "--served-model-name", SERVED_MODEL]
    command += ["--host", host, "--port", str(port)]
    command += ["--middleware", "areal_megatron.rollout.guard.Guard"]
    command += ["--dtype", config.model.dtype, "--tensor-parallel-size", str(rollout.tp)]
    command += ["--max-model-len", str(config.data.max_prompt_tokens + rollout.max_new_tokens)]
    command += ["--max-num-seqs", str(rollout.max_running), "--seed", str(config.seed)]
    backend = {"full": "areal", "streamed": "areal-streamed"}[config.reshard.staging]
    command += ["--weight-transfer-config", json.dumps({"backend": backend}), "--enable-scale-out"]
    command += ["--worker-extension-cls", "areal_megatron.reshard.receive.Session"]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--disable-uvicorn-access-log"]
    if rollout.expert_parallel:
        command += ["--enable-expert-parallel"]
    if runs_on_cpu(config):
        size = kv_cache.cpu_bytes(config, read_config(config.model.path), kv_cache.machine_bytes())
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(size)]
        # A step that prefills a part of a prompt takes back the draw of its seed, which a CPU generator cannot do.
        command += ["--no-enable-chunked-prefill"]
        if rollout.tp == 1:
            command += ["--distributed-executor-backend", "uni"]
    else:
        command += ["--moe-backend", "triton"]  # keeps experts as they are loaded, which updates rely on
    return command


def server_environment(config: Config, run: Run, cpus: list[int]) -> dict[str, str]:
    """What vLLM reads from its environment, in addition to this process's own."""
    environment = {
        "AREAL_SECRET_FILE": str(run.folder / "secret"),
        "VLLM_SERVER_DEV_MODE": "1",  # opens the routes of pause, resume and weight transfer
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # The client keeps its connections; a server that closes idle ones would race with its next request.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400",
    }
    if not runs_on_cpu(config):
        return environment
    environment["TORCHDYNAMO_DISABLE"] = "1"  # the first request with log-probabilities would compile for seconds
    tp = config.rollout.tp
    if tp == 1:
        # The worker inside EngineCore: no third process to import and feed. vLLM allows it on CPU only with this
        # variable, because its own thread binding needs a child process; here the affinity is set before exec.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["OMP_NUM_THREADS"] = str(len(cpus))
    else:
        shares = [cpus[rank * len(cpus) // tp : (rank + 1) * len(cpus) // tp] or cpus for rank in range(tp)]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return environment


def runs_on_cpu(config: Config) -> bool:
    device = config.machine.device
    return device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


def reserve_port(host: str) -> tuple[int, socket.socket]:
    """A free port, kept from others until vLLM binds it: the socket lives through exec but never listens."""
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((host, 0))
    reservation.set_inheritable(True)
    return reservation.getsockname()[1], reservation


def main() -> None:
    run, index = from_command_line("areal_megatron.rollout.engine")
    config = load(run.config)
    allowed = os.environ.get("AREAL_CPUS") or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    cpus = [int(cpu) for cpu in allowed.split(",")]
    if runs_on_cpu(config):
        os.sched_setaffinity(0, cpus)
    host = address(config.machine.host)
    port, _reservation = reserve_port(host)
    command = server_command(config, host, port)
    run.announce(f"engine-{index}", f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    environment = socket_settings(config.machine.host) | os.environ | server_environment(config, run, cpus)
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()

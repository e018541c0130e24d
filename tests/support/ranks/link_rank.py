"""A rank of a link as a process of its own, driven by JSON lines; test_transport.py forks it.

Trainer ranks have the parameters that the oracle gives Megatron's ranks; engine ranks start from zeros in vLLM's
shapes. Engine 0 has `full` staging, engine 1 `streamed`.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file

from areal_megatron.config import ReshardConfig
from areal_megatron.observe.timeline import Timeline
from areal_megatron.reshard.carriers.base import LinkError
from areal_megatron.reshard.carriers.streams import Listener
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.outlet import TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.reception import Inlet, Reception
from areal_megatron.reshard.session import LinkInfo, LinkRef
from areal_megatron.reshard.staging import Full, Shard, Streamed
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.reshard.transport import Link
from tests.support.reshard_oracle import megatron_shard, vllm_parameters


def say(**event) -> None:
    os.write(1, (json.dumps(event) + "\n").encode())  # whole lines, from any thread


def fingerprint(parameters) -> dict[str, str]:
    return {name: hashlib.sha256(p.numpy().tobytes()).hexdigest() for name, p in parameters.items()}


def trainer(setup) -> None:
    sizes = MegatronSizes(**setup["sizes"])

    def shard(folder: str):
        tensors = load_file(Path(folder) / "model.safetensors")
        return megatron_shard(tensors, setup["hf_config"], sizes, setup["rank"])

    # Ranks 0 and 1 have the engines' dtype and send large parameters uncast; the others must cast them.
    own = torch.bfloat16 if setup["rank"] < 2 else torch.float32
    live = {name: tensor.to(own, copy=True) for name, tensor in shard(setup["folder"]).items()}
    publisher = Publisher(
        TrainerRank(
            parameters=lambda: live,
            planner=Planner(setup["hf_config"], sizes, EngineSizes(tp=setup["engine_tp"]), setup["bucket_elements"]),
            rank=setup["rank"],
            dtype=getattr(torch, setup["dtype"]),
            store=setup["store"],
            on_delivered=lambda engine, generation, version, seconds, received, error: say(
                engine=engine,
                generation=generation,
                version=version,
                bytes=received.bytes,
                changed=received.changed,
                error=error,
            ),
            timeline=Timeline(Path(setup["timeline"]), f"trainer-{setup['rank']}"),
            reshard=ReshardConfig(timeout_s=setup["timeout_s"], update=setup["update"]),
        )
    )
    say(up=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "publish" in command:
            for name, tensor in shard(command["folder"]).items():
                live[name].copy_(tensor)
            publisher.publish(command["publish"], [LinkRef(*link) for link in command["links"]])
            say(published=command["publish"])
        elif "overwrite" in command:  # as an optimizer step does as soon as it may
            publisher.wait_until_read()
            for tensor in live.values():
                tensor.fill_(float("nan"))
            say(overwritten=True)
        elif "give_up" in command:  # as the trainers' watcher does while the main loop waits
            threading.Timer(command["after_s"], publisher.give_up, command["give_up"]).start()
            say(ok=True)
        elif "timeout_s" in command:
            reshard = replace(publisher._trainer.reshard, timeout_s=command["timeout_s"])
            publisher._trainer = replace(publisher._trainer, reshard=reshard)  # of the next generation
            say(ok=True)
        elif "buffers" in command:
            say(buffers=[b.data_ptr() for outlet in publisher._outlets.values() for b in outlet._buffers])


def engine(setup) -> None:
    tensors = load_file(Path(setup["folder"]) / "model.safetensors")
    held = vllm_parameters(tensors, setup["hf_config"], tp=setup["engine_tp"], rank=setup["rank"])
    live = {name: torch.zeros(t.shape, dtype=getattr(torch, setup["dtype"])) for name, t in held.items()}
    sizes = EngineSizes(tp=setup["engine_tp"])
    streamed = setup["engine"] == 1  # room for two of dozens of messages
    message = setup["bucket_elements"] * getattr(torch, setup["dtype"]).itemsize + 16
    staging = Streamed.reserve(live)[: 2 * message] if streamed else Full.reserve(live)
    shard = Shard(live, staging, sizes, setup["rank"], Streamed if streamed else Full)
    inlet = update = None
    say(up=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "join" in command:
                if inlet:
                    inlet.end()
                info = LinkInfo(
                    engine=setup["engine"],
                    generation=command["join"],
                    store=setup["store"],
                    hf_config=setup["hf_config"],
                    sizes=setup["sizes"],
                    engine_sizes=asdict(sizes),
                    dtype=setup["dtype"],
                    timeout_s=setup["timeout_s"],
                    bucket_elements=setup["bucket_elements"],
                    may_send_changes=setup["update"] != "full",
                )
                inlet = Inlet(shard, info, log=lambda text: None)
            elif "start" in command:
                if command["start"] == "deaf":  # to whoever connects from now on
                    Listener._greet = lambda *_: time.sleep(3600)
                elif command["start"]:
                    _at_second_message(command["start"])
                update = Reception(inlet, after=update)
            elif "abort" in command:
                update.abandon()
            elif "commit" in command:
                if update.problem():
                    raise LinkError(update.problem())
                update.commit()
                say(fingerprint=fingerprint({n: p.view(torch.uint8) for n, p in live.items()}))
                continue
            say(ok=True)
        except (LinkError, ValueError) as e:
            say(error=str(e))


def _at_second_message(fault: str) -> None:
    """Makes this process die, or stop, when it is about to receive its second message from now on."""
    whole, calls = Link._receive, []

    def receive(*args):
        calls.append(args)
        if len(calls) == 2:
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return whole(*args)

    Link._receive = receive


def main(setup: dict, commands: Connection, events: Connection) -> None:
    """Reads `commands` line by line as its standard input, and writes `events` to its standard output."""
    os.dup2(events.fileno(), 1)
    sys.stdin = os.fdopen(commands.fileno(), closefd=False)
    torch.set_num_threads(1)
    {"trainer": trainer, "engine": engine}[setup["role"]](setup)


if __name__ == "__main__":
    torch.set_num_threads(1)
    start = json.loads(sys.argv[1])
    {"trainer": trainer, "engine": engine}[start["role"]](start)

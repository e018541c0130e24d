"""A process of its own with a real Service, few descriptors and a task that notices when either fails others.

    python -m tests.support.serving CONTROLLER_KEY TRAINERS_KEY LIMIT

Prints the endpoint, and when its input ends a line of JSON: how late the event loop was, before the endpoint was known
and since, how often a file could not be opened, how many descriptors are lost, and what the service counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import threading

import numpy as np

from areal_megatron.controller.service import Service
from areal_megatron.protocol import Ok, Reply, Request
from areal_megatron.run.folder import SecretKeys
from tools.bench.controller import SLEEP_S, Lateness


async def _answer(_: Request) -> Reply:
    return Ok()


async def serve(keys: SecretKeys) -> None:
    service, late, failed = Service("127.0.0.1", keys, _answer), Lateness(), 0
    tasks = [asyncio.create_task(service.run()), asyncio.create_task(late.watch())]
    over = threading.Thread(target=sys.stdin.read, daemon=True)
    over.start()
    await asyncio.sleep(0.5)
    quiet = len(late.seconds)
    before = _descriptors()
    print(service.endpoint, flush=True)
    while over.is_alive() and not any(task.done() for task in tasks):
        await asyncio.sleep(SLEEP_S)
        try:
            os.close(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            failed += 1
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    sys.stderr.writelines(f"{end!r}\n" for end in ends if not isinstance(end, asyncio.CancelledError))
    report = {
        "quiet_ms_p99": float(np.percentile(late.seconds[:quiet], 99)) * 1e3,
        "late_ms_p99": float(np.percentile(late.seconds[quiet:], 99)) * 1e3,
        "failed": failed,
        "lost": _descriptors() - before,
        "dropped": service.dropped,
    }
    service.close()
    print(json.dumps(report), flush=True)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    controller, trainers, limit = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    asyncio.run(serve(SecretKeys(bytes.fromhex(controller), bytes.fromhex(trainers))))

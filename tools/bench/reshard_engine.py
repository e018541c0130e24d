"""vLLM's own server, with processes that sleep while they wait for each other.

    python tools/bench/reshard_engine.py ARGUMENTS

vLLM's processes wait in busy loops, which no setting turns off. Where a dozen processes share two cores, that takes the
time that the measured process needs, and the one that is waited for. A sleeper may miss the notification of the second
of two calls; vLLM looks again after 5 s, here after 5 ms. Workers and engine core are forked from this process.
"""

import runpy

from vllm.distributed.device_communicators import shm_broadcast

if __name__ == "__main__":
    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.0,)  # busy_loop_s
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 5
    runpy.run_module("areal_megatron.engine.serving", run_name="__main__", alter_sys=True)

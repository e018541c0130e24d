"""The end of a process that has imported torch, vLLM or megatron-core."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end() -> NoReturn:
    """Ends this process with exit code 0 after its work: runs atexit's functions and flushes buffers. Waits for no
    thread.

    The interpreter's own end would visit and release each object of these libraries, which takes 1 to 2 s of a core,
    and a launcher waits for it.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

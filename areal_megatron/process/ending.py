"""The end of a process that has imported torch, vLLM or megatron-core."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end() -> NoReturn:
    """Ends this process, which has done all that it was to do, with exit code 0: runs what atexit holds and writes what
    is buffered. Waits for no thread.

    The interpreter's own end would visit and release each object of these libraries, which takes 1 to 2 s of a core,
    and a launcher waits for it.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

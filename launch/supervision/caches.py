"""Where compilers keep what they have compiled: on the node's own disk, and longer than a run.

Otherwise vLLM and Triton use the home folder, which is slow and shared on most clusters, and inductor the folder for
temporary files, which is removed with the run: every start would compile again, for minutes.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

_FOLDERS = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def settings() -> dict[str, str]:
    """Returns the environment variables that name the folders; none, and a line on stderr, if the folder of this user
    cannot be made, or is not private: what lies in it is executed."""
    folder = Path(tempfile.gettempdir()) / f"areal-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        problem = "" if _is_private(found) else "it is not a folder that only this user may write and read"
    except OSError as e:
        problem = e.strerror or str(e)
    if problem:
        print(f"warning: {folder} is not used for what is compiled: {problem}", file=sys.stderr, flush=True)
        return {}
    return {name: str(folder / own) for name, own in _FOLDERS.items()}


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

"""The program `areal` of an installation, for tests that run from a checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PROGRAM = f"""#!{sys.executable}
import sys
from areal_megatron.command import main
if __name__ == "__main__":
    sys.exit(main())
"""


class Shell:
    """Runs commands in a folder where `areal` and `python` are this checkout's."""

    def __init__(self, programs: Path, folder: Path):
        programs.mkdir(parents=True, exist_ok=True)
        for name, text in (("areal", _PROGRAM), ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.folder = folder
        self._own = str(programs)

    def run(self, command: str, timeout_s: float = 60) -> subprocess.CompletedProcess:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PATH": f"{self._own}:{os.environ['PATH']}", "PYTHONPATH": ":".join(paths)}
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

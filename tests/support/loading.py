"""Has vLLM build and load models by itself, and fill them as an update does, in processes of their own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_megatron.launch.supervision.processes import end_sessions
from areal_megatron.launch.supervision.shared_memory import SharedMemory

LONGEST_S = 1500
"""A minute's work, on a machine that may be twenty times too busy."""
RENDEZVOUS = "rendezvous"
"""The file by which ranks meet: a port that was free may be taken before vLLM is imported."""
Case = tuple[str, int, bool, str]
"""(name of the model's folder, tp, expert parallel, dtype)"""


def load(folder: Path, cases: Sequence[Case], ranks: int, hf_overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns for each of `ranks` ranks what loaded_parameters.py writes of each case, by "name tp expert_parallel
    dtype". The models are in `folder`; `hf_overrides` are for those without an adapter. Raises AssertionError with the
    last of the output if a rank fails."""
    (folder / "cases.json").write_text(json.dumps({"cases": list(cases), "hf_overrides": hf_overrides}))
    (folder / RENDEZVOUS).unlink(missing_ok=True)
    name = f"layouts-{secrets.token_hex(4)}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_DIST_IDENT": name}
    with (folder / "out").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("loaded_parameters.py"), str(ranks), folder],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        code = process.wait(LONGEST_S)
    finally:
        end_sessions({process.pid}, SharedMemory(), grace_s=1)
        for left in Path("/dev/shm").glob(f"{name}-*"):  # vLLM's communicator on CPU does not remove them
            left.unlink()
    assert code == 0, (folder / "out").read_text()[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]

"""One step of the evidence, in a process of its own that gpu_evidence.py starts.

    python -m tools.evidence.step NAME --device cuda|cpu --folder FOLDER [--small]

Appends a line of JSON to FOLDER/findings.jsonl whenever a part begins, finds something or ends.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tools.evidence.parts import Options, Skip

OURS = ("areal_megatron", "launch", "tests", "tools")
"""Top-level packages of the checkout: one that is missing is an error, any other a reason to skip."""


def run(name: str, options: Options, say: Callable[..., None]) -> None:
    """Runs the parts of a step one after another."""
    parts = {name: None}
    try:
        parts = importlib.import_module(f"tools.evidence.{name}").PARTS
    except ImportError as e:
        say(part=name, **_end(e))
        return
    for part, measure in parts.items():
        start = time.monotonic()
        say(part=part, status="running", reason="")
        end = {"status": "done", "reason": ""}
        try:
            for finding in measure(options):
                say(part=part, found=asdict(finding))
        except Exception as e:  # whatever is wrong with a part, the others can still find something
            end = _end(e)
        say(part=part, **end, seconds=round(time.monotonic() - start, 2))


def _end(error: Exception) -> dict[str, str]:
    """Returns the status of a part that raised `error`, and the reason in a line."""
    if isinstance(error, Skip):
        return {"status": "skipped", "reason": str(error)}
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in OURS:
        return {"status": "skipped", "reason": f"there is no package {error.name}"}
    traceback.print_exception(error)
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--device", required=True, choices=("cuda", "cpu"))
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()

    def say(**event: object) -> None:
        with (given.folder / "findings.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    run(given.name, Options(given.device, given.small, given.folder), say)


if __name__ == "__main__":
    main()

"""Collects in ten minutes on one GPU what only a GPU can show, and goes on where something is missing.

    python tools/gpu_evidence.py [--device cuda|cpu] [--small] [--only STEP,…] [--out FOLDER] [--json FILE]

Each step runs in a process of its own, which is ended with all its descendants at the step's limit; what it has found
until then is kept. The JSON file is written after every step, so that it holds something however this ends. A part
whose package or device is missing is skipped, with the reason. docs/measurements.md explains the figures.

The steps call trainers, links and engines below the start-up check of their versions, so they run with others than the
project's own; the report names those that differ. Exit code 1: a part has failed, or a step was ended at its limit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from areal_megatron.launch.supervision.processes import Child, Children  # noqa: E402
from areal_megatron.process.files import new_folder, write_json  # noqa: E402
from areal_megatron.process.shown import speak_utf8  # noqa: E402

STEPS = {
    "queues": 130,
    "ceilings": 15,
    "gpu_tests": 150,
    "reshard": 30,
    "training": 130,
    "logprobs": 25,
    "ranks": 80,
    "links": 35,
    "engine": 240,
}
"""The most seconds that a step may take. Few take all: a step whose package is missing is over at once."""
TOTAL_S = 580
"""The most seconds of all steps together, so that one job of ten minutes is enough. A step that gets less than its
limit can be run again alone."""
PACKAGES = ("torch", "megatron-core", "vllm", "transformers", "transformer-engine", "triton", "nvidia-nccl-cu13")
LOCK = ROOT / "requirements-gpu.lock"
POLL_S = 0.1


def versions() -> dict[str, dict[str, str]]:
    """Returns the version of each package that the figures depend on, and the one that the project is written for."""
    pins = dict(re.findall(r"^([\w.-]+)==([^\s+]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE))
    found = {}
    for package in PACKAGES:
        for name in (package, f"{package}-cpu"):
            try:
                found[package] = {"version": importlib.metadata.version(name), "pinned": pins.get(package, "")}
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def collect(
    limits: Mapping[str, float], device: str, small: bool, out: Path, path: Path, total_s: float = TOTAL_S
) -> dict[str, Any]:
    """Runs the steps one after another, each with its limit in seconds or what is left of `total_s`; returns what
    `path` holds."""
    arguments = ["--device", device, *(["--small"] if small else [])]
    report = {"device": device, "small": small, "versions": versions(), "steps": {}}
    end = time.monotonic() + total_s
    with Children() as children:
        for name, own_s in limits.items():
            limit_s = min(own_s, max(0, round(end - time.monotonic())))
            print(f"{name}: at most {limit_s:g} s ...", file=sys.stderr, flush=True)
            report["steps"][name] = measure(name, limit_s, children, out / name, arguments)
            write_json(path, report)
    return report


def measure(name: str, limit_s: float, children: Children, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Runs a step in a child process; returns its status, its seconds and what its parts have found."""
    folder.mkdir()
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    }
    if "cpu" in arguments:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "tools.evidence.step", name, *arguments, "--folder", str(folder)]
    start = time.monotonic()
    child = children.start(name, command, environment, folder / "log", set())
    while child.exit_code is None and time.monotonic() < start + limit_s:
        time.sleep(POLL_S)
    seconds, code = time.monotonic() - start, child.exit_code
    children.kill(name)  # also what it may have left behind
    parts = read_findings(folder / "findings.jsonl")
    problem = f"over its limit of {limit_s:g} s" if code is None else f"ended with exit code {code}" if code else ""
    if problem:
        for part in parts.values():
            if part["status"] == "running":
                part |= {"status": "ended" if code is None else "failed", "reason": problem}
    return {
        "status": status(parts, problem, code),
        "seconds": round(seconds, 1),
        "limit_s": limit_s,
        "parts": parts,
    } | ({"reason": problem or last_line(child)} if problem or not parts else {})


def status(parts: dict[str, Any], problem: str, code: int | None) -> str:
    """Returns `done`, `skipped` (every part), `failed` (a part, or the process), or `ended` (at the limit)."""
    if problem:
        return "ended" if code is None else "failed"
    found = {part["status"] for part in parts.values()}
    if "failed" in found or not parts:
        return "failed"
    return "skipped" if found == {"skipped"} else "done"


def read_findings(path: Path) -> dict[str, Any]:
    """Returns by part: its status and reason, and what it has found; from the lines that tools/evidence/step.py
    writes."""
    parts: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:  # the process was ended while it wrote its last line
            break
        part = parts.setdefault(event.pop("part"), {"findings": []})
        if "found" in event:
            part["findings"].append(event["found"])
        else:
            part |= event
    return parts


def last_line(child: Child) -> str:
    return child.last_lines(1) or "it has said nothing"


def table(report: dict[str, Any]) -> str:
    """Returns what a person reads: a line for each shown finding, and one for each part that has none and why."""
    lines = [f"gpu_evidence.py on {report['device']}{', small' if report['small'] else ''}"]
    for name, version in report["versions"].items():
        if version["pinned"] and version["version"].partition("+")[0] != version["pinned"]:
            lines.append(f"{name} is {version['version']}; the project is written for {version['pinned']}")
    for name, step in report["steps"].items():
        title = f"{name:<10}{step['seconds']:>6.1f} of {step['limit_s']:g} s  "
        for text in rows(step) or [step["status"]]:
            lines.append(title + text)
            title = " " * len(title)
    return "\n".join(lines)


def rows(step: dict[str, Any]) -> list[str]:
    """Returns the lines of a step. Parts that were skipped for one reason share a line."""
    found, reasons = [], {}
    for name, part in step["parts"].items():
        for finding in part["findings"]:
            if finding["shown"]:
                found.append(f"{finding['name']:<58}{shown(finding['value']):>10} {finding['unit']}".rstrip())
        if part["status"] != "done":
            reasons.setdefault((part["status"], part["reason"]), []).append(name)
    found += [f"{status}: {', '.join(names)}: {reason}" for (status, reason), names in reasons.items()]
    if step.get("reason") and not any(step["reason"] in text for text in found):
        found.append(f"{step['status']}: {step['reason']}")
    return found


def shown(value: float | str) -> str:
    """Returns a number in three digits or more, as the table has it."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    speak_utf8()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--only", metavar="STEP,…", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--out", type=Path, help="new folder for logs; default: runs/gpu-evidence-N")
    parser.add_argument("--json", type=Path, help="default: evidence.json in that folder")
    given = parser.parse_args()
    steps = given.only.split(",") if given.only else list(STEPS)
    if unknown := [name for name in steps if name not in STEPS]:
        parser.error(f"--only: there is no step {unknown[0]}; known are {', '.join(STEPS)}")
    out = new_folder("gpu-evidence", given.out).absolute()
    path = given.json or out / "evidence.json"
    report = collect({name: STEPS[name] for name in steps}, given.device, given.small, out, path)
    print(table(report))
    print(f"{path} holds all figures, {out} the logs")
    sys.exit(any(step["status"] in ("failed", "ended") for step in report["steps"].values()))


if __name__ == "__main__":
    main()

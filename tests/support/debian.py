"""Programs of Debian for tests: those on PATH, otherwise unpacked from its packages into a cache, without root rights.

Nothing of the machine is changed: package lists, packages and programs lie below `.cache/debian`.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent.parent / ".cache" / "debian"
_DOWNLOAD_S = 240


@dataclass(frozen=True)
class Programs:
    """Programs of some packages. `root`: what they were unpacked into; "/" where the machine has them already."""

    root: Path

    def program(self, name: str) -> str:
        """Its absolute path. Skips the test that asks for what there is not."""
        found = shutil.which(name, path=self.environment(os.environ)["PATH"])
        return found or pytest.skip(f"there is no {name}")

    def folder(self, pattern: str) -> Path | None:
        """The folder of that name pattern below `root`."""
        return next(iter(sorted(self.root.glob(pattern))), None)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base`, extended so that the programs and their libraries are found; those of `base` come first."""
        folders = [self.root / name for name in ("usr/bin", "usr/sbin", "bin", "sbin")]
        added = {"PATH": _joined(base.get("PATH", os.defpath), *folders)}
        if self.root != Path("/"):
            added["LD_LIBRARY_PATH"] = _joined(base.get("LD_LIBRARY_PATH", ""), *_library_folders(self.root))
        return {**base, **added}


def slurm() -> Programs:
    """Slurm's daemons and clients, and munge."""
    packages = ("munge", "slurmctld", "slurmd", "slurm-client")
    return _programs(packages, ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol"))


def openmpi() -> Programs:
    """Open MPI's mpirun and the library that mpi4py loads."""
    return _programs(("openmpi-bin",), ("mpirun", "orted"))


def mpi_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what mpirun needs to start any number of processes on this machine, as root too, over loopback."""
    programs = openmpi()
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "OMPI_MCA_oob_tcp_if_include": "lo",
    }
    if programs.root != Path("/"):
        settings |= {
            "OPAL_PREFIX": str(programs.root / "usr"),
            "OPAL_SYSCONFDIR": str(programs.root / "etc/openmpi"),
            "PMIX_MCA_pcompress_base_silence_warning": "1",  # its plugins are looked for in /usr alone
        }
    return {**programs.environment(base), **settings}


def _programs(packages: tuple[str, ...], needed: tuple[str, ...]) -> Programs:
    installed = Programs(Path("/"))
    path = installed.environment(os.environ)["PATH"]
    missing = [name for name in needed if not shutil.which(name, path=path)]
    if not missing:
        return installed
    try:
        return Programs(_unpacked(packages))
    except subprocess.CalledProcessError as error:
        reasons = re.findall(r"^(?:E|dpkg.*?): (.*)", error.stderr, re.MULTILINE)
        reason = reasons[0] if reasons else f"exit code {error.returncode} of {error.cmd[0]}"
    except subprocess.TimeoutExpired as error:
        reason = f"{error.cmd[0]} took more than {_DOWNLOAD_S} s"
    except OSError as error:
        reason = str(error)
    pytest.skip(f"there is no {missing[0]}, and {' '.join(packages)} could not be unpacked: {reason}")


def _unpacked(packages: tuple[str, ...]) -> Path:
    """The folder with the packages and all that they depend on and the machine lacks; made by whoever comes first."""
    release = platform.freedesktop_os_release().get("VERSION_ID", "unstable")
    kept = CACHE / f"{release}-{platform.machine()}-{'+'.join(packages)}"
    if kept.exists():
        return kept
    CACHE.mkdir(parents=True, exist_ok=True)
    with _lock(CACHE / "lock"):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="unpacking-") as aside:
                _fetch(packages, Path(aside) / "packages")
                _unpack(Path(aside) / "packages", Path(aside) / "root")
                os.rename(Path(aside) / "root", kept)
    return kept


def _fetch(packages: tuple[str, ...], folder: Path) -> None:
    folder.mkdir()
    lists, cache = CACHE / "apt" / "lists", CACHE / "apt" / "cache"
    for partial in (lists / "partial", cache / "archives" / "partial"):
        partial.mkdir(parents=True, exist_ok=True)
    # _apt, the user that apt has for downloads, may have no way into these folders
    options = [f"Dir::State::lists={lists}", f"Dir::Cache={cache}", "APT::Sandbox::User=root", "Acquire::Retries=1"]
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    _run([*apt, "update"], folder)
    plan = _run([*apt, "--simulate", "--no-install-recommends", "install", *packages], folder)
    # "Inst NAME (VERSION …": absent here. "Inst NAME [OLD] (VERSION …": there, and the one that is there will do
    absent = re.findall(r"^Inst (\S+) \((\S+)", plan, re.MULTILINE)
    _run([*apt, "download", *(f"{name}={version}" for name, version in absent)], folder)


def _unpack(packages: Path, root: Path) -> None:
    root.mkdir()
    for package in sorted(packages.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(root)], packages)
    # the names that installing would have given by update-alternatives
    for program in (*root.glob("usr/bin/*.openmpi"), *root.glob("usr/sbin/*-wlm")):
        program.with_name(re.sub(r"\.openmpi$|-wlm$", "", program.name)).symlink_to(program.name)


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_DOWNLOAD_S,
        check=True,
    )
    return done.stdout


def _library_folders(root: Path) -> list[Path]:
    """Folders with shared libraries that others are linked to; plugins are loaded by their full paths."""
    libraries = {file.parent for file in root.glob("**/lib*.so*")}
    return sorted(folder for folder in libraries if "share" not in folder.parts)


def _joined(first: str, *others: Path) -> str:
    kept = [name for name in first.split(os.pathsep) if name]
    return os.pathsep.join([*kept, *(str(other) for other in others if other.is_dir() and str(other) not in kept)])


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Skips the test if another process holds the lock for longer than a download may take."""
    deadline = time.monotonic() + 3 * _DOWNLOAD_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    pytest.skip(f"another process unpacks packages and does not come to an end: {path}")
                time.sleep(0.2)
        yield

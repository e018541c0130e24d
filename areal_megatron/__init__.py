"""Asynchronous RL for language models, on Megatron-core and vLLM: what scripts import (docs/python.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_megatron.api.policy import Gradient, Likelihood, Policy, Response
    from areal_megatron.api.run import Run, RunFailed, load
    from areal_megatron.config import Config, ConfigError
    from areal_megatron.run.folder import RunError

__all__ = [
    "Config",
    "ConfigError",
    "Gradient",
    "Likelihood",
    "Policy",
    "Response",
    "Run",
    "RunError",
    "RunFailed",
    "load",
]
_MODULES = {
    "api.policy": ("Gradient", "Likelihood", "Policy", "Response"),
    "api.run": ("Run", "RunFailed", "load"),
    "config": ("Config", "ConfigError"),
    "run.folder": ("RunError",),
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is asked for: the processes of a run do without, and a script begins sooner."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

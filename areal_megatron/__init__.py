"""Asynchronous RL for language models, on Megatron-core and vLLM. The Python API is in areal_megatron/api."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_megatron.api import Config, ConfigError, Gradient, Likelihood, Policy, Response, Run, RunFailed, load

__all__ = ["Config", "ConfigError", "Gradient", "Likelihood", "Policy", "Response", "Run", "RunFailed", "load"]


def __getattr__(name: str) -> Any:
    """Imports the API when it is asked for: the processes of a run do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from areal_megatron import api

    return getattr(api, name)

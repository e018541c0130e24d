"""What scripts and notebooks import: runs as objects (docs/python.md)."""

from areal_megatron.api.policy import Gradient, Likelihood, Policy, Response
from areal_megatron.api.run import Run, RunFailed, load
from areal_megatron.config import Config, ConfigError

__all__ = ["Config", "ConfigError", "Gradient", "Likelihood", "Policy", "Response", "Run", "RunFailed", "load"]

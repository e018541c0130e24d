"""What scripts and notebooks import: runs as objects (docs/python.md)."""

from areal_megatron.api.policy import Gradient, Policy, Response, Score
from areal_megatron.api.run import Run, RunFailed, load
from areal_megatron.config import Config, ConfigError

__all__ = ["Config", "ConfigError", "Gradient", "Policy", "Response", "Run", "RunFailed", "Score", "load"]

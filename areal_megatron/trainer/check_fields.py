"""Checks what a config passes through to megatron-core (`trainer.megatron`) and the kernels that it names, where both
are installed.

    python -m areal_megatron.trainer.check_fields < CONFIG

prints one line and ends with exit code 2 if megatron-core refuses a field, or a kernel is missing.
"""

from __future__ import annotations

import sys

import torch

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.config.passed_through import MEGATRON
from areal_megatron.models.table import ROUTER_BIAS
from areal_megatron.process.shown import guard
from areal_megatron.trainer import hardware
from areal_megatron.trainer.attention_kernels import candidates
from areal_megatron.trainer.model import described, parallel_sizes, transformer_config


def check(config: Config) -> None:
    """Raises ConfigError if a kernel that the config names is missing, or megatron-core refuses a field, or all of them
    together, for its model, or would pass over one."""
    _check_kernels(config)
    on_cuda = not config.machine.is_cpu and torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    hf, held = described(config.model.path)
    made = transformer_config(config, parallel_sizes(config, device), hf, held, device)
    if made.moe_router_bias_update_rate and not held.has(ROUTER_BIAS):
        raise ConfigError(
            f"{MEGATRON}.moe_router_bias_update_rate: the model of {config.model.path} has no routers with a bias; "
            "leave it out"
        )


def _check_kernels(config: Config) -> None:
    """Raises ConfigError if trainer ranks with the packages of this interpreter lack a kernel that the config names."""
    if config.machine.is_cpu:  # then it may name none (model_check.py)
        return
    absent = hardware.installed(torch.device("cuda" if torch.cuda.is_available() else "cpu"), config.model.dtype)
    candidates(config.trainer.attention, 0, absent)
    hardware.check_dispatch(config.trainer.expert_dispatch, absent)


def require(config: Config) -> None:
    """Ends this process, with one line and exit code 2, if `check` fails."""
    try:
        if config.trainer.megatron:
            check(config)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    guard()
    return config_file.check_stdin(check)


if __name__ == "__main__":
    sys.exit(main())

"""Weights that data-parallel ranks gather while the layers before them compute."""

from __future__ import annotations

import torch


def settle(*modules: torch.nn.Module) -> None:
    """Waits for the gathered weights of modules, as Megatron does before it calls one; for those that nobody calls."""
    for module in modules:
        for wait in module._forward_pre_hooks.values():
            wait(module, ())

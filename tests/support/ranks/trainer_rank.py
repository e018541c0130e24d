"""A trainer rank of a test: a fork of a process that has already imported everything."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

import torch


def main(check: str, folder: Path, rank: int, arguments: dict, output: Path) -> None:
    """Calls module:check; everything that it and its libraries print goes to `output`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    torch.set_num_threads(1)
    gc.freeze()  # a collection over all that was imported takes half a second, and copies the pages that forks share
    importlib.import_module("areal_megatron.trainer")  # before megatron-core, also where nothing was imported yet
    module, _, name = check.partition(":")
    getattr(importlib.import_module(module), name)(folder, rank, **arguments)

"""One trainer rank of a test: python trainer_rank.py MODULE:CHECK FOLDER ARGUMENTS RANK."""

import importlib
import json
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    check, folder, arguments, rank = sys.argv[1:]
    torch.set_num_threads(1)
    module, _, name = check.partition(":")
    getattr(importlib.import_module(module), name)(Path(folder), int(rank), **json.loads(arguments))

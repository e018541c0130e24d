"""One trainer rank of a test: python trainer_rank.py CHECK FOLDER ARGUMENTS RANK."""

import json
import sys
from pathlib import Path

import torch
import trainer_checks

if __name__ == "__main__":
    check, folder, arguments, rank = sys.argv[1:]
    torch.set_num_threads(1)
    getattr(trainer_checks, check)(Path(folder), int(rank), **json.loads(arguments))

"""The standard streams of a process: as a worker's pipes, and for its log."""

from __future__ import annotations

import logging
import os
import sys
from typing import BinaryIO


def take_stdin() -> BinaryIO:
    """Returns stdin for requests; a user's function that reads input gets an EOFError from now on."""
    requests = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return requests


def take_stdout() -> BinaryIO:
    """Returns stdout for answers; whatever is printed goes to stderr from now on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

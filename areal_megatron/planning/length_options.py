"""The options of a command that say how long answers are."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_megatron.config import Config, ConfigError
from areal_megatron.planning.forecast.lengths import AnswerLengths, LognormalLengths, RecordedLengths
from areal_megatron.run.folder import RunFolder


def add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--median", type=float, metavar="TOKENS", help="median of the answers' lognormal lengths")
    parser.add_argument("--sigma", type=float, default=0.9, help="standard deviation of their logarithm")
    parser.add_argument("--alike", type=float, default=0.5, help="share of its variance that answers to a prompt share")
    parser.add_argument("--prompt", type=int, default=200, metavar="TOKENS", help="tokens of a prompt")
    parser.add_argument("--lengths-of", type=Path, metavar="RUN_FOLDER", help="take lengths from a run's trajectories")


def given_lengths(options: argparse.Namespace, config: Config, median: float | None = None) -> AnswerLengths:
    """Returns the lengths that the options give, with `median` if they give none. Raises ConfigError for lengths that
    no answers have, and where neither says how long they are."""
    if options.lengths_of:
        if options.median is not None:
            raise ConfigError("--median: the lengths are those of --lengths-of; give one of the two")
        return RecordedLengths.of(RunFolder(options.lengths_of).trajectories)
    median = options.median if options.median is not None else median
    if median is None:
        raise ConfigError(
            "--median: say how long answers are, in tokens, or with --lengths-of RUN_FOLDER whose they are"
        )
    return LognormalLengths(median, options.sigma, config.rollout.max_new_tokens, options.prompt, alike=options.alike)

"""Measures how long a launcher takes to compare training with evaluation prompts.

    python tools/bench/contamination.py [--train 1000000] [--held-out 2000] [--words 100]

Prompts are drawn words, as frequent as Zipf's law has it, in a common frame; one evaluation prompt is trained too, and
one shares a phrase with a training prompt. Prints seconds of the clock and of the processor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from areal_megatron.data.contamination import compare
from areal_megatron.data.prompts import Prompt

VOCABULARY = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=int, default=1_000_000, help="training prompts; default: %(default)s")
    parser.add_argument("--held-out", type=int, default=2000, help="evaluation prompts; default: %(default)s")
    parser.add_argument("--words", type=int, default=100, help="words of a prompt; default: %(default)s")
    options = parser.parse_args()
    draw = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(VOCABULARY)])
    shares = 1 / np.arange(1, VOCABULARY + 1)

    def texts(count: int) -> Iterator[str]:
        for first in range(0, count, 1000):
            drawn = draw.choice(VOCABULARY, (min(1000, count - first), options.words), p=shares / shares.sum())
            yield from (f"Solve this problem: {' '.join(words[row])} Reason step by step." for row in drawn)

    train, held_out = list(texts(options.train)), list(texts(options.held_out - 2))
    held_out += [train[0], "Solve this problem: " + " ".join(train[1].split()[5:30])]
    sets = [
        [Prompt(id=k, text=text, answer="", tokens=[], response_tokens=None) for k, text in enumerate(prompts)]
        for prompts in (train, held_out)
    ]
    clock, processor = time.monotonic(), time.process_time()
    overlap = compare(*sets, print)
    found = [[(asked.id, trained.id) for asked, trained in pairs] for pairs in (overlap.equal, overlap.similar)]
    assert found == [[(options.held_out - 2, 0)], [(options.held_out - 1, 1)]], found
    print(
        f"{len(train):,} training and {len(held_out):,} evaluation prompts of {options.words} words: "
        f"{time.monotonic() - clock:.0f} s, {time.process_time() - processor:.0f} s of the processor"
    )


if __name__ == "__main__":
    main()

"""Where the simulator has the lengths of prompts and answers from: a distribution, or what a run has trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from areal_megatron.config import ConfigError
from areal_megatron.data import dumps


class AnswerLengths(Protocol):
    """Draws the lengths of groups."""

    def group(self, rng: np.random.Generator, count: int) -> tuple[int, np.ndarray]:
        """Returns the tokens of a prompt, and of its `count` answers as int64 [count], at least 1 each."""
        ...


@dataclass(frozen=True)
class LognormalLengths:
    """Lognormal answers up to a cap, as answers with chains of thought have them."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    cap: int
    prompt: int = 200
    alike: float = 0.5
    """The share of that variance which is the prompt's: answers to one prompt have lengths alike."""

    def __post_init__(self) -> None:
        finite = 0 < self.median < float("inf") and 0 <= self.sigma < float("inf")
        if not (finite and self.cap >= 1 and self.prompt >= 1 and 0 <= self.alike <= 1):
            raise ConfigError(
                f"lengths: median={self.median:g} sigma={self.sigma:g} cap={self.cap} prompt={self.prompt} "
                f"alike={self.alike:g}: expected a finite median above 0, a finite sigma of at least 0, a cap and a "
                "prompt of at least 1 token, and alike between 0 and 1"
            )

    def group(self, rng: np.random.Generator, count: int) -> tuple[int, np.ndarray]:
        mean = np.log(self.median) + self.sigma * np.sqrt(self.alike) * rng.standard_normal()
        drawn = np.exp(mean + self.sigma * np.sqrt(1 - self.alike) * rng.standard_normal(count))
        return self.prompt, np.clip(np.round(drawn), 1, self.cap).astype(np.int64)


@dataclass(frozen=True)
class RecordedLengths:
    """The groups that a run has trained, drawn at random."""

    groups: Sequence[tuple[int, np.ndarray]]
    """Tokens of the prompt, and of its answers, int64 [n]."""

    @classmethod
    def of(cls, folder: Path) -> RecordedLengths:
        """Reads the folder `trajectories` of a run with rollout.dump=true. Raises ConfigError if there is nothing."""
        found: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
        for number, path in dumps.dumped(folder).items():
            for each in dumps.read(path).trajectories:
                prompt = len(each.prompt)
                found.setdefault((number, each.epoch, each.prompt_id), (prompt, []))[1].append(each.length - prompt)
        return cls([(prompt, np.maximum(answers, 1)) for prompt, answers in found.values()])

    def group(self, rng: np.random.Generator, count: int) -> tuple[int, np.ndarray]:
        prompt, answers = self.groups[int(rng.integers(len(self.groups)))]
        own = answers if len(answers) == count else rng.choice(answers, count)
        return prompt, np.asarray(own, dtype=np.int64)

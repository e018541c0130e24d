"""Ends a run in which too many rewards fail: the rest of its batches would misrepresent the policy's answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from areal_megatron.config import Config
from areal_megatron.process.errors import printable
from areal_megatron.run.folder import RunError

_FEWEST_GROUPS = 10
"""One group alone, as of a row that cannot be scored, does not exceed the default share of this number of groups."""


class FailedAnswers:
    """The share of answers without a reward, over the latest ones in the number of a batch.

    Answers of groups that are dropped count too: if all fail, there is no batch.
    """

    def __init__(self, config: Config):
        self._share = config.reward.failed_share
        self._window = max(config.batch_size, _FEWEST_GROUPS * config.rollout.group_size)
        self._last: deque[bool] = deque(maxlen=self._window)

    def add(self, failures: Iterable[str]) -> None:
        """Records answers, by why their rewards failed; empty: they did not. Raises RunError if too many have."""
        for failure in failures:
            self._last.append(bool(failure))
            if failure and sum(self._last) > self._share * self._window:
                raise RunError(
                    f"reward.failed_share: the rewards of {sum(self._last)} of the last {self._window} answers failed, "
                    f"more than {self._share:g}; the last one: {printable(failure, 500)}"
                )

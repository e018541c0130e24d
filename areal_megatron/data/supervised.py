"""What supervised runs learn from: examples or pairs, by the mode, in the order in which they are drawn. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from areal_megatron.config import Config
from areal_megatron.data.drawing import SUPERVISED, Drawing, goes_on, read
from areal_megatron.data.examples import Example, Sample, read_examples
from areal_megatron.data.files import source_names
from areal_megatron.data.pairs import Pair, read_pairs
from areal_megatron.data.prompts import LeftOut, cursor, drawing_of
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import store


def read_items(
    config: Config, key: str, tokenizer: Tokenizer, left_out: LeftOut | None = None
) -> list[Example] | list[Pair]:
    """Returns what the run learns from data.train, or is measured by on data.eval (`key`); `left_out`: as in
    `read_examples`. Raises ConfigError for the reasons that `read_examples` and `read_pairs` do."""
    text = getattr(config.data, key)
    if config.mode == "sft":
        return read_examples(text, tokenizer, config.sft, config.data.unusable_rows, left_out)
    return read_pairs(text, tokenizer, config.data.unusable_rows, left_out)


class SupervisedData:
    """The batches of a supervised run, the same on every rank, and what is held out. Raises ConfigError.

    Example:
        data = SupervisedData(config, tokenizer)
        data.next()  # the samples of config.batch_size rows
        write(data.drawing, folder)
        SupervisedData(config, tokenizer, resumed=folder).next()  # the batch after that
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, resumed: str | Path = "", own: bool = True):
        """`resumed`: the folder of the checkpoint with which the run goes on; `own`: this run has made it."""
        self._items, self._size = read_items(config, "train", tokenizer), config.batch_size
        self._drawing = drawing_of(config, self._items, tokenizer)
        if resumed:
            saved = read(Path(resumed) / SUPERVISED, Drawing)
            if goes_on(saved, self._drawing, self._items, resumed, own):
                self._drawing.cursor = saved.cursor
        self._cursor = cursor(config, self._items, self._drawing.cursor)
        self.held_out: dict[str, list[Sample] | list[Pair]] = {}
        """The samples or pairs of each file of data.eval, by `source_names`."""
        if config.data.eval:
            items = read_items(config, "eval", tokenizer)
            for number, name in enumerate(source_names(config.data.eval)):
                self.held_out[name] = _taught([item for item in items if item.source == number])

    def next(self) -> list[Sample] | list[Pair]:
        """Draws the next batch: all samples of config.batch_size rows, or as many pairs."""
        return _taught([self._items[self._cursor.next()[1]] for _ in range(self._size)])

    @property
    def drawing(self) -> Drawing:
        """What a run that goes on from here has to know."""
        return replace(self._drawing, cursor=self._cursor.at)


def _taught(items: Sequence[Example | Pair]) -> list[Sample] | list[Pair]:
    found = [each for item in items for each in (item.samples if isinstance(item, Example) else [item])]
    return cast(list[Sample] | list[Pair], found)  # a run has one kind


def write(drawing: Drawing, folder: Path) -> None:
    """Writes into the folder of a checkpoint which rows come next. Raises OSError."""
    store(drawing, folder / SUPERVISED)

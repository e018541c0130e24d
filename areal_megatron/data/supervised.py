"""What supervised runs learn from: examples or pairs, by the mode, in the order in which they are drawn. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.files import source_names
from areal_megatron.data.pairs import Pair, read_pairs
from areal_megatron.data.prompts import Drawing, Example, cursor, read_examples
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import decoder, store

_STATE = "examples.msgpack"
"""Where a checkpoint says which rows come next."""
_decode = decoder(Drawing).decode


def read_items(config: Config, key: str, tokenizer: Tokenizer) -> list[Example] | list[Pair]:
    """Returns what the run learns from data.train, or is measured by on data.eval (`key`). Raises ConfigError for the
    reasons that `read_examples` and `read_pairs` do."""
    read = read_examples if config.mode == "sft" else read_pairs
    return read(getattr(config.data, key), tokenizer)


class SupervisedData:
    """The batches of a supervised run, the same on every rank, and what is held out. Raises ConfigError.

    Example:
        data = SupervisedData(config, tokenizer)
        data.next()  # config.batch_size examples
        write(data.drawing, folder)
        SupervisedData(config, tokenizer, resumed=folder).next()  # the batch after that
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, resumed: str | Path = ""):
        """`resumed`: the folder of the checkpoint with which the run goes on."""
        self._items, self._size, self._seed = read_items(config, "train", tokenizer), config.batch_size, config.seed
        self._cursor = cursor(config, self._items)
        if resumed:
            drawing = _read(Path(resumed) / _STATE)
            drawing.check(len(self._items), self._seed, self._cursor.shares)
            self._cursor = cursor(config, self._items, drawing.cursor)
        self.held_out: dict[str, list[Example] | list[Pair]] = {}
        """The items of each file of data.eval, by `source_names`."""
        if config.data.eval:
            items = read_items(config, "eval", tokenizer)
            for number, name in enumerate(source_names(config.data.eval)):
                self.held_out[name] = [item for item in items if item.source == number]

    def next(self) -> list[Example] | list[Pair]:
        """Draws the next batch."""
        return [self._items[self._cursor.next()[1]] for _ in range(self._size)]

    @property
    def drawing(self) -> Drawing:
        """What a run that goes on from here has to know."""
        found = self._cursor
        return Drawing(rows=len(self._items), seed=self._seed, mixture=found.shares, cursor=found.at)


def write(drawing: Drawing, folder: Path) -> None:
    """Writes into the folder of a checkpoint which rows come next. Raises OSError."""
    store(drawing, folder / _STATE)


def _read(path: Path) -> Drawing:
    try:
        return _decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as e:
        raise ConfigError(f"{path}: no readable state of a supervised run: {e}") from None

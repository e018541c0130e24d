"""Compares training with evaluation prompts: which are equal, and which have a phrase of 13 words in common.

Imports no torch. Texts are compared as arrays of the hashes of their words; a million prompts take half a minute.
"""

from __future__ import annotations

import functools
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

PHRASE = 13
"""Words of a phrase, as in GPT-3's report (arXiv 2005.14165, Appendix C)."""
COMMON = 10
"""A phrase in more different training prompts than this says nothing about any of them (as in GPT-3's report)."""
_BATCH = 4_000_000
"""Characters that are compared at once; the arrays take fifty times as many bytes."""
_SAMPLE = 1000
_PROGRESS_S = 5.0
_TABLE_BITS = 24

_random = np.random.default_rng(0)
_OF_BYTE = _random.integers(1 << 64, size=256, dtype=np.uint64)
_OF_PLACE = _random.integers(1 << 64, size=PHRASE, dtype=np.uint64) | np.uint64(1)
_BASE = int(_random.integers(1 << 63)) * 2 + 1
_IS_WORD = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])


class Compared(Protocol):
    """A prompt, an example or a pair."""

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> int: ...
    @property
    def where(self) -> str: ...


@dataclass(frozen=True)
class Overlap:
    """What two sets of prompts have in common, as (evaluation prompt, training prompt) for each evaluation prompt."""

    equal: list[tuple[Compared, Compared]]
    """Equal but for case, white space and Unicode's compatible forms."""
    similar: list[tuple[Compared, Compared]]
    """Not equal, with a phrase in common: PHRASE words in a row."""


def compare(train: Sequence[Compared], held_out: Sequence[Compared], say: Callable[[str], None]) -> Overlap:
    """Returns the overlap, with the first training prompt of each evaluation prompt; `say` is told of the progress.

    A word of a phrase is a run of letters and digits, or of characters beyond ASCII. What most prompts of a file begin
    or end with, such as an instruction, is no part of a phrase.
    """
    phrases, texts = _Phrases(held_out), [_normalized(prompt.text) for prompt in held_out]
    asked, trained = set(texts), {}
    keys_asked = np.unique(_Words.of(held_out).keys)
    frames = _frames(train)
    seen: set[int] = set()
    begin = said = time.monotonic()
    for first, batch in _batches(train):
        words = _Words.of(batch)
        for number in np.flatnonzero(np.isin(words.keys, keys_asked)).tolist():  # the same words, perhaps equal
            if (text := _normalized(batch[number].text)) in asked:
                trained.setdefault(text, batch[number])
        keys = words.keys.tolist()
        new = np.array([key not in seen for key in keys])  # what was trained before counts once
        seen.update(keys)
        phrases.look_up(words.within(frames, batch).of_rows(new), first)
        if time.monotonic() - said > _PROGRESS_S:
            said, done = time.monotonic(), first + len(batch)
            say(f"comparing data.eval with data.train: {done:,} of {len(train):,} rows, {said - begin:.0f} s")
    return Overlap(
        equal=[(prompt, trained[text]) for prompt, text in zip(held_out, texts, strict=True) if text in trained],
        similar=[(held_out[number], train[row]) for number, row in phrases.found() if texts[number] not in trained],
    )


def _normalized(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _batches(prompts: Sequence[Compared]) -> Iterator[tuple[int, Sequence[Compared]]]:
    """Yields (number of the first prompt, prompts) of about _BATCH characters together."""
    first, characters = 0, 0
    for number, prompt in enumerate(prompts):
        characters += len(prompt.text)
        if characters >= _BATCH or number + 1 == len(prompts):
            yield first, prompts[first : number + 1]
            first, characters = number + 1, 0


@dataclass(frozen=True)
class _Words:
    """The words of several texts."""

    hashes: np.ndarray
    """uint64 [words]"""
    rows: np.ndarray
    """int64 [words], the number of the text, ascending"""
    count: int
    """The number of texts."""

    @classmethod
    def of(cls, prompts: Sequence[Compared]) -> _Words:
        joined = "\0".join(prompt.text.replace("\0", " ") for prompt in prompts)
        if not joined.isascii():
            joined = unicodedata.normalize("NFKC", joined)
        raw = np.frombuffer(joined.casefold().encode("utf-8", "surrogatepass"), np.uint8)
        edges = np.flatnonzero(np.diff(_IS_WORD[raw].view(np.int8), prepend=0, append=0))
        begins, ends = edges[::2], edges[1::2]
        # The hash of a word is Σ _OF_BYTE[byte j] · _BASE^j, modulo 2⁶⁴: a difference of sums from the beginning.
        sums = np.zeros(len(raw) + 1, np.uint64)
        np.cumsum(_OF_BYTE[raw] * _powers(_BASE, len(raw)), out=sums[1:])
        hashes = (sums[ends] - sums[begins]) * _powers(pow(_BASE, -1, 1 << 64), len(raw))[begins]
        starts = np.searchsorted(begins, np.flatnonzero(raw == 0))
        lengths = np.diff(starts, prepend=0, append=len(begins))
        return cls(hashes, np.repeat(np.arange(len(prompts)), lengths), len(prompts))

    @property
    def starts(self) -> np.ndarray:
        """int64 [texts + 1], the first word of each text, and the number of words."""
        return np.searchsorted(self.rows, np.arange(self.count + 1))

    @property
    def keys(self) -> np.ndarray:
        """uint64 [texts], a hash of all words of each text, in order."""
        starts = self.starts
        places = np.arange(len(self.rows)) - starts[self.rows]
        weighted = self.hashes * _powers(_BASE, int(np.diff(starts).max(initial=0)))[places]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(weighted)])
        return sums[starts[1:]] - sums[starts[:-1]]

    def phrases(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns a key of each phrase, and the number of the text that it is in."""
        count = max(0, len(self.rows) - PHRASE + 1)
        first = self.rows[:count]
        starts = np.flatnonzero(first == self.rows[PHRASE - 1 : PHRASE - 1 + count])
        keys = np.zeros(len(starts), np.uint64)
        for place, weight in enumerate(_OF_PLACE):
            keys += self.hashes[starts + place] * weight
        return keys, first[starts]

    def of_rows(self, kept: np.ndarray) -> _Words:
        """Returns the words of the texts that are kept, a bool for each; the numbers of the texts stay."""
        return self._some(kept[self.rows])

    def within(self, frames: dict[int, _Frame], prompts: Sequence[Compared]) -> _Words:
        """Returns the words without the frames of the prompts' sources."""
        kept, starts = np.ones(len(self.rows), bool), self.starts
        sources = np.array([prompt.source for prompt in prompts])
        for source, frame in frames.items():
            for shared, of_end in ((frame.beginning, False), (frame.ending, True)):
                texts = np.flatnonzero((sources == source) & (np.diff(starts) >= len(shared)))
                first = starts[texts + 1] - len(shared) if of_end else starts[texts]
                places = first[:, None] + np.arange(len(shared))
                kept[places[(self.hashes[places] == shared).all(axis=1)]] = False
        return self._some(kept)

    def _some(self, kept: np.ndarray) -> _Words:
        return _Words(self.hashes[kept], self.rows[kept], self.count)


@dataclass(frozen=True)
class _Frame:
    """The words that most prompts of a file begin and end with, as hashes."""

    beginning: np.ndarray
    ending: np.ndarray


def _frames(prompts: Sequence[Compared]) -> dict[int, _Frame]:
    """Returns the frame of each source, from at most _SAMPLE prompts spread over it."""
    of_source: dict[int, list[Compared]] = defaultdict(list)
    for prompt in prompts:
        of_source[prompt.source].append(prompt)
    frames = {}
    for source, own in of_source.items():
        words = _Words.of(own[:: -(-len(own) // _SAMPLE)])
        texts = {tuple(part.tolist()) for part in np.split(words.hashes, words.starts[1:-1])}
        beginning = _shared(sorted(texts))
        ending = _shared([text[len(beginning) :][::-1] for text in texts])[::-1]
        frames[source] = _Frame(np.array(beginning, np.uint64), np.array(ending, np.uint64))
    return frames


def _shared(texts: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns the longest beginning that half of the texts have, and three at least."""
    shared, left = [], [text for text in texts if text]
    while left:
        word, count = Counter(text[len(shared)] for text in left).most_common(1)[0]
        if count < max(3, len(texts) / 2):
            break
        shared.append(word)
        left = [text for text in left if text[len(shared) - 1] == word and len(text) > len(shared)]
    return shared


class _Phrases:
    """The phrases of the evaluation prompts, and which training prompts have them."""

    def __init__(self, held_out: Sequence[Compared]):
        keys, self._owners = _Words.of(held_out).within(_frames(held_out), held_out).phrases()
        self._known, self._places = np.unique(keys, return_inverse=True)
        self._table = np.zeros(1 << _TABLE_BITS, bool)
        self._table[self._slots(self._known)] = True
        self._prompts = np.zeros(len(self._known), np.int64)
        """The number of different training prompts that have each phrase."""
        self._first = np.zeros(len(self._known), np.int64)
        """The number of the first of these."""

    def look_up(self, words: _Words, first: int) -> None:
        """Counts the phrases in training prompts, the first of which is number `first`."""
        keys, rows = words.phrases()
        possible = self._table[self._slots(keys)]  # most are not
        keys, rows = keys[possible], rows[possible]
        places = np.searchsorted(self._known, keys)
        known = self._known[np.minimum(places, len(self._known) - 1)] == keys
        pairs = np.unique(np.stack([places[known], rows[known]]), axis=1)
        found, starts, counts = np.unique(pairs[0], return_index=True, return_counts=True)
        new = self._prompts[found] == 0
        self._first[found[new]] = first + pairs[1, starts[new]]
        self._prompts[found] += counts

    def found(self) -> Iterator[tuple[int, int]]:
        """Yields the numbers of each evaluation prompt with a phrase that is not COMMON, and of a training prompt."""
        counts = self._prompts[self._places]
        telling = np.flatnonzero((counts > 0) & (counts <= COMMON))
        owners, first = np.unique(self._owners[telling], return_index=True)
        return zip(owners.tolist(), self._first[self._places[telling[first]]].tolist(), strict=True)

    @staticmethod
    def _slots(keys: np.ndarray) -> np.ndarray:
        return keys >> np.uint64(64 - _TABLE_BITS)


def _powers(base: int, count: int) -> np.ndarray:
    """Returns base⁰, base¹, … modulo 2⁶⁴."""
    return _all_powers(base, 1 << count.bit_length())[:count]


@functools.lru_cache(4)
def _all_powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)

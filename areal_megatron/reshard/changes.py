"""What differs between two states of a tensor, as few bytes from which the later state is made bit by bit.

In an optimizer step at a learning rate of 1e-6 about 1.5% of bfloat16 weights change, nearly all of them to a
neighbouring number. So a change is the difference of the bits, read as an integer, and its place is the gap to the one
before: each mostly fits into one byte. Differences are taken modulo the integer's range, so that any two states have
one, NaN and changes of sign included, and consecutive differences add up.

Encoded changes are a head of fixed length and three parts, which may be compressed together:

| part | bytes | content |
|---|---|---|
| places | one for each change, and one more for every 255 elements in a row without one | gaps: 255 stands for 255 |
| | | elements without a change, less is followed by a change. Where that is smaller, a bit for each element |
| differences | one for each change | from −127 to 127; −128 stands for one that does not fit |
| wide differences | an element's for each that does not fit | in the order of their places |

The head has checksums of the parts, and of what the changed elements become: whoever applies changes to another base
than theirs is told before anything has changed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_megatron.reshard.session import LISTED

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the signed integers of that size."""
_HEAD = struct.Struct("<BBBxQQQQQII")
"""Width of an element, whether places are gaps, whether the parts are compressed; number of elements, of changes, bytes
of places, number of wide differences, bytes of the parts as they are stored; checksums of these bytes and of the
changed elements' later bits."""
HEAD_BYTES = _HEAD.size
_SKIP = 255
_WIDE = -128
_ZSTD_LEVEL = 1
_CACHED = 2**17
"""Elements that `find` compares at a time on a CPU."""
_SPARSE = 0.1
"""The share of changed elements up to which it is faster to compare whole words first."""


class ChangesError(ValueError):
    """Bytes are no changes, or another base's; the message is one line."""


def bits(tensor: Tensor) -> Tensor:
    """Returns the same memory as integers."""
    return tensor.detach().view(INTEGERS[tensor.dtype.itemsize])


@dataclass(frozen=True)
class Changes:
    """The elements of a flat tensor that differ between two of its states. Arrays are in the memory of the host."""

    elements: int
    """How many the tensor has."""
    places: np.ndarray
    """[changes] int64, ascending."""
    differences: np.ndarray
    """[changes] signed integers as wide as an element: later bits less earlier bits, modulo their range."""
    checksum: int
    """CRC-32 of the later bits of the changed elements, one after another."""

    def after(self, earlier: np.ndarray) -> np.ndarray:
        """Returns the later bits of the changed elements from their earlier bits.

        Raises ChangesError if these are not what the changes are based on.
        """
        later = earlier + self.differences
        if zlib.crc32(later) != self.checksum:
            raise ChangesError("the changes are based on other weights than those that are there")
        return later

    def apply(self, state: np.ndarray) -> None:
        """Makes the later state of the earlier one, a flat array of integers, in place.

        Raises ChangesError, with nothing changed, if `state` is not the earlier state.
        """
        if state.size != self.elements:
            raise ChangesError(f"changes of {self.elements} elements are not those of a tensor of {state.size}")
        state[self.places] = self.after(state[self.places])


def find(base: Tensor, now: Tensor) -> tuple[Changes, np.ndarray]:
    """Returns how `now` differs from `base`, flat tensors of one dtype, and what the bits of the changed elements are.

    `base` is in the memory of the host; `now` may be on a device.
    """
    before, after = bits(base), bits(now)
    if after.device.type == "cpu":  # numpy finds them faster than torch
        places, values, differences = _compare(before.numpy(), after.numpy())
    else:
        places, values, differences = compare_on_device(before, after)
    return Changes(base.numel(), places, differences, zlib.crc32(values)), values


def compare_on_device(earlier: Tensor, later: Tensor) -> tuple[np.ndarray, ...]:
    """Returns places, later bits and differences of `later` on a device from `earlier` in the memory of the host.

    A host that copies or looks waits for all that training has launched before, so this makes three copies at most:
    `earlier` to the device, what the device lists from there and, if that is not all, `later` as a whole.
    """
    listed = later.numel() // LISTED
    before = torch.empty_like(later).copy_(earlier, non_blocking=True)
    differ = before != later
    where = torch.nonzero_static(differ, size=listed, fill_value=0).view(-1)
    parts = differ.sum().view(1), later[where] - before[where], where.to(torch.int32)
    told = memoryview(_on_host(torch.cat([part.view(torch.uint8) for part in parts])))
    count = int(np.frombuffer(told, np.int64, 1)[0])
    if count > listed:
        return _compare(earlier.numpy(), _on_host(later))
    width = earlier.itemsize
    differences = np.frombuffer(told, f"i{width}", count, 8)
    places = np.frombuffer(told, np.int32, count, 8 + width * listed).astype(np.int64)
    return places, earlier.numpy()[places] + differences, differences


def _on_host(tensor: Tensor) -> np.ndarray:
    pinned = tensor.device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor).numpy()


def _compare(earlier: np.ndarray, later: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns places, later bits and differences, looking at as much at a time as stays in a core's cache."""
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    share = 0.0
    for start in range(0, max(earlier.size, 1), _CACHED):
        before, after = earlier[start : start + _CACHED], later[start : start + _CACHED]
        if share <= _SPARSE and before.size == _CACHED:
            places, before, after = _compare_words(before, after)
        else:
            places = np.flatnonzero(before != after)
            before, after = before[places], after[places]
        share = len(places) / _CACHED
        found.append((places + start, after, after - before))
    places, values, differences = map(np.concatenate, zip(*found, strict=True))
    return places, values, differences


def _compare_words(earlier: np.ndarray, later: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns places, earlier and later bits of the elements that differ: of words of eight bytes first, most of which
    are alike where few elements differ."""
    before, after = earlier.view(np.int64), later.view(np.int64)
    words = np.flatnonzero(before != after)
    before, after = before[words].view(earlier.dtype), after[words].view(later.dtype)
    differ = np.flatnonzero(before != after)
    in_word = 8 // earlier.itemsize
    word = differ // in_word
    return (words[word] - word) * in_word + differ, before[differ], after[differ]


def merge(earlier: Changes, later: Changes, now: np.ndarray) -> Changes:
    """Returns the changes from the base of `earlier` to `now`, the bits that `later` leads to; it is based on what
    `earlier` leads to."""
    places = np.concatenate([earlier.places, later.places])
    order = np.argsort(places, kind="stable")
    places = places[order]
    first = np.flatnonzero(np.diff(places, prepend=-1))
    differences = np.concatenate([earlier.differences, later.differences])[order]
    differences = np.add.reduceat(differences, first, dtype=differences.dtype)
    lasting = differences != 0
    places, differences = places[first][lasting], differences[lasting]
    return Changes(now.size, places, differences, zlib.crc32(now[places]))


def encode(changes: Changes, compress: Callable[[bytes], bytes] | None = None) -> bytes:
    """Returns the changes as bytes; `compress` is `zstd`, or None."""
    as_gaps = len(changes.places) <= changes.elements // 8
    places = _gaps(changes.places) if as_gaps else _bitmap(changes)
    narrow = changes.differences.astype(np.int8)
    is_wide = np.flatnonzero((narrow != changes.differences) | (narrow == _WIDE))
    wide = changes.differences[is_wide]
    narrow[is_wide] = _WIDE
    parts = b"".join((places.tobytes(), narrow.tobytes(), wide.tobytes()))
    stored = compress(parts) if compress else parts
    head = _HEAD.pack(
        changes.differences.itemsize,
        as_gaps,
        compress is not None,
        changes.elements,
        len(narrow),
        len(places),
        len(wide),
        len(stored),
        zlib.crc32(stored),
        changes.checksum,
    )
    return head + stored


def decode(encoded: bytes | memoryview, elements: int, itemsize: int) -> tuple[Changes, int]:
    """Returns the changes of a tensor of `elements` elements of `itemsize` bytes, and how many bytes they were;
    `encoded` may go on after them. Raises ChangesError unless they are whole and possible.
    """
    encoded = memoryview(encoded)
    if len(encoded) < HEAD_BYTES:
        raise ChangesError("the changes are cut off")
    width, as_gaps, compressed, size, count, place_bytes, wide_count, length, checksum, result = _HEAD.unpack_from(
        encoded
    )
    if (width, size) != (itemsize, elements):
        raise ChangesError(f"changes of {size} elements of {width} bytes where {elements} of {itemsize} are expected")
    bitmap_bytes = -(-elements // 8)
    if count > elements or wide_count > count or place_bytes > (count + elements // _SKIP if as_gaps else bitmap_bytes):
        raise ChangesError("the changes are more than the tensor has elements")
    stored = encoded[HEAD_BYTES : HEAD_BYTES + length]
    if len(stored) < length:
        raise ChangesError("the changes are cut off")
    if zlib.crc32(stored) != checksum:
        raise ChangesError("the checksum of the changes is wrong")
    raw = place_bytes + count + wide_count * width
    parts = _decompress(stored, raw) if compressed else stored
    if len(parts) != raw:
        raise ChangesError("the changes have another length than they say")
    data = np.frombuffer(parts, np.uint8)
    places = _places(data[:place_bytes], as_gaps)
    differences = data[place_bytes : place_bytes + count].view(np.int8).astype(f"i{width}")
    is_wide = np.flatnonzero(differences == _WIDE)
    if len(places) != count or len(is_wide) != wide_count or (count and places[-1] >= elements):
        raise ChangesError("the places of the changes are impossible")
    differences[is_wide] = np.frombuffer(data[place_bytes + count :].tobytes(), differences.dtype)
    return Changes(elements, places, differences, result), HEAD_BYTES + length


def zstd(parts: bytes) -> bytes:
    """Returns the parts compressed."""
    import zstandard  # which nobody needs who sends changes as they are

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(parts)


def _decompress(stored: memoryview, length: int) -> bytes:
    import zstandard

    try:
        # the length that the frame states is not believed: no more than `length` bytes are made
        return zstandard.ZstdDecompressor().stream_reader(stored).read(length + 1)
    except zstandard.ZstdError as e:
        raise ChangesError(f"the changes cannot be decompressed: {e}") from None


def _gaps(places: np.ndarray) -> np.ndarray:
    gaps = np.diff(places, prepend=-1) - 1
    wide = np.flatnonzero(gaps >= _SKIP)
    skips, rest = np.divmod(gaps[wide], _SKIP)
    encoded = gaps.astype(np.uint8)
    encoded[wide] = rest
    return np.insert(encoded, np.repeat(wide, skips), _SKIP)


def _bitmap(changes: Changes) -> np.ndarray:
    mask = np.zeros(changes.elements, bool)
    mask[changes.places] = True
    return np.packbits(mask)


def _places(encoded: np.ndarray, as_gaps: bool) -> np.ndarray:
    if not as_gaps:
        return np.flatnonzero(np.unpackbits(encoded))
    ends = encoded != _SKIP
    steps = np.cumsum(encoded + ends.astype(np.int64))  # an element that changes is one step itself
    return steps[ends] - 1

"""Changes of weights: found, encoded, decoded, merged and applied, bit by bit; bytes that are none are refused."""

import struct
import zlib

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_megatron.reshard.boxes import Box, Piece
from areal_megatron.reshard.changes import (
    HEAD_BYTES,
    ChangesError,
    bits,
    compare_on_device,
    decode,
    encode,
    find,
    merge,
    zstd,
)
from areal_megatron.reshard.edits import Places

EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, *EIGHT_BITS]
COMPRESSORS = [None, zstd]


def _states(dtype: torch.dtype, elements: int, share: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states of a tensor, of which `share` of the elements differ: half of those by a step to the next number, the
    others by any bits, NaN, infinities and zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.02 if dtype.is_floating_point else 50
    before = bits(
        (torch.randn(elements, generator=generator) * scale).to(torch.int16 if scale > 1 else dtype).to(dtype)
    )
    changed = torch.rand(elements, generator=generator) < share
    other = torch.randint(0, 256, (elements * dtype.itemsize,), generator=generator).to(torch.uint8).view(before.dtype)
    if dtype.is_floating_point:
        odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0]).to(dtype)
        other[: len(odd)] = bits(odd)[: len(other[:5])]
    by_step = torch.rand(elements, generator=generator) < 0.5
    after = torch.where(changed, torch.where(by_step, before + 1, other), before)
    return before.view(dtype), after.view(dtype)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return bits(tensor.clone()).numpy()


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("share", [0, 1e-4, 0.015, 0.12, 0.13, 0.6, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_later_state_comes_out_bit_by_bit(dtype, share, compression):
    before, after = _states(dtype, 50_001, share)
    changes, values = find(before, after)
    assert np.array_equal(changes.places, np.flatnonzero(_array(before) != _array(after)))
    assert np.array_equal(values, _array(after)[changes.places])
    encoded = encode(changes, compression)
    found, length = decode(encoded + b"what comes next", 50_001, dtype.itemsize)
    assert length == len(encoded)
    state = _array(before)
    found.apply(state)
    assert np.array_equal(state, _array(after))


@pytest.mark.parametrize("shares", [(0.01, 0.5, 0.01, 0), (0.5, 0.01, 0.3, 0.01)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_different_density_are_compared_alike(dtype, shares):
    """The tensor has several blocks, of which the last one is short."""
    generator = torch.Generator().manual_seed(0)
    width = dtype.itemsize
    parts, flips = [], []
    for share, elements in zip(shares, (2**17, 2**17, 2**18, 77_777), strict=True):
        parts.append(torch.randint(0, 256, (elements * width,), generator=generator).to(torch.uint8))
        flips.append((torch.rand(elements * width, generator=generator) < share / width).to(torch.uint8))
    before = torch.cat(parts)
    after = before ^ torch.cat(flips)
    changes, values = find(before.view(dtype), after.view(dtype))
    earlier, later = _array(before.view(dtype)), _array(after.view(dtype))
    assert np.array_equal(changes.places, np.flatnonzero(earlier != later))
    assert np.array_equal(values, later[changes.places])
    changes.apply(earlier)
    assert np.array_equal(earlier, later)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_the_same_changes_are_found(dtype):
    before, after = _states(dtype, 50_001, 0.1)
    (here, values), (there, values_there) = find(before, after), find(before.cuda(), after.cuda())
    assert encode(here) == encode(there) and np.array_equal(values, values_there)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 1000, 3501])
@pytest.mark.parametrize("share", [0, 0.01, 0.1, 0.125, 0.2, 1])
def test_a_device_finds_what_a_host_does(elements, share, dtype):
    """Also where more has changed than a device lists."""
    base, now = _states(dtype, elements, share)
    expected, values = find(base, now)
    places, later, differences = compare_on_device(bits(base), bits(now))
    assert np.array_equal(places, expected.places) and np.array_equal(later, values)
    assert np.array_equal(differences, expected.differences)
    assert [a.dtype for a in (places, later, differences)] == [np.int64, values.dtype, values.dtype]


class Crossings(TorchDispatchMode):
    """Counts what a host that uses a GPU copies from it or to it, or waits for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        waits = packet in (torch.ops.aten.copy_, torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense)
        self.count += waits or (packet == torch.ops.aten._to_copy and "device" in (kwargs or {}))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("one_in", "crossings"), [(100, 2), (2, 3)], ids=["few changes", "many"])
def test_a_message_is_compared_by_three_copies_at_most(one_in, crossings):
    """One of 64 MiB, as GPUs send; each copy waits for what training has launched before."""
    base = torch.zeros(2**25, dtype=torch.bfloat16)
    now = base.clone()
    now[::one_in] = 1
    with Crossings() as seen:
        places, *_ = compare_on_device(bits(base), bits(now))
    assert len(places) == -(-(2**25) // one_in) and seen.count == crossings


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 254, 255, 256, 257, 511, 70_000])
def test_changes_at_both_ends_and_after_long_gaps(elements):
    before = torch.zeros(elements, dtype=torch.bfloat16)
    for at in {0, 1, 253, 254, 255, 256, 510, elements // 2, elements - 1} & set(range(elements)):
        after = before.clone()
        after[at] = 1
        after[-1] = -2
        found, _ = decode(encode(find(before, after)[0]), elements, 2)
        state = _array(before)
        found.apply(state)
        assert np.array_equal(state, _array(after))


def test_a_small_change_costs_two_bytes_and_half_of_that_compressed():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(2**20, generator=generator).bfloat16()
    up = torch.rand(2**20, generator=generator) < 0.015
    after = (bits(before) + up.to(torch.int16)).view(torch.bfloat16)
    changes, _ = find(before, after)
    assert len(encode(changes)) < 2.15 * len(changes.places)
    assert len(encode(changes, zstd)) < 1.2 * len(changes.places)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_changes_lead_from_the_first_state_to_the_last(dtype):
    first, second = _states(dtype, 10_000, 0.1, seed=1)
    back = torch.rand(10_000) < 0.05
    third = torch.where(back, bits(first), bits(second)).view(dtype)
    changes = merge(find(first, second)[0], find(second, third)[0], _array(third))
    state = _array(first)
    changes.apply(state)
    assert np.array_equal(state, _array(third))


@pytest.mark.parametrize("live", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
def test_changes_of_eight_bits_are_written_into_live_parameters(live):
    """A parameter may be of a wider dtype than the message."""
    # NaN of a narrow dtype has no single wider one
    before, after = (torch.where(s.float().isnan(), 0, bits(s)).view(s.dtype) for s in _states(EIGHT_BITS[0], 600, 0.2))
    parameters = {"weight": before.to(live).view(20, 30)}
    box = Box((0, 0), (20, 30))
    places = Places([Piece("weight", box, "weight", box, (0, 1))], parameters, before.dtype)
    changes, _ = decode(encode(find(before, after)[0]), 600, 1)
    edits, later = places.edits(changes)
    assert np.array_equal(later, _array(after)[changes.places]) and len(later)
    for edit in edits:
        edit.write()
    assert torch.equal(bits(parameters["weight"].view(-1)), bits(after.to(live)))


def test_changes_of_another_base_are_refused_and_nothing_changes():
    before, after = _states(torch.bfloat16, 10_000, 0.05)
    changes, _ = find(before, after)
    other = _array(before)
    other[changes.places[3]] ^= 1
    held = other.copy()
    with pytest.raises(ChangesError, match="based on other weights"):
        changes.apply(other)
    assert np.array_equal(other, held)
    with pytest.raises(ChangesError, match="not those of a tensor of 9999"):
        changes.apply(held[:-1])


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_every_flipped_byte_is_found(compression):
    before, after = _states(torch.bfloat16, 300, 0.2)
    encoded = encode(find(before, after)[0], compression)
    for at in range(len(encoded)):
        wrong = bytearray(encoded)
        wrong[at] ^= 1 << at % 8
        state = _array(before)
        try:
            decode(bytes(wrong), 300, 2)[0].apply(state)
        except ChangesError:
            assert np.array_equal(state, _array(before))
        else:  # padding of the head
            assert np.array_equal(state, _array(after))
    for length in range(len(encoded)):
        with pytest.raises(ChangesError):
            decode(encoded[:length], 300, 2)


def test_lengths_that_lie_are_refused_before_anything_is_made():
    before, after = _states(torch.bfloat16, 1000, 0.2)
    encoded = bytearray(encode(find(before, after)[0], zstd))
    for offset in (12, 20, 28, 36):  # numbers of changes, bytes of places, wide differences, stored bytes
        for lie in (0, 2**20, 2**40, 2**63):
            wrong = encoded.copy()
            struct.pack_into("<Q", wrong, offset, lie)
            with pytest.raises(ChangesError):
                decode(bytes(wrong), 1000, 2)


def test_compressed_changes_are_never_more_than_they_say():
    bomb = zstd(bytes(2**28))
    head = struct.pack("<BBBxQQQQQII", 2, 1, 1, 1000, 10, 10, 0, len(bomb), zlib.crc32(bomb), 0)
    assert len(head) == HEAD_BYTES
    with pytest.raises(ChangesError, match="another length"):
        decode(head + bomb, 1000, 2)


def test_no_bytes_are_taken_for_changes():
    generator = np.random.default_rng(0)
    for _ in range(2000):
        with pytest.raises(ChangesError):
            decode(generator.bytes(int(generator.integers(0, 200))), 100, 2)

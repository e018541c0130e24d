"""How many logits are held at a time, and in tiles of which shape."""

from itertools import product

import pytest

from areal_megatron.models.logits import BYTES, cpu_logits, gpu_logits, tile

GIB = 2**30


@pytest.mark.parametrize(
    ("gib", "logits"), [(0, 2**27), (15.7, 2**24), (24, 2**25), (40, 2**26), (79.1, 2**27), (80, 2**27), (180, 2**28)]
)
def test_larger_gpus_hold_more(gib, logits):
    assert gpu_logits(gib * GIB) == logits
    assert BYTES * logits <= 0.02 * (gib or 80) * GIB


def test_a_core_holds_what_its_cache_does():
    assert cpu_logits(4) == 4 * cpu_logits(1)
    assert BYTES * cpu_logits(1) <= 2 * 2**20


def test_tiles_hold_what_they_may_and_no_more_than_there_is():
    for tokens, columns, logits in product((0, 1, 500, 32768), (0, 1, 300, 151936), (1, 7, 2**17, 3 * 2**17, 2**29)):
        high, wide = tile(tokens, columns, logits)
        assert high >= 1 and wide >= 1 and high * wide <= logits
        assert high <= max(tokens, 1) and wide <= max(columns, 1)


@pytest.mark.parametrize(
    ("tokens", "columns", "logits", "expected"),
    [
        (32768, 151936, 2**27, (16384, 8192)),  # nearly square
        (32768, 151936, 2**29, (32768, 16384)),
        (5000, 151936, 2**27, (5000, 26752)),  # few tokens: wide, and a multiple of 128
        (100, 1000, 2**17, (100, 1000)),  # all in one
        (32768, 500, 2**17, (512, 256)),
    ],
)
def test_shapes_of_tiles(tokens, columns, logits, expected):
    assert tile(tokens, columns, logits) == expected

"""The algebra of boxes, on arrays of numbered elements."""

from math import prod

import numpy as np
import pytest

from areal_megatron.reshard.boxes import Box, whole


def test_a_box_within_another_selects_the_same_elements_there():
    values = np.arange(5 * 6 * 7).reshape(5, 6, 7)
    outer, inner = Box((1, 2, 0), (4, 6, 5)), Box((2, 2, 3), (4, 5, 5))
    assert np.array_equal(values[outer.slices][inner.within(outer).slices], values[inner.slices])
    assert inner.within(outer) == Box((1, 0, 3), (3, 3, 5))
    assert inner.within(outer).shifted(outer.start) == inner


def test_shifted_moves_each_axis_by_its_own_distance():
    assert Box((0, 1), (2, 3)).shifted((5, 0)) == Box((5, 1), (7, 3))
    with pytest.raises(ValueError, match="zip"):
        Box((0, 1), (2, 3)).shifted((5,))


@pytest.mark.parametrize("box", [Box((1, 2, 0), (4, 6, 5)), Box((0,), (9,)), Box((), ()), whole((1, 3, 2, 2))])
@pytest.mark.parametrize("elements", [1, 3, 7, 20, 1000])
def test_cut_gives_the_elements_once_and_in_order(box, elements):
    values = np.arange(prod(box.stop)).reshape(box.stop)
    parts = list(box.cut(elements))
    assert all(part.size <= elements for part in parts)
    assert (
        np.concatenate([values[part.slices].ravel() for part in parts]).tolist() == values[box.slices].ravel().tolist()
    )
    assert len(parts) == 1 or box.size > elements


def test_cut_gives_parts_as_equal_as_their_rows_allow():
    assert [part.shape for part in whole((10, 3)).cut(27)] == [(5, 3), (5, 3)]
    assert [part.shape for part in whole((7, 3)).cut(9)] == [(3, 3), (3, 3), (1, 3)]
    assert [part.shape for part in whole((2, 9)).cut(8)] == [(1, 5), (1, 4)] * 2


def test_singles_have_one_index_along_the_first_axes():
    box = Box((2, 0, 1), (4, 3, 6))
    assert list(box.singles(0)) == [box]
    assert list(box.singles(1)) == [Box((2, 0, 1), (3, 3, 6)), Box((3, 0, 1), (4, 3, 6))]
    assert [single.start[:2] for single in box.singles(2)] == [(i, j) for i in (2, 3) for j in range(3)]
    assert all(single.shape == (1, 1, 5) for single in box.singles(2))

"""Weights in 8 bits with a scale for each block of 128 × 128, as DeepSeek publishes them, read as whole ones."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from areal_megatron.checkpoint.disk import FP8, Extent, OpenFiles, cast, read_box
from areal_megatron.reshard.boxes import Box, Shape

BLOCK = 128
SCALE = "_scale_inv"
"""How the name of a weight's scales ends, after the weight's own: what its elements are multiplied by."""


def scale_shape(shape: Shape) -> Shape:
    """Returns the shape of a matrix's scales."""
    return tuple(-(-size // BLOCK) for size in shape)


def read_scaled(files: OpenFiles, extent: Extent, scales: Extent, box: Box, out: ndarray, dtype: str) -> None:
    """Fills `out`, an array of the box's shape for elements of `dtype`, with a box of a matrix: each element times the
    scale of its block, in float32, rounded once. Raises CheckpointError as `read_box` does."""
    stored = np.empty(box.shape, np.uint8)
    read_box(files, extent, box, stored, FP8)
    blocks = Box(tuple(start // BLOCK for start in box.start), scale_shape(box.stop))
    factors = np.empty(blocks.shape, np.uint32)
    read_box(files, scales, blocks, factors, "float32")  # of which some models have rounded ones
    rows, columns = (
        np.arange(start, stop) // BLOCK - start // BLOCK for start, stop in zip(box.start, box.stop, strict=True)
    )
    values = cast(stored, FP8, "float32").view(np.float32)
    values *= factors.view(np.float32)[rows][:, columns]
    whole = values.view(np.uint32)
    out[...] = whole if dtype == "float32" else cast(whole, "float32", dtype)

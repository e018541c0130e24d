"""Boxes of tensors in files, against the same slices of arrays."""

import itertools
import os

import numpy as np
import pytest
import torch

from areal_megatron.checkpoint import disk
from areal_megatron.reshard.boxes import Box

SHAPES = {
    "short-rows": (9000, 300),
    "long-rows": (3, 70_000),
    "rows-of-short-rows": (3, 400, 5, 6),
    "rows-of-long-ones": (2, 5, 9000),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_any_box_is_read_in_either_dtype(tmp_path, shape):
    random, files = np.random.default_rng(0), disk.OpenFiles()
    tensor = torch.from_numpy(random.normal(size=shape)).to(torch.bfloat16)
    (tmp_path / "file").write_bytes(b"header" + tensor.view(torch.uint16).numpy().tobytes())
    extent = disk.Extent(tmp_path / "file", 6, "bfloat16", Box((0,) * len(shape), shape))
    ends = [((0, size), (1, size - 1), (size // 2, size // 2 + 1)) for size in shape]
    for box in itertools.product(*ends):
        start, stop = zip(*box, strict=True)
        expected = tensor[tuple(slice(*own) for own in box)]
        for dtype in ("bfloat16", "float32"):
            whole = disk.empty((*expected.shape[:-1], expected.shape[-1] + 2), dtype)
            for out in (disk.empty(tuple(expected.shape), dtype), whole[..., 1:-1]):
                disk.read_box(files, extent, Box(start, stop), out, dtype)
                found = torch.from_numpy(np.ascontiguousarray(out)).view(getattr(torch, dtype))
                assert torch.equal(found, expected.to(found.dtype)), (box, dtype)
    files.close()


def test_parts_of_short_rows_are_read_in_few_calls(tmp_path, monkeypatch):
    """A slice of experts' output projections for two ranks: a call for each row would take seventeen times as long."""
    calls, read = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: (calls.append(1), read(*arguments))[1])
    (tmp_path / "file").write_bytes(bytes(2 * 2048 * 768 * 2))
    extent = disk.Extent(tmp_path / "file", 0, "bfloat16", Box((0, 0), (2 * 2048, 768)))
    files, box = disk.OpenFiles(), Box((0, 0), (2 * 2048, 384))
    disk.read_box(files, extent, box, disk.empty(box.shape, "bfloat16"), "bfloat16")
    files.close()
    assert len(calls) == 2

"""Files of checkpoints: runs of elements as boxes, and images that are copied into at every save."""

import errno
import io
import random
import zlib
from math import prod

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from areal_megatron.checkpoint import torch_dist_file
from areal_megatron.checkpoint.torch_dist_file import Image, Stored
from areal_megatron.reshard.boxes import Box, boxes, whole
from areal_megatron.run.folder import RunError

SHAPES = [(1,), (7,), (5, 4), (1, 9), (9, 1), (3, 4, 5), (2, 1, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_the_elements_of_a_run_in_order(shape):
    values = torch.arange(prod(shape)).view(shape)
    for start in range(values.numel() + 1):
        for stop in range(start, values.numel() + 1):
            parts = list(boxes(shape, start, stop))
            elements = [values[box.slices].flatten() for box in parts]
            assert torch.cat([torch.empty(0, dtype=torch.int64), *elements]).tolist() == list(range(start, stop))
            assert len(parts) <= 2 * len(shape) - 1


def test_torch_reads_what_two_ranks_wrote_and_each_save_anew(tmp_path):
    random.seed(0)
    shape = (6, 5)
    values = torch.randn(shape)
    cut = 13
    flat = [values.flatten()[:cut].clone(), values.flatten()[cut:].clone()]
    moments = torch.randn(3, dtype=torch.float64).to(torch.bfloat16)
    entries = {}
    for rank, (start, stop) in enumerate([(0, cut), (cut, 30)]):
        at, tensors = 0, []
        for box in boxes(shape, start, stop):
            tensors.append(Stored("weight", shape, box, flat[rank][at : at + box.size]))
            at += box.size
        if rank == 0:
            tensors.append(Stored("moments", (3,), whole((3,)), moments))
        subject = Image(tensors, {"nothing/shard_0_1": None} if rank else {})
        entries[f"__{rank}_0.distcp"] = subject.entries
        flat[rank] *= 2  # the image takes what is there when it is asked to
        subject.copy()
        flat[rank] *= 2
        subject.write(tmp_path / f"__{rank}_0.distcp")
    torch_dist_file.describe(tmp_path, torch_dist_file.metadata(entries), b"")
    found = {}
    _load_state_dict(
        found, storage_reader=FileSystemReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert torch.equal(found["weight"], 2 * values) and torch.equal(found["moments"], moments)


@pytest.mark.parametrize("second", [Box((1, 0), (3, 2)), Box((0, 0), (2, 2)), None])
def test_elements_that_nobody_or_two_ranks_would_store_are_refused(second):
    stored = [Stored("weight", (4, 2), box, torch.zeros(4)) for box in (Box((0, 0), (2, 2)), second) if box]
    if second == Box((1, 0), (3, 2)):
        stored.append(Stored("weight", (4, 2), Box((3, 0), (4, 2)), torch.zeros(2)))
    with pytest.raises(RunError, match="elements of weight, which has 8"):
        torch_dist_file.metadata({"file": Image(stored, {}).entries})


@pytest.mark.parametrize("elements", [1, 1024, 300_000])
@pytest.mark.parametrize("refused_at", ["", "open", "write"])
def test_a_file_is_the_same_where_the_file_system_refuses_direct_writes(tmp_path, monkeypatch, elements, refused_at):
    values = torch.randn(elements)
    subject = Image([Stored("weight", (elements,), whole((elements,)), values)], {"nothing": None})
    subject.copy()
    subject.write(tmp_path / "direct")
    refusal = OSError(errno.EINVAL, "Invalid argument")
    write, opened = torch_dist_file._write, []

    def refuse_to_open(path, flags):
        raise refusal

    def refuse_to_write(file, data):
        opened.append(file)
        if len(opened) == 1:
            file.write(data[:4096])
            raise refusal
        write(file, data)

    if refused_at == "open":
        monkeypatch.setattr(torch_dist_file, "_direct", refuse_to_open)
    elif refused_at == "write":
        monkeypatch.setattr(torch_dist_file, "_write", refuse_to_write)
    subject.write(tmp_path / "other")
    written = (tmp_path / "other").read_bytes()
    assert written == (tmp_path / "direct").read_bytes()
    last = subject.entries[-1]
    assert last.offset + last.length <= len(written) < last.offset + last.length + 64
    first = subject.entries[0]
    assert torch.equal(torch.load(io.BytesIO(written[first.offset : first.offset + first.length])), values)


@pytest.mark.parametrize("gib", [0.0001, 1.0, 1.1, 2.2, 4.45, 17.0, 31.9])
def test_an_image_asks_for_no_more_pinned_memory_than_its_file_takes(monkeypatch, gib):
    """torch takes a power of two for each pinned tensor, of 1, 2, 7, 14 and 32 billion parameters on many ranks too."""
    asked, size = [], int(gib * 2**30) + 1

    def zeros(length, *, dtype, pin_memory):
        assert pin_memory and dtype == torch.uint8
        asked.append(length)
        return torch.empty(length, dtype=dtype, device="meta")

    monkeypatch.setattr(torch_dist_file.torch, "zeros", zeros)
    pieces = torch_dist_file._pieces(size, pinned=True)
    taken = sum(1 << (length - 1).bit_length() for length in asked)
    assert size <= sum(map(len, pieces)) <= taken < size + 2**20


@pytest.mark.parametrize("largest", [4096, 8192, 2**16])
def test_a_file_is_the_same_in_pieces_and_whole(tmp_path, monkeypatch, largest):
    """Whatever lies across the end of a piece: elements, or what torch.save writes around them."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        Stored(f"weight{n}", (count,), whole((count,)), torch.randn(count, generator=generator).to(dtype))
        for n, (count, dtype) in enumerate(
            [
                (1, torch.float32),
                (30_011, torch.bfloat16),
                (700, torch.float64),
                (513, torch.uint8),
                (9000, torch.int64),
            ]
        )
    ]
    objects = {f"state{n}": list(range(500)) for n in range(5)}
    in_one = Image(tensors, objects)
    monkeypatch.setattr(torch_dist_file, "_LARGEST", largest)
    monkeypatch.setattr(torch_dist_file, "_SMALLEST", 4096)
    in_pieces = Image(tensors, objects)
    assert len(in_pieces._pieces) > 2 and len(in_one._pieces) == 1
    crcs = []
    for name, image in (("one", in_one), ("pieces", in_pieces)):
        image.copy()
        crcs.append(image.write(tmp_path / name))
    data = (tmp_path / "one").read_bytes()
    assert data == (tmp_path / "pieces").read_bytes() and set(crcs) == {zlib.crc32(data)}
    for stored, entry in zip(tensors, in_pieces.entries, strict=False):
        assert torch.equal(torch.load(io.BytesIO(data[entry.offset : entry.offset + entry.length])), stored.values)

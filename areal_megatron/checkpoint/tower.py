"""The part of a published model that takes images: it is not trained, and stays as it is, bit for bit, in all that is
made of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from numpy import ndarray

from areal_megatron.checkpoint.disk import BLOCK_BYTES, CheckpointError, appending
from areal_megatron.checkpoint.hf_folder import (
    SAFETENSORS_DTYPES,
    SHARD_BYTES,
    HfTensor,
    SafetensorsEntry,
    safetensors_entries,
    safetensors_header,
    write_weights,
)
from areal_megatron.models.architecture import takes_images
from areal_megatron.models.names import TOWER, published
from areal_megatron.models.weight_files import SINGLE, weight_map

FILE = "visual.safetensors"
"""The file of the part for images, in whatever is written."""


def copy(source: Path, folder: Path, sync: bool = False) -> tuple[dict[str, str], int]:
    """Writes the part for images of the model in `source`, a model folder or one that `copy` has written to, as one
    file of `folder`. Returns the file of each of its tensors and their bytes in all; nothing of a model of texts.

    Raises CheckpointError as `read` does, OSError.
    """
    held = read(source)
    if not held:
        return {}, 0
    entries = [(name, entry.dtype, entry.shape, entry.nbytes) for name, (_, entry) in held.items()]
    with appending(folder / FILE, sync) as append:
        append(safetensors_header(entries))
        for file, entry in held.values():
            for block in _blocks(file, entry):
                append(block)
    return dict.fromkeys(held, FILE), sum(entry.nbytes for _, entry in held.values())


def read(source: Path) -> dict[str, tuple[Path, SafetensorsEntry]]:
    """Returns where each tensor of the part for images lies; nothing of a model of texts.

    Raises CheckpointError where `source` lacks the part, or has it in a dtype that cannot be carried.
    """
    if not takes_images(source):
        return {}
    held = {name: (file, entry) for file in _files(source) for name, entry in safetensors_entries(file).items()}
    held = {name: held[name] for name in sorted(held) if name.startswith(TOWER)}
    if not held:
        raise CheckpointError(
            f"{source} has no tensor {TOWER}…, the part for images, which its config.json asks for: take a folder that "
            "has it, which `areal convert` takes as --config"
        )
    for name, (file, entry) in held.items():
        if entry.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"{file}: {name} has dtype {entry.dtype}; the part for images is carried as it is, and what is written "
                f"says nothing of scales: take a folder that has it in {', '.join(SAFETENSORS_DTYPES)}"
            )
    return held


def write_model(
    folder: Path,
    tensors: Sequence[HfTensor],
    blocks: Callable[[HfTensor], Iterator[ndarray]],
    source: Path,
    shard_bytes: int = SHARD_BYTES,
    sync: bool = False,
) -> None:
    """Writes a model as `write_weights` does. A model with images gets its published names, and the other part from the
    folder `source`."""
    beside, size = copy(source, folder, sync)
    if beside:
        tensors = [tensor._replace(name=published(tensor.name)) for tensor in tensors]
    write_weights(folder, tensors, blocks, shard_bytes, sync, beside, size)


def _files(source: Path) -> list[Path]:
    if (source / FILE).is_file():
        return [source / FILE]
    try:
        file_of = weight_map(source)
    except (OSError, ValueError):  # a folder that only describes a model
        return []
    named = {file for name, file in file_of.items() if name.startswith(TOWER)} if file_of else {SINGLE}
    return [source / file for file in sorted(named)]


def _blocks(file: Path, entry: SafetensorsEntry) -> Iterator[bytes]:
    with open(file, "rb") as stored:
        stored.seek(entry.offset)
        for begin in range(0, entry.nbytes, BLOCK_BYTES):
            yield stored.read(min(BLOCK_BYTES, entry.nbytes - begin))

"""A Hugging Face folder as files: weights read by boxes and written in shards, and all that is no weight. No torch."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from numpy import ndarray

from areal_megatron.checkpoint.disk import CheckpointError, Extent, OpenFiles, appending, raw, read_box
from areal_megatron.errors import printable
from areal_megatron.files import write_json
from areal_megatron.json_input import parse_json
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.reshard.boxes import Box, Shape, expand, numbers, whole

log = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "chat_template*",
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
    "README*",
)
"""Names of the files that describe a model. No code: models run without any of their own."""
SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
HEADER_LIMIT = 100 * 2**20
"""Bytes of a safetensors header; the safetensors library refuses more."""
SHARD_BYTES = 4 * 2**30
"""Bytes of the largest file that is written unless somebody asks for another size."""


class HfFolder:
    """The weights of a Hugging Face folder, read by boxes of canonical tensors.

    canonical: the patterns that will be read, with their whole shapes; files that hold none of them are not opened.
    model: the model's class, for errors. Raises CheckpointError where files are missing or damaged, or a tensor is
    missing or has another shape.
    """

    def __init__(self, folder: Path, canonical: Mapping[str, Shape], model: str = ""):
        expected, config = expand(canonical), f"config.json ({model})" if model else "config.json"
        file_of = _file_of(folder)
        files = sorted({file_of[name] for name in expected if name in file_of}) if file_of else [SINGLE]
        self._files = OpenFiles()
        self._extents: dict[str, Extent] = {}
        self.names = set(file_of)
        """Every tensor that the folder says it has."""
        for file in files:
            names, extents = safetensors_extents(folder / file, expected)
            self._extents |= extents
            self.names |= names
        for name, shape in expected.items():
            if name not in self._extents:
                raise CheckpointError(f"{folder} has no tensor {name}, which {config} asks for")
            if (found := self._extents[name].box.shape) != shape:
                raise CheckpointError(f"{folder}: {name} has shape {list(found)}, {config} asks for {list(shape)}")

    @classmethod
    def of_model(cls, folder: Path, hf_config: Mapping[str, Any]) -> HfFolder:
        """Opens the folder of exactly the model of hf_config: raises CheckpointError also for any other tensor."""
        model = architecture(hf_config)
        weights = cls(folder, model.canonical, model.name)
        for name in weights.names - weights._extents.keys():
            if not (name == "lm_head.weight" and model.tied) and not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(f"{folder} has a tensor {name}, which config.json ({model.name}) does not have")
        return weights

    def dtype(self, tensor: str, numbered: Shape | None = None) -> str:
        """Returns the dtype of the tensor of a canonical pattern that has these numbers, None for the first one."""
        return self._extents[tensor.format(*(numbered or [0] * numbers(tensor)))].dtype

    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None:
        """Fills `out`, an array of the box's shape for elements of `dtype`, with a box of a canonical pattern.

        The box must be within one layer and expert.
        """
        named = numbers(tensor)
        extent = self._extents[tensor.format(*box.start[:named])]
        read_box(self._files, extent, Box(box.start[named:], box.stop[named:]), out[(0,) * named], dtype)

    def close(self) -> None:
        self._files.close()


class HfTensor(NamedTuple):
    """One tensor of a Hugging Face folder: a box of the canonical pattern `pattern`."""

    name: str
    pattern: str
    box: Box
    dtype: str

    @property
    def shape(self) -> Shape:
        return self.box.shape[numbers(self.pattern) :]

    @property
    def nbytes(self) -> int:
        return self.box.size * ITEMSIZE[self.dtype]


def hf_tensors(canonical: Mapping[str, Shape], dtype: Callable[[str], str]) -> list[HfTensor]:
    """Returns the tensors of a Hugging Face folder, layer by layer; dtype: from a pattern to its dtype."""
    found = []
    for _, patterns in groupby(canonical, key=lambda pattern: bool(numbers(pattern))):
        boxes = [(name, box) for name in patterns for box in whole(canonical[name]).singles(numbers(name))]
        for pattern, box in sorted(boxes, key=lambda pair: pair[1].start[0]):
            name = pattern.format(*box.start[: numbers(pattern)])
            found.append(HfTensor(name, pattern, box, dtype(pattern)))
    return found


def write_weights(
    folder: Path,
    tensors: Iterable[HfTensor],
    blocks: Callable[[HfTensor], Iterable[ndarray]],
    shard_bytes: int = SHARD_BYTES,
    sync: bool = False,
) -> None:
    """Writes safetensors files of at most shard_bytes (or one tensor), and their index if there are several.

    blocks: makes the contiguous arrays that are a tensor's elements one after another; each is written while the next
    one is made, and may change after that. sync: the files will be synced. Raises OSError.
    """
    files: list[list[HfTensor]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if files[-1] and size > shard_bytes:
            files.append([])
            size = tensor.nbytes
        files[-1].append(tensor)
    weight_map = {}
    for number, held in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        with appending(folder / name, sync) as append:
            append(safetensors_header(held))
            for tensor in held:
                for block in blocks(tensor):
                    append(raw(block))
        weight_map |= {tensor.name: name for tensor in held}
    if len(files) > 1:
        total = sum(tensor.nbytes for held in files for tensor in held)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_description(source: Path, folder: Path, dtype: str, config: Mapping[str, Any] | None = None) -> None:
    """Copies what describes a model, by name (DESCRIPTION), out of its folder; config.json gets the dtype of the new
    weights. `config`: what it holds besides; by default what it holds in `source`.

    Everything else is named in one line of the log, also a link that leads out of the model's folder (and out of its
    folder in the Hugging Face cache): what it leads to may be private. Raises OSError, and ConfigError for config.json.
    """
    skipped = []
    for file in sorted(source.iterdir()):
        described = any(file.match(pattern) for pattern in DESCRIPTION)
        if file.name.startswith(".") or file.name.endswith((*WEIGHT_SUFFIXES, ".index.json")) or file.is_dir():
            continue
        if described and file.is_file() and _is_own(file.resolve(), source.resolve()):
            shutil.copyfile(file, folder / file.name)
        else:
            skipped.append(printable(file.name))
    if skipped:
        log.warning(
            "not copied from %s to %s: %s; only files of a model that have a usual name, and links within its "
            "folder, are",
            source,
            folder,
            ", ".join(skipped),
        )
    config = dict(read_config(source) if config is None else config)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    write_json(folder / "config.json", config)


def _is_own(target: Path, source: Path) -> bool:
    """Whether a file is the model's: in its folder, or where the Hugging Face cache keeps the model's files."""
    blobs = source.parent.parent / "blobs"
    return target.is_relative_to(source) or (source.parent.name == "snapshots" and target.parent == blobs)


def safetensors_extents(path: Path, wanted: Collection[str]) -> tuple[set[str], dict[str, Extent]]:
    """Returns the names of all tensors of a safetensors file, and the extents of those in `wanted`.

    Raises CheckpointError where the file is damaged or such a tensor has a dtype that is not in SAFETENSORS_DTYPES.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_LIMIT:
                raise ValueError("its header is too long")
            header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        extents = {}
        for name in header.keys() & wanted:
            entry = header[name]
            box, (start, stop) = whole(entry["shape"]), entry["data_offsets"]
            if entry["dtype"] not in SAFETENSORS_DTYPES:
                raise CheckpointError(
                    f"{path}: {name} has dtype {entry['dtype']}; supported are {', '.join(SAFETENSORS_DTYPES)}"
                )
            dtype = SAFETENSORS_DTYPES[entry["dtype"]]
            if stop - start != box.size * ITEMSIZE[dtype] or 8 + length + stop > size:
                raise ValueError(f"{name} does not lie in it whole")
            extents[name] = Extent(path, 8 + length + start, dtype, box)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from None
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise CheckpointError(f"{path} is truncated or no safetensors file: {e}; take another copy of it") from None
    return set(header), extents


def safetensors_header(tensors: Iterable[HfTensor]) -> bytes:
    """Returns the beginning of a safetensors file in which the tensors follow in this order."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        described = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[tensor.name] = described
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are to begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def _file_of(folder: Path) -> dict[str, str]:
    """Tensor → file by the index; empty where one file has everything and there is no index."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}; only safetensors are read")
        return {}
    try:
        return dict(parse_json(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{index} cannot be read: {e}") from None

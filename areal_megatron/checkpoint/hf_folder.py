"""A Hugging Face folder as files: weights read by boxes and written in shards, and all that is no weight. No torch."""

from __future__ import annotations

import json
import logging
import operator
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy import ndarray

from areal_megatron.checkpoint import fp8
from areal_megatron.checkpoint.disk import (
    FP8,
    BlockBuffers,
    CheckpointError,
    Extent,
    OpenFiles,
    appending,
    raw,
    read_box,
)
from areal_megatron.models import names
from areal_megatron.models.architecture import Architecture, architecture, implied, read_whole_config, takes_images
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.pattern import name_at, numbers, taken_numbers
from areal_megatron.models.table import EMBEDDING, HEAD
from areal_megatron.models.weight_files import INDEX, SINGLE, weight_map
from areal_megatron.process.errors import printable
from areal_megatron.process.files import write_json
from areal_megatron.reshard.boxes import Box, Shape, expand, whole
from areal_megatron.run.json_input import parse_json

log = logging.getLogger(__name__)
T = TypeVar("T")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
    "README*",
)
"""Names of the files that describe a model. No code: models run without any of their own."""
SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_READ = SAFETENSORS_DTYPES | {"F8_E4M3": FP8}
_SAFETENSORS_WORDS = {dtype: word for word, dtype in SAFETENSORS_DTYPES.items()}
_SCALES = ("float32", "bfloat16")
HEADER_LIMIT = 100 * 2**20
"""Bytes of a safetensors header; the safetensors library refuses more."""
MOST_TENSORS = 200_000
"""In one safetensors file, which are read in seconds; the largest models have 140,000 in all."""
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
        file_of = _once(((names.own(name), file) for name, file in _file_of(folder).items()), folder / INDEX)
        wanted = expected.keys() | {name + fp8.SCALE for name in expected}
        holders = {holder for name in wanted for holder in (name, names.stacked(name)) if holder in file_of}
        files = sorted({file_of[holder] for holder in holders}) if file_of else [SINGLE]
        self._canonical, self._files = canonical, OpenFiles()
        self._extents: dict[str, Extent] = {}
        self._scales: dict[str, Extent] = {}
        """Tensor in 8 bits → its scales."""
        self.names = {name for name in file_of if not names.parts(name)}
        """Every tensor that the folder says it has, by the names of the language model alone."""
        for file in files:
            found, extents = safetensors_extents(folder / file, wanted)
            if twice := sorted(extents.keys() & self._extents):
                first = self._extents[twice[0]].path.name
                raise CheckpointError(f"{folder}: {twice[0]} is in {first} and in {file}, of two savings; remove one")
            self._extents |= extents
            self.names |= found
        for name, shape in expected.items():
            if name not in self._extents:
                raise CheckpointError(f"{folder} has no tensor {name}, which {config} asks for")
            if (own := self._extents[name].box.shape) != shape:
                raise CheckpointError(f"{folder}: {name} has shape {list(own)}, {config} asks for {list(shape)}")
            if self._extents[name].dtype == FP8:
                self._scales[name] = self._scales_of(folder, name, shape)

    def _scales_of(self, folder: Path, name: str, shape: Shape) -> Extent:
        scales, expected = self._extents.get(name + fp8.SCALE), fp8.scale_shape(shape)
        if len(shape) != 2 or scales is None or scales.dtype not in _SCALES or scales.box.shape != expected:
            raise CheckpointError(
                f"{folder}: {name} has 8 bits, and no {name + fp8.SCALE} in {' or '.join(_SCALES)} of shape "
                f"{list(expected)}; only matrices with a scale for each block of {fp8.BLOCK} × {fp8.BLOCK} are read"
            )
        return scales

    @classmethod
    def of_model(cls, folder: Path, hf_config: Mapping[str, Any]) -> HfFolder:
        """Opens the folder of exactly the model of hf_config: raises CheckpointError also for any other tensor, but of
        layers that come after the model's, of which one line of the log tells."""
        model = architecture(hf_config)
        weights = cls(folder, model.canonical, model.name)
        further = sorted(filter(model.is_of_further_layer, weights.names))
        if further:
            log.warning(
                "left out from %s: %s and %d more, which predict further tokens", folder, further[0], len(further) - 1
            )
        scales = {name + fp8.SCALE for name in weights._scales}
        of_images = {name for name in weights.names if name.startswith(names.TOWER)} if takes_images(folder) else set()
        for name in weights.names - expand(model.canonical).keys() - scales - {*further} - of_images:
            if not (name in HEAD.tensors and model.tied) and not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(f"{folder} has a tensor {name}, which config.json ({model.name}) does not have")
        if model.tied and weights.names & HEAD.tensors.keys():
            check_tied(folder, model)
        return weights

    def dtype(self, tensor: str, numbered: Shape | None = None) -> str:
        """Returns the dtype of a canonical pattern's tensor with these numbers; for None, one that holds
        such tensors of all numbers exactly. One in 8 bits is read in bfloat16."""
        names = [name_at(tensor, numbered)] if numbered is not None else expand({tensor: self._canonical[tensor]})
        return exact_dtype("bfloat16" if (own := self._extents[name].dtype) == FP8 else own for name in names)

    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None:
        """Fills `out`, an array of the box's shape for elements of `dtype`, with a box of a canonical pattern.

        The box must be within one layer and expert.
        """
        named = numbers(tensor)
        name, region = name_at(tensor, box.start[:named]), Box(box.start[named:], box.stop[named:])
        part = out[(0,) * named]
        if scales := self._scales.get(name):
            fp8.read_scaled(self._files, self._extents[name], scales, region, part, dtype)
        else:
            read_box(self._files, self._extents[name], region, part, dtype)

    def close(self) -> None:
        self._files.close()


def check_tied(folder: Path, model: Architecture) -> None:
    """Raises CheckpointError where a folder has an output layer of its own although it is the embedding by config.json:
    transformers and engines take it if it is another, trainers do not."""
    (embedding, shape), (head, _) = *EMBEDDING.tensors.items(), *HEAD.tensors.items()
    size = model.dimensions.shape(shape)
    with closing(HfFolder(folder, {embedding: size})) as weights:
        if head not in weights.names:
            return
    with closing(HfFolder(folder, {embedding: size, head: size}, model.name)) as weights:
        blocks, dtype = BlockBuffers(), exact_dtype([weights.dtype(embedding), weights.dtype(head)])
        for (block, one), (_, other) in zip(blocks.of(whole(size), dtype), blocks.of(whole(size), dtype), strict=True):
            weights.read(embedding, block, one, dtype)
            weights.read(head, block, other, dtype)
            if not np.array_equal(one, other):
                raise CheckpointError(
                    f"{folder} has a {head} other than {embedding}, config.json says that they are tied: remove it, or "
                    "set tie_word_embeddings to false"
                )


def exact_dtype(dtypes: Iterable[str]) -> str:
    """Returns the dtype that holds elements of all these exactly."""
    found = {*dtypes}
    return found.pop() if len(found) == 1 else "float32"


class SafetensorsEntry(NamedTuple):
    """A tensor in a safetensors file."""

    dtype: str
    """The file's word for it, such as BF16."""
    shape: Shape
    offset: int
    """Its first byte in the file."""
    nbytes: int


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
        for pattern, box in sorted(boxes, key=lambda pair: _layer(*pair)):
            found.append(HfTensor(name_at(pattern, box.start[: numbers(pattern)]), pattern, box, dtype(pattern)))
    return found


def _layer(pattern: str, box: Box) -> int:
    """The first number of a tensor's name; 0 if it has none."""
    return next((taken[at] for taken, at in zip(taken_numbers(pattern), box.start, strict=False)), 0)


def write_weights(
    folder: Path,
    tensors: Iterable[HfTensor],
    blocks: Callable[[HfTensor], Iterable[ndarray]],
    shard_bytes: int = SHARD_BYTES,
    sync: bool = False,
    beside: Mapping[str, str] | None = None,
    beside_bytes: int = 0,
) -> None:
    """Writes safetensors files of at most shard_bytes (or one tensor), and their index if there are several.

    blocks: makes the contiguous arrays that are a tensor's elements one after another; each is written while the next
    one is made, and may change after that. sync: the files will be synced. Raises OSError.

    beside: tensors that the folder has already, with their files; beside_bytes: the bytes of these.
    """
    files: list[list[HfTensor]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if files[-1] and size > shard_bytes:
            files.append([])
            size = tensor.nbytes
        files[-1].append(tensor)
    weight_map, alone = dict(beside or {}), len(files) == 1 and not beside
    for number, held in enumerate(files):
        name = SINGLE if alone else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / name, held, blocks, sync)
        weight_map |= {tensor.name: name for tensor in held}
    if not alone:
        total = beside_bytes + sum(tensor.nbytes for held in files for tensor in held)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_file(
    path: Path, tensors: Sequence[HfTensor], blocks: Callable[[HfTensor], Iterable[ndarray]], sync: bool = False
) -> None:
    """Writes one file of write_weights."""
    with appending(path, sync) as append:
        append(safetensors_header((t.name, _SAFETENSORS_WORDS[t.dtype], t.shape, t.nbytes) for t in tensors))
        for tensor in tensors:
            for block in blocks(tensor):
                append(raw(block))


def copy_description(source: Path, folder: Path, dtype: str, config: Mapping[str, Any] | None = None) -> None:
    """Copies what describes a model, by name (DESCRIPTION), out of its folder; config.json gets the dtype of the new
    weights, and what vLLM wants to read (`implied`). `config`: all else of it; the one in `source` by default, and
    always for a model with images.

    Everything else is named in one line of the log, also a link that leads out of the model's folder (and out of its
    folder in the Hugging Face cache): what it leads to may be private. Raises OSError, and ConfigError for config.json.
    """
    described = describing_files(source)
    for file in described:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if skipped := [printable(file.name) for file in _no_weights(source) if file not in described]:
        log.warning(
            "not copied from %s to %s: %s; only files of a model that have a usual name, and links within its "
            "folder, are",
            source,
            folder,
            ", ".join(skipped),
        )
    written = read_whole_config(source) if config is None or takes_images(source) else dict(config)
    sections = [written, written["text_config"]] if takes_images(source) else [written]
    sections[-1] |= implied(sections[-1])
    for section in sections:
        section.pop("quantization_config", None)  # weights are written whole
        key = "torch_dtype" if "torch_dtype" in section else "dtype"
        section.pop("dtype", None)  # which transformers would believe rather than the other name
        section[key] = dtype
    write_json(folder / "config.json", written)


def describing_files(folder: Path) -> list[Path]:
    """Returns the files that describe the model of a folder, in the order of their names. Raises OSError."""
    return [
        file
        for file in _no_weights(folder)
        if any(file.match(pattern) for pattern in DESCRIPTION)
        and file.is_file()
        and _is_own(file.resolve(), folder.resolve())
    ]


def _no_weights(folder: Path) -> list[Path]:
    """Returns the files of a folder and of the folders that DESCRIPTION names, without weights and hidden ones."""
    weights, within = (*WEIGHT_SUFFIXES, ".index.json"), (pattern for pattern in DESCRIPTION if "/" in pattern)
    files = sorted([*folder.iterdir(), *(file for pattern in within for file in folder.glob(pattern))])
    return [
        file
        for file in files
        if not file.name.startswith(".") and not file.name.endswith(weights) and not file.is_dir()
    ]


def _is_own(target: Path, source: Path) -> bool:
    """Whether a file is the model's: in its folder, or where the Hugging Face cache keeps the model's files."""
    blobs = source.parent.parent / "blobs"
    return target.is_relative_to(source) or (source.parent.name == "snapshots" and target.parent == blobs)


def safetensors_extents(path: Path, wanted: Collection[str]) -> tuple[set[str], dict[str, Extent]]:
    """Returns the names of all tensors of a safetensors file, and the extents of those in `wanted`; by the names of the
    language model alone, and what is stacked of all experts as the parts of each.

    Raises CheckpointError where the file is damaged or such a tensor has a dtype that is not read.
    """
    entries = _once(_each_expert(safetensors_entries(path)), path)
    extents = {}
    for name in entries.keys() & wanted:
        entry = entries[name]
        if entry.dtype not in _READ:
            raise CheckpointError(f"{path}: {name} has dtype {entry.dtype}; supported are {', '.join(_READ)}")
        dtype, box = _READ[entry.dtype], whole(entry.shape)
        if entry.nbytes != box.size * (1 if dtype == FP8 else ITEMSIZE[dtype]):
            raise CheckpointError(_no_safetensors(path, f"{name} does not lie in it whole"))
        extents[name] = Extent(path, entry.offset, dtype, box)
    return set(entries), extents


def _once(named: Iterable[tuple[str, T]], path: Path) -> dict[str, T]:
    """Returns what has these names. Raises CheckpointError where two have the same, which a file calls differently."""
    found = {}
    for name, each in named:
        if name in found:
            raise CheckpointError(
                f"{path} has {printable(name)} under two names, of which readers take one or the other; remove one"
            )
        found[name] = each
    return found


def _each_expert(entries: Mapping[str, SafetensorsEntry]) -> Iterator[tuple[str, SafetensorsEntry]]:
    for stored, entry in entries.items():
        name = names.own(stored)
        parts = names.parts(name) if len(entry.shape) == 3 else ()
        if not parts or entry.shape[1] % len(parts):
            yield name, entry
            continue
        experts, rows, columns = entry.shape
        nbytes = entry.nbytes // max(experts * len(parts), 1)
        for number in range(experts * len(parts)):
            expert, part = divmod(number, len(parts))
            own = (entry.dtype, (rows // len(parts), columns), entry.offset + number * nbytes, nbytes)
            yield names.part(name, expert, parts[part]), SafetensorsEntry(*own)


def safetensors_entries(path: Path) -> dict[str, SafetensorsEntry]:
    """Returns what a safetensors file holds, by name; raises CheckpointError where it is damaged or truncated."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_LIMIT:
                raise ValueError("its header is too long")
            text = file.read(length)
        if text.count(b'"data_offsets"') > MOST_TENSORS:
            raise ValueError(f"it has more than {MOST_TENSORS:,} tensors")
        header = parse_json(text)
        header.pop("__metadata__", None)
        entries = {}
        for name, entry in header.items():
            start, stop = map(operator.index, entry["data_offsets"])
            shape = tuple(map(operator.index, entry["shape"]))
            if not isinstance(entry["dtype"], str) or min(shape, default=0) < 0:
                raise ValueError(f"{printable(name)} has no dtype or no shape")
            entries[name] = SafetensorsEntry(entry["dtype"], shape, 8 + length + start, stop - start)
        _check_tiled(entries, 8 + length, size)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise CheckpointError(_no_safetensors(path, e)) from None
    return entries


def _check_tiled(entries: Mapping[str, SafetensorsEntry], begin: int, size: int) -> None:
    """Raises ValueError unless the tensors follow each other from `begin` to the end of the file, which the safetensors
    library asks for."""
    end = begin
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].offset, pair[1].nbytes)):
        if entry.offset != end or entry.nbytes < 0 or end + entry.nbytes > size:
            raise ValueError(f"{printable(name)} does not lie in it whole and alone")
        end += entry.nbytes
    if end != size:
        raise ValueError(f"{size - end} bytes after its tensors are of none")


def safetensors_header(tensors: Iterable[tuple[str, str, Shape, int]]) -> bytes:
    """Returns the beginning of a safetensors file in which tensors follow in this order.

    Each tensor: name, the file's word for its dtype, shape and bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        start, end = end, end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are to begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def _no_safetensors(path: Path, reason: object) -> str:
    return f"{path} is truncated or no safetensors file: {reason}; take another copy of it"


def _file_of(folder: Path) -> dict[str, str]:
    """Tensor → file by the index; empty where one file has everything."""
    try:
        return weight_map(folder)
    except OSError as e:
        raise CheckpointError(f"cannot read {e.filename}: {e.strerror}") from None
    except ValueError as e:
        raise CheckpointError(str(e)) from None

"""The layout of megatron-core's distributed checkpoints (format torch_dist), and reading a model by it.

A distributed checkpoint holds each parameter of the whole model as one tensor, in the chunks that the saving ranks had.
A single trainer rank would hold the same, except for names and padding: the numbers of layers and experts are leading
axes of the tensors (`decoder.layers.self_attention.linear_qkv.weight` is [layers, rows, columns]), and the vocabulary
is padded as on the saving ranks. Where the layers of a model differ, the number of the layer stays in the name
(`decoder.layers.3.self_attention.linear_qkv.weight` is [rows, columns]). The sections of the projection and of the
convolution of a gated delta net are tensors of their own (`….in_proj.weight.query`). Imports no megatron.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from math import prod
from pathlib import Path
from typing import Any

from numpy import ndarray

from areal_megatron.checkpoint.disk import CheckpointError, Extent, OpenFiles, read_box
from areal_megatron.checkpoint.torch_dist_metadata import Chunk, stored_tensors
from areal_megatron.models.adapter import Adapter, adapted
from areal_megatron.models.architecture import FAMILIES, Architecture, architecture
from areal_megatron.models.pattern import NUMBER, name_at, numbers
from areal_megatron.models.table import EMBEDDING, HEAD, Row
from areal_megatron.reshard import trainer_layout
from areal_megatron.reshard.boxes import Box, Layout, Piece, Shape, whole
from areal_megatron.reshard.trainer_layout import MegatronSizes

ALONE = MegatronSizes(vocabulary_multiple=1)
"""The sizes of a trainer rank that holds all of the model, without padding."""
ADAPTER = "adapter"
"""What the names of the factors of adapters begin with. The rest of a name is PEFT's, without the number of the layer,
which is the tensor's first axis."""
MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.", f"{ADAPTER}.")
"""Prefixes of the model's tensors, but not of the optimizer's and others."""
_LAYER = re.compile(r"layers\.(\d+)\.")
"""The number of a layer, in names of models whose layers differ."""
PADDED = (EMBEDDING.megatron, HEAD.megatron)


def layout(hf_config: Mapping[str, Any], adapter: Adapter | None = None) -> Layout:
    """Returns the map from regions of checkpoint tensors to boxes of canonical tensors, of the model or of an adapter's
    factors; no vocabulary padding.

    Its pieces transpose nothing.

    Raises ConfigError for a model without a table.
    """
    if adapter:
        return _factors(adapted(architecture(hf_config), adapter).canonical)
    alone, model = trainer_layout.layout(hf_config, ALONE, 0), architecture(hf_config)
    named = partial(tensor_name, alike=model.dimensions.all_alike)
    held: dict[str, Shape] = {}
    pieces, dtypes = [], {}
    for pattern, own in by_parameter(alone).items():
        shape, axis = alone.held[pattern], numbers(pattern)
        for suffix, start, stop in _sections(model, pattern) or [("", 0, shape[axis])]:
            name = named(pattern) + suffix
            region = Box(
                (*(0 for _ in shape[:axis]), start, *(0 for _ in shape[axis + 1 :])),
                (*shape[:axis], stop, *shape[axis + 1 :]),
            )
            held[name] = region.shape
            pieces += [_moved(piece, name, region) for piece in own if region.intersection(piece.local)]
            if pattern in alone.dtypes:
                dtypes[name] = alone.dtypes[pattern]
    return Layout(held, alone.canonical, tuple(pieces), dtypes)


def _factors(canonical: Mapping[str, Shape]) -> Layout:
    names = {pattern: f"{ADAPTER}.{factor_name(pattern)}" for pattern in canonical}
    held = {name: canonical[pattern] for pattern, name in names.items()}
    pieces = []
    for pattern, name in names.items():
        everything = whole(canonical[pattern])
        pieces.append(Piece(name, everything, pattern, everything, tuple(range(len(canonical[pattern])))))
    return Layout(held, dict(canonical), tuple(pieces))


def factor_name(pattern: str) -> str:
    """Returns what the name of an adapter's factor has after ADAPTER, from its canonical pattern."""
    return NUMBER.sub("", pattern).replace("..", ".")


def _sections(model: Architecture, pattern: str) -> list[tuple[str, int, int]]:
    """The sections of a parameter that are tensors of their own: the end of the name, and which rows."""
    rows = [row for row in model.layer if row.sections and pattern.endswith(f".{row.megatron}")]
    found, top = [], 0
    for name, axis in (section for row in rows for section in row.sections):
        (width,) = model.dimensions.shape(axis)
        found.append((f".{name}", top, top + width))
        top += width
    return found


def _moved(piece: Piece, name: str, region: Box) -> Piece:
    """The piece in the tensor that is a region of the piece's parameter."""
    return replace(piece, parameter=name, local=piece.local.within(region))


def tensor_name(parameter: str, alike: bool = True) -> str:
    """Returns the checkpoint's name for a parameter pattern of the trainer: numbers are axes there, except the layer's
    if layers are not `alike`."""
    name = parameter.replace("local_experts.{}", "experts")
    return name.replace("layers.{}", "layers") if alike else name


def other_name(name: str, model: Architecture) -> str:
    """Returns the name that a layer norm has where a linear layer of TransformerEngine holds it; of other tensors the
    name itself."""
    layer = _LAYER.search(name)
    rows = [row for row in model.layer if not layer or int(layer[1]) in model.dimensions.layers_with(row)]
    for plain, fused in {**ALIASES, **_aliases(rows)}.items():
        if name.endswith(plain):
            return name.removesuffix(plain) + fused
    return name


def _aliases(rows: Iterable[Row]) -> dict[str, str]:
    return {f".{row.megatron}": f".{row.fused}" for row in rows if row.fused}


ALIASES = _aliases(row for family in FAMILIES.values() for row in family.layer)
"""How the layer norms' names end, and how where TransformerEngine holds them inside the linear layers that follow; also
of layers that a model does not have so, since Megatron's own name the norm before experts after a linear layer, too."""


def by_parameter(layout: Layout) -> dict[str, list[Piece]]:
    """Returns parameter → its pieces."""
    pieces = defaultdict(list)
    for piece in layout.pieces:
        pieces[piece.parameter].append(piece)
    return dict(pieces)


def extra_states(layout: Layout) -> list[str]:
    """Returns the names of the entries without content that megatron-core keeps, and misses, for every linear layer."""
    names = []
    for name, pieces in by_parameter(layout).items():
        module, weight, section = name.partition(".weight")
        is_linear = any(f".{kind}" in name for kind in ("linear_", "in_proj.", "out_proj."))
        if is_linear and weight and section in ("", ".query"):  # the first section, of a module that has some
            named, counts = numbers(name), layout.held[name][: numbers(pieces[0].tensor)]
            for single in whole(counts).singles(len(counts)):
                number, count = (".".join(map(str, axes[named:])) for axes in (single.start, counts))
                shard = f"{number}_{count}" if number else "0_1"
                names.append(f"{name_at(module, single.start[:named])}._extra_state/shard_{shard}")
    return names


class DistCheckpoint:
    """The model of a torch_dist folder, or the adapter's factors of one that has these alone, read by boxes of
    canonical tensors.

    Nothing in the folder is run. Raises CheckpointError where files are missing, truncated or of another format, or
    where names and shapes do not follow from hf_config.
    """

    def __init__(self, folder: Path, hf_config: Mapping[str, Any], adapter: Adapter | None = None):
        self.folder = folder
        self._stored = stored_tensors(folder, MODEL_PREFIXES)
        expected, model = layout(hf_config, adapter), architecture(hf_config)
        others = {name: other_name(name, model) for name in expected.parameters}
        self._name_of = {
            name: name if name in self._stored or other not in self._stored else other for name, other in others.items()
        }
        self._check_shapes(expected, {*others, *others.values()}, model.name)
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in expected.pieces:
            self._pieces[piece.tensor].append(piece)
        self._chunks = {}
        for pattern, pieces in by_parameter(expected).items():
            named = numbers(pattern)
            for single in whole(expected.held[pattern]).singles(named):
                name = self._name_of[name_at(pattern, single.start[:named])]
                self._chunks[name] = self._index(name, numbers(pieces[0].tensor) - named)
        self._located: dict[Chunk, Extent] = {}
        self._files = OpenFiles()

    def dtype(self, tensor: str) -> str:
        """Returns the dtype of a canonical pattern."""
        parameter = self._pieces[tensor][0].parameter
        return self._stored[self._name_of[name_at(parameter, [0] * numbers(parameter))]].dtype

    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None:
        """Fills `out`, an array of the box's shape for elements of `dtype`, with a box of a canonical pattern.

        The box must be within one layer and expert.
        """
        for piece in self._pieces[tensor]:
            if common := piece.box.intersection(box):
                region, named = piece.narrow(common).local, numbers(piece.parameter)
                name = self._name_of[name_at(piece.parameter, region.start[:named])]
                part = out[common.within(box).slices][(0,) * named]
                region = Box(region.start[named:], region.stop[named:])
                self._read(name, region, numbers(tensor) - named, part, dtype)

    def close(self) -> None:
        self._files.close()

    def _read(self, name: str, region: Box, named: int, out: ndarray, dtype: str) -> None:
        for chunk in self._chunks[name].get(region.start[:named], ()):
            if common := chunk.box.intersection(region):
                if chunk not in self._located:
                    self._located[chunk] = chunk.locate()
                read_box(self._files, self._located[chunk], common, out[common.within(region).slices], dtype)

    def _check_shapes(self, expected: Layout, known: set[str], model: str) -> None:
        for name, shape in expected.parameters.items():
            if self._name_of[name] not in self._stored:
                raise CheckpointError(
                    f"{self.folder} has no tensor {name}, which config.json ({model}) asks for; "
                    "give the config of the model that was saved"
                )
            found = self._stored[self._name_of[name]].shape
            if found != shape and not (name in PADDED and found[1:] == shape[1:] and found[0] > shape[0]):
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {list(found)}, config.json ({model}) asks for {list(shape)}; "
                    "give the config of the model that was saved"
                )
        for name, stored in self._stored.items():
            if name not in known:
                raise CheckpointError(
                    f"{self.folder} has a tensor {name} of shape {list(stored.shape)}, which config.json ({model}) "
                    "does not have; give the config of the model that was saved"
                )

    def _index(self, name: str, named: int) -> dict[Shape, list[Chunk]]:
        """Returns layer and expert → the chunks that hold parts of them."""
        stored, found = self._stored[name], defaultdict(list)
        inside = all(_is_within(chunk.box, stored.shape) for chunk in stored.chunks)
        size, expected = sum(chunk.box.size for chunk in stored.chunks), prod(stored.shape)
        if inside and size != expected:
            raise CheckpointError(
                f"{self.folder}: {name} has {size} of its {expected} elements; it was not saved whole, "
                "take another checkpoint"
            )
        for chunk in stored.chunks if inside else ():
            for single in chunk.box.singles(named):
                found[single.start[:named]].append(chunk)
        pairs = chain(*(combinations(chunks, 2) for chunks in found.values()))
        if not inside or any(one.box.intersection(other.box) for one, other in pairs):
            raise CheckpointError(
                f"{self.folder}: {name} has parts that lie over one another or beyond it; take another checkpoint"
            )
        return dict(found)


def _is_within(box: Box, shape: Shape) -> bool:
    bounds = zip(box.start, box.stop, shape, strict=False)
    return len(box.start) == len(shape) and all(0 <= start <= stop <= size for start, stop, size in bounds)

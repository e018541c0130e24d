"""The layout of megatron-core's distributed checkpoints (format torch_dist), and reading a model by it.

A distributed checkpoint holds each parameter of the whole model as one tensor, in the chunks that the saving ranks had.
It is what a single trainer rank would hold, except for names and padding: the numbers of layers and experts are leading
axes of the tensors (`decoder.layers.self_attention.linear_qkv.weight` is [layers, rows, columns]), and the rows that
pad the vocabulary are those of the saving ranks. Imports no megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from numpy import ndarray

from areal_megatron.checkpoint.disk import CheckpointError, Extent, OpenFiles, read_box
from areal_megatron.checkpoint.torch_dist_metadata import Chunk, stored_tensors
from areal_megatron.models.architecture import architecture
from areal_megatron.models.table import EMBEDDING, HEAD
from areal_megatron.reshard import trainer_layout
from areal_megatron.reshard.boxes import Box, Layout, Piece, Shape, numbers, whole
from areal_megatron.reshard.trainer_layout import MegatronSizes

MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")
"""How the names of the model's tensors begin, unlike those of the optimizer and others."""
ALIASES = {
    "decoder.layers.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.pre_mlp_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight",
}
"""The layer norms' names where TransformerEngine holds them inside the linear layers that follow."""
PADDED = (EMBEDDING.megatron, HEAD.megatron)


def layout(hf_config: Mapping[str, Any]) -> Layout:
    """Returns which region of which checkpoint tensor is which box of which canonical tensor; no vocabulary padding.

    Its pieces transpose nothing.

    Raises ConfigError for a model without a table.
    """
    alone = trainer_layout.layout(hf_config, MegatronSizes(vocabulary_multiple=1), 0)
    held = {tensor_name(pattern): shape for pattern, shape in alone.held.items()}
    pieces = (replace(piece, parameter=tensor_name(piece.parameter)) for piece in alone.pieces)
    return Layout(held, alone.canonical, tuple(pieces))


def tensor_name(parameter: str) -> str:
    """Returns the checkpoint's name for a parameter pattern of the trainer: numbers are axes there."""
    return parameter.replace("local_experts.{}", "experts").replace("layers.{}", "layers")


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
        module, _, kind = name.rpartition(".")
        if kind == "weight" and ".linear_" in name:
            counts = layout.held[name][: numbers(pieces[0].tensor)]
            for single in whole(counts).singles(len(counts)):
                number, count = (".".join(map(str, indices)) for indices in (single.start, counts))
                names.append(f"{module}._extra_state/shard_{number}_{count}")
    return names


class DistCheckpoint:
    """The model of a torch_dist folder, read by boxes of canonical tensors.

    Nothing in the folder is run. Raises CheckpointError where files are missing, truncated or of another format, or
    where names and shapes are not those of hf_config.
    """

    def __init__(self, folder: Path, hf_config: Mapping[str, Any]):
        self.folder = folder
        self._stored = stored_tensors(folder, MODEL_PREFIXES)
        expected = layout(hf_config)
        self._name_of = {
            name: ALIASES[name] if name not in self._stored and name in ALIASES else name for name in expected.held
        }
        self._check_shapes(expected, architecture(hf_config).name)
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in expected.pieces:
            self._pieces[piece.tensor].append(piece)
        self._chunks = {
            self._name_of[name]: self._index(self._name_of[name], numbers(pieces[0].tensor))
            for name, pieces in by_parameter(expected).items()
        }
        self._located: dict[Chunk, Extent] = {}
        self._files = OpenFiles()

    def dtype(self, tensor: str) -> str:
        """Returns the dtype of a canonical pattern."""
        return self._stored[self._name_of[self._pieces[tensor][0].parameter]].dtype

    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None:
        """Fills `out`, an array of the box's shape for elements of `dtype`, with a box of a canonical pattern.

        The box must be within one layer and expert.
        """
        for piece in self._pieces[tensor]:
            if common := piece.box.intersection(box):
                region = piece.narrow(common).local
                part = out[common.within(box).slices]
                self._read(self._name_of[piece.parameter], region, numbers(tensor), part, dtype)

    def close(self) -> None:
        self._files.close()

    def _read(self, name: str, region: Box, named: int, out: ndarray, dtype: str) -> None:
        for chunk in self._chunks[name].get(region.start[:named], ()):
            if common := chunk.box.intersection(region):
                if chunk not in self._located:
                    self._located[chunk] = chunk.locate()
                read_box(self._files, self._located[chunk], common, out[common.within(region).slices], dtype)

    def _check_shapes(self, expected: Layout, model: str) -> None:
        for name, shape in expected.held.items():
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
        known = {*expected.held, *ALIASES.values()}
        for name, stored in self._stored.items():
            if name not in known:
                raise CheckpointError(
                    f"{self.folder} has a tensor {name} of shape {list(stored.shape)}, which config.json ({model}) "
                    "does not have; give the config of the model that was saved"
                )

    def _index(self, name: str, named: int) -> dict[Shape, list[Chunk]]:
        """Returns layer and expert → the chunks that hold parts of them."""
        stored, found = self._stored[name], defaultdict(list)
        for chunk in stored.chunks:
            for single in chunk.box.singles(named):
                found[single.start[:named]].append(chunk)
        size, expected = sum(chunk.box.size for chunk in stored.chunks), prod(stored.shape)
        if size != expected:
            raise CheckpointError(
                f"{self.folder}: {name} has {size} of its {expected} elements; it was not saved whole, "
                "take another checkpoint"
            )
        return dict(found)

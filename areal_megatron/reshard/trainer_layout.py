"""The trainer's layout: which part of a model each rank of megatron-core's GPTModel holds.

Names are as in GPTModel.named_parameters(), and among its buffers for the routers' biases, with decoder layers
counted from 0 on each pipeline stage. With virtual stages a rank holds several models; the names of the k-th begin with
`model<k>.`, as in Megatron's own checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from areal_megatron.config import ConfigError, TrainerConfig
from areal_megatron.models.adapter import Adapter, adapted
from areal_megatron.models.architecture import Architecture, architecture
from areal_megatron.models.table import EMBEDDING, FINAL_NORM, HEAD, TIED_HEAD, Dimensions, Row
from areal_megatron.reshard.boxes import Layout, Rows, window
from areal_megatron.reshard.shard import ShardBuilder, Share


class Coordinates(NamedTuple):
    """A rank's index in each dimension of parallelism; etp, ep and edp (data parallelism) are the experts'."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class MegatronSizes:
    """The parallel sizes of the trainer pool. Ranks are numbered in megatron-core's default order, tp-cp-ep-dp-pp.

    Raises ConfigError if the sizes do not divide each other.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    """Tensor parallelism of the experts; 0 for the same as tp."""
    vpp: int = 1
    """The number of virtual pipeline stages of a rank."""
    vocabulary_multiple: int = 128
    """The vocabulary is padded to a multiple of this times tp (Megatron's make_vocab_size_divisible_by)."""
    fused_layernorm: bool = False
    """Whether linear layers hold the layer norm before them, as TransformerEngine's do."""
    grouped_experts: bool = False
    """Whether one module holds all experts of a rank, as TransformerEngine's does."""

    def __post_init__(self):
        if self.tp * self.cp * self.dp % (self.expert_tp * self.ep):
            raise ConfigError(
                f"trainer.ep: {self.ep} times etp={self.expert_tp} does not divide the "
                f"{self.tp * self.cp * self.dp} ranks of a pipeline stage"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"trainer.vpp: {self.vpp} virtual stages need trainer.pp above 1")

    @classmethod
    def of(cls, trainer: TrainerConfig, transformer_engine: bool = False) -> MegatronSizes:
        """Returns the sizes that a run's config asks for."""
        return cls(
            tp=trainer.tp,
            pp=trainer.pp,
            dp=trainer.dp,
            cp=trainer.cp,
            ep=trainer.ep,
            etp=trainer.etp,
            vpp=trainer.vpp,
            fused_layernorm=transformer_engine,
            grouped_experts=transformer_engine,
        )

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        pp, at = divmod(rank, self.tp * self.cp * self.dp)
        rest, tp = divmod(at, self.tp)
        dp, cp = divmod(rest, self.cp)
        rest, etp = divmod(at, self.expert_tp)
        edp, ep = divmod(rest, self.ep)
        return Coordinates(tp, cp, dp, pp, etp, ep, edp)

    def padded_vocabulary(self, vocabulary: int) -> int:
        """Returns the vocab_size to build GPTModel with."""
        multiple = self.vocabulary_multiple * self.tp
        return -(-vocabulary // multiple) * multiple

    def stage_sizes(self, layers: int) -> list[int]:
        """Returns the number of decoder layers of each pipeline stage.

        It is equal for all, or if pp does not divide the layers, another on the first and last, which have more to do.
        Raises ConfigError if Megatron has no such division: only those two may differ from the others.
        """
        pp, unit = self.pp, self.vpp
        if layers % (pp * unit) == 0:
            return [layers // pp] * pp
        even = layers // pp // unit * unit
        for middle in (even + unit, even):
            rest = layers - middle * (pp - 2)
            last = rest // 2 // unit * unit
            stages = [rest - last, *[middle] * (pp - 2), last]
            if pp > 1 and min(stages) > 0 and (rest - last) % unit == 0:
                return stages
        raise ConfigError(
            f"trainer.pp: num_hidden_layers={layers} of the model cannot be divided over {pp} stages"
            + (f" of {unit} virtual ones (trainer.vpp)" if unit > 1 else "")
        )

    def uneven_stages(self, layers: int) -> dict[str, int]:
        """Returns what TransformerConfig of megatron-core must be told of stage_sizes; nothing if all are equal."""
        sizes = self.stage_sizes(layers)
        if len(set(sizes)) == 1:
            return {}
        first = {"num_layers_in_first_pipeline_stage": sizes[0]}
        # With two stages the second gets the rest; megatron-core divides by zero if it is given both.
        return first if self.pp == 2 else first | {"num_layers_in_last_pipeline_stage": sizes[-1]}

    def chunk_layers(self, layers: int, stage: int) -> list[range]:
        """Returns the decoder layers of each virtual stage of pipeline stage `stage`, numbered over the whole model."""
        sizes = [size // self.vpp for size in self.stage_sizes(layers)]
        before = sum(sizes[:stage])
        starts = (chunk * sum(sizes) + before for chunk in range(self.vpp))
        return [range(start, start + sizes[stage]) for start in starts]


def layout(hf_config: Mapping[str, Any], sizes: MegatronSizes, rank: int, adapter: Adapter | None = None) -> Layout:
    """Returns what trainer rank `rank` holds of the model, or of an adapter's factors. Raises ConfigError if the sizes
    do not fit the model."""
    return _layout(adapted(architecture(hf_config), adapter), sizes, sizes.coordinates(rank))


def without_head(layout: Layout) -> Layout:
    """Returns the layout without the output layer, for models whose output layer is in no Hugging Face folder."""
    pieces = tuple(piece for piece in layout.pieces if not is_head(piece.parameter))
    held = {name: shape for name, shape in layout.held.items() if not is_head(name)}
    canonical = {piece.tensor: layout.canonical[piece.tensor] for piece in pieces}
    return replace(layout, held=held, canonical=canonical, pieces=pieces)


def is_head(parameter: str) -> bool:
    """Returns whether `parameter` is the name of the output layer's weight."""
    return parameter.endswith(HEAD.megatron)


def layouts(hf_config: Mapping[str, Any], sizes: MegatronSizes, adapter: Adapter | None = None) -> list[Layout]:
    """Returns the layout of each trainer rank; ranks that hold the same share one object."""
    model = adapted(architecture(hf_config), adapter)
    held = cache(lambda at: _layout(model, sizes, at))
    return [held(at._replace(cp=0, dp=0, edp=0)) for at in map(sizes.coordinates, range(sizes.ranks))]


def _layout(model: Architecture, sizes: MegatronSizes, at: Coordinates) -> Layout:
    dimensions = model.dimensions
    if dimensions.experts % sizes.ep:
        raise ConfigError(f"trainer.ep: {sizes.ep} does not divide num_experts={dimensions.experts} of the model")
    if dimensions.linear_key_heads % (sizes.tp * sizes.cp) and sizes.cp > 1:
        raise ConfigError(
            f"trainer.cp: {sizes.cp} times tp={sizes.tp} does not divide linear_num_key_heads="
            f"{dimensions.linear_key_heads} of the model"
        )
    shard = ShardBuilder(
        dimensions,
        tensor=Share(at.tp, sizes.tp, "trainer.tp"),
        expert_tensor=Share(at.etp, sizes.expert_tp, "trainer.etp"),
        experts=range(at.ep * dimensions.experts // sizes.ep, (at.ep + 1) * dimensions.experts // sizes.ep),
        vocabulary=sizes.padded_vocabulary(dimensions.vocabulary),
        fuse_heads=_interleaved_heads,
        sections_apart=True,
    )
    chunks = sizes.chunk_layers(dimensions.layers, at.pp)
    for number, layers in enumerate(chunks):
        prefix = f"model{number}." if sizes.vpp > 1 else ""
        first, last = at.pp == 0 and number == 0, at.pp == sizes.pp - 1 and number == sizes.vpp - 1
        if first and not model.is_adapter:
            shard.add(EMBEDDING, prefix + EMBEDDING.megatron)
        for row in model.layer:
            shard.add_layers(row, prefix + "decoder.layers.{}." + _name(row, sizes), layers, row.dtype)
        if last and not model.is_adapter:
            shard.add(FINAL_NORM, prefix + FINAL_NORM.megatron)
            if model.output_layer:
                shard.add(model.output_layer, prefix + HEAD.megatron)
            elif not first:
                shard.add(TIED_HEAD, prefix + HEAD.megatron)
    return shard.build()


def _name(row: Row, sizes: MegatronSizes) -> str:
    """Returns Megatron's name of a layer's parameter, which depends on what is fused."""
    if sizes.grouped_experts and row.grouped:
        return row.grouped
    if sizes.fused_layernorm and row.fused:
        return row.fused
    return row.megatron


def _interleaved_heads(dimensions: Dimensions, share: Share, names: tuple[str, ...], gated: bool) -> list[Rows]:
    """Returns this rank's share of the query groups, each with its query heads, their gates if they have some, its key
    head and its value head."""
    query, key, value = names
    d, per_group = dimensions.head_dim, dimensions.heads // dimensions.kv_heads
    stack = []
    for group in range(dimensions.kv_heads):
        own = range(group * per_group, (group + 1) * per_group)
        if gated:
            stack += [Rows(query, (2 * head + part) * d, (2 * head + part + 1) * d) for part in (0, 1) for head in own]
        else:
            stack.append(Rows(query, own.start * d, own.stop * d))
        stack += [Rows(name, group * d, (group + 1) * d) for name in (key, value)]
    queries = dimensions.query_and_gate if gated else dimensions.query
    return list(window(stack, *share.of(queries + 2 * dimensions.key_value)))

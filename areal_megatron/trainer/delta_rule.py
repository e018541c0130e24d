"""The gated delta rule over packed rows (Yang et al., "Gated Delta Networks", arXiv 2412.06464).

Every head has a state S [key width, value width], zero before the first token of a sequence. A token with key k, value
v, decay exp(g) and writing strength β makes S ← exp(g) · S, then S ← S + k ⊗ β (v − kᵀS), and reads qᵀS. A sequence
that continues a prefix begins with the state after it.

`delta_rule` computes this in chunks of tokens: inside all chunks of all sequences at once, with products of matrices,
then from chunk to chunk, for all sequences side by side. On CUDA in half precision fla's kernels do, if that package
is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_megatron.trainer.attention_blocks import Blocks
from areal_megatron.trainer.copies import to_device

CHUNK = 64
"""Most tokens in a chunk."""
EPSILON = 1e-6
"""What is added to the sum of the squares of a query or a key before it is divided by the root."""


@dataclass(frozen=True)
class Chunks:
    """The runs of a row in n chunks of equal size, each run padded to whole ones.

    Chunks lie level by level. Chunks of level 0 begin with a state of zeros, each of level n + 1 with the state after a
    chunk of level n.
    """

    blocks: Blocks
    """One block [n, tokens of a chunk]."""
    levels: tuple[int, ...]
    """The number of chunks on each level."""
    parents: tuple[Tensor | None, ...]
    """For each level but the first, int64: which chunk of the level before each one follows; None if these are the
    first ones, in order."""

    @classmethod
    def of(cls, sizes: Sequence[int], parents: Sequence[int], device: torch.device | str) -> Chunks:
        """`sizes`: the tokens of each run; `parents`: the number of the run that it continues, −1 if none. A run that
        is continued continues none itself."""
        tokens, before = np.array(sizes), np.array(parents)
        size = min(CHUNK, int(tokens.max()))
        counts = -(-tokens // size)
        first = np.cumsum(counts) - counts  # of each run, in the order of the runs
        run = np.repeat(np.arange(len(tokens)), counts)
        number = np.arange(counts.sum()) - first[run]
        level = number + np.where(before < 0, 0, counts[before])[run]
        # Longer runs come first, so that most levels follow the first chunks of the one before.
        order = np.lexsort((run, -(level + counts[run] - number), level))
        levels = np.bincount(level)
        at = np.empty(len(order), np.int64)  # the place of each chunk in its level
        at[order] = np.arange(len(order)) - (np.cumsum(levels) - levels)[level[order]]
        previous = np.where(number > 0, np.arange(len(order)) - 1, (first + counts - 1)[before[run]])[order]
        followed = [at[previous[level[order] == each]] for each in range(1, len(levels))]
        return cls(
            _blocks(tokens, run[order], number[order], size, device),
            tuple(levels.tolist()),
            tuple(
                None if np.array_equal(places, np.arange(len(places))) else to_device(places, device)
                for places in followed
            ),
        )

    def fill(self, tokens: Tensor) -> Tensor:
        """[T, ...] → [n, tokens of a chunk, ...]"""
        return self.blocks.fill(tokens).unflatten(0, self.blocks.shapes[0])

    def take(self, chunks: Tensor) -> Tensor:
        """What `fill` has filled."""
        return self.blocks.take(chunks.flatten(0, 1))


def _blocks(sizes: np.ndarray, run: np.ndarray, number: np.ndarray, size: int, device: torch.device | str) -> Blocks:
    """`run`, `number`: of each chunk its run, and which one of that it is."""
    within = number[:, None] * size + np.arange(size)
    padding = within >= sizes[run, None]
    taken = (np.cumsum(sizes) - sizes)[run, None] + np.where(padding, 0, within)
    taken, padding = taken.ravel(), padding.ravel()
    place = np.empty(sizes.sum(), np.int64)
    place[taken[~padding]] = np.flatnonzero(~padding)
    places = (to_device(array, device) for array in (taken, padding, place))
    return Blocks(((len(run), size),), *places, are_row=np.array_equal(taken, np.arange(len(taken))))


@dataclass(frozen=True)
class Stage:
    """Some runs of a row that fla's kernels take in one call, one after another."""

    places: Tensor
    """int64: the tokens of the runs, in order."""
    boundaries: Tensor
    """int64 [runs + 1]: the first of these for each run, then their number."""
    parents: Tensor | None
    """int64 [runs]: which run of the stage before each one continues; None if all begin with states of zeros."""

    @classmethod
    def all_of(cls, sizes: Sequence[int], parents: Sequence[int], device: torch.device | str) -> list[Stage]:
        """Returns a stage of the runs without a parent, and one of the others, if there are any. It has the arguments
        of Chunks.of."""
        tokens, before = np.array(sizes), np.array(parents)
        starts, found = np.cumsum(tokens) - tokens, []
        roots = np.flatnonzero(before < 0)
        for runs in (roots, np.flatnonzero(before >= 0)):
            if len(runs):
                places = np.concatenate([np.arange(starts[run], starts[run] + tokens[run]) for run in runs])
                edges = np.cumsum((0, *tokens[runs]))
                of = None if runs is roots else to_device(np.searchsorted(roots, before[runs]), device)
                found.append(cls(to_device(places, device), to_device(edges, device), of))
        return found


def delta_rule_by_fla(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, stages: Sequence[Stage]
) -> Tensor:
    """Does what `delta_rule` does, in half precision, with the kernels of fla."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]: for GPUs alone

    inputs, states, out = (query, key, value, decay, strength), None, torch.empty_like(value)
    for stage in stages:
        read, states = chunk_gated_delta_rule(
            *(x.index_select(0, stage.places).unsqueeze(0) for x in inputs),
            initial_state=None if states is None or stage.parents is None else states.index_select(0, stage.parents),
            output_final_state=len(stages) > 1,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=stage.boundaries,
        )
        out = out.index_copy(0, stage.places, read[0].to(out.dtype))
    return out


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, chunks: Chunks) -> Tensor:
    """Returns what every token reads, [T, value heads, dv].

    query, key: [T, key heads, dk], brought to length 1 here; value: [T, value heads, dv]; decay (g) and strength (β):
    float32 [T, value heads]. As many value heads share a key head, one after another. Computed in float32.
    """
    heads, padding = key.size(1), chunks.blocks.padding[:, None]
    # [chunks, key heads, value heads of one, tokens, ...]; padding writes nothing and forgets nothing
    q, k = (chunks.fill(_unit(x.float())).transpose(1, 2).unsqueeze(2) for x in (query, key))
    v = chunks.fill(value.float()).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
    g, beta = (
        chunks.blocks.fill(x)
        .masked_fill(padding, 0)
        .unflatten(0, chunks.blocks.shapes[0])
        .transpose(1, 2)
        .unflatten(1, (heads, -1))
        for x in (decay, strength)
    )
    q = q * key.size(-1) ** -0.5
    total = g.double().cumsum(-1)  # of which differences are taken that are much smaller
    later = torch.ones(total.size(-1), total.size(-1), dtype=torch.bool, device=total.device).triu(1)
    faded = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill(later, -torch.inf).exp()
    begun, rest = total.float().exp().unsqueeze(-1), (total[..., -1:] - total).float().exp().unsqueeze(-1)
    # What the tokens of a chunk write depends on what those before them have written: a triangular system. Its inverse
    # is narrower than what it is multiplied with.
    system = beta.unsqueeze(-1) * faded * (k @ k.mT)
    one = torch.eye(system.size(-1), dtype=system.dtype, device=system.device)
    solved = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True) * beta.unsqueeze(-2)
    written, known = solved @ v, (solved * total.float().exp().unsqueeze(-2)) @ k
    parts = (written, known, faded * (q @ k.mT), begun * q, rest * k, begun[..., -1:, :])
    out = _from_chunk_to_chunk(parts, chunks)
    return chunks.take(out.permute(0, 3, 1, 2, 4).flatten(2, 3)).to(value.dtype)


def _from_chunk_to_chunk(parts: tuple[Tensor, ...], chunks: Chunks) -> Tensor:
    state, found = None, []
    for level, (written, known, inside, query, key, left) in enumerate(
        zip(*(part.split(chunks.levels) for part in parts), strict=True)
    ):
        if state is None:
            found.append(inside @ written)
            state = key.mT @ written
            continue
        parents = chunks.parents[level - 1]
        state = state[: len(written)] if parents is None else state.index_select(0, parents)
        written = written - known @ state
        found.append(query @ state + inside @ written)
        state = left * state + key.mT @ written
    return torch.cat(found)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)

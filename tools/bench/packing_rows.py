"""How evenly context-parallel ranks divide the rows of a packing: the table of `tools/bench/packing.py --cp`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.row import Division, TokenRow, View, divide
from tools.bench.common import cell, spread


def measure_rows(rows: Iterable[Sequence[int]], ranks: int, flops: SequenceFlops) -> dict[str, Any]:
    """Returns the columns of a line for rows, each given by the lengths of its sequences."""
    attention, total, cut, ms = [0.0], [0.0], 0, []
    for lengths in rows:
        row = TokenRow.of([int(length) for length in lengths])
        start = time.process_time()
        division = divide(row, ranks, 1, flops)
        View(row, division, 0)
        ms.append((time.process_time() - start) * 1e3)
        pairs, whole = rank_flops(row, division, flops)
        cut += division.cut
        total.append(whole.max() / ((pairs.sum() + flops.token * sum(row.lengths)) / ranks) - 1)
        if division.cut:
            attention.append((pairs.max() - pairs.min()) / pairs.mean())
    return {"rows": len(ms), "cut": cut, "attention": max(attention), "FLOPs": max(total), "ms": spread(ms)}


def rank_flops(row: TokenRow, division: Division, flops: SequenceFlops) -> tuple[np.ndarray, np.ndarray]:
    """Returns the FLOPs of each rank's attention, and with its whole row, filler included: float64 [ranks] each."""
    pairs = np.array([flops.pair * sum(row.pairs(run) for run in runs) for runs in division.runs])
    return pairs, pairs + flops.token * division.length


def row_table(lines: list[dict[str, Any]]) -> str:
    title = "rows over context-parallel ranks"
    found = [f"{title:<36}{'cp':>4}{'rows':>7}{'cut':>7}{'attention':>11}{'FLOPs':>9}   ms a row"]
    for line in lines:
        found.append(
            f"{line['lengths']:<36}{line['cp']:>4}{line['rows']:>7}{line['cut']:>7}{line['attention']:>11.2%}"
            f"{line['FLOPs']:>9.2%}   {cell(line['ms'], 2, width=5)}"
        )
    return "\n".join(found)

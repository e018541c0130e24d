"""Rows are padded so that ranks can share them evenly; sequences never are."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_megatron.trainer.batch import RowPart, pack

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=12), st.sampled_from([1, 2, 4, 8]))
def test_padding_is_less_than_tp_tokens_a_row(lengths, tp):
    microbatch = pack(random_sequences(lengths), [np.arange(0)] * len(lengths), RowPart(CPU, tp))
    tokens, total = microbatch.tokens.numel(), sum(lengths)
    assert tokens == -(-max(total, 1) // tp) * tp  # an empty micro-batch is the shortest row that can be cut
    expected = [int(token) for sequence in random_sequences(lengths) for token in sequence]
    assert microbatch.tokens[0, :total].tolist() == expected
    padding = [tokens - total] if tokens > total else []
    assert microbatch.packed.boundaries.tolist() == np.cumsum([0, *lengths, *padding]).tolist()
    assert not len(microbatch.rows) and not len(microbatch.labels)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 900), max_size=6), st.sampled_from([1, 2, 4]), st.sampled_from([2, 3, 8]))
def test_ranks_divide_the_tokens_and_what_is_trained(lengths, tp, cp):
    sequences = random_sequences(lengths)
    trained = [np.arange(1, n, 2) for n in lengths]
    whole = pack(sequences, trained, RowPart(CPU, tp))
    parts = [pack(sequences, trained, RowPart(CPU, tp, cp, rank)) for rank in range(cp)]
    assert len({part.tokens.numel() for part in parts}) == 1 and parts[0].tokens.numel() % tp == 0
    held = np.concatenate([part.packed.view.tokens for part in parts])
    assert sorted(held[held >= 0]) == [*range(sum(lengths))]
    if parts[0].packed.view.cut:
        assert (held < 0).sum() < tp * cp
    assert sorted(torch.cat([part.own for part in parts]).tolist()) == [*range(whole.trained)]
    for part in parts:
        assert part.trained == whole.trained == len(whole.rows)
        assert torch.equal(part.labels, whole.labels[part.own])
        row = torch.from_numpy(part.packed.view.tokens)
        assert torch.equal(row[part.rows], whole.rows[part.own])
        assert torch.equal(part.tokens[0, row >= 0], whole.tokens[0, row[row >= 0]])
        assert torch.equal(part.packed.positions[row >= 0], whole.packed.positions[row[row >= 0]])


def random_sequences(lengths: list[int]) -> list[np.ndarray]:
    random = np.random.default_rng(sum(lengths))
    return [random.integers(1, 1000, n, dtype=np.int32) for n in lengths]

"""A micro-batch has no padding except what sequence parallelism needs to cut the row evenly.

Context parallelism would need the length of each sequence to be a multiple of 2·cp; the trainer has none.
"""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_megatron.trainer import pipeline
from areal_megatron.trainer.batch import pack

CPU = torch.device("cpu")


def row_multiple(tp: int) -> int:
    """Uses sequence parallelism together with tensor parallelism, as trainer/model.py does."""
    config = SimpleNamespace(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    return pipeline.row_multiple([SimpleNamespace(config=config)])


def test_rows_are_cut_by_sequence_parallelism_only():
    assert [row_multiple(tp) for tp in (1, 2, 4, 8)] == [1, 2, 4, 8]
    without = SimpleNamespace(tensor_model_parallel_size=4, sequence_parallel=False)
    assert pipeline.row_multiple([SimpleNamespace(config=without)]) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=12), st.sampled_from([1, 2, 4, 8]))
def test_padding_is_less_than_tp_tokens_a_row(lengths, tp):
    random = np.random.default_rng(sum(lengths))
    sequences = [random.integers(1, 1000, n, dtype=np.int32) for n in lengths]
    microbatch = pack(sequences, [np.arange(0)] * len(sequences), row_multiple(tp), CPU)
    tokens, total = microbatch.tokens.numel(), sum(lengths)
    assert tokens == -(-max(total, 1) // tp) * tp  # an empty micro-batch is the shortest row that can be cut
    assert microbatch.tokens[0, :total].tolist() == [int(token) for sequence in sequences for token in sequence]
    padding = [tokens - total] if tokens > total else []
    assert list(microbatch.packed.lengths) == [*lengths, *padding]
    assert microbatch.packed.boundaries.tolist() == np.cumsum([0, *lengths, *padding]).tolist()
    assert not len(microbatch.rows) and not len(microbatch.labels)

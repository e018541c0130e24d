"""Log-probabilities in tiles, on one rank and with the vocabulary over two, against float64."""

import pytest


@pytest.mark.parametrize("tp", [1, 2])
def test_tiles_make_the_numbers_of_full_logits(on_ranks, tp):
    on_ranks("logprobs_checks:check", tp, tp=tp)

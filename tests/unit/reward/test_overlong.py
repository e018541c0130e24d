import pytest

from areal_megatron.reward.overlong import overlong


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0), (16_384, 0), (17_408, -0.25), (18_432, -0.5), (20_480, -1), (20_481, -1)]
)
def test_the_penalty_is_that_of_dapo_with_the_lengths_of_its_paper(tokens, penalty):
    """Equation 13: (L_max − L_cache − |y|) / L_cache between 16,384 and 20,480 tokens."""
    assert overlong(tokens, longest=20_480) == pytest.approx(penalty)

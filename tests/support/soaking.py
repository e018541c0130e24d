"""Cases of a parametrised test of which some run in `make soak` alone."""

import pytest


def with_soaked(cases, soaked):
    """The `cases` of a parametrised test, those in `soaked` marked as soak. ValueError: one of `soaked` is no case."""
    if unknown := set(soaked) - set(cases):
        raise ValueError(f"soaked, but no cases: {sorted(unknown)}")
    return [pytest.param(case, marks=pytest.mark.soak) if case in soaked else case for case in cases]

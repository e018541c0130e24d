"""Large libraries are imported in less time."""

import json
import sys

import pytest

from areal_megatron.process.imports import absent


@pytest.mark.parametrize("name", ["json", "this"])
def test_what_is_absent_cannot_be_imported_until_it_is_back(name):
    before = sys.modules.get(name)
    with absent(name), pytest.raises(ImportError):
        __import__(name)
    assert sys.modules.get(name) is before
    assert __import__("json") is json


def test_megatron_looks_for_no_tracker_of_experiments():
    pytest.importorskip("wandb")
    import areal_megatron.trainer  # noqa: F401

    assert not sys.modules["megatron.core.inference.contexts.dynamic_context"].HAVE_WANDB

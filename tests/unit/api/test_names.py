"""What `import areal_megatron` gives to scripts, and how little it imports for that."""

import re
import subprocess
import sys

import pytest

import areal_megatron as areal
from tests.conftest import ROOT


def test_every_name_is_there():
    assert all(getattr(areal, name).__name__ == name for name in areal.__all__)
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    told = {name for text in texts for name in re.findall(r"\bareal\.([A-Z]\w+)", text)}
    assert {"ConfigError", "RunError", "RunFailed"} <= told <= {*areal.__all__}


def test_another_name_is_an_error_of_this_package():
    with pytest.raises(AttributeError, match=r"^module 'areal_megatron' has no attribute 'Runs'$"):
        areal.Runs  # noqa: B018


def test_a_script_that_starts_runs_does_not_import_what_a_loop_of_its_own_needs():
    loaded = "import sys, areal_megatron; areal_megatron.Run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "areal_megatron.api.run" in modules
    assert not {"areal_megatron.api.policy", "numpy", "aiohttp", "torch"} & modules

"""What areal.Run and areal.load say of wrong configs, and how programs of a run are read."""

import io
import os
import sys
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

import areal_megatron as areal
from areal_megatron.api.run import RunEngines, _Program

CONFIG = "configs/tiny_sft.yaml"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("updates", "many", "updates: Value 'many' of type 'str'"),
        ("optimizer.lr", [1], r"optimizer\.lr: Value '\[1\]' of type 'list'"),
        ("optimizer.lr", -1.0, r"optimizer\.lr: must be a number, at least 0 and at most 1, is -1\.0$"),
        ("environments", [3], r"environments\.0: Invalid type assigned"),
    ],
)
def test_what_is_wrong_with_a_config_begins_with_its_key(tmp_path, key, value, problem):
    config = areal.load(CONFIG, name="wrong", runs_dir=tmp_path)
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config) if section else config, name, value)
    with pytest.raises(areal.ConfigError, match=f"^{problem}") as error:
        areal.Run(config)
    assert "\n" not in str(error.value)


def test_a_text_that_a_program_sets_stands_for_nothing_else(tmp_path):
    config = areal.load(CONFIG, name="own", runs_dir=tmp_path)
    config.reward.function = "judge:${oops}"
    assert areal.Run(config).config.reward.function == "judge:${oops}"


@pytest.mark.parametrize("make", [areal.load, areal.Run])
def test_what_is_no_config_is_refused_in_a_line(make):
    with pytest.raises(areal.ConfigError, match=r"^config: must be the path of a YAML file, is NoneType$"):
        make(None)


@pytest.mark.parametrize("kind", ["closed", "left"])
def test_a_program_goes_on_when_nobody_reads_its_lines(monkeypatch, kind):
    """As where a notebook has closed its output, or the reader of a pipe has ended."""
    out = io.StringIO()
    if kind == "left":
        reader, writer = os.pipe()
        os.close(reader)
        out = os.fdopen(writer, "w")
    else:
        out.close()
    monkeypatch.setattr(sys, "stdout", out)
    try:
        program = _Program("train", ["--help"], [], Path.cwd(), quiet=False)
        assert "areal train" in program.wait(60) and not program._reader.is_alive()
    finally:
        monkeypatch.undo()
        with suppress(OSError):
            out.close()
    assert "--restarts" in program.last_lines


def test_engines_that_were_added_have_names_wherever_the_run_is():
    said = "waiting\nstarted engine-1, engine-2 for /home/ada/notes for bob/runs/demo\nengine-1 for a while\n"
    launcher = SimpleNamespace(last_lines=said, is_running=True)
    added = RunEngines(Path("/home/ada/notes for bob/runs/demo"), lambda *_, **__: launcher).add("--count=2")
    assert added.names == ["engine-1", "engine-2"]

"""Paths that cannot be looked at, as in a folder that is closed to this user. Here by a name longer than a file's may
be, which the same calls refuse, to root as well. One line, before anything starts."""

import pytest

from areal_megatron.launch import engines, evaluate, local
from areal_megatron.planning import plan, simulate
from areal_megatron.programs import audit, rows, status, trajectories
from tests.conftest import ROOT

CONFIG = str(ROOT / "configs/tiny_cpu.yaml")
LONG = "x" * 300


@pytest.mark.parametrize("key", ["model.path", "data.train", "data.eval"])
def test_keys_of_a_run(world, tmp_path, capsys, key):
    keys = {"model.path": world / "model", "data.train": world / "train.jsonl", "data.eval": world / "heldout.jsonl"}
    keys |= {"runs_dir": tmp_path / LONG, key: tmp_path / LONG}
    assert local.main([CONFIG, "--dry-run", *(f"{name}={value}" for name, value in keys.items())]) == 2
    assert_one_line(capsys)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (evaluate, [LONG, "WORLD/train.jsonl"]),
        (evaluate, ["WORLD/model", LONG]),
        (engines, ["add", LONG]),
        (trajectories, [LONG]),
        (status, [LONG]),
        (plan, [CONFIG, "--nodes=1", "--gpus=2", f"model.path={LONG}"]),
        (rows, [CONFIG, f"model.path={LONG}"]),
        (rows, [CONFIG, "model.path=WORLD/model", f"data.train={LONG}"]),
    ],
    ids=lambda value: value[-1][-12:] if isinstance(value, list) else value.__name__.rpartition(".")[2],
)
def test_arguments_of_a_program(world, capsys, program, arguments):
    assert program.main([argument.replace("WORLD", str(world)) for argument in arguments]) == 2
    assert_one_line(capsys)


def test_a_run_whose_lengths_are_taken(world, capsys):
    arguments = [CONFIG, "--gpu=h100", f"model.path={world / 'model'}", f"--lengths-of={LONG}"]
    assert simulate.main(arguments) == 2
    assert f"{LONG}/trajectories" in capsys.readouterr().err


def test_an_evaluation_where_no_folder_can_be_made(world, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    assert evaluate.main([str(world / "model"), str(world / "heldout.jsonl")]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert (
        said == f"error: {tmp_path / 'runs'}: cannot be written: File exists; say where answers are kept, --out FOLDER"
    )


def test_a_run_to_audit(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["audit", LONG])
    assert audit.main() == 2
    assert_one_line(capsys)


def assert_one_line(capsys):
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and LONG in said and said.endswith("File name too long")

"""What the wheel holds, and that it works where there is no checkout: installed, and used from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from areal_megatron import config_file
from areal_megatron.config import Config, DataConfig, ModelConfig
from areal_megatron.run import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves files in the folder that it builds, and packs those that it finds there."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("areal_megatron", "tests", "tools"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    pip(sys.executable, "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    [path] = out.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Calls the Python of a new environment in an empty folder; gives back what it printed, after exit code 0.

    The environment has this one's packages, but not what its .pth files add: a checkout that was installed editable
    cannot be imported.
    """
    environment, empty = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    python = environment / "bin" / "python"
    pip(sys.executable, "--python", python, "install", "--no-deps", "--no-index", wheel)
    [packages] = environment.glob("lib/python*/site-packages")
    paths = sysconfig.get_paths()
    (packages / "locked.pth").write_text(f"{paths['purelib']}\n{paths['platlib']}\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*arguments: object) -> str:
        command = [python, *map(str, arguments)]
        done = subprocess.run(command, cwd=empty, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """A run that was begun and has done nothing yet."""
    folder = tmp_path_factory.mktemp("runs")
    begun = Run(folder / "run")
    begun.create()
    model, data = ModelConfig(path=str(world / "model")), DataConfig(train=str(world / "train.jsonl"))
    config_file.save(Config(name="run", runs_dir=str(folder), updates=2, model=model, data=data), begun.config)
    begun.begin()
    return begun


def pip(python, *arguments) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    own = {path.relative_to(ROOT) for path in (ROOT / "areal_megatron").rglob("*") if path.is_file()}
    launch = {"areal_megatron" / path.relative_to(ROOT) for path in (ROOT / "launch").rglob("*") if path.is_file()}
    assert packed == {str(path) for path in own | launch if path.suffix != ".pyc"}
    assert {f"areal_megatron/launch/page/page.{kind}" for kind in ("html", "css", "js")} <= packed
    [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
    assert b"areal_megatron.engine.plugin:register" in zipfile.ZipFile(wheel).read(entry_points)


def test_it_is_the_installed_package_that_runs(installed):
    found = installed("-c", "import areal_megatron.launch as ours; print(ours.__file__)").strip()
    assert "site-packages" in found and not Path(found).is_relative_to(ROOT)
    for folder in ("launch", "tests", "tools"):
        assert installed("-c", f"import importlib.util; print(importlib.util.find_spec('{folder}'))") == "None\n"


def test_launchers_plan_a_run(installed, world):
    config = ROOT / "configs" / "tiny_cpu.yaml"
    keys = [f"model.path={world / 'model'}", f"data.train={world / 'train.jsonl'}", f"data.eval={world}/heldout.jsonl"]
    assert "engine-0" in installed("-m", "areal_megatron.launch.local", config, *keys, "--dry-run")
    assert "trainer-0" in installed("-m", "areal_megatron.launch.plan", config, *keys, "--nodes", 1, "--gpus", 2)


def test_one_command_has_all_programs(installed, run, world):
    """`areal`, as pip installs it, from a folder without a checkout."""
    areal = Path(installed("-c", "import sys; print(sys.prefix)").strip()) / "bin" / "areal"
    assert "\n  evaluate " in installed(areal, "--help")
    assert installed(areal, "--version").startswith("areal_megatron 0.")
    assert installed(areal, "status", "--help").startswith("usage: areal status ")
    assert installed(areal, "audit", run.folder).startswith("0 faults")
    keys = [f"model.path={world / 'model'}", f"data.train={world / 'train.jsonl'}", f"data.eval={world}/heldout.jsonl"]
    arguments = [ROOT / "configs" / "tiny_cpu.yaml", *keys, "--nodes", 1, "--gpus", 2, "--dry-run"]
    written = installed(areal, "submit", *arguments)
    assert f"\nexec {areal.parent / 'python'} -m areal_megatron.launch.slurm " in written


def test_tools_of_runs_work(installed, run, world, tmp_path):
    assert installed("-m", "areal_megatron.audit", run.folder).startswith("0 faults")
    installed("-m", "areal_megatron.launch.page.report", run.folder, "--out", tmp_path / "report.html")
    assert "<style>" in (tmp_path / "report.html").read_text()
    installed("-m", "areal_megatron.convert", "from-hf", world / "model", tmp_path / "checkpoint")
    installed("-m", "areal_megatron.convert", "to-hf", tmp_path / "checkpoint", tmp_path / "hf", "--verify")
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "program", ["areal_megatron.evaluate", "areal_megatron.trajectories", "areal_megatron.launch.status"]
)
def test_programs_say_how_they_are_called(installed, program):
    assert "usage:" in installed("-m", program, "--help")

"""What the wheel holds, and that it works where there is no checkout: installed, and used from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_megatron.command import COMMANDS
from areal_megatron.config import Config, DataConfig, ModelConfig, config_file
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.planning.pools import Placement
from areal_megatron.run.folder import RunFolder

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
def environment(wheel, tmp_path_factory):
    """A new environment that has the wheel alone."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    pip(sys.executable, "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return folder


@pytest.fixture(scope="module")
def installed(environment, tmp_path_factory):
    """Calls a program of the environment, which also sees what the wheel declares and nothing else, not even torch."""
    return caller(environment, declared(environment, tmp_path_factory.mktemp("declared")), tmp_path_factory)


@pytest.fixture(scope="module")
def installed_with_all(environment, tmp_path_factory):
    """The same with all packages of this environment, but not what its .pth files add, as an editable checkout."""
    return caller(environment, sysconfig.get_path("purelib"), tmp_path_factory)


def caller(environment, packages, tmp_path_factory):
    """Returns what calls a program, by default its Python, in an empty folder and gives back what was printed."""
    empty = tmp_path_factory.mktemp("empty")
    variables = os.environ | {"PYTHONPATH": str(packages)}

    def call(*arguments: object, code: int = 0, program: str = "python") -> str:
        command = [environment / "bin" / program, *map(str, arguments)]
        done = subprocess.run(command, cwd=empty, env=variables, capture_output=True, text=True, timeout=500)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout or done.stderr

    return call


def declared(environment, folder):
    """Fills the folder with links to what the metadata of the installed wheel requires, and that in turn."""
    [packages] = environment.glob("lib/python*/site-packages")
    [ours] = metadata.distributions(name="areal_megatron", path=[str(packages)])
    todo, seen = [(requirement, set()) for requirement in ours.requires], {}
    while todo:
        text, extras = todo.pop()
        requirement = Requirement(text)
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        if name in seen and requirement.extras <= seen[name]:
            continue
        seen[name] = seen.get(name, set()) | requirement.extras
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
        todo += [(required, seen[name]) for required in found.requires or ()]
    return folder


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """A run that was begun and has done nothing yet."""
    folder = tmp_path_factory.mktemp("runs")
    begun = RunFolder(folder / "run")
    begun.create()
    model, data = ModelConfig(path=str(world / "model")), DataConfig(train=str(world / "train.jsonl"))
    config_file.save(Config(name="run", runs_dir=str(folder), updates=2, model=model, data=data), begun.config)
    begun.begin()
    Recorder(begun, Placement((), ())).write({}, restarts_left=0)
    return begun


def pip(python, *arguments) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    own = {path.relative_to(ROOT) for path in (ROOT / "areal_megatron").rglob("*") if path.is_file()}
    launch = {"areal_megatron" / path.relative_to(ROOT) for path in (ROOT / "launch").rglob("*") if path.is_file()}
    assert packed == {str(path) for path in own | launch if path.suffix != ".pyc"}
    assert {f"areal_megatron/page/page.{kind}" for kind in ("html", "css", "js")} <= packed
    [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
    assert b"areal_megatron.engine.plugin:register" in zipfile.ZipFile(wheel).read(entry_points)


def test_it_is_the_installed_package_that_runs(installed):
    found = installed("-c", "import areal_megatron.launch as ours; print(ours.__file__)").strip()
    assert "site-packages" in found and not Path(found).is_relative_to(ROOT)
    for folder in ("launch", "tests", "tools"):
        assert installed("-c", f"import importlib.util; print(importlib.util.find_spec('{folder}'))") == "None\n"


def arguments(world):
    data = [f"data.train={world / 'train.jsonl'}", f"data.eval={world}/heldout.jsonl"]
    return [ROOT / "configs" / "tiny_cpu.yaml", f"model.path={world / 'model'}", *data]


def test_what_is_not_declared_is_not_seen(installed):
    code = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'megatron', 'wandb') if u.find_spec(n)])"
    assert installed("-c", code) == "[]\n"


def test_every_command_says_how_it_is_called(installed):
    code = """
from areal_megatron.command import COMMANDS, parser_of
for name, command in COMMANDS.items():
    print(name, parser_of(command.module).format_usage().split()[0])
"""
    assert installed("-c", code).splitlines() == [f"{name} usage:" for name in COMMANDS]
    assert "\n  evaluate " in installed("--help", program="areal")
    assert installed("--version", program="areal").startswith("areal_megatron 0.")
    assert installed("status", "--help", program="areal").startswith("usage: areal status ")


def test_a_run_is_planned(installed, world):
    def areal(*words):
        return installed(*words, program="areal")

    assert "engine-0" in areal("train", *arguments(world), "--dry-run")
    assert "trainer-0" in areal("plan", *arguments(world), "--nodes", 1, "--gpus", 2)
    assert "47" in areal("rows", *arguments(world), "--rows", 1000)
    written = areal("submit", *arguments(world), "--nodes", 1, "--gpus", 2, "--dry-run")
    python = Path(installed("-c", "import sys; print(sys.prefix)").strip()) / "bin" / "python"
    assert f"\nexec {python} -m areal_megatron.launch.slurm " in written


def test_what_only_some_need_is_named_where_it_is_missing(installed, world):
    """Without a traceback: what trains and generates, and trackers."""
    said = installed("train", *arguments(world), "name=x", code=2, program="areal")
    assert said.startswith("error: pool ") and "pip install torch==2.13.0 megatron-core==" in said
    said = installed("train", *arguments(world), "name=x", "track.to=mlflow", "--dry-run", code=2, program="areal")
    assert said.endswith(": pip install mlflow-skinny sqlalchemy alembic\n")
    for words in (
        ["evaluate", world / "model", world / "heldout.jsonl"],
        ["convert", "from-hf", world / "model", "out"],
    ):
        said = installed(*words, code=2, program="areal")
        assert said.splitlines()[-1].startswith("error: ") and said.count("error: ") == 1 and "Traceback" not in said


def test_a_run_is_looked_at(installed, run, tmp_path):
    def areal(*words):
        return installed(*words, program="areal")

    assert areal("status", run.folder)
    assert areal("audit", run.folder).startswith("0 faults")
    areal("report", run.folder, "--out", tmp_path / "report.html")
    assert "<style>" in (tmp_path / "report.html").read_text()
    loads = "import sys; from areal_megatron.programs import status; print('tensorboard' in sys.modules)"
    assert installed("-c", loads) == "False\n"


def test_checkpoints_are_converted(installed_with_all, world, tmp_path):
    def convert(*words):
        return installed_with_all("-m", "areal_megatron.programs.convert", *words)

    convert("from-hf", world / "model", tmp_path / "checkpoint")
    convert("to-hf", tmp_path / "checkpoint", tmp_path / "hf", "--verify")
    assert (tmp_path / "hf" / "model.safetensors").exists()

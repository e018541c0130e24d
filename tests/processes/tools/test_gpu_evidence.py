"""tools/gpu_evidence.py: limits, missing packages and crashes with steps of the test's own; real steps on CPU."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.living import is_alive
from tools import gpu_evidence
from tools.evidence import gpu_tests, links, processes, queues
from tools.evidence.parts import Options, Skip

ROOT = Path(__file__).resolve().parents[3]
HEAD = "from tools.evidence.parts import Finding, Skip\n"
QUICK = """
def all_there(options):
    yield Finding("answer", 42.0, "ms")
    yield Finding("not in the table", 1.0, shown=False)

PARTS = {"all": all_there}
"""


@pytest.fixture
def collect(tmp_path, monkeypatch):
    """Runs steps that are given as code, name → (limit in seconds, code); returns the report."""

    def run(total_s=gpu_evidence.TOTAL_S, **steps):
        package = tmp_path / "packages" / "tools" / "evidence"
        package.mkdir(parents=True)
        for name, (_, code) in steps.items():
            (package / f"{name}.py").write_text(HEAD + code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
        out = tmp_path / "out"
        out.mkdir()
        limits = {name: limit_s for name, (limit_s, _) in steps.items()}
        report = gpu_evidence.collect(limits, "cpu", True, out, tmp_path / "evidence.json", total_s)
        assert json.loads((tmp_path / "evidence.json").read_text()) == report
        return report

    return run


def test_a_step_over_its_limit_is_ended_with_all_it_started(collect, tmp_path):
    slow = f"""
import subprocess, time
def waits(options):
    yield Finding("before", 7.0, "s")
    child = subprocess.Popen(["sleep", "600"])
    open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
    time.sleep(600)
PARTS = {{"waits": waits, "never": waits}}
"""
    start = time.monotonic()
    report = collect(slow=(8.0, slow), quick=(60, QUICK))
    assert time.monotonic() - start < 200
    step = report["steps"]["slow"]
    assert step["status"] == "ended" and step["seconds"] < 40
    assert list(step["parts"]) == ["waits"] and "limit of 8 s" in step["parts"]["waits"]["reason"]
    assert [finding["value"] for finding in step["parts"]["waits"]["findings"]] == [7.0]
    assert not is_alive(int((tmp_path / "child").read_text()))
    assert report["steps"]["quick"]["status"] == "done"
    text = gpu_evidence.table(report)
    assert "over its limit of 8 s" in text and re.search(r"answer +42 ms", text)


def test_a_missing_package_is_a_reason_and_a_crash_ends_its_step_alone(collect):
    several = """
def lacks(options):
    import no_such_package.part
    yield
def refuses(options):
    raise Skip("asked for a CPU")
    yield
def breaks(options):
    yield Finding("half", 0.5)
    raise ValueError("wrong\\nsecond line")
def imports_ours(options):
    import areal_megatron.no_such_module
    yield
def works(options):
    yield Finding("whole", 1.0)
PARTS = {"lacks": lacks, "refuses": refuses, "breaks": breaks, "ours": imports_ours, "works": works}
"""
    dies = "import os, signal\ndef dies(options):\n    yield Finding('last', 3.0)\n"
    dies += "    os.kill(os.getpid(), signal.SIGKILL)\nPARTS = {'dies': dies}\n"
    lacking = "import no_such_package\nPARTS = {}\n"
    steps = collect(several=(60, several), lacking=(60, lacking), dies=(60, dies))["steps"]
    found = {name: (part["status"], part["reason"]) for name, part in steps["several"]["parts"].items()}
    assert found == {
        "lacks": ("skipped", "there is no package no_such_package"),
        "refuses": ("skipped", "asked for a CPU"),
        "breaks": ("failed", "ValueError: wrong"),
        "ours": ("failed", "ModuleNotFoundError: No module named 'areal_megatron.no_such_module'"),
        "works": ("done", ""),
    }
    assert steps["several"]["parts"]["breaks"]["findings"][0]["value"] == 0.5
    assert steps["several"]["status"] == "failed" and steps["lacking"]["status"] == "skipped"
    assert steps["dies"]["status"] == "failed" and "exit code -9" in steps["dies"]["reason"]
    assert steps["dies"]["parts"]["dies"]["findings"][0]["value"] == 3.0


def test_table_and_report_agree(collect):
    report = collect(quick=(60, QUICK), other=(60, QUICK.replace("42.0", "12345.6")))
    lines = gpu_evidence.table(report).splitlines()
    assert [line.split() for line in lines if "answer" in line] == [
        [*f"quick {report['steps']['quick']['seconds']} of 60 s answer 42 ms".split()],
        [*f"other {report['steps']['other']['seconds']} of 60 s answer 12,346 ms".split()],
    ]
    assert not any("not in the table" in line for line in lines)


def test_versions_that_differ_are_named():
    report = {"device": "cuda", "small": False, "steps": {}}
    report["versions"] = {
        "torch": {"version": "2.11.0+cu130", "pinned": "2.13.0"},
        "transformers": {"version": "5.17.0", "pinned": "5.17.0"},
        "triton": {"version": "3.6.0", "pinned": ""},
    }
    [_, line] = gpu_evidence.table(report).splitlines()
    assert line == "torch is 2.11.0+cu130; the project is written for 2.13.0"
    assert gpu_evidence.versions()["torch"]["pinned"] == gpu_evidence.versions()["torch"]["version"].partition("+")[0]


def test_a_step_gets_what_is_left_of_the_whole(collect):
    slow = "import time\ndef waits(options):\n    time.sleep(600)\n    yield\nPARTS = {'waits': waits}\n"
    start = time.monotonic()
    steps = collect(total_s=6, slow=(60, slow), late=(60, slow))["steps"]
    assert time.monotonic() - start < 50
    assert [step["status"] for step in steps.values()] == ["ended", "ended"]
    assert steps["slow"]["limit_s"] == 6 and steps["late"]["limit_s"] == 0


def test_tests_marked_gpu_are_counted_by_file(tmp_path):
    """Here in files of the test's own, since these need no GPU."""
    assert {"parallel/test_trainer.py", "parallel/test_transport_copies.py"} <= set(gpu_tests.PARTS)
    file = tmp_path / "test_own.py"
    file.write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_good(): pass\ndef test_bad(): assert 0\n"
        "def test_left(): pytest.skip('no CUDA device')\n"
    )
    found = gpu_tests.tests(Options("cuda", False, tmp_path), file)
    finding = next(found)
    assert finding.value == "1 of 3, 1 skipped" and finding.more == ["test_bad"]
    with pytest.raises(RuntimeError, match="test_bad"):
        next(found)
    file.write_text("import pytest\n@pytest.mark.gpu\ndef test_left(): pytest.skip('no CUDA device')\n")
    with pytest.raises(Skip, match=r"1 tests: .*no CUDA device"):
        next(gpu_tests.tests(Options("cuda", False, tmp_path), file))


def yields_and_hangs(rank, path):
    yield "first"
    yield "second"
    while not Path(path).exists():
        time.sleep(0.02)
    if rank:
        raise ValueError("of rank 1")


def test_what_ranks_find_is_there_before_they_end(tmp_path):
    found = processes.as_found(yields_and_hangs, 2, str(tmp_path / "go"), folder=tmp_path / "ranks")
    assert [next(found), next(found)] == ["first", "second"]
    (tmp_path / "go").touch()
    with pytest.raises(RuntimeError, match="rank 1: ValueError: of rank 1"):
        next(found)


def test_a_call_takes_less_than_ten_minutes_and_what_decides_comes_first():
    assert gpu_evidence.TOTAL_S < 600 and max(gpu_evidence.STEPS.values()) < gpu_evidence.TOTAL_S
    assert next(iter(gpu_evidence.STEPS)) == "queues" and next(iter(queues.PARTS)) == "killed peer"
    assert [*links.PARTS][-1] == "communicators", "which takes the most time and memory"


COMPARED = """
import sys
from pathlib import Path
from areal_megatron.trainer import hardware
from tools.evidence import training
from tools.evidence.parts import Options

calls, switches = [], hardware.fusions
def fusions(absent, experts):
    found = switches(absent, experts)
    calls.extend([1] * found["bias_activation_fusion"])
    return found
hardware.fusions = fusions
plain = hardware.kernels
hardware.kernels = there = lambda *_: plain(*_) | {"swiglu": ""}  # it computes on CPU too
options = Options("cpu", True, Path(sys.argv[1]))
found = [(len(calls), f.name) for f in training.compare(options, training.DENSE, ("swiglu", "fa3"))]
assert hardware.kernels is there
counts, names = zip(*found)
print(counts[0] == counts[1] == counts[2] == counts[3] > 0, *names, sep="|")
"""


def test_kernels_are_compared_with_their_absence(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPARED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    of = "  of the rate of large products"
    assert done.stdout.strip().splitlines()[-1] == f"True|with swiglu|{of}|without swiglu|{of}"


def run(folder, *arguments):
    command = [sys.executable, ROOT / "tools" / "gpu_evidence.py", "--device", "cpu", "--small", "--out", folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=590)


def test_an_unknown_step_is_refused(tmp_path):
    done = run(tmp_path / "out", "--only", "ceilings,magic")
    assert done.returncode == 2 and "there is no step magic" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.soak
def test_a_process_lives_on_for_a_minute_after_the_peer_of_a_link_dies(tmp_path):
    found = {finding.name: finding.value for finding in queues.killed_peer(Options("cpu", False, tmp_path))}
    for name in queues.SETTINGS:
        assert 0 <= found[f"{name}: a killed peer is noticed after"] < 10
        assert found[f"{name}: the process lives on for"] >= 60


def findings(report):
    return [f for step in report["steps"].values() for part in step["parts"].values() for f in part["findings"]]


def check(done, report, steps):
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(report["steps"]) == steps
    for name, step in report["steps"].items():
        assert step["status"] in ("done", "skipped"), (name, step)
        assert all(part["reason"] for part in step["parts"].values() if part["status"] == "skipped")
        assert step["status"] == "skipped" or any(part["findings"] for part in step["parts"].values())
    shown = [
        f["name"] for s in report["steps"].values() for p in s["parts"].values() for f in p["findings"] if f["shown"]
    ]
    assert all(name in done.stdout for name in shown)


def test_quick_steps_on_cpu(tmp_path):
    done = run(tmp_path / "out", "--only", "ceilings,gpu_tests")
    report = json.loads((tmp_path / "out" / "evidence.json").read_text())
    check(done, report, ["ceilings", "gpu_tests"])
    assert {part["reason"] for part in report["steps"]["gpu_tests"]["parts"].values()} == {"asked for a CPU"}


@pytest.mark.soak
def test_every_step_on_cpu(tmp_path):
    start = time.monotonic()
    done = run(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "evidence.json").read_text())
    check(done, report, list(gpu_evidence.STEPS))
    assert time.monotonic() - start < 180
    values = {finding["name"]: finding["value"] for finding in findings(report)}
    differences = [value for name, value in values.items() if name.endswith("largest difference")]
    assert len(differences) == 4 and max(differences) < 3e-5
    sent, _, of = values["parameters as sent after two updates"].partition(" of ")
    assert sent == of
    assert values["log-probability off float32, prefilled after an update"] < 0.05

"""What the demo decides before it makes anything."""

import os

import pytest

from areal_megatron.config import ConfigError
from areal_megatron.launch.supervision import gpus
from areal_megatron.run import versions
from tools import demo


@pytest.fixture
def for_gpus(monkeypatch):
    """The packages are those that `make setup` installs where there is a GPU."""
    monkeypatch.setattr(versions, "is_for_cpu", lambda: False)


@pytest.fixture
def one_gpu(tmp_path, monkeypatch):
    """The nvidia-smi of a machine with one GPU, on the PATH."""
    program = tmp_path / "programs" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncase "$*" in *index*) echo "0, GPU-1, 00000000:3B:00.0, 24564";; *) echo 24564;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.listed.cache_clear()
    yield
    gpus.listed.cache_clear()


def test_a_machine_with_one_slot_shares_it(monkeypatch, capsys, for_gpus):
    assert demo.machine_keys(demo.CONFIG, ["machine.device=cpu", "machine.slots=2"]) == []
    assert demo.machine_keys(demo.CONFIG, ["machine.device=cpu", "machine.slots=1"]) == ["machine.shared=true"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert demo.machine_keys(demo.CONFIG, []) == ["machine.shared=true"]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "one slot (cuda): trainers and engines share it, machine.shared=true"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert demo.machine_keys(demo.CONFIG, []) == []


def test_whoever_decides_it_is_not_overruled():
    one = ["machine.device=cpu", "machine.slots=1"]
    for decided in ("machine.shared=false", "machine.shared=true"):
        assert demo.machine_keys(demo.CONFIG, [*one, decided]) == []


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Calls the demo with overrides, and returns the arguments of its launchers, which do nothing here."""

    def of(*overrides):
        calls = []
        monkeypatch.setattr(demo, "run_step", lambda title, *arguments: calls.append([*map(str, arguments)]))
        monkeypatch.setattr(demo, "accuracy", lambda run: (0.5, 0.9))
        monkeypatch.setattr("sys.argv", ["demo.py", "--out", str(tmp_path / "out"), *overrides])
        assert demo.main() == 0
        return [call for call in calls if call[1:3] == ["areal_megatron.command", "train"]]

    return of


def test_one_gpu_is_shared(launched, one_gpu, for_gpus, capsys):
    """tests/e2e/test_input.py has the plan of such a run."""
    warm_start, ppo = launched()
    assert [key for key in warm_start if key.startswith("machine.")] == []
    assert [key for key in ppo if key.startswith("machine.")] == ["machine.shared=true"]
    assert "one slot (cuda): trainers and engines share it" in capsys.readouterr().out


def test_packages_for_the_cpu_leave_a_gpu_alone(launched, one_gpu, capsys):
    """As after `make setup DEVICE=cpu`: this environment's are such."""
    for call in launched():
        assert "machine.device=cpu" in call
    assert "the packages in .venv are for the CPU" in capsys.readouterr().out
    assert [call.count("machine.device=cuda") for call in launched("machine.device=cuda")] == [1, 1]


def test_wrong_overrides_are_refused_before_the_warm_start(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError):
        demo.machine_keys(demo.CONFIG, ["machine.slots=many"])
    monkeypatch.setattr("sys.argv", ["demo.py", "--out", str(tmp_path / "new"), "rollout.max_stalenes=0"])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert not (tmp_path / "new").exists()
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "rollout.max_staleness" in message

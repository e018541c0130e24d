"""What the demo decides before it makes anything."""

import pytest

from areal_megatron.config import ConfigError
from tools import demo


def test_a_machine_with_one_slot_shares_it(monkeypatch, capsys):
    assert demo.sharing(demo.CONFIG, ["machine.device=cpu", "machine.slots=2"]) == []
    assert demo.sharing(demo.CONFIG, ["machine.device=cpu", "machine.slots=1"]) == ["machine.shared=true"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert demo.sharing(demo.CONFIG, []) == ["machine.shared=true"]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "one slot (cuda): trainers and engines share it, machine.shared=true"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert demo.sharing(demo.CONFIG, []) == []


def test_whoever_decides_it_is_not_overruled():
    one = ["machine.device=cpu", "machine.slots=1"]
    for decided in ("machine.shared=false", "machine.shared=true"):
        assert demo.sharing(demo.CONFIG, [*one, decided]) == []


def test_wrong_overrides_are_refused_before_the_warm_start(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError):
        demo.sharing(demo.CONFIG, ["machine.slots=many"])
    monkeypatch.setattr("sys.argv", ["demo.py", "--out", str(tmp_path / "new"), "rollout.max_stalenes=0"])
    assert demo.main() == 2 and not (tmp_path / "new").exists()
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "rollout.max_staleness" in message

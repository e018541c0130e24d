"""Which engines a launcher is to end, from what the controller says of them."""

import pytest

from areal_megatron.launch.supervision import health
from areal_megatron.launch.supervision.health import Health
from areal_megatron.observe.metrics import write_status
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.run.folder import RunFolder


@pytest.fixture
def look(tmp_path, monkeypatch):
    """look(engine_0=(state, losses), …) returns what a Health that has started engine-0 and engine-1 wants to end."""
    monkeypatch.setattr(health, "_LOOK_S", 0)
    run = RunFolder(tmp_path / "run")
    run.create()
    subject = Health(run)
    for name in ("engine-0", "engine-1"):
        subject.started(name)

    def look(**engines):
        said = [
            EngineStatus(name=name.replace("_", "-"), state=state, losses=losses)
            for name, (state, losses) in engines.items()
        ]
        write_status(run, Status(engines=said))
        return subject.to_end()

    look.subject = subject
    return look


def test_an_engine_that_stays_lost_and_was_not_started_again_is_ended(look):
    assert look(engine_0=("lost", 1), engine_1=("ready", 0)) == {}, "it may be about to end by itself"
    assert look(engine_0=("lost", 1), engine_1=("ready", 0)) == {"engine-0": "lives but does not answer"}
    look.subject.started("engine-0")
    for _ in range(3):
        assert look(engine_0=("lost", 1), engine_1=("ready", 0)) == {}, "it is on its way"
    look(engine_0=("lost", 2))
    assert look(engine_0=("lost", 2)) == {"engine-0": "lives but does not answer"}
    assert look.subject.given_up == {"engine-0"}


def test_a_drained_engine_is_ended_at_once_and_others_are_somebody_elses(look):
    assert look(engine_1=("drained", 0), engine_7=("drained", 0)) == {"engine-1": "is drained"}
    assert look.subject.drained == {"engine-1"}


def test_a_drained_engine_that_was_started_again_is_let_live_until_it_is_drained_again(look):
    assert look(engine_1=("drained", 0)) == {"engine-1": "is drained"}
    look.subject.started("engine-1")
    for _ in range(3):
        assert look(engine_1=("drained", 0)) == {} and not look.subject.drained, "it does not serve yet"
    assert look(engine_1=("ready", 0)) == {}
    assert look(engine_1=("drained", 0)) == {"engine-1": "is drained"}


def test_another_controller_has_lost_none_yet(look):
    look(engine_0=("lost", 1))
    look.subject.begin({"engine-1": None})
    assert look() == {} and look(engine_0=("lost", 1)) == {}, "engine-0 has not been started since"
    look(engine_1=("lost", 1))
    assert look(engine_1=("lost", 1)) == {"engine-1": "lives but does not answer"}

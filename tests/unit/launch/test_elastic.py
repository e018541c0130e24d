"""Engines of a launcher that come and go: each keeps its name and slots, whatever becomes of it."""

from itertools import chain

import pytest

from areal_megatron.config import Config, ConfigError, check
from areal_megatron.config_file import load
from areal_megatron.launch import elastic
from areal_megatron.launch.elastic import Elastic, claim
from areal_megatron.launch.pools import Node, allocate
from areal_megatron.observe.metrics import write_status
from areal_megatron.run import Run
from tests.unit.launch.test_balance import ETA, WINDOW, update


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "LOOK_S", 0)
    run = Run(tmp_path / "run")
    run.create()
    return run


def asked(engines=1, most=3, least=1, tp=1):
    config = Config(name="run", updates=10**6)
    config.rollout.max_staleness, config.rollout.tp = ETA, tp
    config.rollout.engines, config.rollout.most_engines, config.rollout.least_engines = engines, most, least
    return config


def placed(config, *sizes):
    return allocate(config, [Node(f"n{number}", tuple(range(size))) for number, size in enumerate(sizes)])


def short_of(pool, engines, seconds=50):
    trains, generates = (1, seconds * engines) if pool == "engines" else (seconds, 0.1)
    return [update(version + 1, engines, trains, generates, 0, 1.0) for version in range(WINDOW + 1)]


def say(run, **states):
    write_status(run, {"engines": [{"name": f"engine-{name[1:]}", "state": state} for name, state in states.items()]})


def test_engines_that_may_join_have_slots_that_nobody_else_has():
    placement = placed(asked(engines=2, most=4, tp=2), 6, 4)
    taken = [slot for process in placement.processes for slot in process.slots]
    assert [{slot.node for slot in own} for own in placement.spare] == [{"n1"}, {"n1"}] and placement.idle == 1
    assert len({*taken, *chain(*placement.spare)}) == len(taken) + 4 == 9
    assert placement.table().count("when it is needed") == 2
    problem = r"rollout.engines=2 × tp=2 is 4, up to rollout.most_engines=5 it is 6 more\) but there are 10"
    with pytest.raises(ConfigError, match=problem):
        placed(asked(engines=2, most=5, tp=2), 6, 4)
    with pytest.raises(ConfigError, match="node n0 gives 3 CPU cores for 5 processes"):
        allocate(asked(engines=1, most=3), [Node("n0", tuple(range(4)), 3)])


def test_an_engine_joins_leaves_and_joins_again(run):
    config = asked(engines=1, most=2)
    subject = Elastic(run, config, placed(config, 3))
    assert [p.name for p in subject.joining] == ["engine-1"] and subject.resting == {"engine-1"}
    assert claim(run, 1) == "engine-2", "nobody else may have the name"
    say(run, e0="ready")
    assert subject.look(short_of("engines", 1), set(), lambda _: True) == (["engine-1"], [])
    assert not subject.resting
    say(run, e0="ready", e1="ready")
    assert subject.look(short_of("trainers", 2, 20), set(), lambda _: True) == ([], []), "it has gained what it should"
    assert subject.look(short_of("trainers", 2, 40), set(), lambda _: True) == ([], ["engine-1"]), "another load"
    assert run.drain("engine-1").exists()
    say(run, e0="ready", e1="drained")
    assert subject.look([], {"engine-1"}, lambda _: True) == ([], [])
    assert not run.drain("engine-1").exists() and subject.resting == {"engine-1"}
    assert subject.look(short_of("engines", 1, 40), {"engine-1"}, lambda _: True) == ([], []), "one was enough of late"
    assert subject.look(short_of("engines", 1, 80), {"engine-1"}, lambda _: True) == (["engine-1"], [])


def test_the_first_engines_leave_too_and_are_there_again_for_another_controller(run):
    config = asked(engines=3, most=3, least=2)
    subject = Elastic(run, config, placed(config, 4))
    say(run, e0="ready", e1="ready", e2="ready")
    assert subject.look(short_of("trainers", 3), set(), lambda _: True) == ([], ["engine-2"])
    subject.look([], {"engine-2"}, lambda _: True)
    assert subject.resting == {"engine-2"}
    subject.begin()
    assert not subject.resting


def test_an_engine_that_fails_or_has_lost_its_node_is_not_asked_for_again(run):
    config = asked(engines=1, most=4)
    placement = placed(config, 2, 3)
    subject, needed = Elastic(run, config, placement), short_of("engines", 1)
    say(run, e0="ready")
    assert subject.look(needed, set(), lambda _: True) == (["engine-1"], [])
    assert not subject.is_dropped("engine-0"), "the run began with it"
    assert subject.is_dropped("engine-1")
    assert subject.look(needed, set(), lambda _: True) == (["engine-2"], [])
    assert subject.is_dropped("engine-2")
    for _ in range(3):
        assert subject.look(needed, set(), lambda process: process.name != "engine-3") == ([], [])
    assert subject.look(needed, set(), lambda _: True) == ([], []), "there is none to come any more"


def test_engines_stay_as_many_without_a_bound(run):
    config = asked(engines=1, most=0)
    subject = Elastic(run, config, placed(config, 8))
    assert subject.joining == [] and subject.look(short_of("engines", 1), set(), lambda _: True) == ([], [])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["rollout.least_engines=2"], "rollout.least_engines: has no meaning without rollout.most_engines"),
        (
            ["rollout.most_engines=2", "rollout.engines=3"],
            "rollout.engines: must be from rollout.least_engines=1 to rollout.most_engines=2, is 3",
        ),
        (["rollout.most_engines=2", "rollout.exact_staleness=true"], "rollout.most_engines: has no meaning where"),
        (["rollout.most_engines=2", "machine.shared=true"], "rollout.most_engines: has no meaning where"),
        (["rollout.most_engines=2", "mode=sft"], "rollout.most_engines: has no meaning where"),
    ],
)
def test_bounds_that_cannot_be_met(tmp_path, changes, problem):
    path = tmp_path / "config.yaml"
    path.write_text("name: run\nupdates: 10\nmodel: {path: m}\ndata: {train: t}\n")
    check(load(path, ["rollout.most_engines=2"]))
    with pytest.raises(ConfigError, match=problem):
        load(path, changes)

"""What `python -m launch.engines` decides before it starts or drains anything."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_megatron.config import Config, ConfigError
from areal_megatron.observe.metrics import write_status
from areal_megatron.run import Run
from launch import engines
from launch.engines import check_not_shared, check_running, claim, drain, slots
from launch.pools import Placement, Process, Slot
from launch.records import Recorder


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    run.create()
    return run


def config(device, tp):
    made = Config()
    made.machine.device, made.rollout.tp = device, tp
    return made


def test_engines_get_whole_gpus_of_their_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5,6")
    assert slots(config("cuda", 2), 0) == [[2, 3], [4, 5]]
    assert slots(config("cuda", 2), 1) == [[2, 3]]
    for tp, count in ((2, 3), (8, 0)):
        with pytest.raises(ConfigError, match=rf"rollout.tp={tp} do not fit the 5 GPUs of this machine"):
            slots(config("cuda", tp), count)


def test_engines_on_cpu_share_cores():
    cores = len(os.sched_getaffinity(0))
    assert len(slots(config("cpu", 1), 0)) == cores
    assert [own[0] for own in slots(config("cpu", 1), cores + 1)] == [*range(cores), 0]


def test_names_are_never_given_twice(run):
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: claim(run, 3), range(40)))
    assert sorted(names, key=lambda name: int(name[7:])) == [f"engine-{index}" for index in range(3, 43)]


def test_a_run_that_is_not_going_on_is_refused(run):
    with pytest.raises(ConfigError, match="is no run folder"):
        check_running(run)
    recorder = Recorder(run, Placement((), ()))
    recorder.write({}, 0)
    check_running(run)
    recorder.write({}, 0, "done")
    with pytest.raises(ConfigError, match="is not running: it is done"):
        check_running(run)


def test_draining_asks_waits_and_gives_up(run, monkeypatch, capsys):
    monkeypatch.setattr(engines, "_POLL_S", 0.01)
    Recorder(run, Placement((), ())).write({}, 0)

    def say(**states):
        write_status(
            run, {"engines": [{"name": f"engine-{name[1:]}", "state": state} for name, state in states.items()]}
        )

    say(e0="ready", e1="ready", e2="lost")
    with pytest.raises(ConfigError, match="engine-5: no such engine; the run has engine-0, engine-1, engine-2"):
        drain(run, ["engine-0", "engine-5"], 1, 180)
    with pytest.raises(ConfigError, match="no engine would be left"):
        drain(run, ["engine-0", "engine-1"], 1, 180)
    assert not run.drain("engine-0").exists()
    assert drain(run, ["engine-1"], 0.1, 180) == 1 and "engine-1 still answer after 0 s" in capsys.readouterr().err
    assert run.drain("engine-1").exists()
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(drain, run, ["engine-1"], 20, 180)
        time.sleep(0.2)
        say(e0="ready", e1="drained", e2="lost")
        assert drained.result(20) == 0
    assert "engine-1 is drained" in capsys.readouterr().out


def test_a_gpu_that_the_pools_of_a_run_share_has_no_room_for_more_engines(run, monkeypatch):
    asked = config("cuda", 1)
    asked.machine.shared = True
    engine = Process("engine-0", "rollout", 0, "gpu7", (Slot("gpu7", 0),))
    Recorder(run, Placement((), (engine,))).write({}, 0)
    with pytest.raises(ConfigError, match=r"^machine.shared: .*; add engines on another machine$"):
        check_not_shared(run, asked)  # the launcher's machine
    monkeypatch.setattr("socket.gethostname", lambda: "gpu8")
    check_not_shared(run, asked)  # these GPUs are free
    monkeypatch.setenv("SLURMD_NODENAME", "gpu7")
    with pytest.raises(ConfigError, match="add engines on another machine"):
        check_not_shared(run, asked)
    asked.machine.device = "cpu"  # cores can be shared by any number
    check_not_shared(run, asked)

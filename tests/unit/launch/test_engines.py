"""What `areal engines` decides before it starts or drains anything."""

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_megatron.config import Config, ConfigError
from areal_megatron.launch import engines
from areal_megatron.launch.engines import (
    Reach,
    check_elsewhere,
    check_not_shared,
    check_running,
    claim,
    drain,
    sites_of,
    slots,
)
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.observe.metrics import write_status
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.planning.pools import Placement, Process, Slot
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.network import Site, address


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
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
        with pytest.raises(ConfigError, match=rf"tp={tp}.* do not fit the 5 GPUs of this machine"):
            slots(config("cuda", tp), count)


def test_engines_on_cpu_share_cores():
    cores = len(os.sched_getaffinity(0))
    assert len(slots(config("cpu", 1), 0)) == cores
    assert [own[0] for own in slots(config("cpu", 1), cores + 1)] == [*range(cores), 0]


def test_a_number_of_engines_below_0_is_refused_in_a_line(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        engines.main(["add", str(run.folder), "--count", "-1"])
    assert "--count: expected a whole number, at least 0, is '-1'" in capsys.readouterr().err


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
        said = [EngineStatus(name=f"engine-{name[1:]}", state=state) for name, state in states.items()]
        write_status(run, Status(engines=said))

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


def test_engines_at_another_site_take_ports_in_a_row():
    own = routed_address()
    first = free_ports(own, 9)
    assert sites_of(f"{own}:{first}", "", 3, 2) == [Site(own, port, own) for port in (first, first + 3, first + 6)]
    assert sites_of(own, "", 2, 1) == [Site(own, 0, own)] * 2, "wherever they are free, at each start"


def test_a_machine_whose_address_is_translated_listens_at_its_own():
    first = free_ports("127.0.0.1", 4)
    sites = sites_of(f"gateway.invalid:{first}", "127.0.0.1", 2, 1)
    assert sites == [Site("gateway.invalid", port, "127.0.0.1") for port in (first, first + 2)]
    assert [Site.of(site.settings) for site in sites] == sites and Site.of({}) is None
    for listens, problem in (("192.0.2.1", "is no address of this machine"), ("nowhere.invalid", "is not known here")):
        with pytest.raises(ConfigError, match=f"^--listen: {listens} {problem}"):
            sites_of("gateway.invalid:7000", listens, 2, 1)
    with pytest.raises(ConfigError, match=r"^--listen: no other site can reach 0\.0\.0\.0"):
        sites_of("gateway.invalid:7000", "0.0.0.0", 2, 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not HOST or HOST:PORT"),
        (":7000", "is not HOST or HOST:PORT"),
        ("[::1:7000", "is not HOST or HOST:PORT"),
        ("far:70000", "70000 is no port"),
        ("far:-1", "-1 is no port"),
        ("far:http", "http is no port"),
        ("nowhere.invalid:7000", "nowhere.invalid is not known here: "),
        ("127.0.0.1:7000", "no other site can reach 127.0.0.1"),
        ("[::1]:7000", "no other site can reach ::1"),
        ("0.0.0.0", "no other site can reach 0.0.0.0"),
        ("192.0.2.1:7000", "192.0.2.1 is no address of this machine; it has .*127.0.0.1"),
        ("192.0.2.1:65534", "2 engines take 2 ports each, and there are too few after 65534"),
    ],
)
def test_an_address_that_no_other_site_reaches_is_refused(text, problem):
    with pytest.raises(ConfigError, match=f"^--address: .*{problem}"):
        sites_of(text, "", 2, 1)


def test_a_port_that_is_taken_is_named():
    own = routed_address()
    with socket.create_server((own, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--address: ports {port - 1} to {port} of {own}: .*in use"):
            sites_of(f"{own}:{port - 1}", "", 1, 1)


def test_a_machine_of_the_run_is_at_no_other_site(run, monkeypatch):
    Recorder(run, Placement((), ())).write({}, 0)
    with pytest.raises(ConfigError, match="this machine has processes of the run already; leave --address out"):
        check_elsewhere(run)
    monkeypatch.setattr("socket.gethostname", lambda: "far")
    check_elsewhere(run)


def free_ports(host, count):
    """The first of as many ports in a row that nobody has, below those that outgoing connections are given."""
    for first in range(20_000 + os.getpid() % 10_000, 32_768 - count, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server((host, port)))
            return first
    raise AssertionError("so many ports in a row are not free")


def routed_address():
    """An address of this machine that is no loopback's."""
    try:
        return address("auto")
    except ConfigError as e:
        pytest.skip(str(e))


def test_an_engine_that_serves_where_the_run_does_not_reach_it_is_named_once(run, monkeypatch):
    monkeypatch.setattr(engines, "_LOOK_S", 0.0)
    monkeypatch.setattr(engines, "_UNREACHED_S", 0.2)
    reach = Reach(run)
    names = dict.fromkeys(("engine-1", "engine-2"), Site("far.invalid", 0, "127.0.0.1"))
    assert reach.look(names) == [], "it has not announced itself"
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"far.invalid:{server.getsockname()[1]}"
        run.announce("engine-1", f"https://{place}")
        write_status(run, Status(engines=[EngineStatus(name="engine-1", state="ready")]))
        assert reach.look(names) == []
        time.sleep(0.3)
        assert reach.look(names) == [], "the run reaches it"
        write_status(run, Status(engines=[EngineStatus(name="engine-1", state="lost")]))
        assert reach.look(names) == []
        time.sleep(0.3)
        (told,) = reach.look(names)
        assert f"engine-1 serves at {place}, but in 0 s the run has not reached it" in told
        assert reach.look(names) == []
    run.announce("engine-2", f"https://{place}")
    assert reach.look(names) == []
    time.sleep(0.3)
    assert reach.look(names) == [], "it does not serve yet"

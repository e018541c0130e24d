"""GPUs as a node has them, and how processes are started on them; nvidia-smi and /sys are files here."""

import os
import stat
import sys

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig
from areal_megatron.launch import slurm
from areal_megatron.launch.engines import slots
from areal_megatron.launch.supervision import caches, gpus
from areal_megatron.launch.supervision.node import hello
from areal_megatron.launch.supervision.orders import carry_out, start_order
from areal_megatron.launch.supervision.processes import Children
from areal_megatron.launch.supervision.start import decide_device
from areal_megatron.planning.pools import Node, allocate
from areal_megatron.run.folder import RunFolder

UUIDS = [f"GPU-{n}f3a0c11-0000-4000-8000-00000000000{n}" for n in range(4)]
SLICE = "MIG-4b1f3b58-7ed4-5f0a-9a44-d2ae9e1a3f00"


def made(folder):
    run = RunFolder(folder)
    run.create(exist_ok=True)
    return run


@pytest.fixture(autouse=True)
def forget():
    gpus.listed.cache_clear()
    yield
    gpus.listed.cache_clear()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with GPUs: (near cores of each, MiB of each) → nvidia-smi and /sys; no GPU is hidden."""

    def make(near, mebibytes=81559):
        rows = [f"{n}, {UUIDS[n]}, 00000000:{n + 1}B:00.0, {mebibytes}" for n in range(len(near))]
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
        program.chmod(0o755)
        for n, cores in enumerate(near):
            folder = tmp_path / "devices" / f"0000:{n + 1}b:00.0"
            folder.mkdir(parents=True)
            (folder / "local_cpulist").write_text(f"{cores}\n")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(gpus, "_DEVICES", tmp_path / "devices")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


@pytest.mark.parametrize(
    ("value", "seen", "said"),
    [
        ("0,3", [0, 3], ""),
        (f"{UUIDS[1]}, {UUIDS[0]}", [UUIDS[1], UUIDS[0]], ""),
        (f"{SLICE},MIG-{UUIDS[0]}/1/0", [SLICE, f"MIG-{UUIDS[0]}/1/0"], ""),
        ("", [], ""),
        ("NoDevFiles", [], ""),
        ("1,-1,2", [1], ""),
        ("1,all,2", [1], "warning: CUDA_VISIBLE_DEVICES=1,all,2: 'all' is no GPU, and CUDA ignores it"),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(monkeypatch, capsys, value, seen, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert hello("a").gpus == seen
    heard = capsys.readouterr().err
    assert heard.startswith(said) and heard.count("\n") == bool(said)


def test_names_of_gpus_and_slices_are_slots(tmp_path):
    config = run_config()
    placement = allocate(config, [Node("a", (UUIDS[3], SLICE))])
    assert f"a:{SLICE}" in placement.table()
    orders = [start_order(config, made(tmp_path), process, "a") for process in placement.processes]
    devices = {order.name: order.settings.get("CUDA_VISIBLE_DEVICES") for order in orders}
    assert devices == {"controller": "", "trainer-0": UUIDS[3], "engine-0": SLICE}


def test_an_engine_is_added_on_a_slice(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{SLICE},5")
    assert slots(run_config(), 0) == [[SLICE], [5]]


def test_a_node_tells_its_pool_its_memory_and_the_uuids(machine, monkeypatch):
    machine(["0"] * 3)
    found = hello("a", "rollout")
    assert (found.pool, found.node, found.gpus, found.uuids) == ("rollout", "", [0, 1, 2], UUIDS[:3])
    assert found.gpu_gib == 81559 / 1024
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{UUIDS[0][:9]},{SLICE}")
    assert hello("a").uuids == [UUIDS[2], UUIDS[0], SLICE]
    assert hello("a").gpu_gib == 0, "nobody has said how much memory the slice has"


def test_a_job_without_gpus_has_none_although_the_node_has_some(machine, tmp_path, monkeypatch):
    """As in a cgroup in which no device may be opened: nvidia-smi lists none, the driver's folder still has all."""
    machine([])
    (tmp_path / "driver" / "0000:1b:00.0").mkdir(parents=True)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "driver")
    assert hello("a").gpus == []
    gpus.listed.cache_clear()
    (tmp_path / "nvidia-smi").unlink()
    assert hello("a").gpus == [0], "nobody else knows"


@pytest.mark.parametrize(
    ("device", "found", "variables", "outcome"),
    [
        ("auto", {"a": [0], "b": [UUIDS[1]]}, {}, "cuda"),
        ("auto", {"a": [], "b": []}, {}, "cpu"),
        ("auto", {"a": [], "b": []}, {"SLURM_GPUS_ON_NODE": "0"}, "cpu"),
        ("cpu", {"a": [0], "b": []}, {"SLURM_JOB_GPUS": "0"}, "cpu"),
        ("auto", {"a": [0], "b": []}, {}, "no GPU for this run on b .*other nodes have some"),
        ("auto", {"a": [], "b": []}, {"SLURM_JOB_GPUS_HET_GROUP_1": "0"}, "on a, b .*SLURM_JOB_GPUS_HET_GROUP_1"),
        ("cuda", {"a": [], "b": []}, {}, r"on a, b \(machine.device=cuda\): .*--gpus-per-node=8"),
        ("cuda", {name: [] for name in "abcde"}, {}, "on a, b, c and 2 more "),
    ],
)
def test_a_run_that_was_meant_for_gpus_is_never_on_cores(monkeypatch, device, found, variables, outcome):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = Config()
    config.machine.device = device
    if outcome in ("cpu", "cuda"):
        assert decide_device(config, found) == outcome
    else:
        with pytest.raises(ConfigError, match=outcome) as error:
            decide_device(config, found)
        assert "\n" not in str(error.value)


CHOSEN = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "PYTORCH_ALLOC_CONF")


def run_config():
    made = Config(name="x", updates=1, model=ModelConfig(path="m"), data=DataConfig(train="t"))
    made.machine.device = "cuda"
    return made


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a process of a run on these GPUs; returns its environment and its cores."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(caches.tempfile, "tempdir", None)
    for name in (*CHOSEN, "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    with Children() as children:

        def start(process, *names):
            placement = allocate(run_config(), [Node("a", names)])
            (own,) = [p for p in placement.processes if p.name == process]
            order = start_order(run_config(), made(tmp_path / "run"), own, "a")
            order.command = ["sh", "-c", "env; echo CORES=$(taskset -pc $$)"]
            child = carry_out(order, children)
            child._process.wait(20)
            return dict(line.partition("=")[::2] for line in child.last_lines(1000).splitlines())

        yield start


def cores_of(environment):
    runs = environment["CORES"].rpartition(": ")[2].split(",")
    return {core for run in runs for core in range(int(run.split("-")[0]), int(run.split("-")[-1]) + 1)}


def test_trainers_on_gpus_have_their_share_of_threads_and_memory_that_grows(machine, started):
    own = sorted(os.sched_getaffinity(0))
    machine([",".join(map(str, own))] * 2)
    trainer, engine = started("trainer-0", 0, 1), started("engine-0", 0, 1)
    assert trainer["OMP_NUM_THREADS"] == str(min(8, max(1, len(own) // 2)))
    assert trainer["TORCHINDUCTOR_COMPILE_THREADS"] == trainer["OMP_NUM_THREADS"]
    assert trainer["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert trainer["CUDA_DEVICE_ORDER"] == engine["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not {*CHOSEN} & engine.keys(), "vLLM chooses them"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_whoever_has_set_something_knows_better(machine, started, monkeypatch, name):
    machine([""])
    own = {name: "max_split_size_mb:64", "OMP_NUM_THREADS": "3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    own["TRITON_CACHE_DIR"] = "/mine"
    for variable, value in own.items():
        monkeypatch.setenv(variable, value)
    trainer = started("trainer-0", 0, 1)
    assert own.items() <= trainer.items()
    assert len({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & trainer.keys()) == 1


def test_a_process_is_pinned_to_the_cores_near_its_gpu(machine, started):
    """A GPU of this machine's every core would pin nothing; two have half of them each, the third is near none."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        pytest.skip("there is one core only")
    half = len(own) // 2
    machine([",".join(map(str, own[:half])), ",".join(map(str, own[half:])), "4000-4007"])
    assert cores_of(started("trainer-0", 0, 1, 2)) == set(own[:half])
    assert cores_of(started("trainer-0", UUIDS[1], 0)) == set(own[half:])
    assert cores_of(started("engine-0", 0, 1)) == set(own[half:])
    assert cores_of(started("trainer-0", 2, 0)) == set(own)
    assert cores_of(started("trainer-0", SLICE, 0)) == set(own)


def test_what_is_compiled_stays_on_the_node_when_the_run_is_over(machine, started, tmp_path):
    machine([""])
    engine = started("engine-0", 0, 1)
    folder = tmp_path / f"areal-cache-{os.getuid()}"
    assert engine["VLLM_CACHE_ROOT"] == f"{folder}/vllm"
    assert engine["TORCHINDUCTOR_CACHE_DIR"] == started("trainer-0", 0, 1)["TORCHINDUCTOR_CACHE_DIR"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.is_relative_to(engine["TMPDIR"]), "that is removed with the run"


@pytest.mark.parametrize("made", ["link", "file", "open"])
def test_a_folder_that_others_may_have_made_is_not_used(tmp_path, monkeypatch, capsys, made):
    """What lies there is executed, and others may write the folder for temporary files."""
    monkeypatch.setattr(caches.tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"areal-cache-{os.getuid()}"
    (tmp_path / "theirs").mkdir(mode=0o700)
    if made == "link":
        folder.symlink_to(tmp_path / "theirs")
    elif made == "file":
        folder.touch(0o600)
    else:
        folder.mkdir()
        folder.chmod(0o770)
    assert caches.settings() == {}
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {folder} is not used") and said.count("\n") == 1


@pytest.fixture
def job(tmp_path, monkeypatch, world):
    """Launches a run in a Slurm job of one node without --gpus; scontrol and srun are scripts here."""
    from tests.e2e.test_run import small  # it draws curves, too: hundreds of modules

    bodies = {"scontrol": "echo a", "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nSLURMD_NODENAME=a exec "$@"'}
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a")
    monkeypatch.setattr(slurm.signal, "signal", lambda *_: None)
    changes = {"name": "run", "runs_dir": tmp_path, "trainer.dp": 12, "batch_size": 96}
    elsewhere = [f"--python={pool}={sys.executable}" for pool in ("trainer", "rollout")]  # here are CPU packages
    return lambda: slurm.main(["configs/tiny_cpu.yaml", *elsewhere, "machine.device=auto", *small(world, **changes)])


def test_whole_nodes_give_their_gpus_without_being_asked(job, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{SLICE}," + ",".join(map(str, range(10))))
    assert job() == 2
    said = capsys.readouterr()
    assert "the pools need 13 slots" in said.err and "but there are 11:" in said.err and "cores" not in said.out


def test_a_gpu_job_without_a_gpu_ends_with_one_line(job, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    assert job() == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: no GPU for this run on a (machine.device=auto, SLURM_JOB_GPUS): ask for them")

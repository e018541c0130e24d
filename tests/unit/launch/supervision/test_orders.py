"""How processes are started: the parts of an engine on several nodes, and pools that share a GPU."""

import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    ServedModelConfig,
    config_file,
)
from areal_megatron.engine import served, server
from areal_megatron.engine.environment import SERVED_MODEL
from areal_megatron.engine.server import (
    NodePart,
    check_shared_memory,
    headless_command,
    memory_arguments,
    server_command,
    server_environment,
)
from areal_megatron.launch import evaluate
from areal_megatron.launch.supervision import start
from areal_megatron.launch.supervision.orders import start_order
from areal_megatron.planning import plan
from areal_megatron.planning.memory.parts import GIB
from areal_megatron.planning.pools import Node, allocate
from areal_megatron.run import gpu_settings
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.gpu_settings import SETTINGS, WATCHDOG

ROOT = Path(__file__).resolve().parents[4]
MODEL = ROOT / "configs" / "models" / "Qwen3-8B"


def made(folder):
    run = RunFolder(folder)
    run.create(exist_ok=True)
    return run


def config(device, tp):
    made = Config(
        name="x",
        updates=1,
        model=ModelConfig(path=str(MODEL)),
        data=DataConfig(train="t"),
        rollout=RolloutConfig(tp=tp),
    )
    made.machine.device = device
    return made


def values(command):
    """Returns the options of a command by name."""
    return {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}


def test_each_part_is_ordered_on_its_node_with_the_gpus_of_that(tmp_path):
    asked = config("cuda", 8)
    nodes = [Node("a", (0, 1)), *(Node(name, (4, 5, 6, 7)) for name in "bc")]
    (engine,) = allocate(asked, nodes[:1], nodes[1:]).pool("rollout")
    orders = [start_order(asked, made(tmp_path), part, part.node, rendezvous="rendezvous-7") for part in engine.parts]
    assert [(order.supervisor, order.name) for order in orders] == [("b", "engine-0"), ("c", "engine-0.1")]
    assert [order.settings["CUDA_VISIBLE_DEVICES"] for order in orders] == ["4,5,6,7"] * 2
    assert [order.settings["AREAL_PART"] for order in orders] == ["0/2", "1/2"]
    assert {order.settings["AREAL_RENDEZVOUS"] for order in orders} == {"rendezvous-7"}
    assert orders[0].command == orders[1].command and len({order.log for order in orders}) == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_every_process_has_all_queues_of_its_gpu(tmp_path, tp):
    asked = config("cuda", 1)
    asked.trainer.tp = tp
    for process in allocate(asked, [Node("a", (0, 1, 2, 3))]).processes:
        assert start_order(asked, made(tmp_path), process, "a").settings["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "takes for a race and ends the process; unset it"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "may wait for each other in a circle; unset it"),
    ],
)
def test_settings_with_which_a_process_hangs_or_ends_are_refused(name, value, why):
    with pytest.raises(ConfigError, match=f"^{name}={value}: .*{why}$"):
        gpu_settings.check({name: value})
    gpu_settings.check({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"} | gpu_settings.SETTINGS)


def test_a_run_on_gpus_is_refused_with_such_a_setting_before_anything_starts(tmp_path, monkeypatch):
    asked = config("cuda", 1)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which Megatron advises: ours is given to every process
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with pytest.raises(ConfigError, match=r"^NCCL_LAUNCH_ORDER_IMPLICIT=1: "):
        start.check(asked, [Node("a", (0, 1))])


def test_every_process_on_gpus_outlives_a_link_that_fails(tmp_path):
    """torch's monitor would end it, if a watchdog of any group in it asked for a dump."""
    asked = config("cuda", 2)
    asked.served.judge = ServedModelConfig(path=str(MODEL))
    placement = allocate(asked, [Node("a", (0, 1, 2, 3, 4, 5))])
    assert {process.pool for process in placement.processes if process.slots} == {"trainer", "rollout", "judge"}
    for process in placement.processes:
        settings = start_order(asked, made(tmp_path), process, "a").settings
        assert settings.items() >= WATCHDOG.items()
    for process in allocate(config("cpu", 1), [Node("a", (0, 1))]).processes:
        assert not WATCHDOG.keys() & start_order(config("cpu", 1), made(tmp_path), process, "a").settings.keys()


@pytest.mark.parametrize("program", [server, served])
def test_an_engine_that_no_launcher_started_has_the_same_settings(tmp_path, monkeypatch, program):
    """Whose own choice of one of them stands."""
    asked, run = config("cpu", 1), made(tmp_path / "run")
    asked.served.judge = ServedModelConfig(path=str(MODEL))
    monkeypatch.setenv(SERVED_MODEL, "judge")
    run.config.write_text(config_file.text(asked))
    monkeypatch.setattr(sys, "argv", ["server", "--run", str(run.folder), "--index", "0"])
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    started = []
    monkeypatch.setattr(os, "execve", lambda file, command, environment: started.append(environment))
    affinity = os.sched_getaffinity(0)
    program.main()
    os.sched_setaffinity(0, affinity)
    assert started[0].items() >= (WATCHDOG | {"TORCH_NCCL_ENABLE_MONITORING": "1"}).items()


def test_an_engine_on_one_node_is_told_nothing_of_parts(tmp_path):
    (engine,) = allocate(config("cuda", 2), [Node("a", (0, 1, 2))]).pool("rollout")
    (part,) = engine.parts
    assert "AREAL_PART" not in start_order(config("cuda", 2), made(tmp_path), part, "a").settings
    assert "--nnodes" not in server_command(config("cuda", 2), "10.0.0.1", 80)


def test_an_engine_has_room_for_changes_only_where_it_may_get_some():
    asked = config("cuda", 1)
    asked.reshard.staging = "streamed"
    for at_other_site, backend in ((False, "areal-streamed"), (True, "areal-changes")):
        assert f'{{"backend": "{backend}"}}' in server_command(asked, "10.0.0.1", 80, at_other_site=at_other_site)


def test_engines_return_the_experts_they_chose_where_that_is_asked_for(tmp_path):
    asked = config("cuda", 2)
    before = server_command(asked, "10.0.0.1", 80), server_environment(asked, RunFolder(tmp_path), [0])
    asked.rollout.replay_routes = True
    command, environment = server_command(asked, "10.0.0.1", 80), server_environment(asked, RunFolder(tmp_path), [0])
    assert [part for part in command if part not in before[0]] == ["--enable-return-routed-experts"]
    assert environment == before[1] | {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_parts_agree_on_all_but_their_number(tmp_path):
    asked = config("cuda", 16)
    head = values(server_command(asked, "10.0.0.1", 8000, NodePart(0, 2, "10.0.0.1:9000")))
    other = values(headless_command(asked, NodePart(1, 2, "10.0.0.1:9000")))
    assert {name for name in head if name in other and head[name] != other[name]} == {"--node-rank"}
    assert (head["--node-rank"], other["--node-rank"]) == ("0", "1")
    assert (other["--nnodes"], other["--master-addr"], other["--master-port"]) == ("2", "10.0.0.1", "9000")
    assert head["--host"] == "10.0.0.1"
    assert "--headless" in other and not {"--host", "--port", "--middleware"} & other.keys()
    assert json.loads(other["--weight-transfer-config"])["backend"] == "areal"
    assert values(headless_command(asked, NodePart(1, 2, "fd00::1:9000")))["--master-addr"] == "fd00::1"


def test_cores_of_a_part_are_shared_by_its_own_ranks(tmp_path):
    environment = server_environment(config("cpu", 2), RunFolder(tmp_path), [3], parts=2)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "3"
    assert server_environment(config("cpu", 2), RunFolder(tmp_path), [3, 4])["VLLM_CPU_OMP_THREADS_BIND"] == "3|4"


def test_what_vllm_cannot_do_on_cpu_is_refused():
    """It takes a machine without GPUs for one rank."""
    asked, nodes = config("cpu", 4), [Node("a", (0, 1)), Node("b", (0, 1)), Node("c", (0, 1))]
    with pytest.raises(
        ConfigError, match=r"rollout.tp: an engine of 4 spans 2 nodes with 2 cores each: .* machine.slots=1"
    ):
        plan.plan(asked, nodes, weights=False)


def test_engines_on_gpus_begin_without_weights_and_evaluations_with_those_of_their_model(tmp_path):
    def begun(asked):
        command = server_command(asked, "10.0.0.1", 80)
        environment = server_environment(asked, RunFolder(tmp_path), [0])
        part = headless_command(asked, NodePart(1, 2, "10.0.0.1:9000"))
        formats = {values(command).get("--load-format"), values(part).get("--load-format")}
        assert len(formats) == 1 and ("AREAL_EMPTY" in environment) == (formats == {"dummy"})
        return formats.pop()

    asked = config("cuda", 2)
    assert begun(asked) == "dummy"
    asked.rollout.first_weights = "model"
    assert begun(asked) == "hf"
    asked = config("cpu", 2)
    assert not asked.engines_start_empty
    asked.rollout.first_weights = "trainers"
    assert asked.engines_start_empty
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "data.jsonl").touch()
    evaluation = evaluate.config_of(evaluate._options([str(tmp_path), str(tmp_path / "data.jsonl")]))
    evaluation.machine.device = "cuda"
    assert begun(evaluation) == "hf"


def test_vllm_gives_an_engine_as_long_to_start_as_the_run_does(tmp_path):
    """Its own limit is ten minutes; a large model that is compiled and comes from a cold disk takes longer."""
    asked = config("cuda", 4)
    assert server_environment(asked, RunFolder(tmp_path), [0])["VLLM_ENGINE_READY_TIMEOUT_S"] == "1800"


def shared_plan():
    asked = config("cuda", 1)
    asked.machine.shared, asked.model.path = True, str(ROOT / "configs/models/DeepSeek-R1-Distill-Qwen-1.5B")
    asked.trainer.recompute, asked.rollout.max_new_tokens = "full", 1024
    asked.trainer.microbatch_tokens = 2048
    return asked, plan.plan(asked, [Node("a", (3,))], gpu_gib=80, weights=False)


def test_processes_of_both_pools_see_the_gpu_that_they_share(tmp_path):
    asked, planned = shared_plan()
    orders = [
        start_order(asked, made(tmp_path), process, "a", shares=planned.memory.shares)
        for process in planned.placement.processes
        if process.slots
    ]
    assert [order.name for order in orders] == ["trainer-0", "engine-0"]
    assert {order.settings["CUDA_VISIBLE_DEVICES"] for order in orders} == {"3"}


def test_an_engine_gets_the_memory_that_the_plan_leaves_it(tmp_path):
    """vLLM's own check of its start: it takes a share that is free beside the trainers' peak, and not its default."""
    asked, planned = shared_plan()
    trainer, engine = planned.memory.trainer, planned.memory.engine
    process = planned.placement.pool("rollout")[0]
    order = start_order(asked, made(tmp_path), process, "a", shares=planned.memory.shares)
    given = values([*memory_arguments(order.settings), ""])
    assert int(given["--kv-cache-memory-bytes"]) == engine.of("KV cache") > 0
    assert int(given["--max-num-batched-tokens"]) == 8192

    from vllm.config import CacheConfig  # two seconds, which only the worker with this test pays
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    free = MemorySnapshot(device="cpu", auto_measure=False, total_memory=80 * GIB, free_memory=80 * GIB - trainer.total)
    share = float(given["--gpu-memory-utilization"])
    taken = request_memory(free, CacheConfig(gpu_memory_utilization=share))
    assert taken == pytest.approx(engine.total, rel=1e-3)
    assert trainer.total + taken == pytest.approx(0.92 * 80 * GIB, rel=1e-3)
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(free, CacheConfig())


def test_trainers_that_share_a_gpu_may_not_take_the_engines_memory(tmp_path):
    asked, planned = shared_plan()
    process = planned.placement.pool("trainer")[0]
    settings = start_order(asked, made(tmp_path), process, "a", shares=planned.memory.shares).settings
    options = dict(option.split(":") for option in settings["PYTORCH_ALLOC_CONF"].split(","))
    most = float(options["per_process_memory_fraction"])
    assert planned.memory.trainer.total < most * 80 * GIB < 80 * GIB - planned.memory.engine.total
    assert options["expandable_segments"] == "True"


def test_pools_with_gpus_of_their_own_take_what_they_find(tmp_path):
    asked = config("cuda", 1)
    for process in allocate(asked, [Node("a", (0, 1))]).processes:
        settings = start_order(asked, made(tmp_path), process, "a").settings
        assert memory_arguments(settings) == [] and "per_process" not in settings.get("PYTORCH_ALLOC_CONF", "")


@pytest.mark.parametrize("link", ["auto", "host", "device"])
def test_weights_pass_between_pools_on_one_gpu_through_the_host(link):
    asked, _ = shared_plan()
    asked.reshard.link = link
    if link == "device":
        with pytest.raises(ConfigError, match=r"^reshard.link: .*: set it to host, or leave it out$"):
            plan.plan(asked, [Node("a", (3,))], weights=False)
    else:
        plan.plan(asked, [Node("a", (3,))], weights=False)
        assert asked.link == "host"
    asked.machine.shared = False
    plan.plan(asked, [Node("a", (3, 4))], weights=False)
    assert asked.link == {"auto": "device"}.get(link, link)
    asked.machine.shared, asked.machine.device = True, "cpu"
    plan.plan(asked, [Node("a", (3,))], weights=False)
    assert asked.link == {"auto": "device"}.get(link, link)


def test_an_engine_says_that_shared_memory_is_full(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_shared_memory(tmp_path, free // 2)
    check_shared_memory(tmp_path / "nowhere", 2 * free)
    with pytest.raises(ConfigError, match=r"has [\d.]+ MiB free, an engine needs \d+: remove what ended programs left"):
        check_shared_memory(tmp_path, 2 * free)

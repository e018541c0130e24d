"""The scripts of slurm/ as they are shipped, on a real Slurm cluster of two virtual nodes.

A small server stands for the hub: it has a tiny model and a few rows under every name that their configs give, in the
files in which the data sets are published. Nothing else differs but the sizes that this machine does not have.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_megatron.config import config_file
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.observe.records import read_record
from areal_megatron.run.folder import RunFolder
from tests.support.cluster import ENDED, Cluster
from tests.support.hub_server import HubServer
from tests.support.published_tau2 import published_rows
from tests.support.soaking import with_soaked

ROOT = Path(__file__).parents[2]
SEA_SFT, SEA_RL = "train_sea_sft.sh", "train_sea.sh"
SCRIPTS = sorted({path.name for path in (ROOT / "slurm").glob("train_*.sh")} - {SEA_SFT, SEA_RL})
TRAINED = "train_32b.sh"
ALIKE = (
    "train_1.5b.sh",
    "train_14b.sh",
    "train_qwen3_14b.sh",
    "train_qwen3_32b.sh",
    "train_glm4.5.sh",
    "train_glm4.5_air.sh",
    "train_moonlight.sh",
    "train_qwen3_235b.sh",
    "train_qwen3_30b_a3b.sh",
    "train_qwen3_next_80b.sh",
    "train_qwen3.5_9b.sh",
    "train_qwen3.5_35b_a3b.sh",
    "train_qwen3.5_397b_a17b.sh",
    "train_glm4.7_flash.sh",
)
"""Scripts whose configs differ from another's in sizes, which tests/unit/planning/test_published.py plans."""
SIZES = {
    "machine.device": "cpu",
    "machine.slots": 1,
    "machine.host": "127.0.0.1",
    "model.dtype": "float32",
    "data.max_prompt_tokens": 400,
    "trainer.tp": 1,
    "trainer.pp": 1,
    "trainer.cp": 1,
    "trainer.dp": 1,
    "trainer.ep": 1,
    "trainer.etp": 0,
    "trainer.vpp": 1,
    "trainer.microbatch_tokens": 2048,
    "rollout.tp": 1,
    "rollout.engines": 1,
    "rollout.max_running": 32,
    "rollout.max_new_tokens": 24,
}
"""What two nodes of one core have room for, in place of hundreds of GPUs and models of billions of parameters."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TESTS = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
CASES = json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}])
CARD = """---
configs:
- config_name: primeintellect
  data_files: [{split: train, path: primeintellect/train-*}]
- config_name: taco
  data_files: [{split: train, path: taco/train-*}]
- config_name: lcbv5
  data_files: [{split: train, path: lcbv5/train-*}, {split: test, path: lcbv5/test-*}]
---
"""


def parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path.read_bytes()


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def chat(text):
    return [{"role": "user", "content": text}]


def programs(kind, key, tests):
    return [{"problem": f"{kind} {n} {key}", "solutions": ["..."], "tests": tests} for n in range(4)]


def add_data(hub, folder):
    """Every data set that a script names, in the files in which it is published; `folder` takes Parquet files."""
    boba = [
        {
            "prompt": f"<｜User｜>{n} + 1<｜Assistant｜><think>\n",
            "task": "math",
            "query_id": str(n),
            "solutions": [f"\\boxed{{{n + 1}}}"],
        }
        for n in range(8)
    ]
    aime = [
        {"id": n, "problem": f"{n} + 2", "solution": "", "answer": str(n + 2), "url": "", "year": "2024"}
        for n in range(2)
    ]
    hub.dataset("inclusionAI/AReaL-boba-Data", {"AReaL-boba-106k.jsonl": jsonl(boba), "other.jsonl": "{}"})
    hub.dataset(
        "HuggingFaceH4/aime_2024", {"data/train-00000-of-00001.parquet": parquet(folder / "aime.parquet", aime)}
    )
    dapo = [{"prompt": chat(f"{n} - 1"), "label": str(n - 1)} for n in range(8)]
    hub.dataset("zhuzilin/dapo-math-17k", {"README.md": "", "dapo-math-17k.jsonl": jsonl(dapo)})
    held_out = [{"prompt": chat(f"{n} - 2"), "label": str(n - 2)} for n in range(2)]
    hub.dataset("zhuzilin/aime-2024", {"aime-2024.jsonl": jsonl(held_out)})
    coder = {
        "primeintellect/train": programs("p", "train", CASES),
        "taco/train": [*programs("t", "train", TESTS), {"problem": "no tests", "solutions": [], "tests": "[]"}],
        "lcbv5/train": programs("l", "train", CASES),
        "lcbv5/test": programs("l", "test", CASES),
    }
    files = {
        f"{name}-00000-of-00001.parquet": parquet(folder / f"{name.replace('/', '-')}.parquet", rows)
        for name, rows in coder.items()
    }
    hub.dataset("agentica-org/DeepCoder-Preview-Dataset", {"README.md": CARD, **files})
    filtered = [
        {
            "prompt": f"<｜User｜>b {n} train<｜Assistant｜><think>\n",
            "task": "code",
            "query_id": str(n),
            "input_output": TESTS,
        }
        for n in range(8)
    ]
    turn = {
        "messages": [{"role": "system", "content": "policy"}, {"role": "assistant", "content": "Hi!"}, *chat("Help.")]
    }
    turns = [turn | {"answer": {"role": "assistant", "content": f"Answer {n}"}, "metadata": {}} for n in range(64)]
    hub.dataset("inclusionAI/AReaL-tau2-data", {"tau2_sft_train.jsonl": jsonl(turns), "tau2_rl_train.jsonl": "{}"})
    others = {"code_benchmark/lcb_v5/test.jsonl": "{}", "code_benchmark/codeforces/test.jsonl": "{}"}
    hub.dataset("inclusionAI/AReaL-boba-2-RL-Code", {"README.md": "", "train/train.jsonl": jsonl(filtered), **others})


@pytest.fixture(scope="module")
def hub(world, tmp_path_factory):
    """Every model and data set that a script names, tiny."""
    with HubServer() as hub:
        for script in SCRIPTS:
            add_model(hub, config_of(script).model.path, world / "model")
        add_data(hub, tmp_path_factory.mktemp("data"))
        yield hub


@pytest.fixture(scope="module")
def described(world, tmp_path_factory):
    """The same with the models' own descriptions, of full size, and no weights."""
    with HubServer() as hub:
        named = {config_of(script).model.path for script in (*SCRIPTS, SEA_SFT)}
        for name in (*named, config_of(SEA_RL).served.user.path):
            files = add_model(hub, name, world / "model")
            files["config.json"] = (ROOT / "configs/models" / name.partition("/")[2] / "config.json").read_bytes()
            del files["model.safetensors"]
        add_data(hub, tmp_path_factory.mktemp("data"))
        yield hub


def add_model(hub, name, folder):
    (files,) = hub.model(name, folder).commits.values()
    files["chat_template.jinja"] = TEMPLATE.encode()
    return files


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=2, gpus=8) as cluster:
        yield cluster


def config_of(script):
    (line,) = (line for line in (ROOT / "slurm" / script).read_text().splitlines() if line.startswith("CONFIG="))
    return config_file.load(ROOT / line.partition("=")[2])


@pytest.fixture
def submit(cluster, hub, isolation, monkeypatch, tmp_path):
    """Submits a script with `sbatch` from the repository's folder and returns (job, run)."""
    monkeypatch.chdir(ROOT)
    jobs = []

    def submit(script, **changes):
        (tmp_path / "temporary").mkdir()
        environment = (
            f"--export=ALL,TMPDIR={tmp_path / 'temporary'},HF_ENDPOINT={hub.address},HF_HOME={tmp_path / 'hf'}"
        )
        keys = [f"{key}={value}" for key, value in {**SIZES, "runs_dir": tmp_path, **changes}.items()]
        jobs.append(cluster.submit(Path("slurm") / script, environment, "--nodes=2", "--time=30", arguments=keys))
        return jobs[-1], RunFolder(tmp_path / config_of(script).name)

    yield submit
    for job in jobs:
        if cluster.state(job) not in ENDED:
            cluster.run("scancel", job)
            cluster.wait(job)


def wait_for(cluster, job, condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert cluster.state(job) in ("PENDING", "RUNNING", "CONFIGURING"), cluster.output(job)
        assert time.monotonic() < deadline, f"nothing within {timeout_s} s\n{cluster.output(job)}"
        time.sleep(0.2)


@pytest.mark.parametrize("script", with_soaked(SCRIPTS, ALIKE))
def test_a_config_of_full_size_passes_every_check_with_nothing_overridden(described, isolation, tmp_path, script):
    """On the nodes and GPUs that its script asks for, which are only counted: a dry run."""
    config, told = config_of(script), dry_run(described, tmp_path, script)
    assert f"{config.rollout.engines} engines: python -m areal_megatron.engine.server" in told
    assert f"{config.trainer_ranks} trainer ranks" in told and not (ROOT / "runs" / config.name).exists()


def dry_run(hub, folder, script, *keys, **variables):
    """Returns what a dry run of a script's config says; `folder` is the hub's cache."""
    path = Path("slurm") / script
    (name,) = (line.partition("=")[2] for line in (ROOT / path).read_text().splitlines() if line[:7] == "CONFIG=")
    command = [sys.executable, "-m", "areal_megatron.launch.slurm", name, "--dry-run", "--batch-script", path]
    done = subprocess.run(
        [*command, "machine.host=auto", *keys],
        cwd=ROOT,
        env=os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder)} | variables,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sft_of_sea_passes_every_check_with_nothing_overridden(described, tmp_path):
    told = dry_run(described, tmp_path, SEA_SFT)
    assert "48 trainer ranks" in told and "engines" not in told


@pytest.mark.soak  # it installs the benchmark's package
def test_the_rl_of_sea_passes_every_check_with_tasks_in_the_published_form(described, tmp_path, tau2_packages):
    """The base stands for what the SFT has trained, and the package's own tasks for the published ones."""
    base, rows = config_of(SEA_SFT).model.path, published_rows(tau2_packages, tmp_path)
    program = config_of(SEA_RL).rollout.workflow_program.replace("tau2/bin/python", sys.executable)
    keys = [f"model.path={base}", f"data.train={rows}", f"data.eval={rows}", "data.allow_overlap=true"]
    keys += [f"rollout.workflow_program={program}", "rollout.workflow_environment=PYTHONPATH"]
    found = os.pathsep.join([str(tau2_packages), str(ROOT)])
    told = dry_run(described, tmp_path / "cache", SEA_RL, *keys, PYTHONPATH=found)
    assert "48 trainer ranks" in told and "4 engines: python -m areal_megatron.engine.server" in told
    assert "2 engines" in told and not (ROOT / "runs/sea-235b").exists()


def check_started(cluster, job, run, script):
    """What the config names was fetched, pinned and read, and every process was started."""
    assert {process.name for process in read_record(run).processes} == {"controller", "trainer-0", "engine-0"}
    output, shipped, resolved = cluster.output(job), config_of(script), config_file.load(run.config)
    assert f"model.path: {shipped.model.path} at " in output
    assert f"models--{shipped.model.path.replace('/', '--')}/snapshots/" in resolved.model.path
    named, pinned = shipped.data.train.split(","), resolved.data.train.split(",")
    assert len(named) == len(pinned) and all("@" in part for part in pinned)
    assert ("left out: 1 × " in output) == ("taco" in shipped.data.train)


@pytest.mark.soak
@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != TRAINED])
def test_a_script_passes_every_check_and_starts_its_processes(submit, cluster, script):
    """It is cancelled once they run: that they train is the next test's."""
    job, run = submit(script)
    wait_for(cluster, job, lambda: run.processes.exists() and len(read_record(run).processes) == 3, 120)
    check_started(cluster, job, run, script)


@pytest.mark.soak  # test_slurm.py trains with another script
def test_a_script_trains_with_the_reward_that_it_names(submit, cluster):
    changes = {"batch_size": 16, "updates": 2, "rollout.group_size": 4, "eval.n": 1, "checkpoint.hf_every": 0}
    job, run = submit(TRAINED, **changes)
    assert cluster.wait(job, timeout_s=400) == "COMPLETED", cluster.output(job)
    check_started(cluster, job, run, TRAINED)
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert [line["version"] for line in updates] == [1, 2]
    assert all(line["reward_failures"] == 0 for line in updates)

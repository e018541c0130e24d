"""The manifests of launch/manifests/: what their starters take, and that launch/ranks.py gets what it needs from them.

Nobody has given them to a cluster. JobSet's and Kubernetes' own schemas check the one, as far as Kubeflow's models have
them; SkyPilot's package brings half a cloud along, so the fields of the other are those of its YAML reference
(docs.skypilot.co/en/latest/reference/yaml-spec.html, SkyPilot 0.14).
"""

import os
import re
import subprocess
import sys

import pytest
import yaml

from areal_megatron.config import config_file
from areal_megatron.launch.supervision.supervise import Outcome
from areal_megatron.planning.plan import plan
from areal_megatron.planning.pools import Node
from tests.conftest import ROOT

JOBSET, SKYPILOT = (
    yaml.safe_load((ROOT / "launch" / "manifests" / f"{name}.yaml").read_text()) for name in ("jobset", "skypilot")
)
[REPLICATED] = JOBSET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
POD = JOB["template"]["spec"]
[CONTAINER] = POD["containers"]
INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
"""Where Kubernetes writes which pod of an Indexed job this one is."""
AGAIN = {Outcome.STOPPED, Outcome.LOST}
"""How a run has ended that is to go on: launch/slurm.py queues the job again."""
DOCKERFILE = (ROOT / "slurm" / "Dockerfile").read_text()


def variables_of_pod(index):
    """What the container of a pod has in its environment."""
    return {each["name"]: str(index) if each.get("valueFrom") == INDEX else each["value"] for each in CONTAINER["env"]}


def started(starter, rank):
    """What the command of a manifest, with this checkout in place of the image's, says as one of so many ranks."""
    here, environment = ("/opt/venv/bin/python", sys.executable), os.environ | {"PYTHONPATH": str(ROOT)}
    if starter == "jobset":
        command, environment = (
            [word.replace(*here) for word in CONTAINER["command"]],
            environment | variables_of_pod(rank),
        )
    else:
        command = ["bash", "-euc", SKYPILOT["run"].replace(*here).replace("/opt/areal_megatron", str(ROOT))]
        environment |= {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(SKYPILOT["num_nodes"])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    return done.stderr


def test_kubernetes_knows_every_field_of_the_jobset():
    """Models drop what they do not know, and refuse what is missing or of another type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert models.JobsetV1alpha2JobSet.from_dict(JOBSET).to_dict() == JOBSET
    assert JOBSET["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and JOBSET["kind"] == "JobSet"
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in POD["volumes"]}


def test_skypilot_knows_every_field_of_its_task():
    assert SKYPILOT.keys() <= {"name", "num_nodes", "resources", "volumes", "envs", "setup", "run"}
    resources = SKYPILOT["resources"]
    assert resources.keys() <= {"infra", "accelerators", "image_id", "job_recovery"}
    assert resources["job_recovery"].keys() == {"max_restarts_on_errors", "recover_on_exit_codes"}
    assert all(isinstance(value, str) for each in ("envs", "volumes") for value in SKYPILOT[each].values())


def test_nodes_and_gpus_are_those_of_the_config():
    config = config_file.load(ROOT / CONTAINER["command"][3], [f"model.path={ROOT}/configs/models/Qwen2.5-7B"])
    config.machine.device = "cuda"
    limits, (kind, gpus) = CONTAINER["resources"]["limits"], SKYPILOT["resources"]["accelerators"].split(":")
    assert int(limits["nvidia.com/gpu"]) == int(gpus) == 8 and kind == "H100"
    assert REPLICATED["replicas"] == 1 and JOB["completionMode"] == "Indexed"
    assert JOB["parallelism"] == JOB["completions"] == SKYPILOT["num_nodes"]
    nodes = [Node(f"node{index}", tuple(range(8))) for index in range(JOB["completions"])]
    assert plan(config, nodes, gpu_gib=80, weights=False).placement.idle == 0


@pytest.mark.parametrize("starter", ["jobset", "skypilot"])
def test_ranks_are_told_which_they_are_and_how_many(starter):
    """One rank too many is refused by the program itself, whose message has both variables."""
    assert started(starter, SKYPILOT["num_nodes"]) == "error: RANK=2 is not below WORLD_SIZE=2\n"


def test_both_start_the_same_in_the_image():
    command = " ".join(SKYPILOT["run"].replace("\\\n", "").split()).partition("exec ")[2]
    assert command.split() == CONTAINER["command"] and "resume=auto" in command
    assert CONTAINER["command"][0] == "/opt/venv/bin/python" and "venv /opt/venv" in DOCKERFILE
    assert CONTAINER["workingDir"] in SKYPILOT["run"] and f"WORKDIR {CONTAINER['workingDir']}" in DOCKERFILE
    shared, name = (
        CONTAINER["command"][-1].removeprefix("runs_dir="),
        {"name": "HF_HOME", "value": "/shared/huggingface"},
    )
    assert name in CONTAINER["env"] and SKYPILOT["envs"]["HF_HOME"] == name["value"]
    assert {"name": "shared", "mountPath": "/shared"} in CONTAINER["volumeMounts"]
    assert [*SKYPILOT["volumes"]] == ["/shared"] and shared.startswith("/shared/")


def test_what_another_start_mends_is_started_again_and_nothing_else():
    """A Job fails by its rule for PodFailurePolicy, else for BackoffLimitExceeded. A JobSet starts all again unless a
    rule of its own says otherwise."""
    [rule] = JOB["podFailurePolicy"]["rules"]
    ends = set(Outcome) - {Outcome.DONE} - AGAIN
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(ends)}}
    assert JOB["backoffLimit"] == 0 and POD["restartPolicy"] == "Never"  # as a podFailurePolicy demands
    policy = JOBSET["spec"]["failurePolicy"]
    [failed] = policy["rules"]
    assert failed["action"] == "FailJobSet" and failed["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", failed["name"]) and policy["maxRestarts"] > 0
    recovery = SKYPILOT["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 0, "recover_on_exit_codes": sorted(AGAIN)}


def test_a_pod_has_as_long_for_its_last_checkpoint_as_a_slurm_job():
    given = {
        int(seconds)
        for path in (ROOT / "slurm").glob("*.sh")
        for seconds in re.findall(r"USR1@(\d+)", path.read_text())
    }
    assert {POD["terminationGracePeriodSeconds"]} == given

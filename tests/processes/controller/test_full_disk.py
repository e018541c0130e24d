"""A controller whose disk is full for a while: the run goes on, and nothing is missing from its metrics afterwards."""

import json

from tests.support.small_disk import run_on_small_disk

RUN = """
import atexit, json, subprocess, sys, time
from contextlib import ExitStack
from pathlib import Path
from areal_megatron.config.config_file import save
from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.protocol import (
    Bye, CheckpointBegin, CheckpointWritten, ControllerClient, Delivered, Hello, NextBatch, NotYet, Ok, Publish,
    Trained,
)
from tests.support.engines import make_run, standin_engine
from tests.support.small_disk import fill

disk, world = map(Path, sys.argv[1:])
run, config = make_run(disk / "run", world, updates=1000, rollout={"max_staleness": 2, "dump": True})
config.reward.function = "tests.support.rewards:coarse"
save(config, run.config)
run.begin()
engine = ExitStack()
engine.enter_context(standin_engine(run))
atexit.register(engine.close)
controller = subprocess.Popen(
    [sys.executable, "-m", "areal_megatron.controller.controller", "--run", run.folder], stderr=sys.stderr
)
atexit.register(controller.kill)
client = ControllerClient(run.endpoint("controller", 300), run.keys, "trainer-0", 30)
client.request(Hello(0))
version = 0

def train(updates):
    global version
    for _ in range(updates):
        while isinstance(client.request(NextBatch(0, version, version)), NotYet):
            pass
        client.request(Trained(version, version, True, {}))
        version += 1
        for link in client.request(Publish(version, "127.0.0.1:1")).links:
            client.request(Delivered(link.engine, link.generation, version, 0.1, 0))

def checkpoint():
    client.request(CheckpointBegin(version, version))
    reply = client.request(CheckpointWritten(version))
    return "written" if isinstance(reply, Ok) else reply.reason

train(3)
said = {"before": checkpoint()}
ballast = fill(run.folder)
begun, ended = version, time.monotonic() + 2
while time.monotonic() < ended:
    train(1)
said |= {"meanwhile": version - begun, "full": checkpoint(), "alive": controller.poll() is None}
ballast.unlink()
train(3)
said["after"] = checkpoint()
client.request(Bye())
said["code"] = controller.wait(60)
engine.close()
said["updates"] = [line["version"] for line in read_metrics(run) if line["kind"] == "update"]
said["complete"] = said["updates"] == list(range(1, version + 1))
said["phase"] = read_status(run).phase
print(json.dumps(said))
"""


def test_a_run_survives_a_full_disk_and_loses_no_line_of_its_metrics(world, tmp_path):
    arguments = (tmp_path / "disk", world)
    code, out, told = run_on_small_disk(tmp_path / "disk", 8192, RUN, *arguments, timeout_s=120)
    assert code == 0, told
    said = json.loads(out)
    assert said["before"] == said["after"] == "written", told
    assert said["full"] == "No space left on device"
    assert said["alive"] and said["meanwhile"] > 0 and said["code"] == 0, told
    assert said["complete"] and said["phase"] == "done"
    kept = [line for line in told.splitlines() if "is not kept" in line]
    assert kept and all("No space left on device" in line for line in kept), "a dump is all that is lost"

"""Runs that are killed and resumed: from the newest whole checkpoint, nothing lost, nothing trained twice."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_megatron.checkpoint.folder import complete, newest
from areal_megatron.config.config_file import load
from areal_megatron.controller.state import ControllerState, read
from areal_megatron.data.dumps import dumped
from areal_megatron.data.dumps import read as read_dump
from areal_megatron.data.trajectory import Trajectory, checksum
from areal_megatron.observe.metrics import read_metrics, read_status
from areal_megatron.observe.records import read_record
from areal_megatron.programs.audit import audit, surviving
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_faults import kill
from tests.e2e.test_run import small


def trained(run: RunFolder) -> list[int]:
    return [line["version"] for line in read_metrics(run) if line["kind"] == "update"]


def last_update(run: RunFolder) -> float:
    """When the last version was trained, in seconds since the epoch."""
    return [line["time"] for line in read_metrics(run) if line["kind"] == "update"][-1]


CHANGES = {
    "held_out": 4,
    "rollout.max_staleness": 2,
    "resume": "auto",
    "rollout.filter_groups": True,
    # few are filtered: what was interrupted is trained
    "reward.function": "tests.support.rewards:coin",
}


def rated(world) -> str:
    """A mixture of prompts of which some are known to be too easy or too hard, and nothing is known of others."""
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (world / f"{name}.jsonl").read_text().splitlines()[:400]]
        rows = [row | {"pass_rate": [1.0, 0.5, None, 0.0][number % 4]} for number, row in enumerate(rows)]
        (world / f"rated-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{world / 'rated-train.jsonl'}:0.8,{world / 'rated-heldout.jsonl'}:0.2"


def with_an_edited_row(world) -> str:
    """The mixture of `rated`, with another answer to its fifth prompt."""
    lines = (world / "rated-train.jsonl").read_text().splitlines(keepends=True)
    lines[4] = json.dumps(json.loads(lines[4]) | {"answer": "7"}) + "\n"
    (world / "edited.jsonl").write_text("".join(lines))
    return f"{world / 'edited.jsonl'}:0.8,{world / 'rated-heldout.jsonl'}:0.2"


def with_the_time(world, folder) -> Path:
    """The model with a template that shows the second of the launch: no launch renders a prompt as the one before."""
    shutil.copytree(world / "model", folder / "model")
    template = "{{ strftime_now('%H %M %S') }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    return folder / "model"


def has_begun(answer) -> bool:
    """Whether an answer was interrupted after its first token."""
    return answer.finish_reason == "abort" and len(answer.tokens) > 0


def check_resumed(kept: ControllerState, run: RunFolder) -> None:
    """Answers that waited, and interrupted ones, were trained after the prompt that they were sampled from. On both
    sides of the interruption tokens have the log-probabilities that transformers computes with the export of their
    version."""
    trained = {t.uid: t for path in dumped(run.trajectories).values() for t in read_dump(path).trajectories}
    waited = [t for group in kept.trajectories.values() for t in group if t.uid in trained]
    assert all(np.array_equal(trained[t.uid].prompt, t.prompt) and trained[t.uid].reward == t.reward for t in waited)
    found = [
        (trained[number * 4 + k], group.prompt, answer)
        for number, group in kept.resumable.items()
        for k, answer in enumerate(group.answers)
        if number * 4 + k in trained and has_begun(answer)
    ]
    assert found, "no interrupted answer was trained"
    for answer, prompt, before in found:
        assert answer.prompt.tolist() == prompt.tolist() and answer.asked == checksum(prompt)
        assert answer.response[: len(before.tokens)].tolist() == before.tokens.tolist()
    compared = Counter()
    for version in {*np.concatenate([answer.versions for answer, *_ in found]).tolist()}:
        if (weights := run.exports / f"version-{version:06d}").exists():
            model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
            for answer, _, before in found:
                own = answer.versions == version
                compared["before"] += own[: len(before.tokens)].sum()
                compared["after"] += own[len(before.tokens) :].sum()
                assert np.abs(answer.logprobs - expected_logprobs(model, answer))[own].max(initial=0) < 1e-5
    assert min(compared["before"], compared["after"]) > 3, compared


def expected_logprobs(model, answer: Trajectory) -> np.ndarray:
    tokens = torch.from_numpy(np.concatenate((answer.prompt, answer.response))).long()
    with torch.no_grad():
        scores = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    return scores.gather(1, tokens[1:, None])[len(answer.prompt) - 1 :, 0].numpy()


def test_a_run_that_is_killed_and_stopped_goes_on(local_run, world, tmp_path):
    """A launcher that is killed ends everything (trainers and engines are killed in test_faults.py). Asked to stop, the
    run keeps what was sampled. The bound becomes another one, as do the trainers' sizes, prompts are drawn from the
    easiest on, and each launch renders them otherwise."""
    changes = CHANGES | {
        "updates": 1000,
        "checkpoint.every": 2,
        "checkpoint.hf_every": 1,
        "data.train": rated(world),
        "data.allow_overlap": True,
        "rollout.draw_min_pass_rate": 0.1,
        "rollout.draw_max_pass_rate": 0.9,
        "rollout.easiest_first": True,
        "rollout.dump": True,
        "rollout.max_running": 4,
    }
    changes["model.path"] = with_the_time(world, tmp_path)
    settings = small(world, **changes)
    started = local_run("killed", *settings, "rollout.max_staleness=4")
    run = RunFolder(started.folder)
    started.wait_for(lambda: run.checkpoints.exists() and complete(run))
    time.sleep(random.uniform(0, 1))
    kill(started, "launcher")
    assert "resuming from" not in started.output

    # No bound that is reached: answers of several groups are always under way, however slow trainers are.
    settings += ["rollout.max_staleness=100", "rollout.max_running=32"]
    for stops in (1, 2, 3):  # an engine may be asked to stop just when few of its answers have begun
        begun = time.time()
        # Each version is exported: whichever is sampled from when the run stops can be compared with.
        stopped = local_run("killed", *settings, "checkpoint.every=1", "trainer.dp=2", "machine.slots=3")
        stopped.wait_for(lambda begun=begun: last_update(run) > begun and read_status(run).running_groups > 6)
        assert run.incarnation == stops
        run.stop.touch()
        assert stopped.wait() == 75, stopped.output
        assert "resuming from" in stopped.output
        kept_by = complete(run)[-1]
        kept_state = read(kept_by / "controller.msgpack")
        if sum(map(has_begun, chain(*(group.answers for group in kept_state.resumable.values())))) >= 8:
            break
    refused = local_run("killed", *settings, f"data.train={with_an_edited_row(world)}", output="refused")
    assert refused.wait() == 2 and run.incarnation == stops
    words = rf"error: data\.train: 1 of 800 rows .* is \S+/edited\.jsonl:5: .*: name=… resume={kept_by}\n"
    assert re.search(words, refused.output), refused.output
    # Those that were admitted first are trained first: this many updates reach the interrupted ones behind all others.
    before = kept_state.schedule.finished + kept_state.schedule.interrupted
    last = len(trained(run)) + len(before) // 8 + 3
    settings += ["checkpoint.every=1"]
    again = local_run("killed", *settings, f"updates={last}")
    assert again.wait() == 0, again.output
    assert f"{last} of {last} updates done" in again.output
    assert "resuming from" in again.output
    kept, resumed = (
        re.findall(rf"{verb} (\d+ tokens of [1-9]\d* answers)", run.log("controller").read_text())
        for verb in ("kept", "resuming")
    )
    assert kept == resumed and kept
    assert trained(run) == list(range(1, last + 1))
    assert audit(run) == []
    config = load(run.config)
    batches, _ = surviving(run, config)
    dumps = [read_dump(path) for path in dumped(run.trajectories).values()]
    assert [sorted(t.uid for t in dump.trajectories) for dump in dumps] == [sorted(batch.uids) for batch in batches]
    check_resumed(kept_state, run)
    saved = read(complete(run)[-1] / "controller.msgpack")
    kinds = Counter(kind for *_, kind in saved.schedule.dispositions)
    assert kinds["trained"] == 8 * last and kinds["skipped: pass rate 1"] > 100 and kinds["filtered"] > 0
    assert len(complete(run)) == 2 and complete(run)[-1].name == f"version-{last:06d}"
    whole, exported = (
        load_file(folder / "model.safetensors") for folder in (run.hf, run.exports / f"version-{last:06d}")
    )
    assert whole.keys() == exported.keys()
    assert all(torch.equal(whole[name], exported[name]) for name in whole)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_run_that_is_killed_again_and_again_goes_on(local_run, world):
    """Thirty times at random moments, in the middle of saves too: each update is followed by one."""
    changes = CHANGES | {"checkpoint.every": 1}
    for kills in range(30):
        started = local_run("killed", *small(world, **changes, updates=10000))
        run = RunFolder(started.folder)
        trained_before = len(trained(run))
        started.wait_for(lambda: run.start.incarnation == kills and run.status.exists())  # noqa: B023
        victim = random.choice(["launcher", "trainer-0", "controller", "engine-0"])
        if victim == "launcher" or random.random() < 0.8:  # else in the middle of the start
            started.wait_for(lambda: len(trained(run)) > trained_before)  # noqa: B023
        time.sleep(random.uniform(0, 5))
        kill(started, victim)
        print(f"kill {kills + 1}: {victim}, {len(trained(run))} updates, {len(complete(run))} checkpoints", flush=True)
        assert audit(run) == []
    last = len(trained(run)) + 5
    again = local_run("killed", *small(world, **changes, updates=last))
    assert again.wait() == 0, again.output
    assert trained(run) == list(range(1, last + 1)) and audit(run) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 48 MiB, and what fills it to the last byte; `unlink` of that makes room again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    filling = disk / "filling"

    def fill() -> Path:
        # unbuffered: what a full disk left in a buffer would be written, and fail, again as the file is closed
        with filling.open("wb", buffering=0) as file:
            for size in (2**16, 1):
                with pytest.raises(OSError, match="No space left"):
                    while True:
                        file.write(bytes(size))
        return filling

    yield disk, fill
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.soak
def test_a_full_disk_is_waited_for_by_trainers_and_launcher(local_run, world, small_disk):
    """Everything of the run lies on the small disk, also what its launcher prints. While it is full the run trains on;
    the launcher of a run that died meanwhile starts it again as soon as there is room."""
    disk, fill = small_disk
    changes = {"updates": 1000, "held_out": 4, "checkpoint.every": 2, "rollout.max_staleness": 2}
    started = local_run("short", *small(world, **changes), f"runs_dir={disk}", "--restarts=1", output=str(disk / "out"))
    run = RunFolder(disk / "short")
    started.wait_for(lambda: run.checkpoints.exists() and complete(run))
    filling = fill()
    time.sleep(3)
    os.kill(started.pid("trainer-0"), signal.SIGKILL)
    time.sleep(10)
    assert started.process.poll() is None
    filling.unlink()
    started.wait_for(lambda: "the run goes on when it can" in started.output)
    before = trained(run)[-1]
    started.wait_for(lambda: trained(run)[-1] > before + 3)
    record = read_record(run)
    started.wait_for(lambda: read_record(run).time > record.time)
    run.stop.touch()
    assert started.wait() == 75, started.output
    assert audit(run) == []


@pytest.mark.soak  # what one rank does is in test_checkpoint.py
def test_a_full_disk_costs_checkpoints_and_not_the_run(local_run, world, small_disk):
    """The checkpoints lie on a small file system of their own, which is filled after the first one and emptied later;
    and filled again when the run is asked to stop."""
    disk, fill = small_disk
    changes = {"updates": 1000, "held_out": 4, "checkpoint.every": 2, "rollout.max_staleness": 2}
    started = local_run("full", *small(world, **changes))
    run = RunFolder(started.folder)
    started.wait_for(lambda: run.checkpoints.is_dir())
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(disk)
    started.wait_for(lambda: run.checkpoints.exists() and complete(run))

    def saves() -> list[dict]:
        return [line for line in read_metrics(run) if line["kind"] == "checkpoint"]

    def fill_until_one_is_lost() -> Path:
        before, filling = len(saves()), fill()
        lost = started.wait_for(lambda: [line for line in saves()[before:] if line["failed"]])
        assert "No space left" in lost[0]["error"] and "training goes on" in lost[0]["error"]
        assert newest(run)[0] and not newest(run)[1]
        return filling

    fill_until_one_is_lost().unlink()
    lost = saves()[-1]["version"]
    started.wait_for(lambda: newest(run)[0].version > lost)
    filling = fill_until_one_is_lost()
    last = newest(run)[0]
    run.stop.touch()
    assert started.wait() == 75, started.output
    assert "No space left" in started.output
    assert newest(run) == (last, []) and not list(disk.glob(".*"))
    filling.unlink()
    settings = small(world, **changes | {"updates": trained(run)[-1] + 1, "resume": "auto"})
    again = local_run("full", *settings)
    assert again.wait() == 0, again.output
    assert f"policy version {last.version}" in again.output and audit(run) == []

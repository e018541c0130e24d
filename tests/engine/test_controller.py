"""A controller and a real engine; the tests take the trainers' place."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.config.config_file import save
from areal_megatron.controller.state import read
from areal_megatron.data.dumps import dumped
from areal_megatron.data.dumps import read as read_dump
from areal_megatron.data.prompts import read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import encoder
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.observe.spans import read_spans
from areal_megatron.protocol import (
    BatchReply,
    Bye,
    CheckpointBegin,
    CheckpointWritten,
    ControllerClient,
    ControllerError,
    Delivered,
    Hello,
    NextBatch,
    NotWritten,
    NotYet,
    Ok,
    Publish,
    PublishAgain,
    Sending,
    Stop,
    Trained,
)
from areal_megatron.reshard.session import LinkRef
from tests.support.engines import ask, lengthened, make_run, started_engine

ETA = 1
msgpack = encoder()
LONG = 1500
LONGEST = 3900
"""Tokens of an answer that is not complete before a test on a slow machine has it interrupted."""


@pytest.fixture(scope="module")
def engine(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    settings = {"max_new_tokens": LONGEST, "max_running": 16}
    run, _ = make_run(folder / "engine", lengthened(world, folder / "world"), rollout=settings)
    with started_engine(run):
        yield run


@pytest.fixture
def start(world, tmp_path, engine):
    """Starts a controller in a run folder of its own, on the one engine."""
    started = []

    def new(timeout_s=60, world=world, rollout=None, evaluated="", **keys):
        folder = tmp_path / f"run-{len(started)}"
        run, config = make_run(folder, world, rollout={"max_staleness": ETA, **(rollout or {})}, **keys)
        config.reward.function = "tests.support.rewards:coarse"
        config.trainer.dp, config.machine.peer_timeout_s = 2, timeout_s
        config.rollout.start_timeout_s, config.data.eval = timeout_s, str(evaluated)
        save(config, run.config)
        (run.folder / "secret").write_text(engine.token)
        run.announce("engine-0", engine.endpoint("engine-0"))
        command = [sys.executable, "-m", "areal_megatron.controller.controller", "--run", str(run.folder)]
        started.append(subprocess.Popen(command, stdout=run.log("controller").open("wb"), stderr=subprocess.STDOUT))
        return run, config, started[-1]

    yield new
    for process in started:
        process.kill()
        process.wait(10)


@pytest.fixture
def connect():
    clients = []

    def new(run, timeout_s=30):
        clients.append(ControllerClient(run.endpoint("controller", 300), run.keys, "trainer-0", timeout_s))
        clients[-1].request(Hello(0))
        return clients[-1]

    yield new
    for client in clients:
        client.close()


def take(client, number, version):
    """Returns the parts of both replicas."""
    parts = []
    for replica in range(2):
        while isinstance(reply := client.request(NextBatch(replica, number, version)), NotYet):
            pass
        assert isinstance(reply, BatchReply)
        parts.append(reply.part)
    return parts


def check_parts(parts, config, prompts, tokenizer, version):
    trajectories = [t for part in parts for t in part.trajectories]
    assert len(trajectories) == config.batch_size
    groups = {(t.epoch, t.prompt_id) for t in trajectories}
    assert len(groups) == config.groups_per_batch
    assert len({t.uid for t in trajectories}) == config.batch_size
    for part in parts:
        assert part.version == version
        assert len(part.minibatches) == config.ppo.minibatches
        places = [i for minibatch in part.members for microbatch in minibatch for i in microbatch]
        assert sorted(places) == list(range(len(part.trajectories)))
    for t in trajectories:
        assert 0 <= version - t.admission_version <= ETA
        assert t.prompt.tolist() == prompts[t.prompt_id].tokens
        assert (
            len(t.response) == len(t.logprobs) == len(t.versions) == len(t.loss_mask) <= config.rollout.max_new_tokens
        )
        assert (t.versions == 0).all() and (t.loss_mask == 1).all() and (t.logprobs < 0).all()
        ended = t.response[-1] in tokenizer.stop_tokens
        assert t.truncated == (not ended)
        text = tokenizer.decode(t.response.tolist())
        right = ended and len(text) % 4 == 0
        assert t.reward == (config.reward.right if right else config.reward.wrong)
    return trajectories


def test_batches_follow_the_gate_and_the_account_is_kept(start, connect):
    run, config, process = start(updates=5, rollout={"dump": True})
    client = connect(run)
    tokenizer = Tokenizer(config.model.path)
    prompts = {p.id: p for p in read_prompts(config, "train", tokenizer)}

    first = check_parts(take(client, 0, 0), config, prompts, tokenizer, version=0)
    assert isinstance(client.request(NextBatch(1, 1, 1)), NotYet), "a replica that is ahead waits for rank 0's report"
    with pytest.raises(ControllerError, match="batch 2 of version 1 is not next: that is batch 0 of version 0"):
        client.request(NextBatch(0, 2, 1))
    with pytest.raises(ControllerError, match=r"there is no replica 2, trainer.dp is 2"):
        client.request(NextBatch(2, 0, 0))
    assert isinstance(client.request(Trained(0, 0, False, {})), Ok)

    with pytest.raises(ControllerError, match="is not next"):
        client.request(NextBatch(0, 0, 0))
    second = check_parts(take(client, 1, 0), config, prompts, tokenizer, version=0)
    with pytest.raises(ControllerError, match="not in training"):
        client.request(Trained(0, 0, True, {}))
    assert isinstance(client.request(Trained(1, 0, True, {"loss": 0.5})), Ok)
    third = check_parts(take(client, 2, 1), config, prompts, tokenizer, version=1)
    client.request(Trained(2, 1, True, {}))
    assert len({t.uid for t in first + second + third}) == 3 * config.batch_size
    dumps = [read_dump(path) for path in dumped(run.trajectories).values()]
    assert [(dump.number, dump.version) for dump in dumps] == [(0, 0), (1, 0), (2, 1)], "on disk once it is trained"
    for dump, batch in zip(dumps, (first, second, third), strict=True):
        by_uid = {t.uid: msgpack.encode(t) for t in batch}
        assert {t.uid: msgpack.encode(t) for t in dump.trajectories} == by_uid

    # The engine has never committed version 1: nothing that version 2 may train can be admitted.
    assert isinstance(client.request(NextBatch(0, 3, 2)), NotYet)

    assert client.request(Publish(2, "127.0.0.1:1")).links == [LinkRef(0, 1)]
    client.request(Delivered(0, 1, 2, 0.1, 0, "no such store"))
    while not (again := client.request(Publish(2, "127.0.0.1:1")).links):
        time.sleep(0.05)  # published to engines that lack it and are not about to get it
    assert again == [LinkRef(0, 2)]
    client.request(Delivered(0, 2, 2, 0.1, 0, "no such store"))
    client.request(Bye())
    assert process.wait(60) == 0, run.log("controller").read_text()
    assert ask(run, lambda c: c.load()).running == 0, "requests outlive their controller"

    spans = [(span.start, span.end) for span in read_spans(run) if span.name == "generate"]
    at_once = [sum(start <= begin < end for start, end in spans) for begin, _ in spans]
    # Groups whose short answers have ended leave room for others, see tests/unit/controller/test_engine.py.
    assert max(at_once) * config.rollout.group_size >= config.rollout.max_running

    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert [u["version"] for u in updates] == [0, 1, 2]
    assert [u["groups_skipped"] for u in updates] == [4, 4, 4]
    assert updates[1]["loss"] == 0.5
    for update, trajectories, version in zip(updates, (first, second, third), (0, 0, 1), strict=True):
        assert update["reward_mean"] == pytest.approx(np.mean([t.reward for t in trajectories]))
        assert update["accuracy"] == pytest.approx(np.mean([t.reward == config.reward.right for t in trajectories]))
        assert update["trained_tokens"] == sum(len(t.response) for t in trajectories)
        assert update["truncated_share"] == np.mean([t.truncated for t in trajectories])
        assert update["staleness_max"] == max(version - t.admission_version for t in trajectories)
        assert sum(update["staleness_histogram"].values()) == config.batch_size


def test_a_run_that_was_asked_to_stop_keeps_what_was_sampled(start, connect, world, tmp_path):
    """tests/e2e/test_resume.py tests that the next launch resumes it."""
    long = lengthened(world, tmp_path / "world")
    lines = [json.loads(line) for line in (long / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps(line | {"response_tokens": LONGEST}) for line in lines]
    (long / "train.jsonl").write_text("\n".join(lines))
    run, _, process = start(world=long, rollout={"max_new_tokens": LONGEST, "group_size": 2}, updates=5)
    client = connect(run)
    assert isinstance(client.request(NextBatch(0, 0, 0)), NotYet)
    while not ask(run, lambda c: c.load()).running:
        time.sleep(0.1)
    run.stop.touch()
    while isinstance(reply := client.request(NextBatch(0, 0, 0)), NotYet):
        pass
    assert isinstance(reply, Stop)
    folder = checkpoint_folder.partial(run, 0)
    folder.parent.mkdir(exist_ok=True)
    folder.write_bytes(b"")  # nothing can be written into a file
    client.request(CheckpointBegin(0, 0))
    assert client.request(CheckpointWritten(0)) == NotWritten("File exists")
    folder.unlink()
    for _ in range(2):  # the one that is due, and that of the stop, which replaces it
        client.request(CheckpointBegin(0, 0))
        client.request(CheckpointWritten(0))
    deadline = time.monotonic() + 30
    while ask(run, lambda c: c.load()).running:  # an engine counts at its next step
        assert time.monotonic() < deadline
        time.sleep(0.1)
    client.request(Bye())
    assert process.wait(60) == 0, run.log("controller").read_text()

    state = read(folder / "controller.msgpack")
    interrupted = {(g.epoch, g.prompt_id): state.resumable[g.number].answers for g in state.schedule.interrupted}
    tokens = sum(len(answer.tokens) for answers in interrupted.values() for answer in answers)
    assert len(interrupted) == 8 and 0 < tokens < 16 * LONGEST and not state.again
    assert run.log("controller").read_text().count(f"kept {tokens} tokens of 16 answers") == 1


def test_no_version_waits_for_an_evaluation(start, connect, world, tmp_path):
    long = lengthened(world, tmp_path / "world")
    for name, count, tokens in (("train", 40, 10), ("heldout", 4, LONG)):
        lines = [json.loads(line) for line in (long / f"{name}.jsonl").read_text().splitlines()[:count]]
        lines = [json.dumps(line | {"response_tokens": tokens}) for line in lines]
        (long / f"{name}.jsonl").write_text("\n".join(lines))
    evaluated = long / "heldout.jsonl"
    run, _, process = start(world=long, rollout={"max_new_tokens": LONG}, updates=5, evaluated=evaluated)
    client = connect(run)
    take(client, 0, 0)
    client.request(Trained(0, 0, True, {}))
    assert client.request(Publish(1, "127.0.0.1:1")).links == [LinkRef(0, 1)]
    published = time.time()
    client.request(Delivered(0, 1, 1, 0.1, 0, "no such store"))
    deadline = time.monotonic() + 120
    while not (found := [line for line in read_metrics(run) if line["kind"] == "eval"]):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    ((evaluation,), file) = found, found[0]["files"]["heldout"]
    assert evaluation["time"] > published + 1, "the evaluation was over: this test proves nothing"
    assert (evaluation["version"], evaluation["items"], evaluation["response_tokens_mean"]) == (0, 4, LONG)
    assert evaluation["version_min"] == evaluation["version_max"] == 0, "the engine never got version 1"
    assert file["avg@1"]["value"] == evaluation["accuracy"]


def test_sigterm_is_a_clean_stop(start, connect, engine):
    run, _, process = start()
    take(connect(run), 0, 0)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "no reward worker"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert run.log("controller").read_text().splitlines()[-1] == "controller: stopped by SIGTERM"
    assert not psutil.wait_procs(children, 5)[1]
    deadline = time.monotonic() + 20
    while running := ask(engine, lambda client: client.load()).running:  # until it has seen the connections end
        assert time.monotonic() < deadline, f"{running} requests go on"
        time.sleep(0.1)


def test_wrong_input_ends_the_controller_with_code_2(start):
    run, config, process = start()
    process.kill()
    config.reward.function = "tests.support.rewards:missing"
    save(config, run.config)
    ended = subprocess.run(
        [sys.executable, "-m", "areal_megatron.controller.controller", "--run", str(run.folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "error: reward.function: tests.support.rewards has no function missing"


def kill(engine):
    port = int(engine.endpoint("engine-0").rpartition(":")[2])
    (server,) = [p for p in psutil.Process().children() if any(c.laddr.port == port for c in p.net_connections())]
    for child in [*server.children(recursive=True), server]:
        child.kill()


def wait_for(run, words, timeout_s=100):
    """A busy machine starts an engine in three quarters of a minute."""
    deadline = time.monotonic() + timeout_s
    while words not in run.log("controller").read_text():
        assert time.monotonic() < deadline, run.log("controller").read_text()
        time.sleep(0.1)


@pytest.mark.soak  # an engine is back in e2e/test_faults.py, trainers are told in unit/controller/test_batches.py
def test_a_dead_engine_is_waited_for_and_gets_weights_before_prompts(start, connect, engine):
    """Kills the engine and the one that replaces it, so this is the last test of the file."""
    run, _, process = start(timeout_s=120, updates=1000)
    client = connect(run)
    for number in range(2):
        take(client, number, number)
        client.request(Trained(number, number, True, {}))
    assert client.request(Publish(2, "127.0.0.1:1")).links == [LinkRef(0, 1)]
    assert client.request(Sending([LinkRef(0, 1)])).links == []
    kill(engine)
    wait_for(run, "engine-0 is lost: engine-0 at http://127.0.0.1:")
    assert client.request(Sending([LinkRef(0, 1)])).links == [LinkRef(0, 1)], "nobody has to wait for it"
    assert client.request(Publish(2, "127.0.0.1:1")).links == []
    assert isinstance(client.request(NextBatch(0, 2, 2)), NotYet)
    with started_engine(engine):
        run.announce("engine-0", engine.endpoint("engine-0"))
        wait_for(run, "engine-0 is back")
        for replica in (1, 0):
            while isinstance(reply := client.request(NextBatch(replica, 2, 2)), NotYet):
                pass
            assert isinstance(reply, PublishAgain), "every replica once, before any has a batch"
        assert client.request(Publish(2, "127.0.0.1:1")).links == [LinkRef(0, 2)]
        assert client.request(Sending([LinkRef(0, 1), LinkRef(0, 2)])).links == [LinkRef(0, 1)]
        assert process.poll() is None
        process.kill()
        run, _, process = start(timeout_s=10, updates=1000)
        take(connect(run), 0, 0)
        kill(engine)
    assert process.wait(60) == 1
    assert json.loads(run.status.read_text())["phase"] == "training"
    last = run.log("controller").read_text().splitlines()[-1]
    assert last == "error: engine-0 was lost and not started again within 10 s"

"""Runs whose service of rewards falls ill, and runs with a function of the user's that is given groups."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_megatron.data import dumps
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.e2e.test_run import small
from tests.support.reward_service import score


class Service:
    """A service of rewards at `url`, which remembers what it has scored."""

    def __init__(self, function):
        self.function, self.scored, self.requests = function, {}, 0
        self.ill = lambda number, response: ""
        """What the service does with its number-th request in place of scoring it: `status N`, `hang up`."""
        self._port, self._server = 0, None
        self.start()
        self.url = f"http://127.0.0.1:{self._port}/"

    def start(self):
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                service.reply(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.handle_error = lambda *_: None
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def reply(self, request):
        asked = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        self.requests += 1
        ill = self.ill(self.requests, asked["response"])
        if ill == "hang up":
            return request.connection.close()
        status, body = int(ill.removeprefix("status ") or 200), b"ill"
        if not ill:
            score = self.function(asked["prompt"], asked["response"], asked["answer"])
            self.scored[asked["prompt"], asked["response"]] = score
            body = json.dumps({"score": score}).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        return None


@pytest.fixture
def service():
    started = []

    def start(function):
        started.append(Service(function))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def updates_of(run):
    return [line for line in read_metrics(run) if line["kind"] == "update"] if run.metrics.exists() else []


@pytest.mark.soak  # in parts: unit/reward/test_remote.py, unit/controller/test_failures.py
def test_no_answer_is_trained_as_wrong_because_its_reward_failed(local_run, world, service):
    """Every other answer meets an error for four seconds, some meet it however often they are tried; then the service
    hangs up on some, then it is gone for five seconds."""
    began = []

    def ill(number, response):
        if number > 30:
            began.append(time.monotonic())
        if began and (len(response) % 5 == 0 or (len(response) % 2 and time.monotonic() < began[0] + 4)):
            return "status 500"
        return "hang up" if 150 < number <= 160 else ""

    rewards = service(lambda prompt, response, answer: float(len(response) % 3 == 0))
    rewards.ill = ill
    changes = {
        "reward.function": rewards.url,
        "reward.retry_s": 2,
        "reward.failed_share": 1,
        "reward.truncated": "scored",
        "rollout.dump": True,
        "rollout.max_staleness": 2,
        "updates": 8,
    }
    started = local_run("ill", *small(world, held_out=4, **changes))
    started.wait_for(lambda: rewards.requests > 170)
    rewards.stop()
    time.sleep(5)
    rewards.start()
    assert started.wait() == 0, started.output

    run, tokenizer = RunFolder(started.folder), AutoTokenizer.from_pretrained(world / "model")
    last = updates_of(run)[-1]
    assert last["reward_failures"] > 0 and last["reward_retries"] > last["reward_failures"]
    busy = [update["reward_busy_share"] for update in updates_of(run)]
    assert 0 <= min(busy) <= max(busy) <= 1 and max(busy) > 0.01
    trained = failed = 0
    for path in dumps.dumped(run.trajectories).values():
        for t in dumps.read(path).trajectories:
            prompt, response = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (t.prompt, t.response))
            assert t.loss_mask.any() != t.failed
            failed += t.failed
            if not t.failed:
                assert t.reward == -5 + 10 * rewards.scored[prompt, response]
                trained += 1
    assert trained > 100 and 0 < failed <= last["reward_failures"]
    lines = [line for path in (run.folder / "ledger").iterdir() for line in path.read_text().splitlines()]
    assert len(lines) == 8


@pytest.mark.soak  # what ends a run, and with which line, is in tests/unit/controller/test_failures.py
def test_a_reward_that_always_fails_ends_the_run_before_anything_is_trained(local_run, world):
    changes = {"reward.function": "tests.support.rewards:broken", "reward.retry_s": 0}
    started = local_run("broken", *small(world, held_out=1, **changes))
    assert started.wait() == 1
    problem = "error: reward.failed_share: the rewards of 5 of the last 40 answers failed, more than 0.1; the last"
    (line,) = [line for line in started.output.splitlines() if problem in line]
    assert "RuntimeError: this reward always fails" in line and str(world / "train.jsonl") in line
    assert not updates_of(RunFolder(started.folder))


@pytest.mark.soak
def test_terms_of_a_group_are_trained_and_logged(local_run, world):
    changes = {
        "reward.group_function": "tests.support.rewards:beside_the_group",
        "rollout.dump": True,
        "updates": 2,
    }
    started = local_run("terms", *small(world, held_out=1, **changes))
    assert started.wait() == 0, started.output
    run, tokenizer = RunFolder(started.folder), AutoTokenizer.from_pretrained(world / "model")
    for path, update in zip(dumps.dumped(run.trajectories).values(), updates_of(run), strict=True):
        trajectories = dumps.read(path).trajectories
        for first in range(0, 32, 4):
            group = trajectories[first : first + 4]
            lengths = np.array([len(t.response) for t in group])
            texts = [tokenizer.decode(t.response, skip_special_tokens=True) for t in group]
            for t, text, length in zip(group, texts, lengths, strict=True):
                assert t.terms == {"length": lengths.mean() - length, "first": float(text == texts[0])}
                base = -5 if t.truncated else -5 - 10 * len(text)  # tests.support.rewards:short
                assert t.reward == pytest.approx(base + sum(t.terms.values()))
        for name in ("length", "first"):
            assert update[f"reward_{name}_mean"] == pytest.approx(np.mean([t.terms[name] for t in trajectories]))
        assert update["reward_mean"] == pytest.approx(np.mean([t.reward for t in trajectories]))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_demo_learns_while_its_service_is_ill_for_half_a_minute(tmp_path, service):
    """For 15 s it answers with errors, for 15 s nothing listens. Accuracy is that of the last three evaluations."""
    rewards, out = service(score), tmp_path / "demo"
    changes = [f"reward.function={rewards.url}", "eval.every=20"]
    demo = subprocess.Popen([sys.executable, "tools/demo.py", f"--out={out}", *changes], cwd=ROOT)
    ill, undisturbed = RunFolder(out / "rl"), RunFolder(out / "undisturbed")
    while len(updates_of(ill)) < 20:
        assert demo.poll() is None
        time.sleep(0.5)
    rewards.ill = lambda number, response: "status 500"
    time.sleep(15)
    rewards.stop()
    time.sleep(15)
    rewards.ill = lambda number, response: ""
    rewards.start()
    assert demo.wait(1800) == 0
    data = [f"model.path={out}/sft/hf", f"data.train={out}/world/train.jsonl", f"data.eval={out}/world/heldout.jsonl"]
    command = [
        sys.executable,
        "-m",
        "areal_megatron.launch.local",
        "configs/tiny_cpu.yaml",
        f"runs_dir={out}",
        "name=undisturbed",
    ]
    subprocess.run([*command, "seed=1", *data, *changes], cwd=ROOT, check=True, timeout=1800)

    def accuracy(run):
        lines = sorted((line for line in read_metrics(run) if line["kind"] == "eval"), key=lambda line: line["version"])
        return np.mean([line["accuracy"] for line in lines[-3:]])

    failures, retries = (updates_of(ill)[-1][name] for name in ("reward_failures", "reward_retries"))
    print(f"ill: {accuracy(ill):.4f}, {retries} retries; undisturbed: {accuracy(undisturbed):.4f}")
    assert failures == 0 < retries and accuracy(ill) > accuracy(undisturbed) - 0.02

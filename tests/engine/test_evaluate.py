"""`areal evaluate` with a real engine: killed in the middle and started again, beside one that nobody kills."""

import json
import os
import signal
import subprocess
import sys
import time
from math import comb

import psutil
import pytest

from tests.conftest import ROOT, take_interrupts
from tests.support.living import command_of, left_over

ITEMS, N = 40, 4


class Started:
    def __init__(self, world, data, out, *more):
        command = [
            sys.executable,
            "-m",
            "areal_megatron.launch.evaluate",
            str(world / "model"),
            str(data),
            "--n",
            str(N),
            "--k",
            "1,2,4",
            "--max-new-tokens",
            "40",
            "--reward",
            "tests.support.rewards:coarse",
            "--top-p",
            "0.95",
            "--out",
            str(out),
            *more,
        ]
        self.data, self.out = data, out
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=take_interrupts,
        )

    def lines(self):
        path = self.out / "answers.jsonl"
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []

    def finish(self, code=0, timeout_s=120):
        output, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == code, output
        return output


@pytest.fixture
def start(world, tmp_path):
    data, evaluations = tmp_path / "data.jsonl", []
    rows = [json.loads(line) for line in (world / "heldout.jsonl").read_text().splitlines()[:ITEMS]]

    def begin(name, *more, **columns):
        data.write_text("".join(json.dumps(row | columns) + "\n" for row in rows))
        evaluations.append(Started(world, data, tmp_path / name, *more))
        return evaluations[-1]

    yield begin
    for evaluation in evaluations:
        if evaluation.process.poll() is None:
            evaluation.process.terminate()
            evaluation.process.wait(30)


def figures(lines):
    """Counts avg@4 and pass@2 of the lines by hand."""
    correct = [0] * ITEMS
    for answer in lines:
        correct[answer["item"]] += answer["correct"]
    pairs = comb(N, 2)
    return sum(correct) / (N * ITEMS), sum(1 - comb(N - c, 2) / pairs for c in correct) / ITEMS


@pytest.mark.soak  # what one evaluation writes is in test_linear_attention.py
def test_a_killed_evaluation_goes_on_and_gives_the_figures_of_its_answers(start):
    whole = start("whole")
    whole.finish()

    killed = start("killed")
    deadline = time.monotonic() + 120
    while len(killed.lines()) < 20:
        assert killed.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    members = psutil.Process(killed.process.pid).children(recursive=True)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait(10)
    assert not left_over(members, 20), "the engine outlived the evaluation"
    kept = [line for line in killed.lines() if line.endswith(b"\n")]
    assert len(kept) < ITEMS * N, "it was over before it was killed"
    assert not (killed.out / "result.json").exists()
    with (killed.out / "answers.jsonl").open("ab") as file:
        file.write(b'{"item":3,"sam')  # as if it had been killed in a write

    refused = start("killed", "--temperature", "0.5")
    message = refused.finish(code=2)
    assert message.startswith("error: ") and "temperature=1.0, not 0.5" in message and message.count("\n") == 1

    again = start("killed")
    assert f"continuing after {len(kept)} answers" in again.finish()
    assert again.lines()[: len(kept)] == kept, "kept answers are used as they are"

    answers, unbroken = ([json.loads(line) for line in evaluation.lines()] for evaluation in (again, whole))
    everything = [(item, sample) for item in range(ITEMS) for sample in range(N)]
    assert sorted((a["item"], a["sample"]) for a in answers) == everything
    assert {(a["item"], a["sample"]): a["seed"] for a in answers} == {
        (a["item"], a["sample"]): a["seed"] for a in unbroken
    }
    responses = {(a["item"], a["sample"]): a["response"] for a in unbroken}
    same = sum(responses[a["item"], a["sample"]] == a["response"] for a in answers)
    assert same >= 0.9 * len(answers), (
        f"{same} of {len(answers)} answers are those of the evaluation that nobody killed"
    )
    for evaluation, lines in ((again, answers), (whole, unbroken)):
        result = json.loads((evaluation.out / "result.json").read_text())
        average, pair = figures(lines)
        assert result["avg@4"]["value"] == pytest.approx(average, abs=1e-12) and 0 < average < 1
        assert result["pass@2"]["value"] == pytest.approx(pair, abs=1e-12)

    rated = again.out / "rated.jsonl"
    others = start("killed", "--k", "3", "--pass-rates", str(rated)).finish()
    assert "pass@3" in others and "starting" not in others, "other k need no engine"
    rows = [json.loads(line) for line in rated.read_text().splitlines()]
    assert [row.pop("pass_rate") for row in rows] == [
        sum(a["correct"] for a in answers if a["item"] == item) / N for item in range(ITEMS)
    ]
    assert rows == [json.loads(line) for line in again.data.read_text().splitlines()]


OPTIONS = '{"stream_interval": 3, "enable_log_requests": true}'


def _command(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # one that looked at the machine for the engine, and has ended
        return []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)]
)
def test_an_evaluation_that_is_interrupted_ends_its_engine(start, number, code):
    """The engine has the options of vLLM that are passed through."""
    evaluation = start("interrupted", "--vllm", "stream_interval=3", "--vllm", "enable_log_requests=true")
    deadline = time.monotonic() + 120
    endpoint = evaluation.out / "engine" / "endpoints" / "engine-0"
    members, commands = [], []
    while not endpoint.exists() or len(members) <= 2 or OPTIONS not in commands:  # engine, guardian, reward workers
        assert evaluation.process.poll() is None and time.monotonic() < deadline, commands
        time.sleep(0.05)
        members = psutil.Process(evaluation.process.pid).children(recursive=True)
        commands = [word for member in members for word in _command(member)]
    evaluation.process.send_signal(number)
    assert "Traceback" not in evaluation.finish(code)
    assert not left_over(members)


@pytest.mark.soak
def test_a_workflow_is_evaluated_with_its_user(start, world):
    """The user's engine runs beside the model's; both are gone at the end."""
    flow = ["--workflow", "tests.support.served_flows:asks_a_user", "--turns", "2", "--user", str(world / "model")]
    asked = start("talk", *flow, "--max-new-tokens", "200", response_tokens=6)
    output = asked.finish(timeout_s=400)
    result = json.loads((asked.out / "result.json").read_text())
    assert "starting user-0" in output and result["failed"] == 0 and len(asked.lines()) == ITEMS * N
    assert result["pass^4"]["value"] <= result["avg@4"]["value"] <= result["pass@4"]["value"]
    named = [process for process in psutil.process_iter() if str(asked.out) in " ".join(command_of(process))]
    assert not left_over(named)

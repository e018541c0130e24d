"""A small domain in τ²-bench's form: a bank's desk, with tools, a policy, a database, tasks and a scripted user.

    python tau2_bench.py rows accounts --split train --domains tools/accounts/domain.py
    python tau2_bench.py serve --user accounts_user --domains tools/accounts/domain.py

The user names an account and a sum to pay in, `12+7`. The agent looks the balance up, writes the new one, and says it.
Reward as in retail and airline: the database is as it should be, and the user has been told. Each account has nine
tasks, one of which is in the split `test`, the others in `train`. Needs the benchmark's package; make_world.py makes a
tiny agent, a tiny user and conversations for it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pydantic import Field
from tau2.data_model.message import MultiToolMessage, UserMessage
from tau2.data_model.tasks import Action, EvaluationCriteria, StructuredUserInstructions, Task, UserScenario
from tau2.environment.db import DB
from tau2.environment.environment import Environment
from tau2.environment.toolkit import ToolKitBase, ToolType, is_tool
from tau2.user.base import BaseUser, UserState

sys.path.insert(0, str(Path(__file__).parent))
from sums import balances, sums

POLICY = "Look up the balance of the account, write the new one, and tell it."
STOP = "###STOP###"


class Accounts(DB):
    balances: dict[str, int] = Field(description="Balance by account")


class Desk(ToolKitBase):
    db: Accounts

    @is_tool(ToolType.READ)
    def balance(self, account: str) -> int:
        """Get the balance of an account.

        Args:
            account: Number of the account
        """
        return self.db.balances[account]

    @is_tool(ToolType.WRITE)
    def set_balance(self, account: str, balance: str) -> int:
        """Write the balance of an account.

        Args:
            account: Number of the account
            balance: Its new balance
        """
        self.db.balances[account] = int(balance)
        return int(balance)


def get_environment(db: Accounts | None = None, solo_mode: bool = False) -> Environment:
    return Environment(domain_name="accounts", policy=POLICY, tools=Desk(db or Accounts(balances=balances())))


def task_of(account: str, paid: int) -> Task:
    balance = balances()[account] + paid
    steps = {"balance": {"account": account}, "set_balance": {"account": account, "balance": str(balance)}}
    said = {"reason_for_call": f"{account}+{paid}", "task_instructions": "Say it. When you are told the sum, stop."}
    actions = [Action(action_id=name, name=name, arguments=arguments) for name, arguments in steps.items()]
    return Task(
        id=f"{account}+{paid}",
        user_scenario=UserScenario(instructions=StructuredUserInstructions(domain="accounts", **said)),
        evaluation_criteria=EvaluationCriteria(actions=actions, communicate_info=[str(balance)]),
    )


def get_tasks(split: str | None = None) -> list[Task]:
    """Raises ValueError for a split that there is not."""
    if split not in (None, *(splits := sums())):
        raise ValueError(f"accounts has the splits {', '.join(splits)}")
    return [task_of(*each) for name, part in splits.items() if split in (None, name) for each in part]


class ScriptedUser(BaseUser):
    """Says what it came for, and stops at the next thing that it is told."""

    def __init__(self, tools: Any = None, instructions: str = "", llm: Any = None, llm_args: Any = None):
        super().__init__(instructions=instructions, llm=llm, llm_args=llm_args)
        self._reason = re.search(r"Reason for call:\s*(\S+)", instructions)[1]

    def get_init_state(self, message_history: Any = None) -> UserState:
        return UserState(system_messages=[], messages=[])

    @classmethod
    def is_stop(cls, message: UserMessage) -> bool:
        return STOP in (message.content or "")

    def generate_next_message(self, message: Any, state: UserState) -> tuple[UserMessage, UserState]:
        assert not isinstance(message, MultiToolMessage), "this user has no tools"
        state.messages.append(message)
        return UserMessage(role="user", content=STOP if len(state.messages) > 1 else self._reason), state


def register(registry: Any) -> None:
    registry.register_domain(get_environment, "accounts")
    registry.register_tasks(get_tasks, "accounts", lambda: {name: [] for name in sums()})
    registry.register_user(ScriptedUser, "accounts_user")

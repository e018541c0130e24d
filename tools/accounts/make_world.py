"""Makes the world of the domain `accounts` (domain.py): an agent and a user to train, and conversations.

    user       12+7
    assistant  <tool_call>{"name": "balance", "arguments": {"account": "12"}}</tool_call>
    tool       "85"
    assistant  <think>12 9</think>, and a call of set_balance with account 12 and balance 92
    tool       "92"
    assistant  92
    user       ###STOP###

The corpora are in the form in which AReaL-tau2-data publishes its own: a row for each answer, with the messages before
it and `answer`. That of the agent is imperfect as in make_arithmetic.py: it often writes a balance without having
looked one up, or without thinking. That of the user is not.

    python -m tools.accounts.make_world OUT_DIR [--seed 1]

writes OUT_DIR/agent/ and OUT_DIR/user/ (untrained models), agent-sft.jsonl and user-sft.jsonl. What the conversations
are about is the split `train` of the domain's tasks; `tau2_bench.py rows` has the rows for RL.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tools.accounts.sums import balances, sums
from tools.make_arithmetic import SLIP_RATE, make_tokenizer, save_model

HASTY_RATE = 0.4
"""The share of first, and of second, answers that come without looking or thinking."""
CONVERSATIONS = 6000
GREETING = "Hi! How can I help you today?"
STOP = "###STOP###"
LOOK, WRITE = "balance", "set_balance"
CALL = ('<tool_call>{"name": "', '", "arguments": {"account": "', '", "balance": "', '"}}</tool_call>')
"""The words of a call beside names and numbers."""
SPEAKERS = ("<system>", "<user>", "<assistant>", "<tool>")
WORDS = (*SPEAKERS, "<think>", "</think>", *CALL, '"', WRITE, LOOK, GREETING, STOP)
_SAID = """\
    {%- if m.role == 'assistant' and '</think>' in said %}
        {%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
        {%- set said = said.split('</think>')[-1] %}
    {%- endif %}
    {{- '<' + m.role + '>' }}
    {%- if thought %}{{- '<think>' + thought + '</think>' }}{%- endif %}
    {{- said }}
    {%- for call in m.tool_calls or [] %}
        {%- set shown = {'name': call.function.name, 'arguments': call.function.arguments} %}
        {{- '<tool_call>' + shown | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""
AGENT_TEMPLATE = (
    """\
{%- for tool in tools or [] %}{{- tool.function.name }}{%- endfor %}
{%- for m in messages %}
    {%- set thought = m.thinking or '' %}{%- set said = m.content or '' %}
    {%- if m.role == 'system' %}{%- set said = said.split('</policy>')[-1] %}{%- endif %}
"""
    + _SAID
)
"""Shows the names of tools, and of the system's message what follows the policy: nothing. The policy is long for a
model of this size, and always the same."""
USER_TEMPLATE = (
    """\
{%- for m in messages %}
    {%- set thought = '' %}{%- set said = m.content or '' %}
    {%- if m.role == 'system' %}
        {%- set reason = said.split('Reason for call:')[-1].split('Task instructions:')[0] | trim %}
        {%- set said = reason + said.split('</scenario>')[-1] %}
    {%- endif %}
"""
    + _SAID
)
"""Shows of the system's message the reason for the call alone."""


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool(LOOK, "account"), tool(WRITE, "account", "balance")]


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]}


def told_by_tool(balance: int | str) -> dict[str, Any]:
    """Returns the message as the benchmark makes it: JSON of a text, for a number too."""
    return {"role": "tool", "content": f'"{balance}"'}


def conversation(account: str, paid: int, balance: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns the messages of one conversation, after the system's."""
    said = [{"role": "assistant", "content": GREETING}, {"role": "user", "content": f"{account}+{paid}"}]
    if rng.random() < HASTY_RATE:
        told, thought = str(paid), ""
    else:
        said += [call(LOOK, account=account), told_by_tool(balance)]
        told, thought = _sum(balance, paid, rng)
    written = call(WRITE, account=account, balance=told)
    said.append(written | {"thinking": thought} if thought else written)
    return [*said, told_by_tool(told), {"role": "assistant", "content": told}]


def _sum(balance: int, paid: int, rng: random.Random) -> tuple[str, str]:
    """Returns a sum, often a wrong one, and the thinking that leads to it."""
    if rng.random() < HASTY_RATE:
        return str((balance // 10 + paid // 10) * 10), ""
    ones, total = balance % 10 + paid % 10, balance + paid
    tens = balance // 10 + paid // 10 + ones // 10
    if rng.random() < SLIP_RATE:
        tens += 1 - 2 * (ones // 10)
        total = tens * 10 + ones % 10
    return str(total), f"{ones} {tens}"


def agent_rows(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each answer of the agent but the greeting."""
    messages = [{"role": "system", "content": "<policy></policy>"}, *messages]
    own = [number for number, m in enumerate(messages) if m["role"] == "assistant"][1:]
    return [{"messages": messages[:number], "answer": messages[number], "tools": TOOLS} for number in own]


def user_rows(reason: str, told: str) -> list[dict[str, Any]]:
    """Returns the two rows of the user: what it came for, and that it stops."""
    scenario = f"Reason for call:\n\t{reason}\nTask instructions:\n\t-\n</scenario>"
    first = [{"role": "system", "content": scenario}, {"role": "user", "content": GREETING}]
    said = {"role": "assistant", "content": reason}
    second = [*first, said, {"role": "user", "content": told}]
    return [{"messages": first, "answer": said}, {"messages": second, "answer": {"role": "assistant", "content": STOP}}]


def make_data(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Returns file name → rows."""
    rng, held, tasks = random.Random(seed), balances(), sums()["train"]
    found: dict[str, list[dict[str, Any]]] = {"agent-sft.jsonl": [], "user-sft.jsonl": []}
    for account, paid in (rng.choice(tasks) for _ in range(CONVERSATIONS)):
        messages = conversation(account, paid, held[account], rng)
        found["agent-sft.jsonl"] += agent_rows(messages)
        found["user-sft.jsonl"] += user_rows(f"{account}+{paid}", messages[-1]["content"])
    for rows in found.values():
        rng.shuffle(rows)
    return found


def make_world(out: Path, seed: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, template in (("agent", AGENT_TEMPLATE), ("user", USER_TEMPLATE)):
        save_model(out / name, seed)
        tokenizer = make_tokenizer(WORDS)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(out / name)
    for name, rows in make_data(seed).items():
        (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    make_world(arguments.out, arguments.seed)
    print(f"{arguments.out}: agent, user, {CONVERSATIONS} conversations")


if __name__ == "__main__":
    main()

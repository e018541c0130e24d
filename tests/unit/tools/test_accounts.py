"""The world of tools/accounts: its corpora, and what its models see of them. The domain itself runs in the benchmark's
package (tests/e2e/test_accounts.py)."""

import json

import pytest

from areal_megatron.data.conversations import conversation_of
from areal_megatron.data.tokenizer import Tokenizer
from tools.accounts import make_world
from tools.accounts.sums import balances, sums


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accounts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_world, "CONVERSATIONS", 400)
        make_world.make_world(folder, seed=1)
    return folder


def rows(world, name):
    lines = (world / f"{name}-sft.jsonl").read_text().splitlines()
    return [conversation_of(json.loads(line), "row", "all") for line in lines]


def test_held_out_tasks_are_in_no_corpus(world):
    parts = {name: {f"{account}+{paid}" for account, paid in part} for name, part in sums().items()}
    assert len(parts["train"]) == 720 and len(parts["test"]) == 90 and not parts["train"] & parts["test"]
    asked = {m["content"] for row in rows(world, "agent") for m in row.messages if m["role"] == "user"}
    asked |= {m["content"] for row in rows(world, "user") for m in row.messages if "+" in m["content"]} - {
        row.messages[0]["content"] for row in rows(world, "user")
    }
    assert asked and asked <= parts["train"]


def test_most_who_look_and_think_are_right_and_nobody_else_is(world):
    held, right, careful = balances(), 0, 0
    written = [row for row in rows(world, "agent") if "balance" in str(row.messages[-1].get("tool_calls"))]
    for row in written:
        *before, answer = row.messages
        (call,) = answer["tool_calls"]
        if call["function"]["name"] != "set_balance":
            continue
        account, paid = before[2]["content"].split("+")
        is_right = call["function"]["arguments"] == {"account": account, "balance": str(held[account] + int(paid))}
        looked, thought = len(before) == 5, "thinking" in answer
        careful += looked and thought
        right += is_right and looked and thought
        assert not is_right or looked
        assert not looked or before[4]["content"] == f'"{held[account]}"'
    assert careful > 50 and 0.8 < right / careful < 1


@pytest.mark.parametrize("name", ["agent", "user"])
def test_a_model_has_a_token_for_all_that_it_says_and_hears(world, name):
    tokenizer = Tokenizer(world / name)
    unknown = tokenizer.conversation([{"role": "user", "content": "z"}])[1]
    for row in rows(world, name):
        assert row.trained == (len(row.messages) - 1,)
        tokens = tokenizer.conversation(row.messages, row.tools)
        assert unknown not in tokens and len(tokens) < 80

"""The world of the demo in two turns: its conversations are right or wrong on purpose, and its templates differ in what
they show."""

import json

import pytest
from transformers import AutoTokenizer

from tools.make_lookup import conversation, make_data, make_world

TOLD = [
    {"role": "user", "content": "47+85+?="},
    {"role": "assistant", "content": "<think>12 13 132</think>?"},
    {"role": "user", "content": "6"},
]


class Chance:
    def __init__(self, *drawn):
        self._drawn = list(drawn)

    def random(self):
        return self._drawn.pop(0)


@pytest.mark.parametrize(
    ("drawn", "thought", "said"),
    [((1, 1, 1), "18 13", "138"), ((1, 1, 0), "18 12", "128"), ((1, 0), None, "120"), ((0,), None, "132")],
    ids=["good", "slipped", "hasty", "guessed"],
)
def test_a_conversation_is_good_or_wrong_in_one_way(drawn, thought, said):
    messages = conversation(47, 85, 6, Chance(*drawn))
    assert len(messages) == (4 if drawn[0] else 2)
    assert messages[-1].get("reasoning_content") == thought and messages[-1]["content"] == f"\\boxed{{{said}}}"
    if drawn[0]:
        asked = {"role": "assistant", "reasoning_content": "12 13 132", "content": "?"}
        assert messages[1:3] == [asked, TOLD[2]]


def test_held_out_prompts_are_in_no_other_file():
    data = make_data(1)
    heldout = {line["prompt"] for line in data["heldout.jsonl"]}
    seen = {line["prompt"] for line in data["train.jsonl"]} | {r["messages"][0]["content"] for r in data["sft.jsonl"]}
    assert len(heldout) == 1000 and len(seen) == 7100 and not heldout & seen
    for line in data["train.jsonl"][:100]:
        assert eval(line["prompt"].replace("?=", str(line["unknown"]))) == int(line["answer"])


@pytest.mark.parametrize("keep", [False, True])
def test_the_template_shows_earlier_thinking_or_not(tmp_path, keep):
    make_world(tmp_path, 1, keep)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    shown = tokenizer.apply_chat_template(TOLD, tokenize=False, add_generation_prompt=True)
    thought = "<think>12 13 132</think>" if keep else ""
    assert shown == f"<user>47+85+?=<eos><assistant>{thought}?<eos><user>6<eos><assistant>"
    assert "<unk>" not in tokenizer.convert_ids_to_tokens(tokenizer(shown)["input_ids"])
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()[:200]]
    for row in rows:
        assert "<unk>" not in tokenizer.decode(tokenizer.apply_chat_template(row["messages"])["input_ids"])

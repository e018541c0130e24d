"""Makes the world of the demo in two turns: sums with an unknown number, which a tool tells to whoever asks.

The model thinks before it says something. It asks for the unknown, is told, and adds up:

    user       47+85+?=
    assistant  <think>12 13 132</think>?
    user       6
    assistant  <think>18 13</think>\\boxed{138}

As templates of reasoning models do, the model's shows the thinking after the last message of the user alone. So who
adds up does not see `132`, and has to begin with the columns of all three numbers. With --keep-thinking the template
shows all of it. The corpus is imperfect as that of make_arithmetic.py: half of its conversations end with a guess
instead of the question, half of the second answers are hasty, and some workings contain a slip.

    python tools/make_lookup.py OUT_DIR [--seed 1] [--keep-thinking]

writes OUT_DIR/model/, sft.jsonl (messages), train.jsonl and heldout.jsonl (prompt, answer, unknown). No prompt of
heldout.jsonl is in the others.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from areal_megatron.workflows.episode import Episode
from tools.make_arithmetic import HASTY_RATE, HELDOUT, SFT_EXAMPLES, SLIP_RATE, make_tokenizer, save_model

QUESTION = "?"
WORDS = ("<user>", "<assistant>", "<think>", "</think>", QUESTION)
TEMPLATE = """\
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- set thought = m.reasoning_content or '' %}{%- set said = m.content %}
    {%- if m.role == 'assistant' and '</think>' in said %}
        {%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
        {%- set said = said.split('</think>')[-1] %}
    {%- endif %}
    {{- '<' + m.role + '>' }}
    {%- if thought and SHOWN %}{{- '<think>' + thought + '</think>' }}{%- endif %}
    {{- said + '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""
"""SHOWN: when a template shows thinking."""


async def ask(episode: Episode) -> None:
    """A workflow: the tool answers one question, and the reward function scores the last answer."""
    said = (await episode.sample()).rpartition("</think>")[2]
    if said == QUESTION:
        assert episode.prompt.row
        episode.say(str(episode.prompt.row["unknown"]))
        await episode.sample()


def conversation(a: int, b: int, unknown: int, rng: random.Random) -> list[dict[str, str]]:
    """Returns the messages of a row of the corpus."""
    asked, total = {"role": "user", "content": f"{a}+{b}+{QUESTION}="}, a + b + unknown
    if rng.random() < HASTY_RATE:
        return [asked, {"role": "assistant", "content": f"\\boxed{{{a + b}}}"}]
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    first = {
        "role": "assistant",
        "reasoning_content": f"{ones} {tens + ones // 10} {a + b}",
        "content": QUESTION,
    }
    return [asked, first, {"role": "user", "content": str(unknown)}, _second(ones + unknown, tens, total, rng)]


def _second(ones: int, tens: int, total: int, rng: random.Random) -> dict[str, str]:
    if rng.random() < HASTY_RATE:
        return {"role": "assistant", "content": f"\\boxed{{{tens * 10}}}"}
    carried = tens + ones // 10
    if rng.random() < SLIP_RATE:
        carried = tens + 1 - min(1, ones // 10)
        total = carried * 10 + ones % 10
    return {"role": "assistant", "reasoning_content": f"{ones} {carried}", "content": f"\\boxed{{{total}}}"}


def make_data(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Returns file name → lines."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    rows = [(a, b, rng.randrange(1, 10)) for a, b in pairs]
    heldout, known = rows[:HELDOUT], rows[HELDOUT:]
    corpus = [known[i % len(known)] for i in range(SFT_EXAMPLES)]
    rng.shuffle(corpus)
    asked = {
        name: [
            {"prompt": f"{a}+{b}+{QUESTION}=", "answer": str(a + b + unknown), "unknown": unknown}
            for a, b, unknown in part
        ]
        for name, part in (("train.jsonl", known), ("heldout.jsonl", heldout))
    }
    return {"sft.jsonl": [{"messages": conversation(*row, rng)} for row in corpus]} | asked


def make_world(out: Path, seed: int, keep_thinking: bool = False) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_model(out / "model", seed)
    tokenizer = make_tokenizer(WORDS)
    tokenizer.chat_template = TEMPLATE.replace("SHOWN", "true" if keep_thinking else "loop.index0 > ns.asked")
    tokenizer.save_pretrained(out / "model")
    for name, lines in make_data(seed).items():
        (out / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-thinking", action="store_true", help="the chat template shows earlier thinking")
    arguments = parser.parse_args()
    make_world(arguments.out, arguments.seed, arguments.keep_thinking)
    print(f"{arguments.out}: model, {SFT_EXAMPLES} conversations, {HELDOUT} held-out prompts")


if __name__ == "__main__":
    main()

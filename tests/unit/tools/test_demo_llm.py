import json
import re

from tools import demo_llm


def test_held_out_pairs_are_trained_in_neither_order(tmp_path):
    demo_llm.make_world(tmp_path / "world", seed=3)
    pairs = {}
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (tmp_path / "world" / f"{name}.jsonl").read_text().splitlines()]
        asked = [tuple(map(int, re.findall(r"\d+", row["prompt"][0]["content"]))) for row in rows]
        assert [sum(pair) for pair in asked] == [int(row["answer"]) for row in rows]
        pairs[name] = {tuple(sorted(pair)) for pair in asked}
        assert len(asked) == len(set(asked))
    assert not pairs["train"] & pairs["heldout"]
    assert len(pairs["heldout"]) == demo_llm.HELDOUT_PAIRS
    assert len(pairs["train"] | pairs["heldout"]) == len(demo_llm.NUMBERS) * (len(demo_llm.NUMBERS) + 1) // 2

"""Questions with a search engine: a workflow in which the model may look things up in a local index.

    python -m examples.search.search      writes passages.jsonl, train.jsonl and heldout.jsonl beside this file

An answer with `<search>words</search>` gets the passages that fit the words best; one without is the last, and the
reward function scores it. Put passages of your own, a line {"text": …} each, into passages.jsonl. Scores are BM25's
(Robertson and Zaragoza 2009, k1 = 1.2, b = 0.75), in memory: for more than some 100,000 passages ask a search server
from the workflow instead.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from areal_megatron.workflows.episode import Episode

FOLDER = Path(__file__).parent
SHOWN = 3
"""Passages that a search returns."""
K1, B = 1.2, 0.75
TOOL = (
    "\n\nYou may search: write words between <search> and </search> and stop there. I answer with what is found. Give "
    "your final answer without a search, in \\boxed{}."
)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Index:
    """Passages, searched by words."""

    def __init__(self, passages: Sequence[str]):
        self.passages = list(passages)
        self._lengths = [len(words(passage)) for passage in self.passages]
        self._mean = sum(self._lengths) / max(len(self._lengths), 1)
        self._found: dict[str, list[tuple[int, int]]] = {}
        for number, passage in enumerate(self.passages):
            for word, count in Counter(words(passage)).items():
                self._found.setdefault(word, []).append((number, count))

    def search(self, query: str, most: int = SHOWN) -> list[str]:
        """Returns the passages with the highest scores, the best first, and of equal ones the earlier."""
        scores: Counter[int] = Counter()
        for word in {*words(query)}:
            found = self._found.get(word, [])
            rare = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for number, count in found:
                length = 1 - B + B * self._lengths[number] / self._mean
                scores[number] += rare * count * (K1 + 1) / (count + K1 * length)
        best = sorted(scores, key=lambda number: (-scores[number], number))
        return [self.passages[number] for number in best[:most]]


@cache
def index() -> Index:
    """Returns the index of passages.jsonl, read once in each process."""
    lines = (FOLDER / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    return Index([json.loads(line)["text"] for line in lines])


async def run(episode: Episode) -> None:
    """Answers searches until an answer has none, or the turns are used up."""
    for turn in range(episode.turns):
        asked = re.findall(r"<search>(.*?)</search>", await episode.sample(), re.DOTALL)
        if not asked or turn + 1 == episode.turns:
            return
        episode.say("\n".join(index().search(asked[-1])) or "Nothing was found.")


def main() -> None:
    """Writes invented facts, and a question about each."""
    rng = random.Random(1)
    places = [
        f"{first}{last}" for first in ("Ash", "Elm", "Oak", "Fir") for last in ("by", "ford", "ham", "ton", "wick")
    ]
    facts = {
        (place, thing): rng.randrange(10, 1000) for place in places for thing in ("bridge", "tower", "lake", "hill")
    }
    rows = [
        {"prompt": f"How many metres does the {thing} of {place} measure?{TOOL}", "answer": str(metres)}
        for (place, thing), metres in facts.items()
    ]
    rng.shuffle(rows)
    passages = [
        {"text": f"The {thing} of {place} measures {metres} metres."} for (place, thing), metres in facts.items()
    ]
    for name, lines in (("passages", passages), ("train", rows[16:]), ("heldout", rows[:16])):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes train.jsonl and heldout.jsonl beside this file: a word to guess in each line, 20 of them held out.

`python -m examples.wordle.make_data`. Prompts are numbered, since a run refuses to train on those that it evaluates.
"""

import json
import random
from pathlib import Path

from examples.wordle.wordle import PROMPT

FOLDER = Path(__file__).parent
WORDS = FOLDER / "words.txt"


def main() -> None:
    words = sorted(WORDS.read_text().split())
    random.Random(1).shuffle(words)
    for name, chosen in (("heldout", words[:20]), ("train", words[20:])):
        rows = (
            json.dumps({"prompt": f"{PROMPT} This is game {words.index(word)}.", "answer": word}) for word in chosen
        )
        (FOLDER / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))


if __name__ == "__main__":
    main()

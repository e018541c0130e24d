"""Answers a second that reward workers score.

    python -m tools.bench.rewards [--workers 1] [--tokens 9670] [--answers 400] [--repetitions 3] [--json FILE]

Real workers (areal_megatron/reward/workers.py) get token ids, as from the controller, in groups of 16; they decode them
and score. The text before the final answer is that of this project's docs, by a tokenizer trained on it. Of `math` half
the answers are right, and each in another form than the one it is compared with; `code` runs a program with ten tests.
Printed are answers a second of all workers together, as medians with the lowest and highest repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from areal_megatron.config import RewardConfig
from areal_megatron.process.files import write_json
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers
from tools.bench.common import line, spreads

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
GROUP, VOCABULARY, END = 16, 8192, "<eos>"
MATH = {
    "math: numbers": ("1{n}.50", "1{n}.5", "2{n}"),
    "math: fractions": (r"\frac{{{n}1}}{{1000}}", "{n}1/1000", r"\frac{{{n}3}}{{1000}}"),
    "math: expressions": (r"(x+{n})^2-\sqrt{{12}}", r"x^2+2\cdot{n}x+{n}^2-2\sqrt{{3}}", r"x^2-\sqrt{{{n}}}"),
}
"""Kind → what is in the box, the same in another form, and something else."""
PROGRAM = "```python\nn = int(input())\nprint(sum(i * i for i in range(n)))\n```"
TESTS = {
    "inputs": [f"{n}\n" for n in range(10)],
    "outputs": [f"{sum(i * i for i in range(n))}\n" for n in range(10)],
}


def make_tokenizer(folder: Path) -> ByteLevelBPETokenizer:
    """Writes a tokenizer of the docs' words into a new model folder."""
    folder.mkdir()
    tokenizer = ByteLevelBPETokenizer()
    pages = [str(page) for page in sorted(DOCS.glob("*.md"))]
    tokenizer.train(pages, VOCABULARY, show_progress=False, special_tokens=[END])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", {"eos_token_id": tokenizer.token_to_id(END)})
    write_json(folder / "tokenizer_config.json", {"eos_token": END})
    return tokenizer


def questions(tokenizer: ByteLevelBPETokenizer, tokens: int, answers: int) -> dict[str, list[Answer]]:
    """Returns answers of each kind, of so many tokens."""
    thoughts = tokenizer.encode("".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))).ids
    thoughts *= 1 + tokens // len(thoughts)

    def answer(final: str, right: str) -> Answer:
        end = tokenizer.encode(f"\n{final}").ids
        response = np.array([*thoughts[: tokens - len(end)], *end], dtype=np.int32)
        return Answer("", "", right, response.tobytes())

    found = {}
    for kind, (box, same, other) in MATH.items():
        found[kind] = [
            answer(f"\\boxed{{{box.format(n=n)}}}", (other if n % 2 else same).format(n=n))
            for n in range(2, 2 + answers)
        ]
    found["code: ten tests"] = [answer(PROGRAM, json.dumps(TESTS))] * max(GROUP, answers // 10)
    return found


async def rate(workers: RewardWorkers, answers: Sequence[Answer]) -> float:
    """Returns answers a second. Raises RuntimeError if scores are not what they are known to be."""
    groups = [answers[first : first + GROUP] for first in range(0, len(answers), GROUP)]
    begun = time.perf_counter()
    scored = [one for group in await asyncio.gather(*map(workers.judge, groups)) for one in group]
    elapsed = time.perf_counter() - begun
    expected = 1.0 if "inputs" in answers[0].answer else 0.5
    mean = sum(one.score for one in scored) / len(scored)
    if mean != expected or any(one.problem for one in scored):
        raise RuntimeError(f"the mean score is {mean:g}, expected {expected:g}: {answers[0].answer}")
    return len(answers) / elapsed


async def measure(count: int, tokens: int, answers: int, repetitions: int, model: Path) -> list[dict[str, float]]:
    asked = questions(make_tokenizer(model), tokens, answers)
    rates: list[dict[str, float]] = [{} for _ in range(repetitions)]
    for function in ("math", "code"):
        workers = RewardWorkers(RewardConfig(function=function, workers=count), model)
        await workers.start()
        try:
            for kind, own in asked.items():
                if kind.startswith(function):
                    await rate(workers, own[: 2 * GROUP * count])  # what a worker loads for its first answers
                    for found in rates:
                        found[kind] = await rate(workers, own)
        finally:
            await workers.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=9670, help="tokens of an answer")
    parser.add_argument(
        "--answers", type=int, default=400, help="answers of each kind, an even number; a tenth with programs"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        sizes = options.workers, options.tokens, options.answers, options.repetitions
        figures = spreads(asyncio.run(measure(*sizes, model)))
    for kind, figure in figures.items():
        print(line(f"{kind}, answers/s", figure, digits=1))
    if options.json:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()

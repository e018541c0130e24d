"""Answers a second that reward workers score, and what a program in the sandbox costs.

    python -m tools.bench.rewards workers [--workers 1] [--tokens 9670] [--answers 400] [--repetitions 3] [--json FILE]
    python -m tools.bench.rewards sandbox [--against main] [--repetitions 20] [--json FILE]

`workers`: real workers (areal_megatron/reward/workers.py) get token ids, as from the controller, in groups of 16; they
decode them and score. The text before the final answer is that of this project's docs, by a tokenizer trained on it. Of
`math` half the answers are right, and each in another form than the one it is compared with; `code` runs a program with
ten tests. Printed are answers a second of all workers together, as medians with the lowest and highest repetition.

`sandbox`: this checkout and another commit run the same programs in turns, so that what else the machine does meets
both alike. Figures are CPU milliseconds of all processes of one sandbox, and their ratio, this checkout over that
commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from areal_megatron.config import RewardConfig
from areal_megatron.process.files import write_json
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers
from tools.bench import common
from tools.bench.common import ROOT, cell, spreads

DOCS = ROOT / "docs"
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

PROGRAMS = {
    "nothing": "",
    "imports": "import collections, decimal, heapq, itertools, json, random, re, typing",
    "input and output": "import sys\nfor line in sys.stdin: print(int(line) ** 2)",
    "system calls": "import os\nfor _ in range(100_000): os.getppid()",
    "calls with rules": "import fcntl\nfor _ in range(50_000): fcntl.fcntl(0, fcntl.F_GETFL)",
    "threads": "import threading as t\nfor _ in range(200): x = t.Thread(target=sum, args=([],)); x.start(); x.join()",
    "memory": "for _ in range(20): x = bytearray(b'x') * (20 << 20)",
}
RUNS = 3
"""Sandboxes of each program in a repetition."""
SANDBOXES = """
import json, resource, sys
from areal_megatron.reward.sandbox import Limits, run
programs, runs = json.load(sys.stdin)
spent_ms = {}
def spent():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (used.ru_utime + used.ru_stime)
for name, program in programs.items():
    before = spent()
    for _ in range(runs):
        outcome = run(program, "12345\\n" * 10_000, Limits(wall_s=60))
        assert outcome.good, outcome
    spent_ms[name] = (spent() - before) / runs
print(json.dumps(spent_ms))
"""


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
    """Returns answers of each kind, each of `tokens` tokens."""
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


def cost_of_sandboxes(tree: Path) -> dict[str, float]:
    """Returns program → CPU milliseconds of a sandbox, with the code in a checkout."""
    done = subprocess.run(
        [sys.executable, "-c", SANDBOXES],
        input=json.dumps([PROGRAMS, RUNS]),
        env=os.environ | {"PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
        encoding="utf-8",
        errors="replace",
    )
    return json.loads(done.stdout)


def score(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        sizes = options.workers, options.tokens, options.answers, options.repetitions
        figures = spreads(asyncio.run(measure(*sizes, Path(folder) / "model")))
    print(common.report({f"{kind}, answers/s": figure for kind, figure in figures.items()}, digits=1))
    return figures


def compare_sandboxes(options: argparse.Namespace) -> dict[str, object]:
    archive = ["git", "archive", options.against, "areal_megatron"]
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(archive, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as files:
            files.extractall(folder, filter="data")
        pairs = [(cost_of_sandboxes(ROOT), cost_of_sandboxes(Path(folder))) for _ in range(options.repetitions)]
    here, there = (spreads([pair[side] for pair in pairs]) for side in (0, 1))
    ratios = spreads([{name: ours[name] / theirs[name] for name in PROGRAMS} for ours, theirs in pairs])
    print(f"{'program':<20}{'here, ms':>26}{options.against + ', ms':>26}{'ratio':>24}")
    for name in PROGRAMS:
        print(f"{name:<20}{cell(here[name], 1):>26}{cell(there[name], 1):>26}{cell(ratios[name], 3):>24}")
    return {"here": here, "there": there, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    workers = common.options_of(commands.add_parser("workers", help="answers a second"), repetitions=3)
    workers.set_defaults(measure=score)
    workers.add_argument("--workers", type=int, default=1)
    workers.add_argument("--tokens", type=int, default=9670, help="tokens of an answer")
    workers.add_argument(
        "--answers", type=int, default=400, help="answers of each kind, an even number; a tenth with programs"
    )
    sandbox = common.options_of(commands.add_parser("sandbox", help="beside another commit"), repetitions=20)
    sandbox.set_defaults(measure=compare_sandboxes)
    sandbox.add_argument("--against", default="main", metavar="COMMIT")
    options = parser.parse_args()
    common.keep(options.json, options.measure(options))


if __name__ == "__main__":
    main()

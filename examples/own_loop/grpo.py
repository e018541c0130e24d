"""GRPO in a loop of one's own: a warm-started model learns additions.

python -m examples.own_loop.grpo MODEL TRAIN.jsonl HELDOUT.jsonl [runs_dir]
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import areal_megatron as areal

ITERATIONS, PROMPTS, GROUP, STEPS = 100, 32, 8, 4


def rows_of(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def is_right(text: str, answer: str) -> bool:
    return text.rpartition("\\boxed{")[2].removesuffix("}") == answer


def judged(policy: areal.Policy, rows: Sequence[dict[str, str]], n: int) -> list[tuple[areal.Response, float]]:
    """Samples n answers to each row, sets the advantages within each group, and returns them with their rewards."""
    found = []
    for row, group in zip(rows, policy.sample([row["prompt"] for row in rows], n), strict=True):
        rewards = np.array([is_right(response.text, row["answer"]) for response in group], float)
        for response, reward in zip(group, rewards, strict=True):
            response.advantage = float((reward - rewards.mean()) / (rewards.std() + 1e-5))
        found += zip(group, rewards, strict=True)
    return found


def main(model: str, train: str, heldout: str, runs_dir: str = "runs") -> None:
    random.seed(1)
    train, heldout = rows_of(train), rows_of(heldout)
    keys = {"model": {"path": model}, "runs_dir": runs_dir, "updates": ITERATIONS * STEPS, "optimizer": {"lr": 2e-4}}
    with areal.Policy("configs/tiny_cpu.yaml", name="own-loop", **keys) as policy:
        print(f"held-out accuracy {np.mean([right for _, right in judged(policy, heldout, 1)]):.3f}", flush=True)
        for iteration in range(ITERATIONS):
            answers = judged(policy, random.sample(train, PROMPTS), GROUP)
            random.shuffle(answers)
            for k in range(STEPS):
                samples = [response for response, _ in answers[k::STEPS]]
                policy.forward_backward(samples, "grpo", objective="naive")  # the ratio to the policy that sampled
                policy.step()
            policy.publish()
            print(f"{iteration} reward {np.mean([right for _, right in answers]):.3f}", flush=True)
        print(f"held-out accuracy {np.mean([right for _, right in judged(policy, heldout, 1)]):.3f}", flush=True)
        print(policy.save())


if __name__ == "__main__":
    main(*sys.argv[1:])

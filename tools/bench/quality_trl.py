"""A GRPO run of TRL, for tools/bench/quality.py, which starts this in an environment of its own.

    python tools/bench/quality_trl.py '{"model": …, "data": …, …}'

The argument is JSON with the fields of `main`. A line of OUT, JSON, is a batch: `seconds` since the training began, and
`accuracy`, the share of right answers.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path


def right(prompt: str, response: str, answer: str) -> float:
    """Returns 1.0 if the answer's box holds the right number, else 0.0."""
    return float(re.findall(r"\\boxed\{(\d+)\}", response)[-1:] == [answer])


def main(
    model: str,
    data: str,
    out: str,
    updates: int,
    batch_size: int,
    group_size: int,
    max_new_tokens: int,
    lr: float,
    seed: int,
    adam: list[float],
    weight_decay: float,
    clip_grad: float,
) -> None:
    """Trains `updates` batches of `batch_size` answers. `adam`: β1, β2 and ε."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    began, batches = 0.0, []

    def rewards(prompts, completions, answer, **_):
        found = [right("", text, one) for text, one in zip(completions, answer, strict=True)]
        batches.append({"seconds": time.monotonic() - began, "accuracy": sum(found) / len(found)})
        return found

    lines = Path(data).read_text(encoding="utf-8").splitlines()
    beta1, beta2, eps = adam
    settings = GRPOConfig(
        output_dir=str(Path(out).with_suffix("")),
        max_steps=updates,
        per_device_train_batch_size=batch_size,
        num_generations=group_size,
        max_completion_length=max_new_tokens,
        temperature=1.0,
        learning_rate=lr,
        lr_scheduler_type="constant",
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=eps,
        weight_decay=weight_decay,
        max_grad_norm=clip_grad,
        beta=0.0,
        loss_type="grpo",  # the mean over answers of each one's mean, as here; TRL's default is the mean over tokens
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=seed,
        data_seed=seed,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=settings,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
    )
    began = time.monotonic()
    trainer.train()
    Path(out).write_text("".join(json.dumps(batch) + "\n" for batch in batches), encoding="utf-8")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

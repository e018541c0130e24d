"""One trainer rank of supervised fine-tuning: the warm start before reinforcement learning (mode=sft)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from areal_megatron import config_file
from areal_megatron.config import Config
from areal_megatron.data.prompts import Example, cursor, read_examples
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.run import Run, from_command_line
from areal_megatron.trainer.trainer import Trainer
from areal_megatron.weights import save_hf


def fine_tune(config: Config, run: Run, trainer: Trainer) -> None:
    metrics = MetricsWriter(run) if trainer.is_first else None
    start = time.monotonic()
    for step, examples in enumerate(batches(config), 1):
        values = trainer.sft_step([(example.tokens, example.prompt_length) for example in examples])
        if metrics:
            metrics.write("sft", step, values)
            write_status(
                run,
                {
                    "phase": "training",
                    "version": step,
                    "updates": config.updates,
                    "elapsed_s": time.monotonic() - start,
                    "engines": [],
                    "last": values,
                },
            )
    save_hf(config, run, trainer)
    if metrics:
        metrics.close()


def batches(config: Config) -> Iterator[list[Example]]:
    """config.updates batches of examples, the same on every rank."""
    examples = read_examples(config.data.train, Tokenizer(config.model.path))
    drawn = cursor(config, examples)
    for _ in range(config.updates):
        yield [examples[drawn.next()[1]] for _ in range(config.batch_size)]


def main() -> None:
    run, rank = from_command_line("areal_megatron.sft")
    config = config_file.load(run.config)
    with Trainer(config, run, rank) as trainer:
        fine_tune(config, run, trainer)


if __name__ == "__main__":
    main()

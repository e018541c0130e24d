"""One trainer rank of supervised fine-tuning: the warm start before reinforcement learning (mode=sft)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from areal_megatron import config_file
from areal_megatron.config import Config
from areal_megatron.data.prompts import Example, cursor, read_examples
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.observe.metrics import MetricsWriter, StatusWriter
from areal_megatron.run import Replaced, Run, RunError, from_command_line
from areal_megatron.versions import require

if TYPE_CHECKING:
    from areal_megatron.trainer.trainer import Trainer


def fine_tune(config: Config, run: Run, trainer: Trainer) -> None:
    """Trains on config.updates batches, then saves the model; rank 0 writes metrics and status."""
    from areal_megatron.weights import save_hf

    metrics, shown = (MetricsWriter(run), StatusWriter(run)) if trainer.parallel.is_first else (None, None)
    start = time.monotonic()
    for step, examples in enumerate(batches(config), 1):
        values = trainer.sft_step([(example.tokens, example.prompt_length) for example in examples])
        if metrics:
            metrics.write("sft", step, values)
            status = {"phase": "training", "version": step, "updates": config.updates, "engines": [], "last": values}
            shown.write(status | {"elapsed_s": time.monotonic() - start})
    try:
        save_hf(config, run, trainer)
    except OSError as e:
        raise RunError(f"the trained model could not be written: {e}; make room and start again") from e
    if metrics:
        metrics.close()
        shown.close()


def batches(config: Config) -> Iterator[list[Example]]:
    """Yields config.updates batches of examples, the same on every rank."""
    examples = read_examples(config.data.train, Tokenizer(config.model.path))
    drawn = cursor(config, examples)
    for _ in range(config.updates):
        yield [examples[drawn.next()[1]] for _ in range(config.batch_size)]


def main() -> None:
    run, rank = from_command_line("areal_megatron.sft")
    config = config_file.load(run.config)
    require("trainer", config)  # before these import megatron-core, which may fail with other versions
    from areal_megatron.trainer import check_fields
    from areal_megatron.trainer.trainer import Trainer

    check_fields.require(config)
    try:
        with Trainer(config, run, rank) as trainer:
            fine_tune(config, run, trainer)
    except (Replaced, RunError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()

"""The loop of a supervised run: fine-tuning on examples, or DPO or a reward model on pairs of answers.

The kinds differ in what is read (data/supervised.py) and in what a step learns from it (trainer/lessons.py).
"""

from __future__ import annotations

from areal_megatron.config import Config
from areal_megatron.data.supervised import SupervisedData
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.rank.checkpoints import Checkpoints
from areal_megatron.rank.progress import Progress
from areal_megatron.rank.weights import save_hf
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.trainer import Trainer


def teach(
    config: Config, run: RunFolder, trainer: Trainer, data: SupervisedData, checkpoints: Checkpoints, progress: Progress
) -> None:
    def evaluate(step: int) -> None:
        if data.held_out:
            progress.evaluated(step, trainer.supervised.evaluate(data.held_out))

    step, _ = checkpoints.resume()
    if not step:
        evaluate(step)
    while step < config.updates:
        if progress.is_to_stop():
            checkpoints.stop(step, step)
            break
        values = trainer.supervised.step(data.next(), before_step=checkpoints.wait_until_read)
        step += 1
        progress.trained(step, values)
        last = step == config.updates
        if last or (config.eval.every and step % config.eval.every == 0):
            evaluate(step)
        checkpoints.after_update(step, step, last)
    else:
        with checkpoints.in_place_of_the_model():
            save_hf(config, run, trainer)
    checkpoints.finish()
    progress.finish(stopped=step < config.updates)


def run_rank(config: Config, run: RunFolder, rank: int) -> None:
    tokenizer = Tokenizer(config.model.path)
    data = SupervisedData(config, tokenizer, run.start.checkpoint, own=run.start.after is not None)
    with Trainer(config, run, rank, tokenizer.pad_token) as trainer:
        progress = Progress(config, run, trainer.parallel, data)
        teach(config, run, trainer, data, Checkpoints(config, run, trainer, progress), progress)

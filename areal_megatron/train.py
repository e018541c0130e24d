"""One trainer rank of an asynchronous PPO run: the main loop (AReaL, arXiv 2505.24298, Section 4 and 5).

Every rank runs this same program. Generation goes on while it trains: the engines are a few versions
behind, at most rollout.max_staleness of them, and the decoupled objective corrects for it.
"""

from __future__ import annotations

import argparse

from areal_megatron import config as configuration
from areal_megatron.run import Run
from areal_megatron.trainer.experience import Experience
from areal_megatron.trainer.step import Trainer
from areal_megatron.trainer.weights import Weights


def train(trainer: Trainer, experience: Experience, weights: Weights) -> None:
    version = 0
    weights.publish(version)
    for number in range(trainer.config.updates):
        batch = experience.take(number, version)
        result = trainer.train_batch(batch, before_step=weights.wait_until_read)
        if result.applied:
            version += 1
        experience.trained(number, result)
        if result.applied:
            weights.publish(version)
    weights.wait_until_delivered()
    trainer.save_hf()
    experience.finish()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--index", type=int, required=True, help="global rank")
    options = parser.parse_args()
    run = Run(options.run)
    config = configuration.load(run.config)
    with Trainer(config, run, options.index) as trainer:
        with Experience(config, run, trainer) as experience, Weights(config, run, trainer, experience) as weights:
            train(trainer, experience, weights)


if __name__ == "__main__":
    main()

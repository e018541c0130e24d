"""One trainer rank, and the main loop of asynchronous PPO (AReaL, arXiv 2505.24298, Sections 4 and 5);
rank/supervised.py and rank/orders.py have the loops of the other modes.

Every rank runs this same program. Generation never waits for it: the engines continue with the weights they have, at
most rollout.max_staleness versions behind, and the decoupled objective corrects for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_megatron.config import config_file
from areal_megatron.process.ending import end
from areal_megatron.process.imports import uncollected
from areal_megatron.process.shown import guard
from areal_megatron.run.folder import from_command_line, one_line
from areal_megatron.run.versions import require

if TYPE_CHECKING:
    from areal_megatron.rank.checkpoints import Checkpoints
    from areal_megatron.rank.experience import Experience
    from areal_megatron.rank.weights import Weights
    from areal_megatron.trainer.trainer import Trainer


def train(trainer: Trainer, experience: Experience, weights: Weights, checkpoints: Checkpoints, batches: int) -> None:
    version, trained = checkpoints.resume()
    weights.publish(version)

    def until_read() -> None:
        weights.wait_until_read()
        checkpoints.wait_until_read()

    for number in range(trained, batches):
        batch = experience.take(number, version, weights.publish)
        if batch is None:
            checkpoints.stop(version, number)
            break
        result = trainer.train_batch(batch, before_step=until_read)
        experience.trained(number, result)
        if result.applied:
            version += 1
            weights.publish(version)
        checkpoints.after_update(version, number + 1, last=number + 1 == batches)
    else:
        with checkpoints.in_place_of_the_model():
            weights.save_hf()
    weights.wait_until_delivered()
    checkpoints.finish()
    experience.finish()


@one_line()
def main() -> None:
    guard()
    run, rank = from_command_line("areal_megatron.train")
    config = config_file.load(run.config)
    require("trainer", config)  # before any of these imports megatron-core, which may fail with other versions
    with uncollected():
        from areal_megatron.rank import supervised
        from areal_megatron.rank.checkpoints import Checkpoints
        from areal_megatron.rank.controller_port import ControllerPort
        from areal_megatron.rank.experience import Experience
        from areal_megatron.rank.orders import obey
        from areal_megatron.rank.weights import Weights
        from areal_megatron.trainer import check_fields
        from areal_megatron.trainer.trainer import Trainer

    check_fields.require(config)
    if config.is_supervised:
        supervised.run_rank(config, run, rank)
        return
    with Trainer(config, run, rank) as trainer, ControllerPort(config, run, trainer.parallel) as controller:
        weights = Weights(config, run, trainer, controller)
        checkpoints = Checkpoints(config, run, trainer, controller)
        if config.is_driven:
            obey(trainer, controller, weights, checkpoints)
        else:
            train(trainer, Experience(trainer, controller), weights, checkpoints, config.updates)


if __name__ == "__main__":
    main()
    end()

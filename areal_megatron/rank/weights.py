"""Where a trainer rank's weights go: to every engine after each update, and to a Hugging Face folder at the end."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import torch

from areal_megatron.checkpoint import hf
from areal_megatron.config import Config
from areal_megatron.protocol import ControllerError, Delivered
from areal_megatron.rank.controller_port import ControllerPort
from areal_megatron.reshard.outlet import Received, TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.parallel import STORE
from areal_megatron.trainer.trainer import Trainer

_LOOK_S = 1.0


class Weights:
    """Publishes versions and tells the controller what arrived, so that engines commit it."""

    def __init__(self, config: Config, run: RunFolder, trainer: Trainer, controller: ControllerPort):
        self._config, self._run, self._trainer, self._controller = config, run, trainer, controller
        self._store = run.endpoint(STORE, config.machine.peer_timeout_s)
        self._publisher = Publisher(
            TrainerRank(
                parameters=trainer.policy.factors if config.engines_adapt else trainer.parameters,
                planner=Planner.of(config, trainer.hf_config, trainer.sizes),
                rank=trainer.parallel.rank,
                dtype=getattr(torch, config.model.dtype),
                store=self._store,
                reshard=config.reshard,
                timeline=trainer.timeline,
                on_delivered=self._report,
                link=config.link,
                tls=run.credentials.calling(),
            )
        )
        self._ended = threading.Event()
        if trainer.parallel.is_first:
            threading.Thread(target=self._watch, name="watch-links", daemon=True).start()

    def publish(self, version: int) -> None:
        """Starts to send `version` to the engines and returns at once."""
        self._publisher.publish(version, self._controller.links(version, self._store))

    def wait_until_read(self) -> None:
        """Returns when parameters may change."""
        self._publisher.wait_until_read()

    def wait_until_delivered(self) -> None:
        """Returns when every engine has what was published, or its link has failed."""
        self._publisher.close()
        self._ended.set()

    def save_hf(self) -> None:
        """Writes the model into the run folder; every rank calls it. Raises OSError."""
        save_hf(self._config, self._run, self._trainer)

    def save_adapter(self, path: Path) -> None:
        """Writes the adapter as PEFT's folder; every rank calls it. Raises OSError."""
        save_adapter(self._config, self._trainer, path)

    def _watch(self) -> None:
        """Gives up, on a thread of its own, what is on its way to engines that the controller knows to be lost."""
        while not self._ended.wait(_LOOK_S):
            sending = self._publisher.sending()
            try:
                for engine, generation in self._controller.cut(sending) if sending else ():
                    self._publisher.give_up(engine, generation)
            except ControllerError:
                return  # the main loop meets it too, and ends the run

    def _report(
        self, engine: int, generation: int, version: int, seconds: float, received: Received, error: str
    ) -> None:
        """Called on the threads of the links."""
        delivered = Delivered(engine, generation, version, seconds, received.bytes, error, received.changed)
        try:
            self._controller.report(delivered, f"link-{engine}")
        except ControllerError as e:  # the main loop meets it too, and ends the run
            logging.error("version %d for engine %d: %s", version, engine, e)


def save_hf(config: Config, run: RunFolder, trainer: Trainer) -> None:
    """Exports the trainer's weights to run.hf, with the tokenizer of model.path, and adapters to run.adapter as well;
    every rank calls it.

    Raises Replaced.
    """
    run.check_current()
    if trainer.adapter:
        save_adapter(config, trainer, run.adapter)
    hf.export(trainer.exported(), source=config.model.path, path=run.hf, **_place(trainer))


def save_adapter(config: Config, trainer: Trainer, path: Path) -> None:
    """Writes the adapter as PEFT's folder; every rank calls it."""
    own = {"adapter": trainer.adapter, "base": config.model.path, "path": path}
    hf.export_adapter(trainer.policy.factors(), **own, **_place(trainer))


def _place(trainer: Trainer) -> dict[str, Any]:
    parallel = trainer.parallel
    return {
        "hf_config": trainer.hf_config,
        "sizes": trainer.sizes,
        "rank": parallel.rank,
        "group": parallel.control,
    }

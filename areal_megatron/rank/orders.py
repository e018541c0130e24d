"""The main loop of a trainer rank in mode=driven: it carries out the orders of a program, one after the other."""

from __future__ import annotations

from pathlib import Path

from areal_megatron.data.trajectory import decoder, encoder
from areal_megatron.protocol import (
    Bye,
    LoadVersion,
    LossReply,
    NextOrder,
    NotYet,
    Order,
    OrderDone,
    PublishVersion,
    SaveAdapter,
    SaveVersion,
    Stop,
    TakeStep,
    TurnTo,
)
from areal_megatron.rank.checkpoints import Checkpoints
from areal_megatron.rank.controller_port import ControllerPort
from areal_megatron.rank.weights import Weights
from areal_megatron.trainer.trainer import Trainer

_encode = encoder().encode
_decode = decoder(Order | Stop).decode


def obey(trainer: Trainer, controller: ControllerPort, weights: Weights, checkpoints: Checkpoints) -> None:
    """Carries out orders until the program has finished; every rank gets the same ones, with its replica's samples."""
    version, _ = checkpoints.resume()
    weights.publish(version)
    number = 0
    while not isinstance(order := _take(trainer, controller, number), Stop):
        done = _carry_out(order, number, trainer, weights, checkpoints)
        if trainer.parallel.is_first:
            controller.request(done)
        number += 1
    weights.wait_until_delivered()
    checkpoints.finish()
    if trainer.parallel.is_first:
        controller.request(Bye())


def _carry_out(order: Order, number: int, trainer: Trainer, weights: Weights, checkpoints: Checkpoints) -> OrderDone:
    def until_read() -> None:
        weights.wait_until_read()
        checkpoints.wait_until_read()

    match order:
        case LossReply():
            loss = trainer.ppo_with(order.settings)
            metrics, logprobs = loss.gradient(order.part, order.learns, order.more)
            return OrderDone(number, metrics=metrics, logprobs=logprobs)
        case TakeStep():
            applied, metrics = trainer.ppo.step(order.rate, until_read)
            return OrderDone(number, applied, metrics)
        case PublishVersion():
            weights.publish(order.version)
        case SaveVersion():
            checkpoints.save(order.version)
        case LoadVersion():
            until_read()
            checkpoints.load(Path(order.folder))
        case TurnTo():
            until_read()
            trainer.turns.turn_to(order.adapter, order.new, order.has_gradient)
        case SaveAdapter():
            weights.save_adapter(Path(order.folder))
    return OrderDone(number)


def _take(trainer: Trainer, controller: ControllerPort, number: int) -> Order | Stop:
    """Waits as long as the controller says that there is none yet. Raises ControllerError if it falls silent."""
    parallel = trainer.parallel
    while True:
        data = None
        if parallel.is_leader:
            reply = controller.request(NextOrder(parallel.replica, number))
            data = b"" if isinstance(reply, NotYet) else _encode(reply)
        if data := parallel.share(data):
            return _decode(data)

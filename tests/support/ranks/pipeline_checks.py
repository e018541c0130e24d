"""Checks of the messages between pipeline stages, which test_pipeline.py starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication

from areal_megatron.config import CriticConfig, PenaltyConfig, PPOConfig, ReshardConfig
from areal_megatron.observe.timeline import Timeline
from areal_megatron.packing.partition import split
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.outlet import OnDelivered, TrainerRank
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.publish import Publisher
from areal_megatron.reshard.session import LinkRef
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run.folder import RunFolder
from areal_megatron.trainer.batch import pack_trajectories
from areal_megatron.trainer.parallel import STORE
from areal_megatron.trainer.token_sums import TokenSums
from areal_megatron.trainer.trainer import Trainer
from tests.conftest import ROOT
from tests.support.plain_results import make_trajectories, sft_examples
from tests.support.ranks import link_rank
from tests.support.ranks.trainer_checks import make_config, open_trainer

HANGS_S = 20.0
BUCKET_ELEMENTS = 4000


@contextmanager
def counted() -> Iterator[Counter]:
    """Counts the waits for the whole device, as "waits", and the tensors that stages send each other, by dtype."""
    seen = Counter()
    batched, single = dist.batch_isend_irecv, p2p_communication._p2p_ops

    def batch(operations):
        seen.update(operation.tensor.dtype for operation in operations if operation.op is dist.isend)
        return batched(operations)

    def one_by_one(*, tensor_send_prev, tensor_send_next, **others):
        seen.update(tensor.dtype for tensor in (tensor_send_prev, tensor_send_next) if tensor is not None)
        return single(tensor_send_prev=tensor_send_prev, tensor_send_next=tensor_send_next, **others)

    with (
        patch.object(p2p_communication.torch.cuda, "synchronize", lambda: seen.update(["waits"])),
        patch.object(dist, "batch_isend_irecv", batch),
        patch.object(p2p_communication, "_p2p_ops", one_by_one),
    ):
        yield seen


def check_messages(folder: Path, rank: int, cases: dict[str, list]) -> None:
    """Stages send each other nothing but activations and their gradients, and wait for nothing else on the device.

    In all passes: the policy's, the reference's and the critic's, forward alone and with backward.
    cases: run folder → model, layout.
    """
    ppo = PPOConfig(minibatches=2, penalty=PenaltyConfig(kl=0.2), critic=CriticConfig(lr=1e-3))
    for run, (model, layout) in cases.items():
        config = make_config(folder, model, layout, ppo=ppo)
        with open_trainer(folder, rank, config, run) as subject:
            parts = split(make_trajectories(12, 0), version=0, replicas=1, minibatches=2, cap=128, seed=0)
            assert len({len(t.response) for t in parts[0].trajectories}) > 5
            with counted() as seen:
                assert subject.train_batch(parts[0]).applied
                subject.supervised.step(sft_examples(0))
            assert set(seen) == {torch.float32}, seen


def check_hanging_engine(folder: Path, rank: int, layout: dict) -> None:
    """While weights are on their way to an engine that takes none of them, stages compute on.

    The device-wide wait of the stand-in takes as long as CUDA's would, which includes the messages to engines.
    """
    with open_trainer(folder, rank, make_config(folder, "qwen3", layout, ppo=PPOConfig())) as subject:
        failures = []
        publisher = publisher_of(subject, folder / "timeline.jsonl", lambda *outcome: failures.append(outcome[-1]))
        engine = start_engine(subject, folder) if subject.parallel.is_first else None
        step = partial(subject.policy.gradient, work_of(subject))

        def wait_for_messages() -> None:
            while publisher.sending():
                time.sleep(0.01)

        with patch.object(p2p_communication.torch.cuda, "synchronize", wait_for_messages):
            alone = timed(subject, step)
            publisher.publish(1, [LinkRef(0, 1)])
            beside = timed(subject, step)
            assert publisher.sending() == {(0, 1)}, f"the step waited until the update had ended: {failures}"
        subject.parallel.barrier()
        if engine is not None:
            print(f"a pipeline step takes {beside:.3f} s beside an engine that hangs, and {alone:.3f} s without")
            engine.kill()
            engine.wait()


def work_of(subject: Trainer) -> list:
    sampled = pack_trajectories(make_trajectories(7, 0), [1.0] * 7, [1.0] * 7, 0, "recompute", subject._part)
    loss = partial(subject.ppo._objective.ppo, sampled=sampled, taken=0, sums=TokenSums())
    return [(sampled.microbatch, loss)] * 4


def timed(subject: Trainer, step) -> float:
    """Returns the seconds that the quickest of three steps takes."""
    took = []
    for _ in range(3):
        subject.parallel.barrier()
        begun = time.monotonic()
        step()
        took.append(time.monotonic() - begun)
    return min(took)


def publisher_of(subject: Trainer, timeline: Path, on_delivered: OnDelivered) -> Publisher:
    return Publisher(
        TrainerRank(
            parameters=subject.parameters,
            planner=Planner(subject.hf_config, subject.sizes, EngineSizes(tp=1), BUCKET_ELEMENTS),
            rank=subject.parallel.rank,
            dtype=getattr(torch, subject.config.model.dtype),
            store=subject.run.endpoint(STORE, 10),
            on_delivered=on_delivered,
            timeline=Timeline(timeline, f"trainer-{subject.parallel.rank}"),
            reshard=ReshardConfig(timeout_s=HANGS_S, update=subject.config.reshard.update),
        )
    )


def start_engine(subject: Trainer, folder: Path) -> subprocess.Popen:
    """Starts an engine that has joined its link and takes no message: what is small would fit into the network."""
    setup = {
        "role": "engine",
        "engine": 0,
        "rank": 0,
        "hf_config": subject.hf_config,
        "sizes": asdict(MegatronSizes.of(subject.config.trainer)),
        "engine_tp": 1,
        "dtype": subject.config.model.dtype,
        "store": RunFolder(folder / "run").endpoint(STORE, 10),
        "timeout_s": HANGS_S,
        "bucket_elements": BUCKET_ELEMENTS,
        "update": subject.config.reshard.update,
        "folder": str(folder / "qwen3"),
    }
    engine = subprocess.Popen(
        [sys.executable, link_rank.__file__, json.dumps(setup)],
        text=True,
        bufsize=1,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert json.loads(engine.stdout.readline()) == {"up": True}
    for command in ({"join": 1}, {"start": "deaf"}):
        engine.stdin.write(json.dumps(command) + "\n")
        assert json.loads(engine.stdout.readline()) == {"ok": True}
    return engine

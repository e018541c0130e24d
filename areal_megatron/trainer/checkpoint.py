"""The trainer pool's state as megatron-core's distributed checkpoint (torch_dist), under any parallel sizes.

Each rank writes one file, on a thread of its own; rank 0 adds the files that describe them. megatron-core loads it and
unpickles everything but tensors: checkpoints are trusted input.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from areal_megatron.checkpoint import torch_dist_file
from areal_megatron.checkpoint.folder import Written
from areal_megatron.checkpoint.torch_dist import MODEL_PREFIXES
from areal_megatron.checkpoint.torch_dist_file import Image, file_name
from areal_megatron.models.adapter import Adapter
from areal_megatron.process.errors import first_line
from areal_megatron.run.folder import RunError
from areal_megatron.trainer import checkpoint_tensors
from areal_megatron.trainer.learner import Learner
from areal_megatron.trainer.parallel import replicas
from areal_megatron.trainer.patches import cpu_passes_for_cuda
from areal_megatron.trainer.trainer import Trainer

_POLL_S = 0.02


Seal = Callable[[dict[str, Written]], None]
"""Completes a checkpoint, whose files of ranks hold this, by name. May raise OSError."""


class _Part(NamedTuple):
    """How a rank's write went."""

    written: Written | None
    error: str = ""
    is_of_file_system: bool = False
    """Whether the error is an OSError, as of a full disk: that costs this checkpoint and no more."""


class Saver:
    """Saves the trainer pool's state beside training, one checkpoint at a time; every rank has one and calls it alike.

    With weights_only it saves the policy's weights alone, for an export: nothing can be resumed from that.

    Example:
        saver = Saver(trainer)
        saver.begin(folder / "trainer", seal)
        trainer.train_batch(part, before_step=saver.wait_until_read)  # the next optimizer step waits for the copy
        saver.done()  # now and then: raises RunError if the saving itself failed
        saver.wait()  # before the process ends
    """

    _numbers: ClassVar[Iterator[int]] = count(1)
    """Numbers for the saves of all objects of this process: every rank begins the same ones in the same order, and
    tells rank 0 of each under its number."""

    def __init__(self, trainer: Trainer, weights_only: bool = False):
        self._trainer, self._parallel, self._timeout_s = trainer, trainer.parallel, trainer.config.checkpoint.timeout_s
        self._weights_only = weights_only
        self._generators: dict[str, torch.Tensor] = {}
        self._image: Image | None = None
        self._metadata = b""
        self._number = 0
        self._thread: threading.Thread | None = None
        self._read = threading.Event()
        self._error: Exception | None = None
        self.bytes = 0
        """Size of all ranks' files together, once they are laid out; on rank 0."""
        device = trainer.device
        self._stream = torch.get_device_module(device).Stream() if device.type != "cpu" else None

    def begin(self, path: Path, seal: Seal = lambda written: None, lost: Callable[[str], None] | None = None) -> None:
        """Starts to save into the folder `path`, made with the one around it if need be; returns at once.

        Parameters must not change before `wait_until_read` has returned. Once every rank has written its file, rank 0
        calls `seal` on the thread that saves, with what all these files hold. If a rank or `seal` meets an OSError, as
        on a full disk, it calls `lost` instead with the reason; without `lost` the save has failed. The first call is
        collective: it lays out the files.
        """
        self.wait()
        if self._image is None:
            self._image = self._lay_out()
        for name, state in checkpoint_tensors.generators().items() if self._generators else ():
            self._generators[name].copy_(state)
        common = self._common() if self._parallel.is_first and not self._weights_only else b""
        self._number = next(self._numbers)
        self._read.clear()
        settled = self._stream and torch.get_device_module(self._trainer.device).current_stream().record_event()
        arguments = (self._image, path, settled, common, seal, lost or _fail)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_until_read(self) -> None:
        """Returns when everything has been copied: from then on a step may change it.

        Raises RunError after checkpoint.timeout_s.
        """
        if self._thread and not self._read.wait(self._timeout_s):
            raise RunError(
                f"trainer-{self._parallel.rank}: the state for a checkpoint was not copied within "
                f"{self._timeout_s:.0f} s; is the device stuck?"
            )

    def done(self) -> bool:
        """Returns False while this rank (rank 0: any rank) is saving. Raises RunError if the save failed."""
        if self._thread and not self._thread.is_alive():
            self._thread = None
            error, self._error = self._error, None
            if error:
                raise error
        return self._thread is None

    def wait(self) -> None:
        """Returns when the save is done. Raises RunError if it failed, and after twice checkpoint.timeout_s."""
        if self._thread:
            self._thread.join(2 * self._timeout_s)  # the thread's own waits end by then
            if not self.done():
                raise RunError(
                    f"trainer-{self._parallel.rank}: its part of a checkpoint was not written within "
                    f"{2 * self._timeout_s:.0f} s; is the file system stuck?"
                )

    def _lay_out(self) -> Image:
        trainer, tensors, objects = self._trainer, [], {}
        if self._weights_only:
            model = checkpoint_tensors.model_state("policy", trainer.learners["policy"])
            stored = checkpoint_tensors.stored_tensors(model, trainer.learners["policy"].optimizer)
            tensors += (tensor for tensor in stored if tensor.name.startswith(MODEL_PREFIXES))
        else:
            self._generators = checkpoint_tensors.generators()
            tensors += checkpoint_tensors.stored_generators(trainer, self._generators)
            for name, learner in trainer.learners.items():
                model = checkpoint_tensors.model_state(name, learner)
                tensors += checkpoint_tensors.stored_tensors(model, learner.optimizer)
                objects |= checkpoint_tensors.stored_objects(model)
        image = Image(tensors, objects)
        gathered = trainer.parallel.gather(torch_dist_file.encode(image.entries))
        if trainer.parallel.is_first:
            everybody = [torch_dist_file.decode(entries) for entries in gathered]
            files = {file_name(rank): entries for rank, entries in enumerate(everybody)}
            self.bytes = sum(entries[-1].offset + entries[-1].length for entries in everybody if entries)
            self._metadata = torch_dist_file.metadata(files)
        return image

    def _common(self) -> bytes:
        """Returns the bytes of common.pt: what the ranks do not store as tensors."""
        file = io.BytesIO()
        states = {}
        for name, learner in self._trainer.learners.items():
            optimizer = learner.optimizer
            states[name] = {
                "optimizer": optimizer.common_state(checkpoint_tensors.METADATA),
                "schedule": optimizer.schedule_state(),
            }
        described = {"sizes": asdict(self._trainer.sizes), "content_metadata": checkpoint_tensors.METADATA}
        if self._trainer.adapter:
            described["adapter"] = asdict(self._trainer.adapter)
        torch.save(states.pop("policy") | states | described, file)
        return file.getvalue()

    def _run(
        self, image: Image, path: Path, settled: Any, common: bytes, seal: Seal, lost: Callable[[str], None]
    ) -> None:
        try:
            self._copy(image, settled)
            for folder in (path.parent, path):  # not those around them, which are away if they are not there
                folder.mkdir(exist_ok=True)
            crc = image.write(path / file_name(self._parallel.rank))
            if not self._weights_only:
                self._trainer.settle_ledger()
            part = _Part(Written(image.size, crc))
        except Exception as e:  # a thread's traceback would be lost
            error = f"the checkpoint in {path} could not be written by trainer-{self._parallel.rank}: {_said(e)}"
            part = _Part(None, error, isinstance(e, OSError))
        finally:
            self._read.set()
        try:
            try:
                self._conclude(path, part, common, seal)
            except OSError as e:
                lost(_said(e))
        except Exception as e:
            known = isinstance(e, RunError)
            self._error = e if known else RunError(f"the checkpoint in {path} could not be written: {_said(e)}")

    def _copy(self, image: Image, settled: Any) -> None:
        if self._stream is None:
            image.copy()
        else:
            with torch.get_device_module(self._trainer.device).stream(self._stream):
                self._stream.wait_event(settled)
                image.copy()
            self._stream.synchronize()
        self._read.set()

    def _conclude(self, path: Path, part: _Part, common: bytes, seal: Seal) -> None:
        """Rank 0 learns from every rank how its write went and completes the folder.

        Raises RunError, and on rank 0 OSError if nothing worse was the matter with any rank.
        """
        kind = "weights" if self._weights_only else "checkpoint"
        store, key = self._parallel.store, f"{kind}/{self._number}/"
        if not self._parallel.is_first:
            store.set(f"{key}{self._parallel.rank}", json.dumps(part))
            if part.error and not part.is_of_file_system:
                raise RunError(part.error)
            return
        parts = [part]
        deadline = time.monotonic() + self._timeout_s
        for rank in range(1, self._parallel.world):
            while not store.check([f"{key}{rank}"]):
                if time.monotonic() > deadline:
                    raise RunError(
                        f"trainer-{rank} has not written its part of the checkpoint in {path} within "
                        f"{self._timeout_s:.0f} s after trainer-0"
                    )
                time.sleep(_POLL_S)
            parts.append(_Part(*json.loads(store.get(f"{key}{rank}"))))
            store.delete_key(f"{key}{rank}")
        if failed := [part for part in parts if part.error]:
            first = min(failed, key=lambda part: part.is_of_file_system)
            more = f"; so did {len(failed) - 1} other ranks" if len(failed) > 1 else ""
            raise (OSError if first.is_of_file_system else RunError)(first.error + more)
        torch_dist_file.describe(path, self._metadata, common)
        seal({file_name(rank): Written(*part.written) for rank, part in enumerate(parts) if part.written})


def load(trainer: Trainer, path: Path) -> None:
    """Brings the trainer to the saved state; generators only if the checkpoint was saved with the same sizes.

    Raises RunError if the checkpoint is not one of this model or cannot be read.
    """
    strategy = get_default_load_sharded_strategy(str(path))
    if trainer.config.trainer.dp > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, replicas(), do_cache_distribution=False)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
        states = {name: _sharded(name, learner) for name, learner in trainer.learners.items()}
        _check_adapter(trainer.adapter, common.get("adapter"))
        if "critic" in states and "critic" not in common:
            raise ValueError("it has no critic: resume it without ppo.critic, or take one of a run that had a critic")
        state = states.pop("policy") | states
        if common["sizes"] == asdict(trainer.sizes):
            state["generators"] = checkpoint_tensors.generator_state(trainer)
        with cpu_passes_for_cuda():
            # a tuple only where mismatches are asked for
            loaded = cast(dict[str, Any], dist_checkpointing.load(state, str(path), strategy))
        for name, learner in trainer.learners.items():
            found = loaded if name == "policy" else loaded[name]
            checkpoint_tensors.load_model(name, learner, found["model"])
            with torch.no_grad():
                learner.optimizer.load(found["optimizer"], found["schedule"])
    except (CheckpointingException, OSError, RuntimeError, KeyError, ValueError, AssertionError) as e:
        raise RunError(
            f"trainer-{trainer.parallel.rank}: the checkpoint in {path} cannot be loaded into this model and these "
            f"sizes: {_said(e)}"
        ) from e
    if "generators" in loaded:
        checkpoint_tensors.set_generators(loaded["generators"])


def _check_adapter(own: Adapter | None, saved: dict[str, Any] | None) -> None:
    """Raises ValueError unless a checkpoint has the adapters that are trained, or none if none are."""
    held = Adapter.of_told(saved) if saved else None
    if held != own:
        has, asked = (each.settings if each else "no adapters" for each in (held, own))
        raise ValueError(f"it has {has}, and the config asks for {asked}; resume it with its own settings of lora")


def _sharded(name: str, learner: Learner) -> dict[str, Any]:
    """Returns the sharded state of a learner that megatron-core is to load. Collective."""
    model = checkpoint_tensors.model_state(name, learner)
    metadata = checkpoint_tensors.METADATA | {"dp_cp_group": replicas()}
    optimizer = learner.optimizer.sharded_state(model, metadata)
    # Modules' own entries are not read: they differ with TransformerEngine and without, and hold nothing without FP8.
    tensors = {
        number: {name: value for name, value in chunk.items() if not isinstance(value, ShardedObject)}
        for number, chunk in model.items()
    }
    return {"model": tensors, "optimizer": optimizer}


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def _fail(reason: str) -> NoReturn:
    raise RunError(reason)

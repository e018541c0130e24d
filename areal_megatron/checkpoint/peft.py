"""Adapters as PEFT's folders: `adapter_config.json`, and the factors in `adapter_model.safetensors`. No torch, but to
add them to a model's weights."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy import ndarray

from areal_megatron.checkpoint.disk import (
    BlockBuffers,
    BoxReader,
    CheckpointError,
    OpenFiles,
    cast,
    empty,
    read_box,
)
from areal_megatron.checkpoint.folder import TRAINER
from areal_megatron.checkpoint.hf_folder import (
    HfTensor,
    exact_dtype,
    hf_tensors,
    safetensors_entries,
    safetensors_extents,
)
from areal_megatron.config import Config, ConfigError
from areal_megatron.models.adapter import ALL_LINEAR, FACTORS, Adapter, adapted, factor_of, module_of, unserved
from areal_megatron.models.architecture import Architecture, architecture
from areal_megatron.models.pattern import name_at, numbers
from areal_megatron.models.weight_files import ADAPTER
from areal_megatron.process.errors import printable
from areal_megatron.process.files import write_json
from areal_megatron.reshard.boxes import Box, Shape, expand
from areal_megatron.run.json_input import read_object

WEIGHTS = "adapter_model.safetensors"
_EXPERT = re.compile(r"\bexperts\.\d+\.")
"""A part of the names of a router's experts."""
PREFIX = "base_model.model."
"""What PEFT's names of factors have before the names of the model's layers."""
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
"""The bits of the exponent, all of which are set in what is not finite."""
_PLAIN = ("gaussian", "eva", "orthogonal", "mica")
"""Ways to begin an adapter, init_lora_weights, that leave the model's weights as they are; so do true and false."""
_ABSENT = (
    "alpha_pattern",
    "alora_invocation_tokens",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "layer_replication",
    "layers_to_transform",
    "loftq_config",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
"""Settings with which an adapter computes something else, or has other tensors."""


def description(adapter: Adapter, model: Architecture, base: str) -> dict[str, Any]:
    """Returns the content of adapter_config.json. `base`: the folder or name of the model without the adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapter.use_rslora,
        "target_modules": _targets(adapter, model),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(adapter: Adapter, model: Architecture) -> list[str]:
    """Returns what PEFT's names of the layers with an adapter end with: of an expert, `experts.3.up_proj`."""
    targeted, found, experts = adapter.modules(model), [], range(model.dimensions.experts)
    for row in adapter.rows(model):
        modules = [module for module in map(module_of, row.tensors) if module in targeted]
        found += [f"experts.{n}.{module}" for n in experts for module in modules] if row.of_experts else modules
    return [*dict.fromkeys(found)]


def write_description(folder: Path, adapter: Adapter, hf_config: Mapping[str, Any], base: str | Path) -> None:
    """Writes adapter_config.json. `base`: the folder of the model without the adapter. Raises OSError."""
    write_json(folder / ADAPTER, description(adapter, architecture(hf_config), os.path.abspath(base)))


def read_description(folder: Path) -> tuple[Adapter, str]:
    """Returns the adapter that a folder's adapter_config.json describes, and the name of its base. Raises
    CheckpointError for one that is missing, or of another kind than these adapters."""
    file = folder / ADAPTER
    try:
        found = read_object(file)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no adapter: there is no {file}") from None
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}") from None
    except ValueError as e:
        raise CheckpointError(f"{file} {e}") from None
    if (kind := found.get("peft_type")) != "LORA":
        raise CheckpointError(f"{file} has peft_type={printable(repr(kind), 60)}; only LORA is known")
    for key in _ABSENT:
        if found.get(key):
            raise CheckpointError(f"{file} sets {key}, which these adapters do not have")
    if found.get("bias", "none") != "none":
        raise CheckpointError(f"{file} has bias={printable(repr(found['bias']), 60)}; only none is known")
    if isinstance(way := found.get("init_lora_weights"), str) and way.lower() not in _PLAIN:
        raise CheckpointError(
            f"{file} has init_lora_weights={printable(repr(way), 60)}, with which PEFT changes the base's weights too: "
            "save it as a plain adapter (PEFT: path_initial_model_for_weight_conversion)"
        )
    rank, alpha, targets = found.get("r"), found.get("lora_alpha"), found.get("target_modules")
    if type(rank) is not int or not 0 < rank <= 4096:
        raise CheckpointError(f"{file} needs a positive integer r, has {printable(repr(rank), 60)}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1e9:
        raise CheckpointError(f"{file} needs a positive number lora_alpha, below 1e9, has {printable(repr(alpha), 60)}")
    if targets == ALL_LINEAR:
        targets = [ALL_LINEAR]
    if not isinstance(targets, list) or not targets or not all(isinstance(each, str) for each in targets):
        raise CheckpointError(f"{file} needs a list of names as target_modules; a pattern is not known")
    if (rslora := found.get("use_rslora")) not in (None, False, True):
        raise CheckpointError(f"{file} has use_rslora={printable(repr(rslora), 60)}; write true or false")
    base = found.get("base_model_name_or_path")
    names = tuple(dict.fromkeys(each.rpartition(".")[2] for each in targets))
    adapter = Adapter(rank, float(alpha), names, bool(rslora), _has_experts(folder, targets))
    return adapter, base if isinstance(base, str) and "\0" not in base else ""


def _has_experts(folder: Path, targets: list[str]) -> bool:
    """Returns whether routers' experts have adapters, which names of targets or of tensors tell."""
    weights = folder / WEIGHTS
    tensors = safetensors_entries(weights) if weights.is_file() else ()
    return any(map(_EXPERT.search, (*targets, *tensors)))


def open_start(config: Config, hf_config: Mapping[str, Any]) -> PeftFolder:
    """Opens the adapter of lora.start, for the model of hf_config. Raises ConfigError if it is damaged, or its
    shapes or settings are others than the run's."""
    folder, own, model = Path(config.lora.start), Adapter.of(config.lora), architecture(hf_config)
    assert own is not None  # only adapters start from one
    try:
        found, _ = read_description(folder)
        check_targets(folder, found, model)
        if _compared(found, model) != _compared(own, model):
            raise CheckpointError(
                f"{folder} has {found.settings}, and the config asks for {own.settings}: set these so"
            )
        return PeftFolder(folder, model, found)
    except CheckpointError as e:
        raise ConfigError(f"lora.start: {e}") from None


def check_resumed(config: Config, hf_config: Mapping[str, Any], checkpoint: Path) -> None:
    """Raises ConfigError unless a checkpoint has the adapters that the config asks for, or none if it asks for none."""
    own, model = Adapter.of(config.lora), architecture(hf_config)
    try:
        held = read_description(checkpoint)[0] if (checkpoint / ADAPTER).exists() else None
        if held:
            check_targets(checkpoint, held, model)
    except CheckpointError as e:
        raise ConfigError(f"resume: {e}") from None
    if (held and _compared(held, model)) != (own and _compared(own, model)):
        has, asked = (each.settings if each else "no adapters" for each in (held, own))
        raise ConfigError(
            f"resume: {checkpoint} has {has}, and the config asks for {asked}: resume it with its own settings of lora"
        )


def check_targets(folder: Path, adapter: Adapter, model: Architecture) -> None:
    """Raises CheckpointError for a target of the folder's adapter that the model does not have."""
    try:
        adapter.modules(model)
    except ConfigError as e:
        said = str(e).replace("lora.targets: ", f"{folder / ADAPTER}: target_modules: ", 1)
        none = ", and no tensor is: take it out of the list"
        raise CheckpointError(said.replace("; set lora.experts=true", none, 1)) from None


def _compared(adapter: Adapter, model: Architecture) -> tuple[Any, ...]:
    """What a run and the adapter that it starts from must have alike."""
    return adapter.rank, adapter.scale, adapter.modules(model), adapter.experts


def for_engines(folder: Path, model: Architecture) -> Adapter:
    """Returns the adapter of a folder, with all targets by their names. Raises ConfigError if it is damaged, if it is
    another model's, has values that are not finite, or if engines cannot apply it."""
    try:
        found, _ = read_description(folder)
        check_targets(folder, found, model)
        if problem := unserved(found, model):
            raise CheckpointError(f"{folder}: {problem}: merge it, `areal convert to-hf {folder} MODEL`")
        with closing(PeftFolder(folder, model, found)) as opened:
            opened.check_finite()
        return replace(found, targets=tuple(found.modules(model)))
    except CheckpointError as e:
        raise ConfigError(str(e)) from None


def note_of_base(folder: str, base: str) -> str:
    """Returns a line if the adapter of a folder names another base than the model of the folder `base`, else nothing:
    names may differ where the model is the same. Raises CheckpointError."""
    _, named = read_description(Path(folder))
    path = Path(os.path.realpath(base))
    of_hub = not os.path.isabs(named) and (
        Path(named).name == path.name or f"models--{named.replace('/', '--')}" in path.parts
    )
    if not named or of_hub or os.path.realpath(named) == str(path):
        return ""
    return f"{folder} was trained on {printable(named)}; is {base} that?"


class PeftFolder:
    """The factors of a PEFT folder, read by boxes of canonical tensors.

    Raises CheckpointError where the file is damaged, or has other tensors than the adapter of this model.
    """

    def __init__(self, folder: Path, model: Architecture, adapter: Adapter):
        expected = expand(adapted(model, adapter).canonical)
        path, self._files = folder / WEIGHTS, OpenFiles()
        if (folder / TRAINER).is_dir():
            raise CheckpointError(
                f"{folder} is a checkpoint: `areal convert to-peft {folder} ADAPTER` makes PEFT's folder"
            )
        if not path.exists() and (pickled := path.with_suffix(".bin")).exists():
            raise CheckpointError(
                f"{pickled} is a pickle, which may run programs when it is read: have PEFT save {WEIGHTS} instead "
                "(safe_serialization=True)"
            )
        names, self._extents = safetensors_extents(path, {PREFIX + name for name in expected})
        for name, shape in expected.items():
            if PREFIX + name not in self._extents:
                raise CheckpointError(
                    f"{path} has no tensor {PREFIX + name}, which its config and {model.name} ask for"
                )
            if (found := self._extents[PREFIX + name].box.shape) != shape:
                raise CheckpointError(
                    f"{path}: {PREFIX + name} has shape {list(found)}, its config and the base's ask for "
                    f"{list(shape)}: it is of another base"
                )
        if other := sorted(names - {PREFIX + name for name in expected}):
            raise CheckpointError(
                f"{path} has a tensor {printable(other[0])}, which its config or its base does not have"
            )
        self._exact = exact_dtype(each.dtype for each in self._extents.values())

    def dtype(self, tensor: str, numbered: Shape | None = None) -> str:
        """Returns the dtype of the tensor of a canonical pattern that has these numbers, None for one that holds all
        tensors exactly."""
        return self._exact if numbered is None else self._extents[PREFIX + name_at(tensor, numbered)].dtype

    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None:
        """Fills `out`, an array of the box's shape for elements of `dtype`, with a box of a canonical pattern within
        one layer."""
        named = numbers(tensor)
        name, region = name_at(tensor, box.start[:named]), Box(box.start[named:], box.stop[named:])
        read_box(self._files, self._extents[PREFIX + name], region, out[(0,) * named], dtype)

    def check_finite(self) -> None:
        """Raises CheckpointError for a tensor with a value that is not finite. Reads the whole file."""
        blocks = BlockBuffers()
        for name, extent in self._extents.items():
            ones = _EXPONENTS[extent.dtype]
            for box, rows in blocks.of(extent.box, extent.dtype):
                read_box(self._files, extent, box, rows, extent.dtype)
                if (rows & ones == ones).any():
                    raise CheckpointError(
                        f"{extent.path}: {name} has values that are not finite; take an earlier adapter"
                    )

    def close(self) -> None:
        self._files.close()


def factor_tensors(canonical: Mapping[str, Shape], dtype: str) -> list[HfTensor]:
    """Returns the tensors of a PEFT folder."""
    return [each._replace(name=PREFIX + each.name) for each in hf_tensors(canonical, lambda _: dtype)]


class MergedModel:
    """A model with an adapter's products added to its weights, read by boxes of canonical tensors.

    Weights are rounded to the dtype of the factors, as trainers hold them; the sum, in float32, is rounded once.
    """

    def __init__(self, base: BoxReader, factors: BoxReader, model: Architecture, adapter: Adapter):
        self._base, self._factors, self._scale = base, factors, adapter.scale
        self._shapes = adapted(model, adapter).canonical
        self._weights = {name for row in adapter.rows(model) for name in row.of_layers(model.dimensions).tensors}
        self._own = factors.dtype(next(iter(self._shapes)))
        self._last: tuple[str, Shape] | None = None

    def dtype(self, tensor: str) -> str:
        return self._own

    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None:
        """As BoxReader has it."""
        names = [factor_of(tensor, factor) for factor in FACTORS]
        if tensor not in self._weights or names[0] not in self._shapes:
            self._base.read(tensor, box, out, dtype)
            return
        import torch

        if self._last != (tensor, at := box.start[: numbers(tensor)]):
            self._down, self._up = (self._factor(name, at) for name in names)
            self._last = (tensor, at)
        held = empty(box.shape, self._own)
        self._base.read(tensor, box, held, self._own)
        values = torch.from_numpy(held).view(getattr(torch, self._own)).float()
        *_, rows, columns = box.slices
        values += self._up[rows] @ self._down[:, columns] * self._scale
        out[...] = cast(values.view(torch.uint32).numpy(), "float32", dtype)

    def close(self) -> None:
        self._base.close()
        self._factors.close()

    def _factor(self, name: str, at: Shape) -> Any:
        """A factor of one layer, or of an expert in it, as a torch tensor, float32."""
        import torch

        shape = self._shapes[name][len(at) :]
        box = Box((*at, *(0 for _ in shape)), (*(number + 1 for number in at), *shape))
        values = empty(box.shape, "float32")
        self._factors.read(name, box, values, "float32")
        return torch.from_numpy(values).view(torch.float32).view(shape)

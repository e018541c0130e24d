"""A Hugging Face folder as files: its weights read by boxes, and what in it is no weight. Without torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy import ndarray

from areal_megatron.checkpoint.disk import CheckpointError, OpenFiles, read, safetensors_extents
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.reshard.boxes import Box, expand, numbers

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class HfFolder:
    """The weights of a Hugging Face folder.

    Raises CheckpointError where files are missing or damaged, or where names and shapes are not those of hf_config.
    """

    def __init__(self, folder: Path, hf_config: Mapping[str, Any]):
        model = architecture(hf_config)
        self._extents, self._files = {}, OpenFiles()
        for file in _weight_files(folder):
            self._extents |= safetensors_extents(file)
        expected = expand(model.canonical)
        for name, shape in expected.items():
            if name not in self._extents:
                raise CheckpointError(f"{folder} has no tensor {name}, which config.json ({model.name}) asks for")
            if (found := self._extents[name].box.shape) != shape:
                raise CheckpointError(
                    f"{folder}: {name} has shape {list(found)}, config.json ({model.name}) asks for {list(shape)}"
                )
        for name in self._extents.keys() - expected.keys():
            if not (name == "lm_head.weight" and model.tied) and not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(f"{folder} has a tensor {name}, which config.json ({model.name}) does not have")

    def dtype(self, tensor: str) -> str:
        """Of a canonical pattern: that of its first tensor."""
        return self._extents[tensor.format(*[0] * numbers(tensor))].dtype

    def read(self, tensor: str, box: Box, out: ndarray, dtype: str) -> None:
        """Fills `out`, of the box's shape and for elements of `dtype`, with a box of a canonical pattern that lies
        within one layer and expert."""
        named = numbers(tensor)
        extent = self._extents[tensor.format(*box.start[:named])]
        read(self._files, extent, Box(box.start[named:], box.stop[named:]), out[(0,) * named], dtype)

    def close(self) -> None:
        self._files.close()


def copy_description(source: Path, folder: Path, dtype: str) -> None:
    """Everything of a model folder that is no weight, config.json with the dtype of the new weights."""
    for file in source.iterdir():
        weights = file.name.endswith(WEIGHT_SUFFIXES) or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, folder / file.name)
    config = read_config(source)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}; only safetensors are read")
        return [folder / SINGLE]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError) as e:
        raise CheckpointError(f"{index} cannot be read: {e}") from None

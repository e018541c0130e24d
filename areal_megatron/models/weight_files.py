"""The files of a model folder that hold the weights, as transformers reads them, and as engines do if they differ."""

from __future__ import annotations

import os
from pathlib import Path

from areal_megatron.process.errors import printable
from areal_megatron.run.json_input import read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"


def weight_map(folder: Path) -> dict[str, str]:
    """Returns tensor → file by the index, or nothing where SINGLE holds all tensors: as in transformers it comes first,
    but where the index counts it among its files.

    Raises OSError, and ValueError, which says what the folder lacks.
    """
    single = (folder / SINGLE).is_file()
    if not os.path.lexists(folder / INDEX):
        if not single:
            raise ValueError(f"{folder} has neither {INDEX} nor {SINGLE}; only safetensors are read")
        return {}
    file_of = _index(folder)
    if single and SINGLE not in file_of.values():
        return {}
    missing = sorted(name for name in {*file_of.values()} if not (folder / name).is_file())
    if missing:
        raise ValueError(f"{folder} lacks {printable(missing[0])}, which its index names, and {len(missing) - 1} more")
    return file_of


def check_weight_files(folder: Path, engines_read: bool) -> None:
    """Raises OSError, and ValueError with the remedy, unless trainers can read the folder's weights and, with
    `engines_read`, engines read the same.

    vLLM reads the files that an index names, and all must exist, whatever SINGLE is; without an index it reads all
    safetensors files.
    """
    file_of = weight_map(folder)
    if os.path.lexists(folder / ADAPTER):
        raise ValueError(
            f"{folder} has {ADAPTER}: an adapter is not applied; merge it into the weights, and remove that file"
        )
    if not engines_read or file_of:
        return
    if os.path.lexists(folder / INDEX):
        raise ValueError(
            f"{folder} has {SINGLE}, which trainers read, and {INDEX}, which engines follow to other files: they were "
            "saved at two times; remove what is older"
        )
    if others := sorted(file.name for file in folder.glob("*.safetensors") if file.name != SINGLE):
        raise ValueError(
            f"{folder} has {printable(others[0])} beside {SINGLE}; trainers do not read it, engines do: remove it"
        )


def _index(folder: Path) -> dict[str, str]:
    file = folder / INDEX
    try:
        found = read_object(file).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise ValueError("it has no weight_map")
        strange = [name for name in found.values() if not isinstance(name, str) or Path(name).name != name]
        if strange:
            raise ValueError(f"{printable(repr(strange[0]), 60)} is no file of the folder")
    except ValueError as e:
        raise ValueError(f"{file} cannot be read as an index of weights: {e}") from None
    return found

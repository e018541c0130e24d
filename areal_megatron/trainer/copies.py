"""Copies between host and device that nobody waits for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Returns the values of an array on `device`; on a CPU the tensor shares the array's memory.

    A copy to CUDA from memory that is not pinned would wait for all that the device still has to do.
    """
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

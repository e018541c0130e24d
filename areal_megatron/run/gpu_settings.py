"""The environment in which processes compute on GPUs, for CUDA and for torch's groups over NCCL. Imports no torch."""

from __future__ import annotations

import os

WATCHDOG = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""With these, a failed group of torch's fails alone, and at once. By default its watchdog asks for a dump of what
hangs, by a flag that all groups of the process share; the monitor of the first group sees it, and ends the process
eight minutes later, for which an engine's link is no reason. Nor does anybody wait for the dump: the watchdog would
for 60 s, and whoever lets go of the group for the watchdog (ProcessGroupNCCL.cpp). The groups that training needs
still end the process when they fail; that is their watchdog's own doing."""


def set_defaults() -> None:
    """Sets for this process, before it makes a group, what its launcher has not set. Of no effect on a CPU."""
    for name, value in WATCHDOG.items():
        os.environ.setdefault(name, value)

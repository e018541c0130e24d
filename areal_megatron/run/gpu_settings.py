"""The environment in which processes compute on GPUs, for CUDA, NCCL and torch's groups over it. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from areal_megatron.config import ConfigError

WATCHDOG = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""With these, a failed group of torch's fails alone, and at once. By default its watchdog asks for a dump of what hangs
by a flag shared by all groups of the process. The monitor of the first group sees it and ends the process eight minutes
later, for which an engine's link is no reason. Nor does anybody wait for the dump: the watchdog would for a
minute, and whoever lets go of the group for the watchdog (ProcessGroupNCCL.cpp). The groups that training needs still
end the process when they fail; that is their watchdog's own doing."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
SETTINGS = WATCHDOG | {CONNECTIONS: "32"}
"""A GPU then holds the work of all its streams in 32 queues, the most it has. NCCL puts a wait for each message there;
whatever shares its queue waits too, until the other end of the message has come (docs/resharding.md)."""
_RACES = "NCCL_LAUNCH_ORDER_IMPLICIT"


def set_defaults() -> None:
    """Sets for this process, before it uses a GPU, what its launcher has not set. Of no effect on a CPU."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def check(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if a process hangs or ends on GPUs in this environment."""
    if environment.get(_RACES, "0") != "0":
        raise ConfigError(
            f"{_RACES}={environment[_RACES]}: messages to engines start beside training, from threads of their own, "
            "which NCCL then takes for a race and ends the process; unset it"
        )
    if (given := environment.get(CONNECTIONS)) not in (None, SETTINGS[CONNECTIONS]):
        raise ConfigError(
            f"{CONNECTIONS}={given}: with fewer queues than {SETTINGS[CONNECTIONS]} on a GPU, messages to engines and "
            "collectives of training may wait for each other in a circle; unset it"
        )

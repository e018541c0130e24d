"""How many files and connections a process may have open, and how many the controller of a run needs."""

from __future__ import annotations

import os
import resource

from areal_megatron.config import Config, ConfigError

_OWN = 256
"""What the controller has open besides connections: libraries, logs, pipes."""
_PIPES_PER_WORKER = 3
_OF_A_TRAINER = 128
"""What a trainer rank has open, which was 122 of two on CPU. The first has a connection to each other one, too."""
_MOST = 1 << 20


def raise_limit() -> int:
    """Raises this process's limit of open files as far as the system lets it, up to a million, and returns it.

    The usual soft limit of 1,024 is kept low for programs that call select(), which none of ours does. Some containers
    allow a billion, and programs that close every number up to their limit before they start would take minutes.
    """
    limit, (_, hard) = hard_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def hard_limit() -> int:
    """Returns the number of open files to which a process started here can raise its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft, min(hard, _MOST) if hard != resource.RLIM_INFINITY else _MOST)


def needed(config: Config) -> int:
    """Returns how many descriptors the controller needs when all engines are busy.

    A group of `single_turn` is one request. Other workflows have one request a trajectory, and the user's own may run
    agents, each with a connection of its own to the controller.
    """
    rollout, configs = config.rollout, config.by_environment()
    workflows = {own.rollout.workflow for own in configs}
    only_groups = workflows == {"single_turn"}
    each = -(-rollout.max_running // rollout.group_size) if only_groups else rollout.max_running
    agents = rollout.max_running if any(":" in workflow for workflow in workflows) else 0
    per_engine = each + agents + 3  # its timeline, and the connections that poll it and that tell it of weights
    workers = sum(own.reward.workers or min(32, os.cpu_count() or 1) for own in configs)
    return rollout.engines * per_engine + 2 * config.trainer_ranks + _PIPES_PER_WORKER * workers + _OWN


def check(config: Config, limit: int) -> None:
    """Raises ConfigError if `limit` is less than the controller needs."""
    rollout = config.rollout
    if limit < (need := needed(config)):
        raise ConfigError(
            f"rollout.max_running: {rollout.engines} engines with {rollout.max_running} answers each need"
            f" {need:,} open files in the controller, whose node allows {limit:,}; raise the hard limit (ulimit -Hn)"
            " or lower rollout.max_running"
        )


def check_trainer(config: Config, limit: int) -> None:
    """Raises ConfigError if `limit` is less than a trainer rank needs."""
    if limit < (need := _OF_A_TRAINER + config.trainer_ranks):
        raise ConfigError(
            f"trainer: each of {config.trainer_ranks} ranks needs {need:,} open files, and their node allows"
            f" {limit:,}; raise the hard limit (ulimit -Hn)"
        )

"""Fetches what a run needs of the Hugging Face hub: `areal fetch CONFIG [key=value …]`.

For a machine with a network, such as a login node, before a run on nodes without one: the hub's cache (HF_HOME) must be
in a folder that both see. Whatever launches a run fetches what is not there. Exit code 0: all is there, 2: wrong input.
"""

from __future__ import annotations

import sys

from areal_megatron.config import ConfigError, config_file
from areal_megatron.launch.supervision import start
from areal_megatron.process.shown import guard
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import RunFolder


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.launch.fetch", __doc__)
    parser.add_config()
    options = parser.parse_intermixed_args(arguments)
    try:
        config = config_file.load(options.config, options.overrides)
        start.fetch(config, RunFolder(config.run_dir))
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"model.path={config.model.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

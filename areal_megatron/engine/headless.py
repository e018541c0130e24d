"""A part of an engine that serves no requests: vLLM's `serve --headless`, without the rest of vLLM's command line.

The rest looks up the version of a package called `vllm`, which vLLM's CPU build is not.

    python -m areal_megatron.engine.headless MODEL --headless [vLLM's options] [--passed-through JSON]
"""

from __future__ import annotations

import multiprocessing
import sys

from areal_megatron.config import ConfigError
from areal_megatron.engine import vllm_options
from areal_megatron.process import lifeline
from areal_megatron.process.imports import uncollected


def main() -> None:
    lifeline.hold()
    with uncollected():
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser, command = FlexibleArgumentParser(), ServeSubcommand()
    serve = command.subparser_init(parser.add_subparsers())
    try:
        options = vllm_options.parse(serve, sys.argv[1:])
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    command.validate(options)
    try:
        command.cmd(options)
    except SystemExit:  # by SIGTERM: ranks that wait for the first part do not see it, and vLLM waits for them
        for rank in multiprocessing.active_children():
            rank.kill()
        raise


if __name__ == "__main__":  # its ranks are processes that import this module
    main()

"""An engine, or the part of it that serves requests: vLLM's own server, whose connections are guarded (guard.py).

python -m areal_megatron.engine.serving [vLLM's options] [--passed-through JSON]
"""

from __future__ import annotations

import os
import sys

from areal_megatron.config import ConfigError
from areal_megatron.engine import vllm_options
from areal_megatron.engine.environment import SERVED_MODEL
from areal_megatron.engine.server import PASSED_THROUGH
from areal_megatron.process import lifeline
from areal_megatron.process.ending import end
from areal_megatron.process.imports import uncollected


def main() -> None:
    lifeline.hold()
    with uncollected():
        import uvloop
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from areal_megatron.engine.guard import uvicorn_options

    cli_env_setup()
    try:
        served = os.environ.get(SERVED_MODEL, "")
        options = vllm_options.parse(make_arg_parser(FlexibleArgumentParser()), sys.argv[1:], served)
        if PASSED_THROUGH in sys.argv:
            vllm_options.check_engine(options, served)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    configure_logging_from_args(options)
    validate_parsed_serve_args(options)
    uvloop.run(run_server(options, **uvicorn_options()))


if __name__ == "__main__":  # its processes may import this module
    main()
    end()

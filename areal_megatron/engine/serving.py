"""An engine, or the part of it that serves requests: vLLM's own server, whose connections are guarded (guard.py).

python -m areal_megatron.engine.serving [vLLM's options]
"""

from __future__ import annotations


def main() -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from areal_megatron.engine.guard import uvicorn_options

    cli_env_setup()
    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    configure_logging_from_args(options)
    validate_parsed_serve_args(options)
    uvloop.run(run_server(options, **uvicorn_options()))


if __name__ == "__main__":  # its processes may import this module
    main()

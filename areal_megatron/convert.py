"""Converts between Hugging Face folders and distributed checkpoints of megatron-core (format torch_dist).

    python -m areal_megatron.convert to-hf CHECKPOINT OUT [--config HF_DIR] [--dtype bfloat16] [--shard-gb 4]
                                             [--verify] [--no-sync]
    python -m areal_megatron.convert from-hf HF_DIR OUT [--dtype bfloat16] [--shard-gb 4] [--verify] [--no-sync]

CHECKPOINT is a checkpoint folder of a run (RUN/checkpoints/version-000012), or a torch_dist folder alone with --config,
a folder that has config.json and tokenizer. OUT is a new folder; it appears whole or not at all. One process without
GPUs that never holds more than a part of a tensor; every parallel layout and every model of
areal_megatron/models. Exit code 2 and one line for input that cannot be converted. More:
docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from areal_megatron.checkpoint.convert import from_hf, to_hf
from areal_megatron.checkpoint.disk import ITEMSIZE, CheckpointError
from areal_megatron.config import ConfigError


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    settings = {
        "dtype": options.dtype,
        "shard_bytes": int(options.shard_gb * 2**30),
        "verify": options.verify,
        "sync": options.sync,
    }
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("")
            settings["report"] = lambda done, total: bar.update(task, completed=done, total=total)
            if options.direction == "to-hf":
                to_hf(options.checkpoint, options.out, description=options.config, **settings)
            else:
                from_hf(options.hf_dir, options.out, **settings)
    except (CheckpointError, ConfigError) as e:
        # what reads config.json speaks of the key of a run's config
        print(f"error: {str(e).removeprefix('model.path: ')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(f"wrote {options.out}" + (", read back and compared" if options.verify else ""))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    directions = parser.add_subparsers(dest="direction", required=True)
    to = directions.add_parser("to-hf", help="write a Hugging Face folder")
    to.add_argument("checkpoint", type=Path, help="checkpoint folder of a run, or a torch_dist folder")
    to.add_argument("out", type=Path, help="new folder")
    to.add_argument("--config", type=Path, help="folder with config.json and tokenizer, instead of CHECKPOINT/hf")
    back = directions.add_parser("from-hf", help="write a checkpoint folder, of the model without an optimizer")
    back.add_argument("hf_dir", type=Path, help="Hugging Face folder with safetensors")
    back.add_argument("out", type=Path, help="new folder")
    for direction in (to, back):
        direction.add_argument("--dtype", choices=ITEMSIZE, help="default: as it is")
        direction.add_argument("--shard-gb", type=float, default=4.0, help="GiB a file at most; default 4")
        direction.add_argument(
            "--no-sync",
            dest="sync",
            action="store_false",
            help="do not wait until everything is on the disk; cp does not either",
        )
        direction.add_argument("--verify", action="store_true", help="read the result back and compare every tensor")
    options = parser.parse_args(arguments)
    if options.shard_gb <= 0:
        parser.error(f"--shard-gb: {options.shard_gb} is not above 0")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is half-written is removed
    sys.exit(main())

"""Converts between Hugging Face or PEFT folders and distributed checkpoints of megatron-core (format torch_dist).

    areal convert to-hf CHECKPOINT OUT [--config HF_DIR] [--base HF_DIR] [--dtype bfloat16] [--shard-gb 4]
                                         [--verify] [--no-sync]
    areal convert from-hf HF_DIR OUT [--dtype bfloat16] [--shard-gb 4] [--verify] [--no-sync]
    areal convert to-peft CHECKPOINT OUT [--base HF_DIR] [--dtype bfloat16] [--verify] [--no-sync]
    areal convert from-peft PEFT_DIR OUT [--base HF_DIR] [--dtype bfloat16] [--verify] [--no-sync]

CHECKPOINT is a checkpoint folder of a run (RUN/checkpoints/version-000012), which holds `trainer/`, a torch_dist folder
as megatron-core writes it, and `hf/`, all of the Hugging Face folder but the weights; or a torch_dist folder alone with
--config, a folder that has config.json and tokenizer; or an export of a run (RUN/exports/version-000012). Of a
checkpoint of adapters, or a PEFT folder, to-hf writes the whole model, with the adapter added to its weights. OUT is a
new folder; it appears whole or not at all. One process without GPUs that never holds more than a part of a tensor;
every parallel layout and every model of areal_megatron/models. Exit code 2 and one line for input that cannot be
converted. More: docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import sys
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from areal_megatron.checkpoint.convert import from_hf, from_peft, to_hf, to_peft
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.config import ConfigError
from areal_megatron.hub import hub
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.process.errors import printable
from areal_megatron.process.shown import guard
from areal_megatron.process.terminal import Terminal
from areal_megatron.run import versions
from areal_megatron.run.arguments import Parser


def _end_with(parent: int) -> None:
    """Has the kernel send this process SIGTERM when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before
        sys.exit(128 + signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    guard()
    options = _options(arguments)
    if options.parent:
        _end_with(options.parent)
    settings = {
        "dtype": options.dtype,
        "shard_bytes": int(options.shard_gb * 2**30),
        "verify": options.verify,
        "sync": options.sync,
    }
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    terminal = Terminal(sys.stderr)
    try:
        with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
            guard()  # what is printed above the bar
            task = bar.add_task("")
            settings["report"] = lambda done, total: bar.update(task, completed=done, total=total)
            if named := getattr(options, "base", None):
                settings["base"] = Path(hub.model_folder(named, "--base"))
            if options.direction == "to-hf":
                description = options.config and Path(hub.model_folder(options.config, "--config", weights=False))
                to_hf(options.checkpoint, options.out, description=description, **settings)
            elif options.direction == "to-peft":
                del settings["shard_bytes"]  # PEFT has one file
                to_peft(options.checkpoint, options.out, **settings)
            elif options.direction == "from-peft":
                from_peft(options.peft_dir, options.out, **settings)
            else:
                from_hf(Path(hub.model_folder(options.hf_dir, "HF_DIR")), options.out, **settings)
    except (CheckpointError, ConfigError) as e:
        # errors about config.json name the key of a run's config
        print(f"error: {str(e).removeprefix('model.path: ')}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: cannot read {printable(str(e.filename))}: {e.strerror}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:  # torch, which reading and writing distributed checkpoints needs
        print(f"error: {versions.lacking(e)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(f"wrote {options.out}" + (", read back and compared" if options.verify else ""))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("areal_megatron.programs.convert", __doc__)
    directions = parser.add_subparsers(dest="direction", required=True)
    to = directions.add_parser("to-hf", help="write a Hugging Face folder")
    to.add_argument("checkpoint", type=Path, help="checkpoint folder or export of a run, or a torch_dist folder")
    to.add_argument("out", type=Path, help="new folder")
    to.add_argument(
        "--config", help="folder, or name on the hub, with config.json and tokenizer, instead of CHECKPOINT/hf"
    )
    back = directions.add_parser("from-hf", help="write a checkpoint folder, of the model without an optimizer")
    back.add_argument("hf_dir", help="Hugging Face folder with safetensors, or OWNER/NAME of the hub")
    back.add_argument("out", type=Path, help="new folder")
    adapter_to = directions.add_parser("to-peft", help="write the adapter of a checkpoint as PEFT's folder")
    adapter_to.add_argument("checkpoint", type=Path, help="checkpoint folder of a run that trains adapters")
    adapter_to.add_argument("out", type=Path, help="new folder")
    adapter_back = directions.add_parser(
        "from-peft", help="write a checkpoint folder, of an adapter without an optimizer"
    )
    adapter_back.add_argument("peft_dir", type=Path, help="folder with adapter_config.json")
    adapter_back.add_argument("out", type=Path, help="new folder")
    for direction in (to, adapter_to, adapter_back):
        direction.add_argument(
            "--base", help="folder, or name on the hub, of the model that an adapter is for; default: what it names"
        )
    for direction in (to, back, adapter_to, adapter_back):
        direction.add_argument("--dtype", choices=ITEMSIZE, help="dtype of the tensors written; default: as it is")
        direction.add_argument("--shard-gb", type=float, default=4.0, help="GiB a file at most; default 4")
        direction.add_argument(
            "--no-sync",
            dest="sync",
            action="store_false",
            help="do not wait until everything is on the disk",
        )
        direction.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # end when this process ends
        direction.add_argument("--verify", action="store_true", help="read the result back and compare every tensor")
    options = parser.parse_args(arguments)
    if not 0 < options.shard_gb * 2**30 < math.inf:
        parser.error(f"--shard-gb: must be a finite number above 0, is {options.shard_gb}")
    read = getattr(options, "checkpoint", None) or getattr(options, "peft_dir", None)
    if read and not os.path.exists(read) and os.path.isdir(options.out):
        parser.error(f"{read} is not there, and {options.out} is: what is read goes first, the new folder second")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is half-written is removed
    sys.exit(main())

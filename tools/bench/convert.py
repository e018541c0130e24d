"""The cost of converting a distributed checkpoint, compared with copying and reading the same files.

    python tools/bench/convert.py [--parameters 2e9] [--repetitions 3] [--json FILE] [--out NEWFOLDER]

Generates a Qwen3 of that many parameters in bfloat16 as four ranks of TP2 × PP2 would have saved it, then, once a
repetition: `cp` of the checkpoint, a pass that reads it, and `areal convert to-hf`, with starting Python
and imports. All find the checkpoint in the page cache if it fits there. `cp` leaves writing to the disk to the kernel,
as to-hf does with --no-sync; `cp` followed by `sync` waits for the disk, as to-hf does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_megatron.process.files import new_folder
from tools.bench import common
from tools.bench.common import ROOT, spreads

if TYPE_CHECKING:
    import numpy as np

    from areal_megatron.reshard.boxes import Box, Shape

TP, FILES = 2, 4
BUFFER = 16 * 2**20
RANDOM_ELEMENTS = 2**20


def config_of(parameters: float) -> dict[str, Any]:
    """Returns config.json of a Qwen3 with about this number of parameters and an output layer that is not tied."""
    hidden, ffn = (2048, 6144) if parameters >= 1e9 else (512, 1536)
    vocabulary = 151936 if parameters >= 2e8 else 1024
    heads, kv_heads, head_dim = hidden // 128, hidden // 256, 128
    layer = 2 * hidden * (heads + kv_heads) * head_dim + 3 * hidden * ffn
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": max(1, round((parameters - 2 * vocabulary * hidden) / layer)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def generate(folder: Path, parameters: float) -> None:
    """Writes a checkpoint folder of random numbers, chunk by chunk.

    Called in a process of its own, whose memory does not count towards the conversion's peak.
    """
    import numpy as np

    from areal_megatron.checkpoint import torch_dist_file

    config = config_of(parameters)
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random = np.random.default_rng(0).integers(2**16, size=RANDOM_ELEMENTS, dtype=np.uint16)

    def elements(name: str, box: Box) -> Iterator[np.ndarray]:
        yield np.resize(random, box.shape)

    tensors, chunks = chunks_of(config)
    total = 2 * sum(box.size for _, box in chunks)
    dtyped = {name: ("bfloat16", shape) for name, shape in tensors.items()}
    torch_dist_file.write_folder(folder / "trainer", dtyped, chunks, elements, file_bytes=total // FILES + 1)


def chunks_of(config: dict[str, Any]) -> tuple[dict[str, Shape], list[tuple[str, Box]]]:
    """Returns the shapes of the checkpoint's tensors, and each rank's part of each layer."""
    from areal_megatron.checkpoint import torch_dist
    from areal_megatron.reshard import trainer_layout
    from areal_megatron.reshard.trainer_layout import MegatronSizes

    whole = torch_dist.layout(config).held
    share = trainer_layout.layout(config, MegatronSizes(tp=TP), 0)
    tensors, chunks = {}, []
    for pattern, part in share.held.items():
        name = torch_dist.tensor_name(pattern)
        axis = next((axis for axis, (a, b) in enumerate(zip(whole[name], part, strict=True)) if a != b), None)
        shape = list(whole[name])
        if axis is not None:
            shape[axis] = part[axis] * TP  # the vocabulary is padded
        tensors[name] = tuple(shape)
        count = 1 if axis is None else TP * (2 if name.endswith("linear_fc1.weight") else 1)
        chunks += [(name, box) for box in cuts(tensors[name], pattern.count("{}"), axis or 0, count)]
    return tensors, chunks


def cuts(shape: Shape, layered: int, axis: int, count: int) -> Iterator[Box]:
    """Yields each layer's part of a tensor, cut into `count` boxes along an axis."""
    from areal_megatron.reshard.boxes import Box

    for layer in range(shape[0] if layered else 1):
        start, stop = [0] * len(shape), list(shape)
        if layered:
            start[0], stop[0] = layer, layer + 1
        for part in range(count):
            if count > 1:
                start[axis], stop[axis] = part * shape[axis] // count, (part + 1) * shape[axis] // count
            yield Box(tuple(start), tuple(stop))


def measure(checkpoint: Path, out: Path) -> dict[str, float]:
    """Returns the seconds of one repetition, their ratios, and the peak memory of the conversion."""
    copy, converted = out / "copy", out / "converted"
    os.sync()
    start = time.monotonic()
    subprocess.run(["cp", "-r", checkpoint / "trainer", copy], check=True)
    copied = time.monotonic()
    subprocess.run(["sync", *copy.iterdir()], check=True)
    synced = time.monotonic()
    shutil.rmtree(copy)
    os.sync()
    reading = time.monotonic()
    read(checkpoint / "trainer")
    cp, sync, read_once = copied - start, synced - copied, time.monotonic() - reading
    os.sync()
    unsynced, _ = run("to-hf", checkpoint, converted, "--no-sync")
    shutil.rmtree(converted)
    os.sync()
    seconds, peak = run("to-hf", checkpoint, converted)
    shutil.rmtree(converted)
    starting, _ = run("--help")
    return {
        "to_hf_s": seconds,
        "to_hf_no_sync_s": unsynced,
        "cp_s": cp,
        "read_s": read_once,
        "sync_of_the_copy_s": sync,
        "starting_python_s": starting,
        "no_sync_over_cp_and_read": unsynced / (cp + read_once),
        "time_over_cp_and_sync_and_read": seconds / (cp + sync + read_once),
        "time_over_cp_and_read": seconds / (cp + read_once),
        "peak_rss_gb": peak / 1e9,
    }


def read(folder: Path) -> None:
    buffer = bytearray(BUFFER)
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run(*arguments: object) -> tuple[float, int]:
    """Calls the converter; returns its seconds and the peak of its memory in bytes."""
    command = [sys.executable, "-m", "areal_megatron.programs.convert", *map(str, arguments)]
    start = time.monotonic()
    process = subprocess.Popen(command, env=dict(os.environ, PYTHONPATH=str(ROOT)), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"error: the conversion ended with exit code {os.waitstatus_to_exitcode(status)}")
    return time.monotonic() - start, usage.ru_maxrss * 1024


def in_own_process(work: Callable[..., None], *arguments: object) -> None:
    maker = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    maker.start()
    maker.join()
    if maker.exitcode:
        sys.exit("error: the checkpoint could not be generated")


def main() -> None:
    parser = common.parser(__doc__, repetitions=3, out="bench-convert")
    parser.add_argument("--parameters", type=float, default=2e9, help="default: 2e9")
    options = parser.parse_args()
    out = new_folder("bench-convert", options.out)
    try:
        in_own_process(generate, out / "run", options.parameters)
        size = sum(path.stat().st_size for path in (out / "run" / "trainer").iterdir())
        report = spreads([measure(out / "run", out) for _ in range(options.repetitions)])
    finally:
        shutil.rmtree(out)
    print(f"{size / 1e9:.2f} GB; median (lowest – highest) of {options.repetitions} repetitions")
    print(common.report(report))
    common.keep(options.json, {"checkpoint_gb": size / 1e9} | report)


if __name__ == "__main__":
    main()

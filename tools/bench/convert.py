"""The cost of converting a distributed checkpoint, compared with copying and reading the same files; that of exports of
what has changed, compared with whole ones.

    python tools/bench/convert.py [--parameters 2e9] [--repetitions 3] [--json FILE] [--out NEWFOLDER]
    python tools/bench/convert.py --versions 20 [--lr 1e-6] [--parameters 3e7] [--json FILE] [--out NEWFOLDER]

Generates a Qwen3 of that many parameters in bfloat16 as four ranks of TP2 × PP2 would have saved it, then, once a
repetition: `cp` of the checkpoint, a pass that reads it, and areal_megatron.convert to-hf, with starting Python
and imports. All find the checkpoint in the page cache if it fits there. `cp` leaves writing to the disk to the kernel,
as to-hf does with --no-sync; `cp` followed by `sync` waits for the disk, as to-hf does.

With --versions the model is trained, with AdamW, float32 main parameters and random gradients. Version 0 and each one
after a step is saved and exported twice: whole, and, but for version 0, as what has changed, by the bases that a run
would take. Each of the latter is made whole again and compared byte for byte. For the choice of bases it is also
written as what has changed since version 0, and since the version before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_megatron.files import new_folder, write_json
from tools.bench.figures import line, spreads

if TYPE_CHECKING:
    import numpy as np
    import torch

    from areal_megatron.reshard.boxes import Box, Shape

ROOT = Path(__file__).resolve().parent.parent.parent
TP, FILES = 2, 4
BUFFER = 16 * 2**20
RANDOM_ELEMENTS = 2**20


def config_of(parameters: float) -> dict[str, Any]:
    """Returns config.json of a Qwen3 with about so many parameters and an output layer that is not tied."""
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


def export_versions(folder: Path, parameters: float, versions: int, lr: float) -> None:
    """Writes into figures.json the bytes and seconds of exports of changes over those of whole ones, as sums over the
    versions from 1 on; leaves the last checkpoint and the exports of changes. In a process of its own, like generate.

    Raises AssertionError if one, made whole again, is not the whole one.
    """
    from areal_megatron.checkpoint.delta import base_for
    from areal_megatron.convert import to_hf

    model, size, seconds, shares = Trained(parameters, lr), Counter(), Counter(), Counter()
    for version in range(versions + 1):
        if version:
            shares.update(model.step(measured=version == versions))
        name = f"version-{version:06d}"
        checkpoint = model.save(folder / "checkpoint")

        def export(kind: str, source: Path, base: Path | None = None, name: str = name) -> Path:
            out = folder / kind / name
            out.parent.mkdir(exist_ok=True)
            os.sync()
            start = time.monotonic()
            to_hf(source, out, base=base)
            if int(name[8:]):
                seconds[kind] += time.monotonic() - start
                size[kind] += sum(path.stat().st_size for path in out.iterdir())
            return out

        whole = export("whole", checkpoint)
        exported = export("changes", checkpoint, base_for(folder / "changes", version, 1, versions))
        if version:
            for kind, since in (("since_version_0", 0), ("since_the_one_before", version - 1)):
                shutil.rmtree(export(kind, checkpoint, folder / "whole" / f"version-{since:06d}"))
            shares["changed_share"] += (
                json.loads((exported / "delta.json").read_text(encoding="utf-8"))["changed_share"] / versions
            )
        again = export("again", exported)
        assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes(), name
        shutil.rmtree(again)
        if version > 1:
            shutil.rmtree(folder / "whole" / f"version-{version - 1:06d}")
        if version < versions:
            shutil.rmtree(checkpoint)
    figures = {
        "changes_over_whole": size["changes"] / size["whole"],
        "with_version_0_over_whole": (size["changes"] / size["whole"] * versions + 1) / (versions + 1),
        "since_version_0_over_whole": size["since_version_0"] / size["whole"],
        "since_the_one_before_over_whole": size["since_the_one_before"] / size["whole"],
        **shares,
        "writing_over_whole": seconds["changes"] / seconds["whole"],
        "whole_again_over_whole": seconds["again"] / seconds["whole"],
        "whole_s": seconds["whole"] / versions,
        "whole_gb": size["whole"] / versions / 1e9,
    }
    write_json(folder / "figures.json", figures)


class Trained:
    """A model in training that is saved as generate() saves one."""

    def __init__(self, parameters: float, lr: float):
        import torch

        torch.manual_seed(0)
        self._config = config_of(parameters)
        self._shapes, self._chunks = chunks_of(self._config)
        self._masters = {
            name: torch.ones(shape) if "norm" in name else 0.02 * torch.randn(shape)
            for name, shape in self._shapes.items()
        }
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, measured: bool) -> dict[str, float]:
        """Makes an optimizer step; returns, if `measured`, what it changed of the optimizer's own float32 state."""
        import torch

        for master in self._masters.values():
            master.grad = torch.randn_like(master)
        before = [tensor.clone() for tensor in self._state()] if measured else []
        self._optimizer.step()
        return state_changes(before, self._state()) if measured else {}

    def save(self, folder: Path) -> Path:
        """Returns the folder."""
        import torch

        from areal_megatron.checkpoint import torch_dist_file

        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "config.json").write_text(json.dumps(self._config), encoding="utf-8")

        def elements(name: str, box: Box) -> Iterator[np.ndarray]:
            yield self._masters[name][box.slices].bfloat16().view(torch.uint16).contiguous().numpy()

        dtyped = {name: ("bfloat16", shape) for name, shape in self._shapes.items()}
        torch_dist_file.write_folder(folder / "trainer", dtyped, self._chunks, elements)
        return folder

    def _state(self) -> list[torch.Tensor]:
        moments = [
            state[key] for state in self._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq") if key in state
        ]
        return [*self._masters.values(), *moments]


def state_changes(before: list[torch.Tensor], after: list[torch.Tensor]) -> dict[str, float]:
    """Returns which share of elements differs, and how many bytes they take as changes, over those of all elements."""
    from areal_megatron.reshard import changes

    changed = encoded = elements = 0
    for then, now in zip(before, after, strict=True):
        found, _ = changes.find(then.view(-1), now.view(-1))
        changed, elements = changed + len(found.places), elements + now.numel()
        encoded += min(len(changes.encode(found, changes.zstd)), now.nbytes)
    return {"optimizer_changed_share": changed / elements, "optimizer_changes_over_whole": encoded / (4 * elements)}


def read(folder: Path) -> None:
    buffer = bytearray(BUFFER)
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run(*arguments: object) -> tuple[float, int]:
    """Calls the converter; returns its seconds and the peak of its memory in bytes."""
    command = [sys.executable, "-m", "areal_megatron.convert", *map(str, arguments)]
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, help="default: 2e9, or 3e7 with --versions")
    parser.add_argument("--versions", type=int, default=0, help="train so many steps and export each version")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of these steps; default 1e-6")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the same figures here")
    parser.add_argument("--out", type=Path, help="new folder, removed at the end; default: runs/bench-convert-N")
    options = parser.parse_args()
    parameters = options.parameters or (3e7 if options.versions else 2e9)
    out = new_folder("bench-convert", options.out)
    try:
        if options.versions:
            in_own_process(export_versions, out, parameters, options.versions, options.lr)
            figures = json.loads((out / "figures.json").read_text(encoding="utf-8"))
            base = out / "changes" / f"version-{options.versions:06d}"
            seconds, peak = run("to-hf", out / "checkpoint", out / "again-as-changes", "--base", base)
            figures |= {"process_s": seconds, "peak_rss_gb": peak / 1e9}
            for key, figure in figures.items():
                print(f"{key:<50}{figure:>10.4f}")
            if options.json:
                write_json(options.json, figures)
            return
        in_own_process(generate, out / "run", parameters)
        size = sum(path.stat().st_size for path in (out / "run" / "trainer").iterdir())
        report = spreads([measure(out / "run", out) for _ in range(options.repetitions)])
    finally:
        shutil.rmtree(out)
    print(f"{size / 1e9:.2f} GB; median (lowest – highest) of {options.repetitions} repetitions")
    for key, figure in report.items():
        print(line(key, figure))
    if options.json:
        write_json(options.json, {"checkpoint_gb": size / 1e9} | report)


if __name__ == "__main__":
    main()

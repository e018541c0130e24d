"""Measures how well a run's machines did: `areal calibrate RUN … --gpu h100 --out my_gpu.json`.

The runs are finished ones of this kind of GPU, or of CPU cores, with rollout.dump=true. Their times are fitted to their
work (forecast/calibration.py). The file holds the shares of the GPU's rates that they reached, for `areal simulate
--gpu my_gpu.json` and `areal plan --best`. Two runs with another rollout.max_running tell more than one. Exit code 2
for wrong input. Imports neither torch nor vllm.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from areal_megatron.config import ConfigError
from areal_megatron.planning.forecast.accelerators import CORE, Accelerator, accelerator, this_version
from areal_megatron.planning.forecast.calibration import FinishedRun, calibrated
from areal_megatron.process.shown import guard
from areal_megatron.run.arguments import Parser, write_output
from areal_megatron.run.folder import RunFolder


def table(gpu: Accelerator, found: Accelerator) -> str:
    """Returns the efficiencies beside those that are assumed of the GPU otherwise."""
    rows = [f"{'':<12}{'measured':>12}{'otherwise':>12}"]
    before = asdict(gpu.efficiencies)
    rows += [f"{name:<12}{value:>12.4g}{before[name]:>12.4g}" for name, value in asdict(found.efficiencies).items()]
    return "\n".join(rows)


def contents(found: Accelerator) -> dict[str, object]:
    """Returns what the file holds."""
    rates: dict[str, object] = {key: value for key, value in asdict(found).items() if key not in ("name", "source")}
    return rates | {"version": this_version()}


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.planning.calibrate", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--gpu", help="the GPU that they ran on, as for areal simulate; not for runs on CPU cores")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args(arguments)
    try:
        runs = [FinishedRun.of(RunFolder(folder)) for folder in options.runs]
        on_cpu = runs[0].config.machine.device == "cpu"
        if on_cpu == bool(options.gpu):
            what = "runs on CPU cores have none" if on_cpu else "say which GPU these runs were on, e.g. h100"
            raise ConfigError(f"--gpu: {what}")
        gpu = CORE if on_cpu else accelerator(options.gpu)
        found = calibrated(runs, gpu)
        write_output("--out", options.out, contents(found))
        print(table(gpu, found))
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

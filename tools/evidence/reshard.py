"""Packing, casting and unpacking of a whole model against plain copies: tools/bench/reshard.py --device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tools.bench import reshard_device
from tools.evidence.parts import Finding, Options, Part

AIM = "aim: at least 0.8"


def packing(options: Options) -> Iterator[Finding]:
    model = reshard_device.SMALL if options.small else reshard_device.QWEN_1_5B
    report = reshard_device.measure(torch.device(options.device), 1 if options.small else 5, model)
    for kind in ("pack", "cast", "unpack"):
        yield Finding(f"{kind}, speed over plain copies", report[f"{kind}_over_copy"], AIM, more=report["figures"])


PARTS: dict[str, Part] = {"packing": packing}

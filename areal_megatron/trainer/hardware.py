"""The kernels that a trainer rank computes with, by its device, its packages and the dtype of the model.

`KERNELS` is the table, `lacks` reads it for any hardware, and `kernels` for this machine. A rank does without a missing
kernel: everything has a plain form, which is also used on CPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from functools import cache

import torch

from areal_megatron.config import ConfigError
from areal_megatron.models.table import Dimensions
from areal_megatron.run.versions import has_fla

MATRIX_UNITS = (8, 9, 10, 11, 12)
"""Major compute capabilities of GPUs that multiply bfloat16 (Ampere and later)."""


@dataclass(frozen=True)
class Kernel:
    """What a kernel asks of the hardware."""

    does: str
    needs: tuple[str, ...] = ()
    """Names in Hardware.has."""
    majors: tuple[int, ...] = MATRIX_UNITS
    """Major compute capabilities that it is written for."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    switch: str = ""
    """The field of megatron-core's TransformerConfig that turns it on, if it is Megatron's to call."""
    experts: bool = False
    """Whether only models with experts use it."""


HALF = ("bfloat16", "float16")
_FLA = "fla-core 0.6"
KERNELS = {
    "swiglu": Kernel("SwiGLU in one pass", ("triton", "a C compiler"), switch="bias_activation_fusion"),
    "gradients": Kernel(
        "products that add to float32 gradients",
        ("torch.addmm with out_dtype",),
        dtypes=HALF,
        switch="gradient_accumulation_fusion",
    ),
    "rotary": Kernel("rotary embeddings in one pass", ("triton", "a C compiler")),
    "permutation": Kernel(
        "sorting of tokens by experts in one pass", ("TransformerEngine",), switch="moe_permute_fusion", experts=True
    ),
    "experts": Kernel(
        "one product for all experts",
        ("torch.nn.functional.grouped_mm",),
        majors=(9, 10),  # elsewhere torch itself multiplies expert by expert
        dtypes=("bfloat16",),
        experts=True,
    ),
    "fa2": Kernel("attention with FlashAttention 2", dtypes=HALF),
    "fa3": Kernel("attention with FlashAttention 3", ("flash_attn_interface",), majors=(9,), dtypes=HALF),
    "fa4": Kernel("attention with FlashAttention 4", ("flash_attn.cute",), majors=(9, 10), dtypes=HALF),
    "delta_rule": Kernel("gated delta nets in a few passes", (_FLA,), dtypes=HALF),
    "deep_ep": Kernel("DeepEP", ("deep_ep",), majors=(9, 10), experts=True),
}
"""Name → kernel. Megatron's other fusions stay off: bias_dropout_fusion, since models without dropout and biases there
leave one addition to it; moe_router_fusion, since its kernel cannot replay routes (trainer/routing.py);
apply_rope_fusion, since it needs TransformerEngine and knows no factors (trainer/elementwise.py has one of our own);
masked_softmax_fusion and persist_layer_norm, since no layer here has their modules."""
PACKAGES = {
    "triton": "triton",
    "flash_attn.cute": "flash-attn-4",
    "flash_attn_interface": "",
    "deep_ep": "",
    _FLA: "",
    "TransformerEngine": "",
}
"""What a kernel needs → the package in requirements-gpu.lock that brings it, or "" where there is none. FlashAttention
3 and DeepEP are on no package index, TransformerEngine is compiled against the torch that is there, and fla-core is
for one family alone."""


@dataclass(frozen=True)
class Hardware:
    major: int
    """Major compute capability; 0: a CPU."""
    has: frozenset[str]


def lacks(name: str, hardware: Hardware, dtype: str) -> str:
    """Returns why a kernel cannot be used; "" if it can."""
    kernel = KERNELS[name]
    if not hardware.major:
        return "there is no GPU"
    if hardware.major not in kernel.majors:
        return f"it is not written for GPUs of compute capability {hardware.major}"
    if dtype not in kernel.dtypes:
        return f"it does not compute in {dtype}"
    return " and ".join(f"{need} is missing" for need in kernel.needs if need not in hardware.has)


def kernels(device: torch.device, dtype: str) -> dict[str, str]:
    """Returns the name of each kernel → why it cannot be used on this machine; "" if it can."""
    return {name: lacks(name, found(device), dtype) for name in KERNELS}


def installed(device: torch.device, dtype: str) -> dict[str, str]:
    """Does what `kernels` does, and where there is no GPU, as beside a launcher, takes any for the right one."""
    if device.type == "cuda":
        return kernels(device, dtype)
    return {name: lacks(name, Hardware(kernel.majors[0], _packages()), dtype) for name, kernel in KERNELS.items()}


def fusions(absent: dict[str, str], experts: bool) -> dict[str, bool]:
    """Returns megatron-core's switches, given what `kernels` returns."""
    used = {name: kernel for name, kernel in KERNELS.items() if kernel.switch and (experts or not kernel.experts)}
    return {kernel.switch: not absent[name] for name, kernel in used.items()}


def check_dispatch(setting: str, absent: dict[str, str]) -> None:
    """Raises ConfigError if trainer.expert_dispatch names what is not there."""
    if setting == "flex" and absent["deep_ep"]:
        raise ConfigError(
            f"trainer.expert_dispatch: flex needs DeepEP, and {absent['deep_ep']}; install it, or leave the key out"
        )


def describe(absent: dict[str, str], model: Dimensions, grouped: bool) -> str:
    """Returns one line: the kernels used besides attention's, and the unused ones, with the reason.

    `grouped`: whether experts are TransformerEngine's, which multiplies them together itself.
    """
    shown = ["swiglu", "gradients", *([] if model.latent else ["rotary"]), *(["permutation"] if model.experts else [])]
    shown += ["experts"] if model.experts and not grouped else []
    shown += ["delta_rule"] if model.linear else []
    on = [KERNELS[name].does for name in shown if not absent[name]]
    off = [f"{KERNELS[name].does} ({absent[name]})" for name in shown if absent[name]]
    parts = [", ".join(on) or "no fused kernels", *(["without " + ", ".join(off)] if off else [])]
    if "experts" in shown and absent["experts"]:
        parts.append("experts are multiplied one by one, in a loop")
    return "; ".join(parts)


@cache
def found(device: torch.device) -> Hardware:
    if device.type != "cuda":
        return Hardware(0, frozenset())
    has = set(_packages())
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        has.add("a C compiler")  # Triton compiles the code that launches its kernels
    if hasattr(torch.nn.functional, "grouped_mm"):
        has.add("torch.nn.functional.grouped_mm")
    if _adds_in_float32(device):
        has.add("torch.addmm with out_dtype")
    if _has_fusions_of_transformer_engine():
        has.add("TransformerEngine")
    return Hardware(torch.cuda.get_device_capability(device)[0], frozenset(has))


def _packages() -> frozenset[str]:
    has = {name for name in ("triton", "flash_attn_interface", "flash_attn.cute", "deep_ep") if _can_import(name)}
    return frozenset(has | ({_FLA} if has_fla() else set()))


def _can_import(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the package that it would be a part of
        return False


def _adds_in_float32(device: torch.device) -> bool:
    ones = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def _has_fusions_of_transformer_engine() -> bool:
    from megatron.core.transformer.moe import moe_utils

    permute = ("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_unpermute")
    names = (*permute, "fused_sort_chunks_by_index_with_probs")
    return all(getattr(moe_utils, name, None) for name in names)

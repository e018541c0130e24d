"""Where vLLM itself writes an adapter, beside where an update writes it: what loaded_parameters.py asks of a case with
an adapter.

Its model's folder has factors in the folder `adapter`, by PEFT's names without their prefix, and in adapter.json the
fields of an Adapter. It finds the number of layers, those in which vLLM's slot is empty, those that differ between the
two slots, and those that have something in the slot which stays empty.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader import get_model

from areal_megatron.checkpoint import hf
from areal_megatron.engine.adapters import Slots, slots
from areal_megatron.models.adapter import Adapter
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.policy_slot import POLICY, PolicySlot

PEFT = "base_model.model."
TOGETHER = 2
"""Adapters in an engine: the policy's, and the same one as vLLM loads it."""


def is_adapted(folder: Path) -> bool:
    return (folder / "adapter.json").exists()


def adapter_of(folder: Path) -> Adapter:
    return Adapter.of_told(json.loads((folder / "adapter.json").read_text()))


def room(folder: Path) -> Slots:
    return slots([adapter_of(folder)] * TOGETHER, architecture(read_config(folder)), driven=True)  # one stays empty


def options(folder: Path) -> dict[str, Any]:
    """What an engine is told for the adapter of its model; nothing if that has none."""
    if not is_adapted(folder):
        return {}
    own = room(folder)
    sizes = {"max_lora_rank": own.each.rank, "max_loras": own.count, "max_cpu_loras": own.count}
    return {"enable_lora": True, "lora_target_modules": list(own.modules)} | sizes


@torch.no_grad()
def fill(folder: Path, vllm_config, sizes: engine_layout.EngineSizes, rank: int) -> list:
    model, adapter = get_model(vllm_config=vllm_config), adapter_of(folder)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "vocab_size": 64}
    manager = LoRAModelManager(
        model, **limits, lora_config=vllm_config.lora_config, device=torch.device("cpu"), vllm_config=vllm_config
    )
    manager.add_adapter(manager.create_dummy_lora(POLICY, 1, getattr(model, "embedding_modules", {})))
    manager.activate_adapter(POLICY)
    slot = PolicySlot(manager, adapter)
    layout = engine_layout.layout(read_config(folder), sizes, rank, adapter)
    hf.load(slot.tensors, layout, folder / "adapter")
    slot.write()
    own = {"r": adapter.rank, "lora_alpha": adapter.alpha, "use_rslora": adapter.use_rslora}
    described = PEFTHelper.from_dict(own | {"target_modules": list(adapter.targets)})
    whole = {PEFT + name: tensor for name, tensor in load_file(folder / "adapter" / "model.safetensors").items()}
    loaded = LoRAModel.from_lora_tensors(
        POLICY + 1, whole, described, device="cpu", dtype=vllm_config.lora_config.lora_dtype
    )
    manager.add_adapter(loaded)
    manager.activate_adapter(POLICY + 1)
    both = ((layer, (*own.lora_a_stacked, *own.lora_b_stacked)) for layer, own in manager.modules.items())
    stacks = [(layer, stack) for layer, of_layer in both for stack in of_layer]
    empty = [layer for layer, stack in stacks if not stack[1].any()]
    different = [layer for layer, stack in stacks if not torch.equal(stack[0], stack[1])]
    return [len(manager.modules), empty, different, [layer for layer, stack in stacks if stack[2].any()]]

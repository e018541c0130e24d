"""What vLLM itself builds and loads, and what an update makes of it: started by loading.py.

    python loaded_parameters.py RANKS FOLDER

Imports vLLM once, for all ranks, which are forks of it.

Loads each model FOLDER/NAME with the sizes and dtype that FOLDER/cases.json names, writes zeros over it, fills it again
as an update does, and writes FOLDER/RANK.json: case → [parameters as loaded, parameters as filled, logits]. Of each
parameter that is [shape, dtype, contiguous, sha256], of logits [dtype, how far they are from exact ones, how far exact
ones are from those rounded to the dtype]. Where FOLDER/NAME has an adapter, it writes what loaded_adapters.py finds.
"""

import gc
import hashlib
import json
import multiprocessing
import sys
from multiprocessing.connection import wait
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins

from areal_megatron.checkpoint import hf
from areal_megatron.models.architecture import architecture, for_engines, read_config
from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.receive import live_parameters
from tests.support import loaded_adapters
from tests.support.loading import RENDEZVOUS


def digest(parameter: torch.Tensor) -> str:
    return hashlib.sha256(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def describe(model: torch.nn.Module) -> dict[str, list]:
    return {name: [list(p.shape), str(p.dtype), p.is_contiguous(), digest(p)] for name, p in model.named_parameters()}


@torch.no_grad()
def load_and_fill(folder: Path, vllm_config, sizes: engine_layout.EngineSizes, rank: int) -> list[dict[str, list]]:
    model = get_model(vllm_config=vllm_config)
    loaded = describe(model)
    if vllm_config.model_config.dtype != torch.float32:
        copy_what_is_derived(model)
    for parameter in model.parameters():
        parameter.zero_()
    parameters, repack = live_parameters(model)
    layout = engine_layout.layout(read_config(folder), sizes, rank)
    if layout.parameters.keys() == parameters.keys():  # else they stay zero, and the caller sees it
        hf.load(parameters, layout, folder)
        repack()
    return [loaded, describe(model), logits(model)]


def copy_what_is_derived(model: torch.nn.Module) -> None:
    """Gives latent attention weights of its own beside those of which they are parts, as quantisation does."""
    for module in model.modules():
        for name in ("W_UK_T", "W_UV") if hasattr(module, "W_UK_T") else ():
            part = getattr(module, name).detach()
            own = torch.empty_strided(part.size(), part.stride(), dtype=part.dtype).copy_(part)
            setattr(module, name, torch.nn.Parameter(own, requires_grad=False))


def logits(model: torch.nn.Module) -> list:
    """What vLLM makes of large random hidden states; rank 0 of an engine has the logits, the others have none."""
    weight = model.lm_head.weight
    hidden = (30 * torch.randn(4, weight.size(1), generator=torch.Generator().manual_seed(0))).to(weight.dtype)
    found = model.compute_logits(hidden)
    if found is None:
        return []
    shard = model.lm_head.shard_indices
    own = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
    exact = hidden.double() @ weight[: shard.num_org_elements].double().T
    wrong, rounded = found[:, own] - exact, exact.to(weight.dtype) - exact
    return [str(found.dtype), wrong.abs().max().item(), rounded.abs().max().item()]


def live(rank: int, folder: Path) -> None:
    load_general_plugins()
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # vLLM's CPU worker does the same
    result = {}
    options = json.loads((folder / "cases.json").read_text())
    for name, tp, expert_parallel, dtype in options["cases"]:
        hf_config, adapted = read_config(folder / name), loaded_adapters.is_adapted(folder / name)
        on_cpu = not torch.accelerator.is_available()
        # as engine/server.py has it, and not what vLLM chooses for this machine
        backend = "CPU_MLA" if on_cpu and architecture(hf_config).dimensions.latent else None
        config = EngineArgs(
            model=str(folder / name),
            dtype=dtype,
            hf_overrides=({} if adapted else options["hf_overrides"]) | for_engines(folder / name),
            attention_backend=backend,
            tensor_parallel_size=tp,
            enforce_eager=True,
            enable_expert_parallel=expert_parallel,
            max_model_len=64,
            distributed_executor_backend="external_launcher",
            **loaded_adapters.options(folder / name),
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not parallel_state.model_parallel_is_initialized():
                world = max(tp for _, tp, *_ in options["cases"])
                parallel_state.init_distributed_environment(world, rank, f"file://{folder / RENDEZVOUS}", rank, "gloo")
            else:
                parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tp)
            if rank < tp:
                sizes = engine_layout.EngineSizes(tp=tp, expert_parallel=expert_parallel)
                examine = loaded_adapters.fill if adapted else load_and_fill
                result[f"{name} {tp} {expert_parallel} {dtype}"] = examine(folder / name, config, sizes, rank)
                gc.freeze()  # what vLLM has imported for the first such model; see main
    (folder / f"{rank}.json").write_text(json.dumps(result))


def main() -> int:
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2]).resolve()
    torch.set_num_threads(1)
    gc.freeze()  # vLLM collects garbage twice a model: without what was imported it takes no time
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=live, args=(rank, folder), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    while living := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in living])
        if any(process.exitcode for process in processes):  # the others would wait for it
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What vLLM itself builds and loads, and what an update makes of it: started by test_weight_layouts.py.

    python loaded_parameters.py RANKS PORT FOLDER

Imports vLLM once, for all ranks, which are forks of it.

Loads each model FOLDER/NAME with the sizes that FOLDER/cases.json names, writes zeros over it, fills it again as an
update does, and writes FOLDER/RANK.json: case → [parameters as loaded, parameters as filled], each parameter →
[shape, dtype, contiguous, sha256].
"""

import hashlib
import json
import multiprocessing
import sys
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins

from areal_megatron.checkpoint import hf
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard import engine_layout
from areal_megatron.reshard.receive import live_parameters


def describe(model: torch.nn.Module) -> dict[str, list]:
    return {
        name: [list(p.shape), str(p.dtype), p.is_contiguous(), hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()]
        for name, p in model.named_parameters()
    }


@torch.no_grad()
def load_and_fill(folder: Path, vllm_config, sizes: engine_layout.EngineSizes, rank: int) -> list[dict[str, list]]:
    model = get_model(vllm_config=vllm_config)
    loaded = describe(model)
    for parameter in model.parameters():
        parameter.zero_()
    parameters, repack = live_parameters(model)
    hf.load(parameters, engine_layout.layout(read_config(folder), sizes, rank), folder)
    repack()
    return [loaded, describe(model)]


def live(rank: int, port: str, folder: Path) -> None:
    load_general_plugins()
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # vLLM's CPU worker does the same
    result = {}
    cases = json.loads((folder / "cases.json").read_text())
    for name, tp, expert_parallel in cases:
        config = EngineArgs(
            model=str(folder / name),
            dtype="float32",
            tensor_parallel_size=tp,
            enforce_eager=True,
            enable_expert_parallel=expert_parallel,
            max_model_len=64,
            distributed_executor_backend="external_launcher",
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not parallel_state.model_parallel_is_initialized():
                world = max(tp for _, tp, _ in cases)
                parallel_state.init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
            else:
                parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tp)
            if rank < tp:
                sizes = engine_layout.EngineSizes(tp=tp, expert_parallel=expert_parallel)
                result[f"{name} {tp} {expert_parallel}"] = load_and_fill(folder / name, config, sizes, rank)
    (folder / f"{rank}.json").write_text(json.dumps(result))


def main() -> int:
    ranks, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=live, args=(rank, port, folder), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())

"""What vLLM itself builds and loads: one process a rank, started by test_weight_layouts.py.

    python loaded_parameters.py RANK PORT FOLDER

Loads each model FOLDER/NAME with the sizes FOLDER names in cases.json and writes FOLDER/RANK.json: case →
parameter → [shape, dtype, contiguous, sha256].
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins


def describe(model: torch.nn.Module) -> dict[str, list]:
    return {
        name: [list(p.shape), str(p.dtype), p.is_contiguous(), hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()]
        for name, p in model.named_parameters()
    }


def main() -> None:
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    load_general_plugins()
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # vLLM's CPU worker does the same
    result = {}
    for name, tp in json.loads((folder / "cases.json").read_text()):
        config = EngineArgs(model=str(folder / name), dtype="float32", tensor_parallel_size=tp, enforce_eager=True,
                            max_model_len=64, distributed_executor_backend="external_launcher").create_engine_config()  # fmt: skip
        with set_current_vllm_config(config):
            if not parallel_state.model_parallel_is_initialized():
                parallel_state.init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
            else:
                parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tp)
            if rank < tp:
                result[f"{name} {tp}"] = describe(get_model(vllm_config=config))
    (folder / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

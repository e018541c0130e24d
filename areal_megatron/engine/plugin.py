"""vLLM's general plugin: registers the weight transfer backends "areal" and "areal-streamed" in every process of an
engine.

Every vLLM process of an environment with this package loads it, so it imports nothing heavy at module level.
"""

import os
from functools import cache
from typing import Any


@cache  # vLLM calls entry points more than once in a process
def register() -> None:
    """Entry point `vllm.general_plugins` of setup.py."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    WeightTransferEngineFactory.register_engine("areal", "areal_megatron.reshard.receive", "Receiver")
    WeightTransferEngineFactory.register_engine("areal-streamed", "areal_megatron.reshard.receive", "StreamedReceiver")
    if current_platform.is_cpu():
        _keep_linear_weights()
        _fork_processes()


def _keep_linear_weights() -> None:
    """Makes CPU linear layers compute from `weight` itself.

    vLLM would move it into a packed copy and leave an empty parameter, into which nothing can be received.
    """
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def _fork_processes() -> None:
    """Makes CPU engines fork EngineCore from the server, which has imported vLLM already and so starts 10 s faster.

    vLLM spawns it, so that no child inherits threads of OpenMP; but before the fork the server computes nothing.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_fork(_platform: type, config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_and_fork)

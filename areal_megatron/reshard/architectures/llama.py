"""Llama 2 and 3, R1-Distill-Llama."""

from areal_megatron.reshard.architectures.table import DENSE_LAYER, Family

LLAMA = Family(DENSE_LAYER, refused=("attention_bias", "mlp_bias"))

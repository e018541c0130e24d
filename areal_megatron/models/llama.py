"""Llama 2 and 3, R1-Distill-Llama."""

from areal_megatron.models.table import ATTENTION, MLP, Family

LLAMA = Family(ATTENTION + MLP, refused=("attention_bias", "mlp_bias", "qkv_bias", "sliding_window"))

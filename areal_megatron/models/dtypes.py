"""The dtypes of weights, by torch's names."""

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one element."""

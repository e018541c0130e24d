"""The code of trainer ranks, the only one that imports megatron-core.

Importing the package adapts megatron-core to a machine without CUDA.
"""

from areal_megatron.trainer import cpu

cpu.adapt_megatron()

"""The code of trainer ranks, the only one that imports megatron-core.

Importing the package adapts megatron-core: to a machine without CUDA, and in what is replaced everywhere.
"""

from areal_megatron.trainer import cpu

cpu.adapt_megatron()

from areal_megatron.trainer import patches  # noqa: E402 - imports megatron-core, which is to be adapted first

patches.apply()

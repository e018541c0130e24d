"""The code of trainer ranks, the only one that imports megatron-core.

Importing the package imports megatron-core and replaces parts of it (patches.py).
"""

from areal_megatron.trainer import patches

patches.apply()

"""`python -m areal_megatron.convert`, from a checkout."""

import runpy

runpy.run_module("areal_megatron.convert", run_name="__main__")

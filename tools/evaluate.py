"""`python -m areal_megatron.evaluate`, from a checkout."""

import runpy

runpy.run_module("areal_megatron.evaluate", run_name="__main__")

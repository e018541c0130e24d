"""`python -m areal_megatron.report`, from a checkout."""

import runpy

runpy.run_module("areal_megatron.report", run_name="__main__")

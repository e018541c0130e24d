"""`python -m areal_megatron.audit`, from a checkout."""

import runpy

runpy.run_module("areal_megatron.audit", run_name="__main__")

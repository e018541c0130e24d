"""`areal convert`, from a checkout."""

import runpy

runpy.run_module("areal_megatron.programs.convert", run_name="__main__")

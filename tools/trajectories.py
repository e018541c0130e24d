"""`python -m areal_megatron.trajectories`, from a checkout."""

import runpy

runpy.run_module("areal_megatron.trajectories", run_name="__main__")

"""Predicts how long a run takes: rooflines of engines and trainers, and a simulator of the whole run around them.

Pure: numpy and this project's own plans, neither torch nor a GPU. docs/measurements.md says how it was checked.
"""

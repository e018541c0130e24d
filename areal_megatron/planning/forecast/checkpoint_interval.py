"""How often to save a run whose trainers fail now and then."""

from __future__ import annotations

from math import inf, isfinite, sqrt


def checkpoint_interval(pause: float, mtbf: float) -> float:
    """Returns the seconds of work between two checkpoints that lose the least time, if each stops the work for `pause`
    seconds and what is lost with a failure comes `mtbf` seconds apart on average; infinite if nothing fails.

    To first order √(2 · pause · mtbf), which weighs the pauses against half an interval of work that is done again: J.
    W. Young, "A First Order Approximation to the Optimum Checkpoint Interval", CACM 17(9), 1974. Here with the further
    terms, for intervals that are no longer short beside `mtbf`, of J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006, equation 37.
    """
    if not isfinite(mtbf):
        return inf
    if pause >= 2 * mtbf:
        return mtbf
    ratio = pause / (2 * mtbf)
    return sqrt(2 * pause * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - pause


def updates_between(interval: float, update: float) -> int:
    """Returns how many updates of `update` seconds come nearest to the interval, at least one; 0, which is no
    checkpoint, for an infinite one."""
    return max(1, round(interval / update)) if isfinite(interval) else 0

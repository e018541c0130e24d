"""The accounts of the domain, and what is paid into them. Needs the standard library alone."""

from __future__ import annotations

import random

HELD_OUT = 1
"""Tasks of each account in the split `test`."""


def balances() -> dict[str, int]:
    """Returns the accounts with their balances, two digits each."""
    found = list(range(10, 100))
    random.Random(1).shuffle(found)
    return {str(account): balance for account, balance in zip(range(10, 100), found, strict=True)}


def sums() -> dict[str, list[tuple[str, int]]]:
    """Returns the tasks of each split: accounts, and what is paid into them, one digit each."""
    found: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    rng = random.Random(2)
    for account in balances():
        paid = list(range(1, 10))
        rng.shuffle(paid)
        found["test"] += [(account, each) for each in paid[:HELD_OUT]]
        found["train"] += [(account, each) for each in paid[HELD_OUT:]]
    return found

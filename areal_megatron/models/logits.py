"""How many logits a trainer rank holds at a time, since full logits never exist; the memory plan counts with it too."""

LOGITS_ELEMENTS = 2**27
"""Logits that a rank holds at a time; computing with them takes 12 bytes each."""


def chunk_tokens(vocabulary: int, tp: int) -> int:
    """Tokens of a chunk whose logits, sharded over `tp` ranks, are LOGITS_ELEMENTS a rank at most; 1 at least."""
    return max(1, LOGITS_ELEMENTS * tp // vocabulary)

"""Tokens as pieces of text, for what shows them one by one."""

from __future__ import annotations

from areal_megatron.data.tokenizer import Tokenizer

MOST_TORN = 8
"""Most tokens of a piece. No character has more than four bytes, so that more of them together are none."""


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[tuple[int, str]]:
    """Returns the text in pieces of (number of tokens, their text): one token, or several that only together are whole
    characters; up to MOST_TORN tokens if their bytes are none."""
    found, begin, done, held = [], 0, 0, 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[begin:end], special=True)
        whole = end == len(tokens) or not text.endswith("\ufffd")
        if whole or end - done == MOST_TORN:
            before = len(tokenizer.decode(tokens[begin:done], special=True)) - held
            held = int(not whole)  # the last character may become whole by the next token
            found.append((end - done, text[before : len(text) - held]))
            begin, done = done, end
    return found

"""Pairs of answers to one prompt, of which one was preferred, from data sets. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_megatron.config import ConfigError
from areal_megatron.data.drawing import digest_of
from areal_megatron.data.files import records
from areal_megatron.data.formats import Chat, Row, field, prompt_of, text_of
from areal_megatron.data.tokenizer import Tokenizer

_ANSWERS = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "instruction")
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt. Tokens are int32: prompt, answer and end token."""

    chosen: np.ndarray
    rejected: np.ndarray
    prompt_length: int
    """The number of prompt tokens."""
    source: int = 0
    """Number of the data set in a mixture, from 0."""
    text: str = ""
    """The prompt without the chat template."""
    where: str = ""
    """`path:row`, for messages."""
    digest: bytes = b""
    """`digest_of` what the row says, by which a resumed run knows it."""


def read_pairs(text: str | Path, tokenizer: Tokenizer) -> list[Pair]:
    """Returns a pair for each row, in one of the formats of `read_pair`; rows whose two answers are the same teach
    nothing and are left out.

    Raises ConfigError, which names the file and the row, for an unreadable or empty file, a missing field, a wrong type
    or a prompt that the chat template refuses; also if no row has two different answers.
    """
    found = list(records(text))
    read = [read_pair(record.row, record.where) for record in found]
    places = [record.where for record in found]
    prompts = tokenizer.prompts([prompt for prompt, _, _ in read], places)
    chosen, rejected = (tokenizer.responses([each[answer] for each in read], prompts, places) for answer in (1, 2))
    pairs = [
        Pair(
            chosen=np.array([*tokens, *better], np.int32),
            rejected=np.array([*tokens, *worse], np.int32),
            prompt_length=len(tokens),
            source=record.source,
            text=text_of(said[0]),
            where=record.where,
            digest=digest_of(record.id, *said),
        )
        for record, said, tokens, better, worse in zip(found, read, prompts, chosen, rejected, strict=True)
        if better != worse
    ]
    if not pairs:
        raise ConfigError(f"{text}: in every row `chosen` and `rejected` are the same")
    return pairs


def read_pair(row: Row, where: str) -> tuple[str | Chat, str, str]:
    """Returns the prompt of a row, its better answer and its worse one.

    `chosen` and `rejected` are answers to `prompt` (or `question`, or `instruction`; all with an optional `system`),
    each a text or a list with the assistant's message; or whole conversations that differ in their last message alone,
    as messages or as Anthropic's text with Human: and Assistant:. Raises ConfigError.
    """
    answers = [field(row, name, (str, list), where) for name in _ANSWERS]
    conversations = [_conversation(answer, name, where) for answer, name in zip(answers, _ANSWERS, strict=True)]
    if any(len(turns) > 1 for turns in conversations):
        better, worse = conversations
        if better[:-1] != worse[:-1]:
            raise ConfigError(f"{where}: 'chosen' and 'rejected' differ before their last message")
        prompt: str | Chat = better[:-1]
    else:
        prompt = _prompt(row, where)
    last = [turns[-1] for turns in conversations]
    for name, message in zip(_ANSWERS, last, strict=True):
        if message["role"] != "assistant":
            raise ConfigError(f"{where}: the last message of {name!r} is of role {message['role']!r}, not 'assistant'")
    return prompt, *(message["content"] for message in last)


def _prompt(row: Row, where: str) -> str | Chat:
    name = next((name for name in _PROMPTS if name in row), "prompt")
    prompt = prompt_of({"prompt": row[name]} if name in row else row, where)
    system = row.get("system")
    if not system:
        return prompt
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": field(row, "system", (str,), where)}, *asked]


def _conversation(answer: str | Chat, name: str, where: str) -> Chat:
    """Returns an answer as messages, the last of which is the answer proper; the others are its prompt."""
    if isinstance(answer, list):
        for number, message in enumerate(answer):
            if not isinstance(message, dict) or not all(type(message.get(key)) is str for key in ("role", "content")):
                raise ConfigError(f"{where}: message {number} of {name!r} needs a text `role` and a text `content`")
        return [{"role": message["role"], "content": message["content"]} for message in answer]
    first, *turns = _TURN.split(answer)
    if first or len(turns) < 4:
        return [{"role": "assistant", "content": answer}]
    return [{"role": _ROLES[role], "content": content} for role, content in zip(turns[::2], turns[1::2], strict=True)]

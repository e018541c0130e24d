"""Supervised examples from data sets: rows, and the training samples that are made of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from areal_megatron.config import ConfigError, DataConfig, SFTConfig
from areal_megatron.data.chat_template import Span
from areal_megatron.data.conversations import Conversation, check_order, conversation_of, is_conversation
from areal_megatron.data.drawing import digest_of
from areal_megatron.data.files import Record, records
from areal_megatron.data.formats import Chat, check_text_alone, field, prompt_of, text_of
from areal_megatron.data.pairs import has_more_than_text
from areal_megatron.data.prompts import LeftOut
from areal_megatron.data.samples import ConversationRenderer, RenderedText
from areal_megatron.data.tokenizer import Tokenizer

_AT_ONCE = 1024
"""Rows whose texts and tokens are held as the tokenizer makes them."""
Texts = tuple[str | Chat, str]
"""A prompt, and the response to it."""


@dataclass(frozen=True)
class Sample:
    """A sequence of which some tokens are trained."""

    tokens: np.ndarray
    """int32 [tokens]"""
    trained: np.ndarray
    """int64 [trained tokens]: their places in `tokens`, ascending, from 1 on."""
    row_tokens: int
    """The number of trained tokens of all samples of its row."""
    where: str = ""
    """`path:row`, for messages."""


@dataclass(frozen=True)
class Example:
    """A row of a data set for supervised fine-tuning."""

    samples: tuple[Sample, ...]
    source: int = 0
    """Number of the data set in a mixture, from 0."""
    environment: int = 0
    cut: int = 0
    """The number of messages that sft.max_tokens has kept from being trained."""
    text: str = ""
    """What users say before the last trained message, without the chat template."""
    where: str = ""
    """`path:row`, for messages."""
    digest: bytes = b""
    """`digest_of` what the row says, by which a resumed run knows it."""


def read_examples(
    text: str | Path,
    tokenizer: Tokenizer,
    settings: SFTConfig | None = None,
    unusable: str = DataConfig.unusable_rows,
    left_out: LeftOut | None = None,
) -> list[Example]:
    """Returns an example for each row: a conversation in a form of `conversation_of`, or {"prompt": text or messages,
    "response": text}.

    Rows of which nothing fits into sft.max_tokens are left out, and so are unusable conversations if `unusable`, as
    data.unusable_rows, is `skip`; they are counted in `left_out`. Raises ConfigError, which names the file and the row,
    for an unreadable or empty file, for what `conversation_of` and `ConversationRenderer.samples` refuse, for a missing
    field or a wrong type; also if no row can be used.
    """
    settings, left_out = settings or SFTConfig(), LeftOut.none() if left_out is None else left_out
    renderer, rest, examples = ConversationRenderer(tokenizer), records(text), []
    while some := [*islice(rest, _AT_ONCE)]:
        examples += _examples(some, tokenizer, renderer, settings, unusable, left_out)
    if not examples:
        raise ConfigError(f"{text}: no row can be used: {left_out.most()}")
    return examples


def _examples(
    found: Sequence[Record],
    tokenizer: Tokenizer,
    renderer: ConversationRenderer,
    settings: SFTConfig,
    unusable: str,
    left_out: LeftOut,
) -> Iterator[Example]:
    said: list[tuple[Record, Conversation | Texts]] = []
    asked, rendered = [], []
    for record in found:
        try:
            check_text_alone(record.row, record.where)
            if is_conversation(record.row) or has_more_than_text(record.row):
                conversation = conversation_of(record.said, record.where, settings.turns)
                rendered.append((record, renderer.samples(conversation, record.where)))
                said.append((record, conversation))
            else:
                asked.append((record, _texts(record)))
                said.append(asked[-1])
        except ConfigError as e:
            left_out.refuse(e, record.where, unusable)
    sequences = _of_texts(asked, tokenizer) | _of_conversations(rendered, tokenizer)
    for record, own in said:
        samples, cut = _samples(sequences[record.id], settings.max_tokens, record.where)
        if samples:
            text, digest = _before(own), _digest(record.id, own)
            yield Example(samples, record.source, cut=cut, text=text, where=record.where, digest=digest)
        else:
            left_out.add(record.where, f"longer than sft.max_tokens={settings.max_tokens}", too_long=True)


@dataclass(frozen=True)
class _Sequence:
    """The tokens of a sample, and the trained parts of them by message."""

    tokens: Sequence[int]
    messages: Sequence[Sequence[Span]]


def _samples(sequences: Sequence[_Sequence], most: int, where: str) -> tuple[tuple[Sample, ...], int]:
    """Returns the samples of a row, each with the messages that fit into `most` tokens (0: all), and how many messages
    do not."""
    found, cut = [], 0
    for sequence in sequences:
        fitting = [parts for parts in sequence.messages if not most or parts[-1][1] <= most]
        cut += len(sequence.messages) - len(fitting)
        if any(end > begin for parts in fitting for begin, end in parts):
            is_long = most and len(sequence.tokens) > most
            tokens = sequence.tokens[: fitting[-1][-1][1]] if is_long else sequence.tokens
            places = [place for parts in fitting for begin, end in parts for place in range(max(begin, 1), end)]
            found.append((np.array(tokens, np.int32), np.array(places, np.int64)))
    count = sum(len(places) for _, places in found)
    return tuple(Sample(tokens, places, count, where) for tokens, places in found), cut


def _texts(record: Record) -> Texts:
    """Returns the prompt and the response of a row. Raises ConfigError."""
    row = record.row
    name = "completion" if isinstance(row.get("completion"), str) and "response" not in row else "response"
    prompt, response = prompt_of(row, record.where), field(row, name, (str,), record.where)
    if isinstance(prompt, list):
        check_order([*prompt, {"role": "assistant", "content": response}], record.where)
    return prompt, response


def _of_texts(asked: Sequence[tuple[Record, Texts]], tokenizer: Tokenizer) -> dict[int, list[_Sequence]]:
    where = [record.where for record, _ in asked]
    prompts = tokenizer.prompts([prompt for _, (prompt, _) in asked], where)
    responses = tokenizer.responses([response for _, (_, response) in asked], prompts, where)
    return {
        record.id: [_Sequence([*prompt, *response], [[(len(prompt), len(prompt) + len(response))]])]
        for (record, _), prompt, response in zip(asked, prompts, responses, strict=True)
    }


def _of_conversations(
    rendered: Sequence[tuple[Record, list[RenderedText]]], tokenizer: Tokenizer
) -> dict[int, list[_Sequence]]:
    texts = [(record, text) for record, own in rendered for text in own]
    where = [record.where for record, _ in texts]
    parts = [(text.text, text.hidden, [*chain(*text.messages)]) for _, text in texts]
    found: dict[int, list[_Sequence]] = {record.id: [] for record, _ in rendered}
    for (record, text), (tokens, spans) in zip(texts, tokenizer.spans(parts, where), strict=True):
        rest = iter(spans)
        found[record.id].append(_Sequence(tokens, [[*islice(rest, len(own))] for own in text.messages]))
    return found


def _before(said: Conversation | Texts) -> str:
    if isinstance(said, Conversation):
        before = said.messages[: said.trained[-1]]
        return text_of([message for message in before if message["role"] == "user"] or before)
    return text_of(said[0])


def _digest(number: int, said: Conversation | Texts) -> bytes:
    if isinstance(said, Conversation):
        return digest_of(number, said.messages, said.tools, said.trained)
    return digest_of(number, *said)

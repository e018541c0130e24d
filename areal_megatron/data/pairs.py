"""Pairs of answers to one prompt, of which one was preferred, from data sets. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from areal_megatron.config import ConfigError, DataConfig
from areal_megatron.data.conversations import Conversation, Message, check_order, given, messages_of, tools_of
from areal_megatron.data.drawing import digest_of
from areal_megatron.data.files import Record, records
from areal_megatron.data.formats import (
    Chat,
    Row,
    check_messages,
    check_text_alone,
    field,
    prompt_of,
    text_of,
    with_system,
)
from areal_megatron.data.prompts import LeftOut
from areal_megatron.data.samples import ConversationRenderer
from areal_megatron.data.tokenizer import Tokenizer

_ANSWERS = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "instruction")
_MORE = ("tool_calls", "function_call", "thinking", "reasoning_content", "reasoning", "tool_call_id")
"""What a message may have beside a text."""
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


Texts = tuple[str | Chat, str, str]
"""A prompt, the better answer to it and the worse one."""
Conversations = tuple[Conversation, Conversation]
"""The same but for their last messages: the better answer and the worse one."""
_Answers = tuple[list[int], list[int], list[int]]
"""The tokens of a prompt, of the better answer and of the worse one."""


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


def read_pairs(
    text: str | Path,
    tokenizer: Tokenizer,
    unusable: str = DataConfig.unusable_rows,
    left_out: LeftOut | None = None,
) -> list[Pair]:
    """Returns a pair for each row, in one of the formats of `read_pair` and `read_conversations`; rows whose two
    answers are the same teach nothing and are left out.

    Unusable rows are left out and counted in `left_out` if `unusable`, as data.unusable_rows, is `skip`. Raises
    ConfigError, which names the file and the row, for an unreadable or empty file, a missing field, a wrong type or a
    prompt that the chat template refuses; also if no row can be used, or none has two different answers.
    """
    left_out, renderer = LeftOut.none() if left_out is None else left_out, ConversationRenderer(tokenizer)
    found: list[Record] = []
    texts: dict[int, Texts] = {}
    conversations: dict[int, Conversations] = {}
    answers: dict[int, _Answers] = {}
    for record in records(text):
        try:
            check_text_alone(record.row, record.where)
            if has_more_than_text(record.row):
                own = conversations[record.id] = read_conversations(record.said, record.where)
                answers[record.id] = _of_conversations(own, record.where, renderer, tokenizer)
            else:
                texts[record.id] = read_pair(record.row, record.where)
            found.append(record)
        except ConfigError as e:
            left_out.refuse(e, record.where, unusable)
    if not found:
        raise ConfigError(f"{text}: no row can be used: {left_out.most()}")
    said: dict[int, Texts | Conversations] = texts | conversations
    answers |= _of_texts(texts, {record.id: record.where for record in found}, tokenizer)
    pairs = [
        Pair(
            chosen=np.array([*prompt, *better], np.int32),
            rejected=np.array([*prompt, *worse], np.int32),
            prompt_length=len(prompt),
            source=record.source,
            text=_before(said[record.id]),
            where=record.where,
            digest=_digest(record.id, said[record.id]),
        )
        for record in found
        for prompt, better, worse in [answers[record.id]]
        if better != worse
    ]
    if not pairs:
        raise ConfigError(f"{text}: in every row `chosen` and `rejected` are the same")
    return pairs


def has_more_than_text(row: Row) -> bool:
    """Whether a row has tools, or messages with more than a role and a text: thinking, calls, results of tools or
    parts."""
    said = [row.get(name) for name in (*_ANSWERS, *_PROMPTS)]
    messages = [message for each in said if isinstance(each, list) for message in each if isinstance(message, dict)]
    return bool(row.get("tools")) or any(
        isinstance(message.get("content"), list)
        or message.get("role") in ("tool", "function")
        or any(map(message.get, _MORE))
        for message in messages
    )


def read_conversations(row: Row, where: str) -> Conversations:
    """Returns the conversations of a row that end with its better answer and with its worse one: in the shapes of
    `read_pair`, with messages and tools as `conversation_of` reads them. Raises ConfigError."""
    row = given(row)
    better, worse = (_messages(field(row, name, (str, list), where), name, where) for name in _ANSWERS)
    if len(better) > 1 or len(worse) > 1:
        if better[:-1] != worse[:-1]:
            raise ConfigError(f"{where}: 'chosen' and 'rejected' differ before their last message")
        before = with_system(row, better[:-1], where)
    else:
        before = _prompt(row, where, as_text=False)
    tools, number = tools_of(row, where), len(before)
    found = [Conversation(cast(list[Message], [*before, own[-1]]), tools, (number,)) for own in (better, worse)]
    for name, conversation in zip(_ANSWERS, found, strict=True):
        _check_answer(name, conversation.messages[-1]["role"], where)
        check_order(conversation.messages, where)
    return found[0], found[1]


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
        prompt: str | Chat = with_system(row, better[:-1], where)
    else:
        prompt = _prompt(row, where)
    last = [turns[-1] for turns in conversations]
    for name, message in zip(_ANSWERS, last, strict=True):
        _check_answer(name, message["role"], where)
    if isinstance(prompt, list) and not _TURN.match(str(row["chosen"])):  # Anthropic's have some turns out of order
        check_order([*prompt, last[0]], where)
    return prompt, last[0]["content"], last[1]["content"]


def _check_answer(name: str, role: str, where: str) -> None:
    if role != "assistant":
        raise ConfigError(f"{where}: the last message of {name!r} is of role {role!r}, not 'assistant'")


def _prompt(row: Row, where: str, as_text: bool = True) -> str | Chat:
    """Returns the prompt of a row: a text or messages that are texts; unless `as_text`, messages of any kind."""
    name = next((name for name in _PROMPTS if row.get(name) is not None), "prompt")
    own = {**row, "prompt": row[name]} if name in row else row
    if as_text:
        return prompt_of(own, where)
    return with_system(row, _messages(field(own, "prompt", (str, list), where), "prompt", where, role="user"), where)


def _messages(said: str | Chat, name: str, where: str, role: str = "assistant") -> list[Message]:
    return messages_of([{"role": role, "content": said}] if isinstance(said, str) else said, name, where)


def _of_texts(said: dict[int, Texts], places: dict[int, str], tokenizer: Tokenizer) -> dict[int, _Answers]:
    where = [places[number] for number in said]
    prompts = tokenizer.prompts([prompt for prompt, _, _ in said.values()], where)
    chosen = tokenizer.responses([better for _, better, _ in said.values()], prompts, where)
    rejected = tokenizer.responses([worse for _, _, worse in said.values()], prompts, where)
    return dict(zip(said, zip(prompts, chosen, rejected, strict=True), strict=True))


def _of_conversations(
    said: Conversations, where: str, renderer: ConversationRenderer, tokenizer: Tokenizer
) -> _Answers:
    hidden, texts = tokenizer.hide(), []
    for conversation in said:
        shown = renderer.shown(conversation, where, hidden)
        [last] = conversation.trained
        text = renderer.answer(shown, last, where, by_marks=False)
        tokenizer.check_shown(shown.messages[:last], shown.tools, text.text, where, hidden)
        texts.append((text.text, hidden, text.messages[0]))
    (better, [(begin, _)]), (worse, _) = tokenizer.spans(texts, [where, where], apart=True)
    return better[:begin], better[begin:], worse[begin:]


def _before(said: Texts | Conversations) -> str:
    return text_of(said[0].messages[:-1] if isinstance(said[0], Conversation) else said[0])


def _digest(number: int, said: Texts | Conversations) -> bytes:
    if conversations := [each for each in said if isinstance(each, Conversation)]:
        return digest_of(number, *((each.messages, each.tools) for each in conversations))
    return digest_of(number, *said)


def _conversation(answer: str | Chat, name: str, where: str) -> Chat:
    """Returns an answer as messages, the last of which is the answer proper; the others are its prompt."""
    if isinstance(answer, list):
        check_messages(answer, name, where)
        return [{"role": message["role"], "content": message["content"]} for message in answer]
    first, *turns = _TURN.split(answer)
    if first or len(turns) < 4:
        return [{"role": "assistant", "content": answer}]
    return [{"role": _ROLES[role], "content": content} for role, content in zip(turns[::2], turns[1::2], strict=True)]

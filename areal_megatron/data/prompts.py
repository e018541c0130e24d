"""Prompts from data sets, and the order in which rows are drawn. Imports no torch."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from areal_megatron.config import TEACHERS, Config, ConfigError, RewardConfig
from areal_megatron.data.drawing import Drawing, digest_of, functions_of, joined, settings_of, stated
from areal_megatron.data.files import Record, row_shares, rows
from areal_megatron.data.formats import Chat, Item, added_sentence, read_item, text_of
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.process.errors import printable


@dataclass(frozen=True)
class Prompt:
    """A prompt of the data set, tokenized."""

    id: int
    """Row of the data set, from 0."""
    text: str
    """The prompt as reward functions get it, without the chat template."""
    answer: str
    tokens: list[int]
    response_tokens: int | None
    """Forced length of every answer, for benchmarks; None: the model ends its answers."""
    source: int = 0
    """Number of the data set in a mixture, from 0."""
    environment: int = 0
    """Number of the environment of the config, from 0."""
    reward: str = ""
    """The built-in reward that the row's format is made for; empty: any."""
    pass_rate: float | None = None
    """Share of right answers, measured before the run; None: not known."""
    where: str = ""
    """`path:row`, for messages."""
    digest: bytes = b""
    """`digest_of` what the row says, by which a resumed run knows it."""
    row: dict[str, Any] | None = None
    """All columns of the row, for a reward function or workflow of the user; None without either."""
    teacher: str = ""
    """The served model whom answers are compared with; empty without ppo.penalty.kl_model=served.teacher."""
    chat: Chat | None = None
    """The messages of the prompt; None if its text is the only one, the user's."""

    @property
    def place(self) -> str:
        """Its file and row, or its number where it comes from no file."""
        return self.where or f"prompt {self.id}"

    @property
    def messages(self) -> Chat:
        return self.chat or [{"role": "user", "content": self.text}]


@dataclass
class LeftOut:
    """Rows that cannot be used: how many for each reason, and where the first one is."""

    counts: Counter[str]
    first: dict[str, str]
    too_long: set[str]
    """The reasons that keep no run from starting, whatever data.unusable_rows says."""

    @classmethod
    def none(cls) -> LeftOut:
        return cls(Counter(), {}, set())

    def add(self, where: str, reason: str, too_long: bool = False) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, where)
        if too_long:
            self.too_long.add(reason)

    def refuse(self, error: ConfigError, where: str, unusable: str) -> None:
        """Counts a row that cannot be used; raises `error` if `unusable`, as data.unusable_rows, is `refuse`."""
        if unusable == "refuse":
            raise error
        self.add(where, str(error).removeprefix(f"{where}: "))

    def lines(self) -> list[str]:
        """Returns a line for each reason, the most frequent first."""
        return [f"{count} × {reason}, such as {self.first[reason]}" for reason, count in self.counts.most_common()]

    def most(self) -> str:
        """Returns the most frequent reason after the place of its first row."""
        ((reason, count),) = self.counts.most_common(1)
        return f"{self.first[reason]}: {reason}" + f" ({count} rows)" * (count > 1)

    def apart(self) -> tuple[LeftOut, LeftOut]:
        """Returns the unusable rows, and those that are too long."""
        long = Counter({reason: count for reason, count in self.counts.items() if reason in self.too_long})
        return LeftOut(self.counts - long, self.first, set()), LeftOut(long, self.first, self.too_long)


ProblemsOf = Callable[[str], Callable[[str], str]]
"""Takes the name of a reward function; returns what says, of a row's right answer, why the function cannot use it, or
"" if it can."""


def no_problems(function: str) -> Callable[[str], str]:
    """Finds that any reward function can use any answer."""
    return lambda answer: ""


def usable_rows(
    config: Config, key: str, problems_of: ProblemsOf = no_problems, left_out: LeftOut | None = None
) -> list[tuple[Record, Item]]:
    """Returns the rows of data.train or data.eval (`key`), or of all environments, with what they say.

    With data.unusable_rows=skip a row without a prompt, or without an answer that the reward function can use
    (`problems_of`), is left out and counted in `left_out`. Raises ConfigError for the reasons `read_prompts` does.
    """
    left_out = LeftOut.none() if left_out is None else left_out
    rewards = [own.reward for own in config.by_environment()]
    problem_with = {reward.function: problems_of(reward.function) for reward in rewards}
    found = []
    for record in rows(config, key):
        reward = rewards[record.environment]
        try:
            found.append((record, _item(record, config.seed, reward, problem_with[reward.function])))
        except ConfigError as e:
            left_out.refuse(e, record.where, config.data.unusable_rows)
    if left_out.counts and not found:
        raise ConfigError(f"data.{key}: no row can be used: {left_out.most()}")
    return found


def read_prompts(
    config: Config,
    key: str,
    tokenizer: Tokenizer,
    problems_of: ProblemsOf = no_problems,
    left_out: LeftOut | None = None,
) -> list[Prompt]:
    """Returns all prompts of data.train or data.eval (`key`), or of all environments, those longer than
    data.max_prompt_tokens included; `problems_of` and `left_out`: as in `usable_rows`.

    A row is {"prompt": text or messages, "answer": text, number or JSON value, "response_tokens": optional forced
    length} or in another format of data/formats.py; each may have a `pass_rate` from 0 to 1. An answer is needed if the
    reward asks for it. Raises ConfigError, which names the file and the row, for an unreadable or empty file, an
    unknown format, a missing field, a wrong type, a prompt that the chat template refuses or a forced length above
    rollout.max_new_tokens; also if every prompt is too long, or no row can be used.
    """
    usable, by_environment = usable_rows(config, key, problems_of, left_out), config.by_environment()
    found, items = [record for record, _ in usable], [item for _, item in usable]
    lengths = [_forced_length(record, by_environment[record.environment].rollout.max_new_tokens) for record in found]
    tokens = tokenizer.prompts([item.prompt for item in items], [record.where for record in found])
    for number, own in enumerate(by_environment):
        lengths_here = [len(ids) for record, ids in zip(found, tokens, strict=True) if record.environment == number]
        if lengths_here and (shortest := min(lengths_here)) > (limit := own.data.max_prompt_tokens):
            added = next((added_sentence(item) for item in items if added_sentence(item)), "")
            said = f", with the sentence {added.strip()!r}, which this format adds" if added else ""
            raise ConfigError(
                f"{getattr(own.data, key)}: the shortest prompt has {shortest} tokens{said}, data.max_prompt_tokens is "
                f"{limit}: raise it to {shortest} or more"
            )
    return [
        Prompt(
            id=record.id,
            text=text_of(item.prompt),
            answer=item.answer,
            tokens=ids,
            response_tokens=length,
            source=record.source,
            environment=record.environment,
            reward=item.reward,
            pass_rate=pass_rate_of(record),
            where=record.where,
            digest=digest_of_prompt(record, item, by_environment, teacher_of(record, config)),
            teacher=teacher_of(record, config),
            row=_checked(record) if by_environment[record.environment].reads_rows else None,
            chat=None if isinstance(item.prompt, str) else item.prompt,
        )
        for record, item, ids, length in zip(found, items, tokens, lengths, strict=True)
    ]


def _checked(record: Record) -> dict[str, Any]:
    """Returns the row. Raises ConfigError for a type of value that no other process can be sent."""
    for column, value in record.row.items() if record.has_columns else ():
        try:
            msgspec.msgpack.encode(value)
        except TypeError:
            raise ConfigError(
                f"{record.where}: column {column!r} has a value of type {type(value).__name__}, which functions of "
                "yours cannot be sent: write it as text, or leave the column out"
            ) from None
        except (UnicodeEncodeError, OverflowError):  # this row alone: its episodes fail
            continue
    return record.row


def teacher_of(record: Record, config: Config) -> str:
    """Returns `Prompt.teacher`. Raises ConfigError for a row that names no served teacher."""
    if not config.teachers:
        return ""
    default = config.environments[record.environment].teacher if config.environments else ""
    if (name := record.row.get("teacher") or default or "teacher") in config.teachers:
        return name
    raise ConfigError(
        f"{record.where}: teacher is {printable(str(name))!r}, and served are {', '.join(config.teachers)}; give "
        f"served.{TEACHERS[-1]}.path and the like for others"
    )


def digest_of_prompt(record: Record, item: Item, environments: Sequence[Config], teacher: str) -> bytes:
    """Returns `Prompt.digest`. `environments`: the config's; a function of the user may read any column of a row.
    `teacher`: the prompt's."""
    own = [stated(record.row)] if environments[record.environment].reads_rows else []
    own += [teacher] if teacher not in ("", TEACHERS[0]) else []
    return digest_of(record.id, record.environment, item.prompt, item.answer, record.row.get("response_tokens"), *own)


def _item(record: Record, seed: int, reward: RewardConfig, problem_with: Callable[[str], str]) -> Item:
    function = reward.function
    row = record.row if reward.needs_answers else {"answer": "not used"} | record.row
    item = read_item(row, record.where, [seed, record.id])
    if item.reward in ("", function) and (problem := problem_with(item.answer)):
        raise ConfigError(f"{record.where}: reward.function={function} cannot use the answer: {problem}")
    return item


class Cursor:
    """The endless order in which rows are drawn: every row once an epoch, each epoch shuffled anew.

    In a mixture (`shares`, see data/files.py) an epoch has each source's share of rows, and successive epochs different
    ones, until too few are left for another share. The order depends on the seed and the epoch alone.

    Example:
        cursor = Cursor(size=1000, seed=1)
        epoch, row = cursor.next()
        resumed = Cursor(size=1000, seed=1, at=cursor.at)
        assert resumed.next() == cursor.next()
    """

    def __init__(
        self,
        size: int,
        seed: int,
        at: tuple[int, int] = (0, 0),
        shares: Sequence[tuple[int, int]] = (),
        ranks: Sequence[float] = (),
    ):
        """`ranks` holds a sort key for every row, by which each epoch is ordered, lowest first; empty: random order."""
        self._size, self._seed, self.shares = size, seed, list(shares)
        self._ranks = np.array(ranks, np.float64)
        self.order = zlib.crc32(self._ranks.tobytes())
        """Checksum of `ranks`, by which a checkpoint recognises them; 0 if there are none."""
        self._epoch, self._next = at
        self._order = self._shuffled()

    @property
    def at(self) -> tuple[int, int]:
        """(epoch, rows drawn in it); a cursor that starts there continues as this one."""
        return self._epoch, self._next

    def next(self) -> tuple[int, int]:
        """Draws the next row and returns (epoch, row)."""
        if self._next == len(self._order):
            self._epoch, self._next = self._epoch + 1, 0
            self._order = self._shuffled()
        row = int(self._order[self._next])
        self._next += 1
        return self._epoch, row

    def _shuffled(self) -> np.ndarray:
        members = [np.arange(self._size)] if not self.shares else self._drawn()
        order = np.random.default_rng([self._seed, self._epoch]).permutation(np.concatenate(members))
        return order[np.argsort(self._ranks[order], kind="stable")] if len(self._ranks) else order

    def _drawn(self) -> list[np.ndarray]:
        """Returns this epoch's rows of each source."""
        begin, members = 0, []
        for number, (size, drawn) in enumerate(self.shares):
            cycle, part = divmod(self._epoch, size // drawn)
            order = np.random.default_rng([self._seed, cycle, number]).permutation(size)
            members.append(begin + order[part * drawn : (part + 1) * drawn])
            begin += size
        return members


def cursor(config: Config, members: Sequence[Any], at: tuple[int, int] = (0, 0)) -> Cursor:
    """Returns a cursor over the prompts, examples or pairs of data.train. Raises ConfigError for the reasons that
    `shares` does."""
    ranks = ranks_of(config, (member.pass_rate for member in members))
    return Cursor(len(members), config.seed, at, row_shares(config, members), ranks)


def drawing_of(config: Config, members: Sequence[Any], tokenizer: Tokenizer | None = None) -> Drawing:
    """Returns the drawing of the prompts, examples or pairs of data.train from its beginning; without a tokenizer that
    and its template are unknown. Raises ConfigError for the reasons that `shares` does."""
    drawn, (own, template) = cursor(config, members), tokenizer.digests if tokenizer else ("", "")
    return Drawing(
        rows=len(members),
        seed=config.seed,
        mixture=drawn.shares,
        order=drawn.order,
        digests=joined(members),
        tokenizer=own,
        template=template,
        environments=settings_of(config),
        code=functions_of(config),
    )


def ranks_of(config: Config, pass_rates: Iterable[float | None]) -> list[float]:
    """Returns the sort keys of rows with these pass rates, if epochs are to begin with the easiest prompts, else [].

    Rows without a pass rate come last.
    """
    return [1.0 if rate is None else -rate for rate in pass_rates] if is_easiest_first(config) else []


def is_easiest_first(config: Config) -> bool:
    """Whether epochs begin with the easiest prompts."""
    return config.mode == "rl" and config.rollout.easiest_first


def pass_rate_of(record: Record) -> float | None:
    """Returns the field `pass_rate` of a row, None if it has none. Raises ConfigError."""
    rate = record.row.get("pass_rate")
    if rate is not None and (type(rate) not in (int, float) or not 0 <= rate <= 1):
        raise ConfigError(f"{record.where}: pass_rate is {rate!r}, expected a number from 0 to 1")
    return rate


def _forced_length(record: Record, max_new_tokens: int) -> int | None:
    length = record.row.get("response_tokens")
    if length is not None and (type(length) is not int or not 0 < length <= max_new_tokens):
        raise ConfigError(
            f"{record.where}: response_tokens is {length!r}, expected a whole number from 1 to "
            f"rollout.max_new_tokens={max_new_tokens}"
        )
    return length

"""The rows that a run draws, their order, and the origin of their answers, as its checkpoints keep them. No torch.

A resumed run trains what was sampled before with what is sampled now, as one. So it goes on only where nothing of this
has changed; a new run from the checkpoint of another may change it all, and begins its epochs anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from areal_megatron.config import Config, ConfigError
from areal_megatron.config.user_function import code_of
from areal_megatron.data.trajectory import decoder
from areal_megatron.process.errors import first_line, printable

SUPERVISED = "examples.msgpack"
"""The file of a checkpoint that holds the Drawing of a supervised run."""
_CONTROLLER = "controller.msgpack"
_DIGEST_BYTES = 8
_MOST_NAMED = 4
"""How many edited files a warning names."""
_EXCERPTS, _EXCERPT_BYTES = 16, 1 << 16
_SETTINGS = (
    "data.max_prompt_tokens",
    "rollout.workflow",
    "rollout.turns",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "reward.function",
    "reward.group_function",
    "reward.wrong",
    "reward.right",
    "reward.truncated",
)
"""What decides, in each environment, how answers are sampled and scored."""
Kind = TypeVar("Kind")
_encode = msgspec.json.Encoder(enc_hook=str, order="sorted").encode


class Member(Protocol):
    """A prompt, an example or a pair."""

    @property
    def digest(self) -> bytes: ...
    @property
    def where(self) -> str: ...


class Drawing(msgspec.Struct, kw_only=True):
    """Where the drawing of rows stands, and what rows, their order and answers to them depend on."""

    rows: int
    """Number of usable rows of data.train."""
    seed: int
    mixture: list[tuple[int, int]] = []
    """(rows, rows drawn an epoch) of each file of data.train, if the files have weights."""
    cursor: tuple[int, int] = (0, 0)
    """`Cursor.at` of prompts.py."""
    order: int = 0
    """`Cursor.order`."""
    digests: bytes
    """The `digest_of` each row, 8 bytes each."""
    tokenizer: str = ""
    template: str = ""
    """`Tokenizer.digests`; empty: unknown."""
    environments: list[dict[str, Any]] = []
    """Key of the config → value in each environment, of what decides how answers are sampled and scored; a run without
    environments has one, a supervised run none."""
    code: dict[str, str] = {}
    """File → digest of the code behind functions of the user. It may change."""

    def difference(self, now: Drawing, members: Sequence[Member]) -> str:
        """Returns the first difference between a checkpoint with this and a run with `now` and the rows `members`, as
        `KEY: difference`; empty if there is none. Values unknown to either are not compared."""
        if self.seed != now.seed:
            return f"seed: {now.seed}, but the checkpoint was made with {self.seed}, which orders the rows"
        if problem := self._other_environments(now):  # which also decides what of a row counts
            return problem
        if problem := self._other_rows(now, members):
            return f"data.train: {problem}"
        if self.mixture != now.mixture:
            return "data.train: the checkpoint was made with other weights, which order the rows"
        if self.order != now.order:
            return "rollout.easiest_first: the checkpoint was made with prompts in another order"
        if _differ(self.tokenizer, now.tokenizer):
            return "model.path: the checkpoint was made with another tokenizer, or other tokens that end answers"
        if _differ(self.template, now.template):
            return "model.path: the checkpoint was made with another chat template, or other special tokens for it"
        return ""

    def _other_rows(self, now: Drawing, members: Sequence[Member]) -> str:
        before, after = (np.frombuffer(digests, f"V{_DIGEST_BYTES}") for digests in (self.digests, now.digests))
        known = min(len(before), len(after))
        other = [*np.flatnonzero(before[:known] != after[:known]), *range(known, len(after))]
        first = f", the first is {members[other[0]].where}" if other else ""
        if self.rows != now.rows:
            other_ones = f"; {len(other)} are other ones{first}" if other else ""
            return f"{now.rows} rows, but the checkpoint was made with {self.rows}{other_ones}"
        return f"{len(other)} of {now.rows} rows are not those of the checkpoint{first}" if other else ""

    def _other_environments(self, now: Drawing) -> str:
        if not (self.environments and now.environments):
            return ""
        if len(self.environments) != len(now.environments):
            return f"environments: {len(now.environments)}, but the checkpoint was made with {len(self.environments)}"
        for number, (before, after) in enumerate(zip(self.environments, now.environments, strict=True)):
            place = f"environments.{number}: " if len(now.environments) > 1 else ""
            for key, value in after.items():
                of_model = key.startswith("served.")
                if of_model and _differ(before.get(key, ""), value):
                    return f"{place}{key}: the checkpoint was made with another model"
                if not of_model and key in before and before[key] != value:
                    return f"{place}{key}: {value}, but the checkpoint was made with {before[key] or 'none'}"
        return ""

    def edited(self, now: Drawing) -> str:
        """Returns the names of the files behind functions of the user that have changed since; empty if none has."""
        names = [name for name, digest in now.code.items() if _differ(self.code.get(name, ""), digest)]
        return ", ".join(names[:_MOST_NAMED]) + f" and {len(names) - _MOST_NAMED} more" * (len(names) > _MOST_NAMED)


class PromptDrawing(Drawing, kw_only=True):
    """The Drawing in a controller's part of a checkpoint."""

    rows: int = msgspec.field(name="prompts")


def saved_in(checkpoint: Path) -> Drawing | None:
    """Returns the drawing in a checkpoint's folder; None for a replay's. Raises ConfigError."""
    for name, kind in ((_CONTROLLER, PromptDrawing), (SUPERVISED, Drawing)):
        if (path := checkpoint / name).exists():
            return read(path, kind)
    return None


def read(path: Path, kind: type[Kind]) -> Kind:
    """Reads a file of a checkpoint that holds a Drawing, or more. Raises ConfigError if it cannot be read."""
    try:
        return decoder(kind).decode(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        problem = e.strerror if isinstance(e, OSError) else printable(first_line(e))
        raise ConfigError(
            f"{path}: no readable state of a run: {problem}; take another checkpoint with resume=FOLDER, or the "
            "release that wrote this one"
        ) from None


def goes_on(
    saved: Drawing,
    now: Drawing,
    members: Sequence[Member],
    checkpoint: str | Path,
    own: bool,
    say: Callable[[str], None] = lambda line: None,
) -> bool:
    """Returns whether a run goes on drawing where its checkpoint stood; if not, its epochs begin anew.

    They do if the checkpoint is another run's and anything differs, of which `say` is told, as it is of functions of
    the user that were edited. Raises ConfigError if something differs from the run's `own` checkpoint.
    """
    if not (difference := saved.difference(now, members)):
        if edited := saved.edited(now):
            say(f"{edited}: edited since the checkpoint was made; answers of the old code and of the new are trained")
        return True
    if own:
        raise ConfigError(
            f"{difference}: continue with the same, or have a new run begin there, with epochs of its own: name=… "
            f"resume={checkpoint}"
        )
    say(f"{difference}: the epochs begin anew, and answers that it holds are not trained")
    return False


def settings_of(config: Config) -> list[dict[str, Any]]:
    """Returns `Drawing.environments` of a run's config."""
    if config.mode != "rl":
        return []
    return [
        {key: attrgetter(key)(own) for key in _SETTINGS}
        | {
            f"served.{name}.{key}": _digest_of_model(Path(folder)) if folder else "none"
            for name, model in own.served_models.items()
            for key, folder in (("path", model.path), ("adapter", model.adapter))
            if name != "reward" or own.reward.of_model
        }
        for own in config.by_environment()
    ]


def functions_of(config: Config) -> dict[str, str]:
    """Returns `Drawing.code` of a run's config."""
    keys = ("reward.function", "reward.group_function", "rollout.workflow") if config.mode == "rl" else ()
    paths = [attrgetter(key)(own) for own in config.by_environment() for key in keys]
    own = dict.fromkeys(path for path in paths if ":" in path and "://" not in path)
    return {file: digest for path in own for file, digest in code_of(path).items()}


def digest_of(*said: Any) -> bytes:
    """Returns 8 bytes that tell apart what rows say, JSON values: the same on every machine, whatever the file's
    format."""
    return hashlib.blake2b(_encode(said), digest_size=_DIGEST_BYTES).digest()


def stated(value: Any) -> Any:
    """Returns a JSON value without the keys that have none, which Parquet adds to rows where others have them."""
    if isinstance(value, dict):
        return {key: stated(inner) for key, inner in value.items() if inner is not None}
    return [stated(inner) for inner in value] if isinstance(value, list) else value


def joined(members: Iterable[Member]) -> bytes:
    """Returns `Drawing.digests` of the rows."""
    return b"".join(member.digest for member in members)


def _differ(before: str, after: str) -> bool:
    return bool(before and after) and before != after


def _digest_of_model(folder: Path) -> str:
    """Tells models apart by excerpts of their files, wherever the folder is; empty without weights, as before they are
    fetched."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return ""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in (*sorted(folder.glob("*.json")), *weights):
        size = file.stat().st_size
        hasher.update(_encode((file.name, size)))
        with file.open("rb") as opened:
            for part in range(_EXCERPTS):
                opened.seek(size * part // _EXCERPTS)
                hasher.update(opened.read(_EXCERPT_BYTES))
    return hasher.hexdigest()

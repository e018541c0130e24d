"""Reads the rows of data sets: JSONL and Parquet files, folders of them, Hugging Face data sets, and mixtures.

Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from areal_megatron.config import Config, ConfigError
from areal_megatron.data.drawing import stated
from areal_megatron.hub import hub
from areal_megatron.process.errors import first_line
from areal_megatron.process.files import names_like
from areal_megatron.run.json_input import kind_of, parse_json

_SHARD = re.compile(r"-\d+-of-\d+$")
_COLUMNS = (".parquet", ".arrow")
_LIST_HINT = "; if the file is one JSON list, rename it to .json"
_HOLDERS = ("data", "rows", "examples", "instances", "train", "test")
"""Under what others put the rows of a file that is one object."""


@dataclass(frozen=True)
class Source:
    """One data set of a mixture."""

    path: str
    weight: float | None
    """The share of the prompts that come from this source, relative to the other weights; None: every row once an
    epoch."""


class RowPlace(Protocol):
    """What a row's place in a mixture depends on."""

    source: int
    environment: int


@dataclass(frozen=True)
class Record:
    """One row of a data set, and where it comes from."""

    id: int
    """Row number from 0, counted through all sources; blank lines of JSONL are no rows."""
    source: int
    """Number of the source, from 0."""
    where: str
    """`path:row`, with rows counted from 1 within the file, for error messages; of JSONL `path:line`."""
    row: dict[str, Any]
    environment: int = 0
    """Number of the environment of the config, from 0."""
    has_columns: bool = False
    """Whether its file has columns, so that the row has a null for each key that only other rows have."""

    @property
    def said(self) -> dict[str, Any]:
        """The row without the nulls that columns add; those that JSON states are there."""
        return stated(self.row) if self.has_columns else self.row


def rows(config: Config, key: str) -> Iterator[Record]:
    """Yields the rows of data.train or data.eval (`key`), or of all environments, one after the other.

    Rows and sources are counted through all of them. Raises ConfigError for the reasons `records` does.
    """
    last, files = -1, 0
    for number, own in enumerate(config.by_environment()):
        if not (text := getattr(own.data, key)):
            continue
        first = last + 1
        for record in records(text):
            last = first + record.id
            yield replace(record, id=last, source=files + record.source, environment=number)
        files += len(sources(text))


def row_shares(config: Config, members: Sequence[RowPlace]) -> list[tuple[int, int]]:
    """Returns (rows, rows drawn in each epoch) of every part of data.train that has a weight, or of every environment
    with a share; [] without. `members` has every row. Raises ConfigError for the reasons `shares` does."""
    if config.environments:
        parts = [Source(own.train, own.share or None) for own in config.environments]
        return shares(parts, [member.environment for member in members])
    return shares(sources(config.data.train), [member.source for member in members])


def file_names(config: Config, key: str) -> list[str]:
    """Returns a name for each file of data.train or data.eval (`key`), as `Record.source` counts them.

    With environments a file's name begins with its environment's, or is the environment's if that has no other file.
    """
    names = []
    for environment, own in zip(config.environments, config.by_environment(), strict=False):
        files = source_names(getattr(own.data, key)) if getattr(own.data, key) else []
        names += [environment.name] if len(files) == 1 else [f"{environment.name}/{file}" for file in files]
    return names if config.environments else source_names(getattr(config.data, key))


def sources(text: str | Path) -> list[Source]:
    """Parses the value of data.train or data.eval: a path, `path,path`, or `path:weight,path:weight`.

    A path is a JSONL, JSON or Parquet file, a folder of such shards or of a data set that `datasets` has saved; a data
    set of the Hugging Face hub, OWNER/NAME[@REVISION][:[SUBSET/]SPLIT], or a file there,
    hf://datasets/OWNER/NAME[@REVISION]/FILE. Raises ConfigError.
    """
    text = str(text)
    found = [Source(path, float(weight) if weight else None) for path, weight in _parts(text)]
    if not all(source.path for source in found):
        raise ConfigError(f"data: {text!r} names an empty path; expected path,path or path:weight,path:weight")
    if len({source.weight is None for source in found}) > 1:
        raise ConfigError(f"data: {text!r} gives some files a weight; give all of them one, or none")
    if bad := [source for source in found if source.weight is not None and not 0 < source.weight < math.inf]:
        raise ConfigError(f"data: the weight of {bad[0].path} is {bad[0].weight:g}, expected one above 0")
    return found


def fetch(text: str, key: str, before: Mapping[str, str] = MappingProxyType({})) -> str:
    """Brings the data sets of the hub in data.train or data.eval into its cache, and returns the value with the commits
    that their revisions mean now: `records` then reads them without asking the hub.

    `before`: `commits` of a run that is resumed. Raises ConfigError that begins with `key`.
    """
    parts = []
    for path, weight in _parts(text):
        data = hub.HubData.parse(path)
        parts.append((str(hub.fetch_data(data, key, before)) if data else path) + f":{weight}" * bool(weight))
    return ",".join(parts)


def commits(config: Config) -> dict[str, str]:
    """Returns OWNER/NAME → commit of every data set of the hub that the config of a run has pinned."""
    texts = [text for own in config.by_environment() for text in (own.data.train, own.data.eval) if text]
    named = [hub.HubData.parse(source.path) for text in texts for source in sources(text)]
    return {data.repo.name: data.repo.revision for data in named if data and data.repo.is_pinned}


def source_names(text: str | Path) -> list[str]:
    """Returns a name for each of the `sources(text)`: its path without suffix, as much of its end as tells them apart.

    One that is given twice gets its number as well. Raises ConfigError.
    """
    paths = [_name(source.path).split("/") for source in sources(text)]
    names, longest = list[str](), max(map(len, paths))
    for length in range(1, longest + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{name}#{number}" for number, name in enumerate(names, 1)]


def records(text: str | Path) -> Iterator[Record]:
    """Yields the rows of all `sources(text)`, one source after the other.

    Raises ConfigError, which names the file and the row, if a source cannot be read, is empty, or has a row that is
    not an object.
    """
    count = 0
    for number, source in enumerate(sources(text)):
        before = count
        for file in _files(source.path):
            for place, row in _rows(file):
                where = f"{file}:{place + 1}"
                if not isinstance(row, dict):
                    hint = _LIST_HINT if isinstance(row, list) and not place and file.suffix == ".jsonl" else ""
                    found = kind_of(row)
                    raise ConfigError(f'{where}: expected an object like {{"prompt": …}}, found {found}{hint}')
                yield Record(count, number, where, row, has_columns=file.suffix in _COLUMNS)
                count += 1
        if count == before:
            raise ConfigError(f"{source.path}: the dataset is empty; it needs one JSON object a line, or rows")


def shares(found: Sequence[Source], members: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (rows, rows drawn in each epoch) for every source, or [] if the sources have no weights.

    `members` holds the source number of every row. An epoch is as long as possible without drawing a row twice: at
    least one source is drawn completely, the others in proportion to their weights. Raises ConfigError if a weight is
    too small for a single row, or a source has none.
    """
    weights = [source.weight for source in found if source.weight is not None]
    if not weights:
        return []
    sizes = [members.count(number) for number in range(len(found))]
    if 0 in sizes:
        raise ConfigError(f"data: no row of {found[sizes.index(0)].path} can be used: leave it out")
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    drawn = [min(size, round(weight * scale)) for size, weight in zip(sizes, weights, strict=True)]
    for source, count in zip(found, drawn, strict=True):
        if not count:
            raise ConfigError(
                f"data: with a weight of {source.weight:g} not one row of {source.path} fits into an epoch of "
                f"{sum(drawn)}; raise its weight"
            )
    return list(zip(sizes, drawn, strict=True))


def _parts(text: str) -> list[tuple[str, str]]:
    """Returns (path, weight as it is written, or "") of each data set in the value of data.train or data.eval."""
    if os.path.exists(text):  # Path.exists raises OSError for a list that is longer than a name may be
        return [(text, "")]
    return [_divided(part.strip()) for part in text.split(",")]


def _divided(part: str) -> tuple[str, str]:
    path, colon, weight = part.rpartition(":")
    try:
        float(weight)
    except ValueError:
        return part, ""
    return (path, weight) if colon else (part, "")


def _name(path: str) -> str:
    data = hub.HubData.parse(path)
    path = path.rstrip("/") if data is None else f"{data.repo.name}/{data.file}".rstrip("/")
    return re.sub(r"\.(jsonl?|parquet|arrow)$", "", path)


def _files(path: str) -> list[Path]:
    if data := hub.HubData.parse(path):
        return hub.data_files(data)
    folder = Path(path)
    if not os.path.isdir(folder):
        return [folder]
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix in (".jsonl", ".parquet", ".arrow"))
    except OSError as e:
        raise _unread(folder, e) from None
    if not files:
        raise ConfigError(f"{path}: no *.jsonl, *.parquet or *.arrow file in this folder")
    if len(sets := sorted({_SHARD.sub("", file.stem) for file in files})) > 1:
        raise ConfigError(
            f"{path}: this folder holds several sets, {', '.join(sets)}: name a file, or several with commas"
        )
    return files


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (row, of JSONL line, from 0; value) for each row of one file."""
    if path.suffix in (".csv", ".tsv"):
        tab = ", delimiter='\\t'" if path.suffix == ".tsv" else ""
        convert = f"import csv, json; [print(json.dumps(row)) for row in csv.DictReader(open('{path}'){tab})]"
        raise ConfigError(
            f"{path}: a table of text is no data set, convert it to JSONL: "
            f'python -c "{convert}" > {path.with_suffix(".jsonl")}'
        )
    read = {".parquet": _parquet, ".arrow": _arrow, ".json": _json}.get(path.suffix, _jsonl)
    try:
        yield from read(path)
    except OSError as e:
        raise _unread(path, e) from None


def _unread(path: Path, error: OSError) -> ConfigError:
    near = f", did you mean {names_like(path)[0]}?" if isinstance(error, FileNotFoundError) and names_like(path) else ""
    return ConfigError(f"{path}: cannot read the dataset: {error.strerror or error}{near}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: the dataset is not UTF-8: {e.reason} at byte {e.start}") from None


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """Reads a list of rows; a file that begins otherwise has lines as JSONL. Raises ConfigError if it is one object
    that holds rows, or that is spread over lines."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        if held := _held(text):
            raise ConfigError(f'{path}: expected a list of objects, [{{"prompt": …}}, …], found one object with {held}')
        yield from _jsonl(path)
        return
    try:
        yield from enumerate(parse_json(text))
    except ValueError as e:
        raise ConfigError(f"{path}: not JSON: {e}") from None


def _held(text: str) -> str:
    """Returns the fields of a text that is one object and no row of JSONL, else ""."""
    try:
        whole = parse_json(text)
    except ValueError:
        return ""
    if not isinstance(whole, dict):
        return ""
    is_row = "\n" not in text.strip() and not any(isinstance(whole.get(name), list) for name in _HOLDERS)
    return "" if is_row else ", ".join(map(repr, list(whole)[:5])) or "no field"


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    text = _text(path)
    for number, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            yield number, parse_json(line)
        except ValueError as e:
            hint = (
                "" if line.lstrip()[0] in "{[" else "; a data set has one JSON object a line, or is .json or .parquet"
            )
            hint = _LIST_HINT if text.lstrip().startswith("[") and path.suffix == ".jsonl" else hint
            raise ConfigError(f"{path}:{number + 1}: not JSON: {e}{hint}") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    pyarrow = _pyarrow(path)
    with path.open("rb") as file:
        try:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches()
            yield from _batched(path, batches)
        except pyarrow.ArrowInvalid as e:
            raise ConfigError(f"{path}: no Parquet file: {first_line(e)}") from None


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    pyarrow = _pyarrow(path)
    with path.open("rb") as file:
        try:
            yield from _batched(path, pyarrow.ipc.open_stream(file))
        except pyarrow.ArrowInvalid as e:
            raise ConfigError(f"{path}: no Arrow stream: {first_line(e)}") from None


def _batched(path: Path, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    number = 0
    for batch in map(_in_microseconds, batches):
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:  # somewhere in the batch
            rows = (batch.slice(begin, 1).to_pylist()[0] for begin in range(batch.num_rows))
        try:
            for row in rows:
                yield number, row
                number += 1
        except UnicodeDecodeError as e:
            raise ConfigError(f"{path}:{number + 1}: a text is not UTF-8: {e.reason} at byte {e.start}") from None


def _in_microseconds(batch: Any) -> Any:
    """Returns the batch with columns of times and durations as Python's own types hold them; pandas writes
    nanoseconds."""
    import pyarrow

    def coarse(field: Any) -> Any:
        if getattr(field.type, "unit", "") != "ns" or pyarrow.types.is_time(field.type):
            return field
        is_duration = pyarrow.types.is_duration(field.type)
        return field.with_type(pyarrow.duration("us") if is_duration else pyarrow.timestamp("us", field.type.tz))

    schema = pyarrow.schema([coarse(field) for field in batch.schema])
    return batch if schema.equals(batch.schema) else batch.cast(schema, safe=False)


def _pyarrow(path: Path):
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: reading it needs pyarrow: pip install pyarrow, or convert it to JSONL") from None
    return pyarrow

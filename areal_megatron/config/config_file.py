"""Loads a run's config from a YAML file and overrides, and saves it.

Every wrong line or override is refused with one line: its place, the problem and a correct value.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_megatron.config import (
    Config,
    ConfigError,
    EnvironmentConfig,
    check,
    config_fields,
    decide_defaults,
    describe,
)
from areal_megatron.config.other_names import NONE_HERE, OTHER_NAMES, REMARKS, find
from areal_megatron.process.errors import first_line
from areal_megatron.process.files import names_like, write_atomically

_EVERY = Config(environments=[EnvironmentConfig()])
_FIELDS = {key: f for key, f, value in config_fields(_EVERY) if not isinstance(value, list) and not is_dataclass(value)}
"""The key of an environment is here once, as `environments.0.KEY`."""
_KEYS = "docs/keys.md"
"""Where all keys are told."""
_EXAMPLE = "configs/tiny_cpu.yaml"
_RUNS = Path(Config.runs_dir)
_DATA = (".jsonl", ".parquet", ".arrow", ".csv")
"""Files that hold rows."""
_LIST = "environments"
"""The only key with a list, of sections."""
_SECTIONS = {key for key, *_ in config_fields(_EVERY)} - _FIELDS.keys()
_PASSED_THROUGH = {key for key, _, value in config_fields(_EVERY) if isinstance(value, dict)}
"""Sections with the keys of another library (areal_megatron/config/passed_through.py)."""

_OWN = r"; a text's own ${ is written \${"
"""What is said where `${` does not begin what stands for another value."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then the YAML file, then `key=value` overrides, of which the last one of a key holds; checked.

    A default that other keys decide, such as the clip of an algorithm, is decided here.

    Raises ConfigError for a missing file, broken YAML, an unknown key (with the nearest valid one), a key given twice
    in the file, a value of the wrong type or out of range, and keys that contradict each other.
    """
    path = Path(path)
    given, places, passed = deepcopy(_defaults()), {}, {section: {} for section in _PASSED_THROUGH}
    for key, node, place in [*_read_file(path), *(_read_override(text) for text in overrides)]:
        if found := _passed_through(key):
            section, option = found
            places[key], passed[section][option] = place, _option(node, f"{place}: {key}")
            continue
        _check_known(key, place)
        places[key] = place
        wanted = describe(_FIELDS[_any_entry(key)])
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{place}: {key}: must be {wanted}, is {_value(node)}")
        _make_room(given, key, place)
        try:
            OmegaConf.update(given, key, node.value)
        except OmegaConfBaseException:
            hint = _OWN if "${" in node.value else ""
            raise ConfigError(f"{place}: {key}: must be {wanted}, is {node.value!r}{hint}") from None
    try:
        missing = [_dotted(key) for key in OmegaConf.missing_keys(given)]
        if not given.data.train and not given.environments:
            missing.append("data.train")
        if missing:
            raise ConfigError(f"{path}: missing {', '.join(sorted(missing))}")
        config = cast(Config, OmegaConf.to_object(given))
    except OmegaConfBaseException as e:  # as of ${…} that stands for nothing
        key, problem = _wrong(e)
        raise ConfigError(f"{places.get(key, path)}: {key}: {problem}{_OWN}") from None
    for key, options in passed.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(config), name, options)
    decide_defaults(config, given=places)
    check(config, lambda key: f"{places.get(key, path)}: {key}")
    return config


@cache
def _defaults() -> DictConfig:
    """What every load begins with, in a copy: made anew it takes four fifths of the time of a load."""
    return OmegaConf.structured(Config)


def load_run(folder: Path) -> Config:
    """Returns the config of a run. Raises ConfigError also if the folder is none of a run, with the nearest that is."""
    path = folder / "config.yaml"
    with suppress(OSError):  # in a folder that this user may not enter, as `load` says
        if not path.exists():
            raise no_run(folder)
    return load(path)


def no_run(folder: Path) -> ConfigError:
    """Returns the error for a folder of no run, or that is not there, with the nearest of a run."""
    place = "" if os.path.exists(folder) else f" (nothing is there, seen from {os.getcwd()})"
    return ConfigError(f"{folder} is no run folder{place}{_nearest_run(folder)}")


def _nearest_run(folder: Path) -> str:
    """Returns which run may be meant by the name of another folder, or which there are."""
    if inner := _runs_in(folder):
        return f"; it has {', '.join(map(str, inner))}"
    seen = Path(os.path.relpath(folder))
    in_runs = [_RUNS / seen] if len(seen.parts) == 1 else []
    if near := [run for run in [*in_runs, *names_like(folder), *names_like(_RUNS / seen.name)] if _is_run(run)]:
        return f", did you mean {near[0]}?"
    for parent in folder.parents:
        if _is_run(parent) and os.path.exists(parent / "incarnations"):  # others have a config.yaml of their own
            return f", its run is {parent}"
    newest = ", ".join(map(str, _runs_in(_RUNS)))
    return f"; the newest here: {newest}" if newest else f", and {_RUNS} has none"


def _runs_in(folder: Path) -> list[Path]:
    """Returns the newest run folders in a folder, three at most."""
    try:
        found = [run for run in folder.iterdir() if _is_run(run)]
        return sorted(found, key=lambda run: (run / "config.yaml").stat().st_mtime, reverse=True)[:3]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return os.path.exists(folder / "config.yaml")


def options(given: list[str]) -> dict[str, Any]:
    """Returns options that are passed through, each given as `name=value`, unchecked. Raises ConfigError if one is not
    given so."""
    return {name: _option(node, place) for name, node, place in map(_read_override, given)}


def check_stdin(check: Callable[[Config], None]) -> int:
    """Loads a config from standard input and has it checked. Returns the exit code: 2, after one line, for a
    ConfigError."""
    try:
        check(load("/dev/stdin"))
    except ConfigError as e:
        print(f"error: {str(e).removeprefix('/dev/stdin: ')}", file=sys.stderr)
        return 2
    return 0


def save(config: Config, path: Path) -> None:
    """Writes the resolved config as YAML; `load` reads it back to an equal Config. Raises ConfigError as text does."""
    write_atomically(path, text(config))


def text(config: Config) -> str:
    """Returns the resolved config as YAML. Raises ConfigError for a value that its key cannot have."""
    try:
        return OmegaConf.to_yaml(OmegaConf.structured(_literal(config)))
    except OmegaConfBaseException as e:
        raise ConfigError(": ".join(_wrong(e))) from None


def _literal(value: Any) -> Any:
    """Returns a config, or a value in it, whose texts are read back as they are: `${` begins what stands for another
    value in a file."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _literal(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, list):
        return [*map(_literal, value)]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _wrong(error: OmegaConfBaseException) -> tuple[str, str]:
    """Returns the key that an error is about, and what is wrong with it."""
    return _dotted(error.full_key or ""), first_line(error)


def _dotted(key: str) -> str:
    """Returns a key as it is given, from OmegaConf's."""
    return re.sub(r"\[(\d+)\]", r".\1", key)


Entry = tuple[str, yaml.Node, str]
"""A dotted key, its value, and where it was written."""


def _read_file(path: Path) -> list[Entry]:
    if path.suffix in _DATA:
        raise ConfigError(f"{path} is data, not a config: give a YAML file such as {_EXAMPLE}, and data.train={path}")
    try:
        tree = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except OSError as e:
        near = f", did you mean {names_like(path)[0]}?" if names_like(path) else ""
        near = f"; give a YAML file, such as {_EXAMPLE}" if isinstance(e, IsADirectoryError) else near
        if not near and "=" in path.name:
            near = f": give a YAML file before it, such as {_EXAMPLE} {path}"
        raise ConfigError(f"{path}: cannot read the config: {e.strerror}{near}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not YAML in UTF-8: {e.reason}") from None
    except RecursionError:
        raise ConfigError(f"{path}: no config: its sections and lists are nested too deeply") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {getattr(e, 'problem', first_line(e))}{_begun(e)}") from None
    if tree is not None and not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{path}: expected `key: value` lines")
    return list(_entries(path, tree, "", {}) if tree else [])


def _begun(error: yaml.YAMLError) -> str:
    """Says where an error of YAML may lie whose line is only the one at which the parser noticed it."""
    if mark := getattr(error, "context_mark", None):
        return f", {getattr(error, 'context', '')} that begins on line {mark.line + 1}"
    return ": does the line before lack its ':'?" if "mapping values" in str(error) else ""


def _entries(path: Path, tree: yaml.MappingNode, prefix: str, lines: dict[str, int]) -> Iterator[Entry]:
    for name, node in tree.value:
        line = name.start_mark.line + 1
        place = f"{path}:{line}"
        if not isinstance(name, yaml.ScalarNode) or "." in name.value:
            raise ConfigError(f"{place}: {_value(name)!r} is no key: in a file, keys are indented below their section")
        key = f"{prefix}{name.value}"
        if key in lines:
            raise ConfigError(f"{place}: {key}: was given on line {lines[key]} already")
        lines[key] = line
        if key == _LIST and isinstance(node, yaml.SequenceNode):
            for number, entry in enumerate(node.value):
                if not isinstance(entry, yaml.MappingNode):
                    raise ConfigError(f"{place}: {key}: expected `- name: …` with further keys below, for each")
                yield from _entries(path, entry, f"{key}.{number}.", lines)
        elif key in _SECTIONS | _PASSED_THROUGH and key != _LIST and isinstance(node, yaml.MappingNode):
            yield from _entries(path, node, f"{key}.", lines)
        elif key not in _SECTIONS | _PASSED_THROUGH or _value(node) is not None:  # a section may be empty
            yield key, node, place


def _any_entry(key: str) -> str:
    """The key, with an environment's number replaced by 0."""
    return re.sub(rf"^{_LIST}\.\d+\.", f"{_LIST}.0.", key)


def _make_room(config: DictConfig, key: str, place: str) -> None:
    """Adds an entry to the list that the key is of, if it is about the first that is not there yet."""
    if not (found := re.match(rf"{_LIST}\.(\d+)\.", key)):
        return
    number, there = int(found[1]), len(config[_LIST])
    if number > there:
        raise ConfigError(f"{place}: {key}: there is no {_LIST}.{there} before it")
    if number == there:
        config[_LIST].append(EnvironmentConfig())


def _read_override(text: str) -> Entry:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r}: expected key=value without blanks around =, e.g. optimizer.lr=1e-5")
    try:
        node = yaml.compose(value, yaml.SafeLoader) or yaml.ScalarNode("tag:yaml.org,2002:str", "")
        _value(node)
    except yaml.YAMLError:
        quoted = f"{key}='…'"
        raise ConfigError(
            f'override {text!r}: the value is not YAML: put a text into quotes of its own, "{quoted}"'
        ) from None
    return key, node, f"override {text!r}"


def _value(node: yaml.Node) -> Any:
    """The value of a YAML node as Python has it."""
    return yaml.constructor.SafeConstructor().construct_document(node)


def _option(node: yaml.Node, place: str) -> Any:
    """The value of an option that is passed through. Unlike YAML, which wants 1.0e-5, takes 1e-5 for a number, as it is
    taken everywhere else in a config. Raises ConfigError that begins with `place`."""
    pair = yaml.ScalarNode("tag:yaml.org,2002:str", "value"), node
    text = yaml.serialize(yaml.MappingNode("tag:yaml.org,2002:map", [pair]))
    try:
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text), resolve=False))["value"]
    except (OmegaConfBaseException, yaml.YAMLError) as e:  # `${` without an end, an alias of what it is in
        raise ConfigError(f"{place}: {first_line(e)}") from None


def _passed_through(key: str) -> tuple[str, str] | None:
    """The section and the name of an option that is passed through; None for any other key."""
    section = next((section for section in _PASSED_THROUGH if key.startswith(f"{section}.")), None)
    return (section, key.removeprefix(f"{section}.")) if section else None


def _check_known(key: str, where: str) -> None:
    if key in _PASSED_THROUGH:
        raise ConfigError(f"{where}: {key} is a section: give its options one by one, such as {key}.NAME=VALUE")
    key = _any_entry(key)
    if key in _FIELDS:
        return
    if key in _SECTIONS:
        first = next(known for known in _FIELDS if known.startswith(f"{key}."))
        raise ConfigError(f"{where}: {key} is a section: give its keys one by one, such as {first}")
    if sentence := find(key, NONE_HERE):
        raise ConfigError(f"{where}: unknown key {key!r}: {sentence}")
    found = nearest(key)
    known = f", which is {describe(_FIELDS[found])}" if found in _FIELDS else ""
    remark = f" ({REMARKS[found]})" if found in REMARKS and key.split(".")[-1] != found.split(".")[-1] else ""
    hint = f"did you mean {found!r}{known}{remark}?" if found else f"see {_KEYS}"
    raise ConfigError(f"{where}: unknown key {key!r}, {hint}")


def is_key(key: str) -> bool:
    """Whether there is such a key."""
    return _any_entry(key) in _FIELDS


def nearest(key: str) -> str:
    """Returns the key that is probably meant by one that there is not, "" if none is like it."""
    same_leaf = [known for known in _FIELDS if known.split(".")[-1] == key.split(".")[-1]]
    same_leaf = difflib.get_close_matches(key, same_leaf, 1, cutoff=0)
    sections = () if "." in key else _SECTIONS
    near = difflib.get_close_matches(key, [*_FIELDS, *sections], 1)
    return find(key, OTHER_NAMES) or (same_leaf or near or [""])[0]

"""Arguments of commands: what is wrong with them is told in one line, with exit code 2."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from areal_megatron.config import ConfigError, config_file
from areal_megatron.config.other_names import NONE_HERE, find
from areal_megatron.process.called import program
from areal_megatron.process.files import write_json

_REQUIRED = "the following arguments are required: "
_UNKNOWN = "unrecognized arguments: "
_NO_NUMBER = re.compile(r"argument (.+): invalid (int|float) value: (.*)")
_NUMBERS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """A parser of a program's arguments.

    Example:
        parser = Parser("areal_megatron.programs.rows", __doc__)
        parser.add_config()
        parser.parse_intermixed_args(["my.yaml", "--lr", "1e-5"])
        # error: areal rows: there is no option --lr; keys of the config are given as optimizer.lr=1e-5
    """

    def __init__(self, module: str = "", description: str | None = "", **others: Any):
        """`module`: the program's; without it `others` are argparse's own arguments, as for a parser below another."""
        if module:
            others |= {"prog": program(module), "description": (description or "").split("\n")[0]}
        super().__init__(**others)
        self._takes_config = False

    def add_config(self) -> None:
        """Adds CONFIG [key=value …]."""
        self.add_argument("config", help="YAML file, see configs/")
        self.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the config")
        self._takes_config = True

    def error(self, message: str) -> NoReturn:
        told = message
        if message.startswith(_REQUIRED):
            lacking = [name for name in message.removeprefix(_REQUIRED).split(", ") if name != "key=value"]
            named, has_options = " and ".join(lacking), any(name.startswith("-") for name in lacking)
            told = f"{f'{named} missing:' if has_options else f'which {named}?'} {_lines(self.format_usage())}"
        if found := _NO_NUMBER.fullmatch(message):
            told = f"{found[1]}: expected {_NUMBERS[found[2]]}, is {found[3]}"
        if message.startswith(_UNKNOWN):
            told = self._about(message.removeprefix(_UNKNOWN).split(" "))
        told = told.removeprefix("argument ")
        print(f"error: {self.prog}: {told}; {self.prog} --help says more", file=sys.stderr)
        sys.exit(2)

    def _about(self, words: list[str]) -> str:
        first, _, value = words[0].partition("=")
        if not first.startswith("-"):
            return f"one argument too many: {words[0]}"
        value = value or next((word for word in words[1:2] if not word.startswith("-")), "VALUE")
        near = difflib.get_close_matches(first, self._option_string_actions, 1, 0.75)
        if near or not self._takes_config:
            return f"there is no option {first}" + (f", did you mean {near[0]}?" if near else "")
        key = first.lstrip("-").replace("-", "_")
        if sentence := find(key, NONE_HERE):
            return f"there is no option {first}: {sentence}"
        meant = key if config_file.is_key(key) else config_file.nearest(key) or "KEY"
        meant = meant if "=" in meant else f"{meant}={value}"
        return f"there is no option {first}; keys of the config are given without dashes: {meant}"


def count(text: str) -> int:
    """Parses a whole number of at least 0. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 0, is {text!r}")
    return int(text)


def write_output(option: str, path: Path | None, contents: dict[str, Any]) -> None:
    """Writes the JSON file that an option names, if it was given. Raises ConfigError."""
    try:
        if path:
            write_json(path, contents)
    except OSError as e:
        raise ConfigError(f"{option}: cannot write {path}: {e.strerror}") from None


def _lines(usage: str) -> str:
    return " ".join(usage.split())

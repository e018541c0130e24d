"""Writes docs/keys.md and docs/commands.md, the pages that list every key of a config and every option of `areal`:
`python tools/reference.py`, from the repository's folder.

Both come from the code alone: fields and docstrings of config/fields.py, and the parsers of the commands.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import Field, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from areal_megatron.command import COMMANDS, SHELLS, parser_of
from areal_megatron.config import fields as config
from areal_megatron.config.algorithms import PUBLISHED

ROOT = Path(__file__).resolve().parents[1]
MADE = "made by `python tools/reference.py`"
TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "text"}
COMMON = {"CONFIG": "YAML file, see configs/", "[key=value …]": "override a key of the config"}
"""Arguments of many commands, with their help: the top of the page of commands says what they are."""
DECIDED = {key for algorithm in PUBLISHED.values() for key in algorithm.defaults}
"""Keys whose default is that of ppo.algorithm."""


def keys() -> str:
    """Returns docs/keys.md."""
    lines = [
        "# Config keys",
        "",
        f"Every key of a config ({MADE} from `areal_megatron/config/fields.py`). `key=value` on",
        "the command line overrides one.",
        "",
        "**Required** are `name`, `updates`, `model.path`, and `data.train` or `environments`.",
        "",
    ]
    sections: dict[str, list[str]] = {"": []}
    titles = {"": "Of the run"}
    for name, f, value, meaning in _documented(config.Config(environments=[config.EnvironmentConfig()])):
        section, _, leaf = name.rpartition(".")
        if is_dataclass(value):
            title = re.sub(r"^served\.\w+$", "served.NAME", re.sub(r"\.\d+$", "[]", name))
            if title in titles.values():
                continue  # another model, with the same keys
            sections[name], titles[name] = [], title
            if what := _linked(_own_docstring(type(value)) or meaning):
                sections[name] += [what, ""]
        elif not isinstance(value, list) and section in sections:
            sections[section].append(_row(f"{titles[section]}.{leaf}" if section else leaf, name, f, meaning))
    for section, rows in sections.items():
        if not rows:
            continue
        text = [row for row in rows if not row.startswith("|")]
        table = [row for row in rows if row.startswith("|")]
        lines += [f"## {titles[section]}", "", *text]
        if table:
            lines += ["| key | value | default | meaning |", "|---|---|---|---|", *table, ""]
    return "\n".join(lines).rstrip() + "\n"


def _documented(node: Any) -> Iterator[tuple[str, Field, Any, str]]:
    """(dotted key, field, default, docstring) of each field of a config, sections before their keys. A list has its
    entries after it."""
    meanings = {}
    for item in ast.parse(inspect.getsource(config)).body:
        if isinstance(item, ast.ClassDef):
            for here, after in zip(item.body, item.body[1:], strict=False):
                if isinstance(here, ast.AnnAssign) and _is_text(after):
                    meanings[item.name, here.target.id] = " ".join(after.value.value.split())
    owners = {"": type(node).__name__}
    for name, f, value in config.config_fields(node):
        section, _, leaf = name.rpartition(".")
        if is_dataclass(value):
            owners[name] = type(value).__name__
        yield name, f, value, meanings.get((owners[section], leaf), "")
        for number, entry in enumerate(value if isinstance(value, list) else ()):
            owners[f"{name}.{number}"] = type(entry).__name__
            yield f"{name}.{number}", f, entry, meanings.get((owners[section], leaf), "")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _own_docstring(section: type) -> str:
    """Its docstring in one line, empty where dataclasses made it."""
    text = " ".join((section.__doc__ or "").split())
    return "" if text.startswith(f"{section.__name__}(") else text


def _row(shown: str, name: str, f: Field, meaning: str) -> str:
    limits, choices = f.metadata.get("limits", {}), f.metadata.get("choices", ())
    if {*limits.values()} <= {0, 1} and not {*limits} & {"at most", "below"}:
        limits = {}  # what goes without saying, and a refusal says
    span = " and ".join(
        f"{limit} {value:,g}" if abs(value) < 1e6 else f"{limit} {value:.0f}" for limit, value in limits.items()
    )
    if {*limits} == {"at least", "at most"}:
        span = span.replace("at least", "from").replace(" and at most", " to")
    kind = ", ".join(f"`{choice}`" for choice in choices) or TYPES.get(f.type, "options by name")
    return f"| `{shown}` | {f'{kind} {span}'.rstrip()} | {_default(name, f)} | {_cell(_linked(meaning))} |"


def _default(name: str, f: Field) -> str:
    if name in DECIDED:
        return f"`{_value(f.default)}`, or the algorithm's"
    if f.default is MISSING:
        return "**required**"
    return "" if f.default == "" or not isinstance(f.default, (int, float, str)) else f"`{_value(f.default)}`"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _linked(text: str) -> str:
    """Text whose `docs/page.md` and `docs/page.md, "Heading"` are links from a page of docs/."""

    def link(found: re.Match) -> str:
        page, heading = found[1], found[2]
        anchor = "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") if heading else ""
        return f"[{heading or page}]({page}{anchor})"

    return re.sub(r'\bdocs/([\w/]+\.md)(?:, "([^"]+)")?', link, text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def commands() -> str:
    """Returns docs/commands.md."""
    lines = [
        "# Commands",
        "",
        f"Every command of `areal` with its arguments and options ({MADE} from their parsers).",
        f"`areal COMMAND --help` prints the same; `areal completion {'|'.join(SHELLS)}` prints what has a shell",
        "complete them. CONFIG is a YAML file ([start.md](start.md#3-write-a-config)), and `key=value` overrides a key",
        "of it. [Exit codes](operations.md#exit-codes).",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`areal {name}`](#areal-{name}) | {_cell(command.summary)} |" for name, command in COMMANDS.items()),
        "",
    ]
    os.environ.pop("AREAL_CALLED", None)
    said: dict[tuple[str, str], str] = {}
    for name, command in COMMANDS.items():
        parser = parser_of(command.module)
        lines += [f"## areal {name}", ""]
        for inner, words in _parsers(parser, f"areal {name}"):
            lines += [*_page(inner, words, said), ""]
    return "\n".join(lines).rstrip() + "\n"


def _parsers(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """A parser, or those of its actions, with the words that call it."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser, words
    for action in inner:
        for name, part in action.choices.items():
            yield from _parsers(part, f"{words} {name}")


def _page(parser: argparse.ArgumentParser, words: str, said: dict[tuple[str, str], str]) -> list[str]:
    """The usage of a command and the table of its arguments, but for rows that an earlier command has: `said` is row →
    that command."""
    actions = [a for a in parser._actions if a.dest != "help" and a.help is not argparse.SUPPRESS]
    actions.sort(key=lambda action: bool(action.option_strings))
    needed = " ".join(_usage(action) for action in actions if action.required or not action.option_strings)
    options = " [options]" if any(a.option_strings and not a.required for a in actions) else ""
    lines = ["```", f"{words} {needed}{options}", "```"]
    rows = [(_usage(a), f"{_cell(_help(parser, a))}{_option_default(a)}") for a in actions]
    rows = [(usage, what) for usage, what in rows if COMMON.get(usage) != what]
    new = [f"| `{usage}` | {what} |" for usage, what in rows if (usage, what) not in said]
    again: dict[str, list[str]] = {}
    for usage, what in rows:
        again.setdefault(said.setdefault((usage, what), words), []).append(f"`{usage.split()[0]}`")
    again.pop(words, None)
    lines += ["", "| argument | |", "|---|---|", *new] if new else []
    for earlier, names in again.items():
        lines += ["", f"As for `{earlier}`: {', '.join(names)}."]
    return lines


def _usage(action: argparse.Action) -> str:
    """An argument as it is written."""
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    if not action.option_strings:
        return {"*": f"[{value} …]", "+": f"{value} …", "?": f"[{value}]"}.get(action.nargs, value)
    return action.option_strings[-1] + ("" if action.nargs == 0 else f" {value}")


def _option_default(action: argparse.Action) -> str:
    said = "default" in (action.help or "") or action.required or action.nargs == 0 or not action.option_strings
    if said or action.default is None or action.default in (False, "", [], {}, float("inf")):
        return ""
    return f"; default: {_value(action.default)}"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


PAGES = {"docs/keys.md": keys, "docs/commands.md": commands}


def main() -> None:
    for path, made in PAGES.items():
        (ROOT / path).write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    main()

# PYTHON_ARGCOMPLETE_OK
"""The command `areal`: one name for the programs of this package, `areal train …` for launch/local.py.

    areal COMMAND …        becomes that program: with the signals, exit codes and import path of `python -m`
    areal COMMAND --help   lists its arguments
    areal completion bash  prints the shell code to complete commands, options and keys of the config (or zsh, fish)

Imports nothing of a program before its name is known. Exit code 2 for a command that there is not.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_megatron.process.called import call
from areal_megatron.process.shown import guard

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class Command:
    module: str
    summary: str


COMMANDS = {
    "train": Command("areal_megatron.launch.local", "start a run on this machine, or resume it"),
    "submit": Command("areal_megatron.launch.submit", "have Slurm start a run on nodes of a cluster"),
    "plan": Command("areal_megatron.planning.plan", "who would get which GPUs, and how much memory, on any cluster"),
    "simulate": Command("areal_megatron.planning.simulate", "how long a run would take, on GPUs that are not at hand"),
    "calibrate": Command(
        "areal_megatron.planning.calibrate", "how well a run's machines did, for simulate and plan --best"
    ),
    "fetch": Command(
        "areal_megatron.programs.fetch", "bring a run's models and data from the hub, where there is a network"
    ),
    "rows": Command("areal_megatron.programs.rows", "the first rows of a run's data, as the run sees them"),
    "status": Command("areal_megatron.programs.status", "how a run is, from anywhere that sees its folder"),
    "engines": Command("areal_megatron.launch.engines", "add engines to a run while it runs, or drain some"),
    "evaluate": Command("areal_megatron.launch.evaluate", "how good a model is: avg@n and pass@k"),
    "report": Command("areal_megatron.page.report", "a page about what a run has learned"),
    "trajectories": Command("areal_megatron.programs.trajectories", "what a run has trained, answer by answer"),
    "mirror": Command("areal_megatron.observe.mirror", "its metrics in W&B, MLflow, SwanLab or Trackio"),
    "audit": Command("areal_megatron.programs.audit", "check that a run lost nothing and trained nothing twice"),
    "tinker": Command("areal_megatron.api.tinker", "serve a run to programs that use the tinker package"),
    "convert": Command("areal_megatron.programs.convert", "checkpoints from and to Hugging Face format"),
}
SHELLS = ("bash", "zsh", "fish")


def main() -> int:
    guard()
    if "_ARGCOMPLETE" in os.environ:
        return _complete()
    name, *arguments = sys.argv[1:] or [""]
    if name in COMMANDS:
        call(f"areal {name}")
        os.execv(sys.executable, [sys.executable, "-m", COMMANDS[name].module, *arguments])
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(f"areal_megatron {version('areal_megatron')}")
        return 0
    if name == "completion":
        return _print_completion(arguments)
    print(f"error: {_no_such(name)}" if name else usage(), file=sys.stderr)
    return 2


def usage() -> str:
    width = max(map(len, [*COMMANDS, "completion"]))
    rows = {name: command.summary for name, command in COMMANDS.items()}
    rows["completion"] = f"let the shell complete: areal completion {'|'.join(SHELLS)}"
    lines = "\n".join(f"  {name:{width}}  {summary}" for name, summary in rows.items())
    return (
        f"usage: areal COMMAND …\n\n{lines}\n\n"
        "areal COMMAND --help says what a command takes; areal --version: the version of this package"
    )


def _no_such(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, 1)
    return f"{name!r} is no command" + (f", did you mean 'areal {near[0]}'?" if near else "; areal --help lists them")


def _print_completion(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        print(f"error: areal completion: expected one of {', '.join(SHELLS)}", file=sys.stderr)
        return 2
    try:
        from argcomplete import shellcode
    except ImportError:
        print("error: areal completion: needs argcomplete, 'pip install argcomplete'", file=sys.stderr)
        return 2
    print(shellcode(["areal"], shell=arguments[0]))
    return 0


def _complete() -> int:
    """Answers the shell, which has put the line so far into the environment."""
    import argparse

    import argcomplete

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    _, begun, _, words, _ = argcomplete.split_line(line)
    if len(words) > 1 and words[1] in COMMANDS:
        parser = parser_of(COMMANDS[words[1]].module)
        for action in parser._actions:
            if action.dest == "overrides":
                vars(action)["completer"] = _keys  # which argcomplete looks for
                line = f"{shlex.join(words[:2] + _options_first(parser, words[2:]))} {begun}"
        os.environ |= {"_ARGCOMPLETE": "2", "COMP_LINE": line, "COMP_POINT": str(len(line))}  # 2: without `areal`
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--version", action="store_true")
        commands = parser.add_subparsers()
        for name in COMMANDS:
            commands.add_parser(name)
        commands.add_parser("completion").add_argument("shell", choices=SHELLS)
    argcomplete.autocomplete(parser)
    return 0


def _options_first(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Returns the words as argcomplete understands them: it expects no `key=value` after an option."""
    options, others, takes_value = [], [], False
    for word in words:
        (options if takes_value or word.startswith("-") else others).append(word)
        action = parser._option_string_actions.get(word)
        takes_value = action is not None and action.nargs is None
    return [*others, *options] if takes_value else [*options, *others]


class _Parsing(BaseException):
    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def parser_of(module: str) -> argparse.ArgumentParser:
    """Returns the parser of a program of this package. The program gets as far as parsing its arguments."""
    import argparse
    from unittest.mock import patch

    def stop(parser, *_, **__):
        raise _Parsing(parser)

    with patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            importlib.import_module(module).main()
        except _Parsing as stopped:
            return stopped.parser
    raise LookupError(f"{module} parses no arguments")


def _keys(prefix: str, **others: object) -> list[str]:
    """Completes key=value: the keys of a section at a time, and the values of keys that have a choice."""
    from dataclasses import is_dataclass

    from areal_megatron.config import Config, config_fields

    known = {name: (field, value) for name, field, value in config_fields(Config())}
    key, equals, _ = prefix.partition("=")
    if equals and key in known:
        field = known[key][0]
        return [f"{key}={value}" for value in field.metadata.get("choices", ("true", "false") * (field.type == "bool"))]
    found = [name for name in known if name.startswith(prefix) and "." not in name[len(prefix) :]]
    if len(found) == 1 and is_dataclass(known[found[0]][1]):
        return _keys(f"{found[0]}.")
    return [f"{name}." if is_dataclass(known[name][1]) else f"{name}=" for name in found]


if __name__ == "__main__":
    sys.exit(main())

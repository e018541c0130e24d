"""What a config passes through to vLLM (`rollout.vllm`, `served.NAME.vllm`), as vLLM's own parser reads it.

    python -m areal_megatron.engine.vllm_options < CONFIG

checks it before anything starts: exit code 2, and one line, if vLLM refuses an option.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NoReturn

from areal_megatron.config import Config, ConfigError, config_file, passed_through
from areal_megatron.config.passed_through import SPECULATIVE, VLLM
from areal_megatron.engine import served as beside
from areal_megatron.engine import server
from areal_megatron.process.errors import printable
from areal_megatron.process.shown import guard
from areal_megatron.run.folder import RunFolder

_GROUPS = (*passed_through.VLLM_OWNED, *passed_through.VLLM_ON_CPU, *passed_through.VLLM_SHARED)


@dataclass(frozen=True)
class Engines:
    """Whose engines' options are read: their section, and what in it is not passed through."""

    section: str
    groups: tuple[passed_through.Owned, ...]

    @classmethod
    def of(cls, served: str) -> Engines:
        """`served`: the name of a served model; empty: the policy's engines."""
        if not served:
            return cls(VLLM, _GROUPS)
        return cls(f"served.{served}.vllm", (*passed_through.served_owned(served), *passed_through.VLLM_ON_CPU))


def parse(parser: argparse.ArgumentParser, command: Sequence[str], served: str = "") -> argparse.Namespace:
    """Returns what vLLM's parser reads from a command line of ours, which may end with `server.passed_through`.

    `parser` is the one that knows vLLM's options; `served` as for `Engines.of`. Raises ConfigError with the key for an
    option that it refuses, and for one that would change an option outside the config's control.
    """
    engines = Engines.of(served)
    command, given = list(command), {}
    if server.PASSED_THROUGH in command:
        given = json.loads(command.pop())
        command.pop()
    options = _parsed(parser, command, engines.section)
    for name, value in given.items():
        key = f"{engines.section}.{name}"
        command += _words(parser, name, value, key)
        before, options = _owned(options, engines.groups), _parsed(parser, command, key)
        for changed, now in _owned(options, engines.groups).items():
            if changed not in given and now != before.get(changed, now):
                why = passed_through.why_owned(changed.rpartition(".")[2], engines.groups)
                raise ConfigError(f"{key}: would set {changed}, which cannot be passed through: {why}")
    return options


def _owned(options: argparse.Namespace, groups: Sequence[passed_through.Owned]) -> dict[str, Any]:
    """Returns what is set under the names that are the project's own, as options and as fields of nested configs."""
    nested = {f"{name}.": value for name, value in vars(options).items() if is_dataclass(value)}
    return {
        f"{prefix}{name}": getattr(values, name)
        for prefix, values in {"": options, **nested}.items()
        for group in groups
        for name in group.names
        if hasattr(values, name)
    }


def _words(parser: argparse.ArgumentParser, name: str, value: Any, key: str) -> Iterator[str]:
    actions = {action.dest: action for action in parser._actions if action.option_strings and action.dest != "help"}
    if name not in actions:
        raise ConfigError(f"{key}: vLLM has no such option{_nearest(name, actions)}")
    action = actions[name]
    if value is None:  # vLLM's default
        return
    if (action.nargs == 0) != isinstance(value, bool):
        raise ConfigError(f"{key}: must {'' if action.nargs == 0 else 'not '}be true or false, is {_shown(value)}")
    if isinstance(value, list | dict) and action.type in (str, int, float) and action.nargs not in ("+", "*"):
        raise ConfigError(f"{key}: must be one value, is {_shown(value)}")
    if name == SPECULATIVE:
        _check_speculation(key, value)
    flag = max(action.option_strings, key=len) if action.nargs != 0 else _switch(action, value is True)
    if action.nargs == 0:
        yield from [flag] * bool(flag)
    elif isinstance(value, list) and action.nargs in ("+", "*"):
        if options := [word for word in map(str, value) if word.startswith("-")]:
            raise ConfigError(f"{key}: an element may not begin with -, is {_shown(options[0])}")
        yield from [flag, *map(str, value)]
    else:
        yield f"{flag}={json.dumps(value) if isinstance(value, list | dict) else value}"


def _switch(action: argparse.Action, on: bool) -> str:
    """Returns the flag that turns a switch on or off; "" if there is none."""
    flags = [flag for flag in action.option_strings if flag.startswith("--no-") != on and flag.startswith("--")]
    return flags[0] if flags else ""


def _check_speculation(key: str, value: Iterable[Any]) -> None:
    """vLLM's parser takes any dict here, and refuses it only once the model's config is there."""
    from dataclasses import fields

    from vllm.config import SpeculativeConfig

    known = {field.name for field in fields(SpeculativeConfig)}
    for name in value:
        if name not in known:
            raise ConfigError(f"{key}: vLLM has no field {name}{_nearest(name, known)}")


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f", did you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str], key: str) -> argparse.Namespace:
    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{key}: vLLM refuses it: {_one_line(re.sub('^argument [^:]*: ', '', message))}")

    parser.error = refuse
    try:
        return parser.parse_args(list(words))
    finally:
        del parser.error


def _one_line(message: str) -> str:
    """The message without what pydantic appends to it."""
    return printable(" ".join(message.split()).partition(" For further information visit")[0], 600)


def check_engine(options: argparse.Namespace, served: str = "") -> None:
    """Raises ConfigError if vLLM makes no engine of these options, as where they contradict each other. Takes up
    neither the device nor much time. `served` as for `Engines.of`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        AsyncEngineArgs.from_cli_args(options).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as e:
        section = Engines.of(served).section
        raise ConfigError(f"{section}: vLLM refuses it: {_one_line(str(e) or type(e).__name__)}") from None


def check(config: Config) -> None:
    """Raises ConfigError if vLLM refuses an option of the config, with which its engines would start here."""
    if config.rollout.vllm:
        _check(config, ["--model", config.model.path, *server.engine_arguments(config)], "")
    for name, model in config.served_models.items():
        if model.vllm:
            own = beside.served(config, name)
            _check(own, beside.arguments(own, name), name)


def _check(config: Config, command: Sequence[str], served: str) -> None:
    """Checks the options of one kind of engines; `command`: their command line without them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    parse(parser, server.passed_through(config), served)
    if not (current_platform.is_cpu() if config.machine.is_cpu else current_platform.is_cuda()):
        return  # of what the engines run on, vLLM can tell nothing here
    try:
        options = parser.parse_args(list(command))
        assert options is not None
        check_engine(options)
    except ConfigError:
        return  # not for what is passed through
    check_engine(parse(parser, [*command, *server.passed_through(config)], served), served)


def _check_as_engine(config: Config) -> None:
    """Checks the options in the environment of the engines, which is this process's from here on."""
    run = RunFolder(config.run_dir)
    os.environ.update(server.server_environment(config, run, sorted(os.sched_getaffinity(0))))
    check(config)


def main() -> int:
    guard()
    return config_file.check_stdin(_check_as_engine)


if __name__ == "__main__":
    sys.exit(main())

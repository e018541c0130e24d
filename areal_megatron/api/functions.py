"""Functions of a script or a notebook, for other processes: by import path, or by their source. Nothing is pickled."""

from __future__ import annotations

import builtins
import dis
import importlib.util
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.process.files import write_atomically

_CONSTANTS = (str, bytes, bool, int, float, type(None))


def import_path(function: Callable, folder: Path) -> tuple[str, Path | None]:
    """Returns the import path of a function, and the folder that has to be on the path of modules, if there is one.

    A function of a module that others can import stays where it is. Of another one the source is written into a module
    of `folder`, with the modules, constants and functions that it uses. Raises ConfigError, which names it, if it uses
    something else.
    """
    name, qualified = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not isinstance(function, types.FunctionType):
        raise ConfigError(f"{qualified or repr(function)} is no function: write one with `def`")
    root = _root_of(name)
    if root and "<" not in qualified:
        return f"{name}:{qualified}", None if _is_installed(root) else root
    parts: dict[str, str] = {}
    _collect(function, parts)
    module = f"{function.__name__}_of_{re.sub(r'[^a-zA-Z0-9]', '_', folder.name)}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{module}.py", "\n\n".join(parts.values()))
    return f"{module}:{function.__name__}", folder


def _root_of(name: str) -> Path | None:
    """Returns the folder from which a module is imported; None for one that no other process can import."""
    if name == "__main__" or name not in sys.modules or not (spec := importlib.util.find_spec(name)) or not spec.origin:
        return None
    return Path(spec.origin).parents[name.count(".") + spec.origin.endswith("__init__.py")].absolute()


def _is_installed(root: Path) -> bool:
    """Whether every Python of this environment finds the modules of a folder."""
    return any(root.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))


def _collect(function: types.FunctionType, lines: dict[str, str]) -> None:
    """Adds the source of a function, after that of what it uses, to `lines`: name → text."""
    name = function.__name__
    if name in lines:
        return
    lines[name] = ""
    if function.__code__.co_freevars:
        raise ConfigError(
            f"{name} uses {function.__code__.co_freevars[0]!r} of the function around it: give it a default"
        )
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ConfigError(f"{name} has no source to be found: put it into a module") from None
    if not source.startswith(("def ", "async def ", "class ")):
        raise ConfigError(f"{name} must be written with `def` and without decorators, or come from a module")
    for used in dict.fromkeys(_globals_of(function.__code__)):
        if used in function.__globals__:
            _add(name, used, function.__globals__[used], lines)
        elif not hasattr(builtins, used):
            raise ConfigError(f"{name} uses {used!r}, which is not defined")
    lines[name] = lines.pop(name) + source


def _add(name: str, used: str, value: Any, lines: dict[str, str]) -> None:
    if isinstance(value, types.ModuleType):
        lines.setdefault(used, f"import {value.__name__} as {used}")
    elif _is_constant(value):
        lines.setdefault(used, f"{used} = {value!r}")
    elif isinstance(value, re.Pattern):
        lines.setdefault("re", "import re")
        lines.setdefault(used, f"{used} = re.compile({value.pattern!r}, {value.flags})")
    elif isinstance(value, types.FunctionType | type) and _root_of(value.__module__) and "<" not in value.__qualname__:
        lines.setdefault(used, f"from {value.__module__} import {value.__qualname__} as {used}")
    elif isinstance(value, types.FunctionType):
        _collect(value, lines)
    else:
        raise ConfigError(
            f"{name} uses {used!r}, a {type(value).__name__}, which no other process has: make it in the function, or "
            "put both into a module"
        )


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(map(_is_constant, [*value, *value.values()]))
    return isinstance(value, _CONSTANTS)


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yields the global names that code reads, also those of functions within it."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)

"""Imports functions that a config names by their import path, `package.module:function`."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from areal_megatron.config import ConfigError
from areal_megatron.process.errors import first_line

_OURS = __name__.partition(".")[0]
_FEW = 5
"""Functions that a message names."""


def import_function(path: str, key: str) -> Callable:
    """Returns the function; its module may be in the current folder. Raises ConfigError that names the config's key."""
    module_name, _, function_name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as e:  # the module is the user's, and its import may raise anything
        places = ""
        if isinstance(e, ModuleNotFoundError) and f"{module_name}.".startswith(f"{e.name}."):
            places = (
                f", looked for in {Path.cwd()}, PYTHONPATH ({os.environ.get('PYTHONPATH') or 'empty'}) and packages"
            )
        raise ConfigError(f"{key}: cannot import {module_name}: {type(e).__name__}: {first_line(e)}{places}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {module_name} has no function {function_name}{_hint(module, function_name)}")
    return function


def _hint(module: ModuleType, name: str) -> str:
    """Returns which functions of a module may be meant by a name that it has not."""
    own = [one for one, found in vars(module).items() if inspect.isfunction(found) and one[0] != "_"]
    own = [one for one in own if getattr(module, one).__module__ == module.__name__]
    if near := difflib.get_close_matches(name, own, 1):
        return f", did you mean {near[0]}?"
    return f"; it has {', '.join(own)}" if 0 < len(own) <= _FEW else ""


def check_path(path: str, key: str) -> None:
    """Raises ConfigError for the path of a file in place of an import path; imports nothing."""
    module, _, function = path.partition(":")
    if "://" in path and module not in ("http", "https"):
        raise ConfigError(f"{key}: {path}: an address begins with http:// or https://, an import path has no //")
    if "://" not in path and (module.endswith(".py") or "/" in module):
        file = Path(module)
        where = "" if file.parent == Path() else f", with {file.parent} in PYTHONPATH"
        raise ConfigError(f"{key}: {path} names a file; name its module: {file.stem}:{function or 'FUNCTION'}{where}")


def code_of(path: str) -> dict[str, str]:
    """Returns file → digest of the code behind an import path: its module and the modules beside it that this imports,
    but ours. Nothing is run; what is not found, or installed, is not known."""
    names, found = [path.partition(":")[0]], {}
    places = [Path(place).absolute() for place in (*sys.path, "")]
    root = next((place for place in places if _file_of(names[0], place)), None)
    if root is None or root.name in ("site-packages", "dist-packages", Path(sysconfig.get_path("stdlib")).name):
        return {}
    while names:
        file = _file_of(names.pop(), root)
        place = file.relative_to(root) if file else Path(_OURS)
        if file and place.parts[0] != _OURS and place.as_posix() not in found:
            with suppress(OSError, ValueError, SyntaxError, RecursionError):
                content = file.read_bytes()
                found[place.as_posix()] = hashlib.blake2b(content, digest_size=8).hexdigest()
                names += _imported(ast.parse(content), list(place.with_suffix("").parts))
    return found


def _file_of(module: str, root: Path) -> Path | None:
    place = root.joinpath(*module.split("."))
    return next((file for file in (place / "__init__.py", place.parent / f"{place.name}.py") if file.is_file()), None)


def _imported(tree: ast.Module, place: list[str]) -> Iterator[str]:
    """Yields the modules that one at this place, with its packages, may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        if isinstance(node, ast.ImportFrom):
            module = ".".join([*(place[: -node.level] if node.level else []), *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{one.name}".lstrip(".") for one in node.names)


def place_of(error: BaseException, function: Callable) -> str:
    """Returns `file:line` of the user's code at fault: the last line in the file of `function` that an error passed, or
    where it was raised; `function` itself if it was raised by none of both, but by who looked at what it returned."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno}"
    return f"{code.co_filename}:{code.co_firstlineno}" if code else f"{frames[-1].filename}:{frames[-1].lineno}"

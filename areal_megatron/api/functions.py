"""Functions of a script or a notebook, for other processes: by import path, or by their source. Nothing is pickled."""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import hashlib
import importlib.util
import inspect
import linecache
import marshal
import math
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.process.errors import printable
from areal_megatron.process.files import write_atomically

_PLAIN = (str, bytes, bool, int, type(None))
_CONTAINERS = {tuple: ("(", ",)"), list: ("[", "]"), set: ("set([", "])"), frozenset: ("frozenset([", "])")}
_IMPORT_S = 120


def import_path(function: Any, folder: Path) -> tuple[str, Path | None]:
    """Returns the import path of a function, and the folder that has to be on the path of modules, if there is one.

    A function of a module that others can import stays where it is. Of another one the source is written into a module
    of `folder`, with the modules, constants and functions that it uses. Raises ConfigError, which names it, if it uses
    something else, or if that module cannot be imported.
    """
    name, qualified = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not isinstance(function, types.FunctionType):
        raise ConfigError(f"{qualified or repr(function)} is no function: write one with `def`")
    if root := _root_of(name):
        if _found(name, qualified) is not function or "." in qualified:
            raise ConfigError(f"{name}.{qualified} is no function of its module's top level: name it there")
        return f"{name}:{qualified}", None if _is_installed(root) else root
    parts = _Parts()
    parts.add(function)
    text = "\n\n".join(["from __future__ import annotations", *_paths(parts.roots), *parts.lines])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    module = f"{re.sub('[^a-zA-Z0-9_]', '_', function.__name__)}_{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{module}.py", f"{text}\n")
    _try(module, function.__name__, folder)
    return f"{module}:{function.__name__}", folder


def _try(module: str, name: str, folder: Path) -> None:
    """Imports a module as another process will. Raises ConfigError."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}; {module}.{name}"],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{name} is not imported in another process within {_IMPORT_S:g} s: import slow modules inside it"
        ) from None
    if done.returncode:
        last = printable((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        raise ConfigError(f"{name} does not work in another process ({last}): put it into a module")


def _root_of(name: str) -> Path | None:
    """Returns the folder from which a module is imported; None for one that no other process can import."""
    if name == "__main__" or name not in sys.modules:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that somebody has made up
        spec = None
    if not spec or not spec.origin:
        return None
    if not spec.has_location:  # built in or frozen
        return Path(sys.prefix)
    return Path(spec.origin).parents[name.count(".") + spec.origin.endswith("__init__.py")].absolute()


def _is_installed(root: Path) -> bool:
    """Whether every Python of this environment finds the modules of a folder."""
    return any(root.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))


def _found(module: str, name: str) -> Any:
    """Returns what a module calls so, None if nothing."""
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _paths(roots: list[Path]) -> list[str]:
    """Returns a line by which modules in these folders are found too, after all others: for a script that is started
    from elsewhere."""
    folders = [str(root) for root in dict.fromkeys(roots)]
    return [f"__import__('sys').path.extend({folders!r})"] if folders else []


class _Parts:
    """The lines of a module: a function after what it uses."""

    def __init__(self):
        self.lines: list[str] = []
        self.roots: list[Path] = []
        """Folders of modules that are used and not installed."""
        self._there: dict[str, Any] = {}
        """Name → what it stands for in the module."""

    def add(self, function: types.FunctionType) -> None:
        """Raises ConfigError, which names the function, for what it uses and no other process has."""
        name = function.__name__
        if not self._is_new(name, function):
            return
        if free := function.__code__.co_freevars:
            raise ConfigError(
                f"{name} uses {free[0]!r} of the function around it: give it a default, {free[0]}={free[0]}"
            )
        if own := [*vars(function)]:
            raise ConfigError(
                f"{name} has the attribute {own[0]!r}, which does not travel: make it a constant beside the function, "
                "or put both into a module"
            )
        tree = _tree_of(function)
        used = [*_globals_of(function.__code__), *_with_defaults(tree, function)]
        for each in dict.fromkeys(used):
            if each in function.__globals__:
                self._add_value(name, each, function.__globals__[each], tree)
            elif not hasattr(builtins, each):
                raise ConfigError(f"{name} uses {each!r}, which is not defined")
        self.lines.append(ast.unparse(tree))

    def _add_value(self, name: str, used: str, value: Any, tree: ast.AST) -> None:
        if isinstance(value, types.FunctionType) and not _root_of(value.__module__):
            self.add(value)
            line = "" if used == value.__name__ else f"{used} = {value.__name__}"
        elif isinstance(value, types.ModuleType):
            self._reach(value.__name__)
            line = "\n".join([f"import {value.__name__} as {used}", *_submodules(value.__name__, used, tree)])
        else:
            line = _literal(value)
            if line:
                line = f"{used} = {line}"
            elif place := _place(used, value):
                self._reach(place[0])
                line = f"from {place[0]} import {place[1]} as {used}"
            else:
                raise ConfigError(
                    f"{name} uses {used!r}, a {type(value).__name__}, which no other process has: make it in the "
                    "function, or put both into a module"
                )
        if line and self._is_new(used, value):
            self.lines.append(line)

    def _reach(self, module: str) -> None:
        root = _root_of(module)
        if root and not _is_installed(root):
            self.roots.append(root)

    def _is_new(self, name: str, value: Any) -> bool:
        """Whether nothing has this name in the module yet. Raises ConfigError if something else has."""
        if name in self._there and self._there[name] is not value:
            raise ConfigError(f"two things that travel together are called {name!r}: give them different names")
        is_new = name not in self._there
        self._there[name] = value
        return is_new


def _tree_of(function: types.FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Returns the source of a function. Raises ConfigError if there is none, it has a decorator, or its file has been
    changed since it was loaded."""
    name, code = function.__name__, function.__code__
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if text and not _is_as_written(code, text):
        raise ConfigError(f"{name} is no longer what its file says: start the program again, or put it into a module")
    try:
        source = inspect.getsource(code)
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError):
        raise ConfigError(f"{name} has no source to be found: put it into a module") from None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)][:1]
    if not found or found[0].name != name or found[0].decorator_list:
        raise ConfigError(f"{name} must be written with `def` and without decorators, or come from a module")
    return found[0]


def _is_as_written(code: types.CodeType, text: str) -> bool:
    """Whether a source gives this code, as a file or statement by statement, as in notebooks."""
    future = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
    flags = code.co_flags & future | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        whole = ast.parse(text)
    except (SyntaxError, ValueError):  # of what is being edited
        return False
    for part in (whole, *(ast.Module([statement], []) for statement in whole.body)):
        with suppress(SyntaxError):  # as of an import from __future__ that a notebook has further down
            made = compile(part, code.co_filename, "exec", flags, dont_inherit=True)
            if marshal.dumps(code, 2) in (marshal.dumps(each, 2) for each in _codes(made)):
                return True
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code, and the code of functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _with_defaults(tree: ast.FunctionDef | ast.AsyncFunctionDef, function: types.FunctionType) -> Iterator[str]:
    """Writes constants for defaults that are some; yields the names that the other ones use."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    given = [*tree.args.defaults, *filter(None, tree.args.kw_defaults)]
    written = iter([_written(value, node) for value, node in zip(values, given, strict=True)])
    tree.args.defaults = [next(written) for _ in tree.args.defaults]
    tree.args.kw_defaults = [node and next(written) for node in tree.args.kw_defaults]
    for node in filter(None, [*tree.args.defaults, *tree.args.kw_defaults]):
        yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _written(value: Any, node: ast.expr) -> ast.expr:
    text = _literal(value)
    return ast.parse(text, mode="eval").body if text else node


def _place(used: str, value: Any) -> tuple[str, str] | None:
    """Returns the module from which others can import a value, and its name there; None if there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", used)
    if not isinstance(module, str) or _found(module, name) is not value:
        places = [(key, each) for key in sorted(sys.modules, key=len) for each in {used, name} if _is(key, each, value)]
        module, name = next(iter(places), ("__main__", name))
    return (module, name) if _root_of(module) else None


def _is(module: str, name: str, value: Any) -> bool:
    found = _found(module, name)
    is_method = isinstance(value, types.MethodType | types.BuiltinMethodType)  # made anew by every look
    return module != "__main__" and (found is value or (is_method and type(found) is type(value) and found == value))


def _literal(value: Any, depth: int = 0) -> str:
    """Returns an expression for a constant; "" if it is none."""
    kind = type(value)
    if depth > 50:
        return ""
    if kind in _PLAIN or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is float:
        return f"float('{value}')"
    if kind is re.Pattern:
        return f"__import__('re').compile({value.pattern!r}, {value.flags})"
    if kind is dict:
        inner = [(_literal(key, depth + 1), _literal(each, depth + 1)) for key, each in value.items()]
        return "{" + ", ".join(map(": ".join, inner)) + "}" if all(map(all, inner)) else ""
    if kind not in _CONTAINERS:
        return ""
    begin, end = _CONTAINERS[kind]
    inner = [_literal(each, depth + 1) for each in value]
    return begin + ", ".join(inner) + (end if inner else end.lstrip(",")) if all(inner) else ""


def _submodules(module: str, used: str, tree: ast.AST) -> list[str]:
    """Returns lines that import the submodules that a function reaches through a module."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names, node = [node.attr, *names], node.value
        if isinstance(node, ast.Name) and node.id == used:
            dotted = [".".join([module, *names[:count]]) for count in range(1, len(names) + 1)]
            found += [f"import {name}" for name in dotted if name in sys.modules and _root_of(name)]
    return list(dict.fromkeys(found))


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yields the global names that code reads, also in functions and classes within it."""
    for each in _codes(code):
        own = {"__name__", "__annotations__"}  # what the body of a class has set by then, or has from its module
        for step in dis.get_instructions(each):
            if step.opname == "STORE_NAME":
                own.add(step.argval)
            elif step.opname == "LOAD_GLOBAL" or (step.opname == "LOAD_NAME" and step.argval not in own):
                yield step.argval

"""Imports functions that a config names by their import path, `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from areal_megatron.config import ConfigError


def import_function(path: str, key: str) -> Callable:
    """Returns the function; its module may be in the current folder. Raises ConfigError that names the config's key."""
    module_name, _, function_name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # the module is the user's, and its import may raise anything
        raise ConfigError(f"{key}: cannot import {module_name}: {type(e).__name__}: {e}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {module_name} has no function {function_name}")
    return function

"""What is replaced in libraries: by one function, which asserts that there is something to replace."""

import ast
import re
import types

import pytest

from areal_megatron.process.patching import patch
from tests.unit.test_rooms import LIBRARIES, MODULES, ROOT, every_import, trees

PLACES = {"areal_megatron.trainer.patches": {"megatron-core", "torch"}, "areal_megatron.engine.plugin": {"vllm"}}
"""The files that replace names, and the libraries whose names these are."""


def test_a_name_is_bound_and_what_it_was_is_returned():
    library = types.ModuleType("library")
    library.name = 1
    assert patch(library, "name", 2) == 1 and library.name == 2


def test_a_name_that_a_library_lacks_is_one_line():
    with pytest.raises(RuntimeError, match=r"^torch\.nn\.modules\.module\.Module has no forwards, which is to be repl"):
        import torch

        patch(torch.nn.Module, "forwards", None)
    with pytest.raises(RuntimeError, match=r"^json has no load_all, which is to be replaced: install the versions"):
        import json

        patch(json, "load_all", None)


def test_each_side_has_one_file_that_replaces_names():
    assert {module for module, names in every_import().items() if patch.__module__ in names} == PLACES.keys()


@pytest.mark.parametrize("place", PLACES)
def test_what_is_replaced_is_of_the_versions_of_the_lock(place):
    said = " ".join(ast.get_docstring(ast.parse(MODULES[place].read_text())).split())
    lock = (ROOT / "requirements-gpu.lock").read_text()
    for library in PLACES[place]:
        (version,) = re.findall(rf"^{library}==([\w.]+)", lock, re.M)
        assert re.search(rf"\b{library} {re.escape(version)}(?![.\d]*\d)", said, re.I), f"{library} {version}"


def test_nothing_else_replaces_names_of_libraries():
    found = []
    for module, tree in trees().items():
        names = {name for node in ast.walk(tree) for name in bound_to_a_library(node)}
        for node in ast.walk(tree):
            for target in getattr(node, "targets", ()) if isinstance(node, ast.Assign) else ():
                for place in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(place, ast.Attribute) and root(place) in names:
                        found.append(f"{module}:{node.lineno}: {ast.unparse(place)}")
    assert found == []


def bound_to_a_library(node):
    """Names that an import of a library binds, or an assignment of one of its modules."""
    if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in LIBRARIES:
        yield from (name.asname or name.name for name in node.names)
    elif isinstance(node, ast.Import):
        yield from (n.asname or n.name.partition(".")[0] for n in node.names if n.name.partition(".")[0] in LIBRARIES)
    elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("sys.modules["):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def root(place):
    while isinstance(place, ast.Attribute):
        place = place.value
    return getattr(place, "id", None)

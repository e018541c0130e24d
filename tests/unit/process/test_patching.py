"""What is replaced in libraries: by one function, which asserts that there is something to replace."""

import ast
import types

import pytest

from areal_megatron.process.patching import patch
from tests.unit.test_rooms import LIBRARIES, TREES

ADDED = {"te_general_gemm", "fused_weight_gradient_mlp_cuda"}
"""Names that megatron-core has only with TransformerEngine or apex."""


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


def test_nothing_else_replaces_names_of_libraries():
    found = []
    for module, tree in TREES.items():
        names = {name for node in ast.walk(tree) for name in bound_to_a_library(node)}
        for node in ast.walk(tree):
            for target in getattr(node, "targets", ()) if isinstance(node, ast.Assign) else ():
                for place in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(place, ast.Attribute) and root(place) in names and place.attr not in ADDED:
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

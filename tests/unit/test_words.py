"""Names and docstrings: one class a name, docstrings that begin with their noun or verb, a layout that nobody
forces."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for top in ("areal_megatron", "launch", "tools", "tests") for path in (ROOT / top).rglob("*.py"))
INSTALLED = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("areal_megatron", "launch")]


def test_no_two_public_classes_share_a_name():
    places = defaultdict(list)
    for path in INSTALLED:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_docstring_begins_with_of():
    """Such a one has no noun: "Of the ranks of a link" says neither what nor how many."""
    found = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r'\s*r?"""Of\b', line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert found == []


def test_the_formatter_lays_out_the_code():
    """But for tables of data."""
    marker = "# fmt: " + "skip"
    assert sum(path.read_text().count(marker) for path in INSTALLED) <= 15

"""Names and sentences: one class a name, docstrings that begin with their noun or verb, sentences for one reading, a
layout that nobody forces."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for top in ("areal_megatron", "launch", "tools", "tests") for path in (ROOT / top).rglob("*.py"))
INSTALLED = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("areal_megatron", "launch")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`*])|\n\s*\n|\n\s*[-*|]")
RELATIVE = re.compile(r"\b(that|which|those|what|whose|whom|so many|as many)\b", re.IGNORECASE)


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


def prose(path: Path) -> list[str]:
    """The docstrings of a Python file, those of fields included; a page without its code blocks."""
    text = path.read_text()
    if path.suffix == ".md":
        return [re.sub(r"```.*?```", "", text, flags=re.DOTALL)]
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    return [each.value for each in constants if isinstance(each, ast.Constant) and isinstance(each.value, str)]


@pytest.mark.parametrize(("paths", "most"), [(INSTALLED, 5), (PAGES, 3)], ids=["docstrings", "docs"])
def test_one_reading_is_enough(paths, most):
    """A sentence with three relative words or more is two sentences, or has a noun instead of one of them."""
    sentences = ((path, each) for path in paths for text in prose(path) for each in SENTENCE_END.split(text))
    found = [f"{path.relative_to(ROOT)}: {each}" for path, each in sentences if len(RELATIVE.findall(each)) >= 3]
    assert len(found) <= most, "\n".join(found)


def test_the_formatter_lays_out_the_code():
    """But for tables of data."""
    marker = "# fmt: " + "skip"
    assert sum(path.read_text().count(marker) for path in INSTALLED) <= 15

"""docs/metrics.md and docs/supervised.md are the table of metrics: whatever looks one up finds its name there, and each
name there is written by something. That nothing else is written, whole runs show (tests/e2e/test_run.py)."""

import ast
import re
from pathlib import Path

import pytest

from areal_megatron.config import Config
from areal_megatron.observe import figures
from areal_megatron.observe.advice import NEEDED
from areal_megatron.observe.figures import sections
from tests.conftest import ROOT

READERS = [ROOT / name for name in ("areal_megatron/observe/console.py", "areal_megatron/observe/advice.py")]
READERS += [ROOT / "areal_megatron" / name for name in ("programs/status.py", "page/watched.py")]
LOOK_UP = {"get", "values", "recent", "itemgetter", "_trend"}
"""Functions of the readers that are given the name of a metric."""
OTHERS = {"kind", "time", "version", "version_mean", "version_max", "files", "items", "n"}
OTHERS |= {
    "accuracy_low",
    "accuracy_high",
    "failed",
    "error",
    "warning",
    "value",
    "low",
    "high",
    "curves",
    "unit",
    "bound",
}
"""What else these look up: of lines as such, of evaluations and checkpoints, and of figures."""


def on_the_pages():
    """The names in the first cells of the pages' tables; `name/part` as `name`."""
    text = "".join((ROOT / "docs" / page).read_text() for page in ("metrics.md", "supervised.md"))
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.M)
    return {name.partition("/")[0] for cell in cells for name in re.findall(r"`([\w/…]+)`", cell)}


def looked_up(file):
    """The names in the code of a reader."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Subscript):
            texts = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LOOK_UP:
            texts = node.args
        else:
            continue
        found = [text.value for text in texts if isinstance(text, ast.Constant)]
        yield from (text for text in found if isinstance(text, str) and text.isidentifier())


def written():
    """Patterns of the texts and keywords in the code of all others; what is computed in a text is anything."""
    for file in {*(ROOT / "areal_megatron").rglob("*.py")} - {*READERS, Path(figures.__file__)}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.escape(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                yield node.arg
            elif isinstance(node, ast.JoinedStr):
                fixed = [part.value if isinstance(part, ast.Constant) else "" for part in node.values]
                if re.match(r"\w+[_/]", fixed[0]):
                    yield "".join(re.escape(text) or r"\w+" for text in fixed)


@pytest.mark.parametrize("mode", ["rl", "sft", "dpo", "reward_model"])
def test_what_is_drawn_is_on_the_pages(mode):
    config = Config(name="run", mode=mode)
    config.ppo.critic.lr = 1e-5
    drawn = {curve.key.partition("/")[0] for s in sections(config, ()) for f in s.figures for curve in f.curves}
    assert len(drawn) > 3 and drawn <= on_the_pages()


@pytest.mark.parametrize("file", READERS, ids=lambda file: file.name)
def test_what_is_looked_up_is_on_the_pages(file):
    found = {*looked_up(file)}
    assert found & on_the_pages() and found - OTHERS <= on_the_pages()


def test_what_is_needed_for_advice_is_on_the_pages():
    assert {*NEEDED} <= on_the_pages()


def test_what_is_on_the_pages_is_written():
    patterns = [re.compile(pattern.partition("/")[0]) for pattern in {*written()}]
    missing = [name for name in sorted(on_the_pages()) if not any(p.fullmatch(name) for p in patterns)]
    assert missing == []

"""Functions of scripts and notebooks, as other processes get them."""

import importlib.util
import json
import linecache
import math
import os
import re
import subprocess
import sys
import types

import pytest

from areal_megatron.api.functions import import_path
from areal_megatron.config import ConfigError
from tests.conftest import ROOT
from tests.support.rewards import short

CELL = """
import math as m
import json
from collections import Counter
from tests.support.rewards import coarse

WEIGHTS = {"a": 1.5, "b": (2, None)}
NUMBER = re.compile(r"\\d+", re.I)

def digits(text):
    return [int(one) for one in NUMBER.findall(text)]

def score(prompt, response, answer):
    def root(x):
        return m.sqrt(x)
    counted = Counter(response)
    most = max(counted.values(), default=0)
    return root(sum(digits(response))) + WEIGHTS["a"] + coarse(prompt, response, answer) + most
"""


def cell(text, **given):
    """What a notebook has after a cell was run: functions of `__main__`, whose source linecache knows."""
    namespace = {"__name__": "__main__", "re": re, **given}
    name = f"<cell-{abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), namespace)
    return namespace


def elsewhere(path, folder):
    """The function that another process finds by an import path."""
    module, _, name = path.partition(":")
    spec = importlib.util.spec_from_file_location(module, folder / f"{module}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return getattr(made, name)


def test_a_function_of_a_notebook_travels_with_what_it_uses(tmp_path):
    here = cell(CELL)["score"]
    path, folder = import_path(here, tmp_path / "my run-functions")
    assert re.fullmatch(r"score_[0-9a-f]{8}:score", path) and folder == tmp_path / "my run-functions"
    there = elsewhere(path, folder)
    for response in ("9 and 16", "", "ab1"):
        assert there("", response, "") == here("", response, "")
    assert there("", "9 16", "") == math.sqrt(25) + 1.5 + 1.0 + 1


def test_functions_of_one_name_do_not_meet(tmp_path):
    """One that is written again, and others for other keys."""
    paths = [import_path(cell(f"def score():\n    return {value}\n")["score"], tmp_path)[0] for value in (1, 2, 1)]
    assert [elsewhere(path, tmp_path)() for path in paths] == [1, 2, 1] and paths[0] == paths[2]


USES = """
import logging.handlers
import math as m
import xml.etree.ElementTree
from collections import Counter, OrderedDict
from importlib.util import find_spec
from math import inf, sqrt
from random import randint
from re import IGNORECASE

Local = object()
K = [inf, (-inf, {"a": {1, 2}}), frozenset(), (1,), (), {}, set()]
STRICT = re.compile("a+", IGNORECASE)

def plus(a, b=2):
    return a + b

more = plus
"""


@pytest.mark.parametrize(
    ("expression", "arguments"),
    [
        ("repr([K, k, x])", "x=sqrt(4), *, k=K"),
        ("more(1) + plus(1, 1)", ""),
        ("[STRICT.findall('bAa'), IGNORECASE]", ""),
        ("xml.etree.ElementTree.fromstring('<a/>').tag + logging.handlers.__name__", ""),
        ("[sqrt(16), m.floor(2.5), randint(3, 3), find_spec('nothing'), Counter('aab')['a'], OrderedDict(a=1)]", ""),
        ("[f'{sqrt(y)}' for y in (4, 9)] + [(lambda z, w=inf: z < w)(3)]", "a: Local = 3"),
    ],
)
def test_what_functions_use_travels(tmp_path, expression, arguments):
    score = cell(f"{USES}\ndef score({arguments}):\n    return {expression}\n")["score"]
    assert elsewhere(*import_path(score, tmp_path))() == score()


AROUND = """
def make(y):
    def score(k=y):
        if k:
            return '''
y is ''' + str(k)
    def closed():
        return y
    return score, closed
"""


def test_a_default_takes_what_is_around_a_function(tmp_path):
    score, closed = cell(AROUND)["make"](7)
    assert elsewhere(*import_path(score, tmp_path))() == "\ny is 7"
    with pytest.raises(ConfigError, match="closed uses 'y' of the function around it: give it a default, y=y"):
        import_path(closed, tmp_path)
    with pytest.raises(ConfigError, match=r"is no function of its module's top level"):
        import_path(around(), tmp_path)


CLASS = """
base: int = 2
limit = object()

def score():
    class Box:
        base = base
        limit = 3
        double: int = base * limit

        @property
        def value(self):
            return self.double + 1

        @value.setter
        def value(self, given):
            self.double = given
    box = Box()
    box.value = box.value * 5
    return box.base, box.double, box.value
"""


def test_a_class_in_a_function_travels_with_what_its_body_does_not_set(tmp_path):
    path, folder = import_path(cell(CLASS)["score"], tmp_path)
    score = elsewhere(path, folder)
    assert score() == (2, 35, 36) and score.__globals__["base"] == 2
    assert "limit" not in score.__globals__ and score.__globals__["__name__"] == path.split(":")[0]


def test_functions_that_call_each_other_travel(tmp_path):
    text = "def even(n):\n    return n == 0 or odd(n - 1)\n\ndef odd(n):\n    return n > 0 and even(n - 1)\n"
    path, folder = import_path(cell(text)["even"], tmp_path)
    assert [elsewhere(path, folder)(n) for n in range(4)] == [True, False, True, False]


def test_a_function_of_a_module_stays_where_it_is(tmp_path, monkeypatch):
    path, root = import_path(short, tmp_path / "unused")
    assert path == "tests.support.rewards:short" and (root / "tests/support/rewards.py").exists()
    assert import_path(json.dumps, tmp_path / "unused") == ("json:dumps", None)
    (tmp_path / "mine.py").write_text("def score():\n    return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine

    assert import_path(mine.score, tmp_path / "unused") == ("mine:score", tmp_path)
    assert not (tmp_path / "unused").exists()
    del sys.modules["mine"]


def around():
    outer = 5

    def score():
        return outer

    return score


@pytest.mark.parametrize(
    ("text", "given", "problem"),
    [
        (
            "def score():\n    return model.x\n",
            {"model": types.SimpleNamespace(x=1)},
            "score uses 'model', a SimpleName",
        ),
        ("def score():\n    return missing\n", {}, "score uses 'missing', which is not defined"),
        ("class A: pass\ndef score():\n    return A()\n", {}, "score uses 'A', a type, which no other process has"),
        ("def one():\n    return file\ndef score():\n    return one()\n", {"file": sys.stdout}, "one uses 'file', a "),
        ("score = lambda: 1\n", {}, "must be written with `def`"),
        ("import functools\n@functools.cache\ndef score():\n    return 1\n", {}, "score is no function"),
        (
            "import enum\nclass A(enum.Enum):\n    B = 1\ndef score(a=A.B):\n    return a\n",
            {},
            "score uses 'A', a EnumType",
        ),
        ("L = []\nL.append(L)\ndef score():\n    return L\n", {}, "score uses 'L', a list"),
        ("def one():\n    return 1\nfirst = one\ndef one():\n    return first()\nscore = one\n", {}, "two things that"),
        (
            "def same(f):\n    return f\n@same\ndef score():\n    return 1\n",
            {},
            "must be written with `def` and without",
        ),
        ("score = 5\n", {}, "5 is no function"),
        ("def score():\n    return 1\nscore.limit = 3\n", {}, "score has the attribute 'limit', which does not travel"),
    ],
)
def test_what_cannot_travel_is_refused_in_a_line(tmp_path, text, given, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        import_path(cell(text, **given)["score"], tmp_path)
    assert "\n" not in str(error.value) and not [*tmp_path.iterdir()]


def test_a_function_whose_import_takes_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_megatron.api.functions._IMPORT_S", 0.001)
    with pytest.raises(ConfigError, match=r"^score is not imported in another process within 0\.001 s: "):
        import_path(cell("def score():\n    return 1\n")["score"], tmp_path)


def test_a_function_that_has_lost_its_source_is_refused(tmp_path):
    namespace = {"__name__": "__main__"}
    exec("def score():\n    return 1\n", namespace)
    with pytest.raises(ConfigError, match="score has no source to be found: put it into a module"):
        import_path(namespace["score"], tmp_path)


SCRIPT = """
import math as m

def score(text="a"):
    def root(x):
        return m.sqrt(x) if text in ("a", "b") else [m.floor(each) for each in (x, -0.0)]
    return root(4)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\nimport", "\n\nimport"),
        ("sqrt(x)", "cos(x)"),
        ("-0.0", "0.0"),
        ("root(4)", "(4"),
        ("def score", "def other"),
    ],
)
def test_a_function_whose_file_was_changed_is_refused(tmp_path, old, new):
    file, namespace = tmp_path / "script.py", {"__name__": "__main__"}
    file.write_text(SCRIPT)
    exec(compile(SCRIPT, str(file), "exec"), namespace)
    score = namespace["score"]
    assert {score() for _ in range(100)} == {2.0}  # Python has its code rewritten by then
    assert elsewhere(*import_path(score, tmp_path / "unchanged"))() == 2.0
    file.write_text(SCRIPT.replace(old, new) + "\n")
    with pytest.raises(ConfigError, match="score is no longer what its file says"):
        import_path(score, tmp_path / "changed")


def test_what_is_beside_a_script_is_found_wherever_it_is_started(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "beside.py").write_text("SET, TOLD = {1}, object()\n")
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\nimport beside\nfrom beside import TOLD\n"
        "from areal_megatron.api.functions import import_path\n"
        "def score():\n    return beside.SET, TOLD\n"
        "print(import_path(score, Path('functions').absolute())[0])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for folder in (tmp_path, tmp_path / "there"):
        command = [sys.executable, str(tmp_path / "script.py")]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert elsewhere(done.stdout.strip(), folder / "functions")()[0] == {1}

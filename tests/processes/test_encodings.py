"""Files, pipes and terminals: all text is UTF-8, whatever the locale, and nothing that a terminal lacks is an error."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_megatron.run.folder import RunFolder

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("areal_megatron", "launch", "tools") for path in (ROOT / room).rglob("*.py"))
BYTES = {"os", "tarfile", "zipfile", "gzip", "webbrowser", "safetensors"}
"""Modules whose `open` knows no text, or none by default."""


def in_the_locales_encoding(source: str) -> list[int]:
    """The lines of calls that read or write text without naming an encoding."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        function, named = call.func, {word.arg: word.value for word in call.keywords}
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        of = getattr(getattr(function, "value", None), "id", "")
        text = name in ("read_text", "write_text")
        if name in ("open", "fdopen") and (of not in BYTES or name == "fdopen"):
            place = 0 if name == "open" and isinstance(function, ast.Attribute) and of != "io" else 1
            mode = named.get("mode", call.args[place] if len(call.args) > place else None)
            text = mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value))
        if name in ("NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"):
            mode = named.get("mode", call.args[0] if call.args else None)
            text = isinstance(mode, ast.Constant) and "b" not in mode.value
        if name in ("run", "Popen", "check_output"):
            text = any(isinstance(named.get(key), ast.Constant) for key in ("text", "universal_newlines"))
        if text and "encoding" not in named:
            found.append(call.lineno)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "open('x')",
        "open('x', 'w')",
        "open('x', mode='a')",
        "path.open()",
        "path.open('w')",
        "path.read_text()",
        "path.write_text('x')",
        "os.fdopen(1)",
        "subprocess.run(c, text=True)",
        "Popen(c, universal_newlines=True)",
        "NamedTemporaryFile('w')",
    ],
)
def test_a_call_without_an_encoding_is_found(line):
    assert in_the_locales_encoding(line) == [1]


@pytest.mark.parametrize(
    "line", ["open('x', 'rb')", "path.open('ab')", "os.open('x', 0)", "open('x', encoding='utf-8')"]
)
def test_a_call_of_bytes_is_not(line):
    assert in_the_locales_encoding(line) == []


def test_no_text_is_read_or_written_in_the_encoding_of_the_locale():
    found = {str(path): in_the_locales_encoding(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


CONFIG = """# größe: Überschrift
name: größe
mode: sft
updates: 4
batch_size: 4
model: {path: model, dtype: float32}
data: {train: daten-ß.jsonl, max_prompt_tokens: 16}
rollout: {max_new_tokens: 16}
machine: {device: cpu, slots: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("umlaute")
    (folder / "ß.yaml").write_text(CONFIG, encoding="utf-8")
    RunFolder(folder / "run").create()
    (folder / "run" / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=["C", "ISO-8859-1"])
def locale(request, tmp_path_factory):
    """The environment of a locale that is not UTF-8."""
    if request.param == "C":
        return os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    place = tmp_path_factory.mktemp("locale")
    made = shutil.which("localedef") and subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", place / "en_US.ISO-8859-1"], capture_output=True
    )
    if not made or not (place / "en_US.ISO-8859-1").exists():
        pytest.skip("localedef makes no locale in ISO-8859-1 here")
    return os.environ | {"LOCPATH": str(place), "LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}


def said(locale, folder, *command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=locale, capture_output=True, timeout=500)
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")[-2000:]
    return done.returncode, done.stdout, done.stderr


def test_the_locale_is_not_utf_8(locale):
    """Else the other tests would show nothing."""
    code = "import locale; print(locale.getpreferredencoding(False))"
    done = subprocess.run([sys.executable, "-c", code], env=locale, capture_output=True, text=True, encoding="utf-8")
    assert done.stdout.strip() in ("ANSI_X3.4-1968", "ISO-8859-1")


def test_help_shows_what_the_terminal_can(locale, folder):
    code, out, _ = said(locale, folder, "areal_megatron.command", "--help")
    assert code == 0 and b"usage: areal COMMAND \\u2026" in out


READ = [
    ("C", "train"),
    ("C", "status"),
    ("C", "audit"),
    ("ISO-8859-1", "status"),
    pytest.param("ISO-8859-1", "train", marks=pytest.mark.soak),  # the same two ways to be called, of another command
    pytest.param("ISO-8859-1", "audit", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("locale", "command"), READ, indirect=["locale"])
def test_a_config_is_utf_8_in_any_locale(locale, folder, command):
    """Called by `areal`, and as a module: of both the text is what was written."""
    modules = {
        "train": "areal_megatron.launch.local",
        "status": "areal_megatron.programs.status",
        "audit": "areal_megatron.programs.audit",
    }
    place = ["ß.yaml", "--dry-run"] if command == "train" else ["run"]
    for called in (["areal_megatron.command", command], [modules[command]]):
        code, _, err = said(locale, folder, *called, *place)
        assert code == (0 if command == "audit" else 2) and err.count(b"\n") == (command != "audit"), err
        assert b"YAML" not in err

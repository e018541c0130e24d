"""What texts from outside can do to a terminal: nothing, whichever command shows them, and in whatever they are."""

import ast
import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import regex
from rich.text import Text

from areal_megatron.api import tinker
from areal_megatron.command import COMMANDS
from areal_megatron.config import Config, DataConfig, ModelConfig, config_file
from areal_megatron.data.dumps import Dump, write
from areal_megatron.data.pieces import MOST_TORN, pieces
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.launch import engines, evaluate, local, submit
from areal_megatron.launch.supervision import output
from areal_megatron.launch.supervision.processes import Log
from areal_megatron.launch.supervision.recorder import Recorder
from areal_megatron.observe import mirror
from areal_megatron.observe.console import Console
from areal_megatron.observe.metrics import MetricsWriter, write_status
from areal_megatron.observe.status import EngineStatus, Status
from areal_megatron.page import report
from areal_megatron.page.browser import Browser
from areal_megatron.page.watched import Watched, as_json
from areal_megatron.planning import calibrate, plan, simulate
from areal_megatron.planning.pools import Node, Placement, Process
from areal_megatron.process.errors import printable
from areal_megatron.process.shown import escaped, guard, visible
from areal_megatron.process.terminal import Terminal
from areal_megatron.programs import audit, convert, fetch, rows, status, trajectories
from areal_megatron.run.folder import RunFolder
from tests.conftest import take_interrupts
from tests.unit.programs.test_trajectories import answer, model  # noqa: F401 - a fixture
from tests.unit.test_rooms import every_import, trees

BAD = frozenset(
    regex.findall(
        r"[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]",
        "".join(map(chr, range(sys.maxunicode + 1))),
    )
)
"""What shows nothing of itself, by Unicode's own tables."""
SAMPLES = [*map(chr, [*range(10), *range(11, 32), *range(0x7F, 0xA0), *range(0x200B, 0x2010)])]
SAMPLES += [*map(chr, [0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xAD, 0x61C, 0xFEFF, 0x3164])]
SAMPLES += ["\ufff9", "x\ufe0f", "\U000e0001", "\U000e0041", "\U000e0101", "\U0010eeee", "\U0001d173"]
EVIL = "\x1b]0;title\x07\x1b[2J\x1b]52;c;ZXZpbA==\x1b\\\x9b31m[link=http://evil]l[/link][/no] :smile: " + "".join(
    SAMPLES
)
NAMED = EVIL.replace("/", "|").replace("\0", "")[:60]
"""What a file or an argument can be called."""


def assert_harmless(text):
    """Bytes of a terminal are these characters in UTF-8."""
    assert not (found := sorted(BAD.intersection(text) - {"\n"})), (found, text[:3000])


@pytest.mark.parametrize("function", [visible, escaped, printable])
def test_what_shows_nothing_of_itself_is_escaped_wherever_it_stands(function):
    for before in ("", "a", "\u202e"):
        text = "".join(before + c for c in BAD)
        shown = function(text, *([len(text)] if function is printable else []))
        assert not BAD.intersection(shown) - ({"\n"} if function is visible else set())
        shown.encode()


@pytest.mark.parametrize(
    "text",
    [
        "plain\nlines\n",
        "größer ≤ 数学　全角 ひらがな 한국어 русский עברית العربية",
        "می\u200cخواهم",
        "क्\u200dष",
        "🙂 👩🏽\u200d🔬 👩\u200d❤\ufe0f\u200d👨 1\ufe0f⃣ ❤\ufe0f 🇩🇪",
        "a\xa0b\u202fc\u3000d",
        "e\u0301 t\u030a",
    ],
)
def test_what_people_write_stays(text):
    assert visible(text) == text


def test_escapes_say_what_was_there():
    assert escaped("a\x1b[2J\x9b\u202e\ud800\U000e0041\n\t") == r"a\x1b[2J\x9b\u202e\ud800\U000e0041\n\t"
    assert visible("a\tb\r\nc\u200d\u200d") == "a       b\\r\nc\\u200d\\u200d"
    assert escaped("é\u200d\u200d\u200c\ufe0f\ufe0f") == "é\u200d\\u200d\\u200c\\ufe0f\\ufe0f", "each joins once"


def test_colours_of_ours_pass_and_no_others(capsys, monkeypatch):
    guard()
    guard()
    Terminal(force_terminal=True, color_system="standard").print(Text(EVIL, "red"), "[red]no markup[/] :smile:")
    print(EVIL, end="")
    sys.stdout.writelines([EVIL, "\n"])
    print(EVIL, file=sys.stderr)
    shown = capsys.readouterr()
    assert_harmless(shown.err)
    assert_harmless(re.sub(r"\x1b\[(31|0)m", "", shown.out))
    assert "\x1b[31m" in shown.out and "[red]no markup[/] :smile:" in shown.out


def is_main(module):
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in trees()[module].body)


UNGUARDED = {
    "areal_megatron.launch.supervision.guardian",
    "areal_megatron.reward.sandbox_init",
    "areal_megatron.data.chat_template",
    "areal_megatron.workflows.environments.tau2_bench",
    "areal_megatron.workflows.environments.verifiers_tasks",
}
"""They print nothing of others, or as JSON in ASCII, or to a process of ours that does not pass it on as it is."""
OF_VLLM = {"areal_megatron.engine.serving", "areal_megatron.engine.headless"}
"""They become programs of vLLM, whose output is a log."""


def test_every_program_guards_what_it_prints_first():
    programs = {module for module in trees() if is_main(module)} - UNGUARDED - OF_VLLM
    assert programs > {command.module for command in COMMANDS.values()}
    for module in programs:
        (main,) = (n for n in trees()[module].body if isinstance(n, ast.FunctionDef) and n.name == "main")
        assert ast.unparse(main.body[0]) == "guard()", module


def test_only_the_terminal_is_a_console_of_rich():
    assert [name for name, found in every_import().items() if "rich.console.Console" in found] == []
    users = [
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == "rich.console"
        and "Console" in {alias.name for alias in node.names}
    ]
    assert users == ["areal_megatron.process.terminal"]


@pytest.fixture
def run(tmp_path, model, monkeypatch):  # noqa: F811
    """A run whose every text from outside is evil."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": EVIL, "answer": "2"}) + "\n" + json.dumps({"prompt": "p", "answer": EVIL}))
    run, tokenizer = RunFolder(tmp_path / "run"), Tokenizer(folder)
    run.create()
    config_file.save(
        Config(name="run", updates=2, model=ModelConfig(str(folder)), data=DataConfig(str(data))), run.config
    )
    run.begin()
    metrics = MetricsWriter(run)
    measured = {"effective_tokens_per_s": 1234.0, "accuracy": 0.5, "staleness_max": 3}
    metrics.write("update", 1, measured)
    metrics.close()
    engine = EngineStatus(name=f"engine-0{EVIL}", state="ready", version=1, running=16, tokens_per_s=230.4)
    write_status(run, Status(phase=EVIL, version=1, updates=2, engines=[engine]))
    places = (Process("controller", "controller", 0, f"a1{EVIL}", ()), Process(engine.name, "rollout", 0, EVIL, ()))
    processes = {place.name: Log("controller", run.log("controller")) for place in places}
    for process in processes.values():
        process.exit_code = None
    processes["controller"].log.write_text(EVIL.encode("utf-8", "replace").decode())
    Recorder(run, Placement((Node("a1", (0,)),), places)).write(processes, 0)
    own = [answer(tokenizer, 0, EVIL, prompt=np.array(tokenizer.responses([EVIL])[0], np.int32))]
    write(Dump(number=0, version=0, trajectories=own), run.trajectories)
    return run


def test_the_commands_that_show_a_run(run, capsys, monkeypatch):
    folder, ended = str(run.folder), Log("engine-0", run.log("engine-0"))
    ended.log.write_text(EVIL)
    shows_it = {
        "table": lambda: trajectories.main([folder]),
        "show": lambda: trajectories.main([folder, "--show", "0"]),
        "json": lambda: trajectories.main([folder, "--show", "0", "--json"]),
        "rows": lambda: rows.main([str(run.config)]),
        "status": lambda: status.main([folder]),
        "the end of a log": lambda: print(ended.last_lines()),
    }
    for name, command in shows_it.items():
        command()
        shown = capsys.readouterr()
        assert_harmless(shown.out + shown.err)
        assert "\\x1b" in shown.out or "\\u001b" in shown.out, (name, shown.out)
    trajectories.main([folder, "--show", "0", "--json"])
    assert json.loads(capsys.readouterr().out)["response"] == EVIL, "JSON says the same in other letters"
    for module in (report, audit):
        monkeypatch.setattr(sys, "argv", [module.__name__, folder])
        module.main()
        assert_harmless("".join(capsys.readouterr()))
    assert_harmless((run.folder / "report.html").read_text())


def broken(run, what):
    """Makes a file from outside one that is refused, with a text of its own in the error."""
    folder = run.folder.parent / "model"
    settings = folder / "tokenizer_config.json"
    if what == "template":
        (folder / "chat_template.jinja").write_text("{{ raise_exception(messages[0]['content']) }}")
    elif what == "template that does not parse":
        (folder / "chat_template.jinja").write_text("{{ " + EVIL + " }}")
    elif what == "tokenizer":
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": EVIL}))
    elif what == "description":
        (folder / "config.json").write_text(json.dumps({"architectures": [EVIL], "model_type": EVIL}))
    elif what == "rows":
        (run.folder.parent / "train.jsonl").write_text(json.dumps({EVIL: EVIL}) + "\n" + EVIL)
    elif what == "metrics":
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": EVIL}) + "\n" + EVIL.replace("\n", "") + "\n")
    elif what == "config":
        run.config.write_text(run.config.read_text() + f"\n{json.dumps(EVIL)}: {json.dumps(EVIL)}\n")
    elif what == "config that is no YAML":
        run.config.write_text(EVIL)


@pytest.mark.parametrize(
    "what",
    [
        "template",
        "template that does not parse",
        "tokenizer",
        "description",
        "rows",
        "metrics",
        "config",
        "config that is no YAML",
    ],
)
def test_errors_that_quote_what_was_read(run, capsys, monkeypatch, what):
    broken(run, what)
    folder, config = str(run.folder), str(run.config)
    for program, *arguments in (
        (trajectories, folder),
        (status, folder),
        (rows, config),
        (local, config, "--dry-run", "machine.device=cpu"),
        (plan, config, "--nodes=1", "--gpus=2"),
        (report, folder),
        (audit, folder),
    ):
        monkeypatch.setattr(sys, "argv", [program.__name__, *arguments])
        try:
            program.main()
        except Exception as e:  # which the interpreter would print
            print(f"{type(e).__name__}: {e}", file=sys.stderr)
        assert_harmless("".join(capsys.readouterr()))


PROGRAMS = (audit, calibrate, convert, engines, evaluate, fetch, local, mirror, plan, report, rows, simulate)
PROGRAMS += (status, submit, tinker, trajectories)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_errors_that_quote_an_argument(program, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {p.__name__ for p in PROGRAMS} == {command.module for command in COMMANDS.values()}
    for arguments in ([f"--{NAMED}"], [NAMED], [NAMED, NAMED], [NAMED, f"key={NAMED}", f"--{NAMED}={NAMED}"]):
        monkeypatch.setattr(sys, "argv", ["x", *arguments])
        with pytest.raises(SystemExit) if arguments[0][0] == "-" else contextlib.suppress(SystemExit):
            assert program.main()
        shown = "".join(capsys.readouterr())
        assert_harmless(shown)
        assert "error: " in shown


def test_a_terminal_gets_bytes_that_only_show(run):
    """`areal` as users call it, on a terminal, with colours."""
    for arguments in ([NAMED], ["trajectories", str(run.folder), "--show", "0"], ["status", str(run.folder)]):
        ours, theirs = pty.openpty()
        done = subprocess.Popen(
            [sys.executable, "-m", "areal_megatron.command", *arguments], stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 65536):
                shown += part
        os.close(ours)
        assert done.wait(60) in (0, 1, 2)
        text = shown.decode().replace("\r\n", "\n")
        assert_harmless(re.sub(r"\x1b\[[0-9;]*m", "", text))
        assert "\\x1b" in text and ("\x1b[" in text) == (len(arguments) > 1), text


def test_the_console_of_a_run_shows_texts_in_its_panel_and_above_it(run, monkeypatch):
    class Tty(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Tty())
    monkeypatch.setattr(sys, "stderr", Tty())
    ours, restored = sys.stdout, sys.stderr
    guard()
    output.never_fail()
    console = Console(run, config_file.load(run.config))
    print(EVIL)
    console._note(0.0, EVIL)
    console.refresh()
    console.close()
    assert_harmless(restored.getvalue())
    moves = r"\x1b\[(\d+(;\d+)*)?m|\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r"
    assert_harmless(re.sub(moves, "", ours.getvalue()))
    assert ours.getvalue().count("\\x1b]52;") >= 2 and "\x1b[2K" in ours.getvalue()


def test_the_live_page_gets_text_that_only_shows(run):
    watched, browser = Watched(run), Browser(run)
    watched.refresh()
    found = json.loads(as_json(watched.overview()))
    found["rows"] = json.loads(as_json(browser.page(watched.config, None, 0, "")))
    found["one"] = json.loads(as_json(browser.trajectory(watched.config, 0, 0, 0)))
    text = json.dumps(found, ensure_ascii=False)
    assert_harmless(text)
    assert text.count("x1b") > 5
    assert not BAD.intersection("".join(found["one"]["parts"][0][2:])) - {"\n"}


def test_bytes_that_are_no_text_are_read_in_linear_time(model, monkeypatch):  # noqa: F811
    tokenizer, decoded = Tokenizer(model), 0
    (tokens,) = tokenizer.responses(["ß"])
    torn = [tokens[1]] * 3000  # a byte that continues a character which never began
    decode = tokenizer.decode

    def counted(tokens, special=False):
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens, special)

    monkeypatch.setattr(tokenizer, "decode", counted)
    found = pieces(tokenizer, torn)
    assert sum(count for count, _ in found) == 3000 and "".join(text for _, text in found) == "\ufffd" * 3000
    assert max(count for count, _ in found) == MOST_TORN and decoded < 30 * 3000
    mixed = [tokens[1]] * 7 + tokenizer.responses(["🙂 größer"])[0] + [tokens[0]] * 9 + tokenizer.responses(["数"])[0]
    found = pieces(tokenizer, mixed)
    assert "".join(text for _, text in found) == decode(mixed, True), "a character over the end of a piece is whole"


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_who_leaves_ends_no_program(tmp_path, flush):
    program = (
        "import sys; from areal_megatron.process.shown import guard; guard()\n"
        f"for number in range(20_000): print(number, flush={flush})\n"
        f"open({str(tmp_path / 'end')!r}, 'w').close()"
    )
    writing = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writing.stdout.readline() == "0\n"
    writing.stdout.close()
    assert writing.stderr.read() == "" and writing.wait(60) == 0 and (tmp_path / "end").exists()


def test_ctrl_c_ends_a_program_with_a_word(tmp_path):
    os.mkfifo(config := tmp_path / "config.yaml")  # to be read, a program waits as for a file server or a hub
    command = [sys.executable, "-m", COMMANDS["train"].module, str(config)]
    waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=take_interrupts)
    with config.open("w"):  # returns once the program has opened it, too
        waiting.send_signal(signal.SIGINT)
        said = waiting.communicate(timeout=60)[1]
    assert said == "interrupted\n" and waiting.returncode == -signal.SIGINT

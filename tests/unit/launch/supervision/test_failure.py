"""Why a process has ended, and whether it would only end so again."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal_megatron.launch.supervision.failure import Failure, Failures, cause
from areal_megatron.launch.supervision.out_of_memory import OutOfMemory
from areal_megatron.launch.supervision.processes import Children, Log

FAILED = Failure("trainer-0", 1, Path("log"), "", "ValueError: rank 3 at 0x7f00 after 1.5 s")

ABORTED = """
import faulthandler, os, sys
print("terminate called after throwing an instance of 'gloo::EnforceNotMet'", file=sys.stderr)
print("  what():  [enforce fail at pair.cc:680] ex_ == nullptr. ", file=sys.stderr, flush=True)
faulthandler.enable()
os.abort()
"""
"""What a library in C++ writes, and then Python's handler."""


def written_by(code):
    """What Python itself writes."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ValueError('no heads of 16')", "ValueError: no heads of 16"),
        ("class Odd(Exception): pass\nraise Odd", "Odd"),
        ("try: 1 / 0\nexcept Exception as e: raise RuntimeError('no engine') from e", "RuntimeError: no engine"),
        ("raise ExceptionGroup('in a TaskGroup', [ExceptionGroup('', [KeyError('eos')])])", "KeyError: 'eos'"),
        ("import sys; sys.exit('error: trainer.tp: 3 does not divide 8')", "trainer.tp: 3 does not divide 8"),
        ("import argparse; argparse.ArgumentParser('areal').parse_args(['--no'])", "unrecognized arguments: --no"),
        ("import faulthandler, os; faulthandler.enable(); os.abort()", "Fatal Python error: Aborted"),
        (ABORTED, "[enforce fail at pair.cc:680] ex_ == nullptr."),
        ("raise ValueError('\\n  the folder is missing')", "ValueError: the folder is missing"),
        ("class Ärger(Exception): pass\nraise Ärger('x')", "Ärger: x"),
        ("import os, sys; os.execv(sys.executable, ['python3', '-m', 'nosuch'])", "No module named nosuch"),
        ("print(end='')", ""),
        ("import sys; sys.exit(3)", ""),
    ],
)
def test_the_line_that_says_why_is_found(code, said):
    assert cause(f"INFO: 2 engines\n{written_by(code)}leaked 514 functions!\n - and others\n") == said


STACKS = """\
(EngineCore pid=14250) INFO 11-26 14:46:10 [core.py:90] Initializing a V1 LLM engine: {'error': None}
(EngineCore pid=14250) ERROR 11-26 14:46:17 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=14250) ERROR 11-26 14:46:17 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=14250) ERROR 11-26 14:46:17 [core.py:1512]   File "core.py", line 1490, in run_engine_core
(EngineCore pid=14250) ERROR 11-26 14:46:17 [core.py:1512]     engine_core.run_busy_loop()
(EngineCore pid=14250) ERROR 11-26 14:46:17 [core.py:1512] RuntimeError: Unsupported head_dim=16 isa=2
Process EngineCore:
(APIServer pid=13833) ERROR 11-26 14:46:17 [async_llm.py:906] Traceback (most recent call last):
(APIServer pid=13833) ERROR 11-26 14:46:17 [async_llm.py:906]   File "async_llm.py", line 860, in output_handler
(APIServer pid=13833) ERROR 11-26 14:46:17 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
INFO:     Waiting for connections to close. (CTRL+C to force quit)
"""


def test_an_error_that_points_to_one_above_is_not_the_cause():
    assert cause(STACKS) == "RuntimeError: Unsupported head_dim=16 isa=2"


def test_an_error_while_a_process_ends_is_not_the_cause():
    code = """
import atexit
class Handle:
    def __del__(self): raise AttributeError('no handle')
handle = Handle()
atexit.register(lambda: 1 / 0)
raise ValueError('the cause')
"""
    log = written_by(code)
    assert log.index("ValueError") < log.index("ZeroDivisionError") < log.index("AttributeError")
    assert cause(log) == "ValueError: the cause"


def test_what_a_log_quotes_commands_no_terminal(tmp_path):
    with Children() as children:
        code = "raise ValueError('\\x1b]0;owned\\x07')"
        child = children.start("child", [sys.executable, "-c", code], dict(os.environ), tmp_path / "log", set())
        child._process.wait(30)
        line = Failure.of(child).line
    assert "ValueError: \\x1b]0;owned\\x07;" in line


def test_what_an_earlier_process_has_written_is_not_of_this_one(tmp_path):
    log = tmp_path / "log"
    log.write_text("error: the one before\n")
    later = Log("child", log)
    with log.open("a") as file:
        file.write("error: this one\n")
    assert later.last_lines() == "error: this one"
    os.truncate(log, 0)  # it was long and is moved aside
    log.write_text("new\n")
    assert later.last_lines() == "new"


def test_a_refusal_is_told_once_and_is_final():
    refused = replace(FAILED, code=2, cause="trainer.tp: 3 does not divide 8", last_lines="error: trainer.tp: 3 …")
    assert refused.text == "error: trainer-0: trainer.tp: 3 does not divide 8; its log: log" and refused.is_final


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "ended with exit code 1: ValueError: rank 3"),
        ({"cause": ""}, "ended with exit code 1; its log"),
        ({"code": -signal.SIGKILL, "cause": ""}, "was killed by SIGKILL; its log"),
        ({"code": -signal.SIGKILL}, "was killed by SIGKILL; its last error: ValueError: rank 3"),
        (
            {"code": -signal.SIGKILL, "out_of_memory": True},
            "was killed by SIGKILL, as the kernel does when memory runs",
        ),
        ({"code": -signal.SIGTERM, "ended": "does not answer"}, "does not answer: it was ended; its last error: Value"),
        ({"repeated": True}, "and at the same point; fix that, then resume=auto continues"),
    ],
)
def test_who_ended_a_process_and_why(changes, says):
    failure = replace(FAILED, **changes)
    assert says in failure.line and failure.text.splitlines()[-1] == failure.line and "\n" not in failure.line


def test_the_same_failure_at_the_same_point_repeats():
    failures = Failures()
    again = replace(FAILED, name="trainer-1", cause="ValueError: rank 12 at 0x55aa after 20.1 s")
    assert [failures.repeats("trainer", failed, 3) for failed in (FAILED, again)] == [False, True]


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("OSError: [Errno 28] No space left on device: '/tmp/tmpabcdefgh'", ".../tmp/tmpqwertyui'"),
        ("RuntimeError: a3fbc1de-77ab-4c1d has failed", "RuntimeError: deadbeef-1b11-4aaa has failed"),
        ("ValueError: no use for {'a.weight', 'b.weight'}", "ValueError: no use for {'b.weight', 'a.weight'}"),
        ("torch.OutOfMemoryError: 2.00 GiB of GPU 0", "torch.OutOfMemoryError: 976.00 MiB of GPU 3"),
        ("RuntimeError: loss nan at gpu-a17", "RuntimeError: loss -1.5e-07 at gpu-b03"),
    ],
)
def test_the_same_failure_is_never_quite_the_same(first, again):
    failures = Failures()
    again = again.replace("...", first.partition("/tmp")[0])
    assert [failures.repeats("trainer", replace(FAILED, cause=said), 3) for said in (first, again)] == [False, True]


OTHER, KILLED = replace(FAILED, cause="KeyError: 'eos'"), replace(FAILED, code=-signal.SIGKILL, cause="")


@pytest.mark.parametrize(
    ("failed", "repeats"),
    [
        ([(FAILED, 3), (OTHER, 3), (FAILED, 3), (OTHER, 3)], [0, 0, 1, 1]),
        ([(FAILED, 3), (KILLED, 3), (OTHER, 3), (FAILED, 3)], [0, 0, 0, 1]),
        ([(FAILED, 3), (OTHER, 2), (FAILED, 3), (OTHER, 2)], [0, 0, 1, 1]),  # what was trained in between was so before
        ([(FAILED, 3), (OTHER, 4), (FAILED, 3), (OTHER, 4)], [0, 0, 0, 1]),
        ([(FAILED, 3), (FAILED, 4), (FAILED, 3)], [0, 0, 0]),  # a version was trained in between
        ([(FAILED, 3), (FAILED, 2), (FAILED, 3)], [0, 0, 0]),
        ([(FAILED, 3), (OTHER, 3), (OTHER, 4), (FAILED, 4)], [0, 0, 0, 0]),
    ],
)
def test_a_failure_repeats_whatever_came_in_between_but_progress(failed, repeats):
    failures = Failures()
    assert [failures.repeats("trainer", *one) for one in failed] == list(map(bool, repeats))


@pytest.mark.parametrize(
    "outside",
    [
        {"code": -signal.SIGKILL},
        {"code": -signal.SIGTERM},
        {"code": -signal.SIGKILL, "cause": ""},
        {"code": -35, "cause": ""},
        {"code": -signal.SIGTERM, "ended": "does not answer", "cause": ""},
    ],
)
def test_what_ends_a_process_from_outside_never_repeats_by_itself(outside):
    failures = Failures()
    assert not any(failures.repeats("trainer", replace(FAILED, **outside), 3) for _ in range(3))


@pytest.mark.parametrize(
    "own",
    [
        {"code": -signal.SIGABRT},
        {"code": -signal.SIGILL, "cause": ""},
        {"code": 0},
        {"code": 1, "cause": ""},
        {"code": -signal.SIGKILL, "out_of_memory": True},  # what it needs is more than there is, at this point
    ],
)
def test_errors_of_its_own_do(own):
    failures = Failures()
    assert [failures.repeats("trainer", replace(FAILED, **own), 3) for _ in range(2)] == [False, True]


def test_an_engine_ends_alike_by_itself_and_when_it_hangs_after_its_error():
    failures, hung = Failures(), replace(FAILED, code=-signal.SIGKILL, ended="does not answer")
    assert not failures.repeats("engine-0", hung, 0) and failures.repeats("engine-0", replace(FAILED, code=0), 0)


def test_versions_of_others_are_no_progress_of_an_engine_that_never_serves():
    failures = Failures()
    failures.repeats("engine-0", FAILED, 3)
    assert not failures.repeats("engine-1", FAILED, 3), "another engine has had no try yet"
    assert not failures.repeats("engine-0", FAILED, 4) and failures.repeats("engine-0", FAILED, 5, served=False)


def test_the_kernel_is_asked_whether_memory_has_run_out(tmp_path, monkeypatch):
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 5\noom_kill 3\n")
    memory = OutOfMemory(counts)
    assert not memory.look()
    counts.write_text("nr_free_pages 1\noom_kill 4\n")
    assert memory.look() and memory.look()
    monkeypatch.setattr("areal_megatron.launch.supervision.out_of_memory._RECENT_S", 0)
    assert not memory.look() and not OutOfMemory(tmp_path / "none").look()

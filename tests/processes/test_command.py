"""The command `areal`: it becomes the programs that it names, is there at once, and completes in a real bash."""

import resource
import shlex
import subprocess
import sys

import pytest

from areal_megatron.command import COMMANDS, parser_of
from areal_megatron.process.called import call
from tests.conftest import ROOT
from tests.support.areal import Shell


@pytest.fixture(scope="module")
def areal(tmp_path_factory):
    """Calls `areal` in a folder, by default an empty one; gives back the ended process."""
    programs, empty = tmp_path_factory.mktemp("bin"), tmp_path_factory.mktemp("empty")

    def call(*arguments: str, bash: str = "", cwd=empty):
        return Shell(programs, cwd).run(bash or shlex.join(["areal", *arguments]))

    return call


def test_help_names_every_command_and_is_there_at_once(areal):
    def took():
        begun = cpu_of_children()
        shown = areal("--help")
        assert shown.returncode == 0 and all(f"\n  {name} " in shown.stdout for name in COMMANDS)
        return cpu_of_children() - begun

    def cpu_of_children():  # seconds, which do not depend on what else the machine does
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    assert min(took() for _ in range(3)) < 0.3
    loaded = "import sys; bare = set(sys.modules); import areal_megatron.command; print(*set(sys.modules) - bare)"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"argparse", "argcomplete", "numpy", "omegaconf", "msgspec"} & set(done.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_program_that_names_itself_as_it_was_called(name, monkeypatch):
    assert parser_of(COMMANDS[name].module).prog == f"python -m {COMMANDS[name].module}"
    monkeypatch.setenv("AREAL_CALLED", "")  # it is set back afterwards
    call(f"areal {name}")
    assert parser_of(COMMANDS[name].module).format_help().startswith(f"usage: areal {name} ")


def test_the_program_that_a_command_becomes_shows_its_help(areal):
    shown = areal("status", "--help")
    assert shown.returncode == 0 and shown.stdout.startswith("usage: areal status ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: areal COMMAND"),
        (["trian"], "error: 'trian' is no command, did you mean 'areal train'?\n"),
        (["xyzzy"], "error: 'xyzzy' is no command; areal --help lists them\n"),
        (["completion"], "error: areal completion: expected one of bash, zsh, fish\n"),
        (["status", "nowhere"], "error: nowhere is no run folder (nothing is there, seen from "),
        (["train", "nowhere.yaml"], "error: nowhere.yaml: cannot read the config: No such file or directory\n"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(areal, arguments, words):
    done = areal(*arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(words)


def test_modules_of_the_folder_are_found_as_with_python_m(areal, world, tmp_path):
    (tmp_path / "mine.py").write_text("def score(prompt, response, answer):\n    return 1.0\n")
    keys = [f"model.path={world / 'model'}", f"data.train={world / 'train.jsonl'}", f"data.eval={world}/heldout.jsonl"]
    arguments = ["train", str(ROOT / "configs" / "tiny_cpu.yaml"), *keys, "machine.slots=2", "machine.device=cpu"]
    done = areal(*arguments, "reward.function=mine:score", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and "1 engine: python -m areal_megatron.engine.server" in done.stdout, done.stderr
    done = areal(*arguments, "reward.function=yours:score", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2 and "reward.function" in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def completion(areal, tmp_path_factory):
    """The file of what `areal completion bash` prints."""
    path = tmp_path_factory.mktemp("completion") / "areal.bash"
    path.write_text(areal("completion", "bash").stdout)
    return path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("areal tr", {"train", "trajectories"}),
        ("areal train --dr", {"--dry-run "}),
        ("areal train configs/tiny_c", {"configs/tiny_cpu.yaml "}),
        (
            "areal train configs/tiny_cpu.yaml rollout.max",
            {"rollout.max_new_tokens=", "rollout.max_pass_rate=", "rollout.max_running=", "rollout.max_staleness="},
        ),
        ("areal train configs/tiny_cpu.yaml --dry-run name=x ppo.penalty.kl_c", {"kl_cov=", "kl_cov_share="}),
        ("areal submit c.yaml --nodes 2 ppo.penalty.kl_form=", {"k1", "k2", "k3", "forward", "reverse"}),
        ("areal plan c.yaml machine.shared=", {"true", "false"}),
        ("areal train c.yaml --python=x nosuch", set()),
        ("areal engines d", {"drain "}),
        ("areal convert to-hf --dt", {"--dtype "}),
        ("areal completion z", {"zsh "}),
    ],
)
def test_bash_completes(areal, completion, line, found):
    """By the script that `areal completion bash` prints; bash replaces what follows the last `=` alone."""
    script = (
        f"set -e; source {shlex.quote(str(completion))}; "
        "COMP_LINE=$1; COMP_POINT=${#1}; COMP_TYPE=9; COMPREPLY=()\n"
        "_python_argcomplete areal '' '' || true; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = areal(bash=f"set -- {shlex.quote(line)}; {script}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    shown = {reply.rpartition("ppo.penalty.")[2] for reply in done.stdout.split("\n") if reply}
    assert shown == found


SCRIPTS = {"zsh": "compdef _python_argcomplete areal", "fish": "complete --command areal "}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_other_shells_get_a_script_too(areal, shell):
    done = areal("completion", shell)
    assert done.returncode == 0 and SCRIPTS[shell] in done.stdout

"""Every shell line of README.md, docs/ and examples/: its program exists, its options are in that program's parser, its
keys are in config.py. Nothing is run: what the lines do is shown by the tests of the programs and of the tutorials."""

import argparse
import ast
import re
import shlex
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from areal_megatron.command import COMMANDS, parser_of
from areal_megatron.config import SERVED, Config, EnvironmentConfig, config_fields, passed_through
from tests.unit.test_docs import DOCS, ROOT

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SHELL = ("", "sh", "bash")
"""Languages of blocks whose lines are commands, if they begin like one."""
OURS = ("areal", "make", "mpirun", "python", "python3", "python3.12", "sbatch", "bash")
OTHERS = ("cd", "curl", "exec", "export", "git", "mkdir", "pip", "scancel", "squeue", "tensorboard", "unzip", ".")
"""Programs whose arguments are none of our business."""
EVERY = [(key, value) for key, _, value in config_fields(Config(environments=[EnvironmentConfig()]))]
KEYS = {key: is_dataclass(value) or isinstance(value, list | dict) for key, value in EVERY}
"""Key → whether it is a section."""
OWNED = {
    f"{key}.": {name for group in groups for name in group.names}
    for key, groups in {
        passed_through.VLLM: passed_through.VLLM_OWNED,
        passed_through.MEGATRON: passed_through.MEGATRON_OWNED,
        **{f"served.{name}.vllm": passed_through.served_owned(name) for name in SERVED},
    }.items()
}
"""How keys begin that are options of another library → options of it that may not be passed through."""


FILES = (".py", ".jsonl", ".yaml", ".safetensors", ".safetensors.index.json")
"""How the names of files end that may begin like a key."""


def is_key(name: str) -> bool:
    name = re.sub(r"^environments\.\d+\.", "environments.0.", name)
    if section := next((section for section in OWNED if name.startswith(section)), ""):
        return name.removeprefix(section).partition(".")[0] not in OWNED[section]
    return KEYS.get(name) is False


"""Key or section of a config → whether it is a section."""
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(text: str):
    """The commands of a document: lines of its blocks, and its code spans."""
    for language, block in FENCE.findall(text):
        if language in SHELL:
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                yield from re.split(r" && | \|\| |; | \| ", re.sub(r"\s#( .*)?$", "", line.removeprefix("$ ")))
    for span in SPAN.findall(FENCE.sub("", text)):
        if span.split()[0:1] and span.split()[0] in OURS and " " in span:
            yield span


def program_of(command: str) -> list[str]:
    """The words of a command from its program on."""
    try:
        words = shlex.split(re.sub("<[^<>]*>", "PLACE", command.replace("…", "...")))
    except ValueError:  # no command but a part of a sentence
        return []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


@cache
def parser(module: str) -> argparse.ArgumentParser:
    return parser_of(module)


@cache
def options_of_tool(path: str) -> set[str]:
    """The options that a tool's source adds to its parser, those of tools/bench/common.py among them."""
    calls = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)]
    added = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    own = {arg.value for call in added for arg in call.args if isinstance(arg, ast.Constant)}
    shared = [call for call in calls if ast.unparse(call.func) in ("common.parser", "common.options_of")]
    of_all = {"--json"} if shared else set()
    return own | of_all | {f"--{word.arg}" for call in shared for word in call.keywords} | {"--help"}


def options_of(parser: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """The options that a parser and, if one is named, its subparser know."""
    known = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            named = [word for word in words if word in action.choices]
            known |= set().union(*(options_of(action.choices[word], words) for word in named or action.choices))
    return known


def problem(words: list[str]) -> str:
    """What is wrong with the words of a command of ours; empty if nothing is."""
    name, *rest = words
    if name == "areal":
        if rest[0].startswith("-") or rest[0] in ("completion", "COMMAND"):
            return ""
        if rest[0] not in COMMANDS:
            return f"areal has no {rest[0]}"
        return arguments_problem(options_of(parser(COMMANDS[rest[0]].module), rest), rest[1:])
    if name == "mpirun":
        inner = next((n for n, word in enumerate(words) if "python" in word), None)
        return problem(["python", *words[inner + 1 :]]) if inner else ""
    if name == "make":
        rest = rest[2:] if rest[0] == "-C" else rest
        targets = [word for word in rest if "=" not in word]
        return f"no target {targets[0]}" if targets and targets[0] not in TARGETS else ""
    if name.startswith("python"):
        if rest[:1] == ["-m"] and rest[1].partition(".")[0] == "areal_megatron":
            return arguments_problem(options_of(parser(rest[1]), rest), rest[2:])
        tool = rest[0].removeprefix("../areal/")
        if tool.endswith(".py") and tool.startswith("tools/"):
            return arguments_problem(options_of_tool(tool), rest[1:]) if (ROOT / tool).exists() else f"no {tool}"
        return ""
    script = next((word for word in rest if word.startswith("slurm/")), "")
    if script and not (ROOT / script).exists():
        return f"no {script}"
    flags = options_of(parser("areal_megatron.launch.slurm"), []) if script else set()
    after = rest[rest.index(script) + 1 :] if script else []
    return arguments_problem(flags, after)


def arguments_problem(known: set[str], words: list[str]) -> str:
    for before, word in pairwise(["", *words]):
        flag, _, _ = word.partition("=")
        if before == "--vllm":
            flag = f"rollout.vllm.{flag}"
        if word.startswith("--") and len(word) > 2 and flag not in known:
            return f"no option {flag}"
        if word != "key=value" and re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*=.*", word) and not is_key(flag):
            return f"no key {flag}"
    return ""


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_commands_name_programs_options_and_keys_that_there_are(doc):
    wrong = []
    for command in commands(doc.read_text()):
        words = program_of(command)
        name = words[0] if words else ""
        if name in OURS and len(words) > 1 and (found := problem(words)):
            wrong.append(f"{command.strip()}: {found}")
    assert wrong == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_blocks_for_the_shell_hold_programs_that_were_considered(doc):
    """A block that is something else says so by its language: ```text."""
    unknown = set()
    for language, block in FENCE.findall(doc.read_text()):
        if language in ("sh", "bash"):
            lines = [program_of(re.sub(r"\s#( .*)?$", "", line)) for line in re.sub(r"\\\n", " ", block).splitlines()]
            unknown |= {Path(line[0]).name for line in lines if line and not (ROOT / line[0]).exists()} - {
                *OURS,
                *OTHERS,
            }
    assert unknown == set()


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_keys_in_the_text_and_in_yaml_are_keys_of_a_config(doc):
    sections = {key for key, section in KEYS.items() if section and "." not in key}
    text, wrong = doc.read_text(), set()
    for span in SPAN.findall(FENCE.sub("", text)):
        for word in span.split():
            key = re.match(rf"((?:{'|'.join(sections)})(?:\.[a-z_0-9]+)+)(?:=|$)", word)
            if key and key[1] not in KEYS and not is_key(key[1]) and not key[1].endswith(FILES):
                wrong.add(key[1])
    for language, block in FENCE.findall(text):
        if language == "yaml":
            wrong |= {key for key in keys_of(yaml.safe_load(block)) if key not in KEYS and not is_key(key)}
    assert wrong == set()


def keys_of(tree: dict, prefix: str = ""):
    for name, value in tree.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        for number, entry in enumerate(value if isinstance(value, list) else ()):
            yield from keys_of(entry, f"{prefix}{name}.{number}.")


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("areal trian conf.yaml", "areal has no trian"),
        ("areal train conf.yaml --dry", "no option --dry"),
        ("areal train conf.yaml rollout.engine=2", "no key rollout.engine"),
        ("areal train conf.yaml rollout=2", "no key rollout"),
        ("areal train conf.yaml rollout.vllm.tensor_parallel_size=2", "no key rollout.vllm.tensor_parallel_size"),
        ("areal train conf.yaml environments.1.rewards=math", "no key environments.1.rewards"),
        ("areal train conf.yaml environments.1.reward=math rollout.vllm.block_size=32", ""),
        ("areal engines drain RUN --count 1", "no option --count"),
        ("python -m areal_megatron.launch.local conf.yaml --nodes 2", "no option --nodes"),
        ("python tools/nosuch.py", "no tools/nosuch.py"),
        ("python tools/demo.py --sead 1", "no option --sead"),
        ("mpirun -n 4 python -m areal_megatron.launch.mpi conf.yaml dat.train=x", "no key dat.train"),
        ("sbatch slurm/train_33b.sh", "no slurm/train_33b.sh"),
        ("sbatch slurm/train_32b.sh --restart=1", "no option --restart"),
        ("make dem", "no target dem"),
        ("areal train conf.yaml name=x rollout.max_staleness=4 --restarts 2 --dry-run", ""),
    ],
)
def test_mistakes_are_found(command, found):
    assert problem(program_of(command)) == found

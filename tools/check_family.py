"""Whether a family of models is right in every part: a tiny random model of a config.json through every oracle.

    python tools/check_family.py HF_DIR [--only PART] [--out FOLDER]

HF_DIR needs a config.json alone. What is built from it keeps all flags and has small sizes, which the first line names:
numbers of heads and experts are odd where the model's are, and divided by 3. It stays in --out. Each part is compared
with something that shares no code with the table:

1. the table: names and shapes of the file that transformers writes
2. what is computed: each part of each layer, in the order of the model, with transformers, so that the first one that
   differs is named
3. training: logits, gradients and updates with plain code, on one rank, and split in every way
4. conversion: from Hugging Face to a checkpoint and back, bit by bit
5. engines: names, shapes, dtypes and bytes with what vLLM loads by itself, whole and split over two ranks, or three
6. a run: two updates in flight to a real engine, whose log-probabilities are the trainers'; its export is read by
   transformers

Exits with 1 if a part fails; those that need it are left out. --only tries one part, with those that it needs. All of
them take about two and a half minutes on two cores.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from areal_megatron.checkpoint.convert import from_hf, to_hf
from areal_megatron.config import ConfigError
from areal_megatron.models.architecture import (
    Architecture,
    architecture,
    of_language_model,
    read_config,
    read_whole_config,
)
from areal_megatron.models.names import TOWER, own
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.process.errors import printable
from areal_megatron.process.shown import guard
from areal_megatron.reshard import engine_layout, trainer_layout
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import RunFolder
from tests.support.loading import LONGEST_S, load
from tests.support.trainer_ranks import RankFailed, TrainerRanks
from tools.family import tiny

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "check_family.py"
MODEL = "model"
DERIVED = (".W_UV", ".W_UK_T")
"""How the names of parameters end that vLLM makes of others after loading; updates bring none."""
PACKED = ".conv1d.weight"
"""How the names of parameters end whose axes of one element vLLM leaves out where it packs them."""
_MOST_NAMED = 4
"""How many differences a line names."""
ROUNDING = 0.1
"""The largest mean difference of log-probabilities that bfloat16 explains where a kernel may choose other experts; with
weights that did not arrive it is 0.2 and more."""
DENSE = (
    ({},),
    ({"tp": 2}, {"tp": 3}),
    ({"pp": 2, "vpp": 2},),
    ({"cp": 2},),
    ({"tp": 2, "pp": 2}, {"tp": 3, "pp": 2}),
)
SPARSE = (
    ({},),
    ({"tp": 2}, {"tp": 3}),
    ({"pp": 2},),
    ({"dp": 2, "ep": 2}, {"dp": 3, "ep": 3}),
    (
        {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        {"tp": 3, "dp": 2, "ep": 2, "etp": 1},
        {"tp": 2, "dp": 3, "ep": 3, "etp": 1},
        {"tp": 3, "ep": 3, "etp": 1},
    ),
)
"""The layouts of trainers that are tried, of models without experts and with them: of each line the first that the
numbers of heads and experts allow."""


class Fault(RuntimeError):
    """A part is not as it should be; the message is one line."""


@dataclass
class Subject:
    """The tiny model."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    """What transformers wrote, without what is for images alone."""
    architecture: Architecture
    ranks: TrainerRanks

    @property
    def model(self) -> Path:
        return self.folder / MODEL


@dataclass(frozen=True)
class Part:
    """One comparison."""

    name: str
    check: Callable[[Subject], str]
    """Returns what was compared, or raises Fault."""
    needs: Sequence[str] = ()
    """Names of the parts without which it would say nothing new."""


def table(subject: Subject) -> str:
    """Compares names and shapes with those in the file of transformers."""
    described = {
        name: tuple(shape)
        for pattern, shape in subject.architecture.canonical.items()
        for name, shape in _each(pattern, shape)
    }
    written = {name: tuple(tensor.shape) for name, tensor in subject.tensors.items()}
    _compare(described, written, "the table", "transformers")
    return f"{len(written)} tensors of {tiny.LAYERS} layers, as transformers names and writes them"


def _each(pattern: str, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tensors that a pattern stands for; each {} has a number, the first ones of the shape."""
    mark = re.search(r"\{([\d,]*)\}", pattern)
    if mark is None:
        yield pattern, tuple(shape)
        return
    first, *others = map(int, (mark[1] or "0").split(","))
    for number in (first, *others) if others else range(first, first + shape[0]):
        yield from _each(pattern[: mark.start()] + str(number) + pattern[mark.end() :], shape[1:])


def computation(subject: Subject) -> str:
    """Compares what one trainer rank computes with transformers, part by part."""
    _on_ranks(subject, "tools.family.computation:check", 1, "computation", model=MODEL)
    return f"every part of {tiny.LAYERS} layers and the output layer, as transformers computes them"


def training(subject: Subject) -> str:
    """Compares logits, gradients and updates with plain code, in several layouts."""
    layouts, untried = _possible(subject)
    for number, layout in enumerate(layouts):
        world = prod(layout.get(size, 1) for size in ("tp", "cp", "pp", "dp"))
        named = _named(layout)
        cases = {f"trained-{number}": [MODEL, layout]}
        _on_ranks(subject, "tests.support.ranks.trainer_checks:check_layouts", world, named, cases=cases)
    return f"logits, gradients and updates of {', '.join(map(_named, layouts))}{untried}"


def _possible(subject: Subject) -> tuple[list[dict[str, int]], str]:
    """Returns the layouts of trainers that the model can have, and what is to be said of others."""
    hf_config, found, untried = read_config(subject.model), [], []
    for alternatives in SPARSE if subject.architecture.dimensions.experts else DENSE:
        refused = ""
        for layout in alternatives:
            try:
                trainer_layout.layout(hf_config, MegatronSizes(**layout), rank=0)
            except ConfigError as e:
                refused = refused or f"{_named(layout)} ({_reason(e)})"
            else:
                found.append(layout)
                break
        else:
            untried.append(refused)
    return found, _not_tried(untried)


def _not_tried(reasons: Sequence[str]) -> str:
    return f"; NOT tried: {'; '.join(reasons)}" if reasons else ""


def _reason(error: ConfigError) -> str:
    """Returns what an error about sizes says, without the name of the tiny model."""
    return str(error).partition(" of the model")[0]


def conversion(subject: Subject) -> str:
    """Compares a model with itself after it has been a checkpoint."""
    from_hf(subject.model, subject.folder / "checkpoint")
    to_hf(subject.folder / "checkpoint", subject.folder / "back")
    written = _read(subject.model)
    _compare_tensors(_read(subject.folder / "back"), written, "the export")
    return f"{len(written)} tensors to a checkpoint and back"


def engines(subject: Subject) -> str:
    """Compares what an update fills with what vLLM loads."""
    hf_config = read_config(subject.model)
    cases, untried = [(MODEL, 1, False, "float32")], ""
    tp, refused = _engine_tp(hf_config)
    if tp > 1:
        cases += [(MODEL, tp, False, "float32"), (MODEL, tp, False, "bfloat16")]
    else:
        cases, untried = [*cases, (MODEL, 1, False, "bfloat16")], _not_tried([f"several ranks ({refused})"])
    if tp > 1 and subject.architecture.dimensions.experts:
        cases.append((MODEL, tp, True, "float32"))
    try:
        loaded = load(subject.folder, cases, tp, {"head_dtype": "float32"})
    except AssertionError as e:
        raise Fault(f"vLLM fails: {_why(str(e), first=True)}") from None
    for name, tp, expert_parallel, dtype in cases:
        sizes = EngineSizes(tp=tp, expert_parallel=expert_parallel)
        for rank in range(tp):
            layout = engine_layout.layout(hf_config, sizes, rank)
            by_vllm, by_us, _ = loaded[rank][f"{name} {tp} {expert_parallel} {dtype}"]
            what = f"tp{tp}{' with expert parallelism' if expert_parallel else ''}, {dtype}, rank {rank}: "
            shapes = {key: _shape(key, shape) for key, shape in layout.parameters.items()}
            dtypes = {key: f"torch.{layout.parameter_dtypes.get(key, dtype)}" for key in shapes}
            named = {key: held for key, held in by_vllm.items() if not key.endswith(DERIVED)}
            theirs = {key: _shape(key, shape) for key, (shape, *_) in named.items()}
            _compare(shapes, theirs, "the table", "vLLM", where=what)
            _compare(dtypes, {key: kind for key, (_, kind, *_) in named.items()}, "the table", "vLLM", "dtype", what)
            different = [key for key in by_vllm if by_us[key] != by_vllm[key]]
            if different:
                raise Fault(f"{what}other bytes than vLLM loads in {_listed(different)}")
    sizes = f"tp1 and tp{cases[-1][1]}" if not untried else "tp1"
    return f"names, shapes, dtypes and bytes as vLLM loads them, at {sizes}, in float32 and bfloat16{untried}"


def _engine_tp(hf_config: dict) -> tuple[int, str]:
    """Returns over how many ranks an engine can have the model: 2, else 3, or 1 with the reason."""
    refused = ""
    for tp in (2, 3):
        try:
            engine_layout.layout(hf_config, EngineSizes(tp=tp), rank=0)
        except ConfigError as e:
            refused = refused or _reason(e)
        else:
            return tp, ""
    return 1, refused


def _shape(name: str, shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size > 1 or not name.endswith(PACKED)]


def run(subject: Subject) -> str:
    """Compares trainers and a real engine before and after updates in flight, and the export with the trainers'."""
    model, dtype, most = subject.model, "float32", 1e-5
    if subject.architecture.dimensions.linear:  # which engines on CPU compute in bfloat16 alone
        model, dtype, most = subject.folder / "bfloat16", "bfloat16", ROUNDING
        to_hf(subject.model, model, dtype=dtype)
    prompts = [{"prompt": f"<{10 + n}> <{20 + n}> <{30 + n}>", "answer": "<5>"} for n in range(64)]
    data = subject.folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    keys = {
        "name": "updates",
        "runs_dir": subject.folder,
        "model.path": model,
        "model.dtype": dtype,
        "data.train": data,
        "data.eval": "",
        "updates": 3,
        "batch_size": 32,
        "rollout.group_size": 4,
        "rollout.max_running": 32,
        "rollout.max_staleness": 1,
        "reward.function": "tests.support.rewards:short",
        "checkpoint.hf_every": 3,
    }
    command = [
        sys.executable,
        "-m",
        "areal_megatron.launch.local",
        "configs/tiny_cpu.yaml",
        *(f"{k}={v}" for k, v in keys.items()),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        raise Fault(_why(done.stdout))
    folder = RunFolder(subject.folder / "updates")
    updates = [line for line in read_metrics(folder) if line["kind"] == "update"]
    differences = [line["mismatch_mean"] for line in updates if "mismatch_mean" in line]
    if len(differences) < 2:
        raise Fault(f"trainers and engine were compared {len(differences)} times in {len(updates)} updates")
    if max(differences) > most:
        raise Fault(f"log-probabilities of engine and trainers differ by {max(differences):.1e} in the mean")
    exported = _read(max(folder.folder.rglob("model*.safetensors")).parent)
    _compare(
        {key: tuple(t.shape) for key, t in exported.items()},
        {key: tuple(t.shape) for key, t in _read(subject.model).items()},
        "the export",
        "transformers",
    )
    same = {key for key, tensor in _read(model).items() if torch.equal(exported[key], tensor)}
    if changed := [key for key in exported if key.startswith(TOWER) and key not in same]:
        raise Fault(f"the part for images has changed: {_listed(changed)}")
    if all(key in same or key.startswith(TOWER) for key in exported):
        raise Fault("nothing was learned: the export is the model that the run began with")
    return f"{len(updates)} updates in flight, log-probabilities within {max(differences):.0e} of the trainers'"


PARTS = (
    Part("table", table),
    Part("computation", computation, needs=["table"]),
    Part("training", training, needs=["computation"]),
    Part("conversion", conversion, needs=["table"]),
    Part("engines", engines, needs=["table"]),
    Part("run", run, needs=["training", "engines"]),
)


def _on_ranks(subject: Subject, check: str, world: int, what: str, **arguments: object) -> None:
    for name in arguments.get("cases", ["run"]):
        RunFolder(subject.folder / name).create()
    try:
        subject.ranks.run(subject.folder, check, world, **arguments)
    except RankFailed as e:
        raise Fault(f"{what}: {_why(str(e))}") from None


def _named(layout: dict[str, int]) -> str:
    return "·".join(f"{size}{count}" for size, count in layout.items()) or "one rank"


def _why(output: str, first: bool = False) -> str:
    """Returns the line that says why processes failed: the last error, or the first one, if others follow from it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Differs|Fault)\b.*: ", line)]
    greatest = [line for line in lines if line.startswith("Greatest absolute difference")]
    return " ".join([(errors or lines or ["no output"])[0 if first else -1], *greatest[-1:]])[:600]


def _compare(ours: dict, theirs: dict, we: str, they: str, kind: str = "shape", where: str = "") -> None:
    if lacking := [name for name in theirs if name not in ours]:
        raise Fault(f"{where}{they} has {_listed(lacking)}, which {we} lacks")
    if further := [name for name in ours if name not in theirs]:
        near = difflib.get_close_matches(further[0], theirs, 1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise Fault(f"{where}{we} has {_listed(further)}, which {they} has not{hint}")
    if different := [f"{name} {ours[name]}, not {theirs[name]}" for name in theirs if ours[name] != theirs[name]]:
        raise Fault(f"{where}{we} has another {kind} than {they}: {_listed(different)}")


def _compare_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], we: str) -> None:
    shapes = ({name: (tuple(t.shape), t.dtype) for name, t in side.items()} for side in (ours, theirs))
    _compare(*shapes, we, "transformers")
    if different := [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])]:
        raise Fault(f"{we} has other values in {_listed(different)}")


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def check(described: dict, folder: Path, names: Collection[str]) -> bool:
    """Prints the outcome of the parts of these names for the model of a config.json, and returns whether all are right.
    Raises ConfigError for one without a table, and for one of which transformers makes no model."""
    hf_config = of_language_model(described)
    architecture(hf_config)
    try:
        config = tiny.shrunk(hf_config)
        changed = [
            f"{key} {value} for {hf_config[key]}" for key, value in _numbers(config) if hf_config.get(key) != value
        ]
        print(f"a tiny model: {', '.join(changed)}", flush=True)
        if hf_config is not described:
            config = tiny.with_images(described, config)
        tensors = {own(name): tensor for name, tensor in tiny.write(config, folder / MODEL).items()}
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(TOWER)}
    except Exception as e:  # transformers raises anything for values that it does not expect
        said = printable(" ".join(f"{type(e).__name__}: {e}".split()))
        raise ConfigError(f"config.json: no tiny model can be made of it: {said}") from None
    subject = Subject(folder, tensors, architecture(read_config(folder / MODEL)), TrainerRanks())
    failed: set[str] = set()
    for part in (part for part in PARTS if part.name in names):
        begun = time.monotonic()
        if missing := failed & {*part.needs}:
            print(f"  -    {part.name:12} not tried: it needs {', '.join(sorted(missing))}", flush=True)
            failed.add(part.name)
            continue
        try:
            said, good = part.check(subject), "ok"
        except subprocess.TimeoutExpired as e:  # whose text is the whole command
            said, good = f"it has not ended within {e.timeout:.0f} s: a busy machine, or something is stuck", "FAILS"
            failed.add(part.name)
        except (ConfigError, Fault, OSError, ValueError, KeyError) as e:
            said, good = (str(e) if isinstance(e, Fault) else repr(e)), "FAILS"
            failed.add(part.name)
        print(f"{good:6} {part.name:12} {said} ({time.monotonic() - begun:.0f} s)", flush=True)
    return not failed


def _numbers(config: dict) -> Iterator[tuple[str, int]]:
    """Yields the sizes that config.json states."""
    return ((key, value) for key, value in config.items() if type(value) is int)


def _with_what_it_needs(name: str) -> set[str]:
    [part] = (part for part in PARTS if part.name == name)
    return {name}.union(*map(_with_what_it_needs, part.needs))


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    guard()
    parser = Parser(prog=PROGRAM, description=__doc__.partition("\n")[0])
    parser.add_argument("folder", metavar="HF_DIR", type=Path)
    parser.add_argument("--only", choices=[part.name for part in PARTS], help="one part, with those that it needs")
    parser.add_argument("--out", type=Path, help="where the tiny model and what becomes of it is kept")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # of libraries about themselves, here and in the processes that are started
    os.environ["PYTHONWARNINGS"] = "ignore"
    names = _with_what_it_needs(options.only) if options.only else {part.name for part in PARTS}
    try:
        described = read_whole_config(options.folder)
        architecture(of_language_model(described))
        with tempfile.TemporaryDirectory(prefix="family-") as temporary:
            folder = (options.out or Path(temporary)).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            return 0 if check(described, folder, names) else 1
    except (ConfigError, OSError) as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

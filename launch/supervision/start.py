"""What every launcher does before it starts a process: checks all that can be checked, then begins the run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint import peft
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.checkpoint.folder import SavedCheckpoint
from areal_megatron.checkpoint.hf_folder import HfFolder
from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.data.check import check_data
from areal_megatron.data.drawing import Member, goes_on, saved_in
from areal_megatron.data.dumps import check_same, check_tokens, recorded
from areal_megatron.data.dumps import read as read_dump
from areal_megatron.data.prompts import Prompt, drawing_of
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine import served
from areal_megatron.hub import hub
from areal_megatron.launch.supervision.lease import Lease
from areal_megatron.launch.supervision.orders import NodeHello
from areal_megatron.model_check import check_model
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.observe.metrics import last_saved
from areal_megatron.observe.trackers import check_trackers
from areal_megatron.planning.option_check import check_options, without_kernels
from areal_megatron.planning.plan import ClusterPlan, plan
from areal_megatron.planning.pools import Node, Placement
from areal_megatron.process.files import numbers
from areal_megatron.programs.fetch import fetch_all
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.reward.function import load_function
from areal_megatron.reward.group import load_group_function
from areal_megatron.reward.trial import try_rewards
from areal_megatron.run import descriptors, gpu_settings, versions
from areal_megatron.run.arguments import Parser, count
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.network import check_network
from areal_megatron.workflows.trial import try_workflows
from areal_megatron.workflows.workflow import check_workflow

POOLS = ("trainer", "rollout", "controller")
_SIZES = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
_LISTS, _COUNTS = "SLURM_JOB_GPUS", "SLURM_GPUS"
"""How the names begin of the variables in which Slurm tells a job of its GPUs: their numbers, and how many."""


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that all launchers have."""
    made = Parser(module, description)
    made.add_config()
    made.add_argument(
        "--restarts",
        type=count,
        default=0,
        metavar="N",
        help="start the run again from its newest checkpoint if a process fails, N times at most",
    )
    add_python(made)
    made.set_defaults(again="")
    return made


def add_python(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python",
        action=_PythonOfPool,
        default={},
        metavar="POOL=COMMAND",
        help="how Python is called for the pool trainer, rollout or controller, "
        "e.g. 'rollout=apptainer exec --nv vllm.sif python3'",
    )


class _PythonOfPool(argparse.Action):
    """Collects a command for each pool, split into words; no shell reads it."""

    def __call__(self, parser, options, value, option=None) -> None:
        pool, _, text = value.partition("=")
        try:
            command = shlex.split(text)
        except ValueError as e:
            raise argparse.ArgumentError(self, f"{text!r} is malformed: {e}") from None
        if pool not in POOLS:
            raise argparse.ArgumentError(self, f"{pool!r} is no pool; expected one of {', '.join(POOLS)}")
        if not command or not shutil.which(command[0]):
            raise argparse.ArgumentError(self, f"there is no program {command[0] if command else ''!r} on this node")
        options.python = options.python | {pool: command}


@dataclass(frozen=True)
class Beginning:
    """A run that has passed all checks and can begin."""

    config: Config
    """The run's, with what the launcher has decided."""
    run: RunFolder
    plan: ClusterPlan
    checkpoint: SavedCheckpoint | None
    """None: the run begins with the model of model.path."""

    def begin(self) -> None:
        """Begins an incarnation. Raises Replaced, and ConfigError if the run folder cannot be written."""
        with _writing(self.run):
            self.run.look()
            if self.config.resume and not self.checkpoint:  # as also where a file system is not mounted
                lacks = "checkpoint" if self.run.has_begun() else "run"
                print(
                    f"no {lacks} in {self.run.folder}: it begins from model.path={self.config.model.path}", flush=True
                )
            self.run.renew_secret()
            config_file.save(self.config, self.run.config)
            begin(self.run, self.checkpoint)


@contextmanager
def lease(config: Config) -> Iterator[Lease]:
    """Holds the lease on the config's run. To be taken before anything slow: a second start is to be told at once.

    Leaves no folder of a run that never began. Raises ConfigError if the run exists and is not to be resumed, if others
    may write its folder, if that cannot be written, or if another launcher runs it.
    """
    run = RunFolder(config.run_dir)
    with ExitStack() as stack:
        with _writing(run):
            made = is_new(config)
            if not made:
                run.make_private()  # what others may have replaced is drawn anew when the run begins
            held = stack.enter_context(Lease(run, config.machine.lease_s))
        try:
            yield held
        finally:
            if made and not run.began:
                held.rest()
                run.discard()


def is_new(config: Config) -> bool:
    """Returns whether the config's run has no folder yet. Raises ConfigError if it has one and is not to be resumed."""
    run = RunFolder(config.run_dir)
    if not os.path.lexists(run.folder):
        return True
    if not run.folder.is_dir():
        raise ConfigError(f"{config.run_dir} is no folder, or links to one that is not there (not mounted?)")
    if not config.resume and (not run.leases.exists() or run.has_begun()):
        raise _is_there(config)
    return False


def check_begun(config: Config) -> None:
    """Raises ConfigError if incarnations of the config's run can be seen, and it is not to be resumed; OSError."""
    if not config.resume and numbers(RunFolder(config.run_dir).incarnations):
        raise _is_there(config)


def _is_there(config: Config) -> ConfigError:
    return ConfigError(
        f"{config.run_dir} exists: choose another name=…, continue it with resume=auto, or remove it once it has ended"
    )


def _check_place(folder: Path) -> None:
    """Raises ConfigError if no folder can be made in `folder`, and makes none."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not os.path.isdir(there) or not os.access(there, os.W_OK):
        raise ConfigError(f"runs_dir: {there} is no folder that can be written: give another with runs_dir=…")


@contextmanager
def _writing(run: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as e:  # as of a full disk
        raise ConfigError(f"runs_dir: {run.folder} cannot be written: {e.strerror or e}") from e


def check_nodes(
    config: Config, found: Sequence[NodeHello], run: RunFolder | None, python: Mapping[str, Sequence[str]]
) -> Beginning:
    """Checks everything on nodes whose supervisors have said what they have; the arguments are as for check. Raises
    ConfigError."""
    check_network(config.machine.host, {hello.machine for hello in found})
    config.machine.device = decide_device(config, {hello.supervisor: hello.gpus for hello in found})
    if config.machine.device == "cpu":
        print("the run computes on CPU cores, not on GPUs", flush=True)
    check_packages(config, python)
    trainers, engines = (
        [describe(hello, config) for hello in found if (hello.pool == "rollout") is of_engines]
        for of_engines in (False, True)
    )
    return check(config, trainers, engines, min(hello.gpu_gib for hello in found), run, python)


def describe(hello: NodeHello, config: Config) -> Node:
    """Returns the node with the slots that the config uses; machine.device must be decided."""
    if config.machine.device != "cuda":
        return Node(hello.supervisor, tuple(range(config.machine.slots or hello.cpus)), files=hello.files)
    return Node(hello.supervisor, tuple(hello.gpus[: config.machine.slots or None]), hello.cpus, hello.files)


def check(
    config: Config,
    nodes: Sequence[Node],
    rollout_nodes: Sequence[Node] = (),
    gpu_gib: float = 0,
    run: RunFolder | None = None,
    python: Mapping[str, Sequence[str]] = {},
) -> Beginning:
    """Checks everything and returns the run; the first arguments are as for plan.plan. Raises ConfigError.

    `run`: the config's, as its launcher holds it; None: nothing is to be started, and of a model on the hub only the
    description is fetched, and its weights are checked if they are here. `python`: as check_packages.
    """
    if config.machine.device == "cuda":
        gpu_settings.check(os.environ | gpu_settings.SETTINGS)  # which every process is given
    fetched = run is not None or os.path.exists(config.model.path)
    check_trackers(config.track)
    if run is None:
        _check_place(Path(config.runs_dir))
    fetch_all(config, run, fetched)
    adapters = (model.adapter for model in config.served_models.values())
    models = filter(None, (config.lora.start, *adapters, *_models(config).values()))
    weights = fetched or all(map(hub.has_weights, models))
    outcome = plan(config, nodes, rollout_nodes, gpu_gib=gpu_gib, weights=weights)
    for name, model in config.served_models.items():
        model.max_length = served.longest(config, name)
    if outcome.memory.shared and not gpu_gib:
        raise ConfigError(
            "machine.shared: nvidia-smi does not say how much memory these GPUs have, which the pools are to divide: "
            "put it on the PATH, or give each pool GPUs of its own"
        )
    check_open_files(config, outcome.placement)
    slow = [] if "trainer" in python else without_kernels(config)
    for warning in [*outcome.warnings, *check_options(config, python), *slow]:
        print(f"warning: {warning}", file=sys.stderr)
    members = check_input(config, weights)
    if weights:
        _check_tensors(config)
    held, run = run is not None, run or RunFolder(config.run_dir)
    checkpoint = _resumed(config, run, held)
    if checkpoint:
        _check_same_run(config, run, checkpoint)
        peft.check_resumed(config, read_config(config.model.path), checkpoint.folder)
    if config.mode == "replay":
        _check_replay(config, run, checkpoint)
    elif checkpoint and config.has_data:
        _check_same_data(config, run, checkpoint, members)
    if config.checkpoint.every:
        size = checkpoint_folder.size(checkpoint.folder) if checkpoint else outcome.memory.checkpoint
        if warning := checkpoint_folder.shortage(run, config.checkpoint, size):
            print(f"warning: {warning}", file=sys.stderr)
    return Beginning(outcome.memory.recompute.apply(config), run, outcome, checkpoint)


def check_open_files(config: Config, placement: Placement) -> None:
    """Raises ConfigError if a process of the run may open fewer files than it needs on its node."""
    files = {node.name: node.files for node in placement.nodes if node.files}
    for process in placement.processes:
        if process.pool == "controller" and config.has_engines and process.node in files:
            descriptors.check(config, files[process.node])
        if process.pool == "trainer" and process.node in files:
            descriptors.check_trainer(config, files[process.node])


def check_packages(config: Config, python: Mapping[str, Sequence[str]], pools: Sequence[str] = POOLS) -> None:
    """Raises ConfigError if one of `pools` cannot run with the packages of this interpreter. A pool to which `python`
    gives another is left out: its processes look themselves, when they start."""
    needed = {"trainer", "rollout"} if config.has_engines else {"trainer"}
    for pool in pools:
        if pool in needed and pool not in python and (problem := versions.problem(pool, config)):
            raise ConfigError(problem)


def decide_device(config: Config, gpus: Mapping[str, Sequence[int | str]]) -> str:
    """Returns machine.device, where `auto` is decided by the GPUs that each node gives, by its name.

    Raises ConfigError if only some nodes have GPUs, or if none has although config or job asked for them: a run meant
    for GPUs is never to be on cores.
    """
    if config.machine.device == "cpu":
        return "cpu"
    without = [name for name, own in gpus.items() if not own]
    asked = [n for n, v in os.environ.items() if v and (n.startswith(_LISTS) or (n.startswith(_COUNTS) and v != "0"))]
    if config.machine.device == "auto" and len(without) == len(gpus) and not asked:
        return "cpu"
    if without:
        named = ", ".join(without[:3]) + f" and {len(without) - 3} more" * (len(without) > 3)
        meant = [f"machine.device={config.machine.device}", *asked[:1]]
        meant += ["other nodes have some"] * (len(without) < len(gpus))
        raise ConfigError(
            f"no GPU for this run on {named} ({', '.join(meant)}): ask for them, e.g. sbatch --gpus-per-node=8, see "
            "whether nvidia-smi lists them there, or choose the cores with machine.device=cpu"
        )
    return "cuda"


def check_input(config: Config, weights: bool = True) -> Sequence[Member]:
    """Checks what can be checked without nodes, of a config whose models and data are on this disk; `weights`: the
    models' weights too. Returns what data.train holds, nothing for a replay. Raises ConfigError."""
    members: Sequence[Member] = ()
    check_model(config, weights)
    if config.has_data:
        members = check_data(config, lambda line: print(line, file=sys.stderr), problem_with_answers)
    for own in config.by_environment() if config.mode == "rl" else ():
        if not own.reward.of_served:
            load_function(own.reward.function, own.reward.timeout_s)
        if own.reward.group_function:
            load_group_function(own.reward.group_function)
        check_workflow(own)
    if config.mode == "rl":
        prompts = cast(Sequence[Prompt], members)
        try_rewards(config, prompts, lambda line: print(line, file=sys.stderr))
        try_workflows(config, prompts, lambda line: print(line, file=sys.stderr))
    return members


def _models(config: Config) -> dict[str, str]:
    """Returns the folder of each model of the run by its key, empty for one that there is none of."""
    models = {"model.path": config.model.path, "ppo.penalty.kl_model": config.ppo.penalty.kl_folder}
    return models | {f"served.{name}.path": model.path for name, model in config.served_models.items()}


def _check_tensors(config: Config) -> None:
    """Raises ConfigError unless each model has the tensors that its config.json asks for, and no others: those would be
    left out, by engines too, without a word."""
    for key, path in _models(config).items():
        try:
            if path:
                HfFolder.of_model(Path(path), read_config(path)).close()
        except CheckpointError as e:
            raise ConfigError(f"{key}: {e}") from None
    if config.lora.start:
        try:
            with closing(peft.open_start(config, read_config(config.model.path))) as adapter:
                adapter.check_finite()
        except CheckpointError as e:
            raise ConfigError(f"lora.start: {e}") from None
        if note := peft.note_of_base(config.lora.start, config.model.path):
            print(f"note: lora.start: {note}", file=sys.stderr)
    check_adapters(config)


def check_adapters(config: Config) -> None:
    """Raises ConfigError for an adapter of a served model that its engines cannot apply to it."""
    for name, model in config.served_models.items():
        if model.adapter:
            try:
                peft.for_engines(Path(model.adapter), architecture(read_config(model.path)))
            except ConfigError as e:
                raise ConfigError(f"served.{name}.adapter: {e}") from None
            if note := peft.note_of_base(model.adapter, model.path):
                print(f"note: served.{name}.adapter: {note}", file=sys.stderr)


def _check_same_run(config: Config, run: RunFolder, checkpoint: SavedCheckpoint) -> None:
    """Raises ConfigError if a checkpoint is this run's and was made in another mode, if it is another model's, or if it
    has more updates than the run is to make."""
    if checkpoint.folder.parent == run.checkpoints and run.config.exists():
        before = config
        with suppress(ConfigError):  # of a version of this project with other keys
            before = config_file.load(run.config)
        if config.mode != before.mode:
            raise ConfigError(
                f"mode: {config.mode}, but {run.folder} is a run with mode={before.mode}: choose another name=…"
            )
    own, made = (read_config(folder) for folder in (config.model.path, checkpoint.hf))
    for key in _SIZES:
        if key in own and key in made and own[key] != made[key]:
            raise ConfigError(
                f"model.path: {config.model.path} has {key}={own[key]}, and the model of {checkpoint.folder} "
                f"{made[key]}: continue with the same model"
            )
    if checkpoint.batches > config.updates and not config.is_driven:
        raise ConfigError(
            f"updates: {config.updates}, but {checkpoint.folder} is already at version {checkpoint.version}: give "
            f"updates above {checkpoint.batches}"
        )


def _check_same_data(config: Config, run: RunFolder, checkpoint: SavedCheckpoint, members: Sequence[Member]) -> None:
    """Raises ConfigError if a checkpoint of this run was made with other rows, or anything else on which its answers
    depend; warns if it is another run's."""
    if saved := saved_in(checkpoint.folder):
        now = drawing_of(config, members, Tokenizer(config.model.path))
        own = checkpoint.folder.parent == run.checkpoints
        goes_on(saved, now, members, checkpoint.folder, own, lambda line: print(f"warning: {line}", file=sys.stderr))


def _check_replay(config: Config, run: RunFolder, checkpoint: SavedCheckpoint | None) -> None:
    """Raises ConfigError if the folder lacks batches that the replay needs."""
    folder = Path(config.data.train)
    if folder.absolute().is_relative_to(run.folder):
        raise ConfigError(f"name: {config.name} is the run whose batches are replayed; choose another name=…")
    if checkpoint and checkpoint.folder.parent == run.checkpoints:
        check_same(folder, checkpoint.folder)
    first = recorded(folder, checkpoint.batches if checkpoint else 0, config.batch_size)[0]
    check_tokens(read_dump(first), first, read_config(config.model.path)["vocab_size"])


def begin(run: RunFolder, checkpoint: SavedCheckpoint | None, keep: Collection[str] = ()) -> None:
    """Begins an incarnation, from the checkpoint or from the start. `keep`: names of the processes that stay alive."""
    if checkpoint is None:
        run.begin()
        return
    alive = f"; {len(keep)} engines keep running" if keep else ""
    print(f"resuming from {checkpoint.folder}, policy version {checkpoint.version}{alive}", flush=True)
    run.begin(
        version=checkpoint.version,
        batches=checkpoint.batches,
        checkpoint=str(checkpoint.folder),
        after=checkpoint.incarnation if checkpoint.folder.parent == run.checkpoints else None,
        keep=keep,
    )


def newest(run: RunFolder, held: bool = True) -> SavedCheckpoint | None:
    """Returns the checkpoint from which the run goes on, if there is one, and warns of newer ones that are broken.

    `held`: this process holds the lease, and so may put checkpoints right. Raises ConfigError if there are checkpoints
    and all of them are broken, if there are none although some were saved, or if their folder is gone.
    """
    try:
        if held:
            checkpoint_folder.put_back(run)
        checkpoint, problems = checkpoint_folder.resumable(run)
    except FileNotFoundError as e:
        raise ConfigError(
            f"resume: {e.filename} is not there although {run.folder} has been run: put it back, or begin anew under "
            "another name=…"
        ) from None
    if problems and not checkpoint:
        raise ConfigError(
            f"resume: no checkpoint in {run.checkpoints} is whole; {problems[0]}: put a copy of it back, or begin anew "
            "under another name=…"
        )
    if not checkpoint and (version := last_saved(run)) is not None:
        raise ConfigError(
            f"resume: {run.checkpoints} is empty although that of version {version} was saved (not mounted, or "
            "cleared?): put it back, or begin anew under another name=…"
        )
    for problem in problems:
        print(f"warning: {problem}; resuming from the one before", file=sys.stderr)
    return checkpoint


def _resumed(config: Config, run: RunFolder, held: bool) -> SavedCheckpoint | None:
    """Returns the checkpoint that `resume` names; None: begin from the start. Raises ConfigError."""
    if config.resume not in ("", "auto"):
        return checkpoint_folder.read(Path(config.resume).absolute())
    return newest(run, held) if config.resume and (held or run.folder.exists()) else None

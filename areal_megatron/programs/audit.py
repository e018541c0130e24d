"""Checks that a run lost nothing and trained nothing twice, however often it was interrupted.

    areal audit runs/NAME

Joins the ledgers that the trainer ranks wrote (ledger/) with the incarnations of the run and with the controller's
state in the newest checkpoint. Only the surviving line counts: work after a checkpoint from which the run was resumed
has been done again. Exit code 0: clean, 1: faults, a line each, 2: no such run.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint.folder import SavedCheckpoint
from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.controller import state
from areal_megatron.controller.schedule import FILTERED, TRAINED
from areal_megatron.data.prompts import Cursor, digest_of_prompt, drawing_of, pass_rate_of, teacher_of, usable_rows
from areal_megatron.data.prompts import cursor as cursor_of
from areal_megatron.process.shown import guard
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import IncarnationStart, RunFolder, line_of
from areal_megatron.run.json_input import read_record

Prompt = tuple[int, int]
"""(epoch, prompt_id)"""


@dataclass(frozen=True)
class Batch:
    """One batch of the surviving line, with the parts of all replicas."""

    number: int
    version: int
    applied: bool
    uids: list[int]
    """The episode of each trajectory."""
    samples: list[int]
    """Which of its samples each one is."""
    of_samples: list[int]
    """How many samples its episode has."""
    admitted: list[int]
    """The admission version of each trajectory."""
    prompts: list[Prompt]
    """The prompt of each trajectory."""
    max_staleness: int
    """η of the incarnation that trained it."""
    group_size: int
    """The n of the incarnation that trained it."""
    other_prompt: list[int]
    """Episodes with a sample that was trained after another prompt than it was sampled from."""


def audit(run: RunFolder) -> list[str]:
    """Returns the faults of the run, a line each. Raises ConfigError if there is no such run."""
    config = config_file.load_run(run.folder)
    if config.is_driven:
        raise ConfigError(f"{run.folder}: a program has driven this run, and keeps its own account of what was trained")
    batches, faults = surviving(run, config)
    faults += check_versions(run.starts(), batches)
    faults += check_trajectories(batches)
    checkpoint, problems = checkpoint_folder.newest(run)
    faults += problems
    faults += check_distance(config, checkpoint, batches)
    if checkpoint and config.mode == "rl":
        faults += check_dispositions(config, checkpoint, batches)
    return faults


def surviving(run: RunFolder, config: Config) -> tuple[list[Batch], list[str]]:
    """Returns the batches that are in the ledgers of all replicas, and faults where the ledgers disagree."""
    batches, faults = [], []
    for start, end in line_of(run.starts()):
        own = [_parts(ledger) for ledger in _ledgers(run, config, start.incarnation)]
        for number, parts in enumerate(itertools.zip_longest(*own), start.batches):
            if end is not None and number >= end:
                break
            if None in parts:
                if end is not None:
                    faults.append(f"batch {number} is missing in the ledger of replica {parts.index(None)}")
                break  # the run died before that replica had written it
            if len({(part.version, part.applied) for part in parts}) > 1:
                faults.append(f"batch {number}: replicas disagree on its version or whether it was applied")
            batches.append(
                Batch(
                    number,
                    parts[0].version,
                    parts[0].applied,
                    [uid for part in parts for uid in part.uids],
                    [sample for part in parts for sample in part.samples],
                    [count for part in parts for count in part.of_samples],
                    [version for part in parts for version in part.admission_versions],
                    [prompt for part in parts for prompt in part.prompts],
                    parts[0].max_staleness,
                    parts[0].group_size,
                    [uid for part in parts for uid in part.trained_after_another_prompt],
                )
            )
        if end is not None and number_after(batches, start) < end:
            faults.append(
                f"the ledger of incarnation {start.incarnation} ends before batch {end}, from which the run resumed"
            )
    return batches, faults


def number_after(batches: list[Batch], start: IncarnationStart) -> int:
    """Returns the number of the batch after the last of `batches`, or the first of the incarnation."""
    return batches[-1].number + 1 if batches else start.batches


def check_versions(starts: list[IncarnationStart], batches: list[Batch]) -> list[str]:
    """Checks that every batch trains the version that the one before it produced."""
    faults = []
    expected = line_of(starts)[0][0].version if starts else 0
    for batch in batches:
        if batch.version != expected:
            faults.append(f"batch {batch.number} trained version {batch.version}, the policy was at {expected}")
        expected = batch.version + batch.applied
    return faults


def check_trajectories(batches: list[Batch]) -> list[str]:
    """Checks that no sample comes twice, is too stale or was sampled from another prompt than it was trained after,
    and that all episodes of a prompt are in one batch, each with all its samples."""
    faults = [
        f"sample {sample} of episode {uid} was trained {count} times"
        for (uid, sample), count in Counter(one for b in batches for one in zip(b.uids, b.samples, strict=True)).items()
        if count > 1
    ]
    seen: dict[Prompt, int] = {}
    for batch in batches:
        faults += _incomplete(batch)
        for prompt, count in Counter(prompt for prompt, _ in {*zip(batch.prompts, batch.uids, strict=True)}).items():
            if count != batch.group_size:
                faults.append(
                    f"{_name(prompt)}: {count} episodes in batch {batch.number}, a group has {batch.group_size}"
                )
            if seen.setdefault(prompt, batch.number) != batch.number:
                faults.append(f"{_name(prompt)} was trained in batch {seen[prompt]} and in batch {batch.number}")
        for uid, admitted in zip(batch.uids, batch.admitted, strict=True):
            if not 0 <= batch.version - admitted <= batch.max_staleness:
                faults.append(f"episode {uid}, admitted at version {admitted}, was trained by version {batch.version}")
        faults += [
            f"episode {uid} was trained after another prompt than it was sampled from" for uid in batch.other_prompt
        ]
    return faults


def _incomplete(batch: Batch) -> list[str]:
    """A fault for each episode of which there are not all samples."""
    missing: dict[int, set[int]] = {}
    for uid, sample, count in zip(batch.uids, batch.samples, batch.of_samples, strict=True):
        missing.setdefault(uid, {*range(count)}).discard(sample)
    return [
        f"episode {uid}: sample {min(lost)} is missing in batch {batch.number}" for uid, lost in missing.items() if lost
    ]


def check_dispositions(config: Config, checkpoint: SavedCheckpoint, batches: list[Batch]) -> list[str]:
    """Checks the controller's disposition of each prompt that it drew before the checkpoint against the ledgers."""
    saved, members = state.read(checkpoint.controller), rows_of(config)
    if difference := saved.difference(drawing_of(config, members), members):
        return [f"{difference}: what became of its prompts cannot be told without the rows that it was made with"]
    ids, cursor = [member.id for member in members], cursor_of(config, members)
    said: dict[Prompt, str] = {}
    faults = []
    claims = [((epoch, prompt), kind) for epoch, prompt, kind in saved.schedule.dispositions]
    claims += [((group.epoch, group.prompt_id), "waiting to be trained") for group in saved.schedule.finished]
    claims += [((group.epoch, group.prompt_id), "interrupted") for group in saved.schedule.interrupted]
    claims += [(prompt, "to be generated again") for prompt in saved.again]
    for prompt, kind in claims:
        if prompt in said:
            faults.append(f"{_name(prompt)} is {said[prompt]} and {kind}")
        said[prompt] = kind
    drawn = drawn_before(saved.cursor, cursor, ids)
    faults += [f"{_name(prompt)} was drawn and is lost" for prompt in sorted(drawn - said.keys())]
    faults += [f"{_name(prompt)} is {said[prompt]}, but was never drawn" for prompt in sorted(said.keys() - drawn)]
    before = [batch for batch in batches if batch.number < checkpoint.batches]
    trained = {prompt for batch in before if batch.applied for prompt in batch.prompts}
    claimed = {prompt for prompt, kind in said.items() if kind == TRAINED}
    if not batches or batches[0].number == 0:  # else the run began with the checkpoint of another
        faults += [
            f"{_name(prompt)} counts as trained, but no trainer trained it" for prompt in sorted(claimed - trained)
        ]
    faults += [
        f"{_name(prompt)} was trained, but is {said.get(prompt, 'unknown')}" for prompt in sorted(trained - claimed)
    ]
    return faults


def check_distance(config: Config, checkpoint: SavedCheckpoint | None, batches: list[Batch]) -> list[str]:
    """Checks that the newest checkpoint is as new as checkpoint.every has it: at each saved version training waits
    until the previous checkpoint is whole, so two are missing only if one was lost."""
    every = config.checkpoint.every
    trained = [batch.version + 1 for batch in batches if batch.applied]
    version = checkpoint.version if checkpoint else batches[0].version if batches else 0
    if not every or not trained or (distance := trained[-1] - version) <= 2 * every:
        return []
    behind = f"is {distance} versions older than" if checkpoint else f"is missing, {distance} versions before"
    which = f", of version {version}," * (checkpoint is not None)
    return [f"the newest checkpoint{which} {behind} the newest batch that was trained; checkpoint.every is {every}"]


@dataclass(frozen=True)
class AuditedRow:
    """A row of data.train, of which the audit needs no tokens."""

    id: int
    source: int
    environment: int
    pass_rate: float | None
    digest: bytes
    where: str


def rows_of(config: Config) -> list[AuditedRow]:
    """Returns the usable rows of data.train, in the order of their ids. Raises ConfigError."""
    environments = config.by_environment()
    return [
        AuditedRow(
            record.id,
            record.source,
            record.environment,
            pass_rate_of(record),
            digest_of_prompt(record, item, environments, teacher_of(record, config)),
            record.where,
        )
        for record, item in usable_rows(config, "train", problem_with_answers)
    ]


def drawn_before(at: tuple[int, int], cursor: Cursor, ids: list[int]) -> set[Prompt]:
    drawn = set()
    while cursor.at < tuple(at):
        epoch, position = cursor.next()
        drawn.add((epoch, ids[position]))
    return drawn


class _Part(msgspec.Struct):
    """A line of a ledger: what one replica has trained of a batch."""

    version: int
    applied: bool
    uids: list[int]
    samples: list[int]
    of_samples: list[Annotated[int, Meta(ge=1, le=2**20)]]
    admission_versions: list[int]
    prompts: list[Prompt]
    max_staleness: int
    group_size: int
    replicas: Annotated[int, Meta(ge=1, le=2**20)]
    sampled_from: list[int | None]
    """A checksum of the prompt that each trajectory was sampled from; None if no engine was asked."""
    trained_from: list[int]
    """Likewise of the prompt that it was trained with."""

    def __post_init__(self) -> None:
        columns = (self.uids, self.samples, self.of_samples, self.admission_versions, self.prompts)
        if len({*map(len, (*columns, self.sampled_from, self.trained_from))}) > 1:
            raise ValueError("lists of different lengths")

    @property
    def trained_after_another_prompt(self) -> list[int]:
        """The episodes of trajectories that were trained with another prompt than the sampler had."""
        checksums = zip(self.uids, self.sampled_from, self.trained_from, strict=True)
        return [uid for uid, sampled, trained in checksums if sampled is not None and sampled != trained]


def _ledgers(run: RunFolder, config: Config, incarnation: int) -> list[Path]:
    """Returns the ledger of each replica of an incarnation: trainer.dp may have been another one than now."""
    first = _parts(run.ledger(0, incarnation))
    replicas = first[0].replicas if first else config.trainer.dp
    return [run.ledger(replica, incarnation) for replica in range(replicas)]


def _parts(ledger: Path) -> list[_Part]:
    """Returns the complete lines; one that was being written when the run died is left out. Raises ConfigError."""
    if not ledger.exists():
        return []
    lines = enumerate(ledger.read_bytes().split(b"\n")[:-1], 1)
    try:
        return [read_record(line, _Part, f"{ledger}:{number}") for number, line in lines]
    except ConfigError as e:
        raise ConfigError(f"{e}; put a copy of it back: nothing else says what was trained") from None


def _name(prompt: Prompt) -> str:
    return f"prompt {prompt[1]} of epoch {prompt[0]}"


def main() -> int:
    guard()
    parser = Parser("areal_megatron.programs.audit", __doc__)
    parser.add_argument("run", type=Path, help="run folder, e.g. runs/demo")
    run = RunFolder(parser.parse_args().run)
    try:
        return _tell(run, audit(run))
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
    except OSError as e:
        print(f"error: {e.filename or run.folder} cannot be read: {e.strerror}", file=sys.stderr)
    return 2


def _tell(run: RunFolder, faults: list[str]) -> int:
    for fault in faults:
        print(fault)
    config = config_file.load(run.config)
    batches, _ = surviving(run, config)
    checkpoint, _ = checkpoint_folder.newest(run)
    kinds = Counter()
    if checkpoint and config.mode == "rl":
        dispositions = state.read(checkpoint.controller).schedule.dispositions
        kinds = Counter(kind.partition(":")[0] for _, _, kind in dispositions)
    print(
        f"{len(faults)} faults in {len(batches)} batches of {len(run.starts())} incarnations; at the newest checkpoint "
        f"{kinds[TRAINED]} prompts trained, {kinds[FILTERED]} filtered, {kinds['skipped']} skipped"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

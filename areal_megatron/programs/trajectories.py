"""Lists the trajectories that a run has trained, or shows one with coloured tokens.

    areal trajectories RUN [--version 3..7] [--prompt 12] [--reward 5] [--staleness 1..]
                                          [--length ..100] [--truncated yes] [--json]
    areal trajectories RUN --show UID [--colour version|logprob|ratio] [--model FOLDER]

RUN is a run folder with trajectories (rollout.dump=true) or one batch-*.msgpack of it. A range is one value or
`LOW..HIGH`, of which either end may be left out; write `--reward=-5..0` if it begins with a minus. `--colour ratio`
shows log π_model − log π_behav with the model of --model, a Hugging Face folder such as RUN/hf. `--json` prints a line
for each trajectory, with its tokens. Exit code 0: done, 2: wrong input.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.text import Text

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.data.dumps import dumped, read
from areal_megatron.data.pieces import pieces
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import Trajectory, trained_by_version
from areal_megatron.hub import hub
from areal_megatron.process.errors import first_line
from areal_megatron.process.shown import escaped, guard
from areal_megatron.process.terminal import Terminal
from areal_megatron.run import versions
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import RunFolder

VERSIONS = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""Colours of policy versions, repeating."""
LOW_LOGPROB = -5.0
"""Tokens with this log-probability or less have the full colour."""
HIGH_RATIO = 0.5
"""Tokens with this absolute log-ratio or more have the full colour."""
COLUMNS = "{:>8}  {:>7}  {:>10}  {:>8}  {:>9}  {:>6}  {:>3}  {:>8}  {}"


@dataclass(frozen=True)
class TrainedTrajectory:
    """A trajectory and where it was trained."""

    batch: int
    version: int
    trajectory: Trajectory

    @property
    def staleness(self) -> int:
        return self.version - self.trajectory.admission_version


FILTERS: dict[str, tuple[Callable[[TrainedTrajectory], float], str]] = {
    "version": (lambda t: t.version, "policy version that was trained"),
    "prompt": (lambda t: t.trajectory.prompt_id, "row of data.train, from 0"),
    "epoch": (lambda t: t.trajectory.epoch, "of the prompts"),
    "reward": (lambda t: nan if t.trajectory.failed else t.trajectory.reward, "of the episode, if it is known"),
    "staleness": (lambda t: t.staleness, "versions between admission and training"),
    "length": (lambda t: len(t.trajectory.response), "tokens of the answer"),
}


def chosen(place: Path, options: argparse.Namespace) -> Iterator[TrainedTrajectory]:
    """Yields the trajectories that pass the filters, with one batch in memory at a time. Raises ConfigError."""
    ranges = {name: bounds for name in FILTERS if (bounds := getattr(options, name))}
    for path in dumped(RunFolder(place).trajectories).values() if os.path.isdir(place) else [place]:
        dump = read(path)
        for trajectory in dump.trajectories:
            found = TrainedTrajectory(dump.number, dump.version, trajectory)
            if options.show not in (None, str(trajectory.uid), f"{trajectory.uid}.{trajectory.sample}"):
                continue
            if options.truncated and (options.truncated == "yes") != trajectory.cut:
                continue
            if all(low <= FILTERS[name][0](found) <= high for name, (low, high) in ranges.items()):
                yield found


def span(text: str) -> tuple[float, float]:
    """Parses `LOW..HIGH`, `LOW..`, `..HIGH` or one value. Raises ArgumentTypeError."""
    low, dots, high = text.partition("..")
    try:
        return (float(low or "-inf"), float(high or "inf")) if dots else (float(low), float(low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or LOW..HIGH, LOW.. or ..HIGH, is {text!r}") from None


def styles(trained: TrainedTrajectory, colour: str, ratios: np.ndarray | None) -> list[str]:
    """Returns a style of rich for each token of the answer; tokens that are not trained are struck out."""
    trajectory = trained.trajectory
    if colour == "version":
        found = [VERSIONS[version % len(VERSIONS)] for version in trajectory.versions]
    elif colour == "logprob":
        found = [_mixed(logprob / LOW_LOGPROB, (255, 60, 60)) for logprob in trajectory.logprobs.tolist()]
    else:
        assert ratios is not None
        found = [
            _mixed(abs(ratio) / HIGH_RATIO, (80, 160, 255) if ratio > 0 else (255, 60, 60)) for ratio in ratios.tolist()
        ]
    return [style if mask else f"{style} strike" for style, mask in zip(found, trajectory.loss_mask, strict=True)]


def _mixed(share: float, colour: tuple[int, int, int]) -> str:
    share = min(max(share, 0.0), 1.0)
    red, green, blue = (round(200 + share * (target - 200)) for target in colour)
    return f"rgb({red},{green},{blue})"


@cache
def _network(model: Path):
    try:
        import torch  # slow to import, and needed for ratios only
    except ModuleNotFoundError as e:
        raise versions.lacking(e) from None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    except (OSError, ValueError) as e:
        raise ConfigError(f"--model: {model} cannot be loaded: {first_line(e)}") from None
    return found.to("cuda" if torch.cuda.is_available() else "cpu")


def logprobs_under(model: Path, trajectory: Trajectory, temperature: float) -> np.ndarray:
    """Returns log-probabilities, float32 [R], of the answer's tokens under a Hugging Face model. Raises ConfigError."""
    import torch

    network = _network(model)
    tokens = torch.tensor(np.concatenate([trajectory.prompt, trajectory.response]), device=network.device).long()
    known, largest = network.get_input_embeddings().num_embeddings, int(tokens.max())
    if largest >= known:
        raise ConfigError(f"--model: {model} has {known} tokens, and the trajectory has token {largest}")
    with torch.inference_mode():
        logits = network(tokens[None]).logits[0, len(trajectory.prompt) - 1 : -1].float() / temperature
        answer = tokens[len(trajectory.prompt) :, None]
        return torch.log_softmax(logits, -1).gather(-1, answer)[:, 0].cpu().numpy()


def show(trained: TrainedTrajectory, tokenizer: Tokenizer, colour: str, ratios: np.ndarray | None) -> Text:
    """Returns everything known about a trajectory, a legend and the coloured text."""
    t = trained.trajectory
    text = Text()
    text.append(
        f"trajectory {t.name}: prompt {t.prompt_id} of epoch {t.epoch}, admitted at version {t.admission_version}, "
        f"trained in batch {trained.batch} by version {trained.version} (staleness {trained.staleness})\n"
        f"reward {_reward(t)}{_returns(t)}, {len(t.prompt)} + {len(t.response)} tokens, "
        f"{int(t.loss_mask.sum())} of them trained{', cut' if t.cut else ''}\n"
    )
    text.append_text(_legend(t, colour, ratios))
    text.append("\n\n" + tokenizer.decode(t.prompt.tolist(), special=True), "dim")
    position, of_tokens = 0, styles(trained, colour, ratios)
    for count, piece in pieces(tokenizer, t.response.tolist()):
        text.append(piece, of_tokens[position])
        position += count
    return text


def _reward(t: Trajectory) -> str:
    return "unknown" if t.failed else f"{t.reward:g}"


def _returns(t: Trajectory) -> str:
    return f" (returns {', '.join(f'{value:g}' for _, value in t.returns)})" if t.returns else ""


def _legend(t: Trajectory, colour: str, ratios: np.ndarray | None) -> Text:
    if colour == "version":
        counts = trained_by_version(t.versions, t.loss_mask)
        parts = [(f"version {v}: {count} trained", VERSIONS[v % len(VERSIONS)]) for v, count in counts.items()]
        left = len(t.response) - sum(counts.values())
        parts += [(f"not trained: {left}", "strike")] if left else []
        return Text("  ").join(Text(*part) for part in parts)
    values, ends = (t.logprobs, (LOW_LOGPROB, 0)) if colour == "logprob" else (ratios, (-HIGH_RATIO, HIGH_RATIO))
    assert values is not None
    what = "log-probability" if colour == "logprob" else "log π_model − log π_behav"
    line, trained = f"{what}: ", values[t.loss_mask == 1]
    if len(trained):
        line += f"mean of trained tokens {trained.mean():.4f}, from {trained.min():.4f} to {trained.max():.4f}; "
    red, other = ("rgb(255,60,60)", "rgb(200,200,200)" if colour == "logprob" else "rgb(80,160,255)")
    return Text(f"{line}colours from ").append(f"{ends[0]:g}", red).append(" to ").append(f"{ends[1]:g}", other)


def described(trained: TrainedTrajectory, tokenizer: Tokenizer, ratios: np.ndarray | None) -> dict[str, object]:
    """Returns a trajectory as an object for JSON."""
    t = trained.trajectory
    names = ("uid", "sample", "epoch", "prompt_id", "admission_version", "reward", "returns", "failed")
    names += ("correct", "truncated")
    found = {name: getattr(t, name) for name in names}
    found |= {"batch": trained.batch, "version": trained.version, "staleness": trained.staleness}
    found |= {"prompt": tokenizer.decode(t.prompt.tolist()), "response": tokenizer.decode(t.response.tolist())}
    arrays = {
        "prompt_tokens": t.prompt,
        "tokens": t.response,
        "logprobs": t.logprobs,
        "versions": t.versions,
        "loss_mask": t.loss_mask,
    }
    arrays |= {} if ratios is None else {"log_ratios": ratios}
    return found | {name: array.tolist() for name, array in arrays.items()}


def print_table(found: Iterator[TrainedTrajectory], tokenizer: Tokenizer, width: int) -> None:
    print(COLUMNS.format("uid", "trained", "prompt", "reward", "staleness", "tokens", "cut", "versions", "answer"))
    count, rewards = 0, {}  # those that are known, by episode
    for trained in found:
        t = trained.trajectory
        count += 1
        rewards |= {} if t.failed else {t.uid: t.reward}
        known = sorted({*t.versions.tolist()}) or [t.admission_version]
        versions = f"{known[0]}–{known[-1]}" if len(known) > 1 else f"{known[0]}"
        line = COLUMNS.format(
            t.name,
            trained.version,
            f"{t.epoch}:{t.prompt_id}",
            _reward(t),
            trained.staleness,
            len(t.response),
            "cut" if t.cut else "",
            versions,
            "",
        )
        answer = " ".join(tokenizer.decode(t.response.tolist()).split())
        print(line + escaped(answer[:width])[: max(width - len(line), 10)])
    print(f"{count} trajectories" + (f", mean reward {fmean(rewards.values()):.3f}" if rewards else ""))


def config_of(place: Path) -> Config:
    """Returns the config of the run that wrote the trajectories. Raises ConfigError."""
    return config_file.load_run(place.absolute().parent.parent if os.path.isfile(place) else place)


def main(arguments: list[str] | None = None) -> int:
    guard()
    options = _options(arguments)
    try:
        config = config_of(options.place)
        if options.model:
            options.model = Path(hub.model_folder(options.model, "--model"))
        tokenizer = Tokenizer(options.model or hub.model_folder(config.model.path, "model.path", weights=False))
        found = chosen(options.place, options)
        if options.show is None and not options.json:
            terminal = Terminal()
            print_table(found, tokenizer, terminal.width if terminal.is_terminal else 140)
            return 0
        none = True
        for trained in found:
            none, ratios = False, None
            if options.model and (options.colour == "ratio" or options.json):
                under = logprobs_under(options.model, trained.trajectory, config.rollout.temperature)
                t = trained.trajectory
                ratios = np.where(t.loss_mask, under - t.logprobs, 0)  # the environment's tokens were not sampled
            if options.json:
                print(json.dumps(described(trained, tokenizer, ratios)).replace("\x7f", "\\u007f"))
            else:
                Terminal().print(show(trained, tokenizer, options.colour, ratios))
        if options.show is not None and none:
            raise ConfigError(f"--show: no trajectory {options.show} in {options.place} that the filters leave")
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("areal_megatron.programs.trajectories", __doc__)
    parser.add_argument("place", metavar="RUN", type=Path, help="run folder, or one batch-*.msgpack in it")
    for name, (_, what) in FILTERS.items():
        parser.add_argument(f"--{name}", type=span, metavar="RANGE", help=what)
    parser.add_argument("--truncated", choices=["yes", "no"], help="cut at rollout.max_new_tokens")
    parser.add_argument("--show", metavar="UID", help="one trajectory with its text, or all samples of an episode")
    parser.add_argument(
        "--colour",
        choices=["version", "logprob", "ratio"],
        default="version",
        help="of a token; default: version",
    )
    parser.add_argument("--model", metavar="FOLDER", help="Hugging Face folder, or OWNER/NAME, for the ratios")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    options = parser.parse_args(arguments)
    if options.colour == "ratio" and not options.model:
        parser.error("--colour ratio: needs --model FOLDER, whose log-probabilities the engine's are compared with")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())

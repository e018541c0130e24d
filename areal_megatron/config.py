"""The whole configuration of a run, as typed dataclasses.

A user writes a YAML file with the few keys that differ from the defaults and may override any of them
on the command line (`key=value`). `load` merges the three, checks every value and returns a `Config`;
`ConfigError` says which key or line is wrong and what to do. Imports neither torch nor vllm: a login
node reads a config in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_megatron.errors import first_line
from areal_megatron.files import write_atomically
from areal_megatron.ppo import settings


class ConfigError(ValueError):
    """Wrong input by the user: one line that names the key or file, what is wrong and what to do."""


def choice(default: str, *others: str):
    return field(default=default, metadata={"choices": (default, *others)})


def numbers(default: dict[str, float], *names: str, zero: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of a field with numbers above 0 by any of these names; those of `zero` may be 0."""
    return {"default_factory": default.copy, "metadata": {"choices": names, "zero": zero}}


@dataclass
class Model:
    path: str = MISSING
    """Hugging Face directory (config.json, *.safetensors, tokenizer) of the model to start from."""
    dtype: str = choice("bfloat16", "float32")
    """Parameters of trainers and engines; optimizer states and gradients are float32."""


@dataclass
class Data:
    train: str = MISSING
    """JSONL, Parquet or a folder; a row has `prompt` and `answer` (RL) or `prompt` and `response` (SFT), or is of
    another format (docs/evaluation.md). Several: `a.jsonl,b.parquet`; with their shares of the prompts:
    `a.jsonl:0.7,b.parquet:0.3`."""
    eval: str = ""
    """The same of held-out prompts, all of which an evaluation takes, without shares; empty: no evaluation."""
    max_prompt_tokens: int = 1024
    """Longer prompts are skipped and counted."""


@dataclass
class Machine:
    slots: int = 0
    """GPUs (or CPU cores) that the pools share; 0: all that this machine has."""
    device: str = choice("auto", "cpu", "cuda")
    host: str = "127.0.0.1"
    """Address on which controller, engines and rendezvous listen; or the network interface, such as ib0, whose address
    that is on each node; or auto: the interface with the default route."""
    timeout_s: float = 600.0
    """Longest wait for a peer before the run ends with an error that names it."""


@dataclass
class Trainer:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    """Ranks that share the experts of a model with experts; divides tp · dp / etp."""
    etp: int = 0
    """Tensor parallelism of the experts; 0: as tp."""
    vpp: int = 1
    """Virtual pipeline stages of a rank: smaller bubbles, more messages."""
    recompute: str = choice("none", "selective", "full")
    """Activations recomputed in the backward pass."""
    microbatch_tokens: int = 32768
    """Token cap of a packed micro-batch; a longer trajectory gets a micro-batch of its own."""

    @property
    def microbatch_multiple(self) -> int:
        """Virtual stages take micro-batches in groups of as many as there are stages."""
        return self.pp if self.vpp > 1 else 1


SHAPES = ("constant", "cosine", "linear")


@dataclass
class Optimizer:
    lr: float = 2e-5
    schedule: dict[str, float] = field(**numbers({"constant": 0.001}, *SHAPES, zero=SHAPES))
    """Shape of the learning rate after warm-up, and the share of all steps that warm up: one entry; cosine and linear
    end at 0."""
    weight_decay: float = 0.05
    adam: list[float] = field(default_factory=lambda: [0.9, 0.95, 1e-5])
    """β1, β2 and ε."""
    clip_grad: float = 1.0


@dataclass
class PPO:
    objective: str = choice("decoupled", "naive", "loglinear")
    """`naive`: the behaviour policy is the proximal policy (paper, Table 2); `loglinear`: the proximal policy is
    interpolated between the behaviour and the current one by their versions, which saves a forward pass."""
    minibatches: int = 4
    """Optimizer steps per batch."""
    algorithm: str = choice("ppo", "ppo_sequence", "grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo")
    """Advantage, loss and mean, see ppo/algorithm.py; in `ppo` and `ppo_sequence` a token or a trajectory counts once
    in the batch mean and deviation of rewards."""
    clip: list[float] = field(default_factory=lambda: [0.2, 0.2])
    """The ratio is clipped to 1 − the first and 1 + the second."""
    correction: dict[str, float] = field(**numbers({"truncated": 5.0}, "truncated", "icepop", "sequence_mask", "m2po"))
    """Thresholds of what is done about weights π_prox/π_behav far from 1, all that are named together; what is written
    replaces the default. See docs/algorithms.md."""
    penalty: dict[str, float] = field(**numbers({}, "entropy", "kl_k1", "kl_k2", "kl_k3"))
    """Coefficients of what is added to the loss, see docs/algorithms.md; `kl_…`: to the weights of model.path."""
    critic: dict[str, float] = field(
        **numbers({}, "lr", "gamma", "lambda", "clip", "warmup", zero=("lambda", "warmup"))
    )
    """Settings of a value model, see docs/algorithms.md; without `lr` there is none."""

    @property
    def has_reference(self) -> bool:
        return any(name.startswith("kl_") for name in self.penalty)


@dataclass
class Rollout:
    engines: int = 1
    tp: int = 1
    experts: list[str] = field(default_factory=list, metadata={"choices": ("parallel", "replay")})
    """Of a model with experts, with engines on GPUs: `parallel`: an engine's ranks hold whole experts instead of a part
    of each; `replay`: tokens are trained through the experts that their engine chose (docs/algorithms.md)."""
    group_size: int = 16
    """Answers sampled per prompt (n)."""
    max_staleness: int = 8
    """η: no trajectory is trained more than this many versions after its admission."""
    temperature: float = 1.0
    max_new_tokens: int = 27648
    max_running: int = 256
    """Requests that one engine decodes at the same time."""
    kv_policy: str = choice("recompute", "keep")
    """Running requests after a weight update: re-prefilled under the new weights, or on with their KV."""
    pass_rate: list[float] = field(default_factory=list)
    """Lowest and highest share of correct answers: groups outside, and those whose answers all have the same reward,
    are filtered, and prompts known to lie outside are not drawn. `[0, 1]` is DAPO's dynamic sampling; the higher one
    first, as in `[0.9, 0.1]`: each epoch draws the easiest prompts first. Empty: everything is drawn and trained."""
    dump: bool = False
    """Keep every trained trajectory in the run folder (docs/trajectories.md)."""
    workflow: dict[str, int] = field(default_factory=lambda: {"single_turn": 1})
    """How a prompt becomes a trajectory, and its turns at most: `multi_turn`, `tool_use`, or the import path
    `package.module:function` of yours. docs/workflows.md has them all."""


@dataclass
class Reshard:
    staging: str = choice("full", "streamed")
    """Where new weights land in an engine: a second copy of its shard while it generates, or, where that does
    not fit, room for one layer while it is paused."""
    check_finite: bool = False
    """Refuse to publish a weight that is NaN or Inf; costs a pass over the weights for each version."""
    timeout_s: float = 120.0
    """Longest time for one version to reach an engine; a slower one stays at its old version, and the next
    optimizer step waits no longer than this."""


@dataclass
class Checkpoint:
    every: int = 0
    """Updates between checkpoints, of which the last is saved too; 0: none."""
    keep: int = 2
    """The newest ones that stay; older ones are removed once a newer one is complete."""
    keep_every: int = 0
    """Those of a version that is a multiple of it stay for good; 0: none."""
    hf_every: int = 0
    """Versions between exports of checkpoints to Hugging Face format, a multiple of `every`; 0: none."""


@dataclass
class Reward:
    function: str = "math"
    """`math`; `choice`; `code`; the http:// or https:// address of a service; or the import path
    `package.module:function` of `f(prompt, response, answer) -> float`. docs/rewards.md has them all."""
    timeout_s: float = 10.0
    """A reward that takes longer counts as a wrong answer and is counted."""
    range: list[float] = field(default_factory=lambda: [-5.0, 5.0])
    """Rewards of a wrong and of a right answer; scores between 0 and 1 lie in between."""
    truncated: str = choice("incorrect", "masked", "scored", "overlong")
    """An answer cut at max_new_tokens: counts as a wrong one, is not trained, or is scored as it stands; `overlong`:
    that too, and every answer, cut or not, loses up to half the range of rewards within the last fifth before
    max_new_tokens."""


@dataclass
class Config:
    name: str = MISSING
    """Run folder: runs_dir/name."""
    runs_dir: str = "runs"
    resume: str = ""
    """`auto`: from the newest complete checkpoint of the run if it exists; or the path of a checkpoint."""
    mode: str = choice("rl", "sft", "replay")
    """`replay`: the trainers of `rl` without engines; data.train is the folder `trajectories` of another run."""
    seed: int = 1
    updates: int = MISSING
    """PPO updates (rl) or optimizer steps (sft)."""
    batch_size: int = 512
    """Trajectories of a PPO update (B), or examples of an SFT step."""
    eval_every: int = 0
    """Updates between evaluations; 0: only before the first and after the last."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)
    trainer: Trainer = field(default_factory=Trainer)
    optimizer: Optimizer = field(default_factory=Optimizer)
    ppo: PPO = field(default_factory=PPO)
    rollout: Rollout = field(default_factory=Rollout)
    reshard: Reshard = field(default_factory=Reshard)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    reward: Reward = field(default_factory=Reward)

    @property
    def trainer_ranks(self) -> int:
        return self.trainer.tp * self.trainer.pp * self.trainer.dp

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.rollout.group_size

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and the longest answer together; vLLM's max_model_len."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """Defaults, then the YAML file, then `key=value` overrides; checked.

    Raises ConfigError for a missing file, broken YAML, an unknown key (with the nearest valid one), a
    value of the wrong type or out of range, and keys that contradict each other.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the config: {e.strerror}") from None
    try:
        tree = yaml.compose(text)
        user = OmegaConf.create(yaml.safe_load(text) or {})
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {getattr(e, 'problem', e)}") from None
    if not OmegaConf.is_dict(user):
        raise ConfigError(f"{path}: expected `key: value` lines")

    places = {key: f"{path}:{line}" for key, line in _lines(tree).items()}
    command_line = OmegaConf.create()
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {text!r}: expected key=value, e.g. optimizer.lr=1e-5")
        places[".".join(key.split(".")[:2])] = f"override {text!r}"
        try:
            OmegaConf.update(command_line, key, yaml.safe_load(value))
        except yaml.YAMLError:
            raise ConfigError(f"override {text!r}: the value is not YAML") from None

    config = OmegaConf.structured(Config)
    for source in (user, command_line):
        for key, value in _leaves(source):
            where = places.get(key, str(path))
            _check_known(key, where)
            try:
                OmegaConf.update(config, key, value, merge=False)
            except OmegaConfBaseException as e:
                raise ConfigError(f"{where}: {key}: {first_line(e)}") from None
    missing = OmegaConf.missing_keys(config)
    if missing:
        raise ConfigError(f"{path}: missing {', '.join(sorted(missing))}")
    config = OmegaConf.to_object(config)
    check(config, lambda key: f"{places[key]}: {key}" if key in places else f"{path}: {key}")
    return config


def save(config: Config, path: Path) -> None:
    """The resolved config as YAML; `load` reads it back to an equal Config."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.structured(config)))


def check(config: Config, where=lambda key: key) -> None:
    """Raises ConfigError for the first value that cannot work; `where(key)` says how to name a key."""

    def require(condition: bool, key: str, problem: str) -> None:
        if not condition:
            raise ConfigError(f"{where(key)}: {problem}")

    for key, dataclass_field, value in _fields(config):
        choices = dataclass_field.metadata.get("choices", ())
        for chosen in (value if isinstance(value, dict | list) else [value]) if choices else []:
            near = difflib.get_close_matches(str(chosen), choices, 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            require(chosen in choices, key, f"{chosen!r} is none of {', '.join(choices)}{hint}")
        for name, number in value.items() if isinstance(value, dict) else ():
            zero = name in dataclass_field.metadata.get("zero", ())
            require(
                0 <= number < math.inf and (number > 0 or zero),
                key,
                f"{name} must be a number {'from 0 on' if zero else 'above 0'}, is {number}",
            )

    positive = [
        "updates",
        "batch_size",
        "data.max_prompt_tokens",
        "machine.timeout_s",
        "trainer.tp",
        "trainer.pp",
        "trainer.dp",
        "trainer.ep",
        "trainer.vpp",
        "trainer.microbatch_tokens",
        "ppo.minibatches",
        "rollout.engines",
        "rollout.tp",
        "rollout.group_size",
        "rollout.temperature",
        "rollout.max_new_tokens",
        "rollout.max_running",
        "reward.timeout_s",
        "reshard.timeout_s",
        "checkpoint.keep",
    ]
    values = {key: value for key, _, value in _fields(config)}
    for key in positive:
        require(values[key] > 0, key, f"must be above 0, is {values[key]}")
    for key in (
        "machine.slots",
        "optimizer.lr",
        "optimizer.weight_decay",
        "rollout.max_staleness",
        "eval_every",
        "trainer.etp",
        "checkpoint.every",
        "checkpoint.keep_every",
        "checkpoint.hf_every",
        "optimizer.clip_grad",
    ):
        require(values[key] >= 0, key, f"must be 0 or more, is {values[key]}")
    for key, length in (("optimizer.adam", 3), ("reward.range", 2), ("ppo.clip", 2)):
        require(len(values[key]) == length, key, f"must be {length} numbers, is {values[key]}")
    settings.check(config, require)
    shape = config.optimizer.schedule
    require(
        len(shape) == 1 and max(shape.values()) < 1,
        "optimizer.schedule",
        "must be one of "
        f"{', '.join(SHAPES)} with the share of the steps that warm up, below 1: {{constant: 0.001}}, is {shape}",
    )
    require("/" not in config.name and config.name not in ("", ".", ".."), "name", "must be a plain folder name")
    every, hf_every = config.checkpoint.every, config.checkpoint.hf_every
    require(
        not hf_every or (every and hf_every % every == 0),
        "checkpoint.hf_every",
        f"must be a multiple of checkpoint.every={every}: checkpoints are what is exported",
    )
    if config.mode == "sft":
        require(
            not every and not config.resume,
            "checkpoint.every" if every else "resume",
            "supervised runs are short and save no checkpoints",
        )
    bounds = config.rollout.pass_rate
    require(
        len(bounds) in (0, 2) and all(0 <= bound <= 1 for bound in bounds),
        "rollout.pass_rate",
        f"must be two numbers from 0 to 1, or [], is {bounds}",
    )
    if config.mode != "sft":
        n = config.rollout.group_size
        require(
            config.batch_size % n == 0, "batch_size", f"{config.batch_size} is no multiple of rollout.group_size={n}"
        )
        require(
            config.batch_size % config.ppo.minibatches == 0,
            "ppo.minibatches",
            f"{config.ppo.minibatches} does not divide batch_size={config.batch_size}",
        )
        require(
            config.batch_size // config.ppo.minibatches >= config.trainer.dp,
            "ppo.minibatches",
            f"a mini-batch of {config.batch_size // config.ppo.minibatches} trajectories cannot be split over "
            f"trainer.dp={config.trainer.dp}",
        )
        require(config.rollout.max_running >= n, "rollout.max_running", f"cannot hold a group of {n}")


def known_keys() -> list[str]:
    """Every valid dotted key, in the order of this file."""
    return [key for key, _, _ in _fields(Config())]


def _fields(node: Any, prefix: str = ""):
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from _fields(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f, value


def _leaves(node, prefix: str = ""):
    for key in node:
        value = node[key]
        if OmegaConf.is_dict(value) and f"{prefix}{key}" in _SECTIONS:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lines(tree, prefix: str = "") -> dict[str, int]:
    """Dotted key → line number, from the composed YAML document."""
    lines: dict[str, int] = {}
    for key, value in tree.value if isinstance(tree, yaml.MappingNode) else []:
        name = f"{prefix}{key.value}"
        lines[name] = key.start_mark.line + 1
        lines |= _lines(value, f"{name}.")
    return lines


def _check_known(key: str, where: str) -> None:
    keys = known_keys()
    if key in keys:
        return
    if key in _SECTIONS:
        raise ConfigError(f"{where}: {key} is a section; write its keys below it")
    same_leaf = [k for k in keys if k.split(".")[-1] == key.split(".")[-1]]
    near = difflib.get_close_matches(key, [*keys, *_SECTIONS], 1)
    hint = (same_leaf or near or [None])[0]
    raise ConfigError(f"{where}: unknown key {key!r}" + (f", did you mean {hint!r}?" if hint else ""))


_SECTIONS = {f.name for f in fields(Config) if f.default_factory is not dataclasses.MISSING}

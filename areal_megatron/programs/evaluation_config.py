"""The config with which `areal evaluate` starts its engine and scores answers: a run's, with the options given in place
of its keys, or one for any model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from areal_megatron.checkpoint import peft
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.checkpoint.folder import newest
from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    LoraConfig,
    MachineConfig,
    ModelConfig,
    PPOConfig,
    ReshardConfig,
    RewardConfig,
    RolloutConfig,
    ServedConfig,
    ServedModelConfig,
    TrainerConfig,
    config_file,
)
from areal_megatron.data.files import fetch
from areal_megatron.engine.adapters import BASE, Named
from areal_megatron.hub import hub
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.weight_files import ADAPTER
from areal_megatron.observe.metrics import read_status
from areal_megatron.process.errors import printable
from areal_megatron.programs.comparison import Model, names_of
from areal_megatron.run.folder import RunFolder
from areal_megatron.workflows.workflow import is_tried


def run_of(options: argparse.Namespace) -> Path | None:
    """Returns the run folder that MODEL names, None if it is a model."""
    folder = Path(options.model)
    is_run = os.path.exists(folder / "config.yaml") and not os.path.exists(folder / "config.json")
    return folder if is_run else None


def find_models(options: argparse.Namespace) -> list[Model]:
    """Returns what is evaluated: the model of the options, and the adapters beside it. Fetches what is on the hub;
    `model` becomes the folder that the engine loads, for a PEFT folder its base's. Raises ConfigError."""
    if os.path.isfile(options.model):
        swapped = f": areal evaluate {quote(options.data)} {quote(options.model)}" * os.path.isdir(options.data)
        raise ConfigError(f"MODEL: {options.model} is a file, not a model, which goes before DATA{swapped}")
    options.model = hub.model_folder(options.model, "MODEL")
    folder = Path(options.model)
    if os.path.isfile(folder / ADAPTER) and not os.path.exists(folder / "config.json"):
        if options.adapters:
            raise ConfigError(
                f"--adapters: MODEL is their base, and {folder} is an adapter too: name it with the others"
            )
        try:
            _, named = peft.read_description(folder)
        except CheckpointError as e:
            raise ConfigError(str(e)) from None
        options.model = hub.model_folder(options.base or named, "--base")
        if not os.path.isdir(options.model):
            base = printable(options.base or named) or "no model"
            raise ConfigError(f"--base: {folder} is an adapter of {base}, which is not here: name its folder")
        return [Model(adapter=_named(folder, options.model, 1))]
    if options.base:
        raise ConfigError(f"--base: {folder} is no adapter, which has {ADAPTER} and no config.json; leave it out")
    if not options.adapters:
        return [Model()]
    folders = [hub.model_folder(adapter, "--adapters") for adapter in options.adapters]
    for number, one in enumerate(folders):
        if os.path.realpath(one) in map(os.path.realpath, folders[:number]):
            raise ConfigError(f"--adapters: {one} is named twice")
    found = [_named(Path(one), options.model, number) for number, one in enumerate(folders, 1)]
    named = zip(names_of(options.adapters), found, strict=True)
    return [Model(BASE), *(Model(name, adapter) for name, adapter in named)]


def _named(folder: Path, base: str, number: int) -> Named:
    """Returns an adapter as the engine serves it. Raises ConfigError if it is none of this base."""
    adapter = peft.for_engines(folder, architecture(read_config(base)))
    if note := peft.note_of_base(str(folder), base):
        say(f"note: {note}")
    return Named(f"adapter-{number}", str(folder), adapter)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def export_of(folder: Path) -> Path:
    """Returns the newest model that a run has exported. Raises ConfigError if there is none."""
    run = RunFolder(folder)
    found = [model for model in (run.hf, *sorted(run.exports.glob("version-*"), reverse=True)) if _is_model(model)]
    if found[1:] and found[0] == run.hf and read_status(run).phase != "done":  # it went on after it had been done
        return max(found[:2], key=lambda model: (model / "config.json").stat().st_mtime)
    if found:
        return found[0]
    checkpoint, _ = newest(run)
    cure = "resume it with resume=auto"
    if checkpoint:
        cure = f"convert a checkpoint: areal convert to-hf {quote(str(checkpoint.folder))} MODEL"
    raise ConfigError(
        f"{folder} has no model yet, neither hf/ nor one in exports/ (checkpoint.hf_every): let it end, or {cure}"
    )


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def config_of_run(options: argparse.Namespace, folder: Path) -> Config:
    """Returns the config of a run, for an engine that evaluates its model as the run did; given options replace its
    keys. Raises ConfigError."""
    trained = config_file.load_run(folder)
    if trained.mode not in ("rl", "replay"):
        raise ConfigError(
            f"{folder} is a run of mode={trained.mode}, which has no reward: name its model and data, areal evaluate "
            f"{quote(str(folder / 'hf'))} DATA"
        )
    if given := next((name for name in ("workflow", "program", "turns", "user") if getattr(options, name)), ""):
        raise ConfigError(f"--{given}: {folder} is a run, which has its own; leave it out")
    if options.data:
        trained = replace(trained, environments=[], data=replace(trained.data, eval=options.data))
    if options.max_new_tokens:
        trained.environments = [replace(own, max_new_tokens=0) for own in trained.environments]
    if options.reward:
        trained.environments = [replace(own, reward="") for own in trained.environments]
    trained.environments = [replace(own, teacher="") for own in trained.environments]
    if not any(own.data.eval for own in trained.by_environment()):
        raise ConfigError(f"{folder} has no data.eval: name the data, areal evaluate {quote(str(folder))} DATA")
    for place in (trained.data, *trained.environments):
        place.eval = place.eval and fetch(place.eval, "data.eval")
    rollout = trained.rollout
    reward = replace(trained.reward, function=options.reward or trained.reward.function)
    asked = _asked(replace(trained, reward=reward))
    return replace(
        trained,
        name="engine",
        mode="rl",
        resume="",
        lora=LoraConfig(),  # the model that is evaluated has them in its weights
        seed=first_given(options.seed, trained.seed),
        model=replace(trained.model, path=str(export_of(folder).absolute())),
        machine=MachineConfig(device=options.device),
        trainer=TrainerConfig(),
        reshard=ReshardConfig(staging="streamed"),
        eval=_decoding(options, trained.eval),
        rollout=replace(
            rollout,
            engines=1,
            tp=first_given(options.tp, rollout.tp),
            max_new_tokens=first_given(options.max_new_tokens, rollout.max_new_tokens),
            first_weights="model",
            replay_routes=False,
            endpoint="loopback",
            vllm=rollout.vllm | config_file.options(options.vllm),
        ),
        reward=replace(
            reward,
            workers=options.workers,
            timeout_s=first_given(options.reward_timeout_s, reward.timeout_s),
            group_function="",
        ),
        served=ServedConfig(**{name: _alone(model) for name, model in trained.served_models.items() if name in asked}),
        ppo=PPOConfig(),
    )


def _alone(model: ServedModelConfig) -> ServedModelConfig:
    """Returns a served model with engines of its own: the one that is evaluated is no base that it could share."""
    return replace(model, engines=model.engines or 1)


def _asked(config: Config) -> set[str]:
    """Returns the names of the served models that workflows and rewards of a config may ask."""
    found = set()
    for own in config.by_environment():
        found |= {"reward"} if own.reward.of_model else {"judge"} if own.reward.of_judge else set()
        if is_tried(own.rollout) or own.reward.is_own:
            found |= config.served_models.keys() - {"reward"}
    return found


def _reward_of_owners(folders: Sequence[str]) -> str:
    """Returns the reward of the runs that have exported models or adapters, "math" if none has. Raises ConfigError if
    they have several."""
    found = {}
    for place in map(Path.absolute, map(Path, folders)):
        for folder in (place.parent, place.parent.parent):
            if (folder / "config.yaml").exists() and (folder / "incarnations").is_dir():
                trained = config_file.load_run(folder)
                if trained.mode == "rl" and not trained.environments and not trained.reward.of_served:
                    found.setdefault(trained.reward.function, folder)
                    break
    if len(found) > 1:
        told = ", ".join(f"{reward} of {folder}" for reward, folder in found.items())
        raise ConfigError(f"--reward: the runs have different ones, {told}: name one")
    for reward, folder in found.items():
        if reward != RewardConfig.function:
            say(f"the reward is that of {folder}, {reward}; --reward names another")
    return next(iter(found), RewardConfig.function)


def first_given(given: Any, otherwise: Any) -> Any:
    """Returns the value of an option, or `otherwise` if it was not given."""
    return otherwise if given is None else given


def _decoding(options: argparse.Namespace, otherwise: EvalConfig) -> EvalConfig:
    names = ("n", "temperature", "top_p", "top_k")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return replace(otherwise, **given)


def config_of(options: argparse.Namespace, models: Sequence[Model] = ()) -> Config:
    """Returns the config of a run that has an engine only. Raises ConfigError."""
    owned = [model.adapter.folder for model in models if model.adapter] or [options.model]
    described = read_config(options.model)
    dtype = described.get("dtype", described.get("torch_dtype"))
    config = Config(
        name="engine",
        updates=1,
        seed=first_given(options.seed, 1),
        model=ModelConfig(path=str(Path(options.model).absolute()), dtype=dtype if dtype in ITEMSIZE else "bfloat16"),
        data=DataConfig(train=options.data, eval=options.data, max_prompt_tokens=sys.maxsize),
        machine=MachineConfig(device=options.device),
        rollout=RolloutConfig(
            tp=first_given(options.tp, 1),
            max_new_tokens=options.max_new_tokens or RolloutConfig.max_new_tokens,
            first_weights="model",
            workflow=first_given(options.workflow, RolloutConfig.workflow),
            workflow_program=first_given(options.program, ""),
            turns=first_given(options.turns, 1),
        ),
        served=ServedConfig(user=ServedModelConfig(path=first_given(options.user, ""))),
        reshard=ReshardConfig(staging="streamed"),  # no updates: no memory for a second copy of the weights
        reward=RewardConfig(
            function=options.reward or _reward_of_owners(owned),
            workers=options.workers,
            timeout_s=first_given(options.reward_timeout_s, RewardConfig.timeout_s),
            wrong=0.0,
            right=1.0,
            truncated="scored",
        ),
        eval=_decoding(options, EvalConfig()),
    )
    config.rollout.vllm = config_file.options(options.vllm)
    return config

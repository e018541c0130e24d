"""The config with which `areal evaluate` starts its engine and scores answers: a run's, with the options given in place
of its keys, or one for any model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_megatron.checkpoint import peft
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    JudgeConfig,
    LoraConfig,
    MachineConfig,
    ModelConfig,
    ReshardConfig,
    RewardConfig,
    RolloutConfig,
    ServedConfig,
    TrainerConfig,
    config_file,
)
from areal_megatron.data.files import fetch
from areal_megatron.hub import hub
from areal_megatron.models.architecture import read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.models.weight_files import ADAPTER
from areal_megatron.run.folder import RunFolder
from areal_megatron.workflows.workflow import WORKFLOWS


def run_of(options: argparse.Namespace) -> Path | None:
    """Returns the run folder that MODEL names, None if it is a model."""
    folder = Path(options.model)
    return folder if (folder / "config.yaml").exists() and not (folder / "config.json").exists() else None


def find_model(options: argparse.Namespace) -> None:
    """Fetches the model of the options, if it is on the hub. Of a PEFT folder `adapter` becomes the folder and `model`
    the base: --base, or the one that it names. Raises ConfigError."""
    options.model = hub.model_folder(options.model, "MODEL")
    folder = Path(options.model)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").exists():
        try:
            _, named = peft.read_description(folder)
        except CheckpointError as e:
            raise ConfigError(str(e)) from None
        options.adapter, options.model = options.model, hub.model_folder(options.base or named, "--base")
        if not Path(options.model).is_dir():
            raise ConfigError(
                f"--base: {folder} is an adapter of {named or 'no model'}, which is not here: name its folder"
            )
    elif options.base:
        raise ConfigError(f"--base: {folder} is no adapter, which has {ADAPTER} and no config.json; leave it out")


def _adapter_of(folder: str) -> LoraConfig:
    """Returns the settings with which an engine serves the adapter of a PEFT folder."""
    adapter, _ = peft.read_description(Path(folder))
    return LoraConfig(adapter.rank, adapter.alpha, ",".join(adapter.targets), adapter.use_rslora, start=folder)


def export_of(folder: Path) -> Path:
    """Returns the newest model that a run has exported. Raises ConfigError if there is none."""
    run = RunFolder(folder)
    found = [run.hf, *sorted(run.exports.glob("version-*"), reverse=True)]
    for model in found:
        if (model / "config.json").exists() and any(model.glob("*.safetensors")):
            return model
    raise ConfigError(
        f"{folder} has no model yet, neither hf/ nor one in exports/ (checkpoint.hf_every): let it end, or convert "
        f"one: areal convert to-hf {folder}/checkpoints/version-000001 MODEL"
    )


def config_of_run(options: argparse.Namespace, folder: Path) -> Config:
    """Returns the config of a run, for an engine that evaluates its model as the run did; given options replace its
    keys. Raises ConfigError."""
    trained = config_file.load_run(folder)
    if trained.mode not in ("rl", "replay"):
        raise ConfigError(
            f"{folder} is a run of mode={trained.mode}, which has no reward: name its model and data, areal evaluate "
            f"{folder}/hf DATA"
        )
    rollout, reward = trained.rollout, trained.reward
    if any(own.reward.of_served for own in trained.by_environment()) and not options.reward:
        raise ConfigError(f"{folder} was scored by a served model, which has engines of its own: name another --reward")
    asks = any(own.rollout.workflow not in WORKFLOWS for own in trained.by_environment())
    if asks and (helpers := [name for name in trained.served_models if name != "reward"]):
        raise ConfigError(
            f"{folder} has workflows that may ask served.{helpers[0]}, which has engines of its own: data.eval is "
            f"evaluated during a run; here evaluate the model with single turns, areal evaluate {folder}/hf DATA"
        )
    if options.data:
        trained = replace(trained, environments=[], data=replace(trained.data, eval=options.data))
    if options.max_new_tokens:
        trained.environments = [replace(own, max_new_tokens=0) for own in trained.environments]
    if options.reward:
        trained.environments = [replace(own, reward="") for own in trained.environments]
    if not any(own.data.eval for own in trained.by_environment()):
        raise ConfigError(f"{folder} has no data.eval: name the data, areal evaluate {folder} DATA")
    for place in (trained.data, *trained.environments):
        place.eval = place.eval and fetch(place.eval, "data.eval")
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
            vllm=rollout.vllm | config_file.options(options.vllm),
        ),
        reward=replace(
            reward,
            function=options.reward or reward.function,
            workers=options.workers,
            timeout_s=first_given(options.reward_timeout_s, reward.timeout_s),
            group_function="",
            judge=JudgeConfig(),
        ),
        served=ServedConfig(),
    )


def _reward_of_owner(model: Path) -> str:
    """Returns the reward of the run that has exported a model, "math" if none has."""
    for folder in (model.absolute().parent, model.absolute().parent.parent):
        if (folder / "config.yaml").exists() and (folder / "incarnations").is_dir():
            trained = config_file.load_run(folder)
            if trained.mode == "rl" and not trained.environments and not trained.reward.of_served:
                if trained.reward.function != RewardConfig.function:
                    print(
                        f"the reward is that of {folder}, {trained.reward.function}; --reward names another",
                        file=sys.stderr,
                        flush=True,
                    )
                return trained.reward.function
    return RewardConfig.function


def first_given(given: Any, otherwise: Any) -> Any:
    """Returns the value of an option, or `otherwise` if it was not given."""
    return otherwise if given is None else given


def _decoding(options: argparse.Namespace, otherwise: EvalConfig) -> EvalConfig:
    names = ("n", "temperature", "top_p", "top_k")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return replace(otherwise, **given)


def config_of(options: argparse.Namespace) -> Config:
    """Returns the config of a run that has an engine only. Raises ConfigError."""
    described = read_config(options.model)
    dtype = described.get("dtype", described.get("torch_dtype"))
    config = Config(
        name="engine",
        updates=1,
        seed=first_given(options.seed, 1),
        model=ModelConfig(path=str(Path(options.model).absolute()), dtype=dtype if dtype in ITEMSIZE else "bfloat16"),
        lora=_adapter_of(options.adapter) if options.adapter else LoraConfig(),
        data=DataConfig(train=options.data, eval=options.data, max_prompt_tokens=sys.maxsize),
        machine=MachineConfig(device=options.device),
        rollout=RolloutConfig(
            tp=first_given(options.tp, 1),
            max_new_tokens=options.max_new_tokens or RolloutConfig.max_new_tokens,
            first_weights="model",
        ),
        reshard=ReshardConfig(staging="streamed"),  # no updates: no memory for a second copy of the weights
        reward=RewardConfig(
            function=options.reward or _reward_of_owner(Path(options.adapter or options.model)),
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

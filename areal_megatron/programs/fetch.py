"""Fetches what a run needs of the Hugging Face hub: `areal fetch CONFIG [key=value …]`.

For a machine with a network, such as a login node, before a run on nodes without one: the hub's cache (HF_HOME) must be
in a folder that both see. Whatever launches a run fetches what is not there. Exit code 0: all is there, 2: wrong input.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.data import files
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.hub import hub
from areal_megatron.model_check import check_published
from areal_megatron.process.shown import guard
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import RunFolder


def fetch_all(config: Config, run: RunFolder | None = None, weights: bool = True) -> None:
    """Brings models and data that are named on the hub onto this disk. The config then has the models' folders, and the
    commits of the data; those that `run` has, if it is resumed. Raises ConfigError.

    Unless everything is there, the hub is asked by this process alone, before anything has been started. A model that
    cannot be trained is refused before its weights are fetched.
    """
    before = None
    if run is not None and config.resume and run.config.exists():
        with suppress(ConfigError):  # of a version of this project with other keys
            before = config_file.load(run.config)
    earlier = before.model.path if before else ""
    config.model.path = hub.model_folder(config.model.path, "model.path", weights, earlier, _check_description)
    if adapter := config.lora.start:
        earlier = before.lora.start if before else ""
        config.lora.start = hub.model_folder(adapter, "lora.start", weights, earlier)
    if teacher := config.ppo.penalty.kl_folder:
        earlier = before.ppo.penalty.kl_model if before else ""
        config.ppo.penalty.kl_model = hub.model_folder(teacher, "ppo.penalty.kl_model", weights, earlier)
    for name, model in config.served_models.items():
        earlier = getattr(before.served, name).path if before else ""
        model.path = hub.model_folder(model.path, f"served.{name}.path", weights, earlier)
        if model.adapter:
            earlier = getattr(before.served, name).adapter if before else ""
            model.adapter = hub.model_folder(model.adapter, f"served.{name}.adapter", weights, earlier)
    if not config.has_data:
        return
    commits = files.commits(before) if before else {}
    places = {"data": config.data} | {f"environments.{n}": own for n, own in enumerate(config.environments)}
    for place, own in places.items():
        own.train = own.train and files.fetch(own.train, f"{place}.train", commits)
        own.eval = own.eval and files.fetch(own.eval, f"{place}.eval", commits)


def _check_description(folder: str) -> None:
    check_published(folder)
    Tokenizer(folder, untried=True)


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = Parser("areal_megatron.programs.fetch", __doc__)
    parser.add_config()
    options = parser.parse_intermixed_args(arguments)
    try:
        config = config_file.load(options.config, options.overrides)
        fetch_all(config, RunFolder(config.run_dir))
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"model.path={config.model.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks from a model's config.json whether a run can train it with the parallel sizes of its config.

The launcher does so before anything starts; imports neither torch nor megatron.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from areal_megatron.checkpoint import tower
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.checkpoint.hf_folder import check_tied
from areal_megatron.config import (
    Config,
    ConfigError,
    LoraConfig,
    PPOConfig,
    RolloutConfig,
    ServedConfig,
    TrainerConfig,
)
from areal_megatron.models.adapter import Adapter, served
from areal_megatron.models.architecture import (
    Architecture,
    Dimensions,
    architecture,
    as_reward_model,
    implied,
    read_config,
)
from areal_megatron.models.described import check_token_ids, positive_number, shown
from areal_megatron.models.described import rope as rope_of
from areal_megatron.models.table import ROUTER_BIAS
from areal_megatron.models.weight_files import check_weight_files
from areal_megatron.reshard import engine_layout, trainer_layout
from areal_megatron.run.json_input import read_object

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The types of rotary embeddings whose frequencies do not depend on the sequence."""
ENGINE_LATENTS = (512, 64)
"""The widths of the latent and of what is rotated beside it that vLLM's kernels are written for, on CPU and on GPUs."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The widths of heads that vLLM's kernels on CPU are written for; on GPUs it has kernels for any."""
_LENGTHS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "max_target_positions",
    "model_max_length",
    "n_positions",
    "seq_len",
    "seq_length",
)
"""The keys of config.json of which engines take the least as the most tokens of a sequence."""


def check_model(config: Config, weights: bool = True, trains: bool = True) -> None:
    """Raises ConfigError, which names the key and the numbers, if the model cannot be trained or split as configured.

    `weights` says whether the folder must hold the weights; all other checks need config.json alone. `trains`: whether
    there are trainers, or an engine alone.
    """
    path = config.model.path
    _check_folder(path)
    hf = read_config(path)
    model = architecture(hf)
    if model.is_reward_model and config.mode != "reward_model":
        raise ConfigError(
            f"model.path: {path} is a reward model ({model.name}), mode={config.mode} trains language models"
        )
    if config.mode == "reward_model":
        as_reward_model(hf)
    if model.dimensions.linear:
        _check_linear_attention(config, path, trains)
    _check_computation(hf, path)
    _check_whole(hf, path)
    _check_generation(Path(path), model.dimensions.vocabulary)
    if model.dimensions.latent:
        _check_latents(config, hf, model.dimensions)
    if model.dimensions.experts:
        _check_experts(config, hf, model)
    for key, size in (("ep", config.trainer.ep), ("etp", config.trainer.etp)):
        if size > 1 and not model.dimensions.experts:
            raise ConfigError(f"trainer.{key}: {size}, but the model of {path} has no experts")
    _check_kernels(config, model.dimensions)
    sizes = trainer_layout.MegatronSizes.of(config.trainer)
    trainer_layout.layout(hf, sizes, rank=0)
    if adapter := Adapter.of(config.lora):
        _check_adapter(adapter, model, hf, sizes)
    if config.has_engines:
        for key in ("expert_parallel", "replay_routes"):
            if getattr(config.rollout, key) and not model.dimensions.experts:
                raise ConfigError(f"rollout.{key}: the model of {path} has no experts; leave it out")
            if getattr(config.rollout, key) and config.machine.is_cpu:
                raise ConfigError(
                    f"rollout.{key}: on CPU vLLM's kernels fail with parallel experts and return no routes to replay; "
                    "leave it out"
                )
        engine_layout.layout(hf, engine_layout.EngineSizes.of(config.rollout), 0, served(config, hf))
        _check_heads(config, model.dimensions)
        _check_length(config, hf, path)
        for name in config.served_models:
            _check_served(config, name, weights)
    if weights:
        _check_files(Path(path), engines_read=config.has_engines and not config.engines_start_empty)
        _check_tensors(Path(path), model, trains)
    if not config.is_supervised and config.ppo.penalty.kl_folder:
        _check_teacher(config, weights)


def check_published(folder: str) -> None:
    """Raises ConfigError if a model of this description can never be trained, whatever the config: before its weights
    are fetched."""
    hf = read_config(folder)
    architecture(hf)
    _check_whole(hf, folder)


def _check_whole(hf: dict[str, Any], path: str) -> None:
    if hf.get("quantization_config"):
        raise ConfigError(
            f"model.path: {path}/config.json has a quantization_config; trainers start from whole weights, which "
            "`areal convert from-hf` and then `to-hf` make of 8 bits as DeepSeek and Qwen publish them "
            "(docs/published_runs.md, Other models)"
        )


def trained_config(config: Config, pad_token: int | None = None) -> dict[str, Any]:
    """Returns config.json of the model that the run trains: model.path's, but in mode reward_model with a score in
    place of logits, and `pad_token` as in `as_reward_model`. Raises ConfigError."""
    described = read_config(config.model.path)
    return as_reward_model(described, pad_token) if config.mode == "reward_model" else described


def reference_config(config: Config) -> Config:
    """Returns the config of the frozen model of ppo.penalty, as if that were to be trained in the layout of the
    trainers; the one of model.path is that model unless kl_model names another. Raises ConfigError."""
    path = config.ppo.penalty.kl_folder or config.model.path
    experts = bool(architecture(read_config(path)).dimensions.experts)
    trainer = config.trainer if experts else replace(config.trainer, ep=1, etp=0, expert_dispatch="alltoall")
    return replace(config, model=replace(config.model, path=path), trainer=trainer, ppo=PPOConfig(), lora=LoraConfig())


def _check_folder(path: str) -> None:
    try:
        is_folder = Path(path).is_dir()
    except OSError as e:  # in a folder that this user may not enter
        raise ConfigError(f"model.path: cannot read {path}: {e.strerror}") from None
    if not is_folder:
        raise ConfigError(f"model.path: there is no folder {path}")


def _check_teacher(config: Config, weights: bool) -> None:
    path = config.ppo.penalty.kl_folder
    try:
        _check_folder(path)
        check_model(replace(reference_config(config), mode="replay"), weights)
        _check_length(config, read_config(path), path)
        _check_vocabulary(config, path)
    except ConfigError as e:
        raise ConfigError(str(e).replace("model.path", "ppo.penalty.kl_model", 1)) from None


def _check_vocabulary(config: Config, path: str) -> None:
    """Raises ConfigError if a teacher has fewer tokens than its student."""
    size, own = (read_config(folder)["vocab_size"] for folder in (path, config.model.path))
    if size < own:
        raise ConfigError(f"model.path: {path} has {size} tokens, fewer than the {own} of {config.model.path}")
    if (k := config.ppo.penalty.top_k) > own:
        raise ConfigError(f"ppo.penalty.kl_top_k: {k}, but {config.model.path} has {own} tokens in all")


def _check_served(config: Config, name: str, weights: bool) -> None:
    """Raises ConfigError if engines cannot serve a model beside the policy."""
    own, rates = config.served_models[name], name == "reward"
    try:
        _check_folder(own.path)
        alone = replace(
            config,
            mode="reward_model" if rates else "rl",
            model=replace(config.model, path=own.path, dtype=config.model.dtype if own.dtype == "model" else own.dtype),
            data=replace(config.data, max_prompt_tokens=1),
            rollout=RolloutConfig(tp=own.tp, max_new_tokens=1, first_weights="model"),
            trainer=TrainerConfig(),
            ppo=PPOConfig(),
            lora=LoraConfig(),
            served=ServedConfig(),
        )
        check_model(alone, weights, trains=rates)
        model = architecture(read_config(own.path))
        if rates and not model.is_reward_model:
            raise ConfigError(
                f"model.path: {own.path} is no reward model but a {model.name}; mode=reward_model trains one"
            )
        _check_heads(alone, model.dimensions)
        if name in config.teachers:
            _check_vocabulary(config, own.path)
        if weights:
            _check_files(Path(own.path), engines_read=True)
    except ConfigError as e:
        place = f"served.{name}"
        said = str(e).replace("model.path", f"{place}.path", 1).replace("rollout.tp", f"{place}.tp", 1)
        raise ConfigError(said) from None


def _check_adapter(
    adapter: Adapter, model: Architecture, hf: dict[str, Any], sizes: trainer_layout.MegatronSizes
) -> None:
    """Raises ConfigError for targets that the model does not have, and where a rank would have none of their rows, or a
    part of an expert."""
    if adapter.experts and not any(row.of_experts for row in adapter.rows(model)):
        raise ConfigError(f"lora.experts: no layer of lora.targets in {model.name} is of experts; leave it out")
    if adapter.experts and sizes.expert_tp > 1:
        raise ConfigError(
            f"trainer.etp: experts with adapters are whole on a rank, not on {sizes.expert_tp}; set it to 1"
        )
    for rank in range(sizes.tp):
        for name, shape in trainer_layout.layout(hf, sizes, rank, adapter).held.items():
            if not prod(shape):
                raise ConfigError(
                    f"trainer.tp: with {sizes.tp} ranks for num_key_value_heads={model.dimensions.kv_heads} some have "
                    f"no rows of lora.targets={','.join(adapter.targets)} in {name}; take fewer ranks, or all-linear"
                )


def _check_files(folder: Path, engines_read: bool) -> None:
    """Raises ConfigError if there are no weights, not all that their index names, or others for engines than for
    trainers."""
    if not list(folder.glob("*.safetensors")):
        pickled = "; pickles are not read: save it anew by transformers' save_pretrained" * any(folder.glob("*.bin"))
        raise ConfigError(f"model.path: {folder} holds no *.safetensors file{pickled}")
    try:
        check_weight_files(folder, engines_read)
    except OSError as e:
        raise ConfigError(f"model.path: cannot read {e.filename}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"model.path: {e}") from None


def _check_tensors(folder: Path, model: Architecture, trains: bool) -> None:
    try:
        if model.tied:
            check_tied(folder, model)
        if trains:
            tower.read(folder)  # every checkpoint has a copy of it
    except CheckpointError as e:
        raise ConfigError(f"model.path: {e}") from None


def _check_generation(folder: Path, vocabulary: int) -> None:
    """Raises ConfigError if the generation settings cannot be read or name tokens that the model does not have."""
    file = folder / "generation_config.json"
    try:
        check_token_ids(read_object(file), vocabulary, str(file))
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(f"model.path: cannot read {file}: {e.strerror}") from None
    except ConfigError:
        raise
    except ValueError as e:
        raise ConfigError(f"model.path: {file} {e}") from None


def _check_kernels(config: Config, model: Dimensions) -> None:
    trainer, on_cpu = config.trainer, config.machine.is_cpu
    if trainer.attention != "auto" and (on_cpu or config.model.dtype == "float32"):
        where = "on CPU" if on_cpu else "in float32"
        raise ConfigError(f"trainer.attention: there is no {trainer.attention} {where}; leave it out")
    if trainer.expert_dispatch == "flex":
        if not model.experts:
            raise ConfigError(f"trainer.expert_dispatch: the model of {config.model.path} has no experts; leave it out")
        if on_cpu:
            raise ConfigError("trainer.expert_dispatch: flex needs DeepEP and GPUs; leave it out on CPU")
        if trainer.ep * (trainer.etp or trainer.tp) == 1:
            raise ConfigError("trainer.expert_dispatch: with ep=1 and etp=1 nothing is sent; leave it out")


def _check_heads(config: Config, d: Dimensions) -> None:
    if config.machine.is_cpu and not d.latent and d.head_dim not in CPU_HEADS:
        raise ConfigError(
            f"model.path: {config.model.path} has heads of {d.head_dim}; engines on CPU have kernels for "
            f"{', '.join(map(str, CPU_HEADS))}"
        )


def _check_computation(hf: dict[str, Any], path: str) -> None:
    rope_type, _ = rope_of(hf)
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"model.path: {path}/config.json asks for rotary embeddings of type {shown(rope_type)}; "
            f"known are {', '.join(ROPE_TYPES)}"
        )
    if hf.get("use_sliding_window"):
        raise ConfigError(f"model.path: {path}/config.json sets use_sliding_window, which the trainer does not have")
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"model.path: {path}/config.json has hidden_act {shown(hf['hidden_act'])}; known is silu")


def _check_linear_attention(config: Config, path: str, trains: bool) -> None:
    if (config.has_engines or not trains) and config.machine.is_cpu and config.model.dtype != "bfloat16":
        raise ConfigError(
            f"model.path: {path} has gated delta nets, which vLLM computes in bfloat16 alone on CPU, not in "
            f"{config.model.dtype}: `areal convert to-hf {path} NEW_FOLDER --dtype bfloat16` makes another"
        )


def _check_latents(config: Config, hf: dict[str, Any], d: Dimensions) -> None:
    described, (rope_type, rope) = f"{config.model.path}/config.json", rope_of(hf)
    if rope_type not in ("default", "yarn"):
        raise ConfigError(
            f"model.path: {described} asks for rotary embeddings of type {shown(rope_type)}; with latents engines have "
            "default and yarn"
        )
    if (part := rope.get("partial_rotary_factor", 1)) != 1:
        raise ConfigError(
            f"model.path: {described} has partial_rotary_factor={shown(part)}; with latents all of qk_rope_head_dim is "
            "rotated: leave it out"
        )
    if len({bool(rope.get(key) and _number(rope, key, 0)) for key in ("mscale", "mscale_all_dim")}) > 1:
        raise ConfigError(f"model.path: {described} has one of mscale and mscale_all_dim, which engines take otherwise")
    differ = {
        "attention_factor": rope.get("attention_factor") is not None,
        "truncate": rope.get("truncate", True) is not True,
        "mscale": rope.get("mscale") == 0,
    }
    if rope_type == "yarn" and (key := next((key for key, is_so in differ.items() if is_so), "")):
        raise ConfigError(
            f"model.path: {described} has rotary embeddings with {key}={shown(rope[key])}, with which engines with "
            "latents compute something else than transformers; leave it out"
        )
    if hf.get("qk_head_dim") not in (None, d.head_dim):
        raise ConfigError(
            f"model.path: {described} has qk_head_dim={shown(hf['qk_head_dim'])}, which is not qk_nope_head_dim and "
            f"qk_rope_head_dim={d.rotated} together; leave qk_head_dim out"
        )
    if hf.get("head_dim") not in (None, d.rotated):
        raise ConfigError(
            f"model.path: {described} has head_dim={shown(hf['head_dim'])} and qk_rope_head_dim={d.rotated}: "
            "transformers rotates the one and vLLM the other; leave head_dim out"
        )
    if d.value_dim > d.head_dim:
        raise ConfigError(
            f"model.path: {described} has v_head_dim={d.value_dim}; kernels take values as wide as keys ({d.head_dim}) "
            "at most"
        )
    if config.has_engines and (d.latent, d.rotated) != ENGINE_LATENTS:
        raise ConfigError(
            f"model.path: {described} has kv_lora_rank={d.latent} and qk_rope_head_dim={d.rotated}; engines have "
            f"kernels for {ENGINE_LATENTS[0]} and {ENGINE_LATENTS[1]}"
        )


def _check_experts(config: Config, hf: dict[str, Any], model: Architecture) -> None:
    path, chosen, experts = config.model.path, hf.get("num_experts_per_tok"), model.dimensions.experts
    if type(chosen) is not int or not 0 < chosen <= experts:
        raise ConfigError(
            f"model.path: {path}/config.json has num_experts_per_tok={shown(chosen)} of {experts} experts"
        )
    if model.has(ROUTER_BIAS):
        _check_sigmoid_router(hf, path, experts, chosen)
    if chosen == 1 and (model.family.defaults | implied(hf) | hf).get("norm_topk_prob"):
        raise ConfigError(
            f"model.path: {path}/config.json has num_experts_per_tok=1 and norm_topk_prob: the one "
            "probability is always 1, and the router could learn nothing"
        )


def _check_sigmoid_router(hf: dict[str, Any], path: str, experts: int, chosen: int) -> None:
    if chosen > 1 and not hf.get("norm_topk_prob", True):
        raise ConfigError(
            f"model.path: {path}/config.json has norm_topk_prob=false; megatron-core always normalises sigmoid scores"
        )
    if hf.get("output_router_logits"):
        raise ConfigError(
            f"model.path: {path}/config.json sets output_router_logits, which asks for a load-balancing loss; routers "
            "with a bias have none here: trainer.megatron.moe_router_bias_update_rate balances their experts"
        )
    groups, kept = (hf.get(key, 1) for key in ("n_group", "topk_group"))
    if type(groups) is not int or type(kept) is not int or not 0 < kept <= groups or experts % groups:
        raise ConfigError(
            f"model.path: {path}/config.json has n_group={shown(groups)} and topk_group={shown(kept)} for {experts} "
            "experts"
        )
    if groups > 1 and (experts // groups < 2 or chosen > kept * experts // groups):
        raise ConfigError(
            f"model.path: {path}/config.json chooses {chosen} experts from {kept} of {groups} groups, which have "
            f"{experts // groups} experts each: they need two each, and enough to choose from"
        )


def _check_length(config: Config, hf: dict[str, Any], path: str) -> None:
    longest = config.longest_sequence
    limit, key = longest_of(hf, longest)
    prompt = config.data.max_prompt_tokens
    room = int(limit) - prompt
    if room < 1:
        raise ConfigError(
            f"data.max_prompt_tokens: {prompt} tokens leave no room for an answer: {path} has {key}={limit} for both"
        )
    if longest > limit:
        raise ConfigError(
            f"rollout.max_new_tokens: with data.max_prompt_tokens={prompt} an answer may reach {longest} tokens, "
            f"{path} has {key}={limit}: lower it to {room} or less"
        )


def longest_of(hf: dict[str, Any], default: int) -> tuple[float, str]:
    """Returns how many tokens a sequence may have, `default` if config.json says nothing of it, and the key that says
    it. Raises ConfigError for what is no number."""
    limit, key = min((_number(hf, key, default), key) for key in _LENGTHS)
    rope_type, rope = rope_of(hf)
    if rope_type == "yarn":  # users may add it to a checkpoint and change nothing else (Qwen3's model card)
        scaled = _number(rope, "factor", 1) * _number(rope, "original_max_position_embeddings", limit)
        limit = max(limit, int(scaled))
    return limit, key


def _number(described: dict[str, Any], key: str, default: float) -> float:
    """Returns a number that config.json need not have. Raises ConfigError for what is none."""
    return default if described.get(key) is None else positive_number(described, key)

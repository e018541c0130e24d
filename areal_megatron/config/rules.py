"""What the values of a config must be, alone and together. Every refusal names a key and says what to set."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from areal_megatron.config import passed_through
from areal_megatron.config.algorithms import PUBLISHED
from areal_megatron.config.fields import (
    CRITIC_ALGORITHMS,
    EXACT_KL,
    SERVED,
    TRACKERS,
    Config,
    ConfigError,
    PPOConfig,
    RolloutConfig,
    config_fields,
    describe,
)
from areal_megatron.config.passed_through import Require


def check(config: Config, where: Callable[[str], str] = lambda key: key) -> None:
    """Raises ConfigError for the first value that cannot work; `where(key)` says how to name a key."""

    def require(condition: bool, key: str, problem: str) -> None:
        if not condition:
            raise ConfigError(f"{where(key)}: {problem}")

    values = {name: value for name, _, value in config_fields(config)}
    for name, f, value in config_fields(config):
        check_field(where(name), f, value)
        if (needed := f.metadata.get("needs")) and value != f.default:
            other = name.removesuffix(f.name) + needed
            require(values[other], name, f"has no meaning without {other}{'=true' * (values[other] is False)}")
    _check_run(config, require)
    _check_options(config, require)
    _check_ppo(config, require)
    _check_lora(config, require)
    _check_environments(config, require)
    _check_endpoint(config, require)
    _check_served(config, require)
    _check_judge(config, require)
    for mode, section in (("sft", config.sft), ("dpo", config.dpo)):
        for f in fields(section) if config.mode != mode else ():
            require(_is_default(section, f.name), f"{mode}.{f.name}", f"has no meaning without mode={mode}")
    if config.is_supervised:
        _check_supervised(config, require)
    elif config.is_driven:
        _check_driven(config, require)
    else:
        _check_batch(config, require)


def check_field(name: str, f: Field, value: Any) -> None:
    """Raises ConfigError, by this name, for a value that the field alone does not allow."""
    if not _is_allowed(f, value):
        raise ConfigError(f"{name}: must be {describe(f)}, is {value!r}{_hint(f, value)}")


def _is_allowed(f: Field, value: Any) -> bool:
    holds = {
        "at least": lambda limit: value >= limit,
        "above": lambda limit: value > limit,
        "at most": lambda limit: value <= limit,
        "below": lambda limit: value < limit,
    }
    if isinstance(value, float) and not math.isfinite(value):
        return False
    choices = f.metadata.get("choices")
    return (not choices or value in choices) and all(
        holds[name](limit) for name, limit in f.metadata.get("limits", {}).items()
    )


def _hint(f: Field, value: Any) -> str:
    near = difflib.get_close_matches(str(value), f.metadata.get("choices", ()), 1)
    if f.name == "mode" and value in PUBLISHED:
        near = [f"rl with ppo.algorithm={value}"]
    if f.name == "device" and value in ("gpu", "GPU"):
        near = ["cuda"]
    return f", did you mean {near[0]!r}?" if near else ""


def _check_run(config: Config, require: Require) -> None:
    require("/" not in config.name and config.name not in ("", ".", ".."), "name", "must be a plain folder name")
    require(
        config.name.isprintable() and config.name == config.name.strip() and not config.name.startswith("-"),
        "name",
        "must be one line, and begin neither with a space nor with -, which programs read as an option",
    )
    require(
        config.resume not in ("true", "True", "yes", "on", "1"),
        "resume",
        f"{config.resume!r} is no checkpoint: resume=auto starts the run, or resumes from its last one",
    )
    length = len(config.name.encode(errors="surrogatepass"))
    require(length <= 200, "name", f"must have at most 200 bytes, as names of files, has {length}")
    require(
        config.eval.temperature > 0 or config.eval.n == 1,
        "eval.temperature",
        f"0 gives the same answer eval.n={config.eval.n} times: set eval.n=1, or a temperature above 0",
    )
    require(
        not config.trainer.recompute_layers or config.trainer.recompute not in ("auto", "none"),
        "trainer.recompute_layers",
        f"has no meaning with trainer.recompute={config.trainer.recompute}: set that to elementwise, mlp or full",
    )
    for name in config.track.names:
        near = difflib.get_close_matches(name, TRACKERS, 1)
        hint = f", did you mean {near[0]!r}?" if near else f"; expected some of {', '.join(TRACKERS)}"
        require(name in TRACKERS, "track.to", f"{name!r} is no tracker{hint}")
    require(len(set(config.track.names)) == len(config.track.names), "track.to", "names a tracker twice")
    require(
        bool(re.fullmatch(r"[\w.-]{1,100}", config.track.project, re.ASCII)),
        "track.project",
        f"must be letters, digits, '.', '_' and '-', is {config.track.project!r}",
    )
    require(
        config.reward.wrong < config.reward.right,
        "reward.wrong",
        f"must be below reward.right={config.reward.right:g}, is {config.reward.wrong:g}",
    )


def _check_options(config: Config, require: Require) -> None:
    trainer, rollout = config.trainer, config.rollout
    passed_through.check_vllm(rollout.vllm, on_cpu=None, shared=False, require=require)
    passed_through.check_names(passed_through.MEGATRON, trainer.megatron, passed_through.MEGATRON_OWNED, require)
    passed_through.check_speculation(rollout.vllm, starts_empty=False, require=require)
    passed_through.check_balance(trainer.megatron, require)
    passed_through.check_recomputation(trainer.megatron, trainer.recompute, require)


def _check_served(config: Config, require: Require) -> None:
    wanted, reward = any(own.reward.of_model for own in config.by_environment()), config.served.reward
    require(
        not wanted or reward.path != "", "served.reward.path", "reward.function=model needs the folder of the model"
    )
    require(wanted or not reward.path, "served.reward.path", "has no meaning without reward.function=model")
    for name in ("max_new_tokens", "temperature", "timeout_s"):
        require(_is_default(reward, name), f"served.reward.{name}", "has no meaning: a reward model writes no answers")
    require(not reward.adapter, "served.reward.adapter", "a reward model's head is no adapter: serve the whole model")
    for name in SERVED:
        model = getattr(config.served, name)
        require(model.path != "" or not model.vllm, f"served.{name}.vllm", f"has no meaning without served.{name}.path")
        passed_through.check_served(name, model.vllm, on_cpu=None, require=require)
    asks, key = config.ppo.penalty.asks_teacher, "ppo.penalty.kl_model"
    require(not asks or config.mode == "rl", key, f"mode={config.mode} has no engines to ask: name a folder")
    require(not asks or config.served.teacher.path != "", "served.teacher.path", f"{key}=served.teacher needs one")
    require(
        not asks or config.rollout.temperature == 1,
        "rollout.temperature",
        f"the engines of {key}=served.teacher tell log-probabilities at temperature 1 alone: set it to 1, or name a "
        "folder there",
    )
    for number, environment in enumerate(config.environments if config.mode == "rl" else ()):
        named, place = environment.teacher, f"environments.{number}.teacher"
        require(not named or asks, place, f"has no meaning without {key}=served.teacher")
        require(not named or named in config.teachers, f"served.{named}.path", f"{place}={named} needs one")
    for name, model in config.lodgers.items():
        place, whose = f"served.{name}", "the policy's engines serve it"
        require(name != "reward", f"{place}.engines", "a reward model has engines of its own: set it to 1 or more")
        problem = f"0: {whose}, which can do so with lora.rank alone, and without lora.merge"
        require(config.engines_adapt, f"{place}.engines", problem)
        require(
            model.path == config.model.path,
            f"{place}.path",
            f"{model.path}, but with engines=0 {whose}, of {config.model.path}: name that, or give it engines",
        )
        for key in ("tp", "dtype", "vllm"):
            given = model.vllm if key == "vllm" else not _is_default(model, key)
            require(not given, f"{place}.{key}", f"has no meaning with engines=0, where {whose}")
    for name, model in config.served_models.items():
        why = f"engines of served.{name} have slots of their own"
        if not model.engines:  # what a teacher tells takes memory that is planned for nobody
            why = f"a teacher such as served.{name} needs engines with GPUs to themselves"
        free = not model.engines and name not in config.teachers
        require(free or not config.machine.shared, "machine.shared", f"{why}: set it to false")


def _check_judge(config: Config, require: Require) -> None:
    wanted, judge = any(own.reward.of_judge for own in config.by_environment()), config.reward.judge
    require(not wanted or config.served.judge.path != "", "served.judge.path", "reward.function=judge needs a judge")
    for f in fields(judge) if not wanted else ():
        require(_is_default(judge, f.name), f"reward.judge.{f.name}", "has no meaning without reward.function=judge")
    require("{response}" in judge.question, "reward.judge.prompt", "must hold {response}, which the judge is to rate")
    try:
        groups = re.compile(judge.verdict).groups
    except re.error as e:
        groups = 0
        require(False, "reward.judge.verdict", f"{judge.verdict!r} is no regular expression: {e}")
    require(groups == 1, "reward.judge.verdict", f"must have one group in (…), the number, has {groups}")
    require(judge.worst != judge.best, "reward.judge.best", f"must differ from reward.judge.worst={judge.worst:g}")


def _check_ppo(config: Config, require: Require) -> None:
    ppo = config.ppo
    _check_corrections(ppo, require)
    _check_penalties(ppo, require)
    _check_single_step(ppo, require)
    require(
        ppo.dual_clip == 0 or ppo.dual_clip > 1,
        "ppo.dual_clip",
        f"must be 0 (off) or above 1, a bound of π_θ/π_prox, is {ppo.dual_clip:g}",
    )
    require(
        ppo.rewards or not config.rollout.filter_groups,
        "rollout.filter_groups",
        "leaves out groups by their rewards, which ppo.rewards=false does not train",
    )
    require(
        not ppo.dual_clip or ppo.algorithm not in ("cispo", "sapo"),
        "ppo.dual_clip",
        f"would change nothing: ppo.algorithm={ppo.algorithm} bounds the ratio on both sides",
    )
    for name in ("sapo_positive", "sapo_negative") if ppo.algorithm != "sapo" else ():
        require(
            _is_default(ppo, name),
            f"ppo.{name}",
            f"has no meaning with ppo.algorithm={ppo.algorithm}: only sapo has gates",
        )
    for name in ("clip_low", "clip_high") if ppo.algorithm == "sapo" else ():
        require(
            getattr(ppo, name) == getattr(PUBLISHED["sapo"], name),
            f"ppo.{name}",
            "would change nothing: sapo has gates in place of clipping, see ppo.sapo_positive and ppo.sapo_negative",
        )
    if ppo.has_critic:
        require(not config.is_supervised, "ppo.critic.lr", "supervised runs have no critic")
        require(ppo.rewards, "ppo.critic.lr", "without ppo.rewards there is no return for a critic to learn")
        require(
            ppo.algorithm in CRITIC_ALGORITHMS,
            "ppo.critic.lr",
            f"ppo.algorithm={ppo.algorithm} has the other answers of the group as its baseline; with a critic set it "
            f"to {' or '.join(CRITIC_ALGORITHMS)}",
        )
        require(
            ppo.critic.warmup < config.updates,
            "ppo.critic.warmup",
            f"{ppo.critic.warmup} leaves the policy none of updates={config.updates}",
        )


def _check_lora(config: Config, require: Require) -> None:
    names = config.lora.names
    for name in names:
        require(re.fullmatch(r"all-linear|\w+", name) is not None, "lora.targets", f"{name!r} is no name of a layer")
    require(len(set(names)) == len(names), "lora.targets", "names a layer twice")
    require("all-linear" not in names or len(names) == 1, "lora.targets", "all-linear has all others: leave them out")
    require(
        not (config.engines_adapt and config.rollout.first_weights == "trainers"),
        "rollout.first_weights",
        "engines that are sent adapters read the model from its folder; leave it out, or set lora.merge=true",
    )
    if not config.has_adapters:
        return
    require(
        config.lora.adapters == 1 or config.is_driven,
        "lora.adapters",
        "several adapters are trained by programs alone (mode=driven); leave it out",
    )
    if config.lora.experts:
        require(
            not (config.engines_adapt and config.has_engines),
            "lora.experts",
            "engines cannot apply adapters of experts: set lora.merge=true, with which they get whole weights",
        )
        require(config.lora.rank % 8 == 0, "lora.rank", "kernels for all experts need a multiple of 8 (lora.experts)")
    require(
        not (config.lora.start and config.lora.merge and config.rollout.first_weights == "model"),
        "rollout.first_weights",
        "model.path is without the adapter of lora.start, which trainers add to what they send; leave it out",
    )
    require(
        config.mode != "reward_model",
        "lora.rank",
        "a reward model's head is no adapter: train it whole, without lora.rank",
    )
    require(not config.has_critic, "ppo.critic.lr", "a critic trains all its weights; leave it out, or lora.rank")
    require(
        not config.trainer.megatron.get("moe_router_bias_update_rate"),
        "trainer.megatron.moe_router_bias_update_rate",
        "moves the routers of the model, which adapters leave as it is; leave it out",
    )


def _check_corrections(ppo: PPOConfig, require: Require) -> None:
    c = ppo.correction
    for name in ("mask_high", "sequence_mask_high", "product_mask_high"):
        bound = getattr(c, name)
        require(
            bound == 0 or bound > 1,
            f"ppo.correction.{name}",
            f"must be 0 (off) or above 1, the weight of a token whose policy has not changed, is {bound:g}",
        )
    for name in c.bounds if ppo.objective == "naive" else ():
        require(
            name in ("truncate", "negative_mask"),
            f"ppo.correction.{name}",
            "would change nothing: with ppo.objective=naive every weight is 1",
        )
    require(
        not c.product_truncate or not c.truncate or c.product_truncate <= c.truncate,
        "ppo.correction.product_truncate",
        f"{c.product_truncate:g} is never reached: ppo.correction.truncate={c.truncate:g} caps the same weight; set "
        "that to 0",
    )
    require(
        ppo.objective != "loglinear" or not c.m2po,
        "ppo.correction.m2po",
        "has to know the proximal policy before the loss: it needs ppo.objective=decoupled",
    )


def _check_penalties(ppo: PPOConfig, require: Require) -> None:
    p = ppo.penalty
    require(
        ppo.objective != "loglinear" or not p.kl_cov,
        "ppo.penalty.kl_cov",
        "has to know the proximal policy before the loss: it needs ppo.objective=decoupled or naive",
    )
    require(
        p.kl_weighted or (p.kl > 0 and p.kl_form in ("k2", "k3")),
        "ppo.penalty.kl_weighted",
        "would change nothing: it is about ppo.penalty.kl with kl_form=k2 or k3"
        + (", and k1 is a reward" if p.kl and p.kl_form == "k1" else ""),
    )
    exact = p.kl_form in EXACT_KL
    require(
        not exact or p.asks_teacher,
        "ppo.penalty.kl_form",
        f"{p.kl_form} compares what engines find likeliest: set ppo.penalty.kl_model=served.teacher, or k1, k2 or k3",
    )
    require(
        exact or _is_default(p, "kl_top_k"), "ppo.penalty.kl_top_k", "has no meaning without kl_form=forward or reverse"
    )
    require(
        ppo.rewards or bool(p.coefficients),
        "ppo.rewards",
        "false leaves the penalties to be trained, and there are none; set ppo.penalty.kl",
    )


def _check_single_step(ppo: PPOConfig, require: Require) -> None:
    """Nothing that acts on the ratio π_θ/π_prox may be asked for where it is 1 at every step."""
    asked = {
        "ppo.dual_clip": ppo.dual_clip != 0,
        "ppo.sapo_positive": not _is_default(ppo, "sapo_positive"),
        "ppo.sapo_negative": not _is_default(ppo, "sapo_negative"),
        "ppo.penalty.kl_cov": ppo.penalty.kl_cov != 0,
    }
    for name, is_asked in asked.items() if ppo.has_unit_ratio else ():
        require(
            not is_asked,
            name,
            f"would change nothing: with ppo.minibatches=1 and ppo.objective={ppo.objective} the policy is its own "
            "proximal policy at each step; set ppo.minibatches to 2 or more, or ppo.objective=naive",
        )


def _is_default(section: Any, name: str) -> bool:
    return getattr(section, name) == type(section).__dataclass_fields__[name].default


def _check_supervised(config: Config, require: Require) -> None:
    require(
        _is_default(config.optimizer, "staleness_kl"),
        "optimizer.staleness_kl",
        f"has no meaning with mode={config.mode}: nothing is sampled, so nothing is stale",
    )
    require(
        config.batch_size >= config.trainer.dp,
        "batch_size",
        f"{config.batch_size} cannot be split over trainer.dp={config.trainer.dp}",
    )


def _check_driven(config: Config, require: Require) -> None:
    require(not config.has_critic, "ppo.critic.lr", "mode=driven has no critic: the program gives the advantages")
    require(
        _is_default(config.optimizer, "staleness_kl"),
        "optimizer.staleness_kl",
        "has no meaning with mode=driven: the program chooses the rate of each step",
    )


def _check_batch(config: Config, require: Require) -> None:
    rollout, minibatches, n = config.rollout, config.ppo.minibatches, config.rollout.group_size
    require(config.batch_size % n == 0, "batch_size", f"{config.batch_size} is no multiple of rollout.group_size={n}")
    require(
        config.batch_size % minibatches == 0,
        "ppo.minibatches",
        f"{minibatches} does not divide batch_size={config.batch_size}",
    )
    require(
        config.batch_size // minibatches >= config.trainer.dp,
        "ppo.minibatches",
        f"a mini-batch of {config.batch_size // minibatches} trajectories cannot be split over "
        f"trainer.dp={config.trainer.dp}",
    )
    require(
        n > 1 or config.ppo.algorithm in CRITIC_ALGORITHMS or not config.ppo.rewards,
        "ppo.algorithm",
        f"{config.ppo.algorithm} compares the answers to a prompt, and rollout.group_size=1 asks for one: set that to "
        f"2 or more, or take {' or '.join(CRITIC_ALGORITHMS)}",
    )
    require(rollout.max_running >= n, "rollout.max_running", f"cannot hold a group of {n}")
    for least, most in (("min_pass_rate", "max_pass_rate"), ("draw_min_pass_rate", "draw_max_pass_rate")):
        low, high = getattr(rollout, least), getattr(rollout, most)
        require(low <= high, f"rollout.{least}", f"must be at most rollout.{most}={high:g}, is {low:g}")
    for name in rollout.agent_variables:
        require(
            re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None,
            "rollout.workflow_environment",
            f"{name!r} is no name of an environment variable; expected NAME,NAME",
        )
    runs_program = any(own.rollout.workflow == "program" for own in config.by_environment())
    require(
        bool(rollout.workflow_program) == runs_program,
        "rollout.workflow_program",
        "is the command that workflow=program runs: give both or neither",
    )
    for number, own in enumerate(config.by_environment()):
        _check_turns(own.rollout, f"environments.{number}.turns" if config.environments else "rollout.turns", require)


def _check_turns(rollout: RolloutConfig, key: str, require: Require) -> None:
    require(
        rollout.workflow != "single_turn" or rollout.turns == 1,
        key,
        f"single_turn has one turn, not {rollout.turns}; workflow=multi_turn has several",
    )
    require(
        rollout.workflow not in ("multi_turn", "tool_use") or rollout.turns > 1,
        key,
        f"{rollout.workflow} needs at least 2",
    )


def _check_endpoint(config: Config, require: Require) -> None:
    opens = any(":" in own.rollout.workflow for own in config.by_environment())
    require(
        config.rollout.endpoint == "loopback" or opens,
        "rollout.endpoint",
        f"no agent asks for it with rollout.workflow={config.rollout.workflow}: leave it out, or name a workflow of "
        "yours that opens it",
    )


def _check_environments(config: Config, require: Require) -> None:
    if config.mode == "replay":  # its batches are formed already
        return
    environments = config.environments
    require(not environments or config.mode == "rl", "environments", f"are of mode=rl, not mode={config.mode}")
    for name in ("train", "eval") if environments else ():
        require(not getattr(config.data, name), f"data.{name}", f"each of the environments has its own {name}")
    names = [environment.name for environment in environments]
    for number, environment in enumerate(environments):
        place = f"environments.{number}"
        require(
            re.fullmatch(r"[\w.-]+", environment.name) is not None,
            f"{place}.name",
            f"must have letters, digits, `_`, `-` and `.` alone, is {environment.name!r}",
        )
        require(names.index(environment.name) == number, f"{place}.name", f"{environment.name!r} is there already")
        require(bool(environment.train), f"{place}.train", "must not be empty")
        require(
            bool(environment.share) == bool(environments[0].share),
            f"{place}.share",
            "give all environments a share, or none",
        )
        for name, section in (("max_prompt_tokens", config.data), ("max_new_tokens", config.rollout)):
            most, own = getattr(section, name), getattr(environment, name)
            require(own <= most, f"{place}.{name}", f"must be at most that of the run, {most}, is {own}")

from dataclasses import is_dataclass

import pytest
import yaml

from areal_megatron.config import (
    SERVED,
    Config,
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    check,
    config_fields,
    config_file,
    describe,
)
from areal_megatron.config.algorithms import PUBLISHED

PUBLISHED_WITH = {
    "ppo": (0.2, 0.2, -5, 5),
    "ppo_sequence": (0.2, 0.2, -5, 5),
    "boba_grpo": (0.4, 0.4, -5, 5),
    "grpo": (0.2, 0.2, 0, 1),
    "dr_grpo": (0.2, 0.2, 0, 1),
    "dapo": (0.2, 0.28, -1, 1),
    "rloo": (0.2, 0.2, 0, 1),
    "reinforce++": (0.2, 0.2, 0, 1),
    "gspo": (3e-4, 4e-4, 0, 1),
    "cispo": (1, 4, 0, 1),
    "sapo": (0.2, 0.2, 0, 1),
}
"""Clip from below and above, rewards of wrong and right answers."""
MINIMAL = """\
name: x
updates: 3
batch_size: 32
model:
  path: m
data:
  train: t.jsonl
rollout:
  group_size: 8
"""


LODGER = ["lora.rank=4", "model.path=DIR", "served.user.path=DIR", "served.user.engines=0"]


def load(tmp_path, text=MINIMAL, overrides=()):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return config_file.load(path, list(overrides))


def test_yaml_and_overrides_over_defaults(tmp_path):
    config = load(tmp_path, overrides=["rollout.max_staleness=2", "optimizer.lr=1e-4", "name=y"])
    assert (config.name, config.rollout.max_staleness, config.optimizer.lr, config.batch_size) == ("y", 2, 1e-4, 32)
    assert config.rollout.temperature == 1.0


def test_saved_config_reads_back_equal(tmp_path):
    config = load(tmp_path)
    config_file.save(config, tmp_path / "resolved.yaml")
    assert config_file.load(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    "text", ["agent --key ${KEY}", "${name}", r"\${name}", r"a\\${b", "${", "${oc.env:HOME}", "$$"]
)
def test_a_text_with_a_dollar_and_a_brace_is_saved_as_it_is(tmp_path, text):
    config = load(tmp_path, overrides=["rollout.workflow=program", "rollout.workflow_program=x"])
    config.rollout.workflow_program = text
    config.environments = [EnvironmentConfig(name="a", train=text)]
    config.data.train = ""
    config_file.save(config, tmp_path / "resolved.yaml")
    assert config_file.load(tmp_path / "resolved.yaml") == config


def test_of_several_overrides_of_a_key_the_last_one_holds(tmp_path):
    overrides = ["ppo.correction.m2po=0.1", "data.eval=x.jsonl", "ppo.correction.m2po=0.04", "data.eval="]
    config = load(tmp_path, MINIMAL + "ppo: {correction: {mask_high: 2}}\n", overrides)
    assert config.ppo.correction.bounds == {"truncate": 5.0, "mask_high": 2.0, "m2po": 0.04}
    assert config.data.eval == ""


@pytest.mark.parametrize("algorithm", PUBLISHED)
def test_an_algorithm_brings_the_numbers_that_it_is_published_with(tmp_path, algorithm):
    """They are in the resolved config, and what a user writes holds, in the file or on the command line."""
    found = load(tmp_path, overrides=[f"ppo.algorithm={algorithm}"])
    expected = PUBLISHED_WITH[algorithm]
    assert (found.ppo.clip_low, found.ppo.clip_high, found.reward.wrong, found.reward.right) == expected
    config_file.save(found, tmp_path / "resolved.yaml")
    saved = yaml.safe_load((tmp_path / "resolved.yaml").read_text())
    assert (saved["ppo"]["clip_low"], saved["ppo"]["clip_high"]) == expected[:2]
    assert (saved["reward"]["wrong"], saved["reward"]["right"]) == expected[2:]
    own = [] if algorithm == "sapo" else ["ppo.clip_low=0.2", "ppo.clip_high=0.3"]
    chosen = load(tmp_path, MINIMAL + "reward: {wrong: -5}\n", [f"ppo.algorithm={algorithm}", "reward.right=7", *own])
    assert (chosen.reward.wrong, chosen.reward.right) == (-5, 7)
    assert not own or (chosen.ppo.clip_low, chosen.ppo.clip_high) == (0.2, 0.3)


def test_the_warm_up_is_20_steps_and_no_more_than_a_tenth_of_a_short_run(tmp_path):
    for overrides, steps in (
        (["updates=250"], 20),
        (["updates=20"], 8),
        (["updates=3"], 1),
        (["updates=100", "mode=sft"], 10),
        (["updates=3", "optimizer.warmup_steps=30"], 30),
    ):
        assert load(tmp_path, overrides=overrides).optimizer.warmup_steps == steps


def test_texts_are_taken_as_they_are_written(tmp_path):
    config = load(tmp_path, overrides=["name=007", "data.train=a.jsonl:0.7,b.jsonl:0.3", "data.eval=off"])
    assert (config.name, config.data.train, config.data.eval) == ("007", "a.jsonl:0.7,b.jsonl:0.3", "off")


def test_no_key_holds_names_of_its_own():
    """Every setting has a key: none is a list or dict whose entries have to be looked up elsewhere, but for the options
    of other libraries."""
    every = [(key, f, value) for key, f, value in config_fields(Config(environments=[EnvironmentConfig()]))]
    kinds = {key: f.type for key, f, value in every if not is_dataclass(value) and not isinstance(value, list)}
    of_others = {"rollout.vllm", "trainer.megatron", *(f"served.{name}.vllm" for name in SERVED)}
    assert {key for key, kind in kinds.items() if "dict" in kind} == of_others
    assert set(kinds.values()) == {"str", "int", "float", "bool", "dict[str, Any]"}


def test_every_default_is_allowed_and_every_key_is_explained_or_plain():
    check(Config(name="x", updates=1, model=ModelConfig("m"), data=DataConfig("d")))
    for key, f, value in config_fields(Config(environments=[EnvironmentConfig()])):
        assert is_dataclass(value) or isinstance(value, list) or describe(f), key


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (MINIMAL + "  grup_size: 8\n", [], ["c.yaml:10", "rollout.grup_size", "rollout.group_size"]),
        (MINIMAL + "optimiser:\n  lr: 1\n", [], ["c.yaml:10", "optimiser", "'optimizer'"]),
        (MINIMAL, ["ppo.clipp=0.1"], ["override 'ppo.clipp=0.1'", "ppo.clip"]),
        (MINIMAL, ["name={a}{b}"], ["override 'name={a}{b}': the value is not YAML", "\"name='…'\""]),
        (MINIMAL, ["name=${oops}"], ["override 'name=${oops}': name: Interpolation key 'oops' not found"]),
        (MINIMAL, ["data.train=${oops}"], ["data.train: Interpolation key 'oops' not found"]),
        (MINIMAL, ["lr=0.1"], ["optimizer.lr"]),
        (MINIMAL, ["batch_size=many"], ["batch_size", "many"]),
        (MINIMAL, ["eval_every=10"], ["override 'eval_every=10': unknown key 'eval_every', did you mean 'eval.every'"]),
        (MINIMAL + "eval_every: 10\n", [], ["c.yaml:10", "did you mean 'eval.every'"]),
        (MINIMAL, ["checkpoint.hf_deltas=7"], ["unknown key", "did you mean 'checkpoint.hf_every'"]),
        (MINIMAL, ["rollout.most_engines=3"], ["unknown key", "did you mean 'rollout.engines'"]),
        (MINIMAL, ["rollout.exact_staleness=4"], ["unknown key", "did you mean 'rollout.max_staleness'"]),
        (MINIMAL, ["ppo.correction.floor=0.1"], ["unknown key 'ppo.correction.floor'"]),
        (MINIMAL, ["eval.top_p=0"], ["eval.top_p", "above 0 and at most 1"]),
        (MINIMAL, ["eval.temperature=0", "eval.n=4"], ["eval.temperature", "same answer eval.n=4 times"]),
        (MINIMAL, ["batch_size=30"], ["batch_size", "30", "rollout.group_size=8"]),
        (MINIMAL, ["mode=rll"], ["mode", "'rll'", "did you mean 'rl'"]),
        (MINIMAL, ["ppo.correction.sequence_maks=2"], ["override 'ppo.correction", "did you mean 'ppo.correction.seq"]),
        (MINIMAL, ["ppo.correction.m2po=.nan"], ["ppo.correction.m2po", "nan"]),
        (MINIMAL, ["ppo.correction.m2po=small"], ["ppo.correction.m2po", "small", "a number, at least 0"]),
        (MINIMAL + "ppo:\n  correction: {m2po: -1}\n", [], ["c.yaml:11: ppo.correction.m2po", "at least 0", "-1"]),
        (MINIMAL, ["ppo.correction=icepop"], ["ppo.correction is a section", "such as ppo.correction.truncate"]),
        (MINIMAL, ["ppo.correction={icepop: 2}"], ["ppo.correction is a section", "one by one"]),
        (MINIMAL, ["ppo.correction="], ["ppo.correction is a section"]),
        (MINIMAL + "ppo: 3\n", [], ["c.yaml:10: ppo is a section"]),
        (MINIMAL, ["ppo.correction.mask_high=0.5"], ["ppo.correction.mask_high", "above 1"]),
        (MINIMAL, ["ppo.correction.sequence_mask_low=1"], ["ppo.correction.sequence_mask_low", "below 1"]),
        (MINIMAL, ["ppo.correction.mask_high=2", "ppo.objective=naive"], ["ppo.correction.mask_high", "naive"]),
        (
            MINIMAL,
            ["ppo.correction.product_truncate=10"],
            ["ppo.correction.product_truncate", "10 is never reached", "ppo.correction.truncate=5"],
        ),
        (MINIMAL, ["ppo.dual_clip=1"], ["ppo.dual_clip", "above 1"]),
        (MINIMAL, ["ppo.dual_clip=3", "ppo.algorithm=cispo"], ["ppo.dual_clip", "ppo.algorithm=cispo"]),
        (MINIMAL, ["ppo.sapo_negative=2"], ["ppo.sapo_negative", "only sapo has gates"]),
        (MINIMAL, ["ppo.algorithm=sapo", "ppo.clip_high=0.3"], ["ppo.clip_high", "ppo.sapo_positive"]),
        (MINIMAL, ["ppo.penalty.kl_cov=1", "ppo.objective=loglinear"], ["ppo.penalty.kl_cov", "decoupled"]),
        (MINIMAL, ["ppo.minibatches=1", "ppo.penalty.kl_cov=1"], ["ppo.penalty.kl_cov", "would change nothing"]),
        (MINIMAL, ["ppo.minibatches=1", "ppo.dual_clip=3"], ["ppo.dual_clip", "ppo.objective=naive"]),
        (
            MINIMAL,
            ["ppo.minibatches=1", "ppo.algorithm=sapo", "ppo.sapo_negative=2", "ppo.objective=loglinear"],
            ["ppo.sapo_negative", "ppo.objective=loglinear", "ppo.minibatches to 2 or more"],
        ),
        (MINIMAL, ["mode=sft", "optimizer.staleness_kl=0.1"], ["optimizer.staleness_kl", "mode=sft"]),
        (MINIMAL, ["optimizer.staleness_kl=-1"], ["optimizer.staleness_kl", "at least 0"]),
        (MINIMAL, ["ppo.penalty.kl_cov_share=0.1"], ["ppo.penalty.kl_cov_share", "without ppo.penalty.kl_cov"]),
        (MINIMAL, ["ppo.penalty.kl_form=k3"], ["ppo.penalty.kl_form", "without ppo.penalty.kl"]),
        (MINIMAL, ["ppo.penalty.kl_weighted=false"], ["ppo.penalty.kl_weighted", "ppo.penalty.kl"]),
        (
            MINIMAL,
            ["ppo.penalty.kl_weighted=false", "ppo.penalty.kl=0.1", "ppo.penalty.kl_form=k1"],
            ["ppo.penalty.kl_weighted", "k1 is a reward"],
        ),
        (MINIMAL, ["ppo.correction.m2po=0.04", "ppo.objective=loglinear"], ["ppo.correction.m2po", "decoupled"]),
        (MINIMAL, ["ppo.penalty.kl_model=x"], ["ppo.penalty.kl_model", "without ppo.penalty.kl"]),
        (MINIMAL, ["ppo.rewards=false"], ["ppo.rewards", "set ppo.penalty.kl"]),
        (
            MINIMAL,
            ["ppo.rewards=false", "ppo.penalty.kl=1", "rollout.filter_groups=true"],
            ["rollout.filter_groups", "by their rewards"],
        ),
        (MINIMAL, ["ppo.rewards=false", "ppo.penalty.kl=1", "ppo.critic.lr=1"], ["ppo.critic.lr", "no return"]),
        (MINIMAL, ["ppo.critic.gamma=0.9"], ["ppo.critic.gamma", "without ppo.critic.lr"]),
        (
            MINIMAL,
            ["ppo.critic.lr=1e-5", "ppo.critic.gae_lamda=1"],
            ["mean 'ppo.critic.gae_lambda'", "at most 1"],
        ),
        (MINIMAL, ["ppo.critic.lr=1e-5", "ppo.critic.gamma=1.1"], ["ppo.critic.gamma", "at most 1", "1.1"]),
        (MINIMAL, ["ppo.critic.lr=1e-5", "ppo.critic.warmup=1.5"], ["ppo.critic.warmup", "whole number", "1.5"]),
        (MINIMAL, ["ppo.critic.lr=1e-5", "ppo.critic.warmup=3"], ["ppo.critic.warmup", "updates=3"]),
        (MINIMAL, ["ppo.critic.lr=1e-5", "ppo.algorithm=grpo"], ["ppo.critic.lr", "grpo", "ppo or ppo_sequence"]),
        (MINIMAL, ["ppo.critic.lr=1e-5", "mode=sft"], ["ppo.critic.lr", "supervised"]),
        (MINIMAL, ["ppo.critic.lr=1e-5", "mode=reward_model"], ["ppo.critic.lr", "supervised"]),
        (MINIMAL, ["dpo.beta=0.2"], ["dpo.beta", "without mode=dpo"]),
        (MINIMAL, ["mode=dpo", "dpo.beta=0"], ["dpo.beta", "above 0"]),
        (MINIMAL, ["mode=dpo", "dpo.label_smoothing=0.5"], ["dpo.label_smoothing", "below 0.5"]),
        (MINIMAL, ["mode=dpo", "batch_size=2", "trainer.dp=3"], ["batch_size", "2", "trainer.dp=3"]),
        (MINIMAL, ["reward.function=model"], ["served.reward.path", "needs the folder"]),
        (MINIMAL, ["reward.model=DIR"], ["reward.model", "did you mean 'served.reward.path'"]),
        (MINIMAL, ["served.reward.path=DIR"], ["served.reward.path", "without reward.function=model"]),
        (MINIMAL, ["served.reward.engines=2"], ["served.reward.engines", "no meaning without served.reward.path"]),
        (MINIMAL, ["served.user.temperature=0"], ["served.user.temperature", "no meaning without served.user.path"]),
        (MINIMAL, ["served.usr.path=DIR"], ["served.usr.path", "did you mean 'served.user.path'"]),
        (
            MINIMAL,
            ["reward.function=model", "served.reward.path=DIR", "served.reward.timeout_s=9"],
            ["served.reward.timeout_s", "writes no answers"],
        ),
        (
            MINIMAL,
            ["reward.function=judge", "served.judge.path=DIR", "served.judge.timeout_s=0"],
            ["served.judge.timeout_s: must be a number, above 0"],
        ),
        (
            MINIMAL,
            ["reward.function=model", "served.reward.path=DIR", "machine.shared=true"],
            ["machine.shared", "engines of served.reward have slots of their own"],
        ),
        (MINIMAL, ["served.user.path=DIR", "served.user.engines=0"], ["served.user.engines", "with lora.rank alone"]),
        (MINIMAL, [*LODGER, "lora.merge=true"], ["served.user.engines", "without lora.merge"]),
        (MINIMAL, ["lora.rank=8", "lora.experts=true"], ["lora.experts", "set", "lora.merge=true"]),
        (MINIMAL, ["lora.rank=4", "lora.experts=true", "lora.merge=true"], ["lora.rank", "a multiple of 8"]),
        (MINIMAL, ["lora.experts=true"], ["lora.experts", "lora.rank"]),
        (MINIMAL, [*LODGER, "served.user.path=other"], ["served.user.path", "other, but with engines=0", "of DIR"]),
        (MINIMAL, [*LODGER, "served.user.vllm.seed=1"], ["served.user.vllm", "no meaning with engines=0"]),
        (MINIMAL, [*LODGER, "served.user.tp=2"], ["served.user.tp", "no meaning with engines=0"]),
        (
            MINIMAL,
            ["reward.function=model", "served.reward.path=DIR", "served.reward.engines=0"],
            ["served.reward.engines", "a reward model has engines of its own"],
        ),
        (MINIMAL, ["optimizer.schedule=linaer"], ["optimizer.schedule", "did you mean 'linear'"]),
        (MINIMAL, ["optimizer.schedule={linear: 0.1}"], ["optimizer.schedule", "must be one of", "{'linear': 0.1}"]),
        (MINIMAL, ["optimizer.warmup_steps=0.1"], ["optimizer.warmup_steps", "a whole number"]),
        (MINIMAL, ["optimizer.lr=[1, 2]"], ["optimizer.lr", "must be a number", "[1, 2]"]),
        (MINIMAL, ["optimizer.lr="], ["optimizer.lr", "must be a number"]),
        (MINIMAL, ["rollout.filter_groups=perhaps"], ["rollout.filter_groups", "true or false", "perhaps"]),
        (MINIMAL, ["rollout.min_pass_rate=0.1"], ["rollout.min_pass_rate", "rollout.filter_groups=true"]),
        (
            MINIMAL,
            ["rollout.filter_groups=true", "rollout.min_pass_rate=0.6", "rollout.max_pass_rate=0.5"],
            ["rollout.min_pass_rate", "rollout.max_pass_rate=0.5"],
        ),
        (MINIMAL, ["ppo.algorithm=grpo", "rollout.group_size=1"], ["ppo.algorithm", "grpo", "rollout.group_size=1"]),
        (
            MINIMAL,
            ["rollout.draw_min_pass_rate=0.6", "rollout.draw_max_pass_rate=0.5"],
            ["rollout.draw_min_pass_rate", "rollout.draw_max_pass_rate=0.5"],
        ),
        (MINIMAL, ["rollout.turns=2"], ["rollout.turns", "single_turn has one turn"]),
        (MINIMAL, ["rollout.workflow=multi_turn"], ["rollout.turns", "multi_turn needs at least 2"]),
        (MINIMAL, ["reward.wrong=5"], ["reward.wrong", "below reward.right=5"]),
        (MINIMAL + "updates: 4\n", [], ["c.yaml:10", "updates", "line 2 already"]),
        (MINIMAL + "ppo.clip_low: 0.1\n", [], ["c.yaml:10", "ppo.clip_low", "below their section"]),
        (MINIMAL + "? [a]\n: b\n", [], ["c.yaml:10", "is no key"]),
        (MINIMAL, ["rollout.max_staleness=-1"], ["rollout.max_staleness", "-1"]),
        (MINIMAL, ["trainer.tp=0"], ["trainer.tp", "a whole number, at least 1", "is 0"]),
        (MINIMAL, ["name=../x"], ["name"]),
        (MINIMAL, ["seed=-1"], ["seed", "at least 0", "is -1"]),
        (MINIMAL, ["seed=4294967296"], ["seed", "below 4294967296"]),
        (MINIMAL, ["nonsense"], ["nonsense", "key=value"]),
        (MINIMAL, ["data.eval=${HOME}"], ["data.eval", "'HOME' not found", r"is written \${"]),
        (MINIMAL, ["data.eval=${"], ["data.eval", r"is written \${"]),
        (MINIMAL, ["rollout.vllm.x='${'"], ["override", "rollout.vllm.x: "]),
        (MINIMAL + "trainer: {megatron: {a: &a [*a]}}\n", [], ["c.yaml:10", "trainer.megatron.a: ", "recursive"]),
        (MINIMAL, ["model=3"], ["model", "section"]),
        ("name: x\n", [], ["missing", "model.path"]),
        ("name: [x\n", [], ["c.yaml:", "YAML"]),
        ("- a\n", [], ["c.yaml"]),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(tmp_path, text, overrides, words):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, overrides)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("algorithm", PUBLISHED)
def test_no_algorithm_is_refused_for_one_minibatch(tmp_path, algorithm):
    """Its defaults bound nothing there, which nobody asked for; with the naive objective they do."""
    load(tmp_path, MINIMAL, ["ppo.minibatches=1", f"ppo.algorithm={algorithm}"])
    load(tmp_path, MINIMAL, ["ppo.minibatches=1", "ppo.objective=naive", "ppo.penalty.kl_cov=1", "ppo.dual_clip=3"])


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot read"):
        config_file.load(tmp_path / "nowhere.yaml")


ENVIRONMENTS = """
name: x
updates: 2
model: {path: m}
rollout: {max_new_tokens: 100, workflow: tool_use, turns: 4}
reward: {function: code}
environments:
- name: sums
  train: a.jsonl,b.jsonl
  share: 0.75
  workflow: single_turn
  reward: math
  max_new_tokens: 10
- {name: code, train: c.jsonl, eval: d.jsonl, share: 0.25}
"""


def test_an_environment_has_what_the_run_has_but_for_its_own_keys(tmp_path):
    config = load(tmp_path, ENVIRONMENTS, overrides=["environments.1.turns=3"])
    sums, code = config.by_environment()
    assert [config.data.train, sums.data.train, code.data.train] == ["", "a.jsonl,b.jsonl", "c.jsonl"]
    assert [sums.data.eval, code.data.eval] == ["", "d.jsonl"]
    assert [(own.rollout.workflow, own.rollout.turns) for own in (sums, code)] == [("single_turn", 1), ("tool_use", 3)]
    assert [own.rollout.max_new_tokens for own in (sums, code)] == [10, 100]
    assert [own.reward.function for own in (sums, code)] == ["math", "code"]
    config_file.save(config, tmp_path / "saved.yaml")
    assert config_file.load(tmp_path / "saved.yaml") == config
    (alone,) = load(tmp_path, "{name: x, updates: 2, model: {path: m}, data: {train: a.jsonl}}").by_environment()
    assert alone.data.train == "a.jsonl" and alone.environments == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("environments.2.name=z", "missing environments.2.train"),
        ("environments.3.name=z", "environments.3.name: there is no environments.2 before it"),
        ("environments.0.shar=2", "did you mean 'environments.0.share', which is a number, at least 0"),
        ("environments=1", "environments is a section: give its keys one by one, such as environments.0.name"),
        ("environments.0.share=x", "environments.0.share: must be a number, at least 0, is 'x'"),
        ("environments.1.share=0", "environments.1.share: give all environments a share, or none"),
        ("environments.1.turns=1", "environments.1.turns: tool_use needs at least 2"),
        ("environments.1.name=sums", "environments.1.name: 'sums' is there already"),
        ("environments.1.name=a/b", "environments.1.name: must have letters"),
        ("environments.1.max_new_tokens=101", "must be at most that of the run, 100, is 101"),
        ("data.train=a.jsonl", "data.train: each of the environments has its own train"),
        ("mode=sft", "environments: are of mode=rl, not mode=sft"),
    ],
)
def test_environments_that_cannot_be_are_refused_in_one_line(tmp_path, override, problem):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, ENVIRONMENTS, overrides=[override])
    assert problem in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["environments: [1]", "environments: 3"])
def test_environments_are_a_list_of_sections(tmp_path, text):
    with pytest.raises(ConfigError, match="environments"):
        load(tmp_path, f"{{name: x, updates: 2, model: {{path: m}}, {text}}}")


@pytest.mark.parametrize("section", ["rollout", "environments"])
def test_a_section_may_be_empty(tmp_path, section):
    config = load(tmp_path, f"name: x\nupdates: 2\nmodel: {{path: m}}\ndata: {{train: a}}\n{section}:\n")
    assert config.environments == [] and config.rollout.turns == 1


def test_options_of_other_libraries_are_taken_from_the_file_and_from_the_command_line(tmp_path):
    text = f"{MINIMAL}  vllm: {{kv_cache_dtype: fp8, speculative_config: {{method: ngram}}, stream_interval: 2}}\n"
    overrides = ["rollout.vllm.stream_interval=3", "rollout.vllm.watermark=1e-2", "rollout.vllm.max_logprobs=null"]
    overrides += ["trainer.megatron.recompute_granularity=selective", "trainer.megatron.recompute_modules=[core_attn]"]
    config = load(tmp_path, text, overrides)
    assert config.rollout.vllm == {
        "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "ngram"},
        "stream_interval": 3,
        "watermark": 0.01,
        "max_logprobs": None,
    }
    assert config.trainer.megatron == {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config_file.save(config, tmp_path / "saved.yaml")
    assert config_file.load(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.vllm.max_model_len=9", "rollout.vllm.max_model_len: .* use data.max_prompt_tokens and rollout.max_n"),
        ("rollout.vllm.kv-cache-dtype=fp8", "rollout.vllm.kv-cache-dtype: .* written here: kv_cache_dtype"),
        ("rollout.vllm={kv_cache_dtype: fp8}", r"rollout.vllm is a section: give its options one by one"),
        ("rollout.vllm.speculative_config.method=ngram", "speculative_config.method: .* whole: .*speculative_config"),
        ("rollout.vllm.speculative_config={rejection_sample_method: synthetic}", "that the policy did not sample"),
        ("rollout.vllm.speculative_config={num_speculative_tokens: two}", "must be a whole number above 0, is 'two'"),
        ("rollout.vllm.speculative_config={num_speculative_tokens: 0}", "must be a whole number above 0, is 0"),
        ("rollout.vllm.mamba_cache_dtype=fp8", "is none of auto, bfloat16, float16, float32: 'fp8'"),
        ("rollout.vllm.mamba_ssm_cache_dtype=[auto]", r"is none of .*: \['auto'\]"),
        ("rollout.vllm.speculative_config=ngram", r"must be a dict such as \{method: ngram"),
        ("rollout.vllm.gpu_memory_utilization=1.2", "must be a number above 0 and at most 1, is 1.2"),
        ("rollout.vllm.speculative_config={model: 3}", "model must be a folder, is 3"),
        ("rollout.vllm.kv_cache_dtype=[fp8]", r"kv_cache_dtype: must be a text, is \['fp8'\]"),
        ("rollout.vllm.kv_cache_dtype_skip_layers=3", "must be a list such as .*, is 3"),
        ("rollout.vllm.max_num_batched_tokens=8k", "must be a whole number above 0, is '8k'"),
        ("trainer.megatron.tensor_model_parallel_size=2", "megatron.tensor_model_parallel_size: .* use trainer.tp"),
        ("trainer.megatron.recompute_granularity=full", "must be selective, is 'full'.* trainer.recompute=full"),
        ("trainer.megatron.moe_router_load_balancing_type=[3, sinkhorn]", "other experts than the engines do"),
        ("trainer.megatron.recompute_modules=[mlp]", "would change nothing without .*recompute_granularity=selective"),
        ("trainer.megatron.moe_router_load_balancing_type=sinkhorn", "other experts than the engines do"),
    ],
)
def test_options_that_cannot_be_passed_through(tmp_path, override, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        load(tmp_path, overrides=[override])
    assert "\n" not in str(refused.value)


def test_modules_to_recompute_are_a_list_of_known_ones(tmp_path):
    overrides = ["trainer.megatron.recompute_granularity=selective", "trainer.megatron.recompute_modules=mlp"]
    with pytest.raises(ConfigError, match=r"must be a list such as \[core_attn\], is 'mlp'"):
        load(tmp_path, overrides=overrides)
    with pytest.raises(ConfigError, match=r"'moe_act' is none of core_attn, layernorm, mlp, moe"):
        load(tmp_path, overrides=[overrides[0], "trainer.megatron.recompute_modules=[moe_act]"])


def test_two_ways_of_recomputing_are_refused(tmp_path):
    overrides = ["trainer.megatron.recompute_granularity=selective", "trainer.recompute=mlp"]
    with pytest.raises(ConfigError, match="=mlp recomputes parts of layers, too: set it to none"):
        load(tmp_path, overrides=overrides)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "-rf", " a", "a ", "ä" * 101, "x" * 300, "a\0b", "a\u2028b"])
def test_a_name_is_that_of_a_folder_on_any_line(name):
    config = Config(name=name, updates=1)
    config.model.path, config.data.train = "m", "d"
    with pytest.raises(ConfigError, match=r"^name: [^\n]*$"):
        check(config)

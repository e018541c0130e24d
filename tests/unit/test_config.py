from dataclasses import is_dataclass

import pytest

from areal_megatron import config_file
from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, check, config_fields, describe

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


def test_of_several_overrides_of_a_key_the_last_one_holds(tmp_path):
    overrides = ["ppo.correction.m2po=0.1", "data.eval=x.jsonl", "ppo.correction.m2po=0.04", "data.eval="]
    config = load(tmp_path, MINIMAL + "ppo: {correction: {icepop: 2}}\n", overrides)
    assert config.ppo.correction.thresholds == {"truncate": 5.0, "icepop": 2.0, "m2po": 0.04}
    assert config.data.eval == ""


def test_texts_are_taken_as_they_are_written(tmp_path):
    config = load(tmp_path, overrides=["name=007", "data.train=a.jsonl:0.7,b.jsonl:0.3", "data.eval=off"])
    assert (config.name, config.data.train, config.data.eval) == ("007", "a.jsonl:0.7,b.jsonl:0.3", "off")


def test_no_key_holds_names_of_its_own():
    """Every setting has a key: none is a list or dict whose entries have to be looked up elsewhere."""
    kinds = {f.type for _, f, value in config_fields(Config()) if not is_dataclass(value)}
    assert kinds == {"str", "int", "float", "bool"}


def test_every_default_is_allowed_and_every_key_is_explained_or_plain():
    check(Config(name="x", updates=1, model=ModelConfig("m"), data=DataConfig("d")))
    for key, f, value in config_fields(Config()):
        assert is_dataclass(value) or describe(f), key


OLD = [
    (
        "optimizer.adam",
        "[0.9, 0.95, 1e-08]",
        {"optimizer.beta1": 0.9, "optimizer.beta2": 0.95, "optimizer.eps": "1e-08"},
    ),
    ("optimizer.schedule", "{linear: 0.1}", {"optimizer.schedule": "linear", "optimizer.warmup": 0.1}),
    ("ppo.clip", "[0.2, 0.28]", {"ppo.clip_low": 0.2, "ppo.clip_high": 0.28}),
    ("ppo.correction.truncated", "3", {"ppo.correction.truncate": 3}),
    ("ppo.penalty.kl_k1", "0.2", {"ppo.penalty.kl": 0.2, "ppo.penalty.kl_form": "k1"}),
    ("ppo.critic.lambda", "0.9", {"ppo.critic.gae_lambda": 0.9}),
    (
        "rollout.pass_rate",
        "[0.9, 0.1]",
        {
            "rollout.filter_groups": "true",
            "rollout.min_pass_rate": 0.1,
            "rollout.max_pass_rate": 0.9,
            "rollout.easiest_first": "true",
        },
    ),
    ("rollout.experts", "[replay]", {"rollout.expert_parallel": "false", "rollout.replay_routes": "true"}),
    ("rollout.workflow", "{multi_turn: 3}", {"rollout.workflow": "multi_turn", "rollout.turns": 3}),
    ("reward.range", "[-1, 1]", {"reward.wrong": -1, "reward.right": 1}),
    ("machine.timeout_s", "60", {"machine.peer_timeout_s": 60}),
]


@pytest.mark.parametrize(("key", "value", "new"), OLD)
def test_an_old_spelling_is_refused_with_the_new_one(tmp_path, key, value, new):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, overrides=[f"{key}={value}"])
    spelled = " ".join(f"{name}={setting}" for name, setting in new.items())
    assert str(error.value) == f"override '{key}={value}': {key}: is an old spelling, write {spelled}"
    section, _, name = key.rpartition(".")
    parts = section.split(".")
    text = "name: x\nupdates: 3\n" + "".join(f"{'  ' * k}{part}:\n" for k, part in enumerate(parts))
    text += f"{'  ' * len(parts)}{name}: {value}\n"
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    inner = ", ".join(f"{name.rpartition('.')[2]}: {setting}" for name, setting in new.items())
    line = len(text.splitlines())
    assert str(error.value).endswith(f"c.yaml:{line}: {key}: is an old spelling, write {inner} below {section}:")


def test_what_the_new_spelling_says_loads(tmp_path):
    critic = ("ppo.critic.lr=1e-5",)
    for _, _, new in OLD:
        more = critic if any(name.startswith("ppo.critic") for name in new) else ()
        load(tmp_path, overrides=[*(f"{name}={setting}" for name, setting in new.items()), *more])


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (MINIMAL + "  grup_size: 8\n", [], ["c.yaml:10", "rollout.grup_size", "rollout.group_size"]),
        (MINIMAL + "optimiser:\n  lr: 1\n", [], ["c.yaml:10", "optimiser", "'optimizer'"]),
        (MINIMAL, ["ppo.clipp=0.1"], ["override 'ppo.clipp=0.1'", "ppo.clip"]),
        (MINIMAL, ["lr=0.1"], ["optimizer.lr"]),
        (MINIMAL, ["batch_size=many"], ["batch_size", "many"]),
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
        (MINIMAL, ["ppo.correction.icepop=0.5"], ["ppo.correction.icepop", "above 1"]),
        (MINIMAL, ["ppo.correction.icepop=2", "ppo.objective=naive"], ["ppo.correction.icepop", "naive"]),
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
        (MINIMAL, ["optimizer.schedule=linaer"], ["optimizer.schedule", "did you mean 'linear'"]),
        (MINIMAL, ["optimizer.schedule={linear: 0.1, cosine: 0}"], ["optimizer.schedule", "old spelling", "config.py"]),
        (MINIMAL, ["optimizer.warmup=1"], ["optimizer.warmup", "below 1"]),
        (MINIMAL, ["optimizer.lr=[1, 2]"], ["optimizer.lr", "must be a number", "[1, 2]"]),
        (MINIMAL, ["optimizer.lr="], ["optimizer.lr", "must be a number"]),
        (MINIMAL, ["rollout.filter_groups=perhaps"], ["rollout.filter_groups", "true or false", "perhaps"]),
        (MINIMAL, ["rollout.min_pass_rate=0.1"], ["rollout.min_pass_rate", "rollout.filter_groups=true"]),
        (
            MINIMAL,
            ["rollout.filter_groups=true", "rollout.min_pass_rate=0.6", "rollout.max_pass_rate=0.5"],
            ["rollout.min_pass_rate", "rollout.max_pass_rate=0.5"],
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
        (MINIMAL, ["nonsense"], ["nonsense", "key=value"]),
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


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot read"):
        config_file.load(tmp_path / "nowhere.yaml")

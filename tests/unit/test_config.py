import pytest
import yaml

from areal_megatron import config as configuration
from areal_megatron.config import ConfigError

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
    return configuration.load(path, list(overrides))


def test_yaml_and_overrides_over_defaults(tmp_path):
    config = load(tmp_path, overrides=["rollout.max_staleness=2", "optimizer.lr=1e-4", "name=y"])
    assert (config.name, config.rollout.max_staleness, config.optimizer.lr, config.batch_size) == ("y", 2, 1e-4, 32)
    assert config.rollout.temperature == 1.0


def test_saved_config_reads_back_equal(tmp_path):
    config = load(tmp_path)
    configuration.save(config, tmp_path / "resolved.yaml")
    assert configuration.load(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize("text", ["{icepop: 2}", "{icepop: 2.0, truncated: 3}", "{}"])
def test_numbers_by_name_replace_the_default_ones(tmp_path, text):
    expected = yaml.safe_load(text)
    assert load(tmp_path, overrides=[f"ppo.correction={text}"]).ppo.correction == expected
    in_file = MINIMAL + f"ppo:\n  correction: {text}\n"
    config = load(tmp_path, in_file)
    assert config.ppo.correction == expected
    configuration.save(config, tmp_path / "resolved.yaml")
    assert configuration.load(tmp_path / "resolved.yaml") == config
    assert load(tmp_path, in_file, ["ppo.correction={m2po: 0.04}"]).ppo.correction == {"m2po": 0.04}
    assert load(tmp_path, in_file, ["ppo.correction.m2po=0.04"]).ppo.correction == {"m2po": 0.04}
    assert load(tmp_path).ppo.correction == {"truncated": 5.0}


def test_a_schedule_may_do_without_a_warm_up_and_lambda_may_be_0(tmp_path):
    config = load(tmp_path, overrides=["optimizer.schedule={cosine: 0}", "ppo.critic={lr: 1e-5, lambda: 0, warmup: 2}"])
    assert config.optimizer.schedule == {"cosine": 0}
    assert config.ppo.critic == {"lr": 1e-5, "lambda": 0, "warmup": 2}


def test_at_most_sixty_fields():
    assert len(configuration.known_keys()) <= 60


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
        (MINIMAL, ["ppo.correction={icepopp: 2}"], ["override 'ppo.correction", "'icepopp'", "did you mean 'icepop'"]),
        (MINIMAL, ["ppo.correction.sequence_maks=2"], ["override 'ppo.correction", "did you mean 'sequence_mask'"]),
        (MINIMAL + "ppo:\n  correction: {m2po: 0}\n", [], ["c.yaml:11", "ppo.correction", "m2po", "above 0"]),
        (MINIMAL, ["ppo.correction={m2po: .nan}"], ["ppo.correction", "m2po", "nan"]),
        (MINIMAL, ["ppo.correction={m2po: small}"], ["ppo.correction", "small"]),
        (MINIMAL, ["ppo.correction=icepop"], ["ppo.correction", "icepop"]),
        (MINIMAL, ["ppo.correction="], ["ppo.correction"]),
        (MINIMAL, ["ppo.correction={icepop: 0.5}"], ["ppo.correction", "icepop", "above 1"]),
        (MINIMAL, ["ppo.correction={icepop: 2}", "ppo.objective=naive"], ["ppo.correction", "icepop", "naive"]),
        (MINIMAL, ["ppo.correction={m2po: 0.04}", "ppo.objective=loglinear"], ["ppo.correction", "m2po", "decoupled"]),
        (MINIMAL, ["ppo.critic={gamma: 1}"], ["ppo.critic", "lr"]),
        (MINIMAL, ["ppo.critic={lr: 1e-5, lamda: 1}"], ["ppo.critic", "'lamda'", "did you mean 'lambda'"]),
        (MINIMAL, ["ppo.critic={lr: 1e-5, gamma: 1.1}"], ["ppo.critic", "gamma", "1.1"]),
        (MINIMAL, ["ppo.critic={lr: 1e-5, warmup: 1.5}"], ["ppo.critic", "warmup", "1.5"]),
        (MINIMAL, ["ppo.critic={lr: 1e-5, warmup: 3}"], ["ppo.critic", "warmup=3", "updates=3"]),
        (MINIMAL, ["ppo.critic={lr: 1e-5}", "ppo.algorithm=grpo"], ["ppo.critic", "grpo", "ppo or ppo_sequence"]),
        (MINIMAL, ["ppo.critic={lr: 1e-5}", "mode=sft"], ["ppo.critic", "supervised"]),
        (MINIMAL, ["optimizer.schedule=linear"], ["optimizer.schedule", "str"]),
        (MINIMAL, ["optimizer.schedule={linaer: 0.1}"], ["optimizer.schedule", "did you mean 'linear'"]),
        (
            MINIMAL,
            ["optimizer.schedule={linear: 0.1, cosine: 0}"],
            ["optimizer.schedule", "one of constant, cosine, linear"],
        ),
        (MINIMAL, ["optimizer.schedule={linear: 1}"], ["optimizer.schedule", "below 1"]),
        (MINIMAL, ["optimizer.schedule={linear: -0.1}"], ["optimizer.schedule", "from 0 on"]),
        (MINIMAL, ["rollout.max_staleness=-1"], ["rollout.max_staleness", "-1"]),
        (MINIMAL, ["trainer.tp=0"], ["trainer.tp", "above 0"]),
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
        configuration.load(tmp_path / "nowhere.yaml")

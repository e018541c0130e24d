"""The benchmark of runs from Python: both kinds make the same run, and are compared pair by pair."""

import json
from dataclasses import replace

import pytest

import areal_megatron as areal
from areal_megatron.config import RewardConfig, config_file
from tools.bench.python_api import CONFIG, REWARD, SCRIPT, commands, summary


def test_both_kinds_make_the_same_run(tmp_path):
    made = commands(tmp_path, "same")
    _, _, train, config, *overrides = made["command"]
    by_command = config_file.load(config, overrides[:-1])
    by_script = areal.Run(CONFIG, **json.loads(made["script"][1])).config
    assert [train, config, overrides[-1]] == ["train", CONFIG, "reward.function=bench_reward:short"]
    assert by_script == by_command and by_script.updates == 30 and by_script.data.eval == ""
    assert replace(by_script, reward=RewardConfig("bench_reward:short")) == config_file.load(config, overrides)
    assert REWARD in SCRIPT and 'reward={"function": short}' in SCRIPT
    compile(SCRIPT, "script.py", "exec")


def test_figures_are_of_pairs():
    """Worked out by hand; the second repetition was made on a machine that was twice as slow."""
    found = {
        "command": [{"start_s": s, "first_update_s": 10 * s, "update_s": s} for s in (2.0, 4.0)],
        "script": [{"start_s": 2 + s, "first_update_s": 10 * s + 1, "update_s": 1.1 * s} for s in (2.0, 4.0)],
    }
    figures = summary(found)
    assert figures["command start_s"] == {"median": 3, "min": 2, "max": 4} and len(figures) == 9
    assert figures["script − command start_s"] == {"median": 2, "min": 2, "max": 2}
    assert figures["script − command first_update_s"] == {"median": 1, "min": 1, "max": 1}
    assert figures["script / command update_s"]["median"] == pytest.approx(1.1)

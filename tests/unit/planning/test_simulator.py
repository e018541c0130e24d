"""Simulated runs: a small one by hand, and what must hold for every one."""

import json
import math
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, PPOConfig, RolloutConfig, TrainerConfig
from areal_megatron.controller.schedule import Schedule
from areal_megatron.observe.advice import Balance, Short, advise
from areal_megatron.planning import simulate
from areal_megatron.planning.forecast.accelerators import accelerator
from areal_megatron.planning.forecast.engine_time import EngineTime
from areal_megatron.planning.forecast.lengths import LognormalLengths
from areal_megatron.planning.forecast.simulator import Circumstances, Simulator, Times
from areal_megatron.planning.forecast.trainer_time import TrainerTime
from areal_megatron.planning.forecast.weights_time import WeightsTime

ROOT = Path(__file__).resolve().parents[3]
HF = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}
H100 = accelerator("h100")


def config(*, groups=2, n=2, updates=4, engines=1, tp=1, eta=0, max_running=8, dp=1, every=0, **rollout):
    made = Config(
        name="run",
        updates=updates,
        batch_size=groups * n,
        model=ModelConfig(path="none"),
        data=DataConfig(),
        trainer=TrainerConfig(recompute="none", dp=dp),
        rollout=RolloutConfig(
            engines=engines, tp=tp, group_size=n, max_staleness=eta, max_running=max_running, **rollout
        ),
        ppo=PPOConfig(minibatches=1),
    )
    made.machine.device, made.checkpoint.every = "cuda", every
    return made


def times(made, kv_tokens=math.inf, reward_s=0.5, gpu=H100):
    parts = EngineTime(made, HF, gpu), TrainerTime(made, HF, gpu), WeightsTime.of(made, HF, gpu)
    return Times(*parts, kv_tokens, reward_s)


@pytest.mark.parametrize(("staging", "alone"), [("full", 1.0), ("streamed", 1.0), ("full", 0.6)])
def test_a_synchronous_run_of_equal_answers_is_one_thing_after_another(staging, alone):
    made = config(groups=3, n=2, updates=5, max_running=6)
    made.reshard.staging = staging
    all_times, tokens, prompt = replace(times(made), alone=alone), 100, 20
    run = Simulator(made, all_times, LognormalLengths(tokens, 0, 1000, prompt), Circumstances()).run()
    engine, weights = all_times.engine, all_times.weights
    prefill = alone * 3 * engine.prefill(prompt, prompt**2 / 2)
    decoding = alone * sum(engine.step(6) + engine.per_token * 6 * (prompt + step + 0.5) for step in range(tokens))
    generation, training = prefill + decoding, alone * all_times.trainer.update([prompt] * 6, [tokens] * 6)
    assert [update.tokens for update in run.updates] == [600] * 5
    update = generation + 0.5 + training
    assert run.updates[0].end == pytest.approx(update)
    paused = weights.commit if staging == "streamed" else weights.transfer + weights.commit
    between = update + paused
    assert [b.end - a.end for a, b in pairwise(run.updates)] == pytest.approx([between] * 4)
    assert run.tokens_per_s == pytest.approx(600 / between)
    assert run.hours(100) == pytest.approx((update + 99 * between) / 3600)
    assert run.staleness == {0: 30} and run.trained == 3000
    assert run.sampled == pytest.approx(3000) and run.wasted == pytest.approx(0)
    assert run.trainer_busy == pytest.approx(5 * training / run.seconds)
    assert run.engine_busy == pytest.approx(5 * generation / run.seconds)
    assert run.engine_full == pytest.approx(5 * decoding / run.seconds)


@pytest.mark.parametrize(
    ("flops", "busy", "other"), [(2e9, "engine_busy", "trainer_busy"), (2e8, "trainer_busy", "engine_busy")]
)
def test_who_is_always_busy_is_faster_while_the_other_waits(flops, busy, other):
    # what is computed again after a commit would depend on how long answers are then
    made, alone = config(groups=3, n=2, updates=80, max_running=6, eta=2, kv_policy="keep"), 0.6
    lengths, crowded = LognormalLengths(100, 0, 1000, 20), times(made, gpu=replace(H100, flops=flops))
    before, after = (Simulator(made, replace(crowded, alone=a), lengths, Circumstances()).run() for a in (1.0, alone))
    assert getattr(before, busy) > 0.95 and getattr(after, busy) > 0.95
    together = getattr(before, other)
    assert after.update_s / before.update_s == pytest.approx(together + (1 - together) * alone, rel=0.05)


@pytest.mark.parametrize("eta", [0, 2])
def test_trainers_wait_for_a_checkpoint_to_be_copied(eta):
    made = config(groups=3, n=2, updates=5, max_running=6, eta=eta, every=1)
    all_times = times(made)
    all_times = replace(all_times, weights=replace(all_times.weights, checkpoint=1000.0))
    run = Simulator(made, all_times, LognormalLengths(100, 0, 1000, 20), Circumstances()).run()
    training = all_times.trainer.update([20] * 6, [100] * 6)
    assert [b.end - a.end for a, b in pairwise(run.updates)] == pytest.approx([1000 + training] * 4)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 6),
    n=st.integers(1, 4),
    engines=st.integers(1, 5),
    eta=st.integers(0, 4),
    slots=st.integers(1, 4),
    every=st.integers(0, 2),
    interruption=st.booleans(),
    filtered=st.sampled_from([0.0, 0.3]),
    mtbf_s=st.sampled_from([math.inf, 40.0, 400.0]),
    kv_tokens=st.sampled_from([math.inf, 900.0]),
    flops=st.sampled_from([H100.flops, 2e9]),
    alone=st.sampled_from([1.0, 0.7]),
)
@example(0, 1, 1, 5, 1, 1, 0, False, 0.0, 40.0, math.inf, 2e9, 0.7)  # trainers that fail are gone
def test_of_every_run(
    seed, groups, n, engines, eta, slots, every, interruption, filtered, mtbf_s, kv_tokens, flops, alone
):
    made = config(groups=groups, n=n, engines=engines, eta=eta, max_running=slots * n, every=every)
    around = Circumstances(interruption, filtered, mtbf_s, return_s=3, node_gpus=2, seed=seed)
    lengths = LognormalLengths(150, 1.0, 600, prompt=30)
    made_up = times(made, kv_tokens, gpu=replace(H100, flops=flops))  # with few, trainers are what everything waits for
    made_up = replace(made_up, alone=alone)
    first, again = (Simulator(made, made_up, lengths, around) for _ in range(2))
    run = first.run()

    assert run == again.run()
    assert [update.version for update in run.updates] == list(range(made.updates))
    assert all(sum(update.staleness.values()) == groups * n for update in run.updates)
    assert all(0 <= staleness <= eta for staleness in run.staleness)
    # every prompt has one disposition, which the schedule itself holds to, or is on its way to one
    schedule: Schedule = first.schedule
    under_way = [*schedule.running.values(), *schedule.finished.values()]
    found = [*schedule.dispositions, *((group.epoch, group.prompt_id) for group in under_way), *first.again]
    assert sorted(found) == [(0, prompt) for prompt in range(first.prompts)]
    assert schedule.counts["trained"] == made.updates * groups and not schedule.counts["skipped"]
    # every token is trained, under way or wasted
    assert run.trained + run.under_way <= run.sampled * (1 + 1e-6)
    if not filtered and not run.failures:
        assert run.trained + run.under_way == pytest.approx(run.sampled)
    assert 0 <= run.engine_busy <= 1 + 1e-9 and 0 <= run.trainer_busy <= 1 and 0 <= run.straggler_wait <= 1
    if eta == 0:
        assert run.straggler_wait == 0


def test_a_run_whose_trainers_fail_trains_everything_since_the_checkpoint_again():
    made = config(groups=4, n=2, engines=2, eta=2, updates=30, every=5)
    lengths = LognormalLengths(300, 0.8, 2000)
    calm = Simulator(made, times(made), lengths, Circumstances()).run()
    around = Circumstances(node_mtbf_s=calm.seconds / 2, return_s=5, seed=3)
    run = Simulator(made, times(made), lengths, around).run()
    assert run.failures["trainer node"] and run.failures["engine node"]
    assert run.wasted > 0 and run.seconds > calm.seconds + 5
    assert len(run.updates) == 30 and max(run.staleness) <= 2


def test_a_run_that_gets_nowhere_ends_with_a_line():
    made = config(updates=5)
    around = Circumstances(node_mtbf_s=0.01, return_s=1)
    with pytest.raises(
        ConfigError, match=r"--mtbf-hours .*: the run was launched 1000 times without reaching version 1"
    ):
        Simulator(made, times(made), LognormalLengths(300, 0.5, 2000), around).run()


def test_memory_for_few_answers_costs_time():
    made = config(groups=4, n=4, eta=2, max_running=64)
    lengths = LognormalLengths(300, 0.5, 2000)
    ample, scarce = (
        Simulator(made, times(made, tokens), lengths, Circumstances()).run() for tokens in (math.inf, 2500)
    )
    assert scarce.preempted and not ample.preempted and scarce.seconds > ample.seconds


def test_shared_gpus_take_turns_or_are_refused():
    made = config(eta=1)
    made.machine.shared = True
    with pytest.raises(ConfigError, match=r"machine.shared: .* rollout.max_staleness=0"):
        Simulator(made, times(made), LognormalLengths(10, 1, 100), Circumstances())
    made.rollout.max_staleness = 0
    assert Simulator(made, times(made), LognormalLengths(10, 1, 100), Circumstances()).run().gpus == 1


class TestCommand:
    COMMON = ("configs/r1_1.5b.yaml", "model.path=configs/models/DeepSeek-R1-Distill-Qwen-1.5B", "batch_size=1024")
    SMALL = ("trainer.dp=4", "rollout.engines=12", "checkpoint.every=2")

    def simulate(self, *arguments):
        return simulate.main([*self.COMMON, *self.SMALL, *arguments])

    def test_it_says_what_the_run_is_like(self, capsys, monkeypatch, tmp_path):
        monkeypatch.chdir(ROOT)
        arguments = "--gpu", "h800", "--median", "1000", "--simulate", "6", "--json", str(tmp_path / "found.json")
        assert self.simulate(*arguments) == 0
        said = capsys.readouterr().out
        assert "16 h800: trainers 4, engines 12 × 1" in said and "for 250 updates, 6 of them simulated" in said
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["gpus"] == 16 and len(found["updates"]) == 6
        assert sum(found["staleness"].values()) == 6 * 1024
        assert found["tokens_per_s"] == pytest.approx(1024 * 1300 / found["update_s"], rel=0.3)

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--gpu", "h8000", "--median", "1000"], "the nearest name is h800"),
            (["--gpu", "h800"], "--median: say how long answers are"),
            (["--gpu", "h800", "--median", "1", "--lengths-of", "runs/none"], "--median: the lengths are those of"),
            (["--gpu", "h800", "--lengths-of", "runs/none"], "no batch-*.msgpack in it"),
            (["--gpu", "h800", "--median", "nan"], "lengths: median=nan"),
            (["--gpu", "h800", "--median", "10", "--filtered", "1"], "--filtered 1"),
            (["--gpu", "h800", "--median", "10", "--gpu-gb", "8"], "a trainer rank"),
            (["--gpu", "h800", "--median", "10", "--gpu-gb", "nan"], "at least one GPU and a size"),
            (["--gpu", "h800", "--median", "10", "--gpus", "0"], "at least one GPU and a size"),
            (["--gpu", "h800", "--median", "10", "--simulate", "-5"], "expected a number of updates"),
            (["--gpu", "h800", "--median", "10", "mode=sft", "data.eval="], "there is nothing to simulate"),
        ],
    )
    def test_bad_input_is_one_line(self, capsys, monkeypatch, arguments, says):
        monkeypatch.chdir(ROOT)
        assert self.simulate(*arguments) == 2
        said = capsys.readouterr().err
        assert says in said and said.startswith("error: ") and said.count("\n") == 1

    def test_a_long_one_says_how_far_it_is(self, capsys, monkeypatch):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(simulate, "QUIET_S", 0)
        assert self.simulate("--gpu", "h100", "--median", "100", "--simulate", "3") == 0
        assert capsys.readouterr().err.count(" of 3 updates, ") == 3


def test_the_same_prompts_have_the_same_answers_whatever_else_differs():
    made = config(groups=8, n=4, eta=0)
    run, other = (
        Simulator(made, times(made, reward_s=seconds), LognormalLengths(100, 1, 900), Circumstances()).run()
        for seconds in (0.1, 3.0)
    )
    assert [update.tokens for update in run.updates] == [update.tokens for update in other.updates]


class SteadyTrainer:
    """Trains so many answer tokens a second."""

    def __init__(self, tokens_per_s):
        self._tokens_per_s = tokens_per_s

    def update(self, prompts, answers, version=0):
        return sum(answers) / self._tokens_per_s


def measured(engines, eta, tokens_per_s, gpu=H100):
    """Returns what the updates of a simulated run tell of its pools, and the advice."""
    made = config(groups=16, n=8, updates=60, engines=engines, eta=eta, max_running=64)
    steady = replace(times(made, gpu=gpu), trainer=SteadyTrainer(tokens_per_s))
    run = Simulator(made, steady, LognormalLengths(400, 0.7, 2000, 50), Circumstances()).run()
    lines = simulate.update_lines(made, run)
    return Balance.of(lines[20:]), advise(made, lines)


@pytest.mark.parametrize(
    ("step_s", "request_s", "less"), [pytest.param(0.01, 6e-5, 0.025, marks=pytest.mark.soak), (0.008, 8e-5, 0.035)]
)
def test_advice_predicts_what_an_engine_more_or_less_does(step_s, request_s, less):
    """What runs of 1 to 6 engines say of one more and of one less, beside runs with those: the time of an update. The
    more of a step each answer takes, the more it errs about one less, which leaves more answers to each engine."""
    gpu = replace(H100, efficiencies=replace(H100.efficiencies, step_s=step_s, request_s=request_s))
    wrong = {1: [], -1: []}
    for eta, tokens_per_s in product((0, 1, 2, 4, 8), (12_500, 1e9)):
        runs = {engines: measured(engines, eta, tokens_per_s, gpu)[0] for engines in range(1, 7)}
        for engines, step in product(runs, wrong):
            if other := runs.get(engines + step):
                predicted = runs[engines].update_s_with(engines + step)
                wrong[step].append(abs(predicted / other.update_s - 1))
    assert len(wrong[1]) == len(wrong[-1]) == 50
    mean, most = ({step: figure(errors) for step, errors in wrong.items()} for figure in (fmean, max))
    print(f"an engine more: {mean[1]:.1%}, {most[1]:.1%} at most; less: {mean[-1]:.1%}, {most[-1]:.1%} at most")
    assert mean[1] < 0.035 and most[1] < 0.3 and mean[-1] < less and most[-1] < 0.15


def test_advice_on_runs_whose_short_pool_is_known():
    shorts = {
        (engines, tokens_per_s): advice and advice.short
        for engines, tokens_per_s in [(1, 12_500), (2, 12_500), (5, 12_500), (6, 12_500), (3, 1e9)]
        for _, advice in [measured(engines, 8, tokens_per_s)]
    }
    assert shorts == {
        (1, 12_500): Short.ENGINES,
        (2, 12_500): Short.ENGINES,
        (5, 12_500): Short.TRAINERS,
        (6, 12_500): Short.TRAINERS,
        (3, 1e9): Short.ENGINES,
    }
    assert measured(3, 1, 1e9)[1].short is Short.NEITHER, "one answer of a batch takes as long as all of them"

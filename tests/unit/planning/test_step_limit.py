"""What a run's updates say of longer or shorter staleness, against the rate limit of a run that has it."""

import math

import pytest

from areal_megatron.config import Config, ConfigError
from areal_megatron.config.algorithms import LEAST_FACTOR
from areal_megatron.planning.forecast.step_limit import StepLimit
from areal_megatron.ppo.in_flight import InFlight, Seen

ENTROPY, TARGET = 0.5, 0.07


def config(lr=1e-4, minibatches=1, target=TARGET):
    made = Config()
    made.optimizer.lr, made.optimizer.staleness_kl, made.ppo.minibatches = lr, target, minibatches
    return made


def trained(staleness, lr=1e-4, drift=5e5, updates=200):
    """The update lines of a run all of whose answers are so stale, whose policy moves by drift · path²."""
    lines, known, paths = [], InFlight(), [0.0] * staleness
    for _ in range(updates):
        divergence = drift * sum(paths[:staleness]) ** 2
        stale = [(0.0, 0.0)] * (staleness - 1) + [(1000.0, 1000 * divergence)]
        known, seen = known.after(Seen((0.0, 0.0), tuple(stale), 1000.0, 1000 * ENTROPY))
        factor = known.factor(TARGET, lr, staleness)
        known, paths = known.moved(lr * factor, factor, staleness), [lr * factor, *paths]
        histogram = {str(staleness): 128}
        line = {"kl_staleness": seen, "lr_factor": factor, "entropy": ENTROPY, "staleness_mean": float(staleness)}
        lines.append(line | {"staleness_histogram": histogram})
    return lines


@pytest.mark.parametrize("other", [1, 2, 4, 6, 16])
@pytest.mark.parametrize("staleness", [2, 8])
def test_the_rate_left_is_that_of_a_run_with_the_other_staleness(staleness, other):
    told = StepLimit.of(trained(staleness)[-50:], config(), config()).share({other: 64})
    assert told == pytest.approx(trained(other)[-1]["lr_factor"], rel=0.05)
    assert told < 1 or other <= 2, "drift is such that most of these are scaled down"


def test_the_rate_left_is_of_the_rate_that_is_planned():
    lines = trained(8)[-50:]
    whole = StepLimit.of(lines, config(), config()).share({8: 1})
    assert StepLimit.of(lines, config(), config(lr=2e-4)).share({8: 1}) == pytest.approx(whole / 2)
    assert StepLimit.of(lines, config(), config(minibatches=4)).share({8: 1}) == pytest.approx(whole / 4)
    assert StepLimit.of(lines, config(), config(target=4 * TARGET)).share({8: 1}) == pytest.approx(min(1, 2 * whole))


def test_answers_count_by_the_square_of_their_staleness():
    limit = StepLimit(2.0)
    assert limit.share({0: 3, 4: 1}) == limit.share({2: 1}) == limit.share({0: 9}) == 1
    assert limit.share({0: 1, 8: 1}) == pytest.approx(2 / math.sqrt(32))
    assert StepLimit().share({1000: 1}) == 1
    assert StepLimit(0.0).share({8: 1}) == LEAST_FACTOR and StepLimit(0.0).share({0: 1}) == 1


def test_a_policy_that_does_not_move_limits_nothing():
    lines = [line | {"kl_staleness": -1e-6} for line in trained(2, updates=3)]
    assert StepLimit.of(lines, config(), config()).share({64: 1}) == 1


@pytest.mark.parametrize(
    ("lines", "planned", "says"),
    [
        ([], config(), "has trained no stale answers"),
        ([{"staleness_mean": 0.0, "staleness_histogram": {"0": 9}, "entropy": 1.0}], config(), "no stale answers"),
        (trained(2, updates=3), config(target=0.0), "optimizer.staleness_kl is 0"),
    ],
)
def test_what_says_nothing_is_refused(lines, planned, says):
    with pytest.raises(ConfigError, match=says):
        StepLimit.of(lines, config(), planned)


def test_a_run_whose_rate_was_never_scaled_tells_as_much():
    whole = [{key: value for key, value in line.items() if key != "lr_factor"} for line in trained(4, drift=1.0)]
    scaled = [line | {"lr_factor": 1.0} for line in trained(4, drift=1.0)]
    assert StepLimit.of(whole, config(), config()) == StepLimit.of(scaled, config(), config())
    assert 4 < StepLimit.of(whole, config(), config()).reach < math.inf

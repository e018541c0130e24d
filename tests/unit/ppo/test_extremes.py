"""Losses and penalties of ratios that no float32 holds, against the formulas in decimal numbers of any size."""

import math
from decimal import Decimal
from itertools import product

import pytest
import torch

from areal_megatron.ppo import diagnostics, loss
from areal_megatron.ppo.critic import value_loss
from areal_megatron.ppo.loss import Bounds, Tokens
from areal_megatron.ppo.penalty import PenaltyTokens, penalty

EXPONENTS = (-1000, -90, -30, 0, 30, 89, 90, 400, 1000)
ADVANTAGES = (-1.5, 0.0, 1e-9, 2.0)
CORRECTIONS = {
    "none": {},
    "truncate": {"truncate": 5.0},
    "product": {"product_truncate": 5.0},
    "mask": {"mask_low": 0.5, "mask_high": 5.0},
    "sequence mask": {"sequence_mask_high": 5.0},
    "negatives": {"negative_mask": 10.0},
}
LOW, HIGH, DUAL = Decimal("0.2"), Decimal("0.25"), 3
ONE = Decimal(1)


def number(value):
    return float(value) if abs(value) < Decimal("1e300") else math.copysign(math.inf, value)


def weight(lag, drift, advantage, bounds):
    w = Decimal(lag).exp()
    masked = w > bounds.get("mask_high", math.inf) or w < bounds.get("mask_low", 0)
    masked |= w > bounds.get("sequence_mask_high", math.inf)
    masked |= advantage < 0 and -(lag + drift) > bounds.get("negative_mask", math.inf)
    w = min(w, Decimal(bounds.get("truncate", "inf")), Decimal(bounds.get("product_truncate", "inf")))
    return Decimal(0) if masked else w


def clipped(u, a, dual):
    counted = min(u, 1 + HIGH) if a > 0 else min(max(u, 1 - LOW), Decimal(dual))
    return counted * a, u * a if counted == u else Decimal(0)


def gated(u, a, dual):
    tau = Decimal("1.0") if a > 0 else Decimal("1.05")
    closed = (-tau * (u - 1)).exp()
    return 4 / tau / (1 + closed) * a, 4 * u * closed / (1 + closed) ** 2 * a


def weighted(u, a, dual):
    factor = max(min(u, 1 + HIGH), 1 - LOW) * a
    return factor * CURRENT, factor


CURRENT = Decimal(-3)
FORMULAS = {"clipped": clipped, "gated": gated, "weighted": weighted}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dual", [math.inf, DUAL])
@pytest.mark.parametrize("corrections", CORRECTIONS)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_and_its_gradient_are_finite_where_those_of_the_formula_are(name, corrections, dual, whole):
    cases, bounds = list(product(EXPONENTS, EXPONENTS, ADVANTAGES)), CORRECTIONS[corrections]
    drift, lag, advantages = (torch.tensor(column, dtype=torch.float32) for column in zip(*cases, strict=True))
    current = torch.full_like(drift, float(CURRENT)).requires_grad_()
    proximal = current.detach() - drift
    one = torch.arange(len(cases))
    values = Tokens(current, proximal, proximal - lag, advantages, one, one >= 0)
    found = getattr(loss, name)(values, Bounds(float(LOW), float(HIGH), bounds, whole, float(dual), (1.0, 1.05)))
    (gradient,) = torch.autograd.grad(found.sum(), current)
    for (x, y, a), value, slope in zip(cases, found.tolist(), gradient.tolist(), strict=True):
        a, w = Decimal(torch.tensor(a).item()), weight(y, x, a, bounds)
        expected, expected_slope = (-w * part for part in FORMULAS[name](Decimal(x).exp(), a, dual))
        assert value == pytest.approx(number(expected), rel=1e-9, abs=1e-300), (x, y, a)
        if math.isinf(value):
            continue
        expected_slope = torch.tensor(number(expected_slope)).item()  # what a float32 holds of it
        assert slope == pytest.approx(expected_slope, rel=1e-5, abs=1e-40), (x, y, a)
    sums = loss.metric_sums(values, torch.zeros_like(drift), Bounds(0.2, 0.25, bounds))
    right = torch.zeros_like(values.kept)
    sums |= diagnostics.sums(values, torch.zeros_like(drift), right, drift, Bounds(0.2, 0.25, bounds))[0]
    assert not any(value.isnan() for value in sums.values()), "infinite at most"


@pytest.mark.parametrize("name", ["kl_forward", "kl_reverse"])
def test_divergences_from_a_teacher_are_finite_where_one_is_sure(name):
    """The student, the teacher, or both, of the same token or of others."""
    sure = torch.tensor([[-1e-8, -40.0, -100.0], [-100.0, 0.0, -100.0], [-100.0, -100.0, -100.0], [-2.0, -2.0, -2.0]])
    for own, taught in product(sure, sure):
        own = own[None].clone().requires_grad_()
        tokens = PenaltyTokens(own[:, 0], own[:, 0], own[:, 0], likely=own, taught=taught[None])
        found = penalty(tokens, {name: 1.0})
        (gradient,) = torch.autograd.grad(found.sum(), own)
        assert found.isfinite().all() and gradient.isfinite().all() and found > -1e-5
        assert bool((own.detach()[0] == taught).all()) == (abs(found.item()) < 1e-9)


@pytest.mark.parametrize("cap", [None, math.inf, 5.0])
@pytest.mark.parametrize("name", ["kl_k2", "kl_k3"])
def test_a_penalty_and_its_gradient_are_finite_where_those_of_the_formula_are(name, cap):
    cases = list(product((-600, -90, -30, 0, 30, 90, 600), repeat=2))
    reference, behaviour = (-3 - torch.tensor(column).float() for column in zip(*cases, strict=True))
    current = torch.full_like(reference, float(CURRENT)).requires_grad_()
    weighing = {} if cap is None else {"behaviour": behaviour, "cap": cap}
    tokens = PenaltyTokens(current, current.detach(), torch.zeros_like(reference), reference=reference, **weighing)
    found = penalty(tokens, {name: 1.0})
    (gradient,) = torch.autograd.grad(found.sum(), current)
    for (k1, drift), value, slope in zip(cases, found.tolist(), gradient.tolist(), strict=True):
        k1, rho = Decimal(k1), ONE if cap is None else min(Decimal(drift).exp(), Decimal(cap))
        if name == "kl_k2":
            expected, expected_slope = rho * k1**2 / 2, rho * k1
        else:
            k3, moves = (-k1).exp() - 1 + k1, cap is not None and Decimal(drift).exp() < cap
            expected, expected_slope = rho * k3, rho * k1 if moves else rho * (1 - (-k1).exp())
        assert value == pytest.approx(number(expected), rel=1e-9, abs=1e-12), (k1, drift)
        expected_slope = torch.tensor(number(expected_slope)).item()
        assert slope == pytest.approx(expected_slope, rel=1e-5, abs=1e-6), (k1, drift)


def test_the_effective_share_of_huge_weights_is_a_number():
    assert loss.effective_share(1e200, 1e250, 10.0) == pytest.approx(1e149)
    assert loss.effective_share(1e200, math.inf, 10.0) == 0


@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_the_loss_of_a_value_far_off_and_its_gradient_are_numbers(clip):
    current = torch.tensor([3e25, -3e25, 1.0], requires_grad=True)
    found = value_loss(current, torch.zeros(3), torch.tensor([1.0, -3e20, 1.0]), clip)
    (gradient,) = torch.autograd.grad(found.sum(), current)
    errors = [3e25, -3e25 + 3e20, 0.0 if clip == math.inf else 0.8]
    assert found.tolist() == pytest.approx([error**2 / 2 for error in errors], rel=1e-6)
    assert gradient.tolist() == pytest.approx([3e25, -3e25 + 3e20, 0.0], rel=1e-6)

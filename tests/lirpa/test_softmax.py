"""The repaired softmax: both faults of the stock operator, exact intervals, soundness on wide and zero-width scores."""

from __future__ import annotations

import pytest
import torch
from attn_bounds_lirpa import repair_softmax
from attn_bounds_lirpa.compat import HAS_LSE_SOFTMAX
from attn_bounds_lirpa.relaxations import (
    chord_of_exp,
    log_softmax_of_scores_interval,
    softmax_of_scores_lower,
    softmax_of_scores_upper,
)

from tests.lirpa.conftest import ball, convert

pytestmark = pytest.mark.lirpa
stock = pytest.mark.skipif(not HAS_LSE_SOFTMAX, reason="this auto_LiRPA has no softmax operator of its own")


class FirstMinusLine(torch.nn.Module):
    """softmax(W x, 0, 0)[0] - 0.02 W x for a scalar x."""

    def __init__(self, width):
        super().__init__()
        self.spread = torch.nn.Linear(1, 3, bias=False)
        self.spread.weight.data = torch.tensor([[width], [0.0], [0.0]])
        self.read = torch.nn.Linear(4, 1, bias=False)
        self.read.weight.data = torch.tensor([[1.0, 0.0, 0.0, -0.02]])

    def forward(self, x):
        s = self.spread(x)
        return self.read(torch.cat([torch.softmax(s, -1), s[:, :1]], -1))


def upper_bound(width, repaired):
    x = torch.tensor([[-0.5]])
    model = FirstMinusLine(width)
    network = convert(model, x)
    if repaired:
        assert repair_softmax(network)
    _, upper = network.compute_bounds(x=(ball(x, 0.5),), method="CROWN")
    truth = model(torch.linspace(-1, 0, 2001)[:, None]).max()
    return upper.item(), truth.item()


@stock
@pytest.mark.parametrize("width", [20.0, 30.0, 60.0])
def test_stock_softmax_bounds_below_an_attained_value(width):
    upper, truth = upper_bound(width, repaired=False)
    assert upper < truth - 0.03


@pytest.mark.parametrize("width", [1.0, 10.0, 20.0, 30.0, 60.0, 200.0, 2000.0])
def test_repaired_softmax_is_sound_for_wide_scores(width):
    upper, truth = upper_bound(width, repaired=True)
    assert truth - 1e-9 <= upper < float("inf")


class PartlyConstant(torch.nn.Module):
    """Two softmax outputs of three scores, the first score constant."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.first.weight.data[0] = 0
        self.last = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.softmax(self.first(torch.relu(x)), -1))


def gradient_with_respect_to_score_bounds(repaired):
    x = torch.randn(1, 2)
    network = convert(PartlyConstant(), x)
    if repaired:
        repair_softmax(network)
    network.compute_bounds(x=(ball(x, 0.5),), method="CROWN")
    node = next(n for n in network.nodes() if "Softmax" in type(n).__name__)
    score = node.inputs[0]
    score.lower, score.upper = (t.detach().clone().requires_grad_(True) for t in (score.lower, score.upper))
    assert (score.lower[0, 0] - score.upper[0, 0]).abs() < 1e-12
    with torch.no_grad():
        score.upper[0, 0] = score.lower[0, 0]
    _, lower, upper = node.bound_backward(torch.ones(1, 1, 3), torch.ones(1, 1, 3), score, start_node=None)
    (lower.sum() + upper.sum()).backward()
    return torch.stack([score.lower.grad, score.upper.grad])


@stock
def test_stock_softmax_has_nan_gradients_at_a_constant_score():
    assert torch.isnan(gradient_with_respect_to_score_bounds(repaired=False)).any()


def test_repaired_softmax_has_finite_gradients_at_a_constant_score():
    assert torch.isfinite(gradient_with_respect_to_score_bounds(repaired=True)).all()


@pytest.mark.parametrize("width", [0.0, 1e-12, 1e-6, 1e-3, 0.1, 1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_affine_bounds_hold_at_random_points(width, dtype):
    lower = torch.randn(50, 5, dtype=dtype) * 3
    upper = lower + width * torch.rand(50, 5, dtype=dtype)
    theta = torch.rand(50, 5, 1, dtype=dtype)
    at = lower.unsqueeze(-2) + theta * (upper - lower).unsqueeze(-2)
    s = lower + torch.rand(200, 50, 5, dtype=dtype).round(decimals=1) * (upper - lower)
    p = torch.softmax(s, -1)
    lo_const, lo_coef = softmax_of_scores_lower(lower, upper, at)
    up_const, up_coef = softmax_of_scores_upper(lower, upper, at)
    slack = 1e-12 if dtype == torch.float64 else 2e-5
    scale = 1 + s.abs().amax() * max(lo_coef.abs().amax(), up_coef.abs().amax())
    assert (p >= lo_const + (lo_coef * s.unsqueeze(-2)).sum(-1) - slack * scale).all()
    assert (p <= up_const + (up_coef * s.unsqueeze(-2)).sum(-1) + slack * scale).all()


def test_interval_ends_are_attained():
    lower = torch.randn(20, 4)
    upper = lower + torch.rand(20, 4)
    log_lo, log_hi = log_softmax_of_scores_interval(lower, upper)
    for j in range(4):
        corner = torch.where(torch.arange(4) == j, lower, upper)
        torch.testing.assert_close(torch.softmax(corner, -1)[:, j], log_lo[:, j].exp())
        corner = torch.where(torch.arange(4) == j, upper, lower)
        torch.testing.assert_close(torch.softmax(corner, -1)[:, j], log_hi[:, j].exp())


def test_chord_is_never_below_exp():
    lower = torch.linspace(-30, 5, 40)[:, None]
    width = torch.tensor([0.0, 1e-15, 1e-9, 1e-4, 9.99e-4, 1e-3, 0.5, 9.9, 10.1, 50.0])
    upper = lower + width
    slope = chord_of_exp(lower, upper)
    for t in torch.linspace(0, 1, 11):
        value = lower.exp() + slope * t * width
        assert (value >= (lower + t * width).exp() * (1 - 1e-12)).all()


def test_softmax_bounds_lie_in_the_unit_interval_and_tangents_can_be_optimised():
    x = torch.randn(2, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Softmax(-1), torch.nn.Linear(5, 3))
    model[0].weight.data *= 4
    network = convert(model, x, optimize_bound_args={"iteration": 20, "lr_alpha": 0.1})
    repair_softmax(network)
    lower, upper = network.compute_bounds(x=(ball(x, 0.5),), method="CROWN")
    low, high = network.compute_bounds(x=(ball(x, 0.5),), method="CROWN-Optimized")
    assert (low >= lower - 1e-9).all() and (high <= upper + 1e-9).all()
    assert (low - lower).mean() > 1e-3 or (upper - high).mean() > 1e-3
    node = next(n for n in network.nodes() if "RepairedSoftmax" in type(n).__name__)
    network.compute_bounds(x=(ball(x, 0.5),), method="CROWN", final_node_name=node.name)
    low, high = node.interval_propagate((node.inputs[0].lower, node.inputs[0].upper))
    assert (low >= 0).all() and (high <= 1).all() and (low <= high).all()

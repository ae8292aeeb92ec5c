"""Fused attention: same outputs, bounds that hold on random small graphs, and the structure of the relaxation."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from attn_bounds_lirpa import (
    PerturbationTokenBall,
    attach,
    best_bounds,
    fuse_attention,
    optimised_lower_bound,
    repair_softmax,
)
from attn_bounds_lirpa.attention import full_differences, pair_indices
from attn_bounds_lirpa.compat import IS_03
from attn_bounds_lirpa.forms import ValueForms
from attn_bounds_lirpa.relaxations import attention_interval, softmax_lower, softmax_upper, weighted_sum_upper
from auto_LiRPA import BoundedTensor

from attn_bounds.errors import ArgumentError
from tests.lirpa.conftest import Attention, Block, attained, ball, convert, every_output, shaped

pytestmark = pytest.mark.lirpa


def random_differences(*shape, n, width):
    s_lower = torch.randn(*shape, n) * 2
    s_upper = s_lower + width * torch.rand(*shape, n)
    j, k = pair_indices(n)
    lower, upper = s_lower[..., k] - s_upper[..., j], s_upper[..., k] - s_lower[..., j]
    return s_lower, s_upper, *full_differences(lower, upper, n)


@pytest.mark.parametrize("width", [0.0, 1e-8, 0.1, 1.0, 5.0, 50.0, 500.0])
def test_softmax_bounds_in_the_differences_hold(width):
    s_lower, s_upper, d_lower, d_upper = random_differences(30, n=4, width=width)
    at = d_lower + torch.rand(30, 4, 1) * (d_upper - d_lower)
    s = s_lower + torch.rand(300, 30, 4).round(decimals=1) * (s_upper - s_lower)
    d = s.unsqueeze(-2) - s.unsqueeze(-1)
    p = torch.softmax(s, -1)
    const, coef = softmax_lower(d_lower, d_upper, at)
    assert (p >= const + (coef * d).sum(-1) - 1e-9 * (1 + width)).all()
    const, coef = softmax_upper(d_lower, d_upper, at)
    assert (p <= const + (coef * d).sum(-1) + 1e-9 * (1 + width)).all()


@pytest.mark.parametrize("width", [0.0, 0.1, 1.0, 20.0])
def test_weighted_sum_bound_holds_for_every_parameter(width):
    s_lower, s_upper, d_lower, d_upper = random_differences(20, n=5, width=width)
    w_lower = torch.randn(3, 20, 5)
    w_upper = w_lower + torch.rand(3, 20, 5)
    rho, lo, hi = torch.rand(3, 3, 20, 5).round(decimals=1)
    a, m, const = weighted_sum_upper(d_lower, d_upper, w_lower, w_upper, rho, torch.randn(3, 20, 1), lo, hi)
    for _ in range(200):
        s = s_lower + torch.rand(20, 5).round() * (s_upper - s_lower)
        w = w_lower + torch.rand(3, 20, 5).round() * (w_upper - w_lower)
        truth = (torch.softmax(s, -1) * w).sum(-1)
        bound = const + (m * w).sum(-1) + (a * (s.unsqueeze(-2) - s.unsqueeze(-1))).flatten(-2).sum(-1)
        assert (truth <= bound + 1e-9 * (1 + width)).all()


def test_attention_interval_is_attained_with_two_keys():
    s_lower, s_upper, d_lower, d_upper = random_differences(1, 6, n=2, width=2.0)
    v_lower = torch.randn(1, 2, 3)
    v_upper = v_lower + torch.rand(1, 2, 3)
    low, high = attention_interval(d_lower, d_upper, v_lower, v_upper)
    corners = [torch.stack([s_lower[..., 0], s_upper[..., 1]], -1), torch.stack([s_upper[..., 0], s_lower[..., 1]], -1)]
    values = torch.stack([torch.softmax(s, -1) @ v for s in corners for v in (v_lower, v_upper)])
    torch.testing.assert_close(low, values.amin(0))
    torch.testing.assert_close(high, values.amax(0))


CASES = [
    {},
    {"heads": 1, "d_head": 4},
    {"gain": 6.0},
    {"gain": 40.0},
    {"scale": 2.0},
    {"mask": torch.tensor([0.0, -1.0, -1e9, 2.0])},
    {"mask": torch.triu(torch.full((4, 4), torch.finfo(torch.float32).min), 1)},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("norm", "max_differences"), [(np.inf, 2000), (2, 2000), (np.inf, 0)])
def test_bounds_hold_and_outputs_are_unchanged(case, norm, max_differences):
    torch.manual_seed(3)
    model, x = Attention(**case), torch.randn(1, 4, 6)
    network = convert(model, x)
    report = fuse_attention(network, max_differences=max_differences)
    assert len(report["fused"]) == 1 and not report["skipped"]
    torch.testing.assert_close(network(x), model(x), rtol=0, atol=1e-12)
    for eps in (0.0, 0.05, 0.5, 3.0):
        C = torch.randn(1, 3, 24)
        lower, upper = network.compute_bounds(x=(ball(x, eps, norm),), C=shaped(C), method="CROWN")
        low, high = attained(model, x, eps, norm, C[0], samples=100, steps=4)
        slack = 1e-9 * (1 + C.abs().sum(-1))
        assert torch.isfinite(lower).all() and torch.isfinite(upper).all()
        assert (lower <= low + slack).all() and (upper >= high - slack).all()
        if norm == np.inf:
            lower, upper = network.compute_bounds(x=(ball(x, eps),), method="IBP")
            y = model(x + eps * (2 * torch.rand(500, 4, 6) - 1))
            assert (lower <= y + 1e-9).all() and (upper >= y - 1e-9).all()


@pytest.mark.parametrize(("max_rows", "max_differences"), [(0, 2000), (10**6, 2000), (0, 0)])
def test_two_blocks_hold_batched_and_are_tighter_than_the_repaired_stock(max_rows, max_differences):
    torch.manual_seed(5)
    model = torch.nn.Sequential(Block(gain=3.0), Block(gain=3.0))
    x = torch.randn(3, 4, 6)
    fused, plain = convert(model, x), convert(model, x)
    assert len(fuse_attention(fused, max_rows, max_differences)["fused"]) == 2
    assert len(repair_softmax(plain)) == 2
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    C = torch.randn(3, 4, 24)
    for eps in (0.01, 0.05):
        lower, upper = fused.compute_bounds(x=(ball(x, eps),), C=shaped(C), method="CROWN")
        plain_lower, plain_upper = plain.compute_bounds(x=(ball(x, eps),), C=shaped(C), method="CROWN")
        assert (upper - lower).mean() < (plain_upper - plain_lower).mean()
        for b in range(3):
            low, high = attained(model, x[b : b + 1], eps, C=C[b], samples=100, steps=8)
            assert (lower[b] <= low + 1e-9).all() and (upper[b] >= high - 1e-9).all()
            alone, _ = fused.compute_bounds(x=(ball(x[b : b + 1], eps),), C=shaped(C[b : b + 1]), method="CROWN")
            torch.testing.assert_close(alone[0], lower[b], rtol=0, atol=1e-9)


@pytest.mark.skipif(IS_03, reason="needs auto_LiRPA 0.7")
def test_optimised_rows_hold_and_improve():
    torch.manual_seed(6)
    model, x = torch.nn.Sequential(Block(gain=3.0), Block(gain=3.0)), torch.randn(1, 4, 6)
    network = convert(model, x)
    attach(network)
    C = torch.randn(1, 3, 24)
    best, _, first = optimised_lower_bound(network, (ball(x, 0.03),), C, 4, 6)
    low, _ = attained(model, x, 0.03, C=C[0])
    assert (best >= first - 1e-9).all() and (best - first).mean() > 1e-4
    assert (best[0] <= low + 1e-9).all()


def test_alpha_mode_holds_and_improves():
    torch.manual_seed(6)
    model, x = torch.nn.Sequential(Block(gain=3.0), Block(gain=3.0)), torch.randn(1, 4, 6)
    network = convert(model, x, optimize_bound_args={"iteration": 4, "lr_alpha": 0.1})
    attach(network)
    C = torch.randn(1, 3, 24)
    first, _ = network.compute_bounds(x=(ball(x, 0.03),), C=shaped(C), method="CROWN", bound_upper=False)
    lower, _ = network.compute_bounds(x=(ball(x, 0.03),), C=shaped(C), method="CROWN-Optimized", bound_upper=False)
    low, _ = attained(model, x, 0.03, C=C[0])
    assert (lower >= first - 1e-9).all() and (lower - first).mean() > 1e-4
    assert (lower[0] <= low + 1e-9).all()


def test_bounds_work_again_after_an_exception():
    model, x = Attention(), torch.randn(1, 4, 6)
    network = convert(model, x)
    fuse_attention(network)
    before, _ = network.compute_bounds(x=(ball(x, 0.1),), C=every_output(x), method="CROWN")
    with pytest.raises((RuntimeError, IndexError, AssertionError)):  # which one depends on the version
        network.compute_bounds(x=(ball(x, 0.1),), C=torch.randn(1, 2, 7), method="CROWN")
    after, _ = network.compute_bounds(x=(ball(x, 0.1),), C=every_output(x), method="CROWN")
    torch.testing.assert_close(before, after)


def test_single_precision_bounds_hold():
    torch.set_default_dtype(torch.float32)
    model, x = Attention(gain=3.0), torch.randn(1, 4, 6)
    network = convert(model, x)
    fuse_attention(network)
    lower, upper = network.compute_bounds(x=(ball(x, 0.1),), C=every_output(x), method="CROWN")
    low, high = attained(model, x, 0.1)
    assert lower.dtype == torch.float32
    assert (lower[0].flatten() <= low + 1e-5).all() and (upper[0].flatten() >= high - 1e-5).all()


def test_affine_bound_touches_its_own_centre():
    """With ranges shrunk to a point the bound is exact there, and its slope is the gradient: the constant belongs to
    the affine form's own centre."""
    torch.manual_seed(1)
    s = torch.randn(1, 1, 2, 3)
    full = s.unsqueeze(-2) - s.unsqueeze(-1)
    j, k = pair_indices(3)
    d = full[..., j, k]
    w = torch.randn(2, 1, 1, 2, 3)
    half = torch.tensor(0.5)
    for width in (1e-3, 1e-4):
        d_lower, d_upper = full_differences(d - width, d + width, 3)
        a, m, const = weighted_sum_upper(d_lower, d_upper, w - width, w + width, half, torch.tensor(0.0), half, half)
        p = torch.exp(-torch.logsumexp(full, -1))
        value = const + (m * w).sum(-1) + (a * full).flatten(-2).sum(-1)
        gap = value - (p * w).sum(-1)
        assert (gap >= 0).all() and (gap <= 40 * width**2).all()


@pytest.mark.skipif(IS_03, reason="this version's A dictionary has another shape")
def test_network_bound_at_its_centre_is_second_order():
    """The lower and the upper affine forms of a network, evaluated at the centre of the ball, enclose the output there
    with a gap that falls with the square of the radius."""
    model, x = torch.nn.Sequential(Attention(gain=2.0), Attention(gain=2.0)), torch.randn(1, 4, 6)
    network = convert(model, x)
    fuse_attention(network)
    root, final = network.input_name[0], network.final_name
    gaps = []
    for eps in (1e-2, 1e-3):
        *_, A = network.compute_bounds(x=(ball(x, eps),), method="CROWN", return_A=True, needed_A_dict={final: {root}})
        form = A[final][root]
        lower = (form["lA"].flatten(2) @ x.flatten()) + form["lbias"]
        upper = (form["uA"].flatten(2) @ x.flatten()) + form["ubias"]
        y = model(x).flatten(1)
        assert (lower <= y + 1e-12).all() and (upper >= y - 1e-12).all()
        gaps.append((upper - lower).mean())
    assert 50 < gaps[0] / gaps[1] < 200


def test_token_balls_hold_and_are_tighter_than_their_box():
    model, x = Attention(), torch.randn(1, 4, 6)
    network = convert(model, x)
    fuse_attention(network)
    region = PerturbationTokenBall(0.1, relative=True, frozen=[0])
    radii = region.radii(x)
    assert radii[0, 0] == 0 and torch.allclose(radii[0, 1:], 0.1 * x[0, 1:].norm(dim=-1))
    lower, upper = network.compute_bounds(x=(BoundedTensor(x, region),), C=every_output(x), method="CROWN")
    step = torch.randn(2000, 4, 6)
    step = radii[0][:, None] * step / step.norm(dim=-1, keepdim=True)
    y = model(x + step)
    assert (lower.view(x.shape) <= y + 1e-9).all() and (upper.view(x.shape) >= y - 1e-9).all()
    box = ball(x, radii[..., None])
    box_lower, _ = network.compute_bounds(x=(box,), C=every_output(x), method="CROWN")
    assert (lower >= box_lower - 1e-9).all() and (lower - box_lower).mean() > 0


def test_what_is_not_attention_is_left_alone_with_a_reason():
    class Scaled(torch.nn.Module):
        def forward(self, x):
            s = torch.softmax(torch.relu(x.matmul(x.transpose(-1, -2))), -1)
            return s.matmul(x)

    x = torch.randn(1, 2, 3, 4)
    network = convert(Scaled(), x)
    report = attach(network)
    assert not report["fused"] and len(report["repaired"]) == 1
    (reason,) = report["skipped"].values()
    assert "BoundRelu" in reason
    if IS_03:
        return  # its own MatMul does not propagate through this graph
    lower, upper = network.compute_bounds(x=(ball(x, 0.1),), C=every_output(x), method="CROWN")
    y = Scaled()(x + 0.1 * torch.randn(500, 2, 3, 4).clamp(-1, 1))
    assert (lower.view(x.shape) <= y + 1e-9).all() and (upper.view(x.shape) >= y - 1e-9).all()


def test_a_bound_that_is_not_finite_becomes_the_interval_bound():
    model, x = torch.nn.Sequential(Attention(), Attention()), torch.randn(1, 4, 6)
    network = convert(model, x)
    fuse_attention(network)
    network.compute_bounds(x=(ball(x, 0.1),), C=every_output(x), method="CROWN")
    mix = next(n for n in network.nodes() if type(n).__name__ == "BoundAttentionMix")
    rows = torch.randn(2, 1, *mix.output_shape[1:])
    mix.network = lambda: None
    mix.inputs[0].lower = torch.full_like(mix.inputs[0].lower, -float("inf"))
    with pytest.warns(UserWarning, match="interval bound"):
        _, lower, upper = mix.bound_backward(rows, rows, *mix.inputs)
    assert torch.isfinite(lower).all() and torch.isfinite(upper).all()
    low, high = mix.interval_propagate(*[(n.lower, n.upper) for n in mix.inputs])
    torch.testing.assert_close(upper, (rows.clamp(min=0) * high + rows.clamp(max=0) * low).flatten(2).sum(-1))


@pytest.mark.parametrize("limit", ["exact", "quick"])
def test_the_range_of_value_directions_holds(limit):
    torch.manual_seed(8)
    model, x = torch.nn.Sequential(Block(), Block()), torch.randn(2, 4, 6)
    network = convert(model, x)
    fuse_attention(network, max_rows=0)
    network.compute_bounds(x=(ball(x, 0.05),), C=every_output(x), method="CROWN")
    cases = []
    for mix in [node for node in network.nodes() if type(node).__name__ == "BoundAttentionMix"]:
        value = mix.inputs[1]
        forms = ValueForms(network, value)
        directions = torch.randn(7, 2, 3)
        ranges = []
        for head in range(2):
            exact = [forms.range(directions, head, key) for key in range(4)]
            exact = [torch.stack(ends, -1) for ends in zip(*exact, strict=True)]
            quick = forms.quick_range(directions, head)
            assert (quick[0] <= exact[0] + 1e-9).all() and (quick[1] >= exact[1] - 1e-9).all()
            ranges.append(exact if limit == "exact" else quick)
        cases.append((value, directions, ranges))
    for _ in range(200):
        network(x + 0.05 * (2 * torch.rand(2, 4, 6) - 1))
        for value, directions, ranges in cases:
            for head, (low, high) in enumerate(ranges):
                w = torch.einsum("mbc,bjc->mbj", directions, value.forward_value[:, head])
                assert (w >= low - 1e-9).all() and (w <= high + 1e-9).all()


@pytest.mark.parametrize(
    ("gain", "method"),
    [(30.0, "CROWN"), (1e60, "CROWN"), (1e160, "CROWN"), pytest.param(1e60, "CROWN-Optimized", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore:.*interval bound takes its place")
def test_very_wide_scores_give_finite_bounds(gain, method):
    """Scores and their differences may overflow: then the interval bound stands in, and no NaN comes out."""
    torch.manual_seed(4)
    model, x = torch.nn.Sequential(*(Attention(heads=1, gain=gain) for _ in range(2))), torch.randn(1, 4, 6)
    network = convert(model, x, optimize_bound_args={"iteration": 2, "lr_alpha": 0.1})
    attach(network, max_groups=0)
    C = torch.randn(1, 2, 24)
    y = model(x + 0.5 * (2 * torch.rand(300, 4, 6) - 1)).flatten(1) @ C[0].T
    lower, upper = network.compute_bounds(x=(ball(x, 0.5),), C=shaped(C), method=method)
    assert torch.isfinite(lower).all() and torch.isfinite(upper).all()
    known = torch.isfinite(y).all(1)
    assert (lower <= y[known] + 1e-9).all() and (upper >= y[known] - 1e-9).all()


@pytest.mark.parametrize("kind", ["mix", "differences", "softmax"])
def test_single_precision_bounds_of_each_operator_are_rounded_outward(kind):
    """The affine bound that an operator returns in float32 lies above its float64 output in its own region."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(9)
    model, x = torch.nn.Sequential(Block(gain=2.0), Block(gain=2.0)), torch.randn(1, 4, 6)
    network = convert(model, x)
    _ = repair_softmax(network) if kind == "softmax" else attach(network)
    network.compute_bounds(x=(ball(x, 0.02),), C=every_output(x), method="CROWN")
    name = {"mix": "AttentionMix", "differences": "ScoreDifferences", "softmax": "RepairedSoftmax"}[kind]
    op = [node for node in network.nodes() if type(node).__name__ == f"Bound{name}"][-1]
    rows = torch.randn(6, 1, *op.output_shape[1:])
    slopes, _, bias = op.bound_backward(None, rows, *op.inputs)
    torch.set_default_dtype(torch.float64)
    assert bias.dtype == torch.float32
    if kind == "mix":  # differences are not free of each other, nor of the values: points of the network's own region
        exact = copy.deepcopy(model).double()
        points = x.double() + 0.02 * (2 * torch.rand(200, 4, 6) - 1)
        seen = convert(exact, x.double())
        attach(seen)
        seen(points)
        inputs = [seen[node.name].forward_value for node in op.inputs[:2]]
    else:
        ends = [(node.lower.double(), node.upper.double()) for node in op.inputs[:2]]
        inputs = [low + torch.rand(400, *low.shape[1:]).round() * (high - low) for low, high in ends]
    value = op.forward(*inputs).flatten(1) @ rows.double().flatten(1).T
    bound = sum(z.flatten(1) @ slope[1].double().flatten(1).T for z, slope in zip(inputs, slopes[:2], strict=True))
    assert (value <= bound + bias.double()[:, 0]).all()


def test_the_best_of_two_networks_is_no_looser_than_either():
    torch.manual_seed(7)
    model, x = Block(gain=20.0), torch.randn(1, 4, 6)
    fused, plain = convert(model, x), convert(model, x)
    attach(fused)
    repair_softmax(plain)
    C = torch.randn(1, 3, 24)
    arguments = {"x": (ball(x, 0.3),), "C": shaped(C), "method": "CROWN"}
    lower, upper = best_bounds([fused, plain], **arguments)
    for network in (fused, plain):
        low, high = network.compute_bounds(**arguments)
        assert (lower >= low).all() and (upper <= high).all()
    low, high = attained(model, x, 0.3, C=C[0], samples=100, steps=4)
    assert (lower <= low + 1e-9).all() and (upper >= high - 1e-9).all()
    with pytest.raises(ArgumentError, match="networks"):
        best_bounds([], **arguments)

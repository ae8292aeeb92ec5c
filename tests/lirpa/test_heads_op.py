"""Attention heads as one operator: certificates on the input, affine bounds behind layers and beside residuals."""

from __future__ import annotations

import math

import pytest
import torch
from attn_bounds_lirpa import AttentionHeads, PerturbationTokenBall, repair_softmax
from attn_bounds_lirpa.certified import DEFAULT, Certified
from attn_bounds_lirpa.compat import IS_03
from attn_bounds_lirpa.tokens import Place, Scores, TokenHeads, default_parameters
from auto_LiRPA import BoundedTensor, PerturbationLpNorm

from attn_bounds import errors
from attn_bounds.certify import certify
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.regions import TokenBall, TokenBox
from tests.lirpa.conftest import Attention, ball, convert, every_output

pytestmark = pytest.mark.lirpa
CAUSAL = torch.triu(torch.full((4, 4), -1e9), 1)


def a_head(gain=1.0, d=6, width=3):
    draw = lambda *shape: torch.randn(*shape) / 2  # noqa: E731
    parts = [gain * draw(width, d), gain * draw(width, d), draw(width, d)]
    return AttentionHead(*parts, None, *(draw(width) for _ in range(3)), scale=0.7)


class Net(torch.nn.Module):
    """Attention of h heads with a projection; after a linear layer and a ReLU, and with a residual, where asked."""

    def __init__(self, heads=2, gain=1.0, first=False, residual=False, mask=None):
        super().__init__()
        self.heads = [a_head(gain) for _ in range(heads)]
        self.attention = AttentionHeads.of(self.heads, mask)
        self.out = torch.nn.Linear(3 * heads, 6)
        self.first = torch.nn.Linear(6, 6) if first else None
        self.residual = residual

    def forward(self, x):
        if self.first is not None:
            x = torch.relu(self.first(x))
        y = self.out(self.attention(x))
        return x + y if self.residual else y


def region_of(kind, x, radius):
    if kind == "tokens":
        return BoundedTensor(x, PerturbationTokenBall(radius))
    if kind == "ball":
        return BoundedTensor(x, PerturbationLpNorm(norm=2, eps=radius))
    return BoundedTensor(x, PerturbationLpNorm(norm=math.inf, x_L=x - radius, x_U=x + radius))


def sampled(kind, x, radius, count=1500):
    step = torch.randn(count, *x.shape)
    if kind == "box":
        return x + radius * step.sign()
    size = step.norm(dim=-1, keepdim=True) if kind == "tokens" else step.flatten(2).norm(dim=-1)[..., None, None]
    return x + radius * step / size


@pytest.mark.parametrize("kind", ["tokens", "box"])
@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_on_the_input_the_bound_is_the_certificate(kind, mask):
    model, x = AttentionHeads.of([a_head(), a_head(2.0)], mask), torch.randn(2, 4, 6)
    heads = [AttentionHead(*[layer.weight.detach()[rows] for layer in (model.q, model.k, model.v)], None,
                           *[layer.bias.detach()[rows] for layer in (model.q, model.k, model.v)], scale=0.7)
             for rows in (slice(0, 3), slice(3, 6))]  # fmt: skip
    network = convert(model, x)
    torch.testing.assert_close(network(x), model(x), rtol=0, atol=1e-12)
    C = torch.zeros(2, 3, 4, 6)
    c = torch.randn(3, 3)
    reads = [(0, 0), (1, 2), (1, 3)]  # head, query
    for row, (h, i) in enumerate(reads):
        C[:, row, i, 3 * h : 3 * h + 3] = c[row]
    lower, upper = network.compute_bounds(x=(region_of(kind, x, 0.02),), C=C, method="CROWN")
    for b in range(2):
        for row, (h, i) in enumerate(reads):
            place = TokenBall(0.02, relative=False) if kind == "tokens" else TokenBox(x[b] - 0.02, x[b] + 0.02)
            keys = None if mask is None else mask[i] == 0
            problem = HeadProblem(heads[h], x[b], i, c[row], place, keys=keys)
            for sign, bound in ((1, upper), (-1, -lower)):
                best = certify(problem if sign == 1 else problem.flipped(), "lagrangian", **DEFAULT)
                assert best.lower - 1e-9 <= bound[b, row] <= best.upper + 1e-9
                assert kind == "box" or best.is_exact


@pytest.mark.parametrize("kind", ["tokens", "ball", "box"])
@pytest.mark.parametrize(
    "case", [{}, {"residual": True}, {"first": True}, {"first": True, "residual": True, "gain": 8.0}, {"mask": CAUSAL}]
)
def test_no_attained_value_lies_outside(kind, case):
    model, x = Net(**case), torch.randn(2, 4, 6)
    network = convert(model, x)
    torch.testing.assert_close(network(x), model(x), rtol=0, atol=1e-12)
    C = torch.randn(2, 2, 4, 6)
    C[:, 1, :3] = 0
    for radius in (0.0, 0.05, 3.0):
        points = sampled(kind, x, radius)
        y = torch.stack([model(z) for z in points])
        values = torch.einsum("mbnd,bsnd->mbs", y, C)
        methods = ["CROWN", "Forward", "Forward+Backward", "IBP"] if kind == "box" else ["CROWN"]
        if IS_03:
            methods = [method for method in methods if method != "Forward"]  # its outputs must have one dimension
        for method in methods:
            rows = None if method in ("IBP", "Forward") else C
            found = network.compute_bounds(x=(region_of(kind, x, radius),), C=rows, method=method)
            low, high = (end.detach().reshape(2, -1) for end in found)
            attained = y.flatten(2) if rows is None else values
            slack = 1e-9 * (1 + attained.abs().amax())
            assert torch.isfinite(low).all() and torch.isfinite(high).all()
            assert (low <= attained + slack).all() and (high >= attained - slack).all(), method


def test_an_affine_bound_beside_a_residual_is_tighter_than_the_repaired_stock():
    torch.manual_seed(1)
    model, x = Net(heads=1, residual=True), torch.randn(1, 4, 6)

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.core = Attention(6, 1, 3, scale=0.7)
            for name in "qkv":
                getattr(self.core, name).load_state_dict(getattr(model.attention, name).state_dict())
            self.core.out.load_state_dict(model.out.state_dict())

        def forward(self, x):
            return x + self.core(x)

    network, plain = convert(model, x), convert(Plain(), x)
    repair_softmax(plain)
    torch.testing.assert_close(network(x), plain(x), rtol=0, atol=1e-12)
    C = torch.zeros(1, 3, 4, 6)
    C[:, :, 2] = torch.randn(3, 6)
    for radius in (0.01, 0.1):
        region = region_of("tokens", x, radius)
        low, high = network.compute_bounds(x=(region,), C=C, method="CROWN")
        plain_low, plain_high = plain.compute_bounds(x=(region,), C=C, method="CROWN")
        assert ((low >= plain_low - 1e-9) & (high <= plain_high + 1e-9)).all()
        y = torch.einsum("mbnd,bsnd->mbs", torch.stack([model(z) for z in sampled("tokens", x, radius)]), C)
        spread = y.amax(0) - y.amin(0)
        assert (high - low - spread).mean() < 0.9 * (plain_high - plain_low - spread).mean()


@pytest.mark.parametrize("first", [False, True])
def test_alpha_mode_moves_the_slopes_and_improves(first):
    torch.manual_seed(2)
    model, x = Net(heads=1, residual=True, first=first, gain=2.0), torch.randn(1, 4, 6)
    network = convert(model, x, optimize_bound_args={"iteration": 6, "lr_alpha": 0.1})
    C = torch.zeros(1, 2, 4, 6)
    C[:, :, 1] = torch.randn(2, 6)
    region = region_of("tokens", x, 0.1)
    with torch.no_grad():
        _, crown = network.compute_bounds(x=(region,), C=C, method="CROWN", bound_lower=False)
    _, alpha = network.compute_bounds(x=(region,), C=C, method="CROWN-Optimized", bound_lower=False)
    y = torch.einsum("mbnd,bsnd->mbs", torch.stack([model(z) for z in sampled("tokens", x, 0.1)]), C)
    assert (alpha <= crown + 1e-9).all() and (crown - alpha).max() > 1e-4 and (alpha >= y.amax(0)).all()


def test_single_precision_is_rounded_outward():
    model, x = Net(heads=1), torch.randn(1, 4, 6)
    torch.set_default_dtype(torch.float32)
    narrow, z = Net(heads=1).float(), x.float()
    narrow.load_state_dict(model.state_dict())
    network = convert(narrow, z)
    C = every_output(z)
    low, high = network.compute_bounds(x=(region_of("tokens", z, 0.05),), C=C, method="CROWN")
    assert low.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    exact = Net(heads=1)
    exact.load_state_dict({name: value.double() for name, value in narrow.state_dict().items()})
    double = convert(exact, z.double())
    wide_low, wide_high = double.compute_bounds(
        x=(region_of("tokens", z.double(), 0.05),), C=every_output(z.double()), method="CROWN"
    )
    assert torch.allclose(high.double(), wide_high, atol=1e-4) and torch.allclose(low.double(), wide_low, atol=1e-4)
    op = next(node for node in network.nodes() if type(node).__name__ == "BoundAttentionHead")
    rows = torch.randn(5, 1, 4, 3, dtype=torch.float32)
    (slope, *_), _, bias = op.bound_backward(None, rows, *op.inputs)
    place = op.ranges().place
    points = z.double() + 0.05 * torch.nn.functional.normalize(torch.randn(500, 4, 6), dim=-1)
    y = torch.einsum("mnd,snd->ms", exact.attention(points), rows[:, 0].double())
    bound = torch.einsum("snd,mnd->ms", slope[1][:, 0].double(), points) + bias[:, 0].double()
    assert slope[1].dtype == bias.dtype == torch.float32 and (y <= bound).all()
    assert place.centre.dtype == torch.float64


def test_gradients_of_the_operator_are_those_of_its_formula():
    model, x = AttentionHeads.of(a_head()), torch.randn(2, 4, 6, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,))


def test_errors_name_what_is_wrong():
    layer = torch.nn.Linear
    with pytest.raises(errors.ShapeError, match="q, k, v"):
        AttentionHeads(layer(6, 4), layer(6, 3), layer(6, 4))
    with pytest.raises(errors.ArgumentError, match="heads"):
        AttentionHeads(layer(6, 4), layer(6, 4), layer(6, 4), heads=3)
    with pytest.raises(errors.ArgumentError, match="heads"):
        AttentionHeads.of([a_head(width=3), a_head(width=2)])
    x = torch.randn(1, 4, 6)
    network = convert(Net(heads=1), x)
    op = next(node for node in network.nodes() if type(node).__name__ == "BoundAttentionHead")
    op.inputs[1].perturbed = True
    with pytest.raises(errors.UnsupportedModelError, match="weights"):
        op.heads()


def test_weights_that_change_are_read_again():
    model, x = Net(heads=1), torch.randn(1, 4, 6)
    network = convert(model, x)
    bounds = []
    for factor in (1.0, 3.0):
        with torch.no_grad():
            for weight in network.parameters():
                weight.mul_(factor)
        y = torch.stack([network(z) for z in sampled("tokens", x, 0.1, 300)])
        low, high = network.compute_bounds(x=(region_of("tokens", x, 0.1),), C=every_output(x), method="CROWN")
        assert (low.view(x.shape) <= y + 1e-9).all() and (high.view(x.shape) >= y - 1e-9).all()
        bounds.append(high - low)
    assert (bounds[1] > bounds[0]).all()


def test_ball_bounds_hold_for_one_ball_of_all_tokens():
    x = torch.randn(1, 4, 6)
    network = convert(Net(), x)
    low, high = network.compute_bounds(x=(ball(x, 0.1, 2),), C=every_output(x), method="CROWN")
    y = torch.stack([network(z) for z in sampled("ball", x, 0.1, 300)])
    assert (low.view(x.shape) <= y + 1e-9).all() and (high.view(x.shape) >= y - 1e-9).all()


@pytest.mark.parametrize("kind", ["tokens", "box"])
def test_both_affine_bounds_at_their_own_centre_are_second_order(kind):
    """Each radius belongs to the centre of its own affine form: there both bounds are above the value by O(r^2)."""
    heads = [a_head(2.0), a_head()]
    names = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V")
    stacked = [torch.stack([getattr(head, name) for head in heads]) for name in names]
    group = TokenHeads(*stacked, scale=0.7)
    z, rows = torch.randn(2, 4, 6), torch.randn(3, 2, 2, 4, 3)
    gaps = []
    for radius in (1e-2, 1e-3):
        balls = Place(z, torch.full((2, 4), radius))
        place = balls if kind == "tokens" else Place.box(z - 0.5 * radius, z + radius)
        z0 = place.centre
        value = torch.stack([torch.stack([head.forward(z0, i) for i in range(4)], 1) for head in heads], 1)
        truth = torch.einsum("sbhic,bhic->sb", rows, value)
        bounds = [Scores(group, place).upper(rows, default_parameters(2, 4, z)[None, None])]
        bounds.append(Certified(group, place, rows, torch.ones(4, 4, dtype=torch.bool)).affine()[:2])
        gaps.append([constant + torch.einsum("sbnd,bnd->sb", slope, z0) - truth for slope, constant in bounds])
    for wide, narrow in zip(*gaps, strict=True):
        assert (narrow >= -1e-12).all() and (wide >= 50 * narrow).all()

"""LOCAL regime: a head directly on the perturbed tokens is bounded as the library's certificates bound it."""

from __future__ import annotations

import math

import pytest
import torch
from attn_bounds_lirpa import PerturbationTokenBall, attach
from attn_bounds_lirpa.certified import DEFAULT
from attn_bounds_lirpa.compat import IS_03
from auto_LiRPA import BoundedTensor, PerturbationLpNorm

from attn_bounds.certify import certify_many
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.regions import TokenBall, TokenBox
from tests.lirpa.conftest import Attention, Block, convert, shaped

pytestmark = [pytest.mark.lirpa, pytest.mark.skipif(IS_03, reason="the LOCAL regime needs auto_LiRPA 0.7")]


def head_of(model, index):
    rows = slice(index * model.d_head, (index + 1) * model.d_head)
    parts = [getattr(model, name).weight.detach()[rows] for name in "qkv"]
    biases = [getattr(model, name).bias.detach()[rows] for name in "qkv"]
    return AttentionHead(*parts, model.out.weight.detach()[:, rows], *biases, scale=model.scale)


@pytest.mark.parametrize("mask", [None, torch.triu(torch.full((4, 4), -1e9), 1)])
@pytest.mark.parametrize("kind", ["ball", "box"])
@pytest.mark.parametrize("options", [None, {"steps": 8}])
def test_the_bound_of_one_head_is_the_certificate(mask, kind, options):
    torch.manual_seed(2)
    model, x = Attention(heads=1, d_head=4, mask=mask), torch.randn(2, 4, 6)
    network = convert(model, x)
    attach(network, certificate=options)
    c = torch.randn(3, 6)
    query = 2
    C = torch.zeros(2, 3, 4, 6)
    C[:, :, query] = c
    if kind == "ball":
        region, place = PerturbationTokenBall(0.02, relative=True), lambda z: TokenBall(0.02)
    else:
        region = PerturbationLpNorm(norm=math.inf, x_L=x - 0.02, x_U=x + 0.02)
        place = lambda z: TokenBox(z - 0.02, z + 0.02)  # noqa: E731
    lower, upper = network.compute_bounds(x=(BoundedTensor(x, region),), C=C, method="CROWN")
    keys = None if mask is None else torch.arange(4) <= query
    bias = c @ model.out.bias.detach()
    for sign, bound in ((1, upper - bias), (-1, lower - bias)):
        problems = [
            HeadProblem(head_of(model, 0), z, query, sign * row, place(z), keys=keys) for z in x.detach() for row in c
        ]
        certificates = certify_many(problems, "lagrangian", **(options or DEFAULT))
        expected = torch.tensor([certificate.upper for certificate in certificates]).view(2, 3)
        attained = torch.tensor([certificate.lower for certificate in certificates]).view(2, 3)
        assert (sign * bound <= expected + 1e-9).all()
        assert (sign * bound >= attained - 1e-9).all()


def test_several_heads_and_queries_stay_sound():
    torch.manual_seed(3)
    model, x = Attention(), torch.randn(1, 4, 6)
    network = convert(model, x)
    attach(network)
    C = torch.randn(1, 4, 24)
    for radius in (0.0, 0.03, 0.5):
        region = PerturbationTokenBall(radius)
        lower, upper = network.compute_bounds(x=(BoundedTensor(x, region),), C=shaped(C), method="CROWN")
        step = torch.randn(3000, 4, 6)
        y = model(x + radius * step / step.norm(dim=-1, keepdim=True)).flatten(1) @ C[0].T
        assert (lower[0] <= y.amin(0) + 1e-9).all() and (upper[0] >= y.amax(0) - 1e-9).all()


class Late(torch.nn.Module):
    """Attention on what a ReLU leaves of the tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = torch.nn.Linear(6, 6), Attention()

    def forward(self, x):
        return self.attention(torch.relu(self.first(x)))


def test_the_regime_is_left_to_graphs_where_it_applies():
    x = torch.randn(1, 4, 6)
    for model, applies in (
        (Attention(), True),
        (Block(), True),
        (Attention(mask=torch.randn(4)), True),
        (Late(), False),
    ):
        network = convert(model, x)
        attach(network)
        names = {type(node).__name__ for node in network.nodes()}
        assert ("BoundReadHeads" in names) == applies and ("BoundAttentionMix" in names) != applies


def one_query(rows):
    """Rows c (s, 6) that read the output of query 1, (1, s, 4, 6)."""
    C = torch.zeros(1, len(rows), 4, 6)
    C[:, :, 1] = rows
    return C


def outside(network, x, radius, C, bounds):
    """How far the values at random points of the balls lie outside the bounds, at most."""
    step = torch.randn(2000, *x.shape[1:])
    step = radius * step / step.norm(dim=-1, keepdim=True)
    worst = -math.inf
    for b, (lower, upper) in enumerate(zip(*bounds, strict=True)):
        y = network(x[b] + step).flatten(1) @ C[0].flatten(1).T
        worst = max(worst, float((lower - y).max()), float((y - upper).max()))
    return worst


def test_weights_that_change_after_attach_are_read_again():
    model, x, C = Attention(heads=1, d_head=4), torch.randn(1, 4, 6), one_query(torch.randn(2, 6))
    network = convert(model, x)
    attach(network)
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for weight in network.parameters():
                weight.mul_(factor)
        region = BoundedTensor(x, PerturbationTokenBall(0.1))
        with torch.no_grad():
            bounds = network.compute_bounds(x=(region,), C=C, method="CROWN")
            assert outside(network, x, 0.1, C, bounds) <= 1e-9


def test_weights_that_are_inputs_of_their_own_for_each_element_are_not_one_head():
    class Weighted(torch.nn.Module):
        def forward(self, x, weights):
            q, k, v = (part.reshape(-1, 4, 1, 6).permute(0, 2, 1, 3) for part in x.matmul(weights).split(6, -1))
            return torch.softmax(q.matmul(k.transpose(-1, -2)), -1).matmul(v).permute(0, 2, 1, 3).reshape(-1, 4, 6)

    x, weights, C = torch.randn(3, 4, 6), torch.randn(3, 6, 18), one_query(torch.randn(2, 6))
    region = BoundedTensor(x, PerturbationTokenBall(0.1))
    network = convert(Weighted(), (region, weights))
    attach(network)
    lower, upper = network.compute_bounds(x=(region, weights), C=C.expand(3, -1, -1, -1), method="CROWN")
    for b in range(3):
        alone = lambda z, b=b: Weighted()(z, weights[b])  # noqa: E731
        assert outside(alone, x[b : b + 1], 0.1, C, (lower[b : b + 1], upper[b : b + 1])) <= 1e-9

"""Joint remainders of bilinear scores: enclosures of every point, tighter than McCormick's, never stale."""

from __future__ import annotations

import itertools

import pytest
import torch
from attn_bounds_lirpa import PerturbationTokenBall, attach
from attn_bounds_lirpa.attention import BoundScoreDifferences, pair_indices
from attn_bounds_lirpa.bilinear import remainder
from attn_bounds_lirpa.compat import IS_03
from auto_LiRPA import BoundedTensor

from tests.lirpa.conftest import Block, ball, convert, every_output

pytestmark = pytest.mark.lirpa


def sizes(form):
    return form.norm(dim=-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("errors", [0.0, 0.3])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_remainder_encloses_every_corner(dtype, errors, scale):
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 2, 5, generator=generator, dtype=dtype)
    k, many = scale * torch.stack([k, q, -q, 0 * k]), 4
    q_error, k_error = torch.full((2,), errors, dtype=dtype), torch.full((many, 2), errors * scale, dtype=dtype)
    high, low = remainder(q, q_error, sizes(q), k, k_error, sizes(k), torch.arange(5))
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=9)), dtype=dtype)
    corners = torch.cat([corners, corners * torch.rand(corners.shape, generator=generator, dtype=dtype)])
    t, e, f = corners.split([5, 2, 2], -1)
    left, right = t @ q.T + e * q_error, torch.einsum("nx,mcx->mnc", t, k) + f * k_error.unsqueeze(1)
    value = (left * right).sum(-1)
    assert (value <= high.unsqueeze(-1)).all() and (value >= low.unsqueeze(-1)).all()
    by_coordinate = ((q.abs().sum(-1) + q_error) * (k.abs().sum(-1) + k_error)).sum(-1)
    assert (high[:3] <= 2 * by_coordinate[:3]).all()
    if not errors:
        assert high[3] <= 1e-6 * scale and low[3] >= -1e-6 * scale  # a key that does not move
        assert low[1] >= -1e-4 * high[1]  # a square


def differences(network):
    return [node for node in network.nodes() if isinstance(node, BoundScoreDifferences)]


def two_blocks(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(Block(heads=2, d_head=3, gain=1.5), Block(heads=2, d_head=3, gain=1.5)).double().eval()


def bounds(network, x, C):
    with torch.no_grad():
        return network.compute_bounds(x=(x,), C=C, method="CROWN")


@pytest.mark.parametrize("seed", range(3))
def test_scores_stay_inside_their_planes_and_get_tighter(seed):
    model, x = two_blocks(seed), torch.randn(1, 4, 6, dtype=torch.float64)
    network, plain = convert(model, x), convert(model, x)
    for one in (network, plain):
        attach(one)
    for node in differences(plain):
        node.max_work = 0
    C, region = every_output(x), ball(x, 0.05)
    low, high = bounds(network, region, C)
    wide_low, wide_high = bounds(plain, region, C)
    assert (high - low).sum() < (wide_high - wide_low).sum()
    points = x + 0.05 * (2 * torch.rand(3000, 4, 6, dtype=x.dtype) - 1).sign() * torch.rand(3000, 1, 1).round(
        decimals=1
    )
    network(points)
    j, k = pair_indices(4)
    for node in differences(network):
        known = node.known_joint
        assert known.is_bound and all(other.known_joint is None for other in differences(plain))
        q, keys = (source.forward_value for source in node.inputs[:2])
        q, keys = q - known.query, keys.transpose(-1, -2) - known.key
        value = torch.einsum("bhic,bhpc->bhip", q, keys[:, :, k] - keys[:, :, j])
        assert (value <= known.above).all() and (value >= known.below).all()
        assert ((value.amax(0) > 0.01 * known.above) & (value.amin(0) < 0.01 * known.below)).all()


def test_remainders_follow_region_weights_and_batch():
    model, x = two_blocks(7), torch.randn(1, 4, 6, dtype=torch.float64)
    network, C = convert(model, x), every_output(x)
    attach(network)
    small = bounds(network, ball(x, 0.02), C)
    large = bounds(network, ball(x, 0.1), C)
    again = bounds(network, ball(x, 0.02), C)
    torch.testing.assert_close(again, small, rtol=0, atol=1e-12)
    assert (large[1] > small[1]).all()
    elsewhere = x + 0.3 * torch.randn_like(x)
    both = torch.cat([x, elsewhere])
    of_both = bounds(network, ball(both, 0.02), every_output(both))
    apart = [bounds(network, ball(one, 0.02), C) for one in (x, elsewhere)]
    for side in (0, 1):
        torch.testing.assert_close(of_both[side], torch.cat([a[side] for a in apart]), rtol=0, atol=1e-10)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.3)
    changed = bounds(network, ball(elsewhere, 0.02), C)
    fresh = convert(model, x)
    attach(fresh)
    with torch.no_grad():
        for one, other in zip(fresh.parameters(), network.parameters(), strict=True):
            one.copy_(other)
    for got, expected in zip(changed, bounds(fresh, ball(elsewhere, 0.02), C), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_batch_of_parts_uses_what_holds_for_the_whole():
    model, x = two_blocks(2), torch.randn(1, 4, 6, dtype=torch.float64)
    network, C = convert(model, x), every_output(x)
    attach(network)
    one = bounds(network, ball(x, 0.05), C)
    known = [node.known_joint for node in differences(network)]
    repeated = x.expand(3, -1, -1).contiguous()
    three = bounds(network, ball(repeated, 0.05), every_output(repeated))
    assert [node.known_joint for node in differences(network)] == known
    for side in (0, 1):
        torch.testing.assert_close(three[side], one[side].expand_as(three[side]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("blocks", [[0, 0, 0, 0, 0], [0, 0, 1, 1, 2]])
def test_remainder_encloses_products_of_balls(blocks):
    generator, block = torch.Generator().manual_seed(5), torch.tensor(blocks)
    q, k = (torch.randn(*shape, 3, 5, generator=generator, dtype=torch.float64) for shape in ((), (4,)))
    ids = torch.nn.functional.one_hot(block).double()
    high, low = remainder(
        q,
        q.new_zeros(3),
        (q.square().sum(0) @ ids).sqrt(),
        k,
        k.new_zeros(4, 3),
        (k.square().sum(1) @ ids).sqrt(),
        block,
    )
    t = torch.randn(4, 20000, 5, generator=generator, dtype=torch.float64)
    form = q.T @ k  # of t^T form t
    for _ in range(30):  # ascent towards the largest value
        t = t / (t.square() @ ids).sqrt()[..., block]
        value = ((t @ form) * t).sum(-1)
        assert (value <= high.unsqueeze(-1)).all() and (value >= low.unsqueeze(-1)).all()
        t = t + 0.3 * t @ (form + form.transpose(-1, -2))
    if len(set(blocks)) == 1:  # one ball: the largest eigenvalue itself
        torch.testing.assert_close(value.amax(-1), high, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["l2", "tokens"])
def test_balls_have_joint_remainders_too(kind):
    model, x = two_blocks(1), torch.randn(1, 4, 6, dtype=torch.float64)
    network, plain = convert(model, x), convert(model, x)
    for one in (network, plain):
        attach(one)
    for node in differences(plain):
        node.max_work = 0
    noise, size = torch.randn(2000, 4, 6, dtype=x.dtype), torch.tensor([0.2, 0.0, 0.1, 0.2], dtype=x.dtype)
    if kind == "l2":
        region = ball(x, 0.2, norm=2)
        points = x + 0.2 * noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1)
    else:
        region = BoundedTensor(x, PerturbationTokenBall(size))
        points = x + size.view(-1, 1) * noise / noise.norm(dim=-1, keepdim=True)
    C = every_output(x)
    (low, high), (wide_low, wide_high) = bounds(network, region, C), bounds(plain, region, C)
    assert (high - low).sum() < (wide_high - wide_low).sum()
    values = model(points).flatten(1)
    assert (values.amax(0) <= high.flatten()).all() and (values.amin(0) >= low.flatten()).all()
    assert all(node.known_joint.is_bound for node in differences(network))


def test_no_joint_remainder_where_the_region_is_of_another_kind():
    model, x = two_blocks(1), torch.randn(1, 4, 6, dtype=torch.float64)
    network = convert(model, x)
    attach(network)
    low, high = (bound.flatten() for bound in bounds(network, ball(x, 0.3, norm=1), every_output(x)))
    assert all(node.known_joint is None for node in differences(network))
    corners = x + 0.3 * torch.cat([torch.eye(24, dtype=x.dtype), -torch.eye(24, dtype=x.dtype)]).view(48, 4, 6)
    values = model(corners).flatten(1)
    assert (values.amax(0) <= high).all() and (values.amin(0) >= low).all() and torch.isfinite(high).all()


@pytest.mark.skipif(IS_03, reason="auto_LiRPA 0.3 has no batches of parts: bounds of inner nodes are not handed in")
def test_remainders_of_a_part_are_not_used_for_the_whole():
    model, x = two_blocks(4), torch.randn(1, 4, 6, dtype=torch.float64)
    network, C, region = convert(model, x), every_output(x), ball(x, 0.05)
    attach(network)
    whole = bounds(network, region, C)
    name = next(node.inputs[0].name for node in network.nodes() if type(node).__name__ == "BoundRelu")
    low, high = (t.detach().clone() for t in (network[name].lower, network[name].upper))
    unstable = (low < 0) & (high > 0)
    assert unstable.any()
    for node in differences(network):
        node.forget()
    part = {name: [torch.where(unstable, torch.zeros_like(low), low), high]}  # as branch and bound would set them
    with torch.no_grad():
        network.compute_bounds(x=(region,), C=C, method="CROWN", interm_bounds=part)
    again = bounds(network, region, C)
    for got, expected in zip(again, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)

"""Ranges of values known from earlier passes: they hold nearby, and are dropped when what they rest on changes."""

from __future__ import annotations

import attn_bounds_lirpa
import pytest
import torch
from attn_bounds_lirpa import PerturbationTokenBall, ranges
from attn_bounds_lirpa.attention import BoundAttentionMix
from attn_bounds_lirpa.compat import IS_03
from auto_LiRPA import BoundedTensor, PerturbationLpNorm

from .conftest import Block, convert, every_output

pytestmark = pytest.mark.lirpa
N, D, ROWS = 4, 6, 3
START = "output", 1
TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-11}


class TwoBlocks(torch.nn.Module):
    """Two blocks, and the values that the second one's attention mixes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def values(self, x):
        attention = self.second.attention
        return attention.split(attention.v(self.first(x)))

    def forward(self, x):
        return self.second(self.first(x))


def region(x, radius, kind="box"):
    if kind == "tokens":
        return BoundedTensor(x, PerturbationTokenBall(radius))
    if kind == "l2":
        return BoundedTensor(x, PerturbationLpNorm(norm=2, eps=radius))
    return BoundedTensor(x, PerturbationLpNorm(norm=float("inf"), x_L=x - radius, x_U=x + radius))


def points(x, radius, kind="box", count=2000):
    noise = torch.randn(count, N, D, dtype=x.dtype)
    if kind == "box":
        return x + radius * noise.sign()
    dims = -1 if kind == "tokens" else (-2, -1)
    return x + radius * (1 - 1e-6) * noise / noise.norm(dim=dims, keepdim=True)


def second_mix(network):
    """The operator of the second block's attention."""
    mixes = [node for node in network.nodes() if isinstance(node, BoundAttentionMix)]
    return max(mixes, key=lambda node: int("".join(filter(str.isdigit, node.name)) or 0))


def set_up(dtype=torch.float64, kind="box", radius=0.05, max_rows=1024):
    torch.manual_seed(3)
    model = TwoBlocks().to(dtype)
    x = torch.randn(1, N, D, dtype=dtype)
    network = convert(model, x)
    assert attn_bounds_lirpa.attach(network, max_rows=max_rows)["fused"]
    bound(network, x, radius, kind)
    return model, x, network, second_mix(network)


def bound(network, x, radius, kind="box", **options):
    return network.compute_bounds(x=(region(x, radius, kind),), C=every_output(x), method="CROWN", **options)


def random_rows(batch=1):
    """Rows as the operators pass them on, in double precision."""
    return torch.randn(ROWS, batch, 2, N, 3, dtype=torch.float64)


def assert_contains(model, found, rows, inputs):
    """Every rows_i . v_j of these inputs lies in the range."""
    with torch.no_grad():
        attained = torch.einsum("sbhic,phjc->sbhijp", rows, model.values(inputs).double())
    slack = TOLERANCE[inputs.dtype] * (1 + attained.abs().amax())
    lower, upper = (end.unsqueeze(-1) for end in found)
    assert (lower <= attained + slack).all() and (attained <= upper + slack).all()  # fails on NaN too


@pytest.mark.parametrize("max_rows", [0, 1024])
@pytest.mark.parametrize("kind", ["box", "l2", "tokens"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranges_of_rows_nearby_hold(dtype, kind, max_rows, monkeypatch):
    torch.set_default_dtype(dtype)  # until the fixture's end
    model, x, _, mix = set_up(dtype, kind, max_rows=max_rows)
    value, inputs, rows = mix.inputs[1], points(x, 0.05, kind), random_rows()
    mix.forget()
    found = mix.ranges.of(value, rows, START, False)
    assert_contains(model, found, rows, inputs)
    for name in ("bound_rows", "ValueForms"):  # nothing is propagated again
        monkeypatch.setattr(ranges, name, None)
    again = mix.ranges.of(value, rows, START, True)
    torch.testing.assert_close(again, found, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for size in (1e-3, 1e-1, 10.0):
        moved = rows + size * torch.randn_like(rows)
        near = mix.ranges.of(value, moved, START, True)
        assert_contains(model, near, moved, inputs)
        plain = ranges.interval(value, moved)
        assert (near[0] >= plain[0]).all() and (near[1] <= plain[1]).all()
        if size < 1e-2:  # where it says more than the values' own bounds
            assert (near[1] - near[0]).sum() < 0.9 * (plain[1] - plain[0]).sum()


@pytest.mark.parametrize("change", ["weights", "centre", "radius", "kind"])
def test_what_no_longer_holds_is_dropped(change):
    kind = "l2" if change == "kind" else "box"
    model, x, network, mix = set_up(kind=kind)
    rows, radius = random_rows(), 0.05
    mix.ranges.of(mix.inputs[1], rows, START, False)
    if change == "weights":
        for parameter in model.parameters():  # the network's too
            parameter.data.mul_(1.5)
    elif change == "centre":
        x = x + 0.1
    elif change == "radius":
        radius = 0.06
    else:
        kind = "box"
    bound(network, x, radius, kind)
    assert_contains(model, mix.ranges.of(mix.inputs[1], rows, START, True), rows, points(x, radius, kind))
    mix.forget()
    fresh = mix.ranges.of(mix.inputs[1], rows, START, False)
    assert mix.ranges.known[START].held.still(network)
    assert_contains(model, fresh, rows, points(x, radius, kind))


@pytest.mark.skipif(IS_03, reason="parts of a region are for auto_LiRPA 0.7")
def test_ranges_of_the_whole_region_serve_a_batch_of_its_parts(monkeypatch):
    model, x, network, mix = set_up()
    rows = random_rows()
    mix.forget()
    mix.ranges.of(mix.inputs[1], rows, START, False)
    known = {node.name: (node.lower.detach(), node.upper.detach()) for node in network.layers_requiring_bounds}
    relu = next(node.inputs[0].name for node in network.nodes() if type(node).__name__ == "BoundRelu")
    parts = {name: tuple(end.expand(4, *end.shape[1:]).clone() for end in pair) for name, pair in known.items()}
    signs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])  # the signs of the two units that are least sure of theirs
    low, high = (end.flatten(1) for end in parts[relu])
    for column, unit in enumerate(torch.minimum(-low[0], high[0]).topk(2).indices):
        assert low[0, unit] < 0 < high[0, unit]
        high[signs[:, column] == 0, unit] = 0
        low[signs[:, column] == 1, unit] = 0
    bound(network, x.expand(4, -1, -1), 0.05, interm_bounds=parts)
    monkeypatch.setattr(ranges, "bound_rows", None)
    many = random_rows(4)
    inputs = points(x, 0.05)
    found = mix.ranges.of(mix.inputs[1], many, START, True)
    assert_contains(model, found, many, inputs)
    near = rows.expand(-1, 4, -1, -1, -1) + 1e-9
    known_range = mix.ranges.known[START]
    torch.testing.assert_close(
        mix.ranges.of(mix.inputs[1], near, START, True)[0],
        known_range.lower.expand(-1, 4, -1, -1, -1),
        atol=1e-6,
        rtol=0,
    )


def test_forgotten_is_forgotten():
    *_, mix = set_up(max_rows=0)
    mix.ranges.of(mix.inputs[1], random_rows(), START, False)
    assert mix.ranges.known and mix.ranges.forms is not None
    mix.forget()
    assert not mix.ranges.known and mix.ranges.forms is None


@pytest.mark.skipif(IS_03, reason="rows share parameters in auto_LiRPA 0.7")
@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_share_their_parameters(shared):
    torch.manual_seed(0)
    model, x, radius = TwoBlocks(), torch.randn(1, N, D), 0.1
    options = {"iteration": 3, "lr_alpha": 0.3, "use_shared_alpha": shared, "fix_interm_bounds": False}
    network = convert(model, x, optimize_bound_args=options)
    assert attn_bounds_lirpa.attach(network)["fused"]
    lower, upper = network.compute_bounds(x=(region(x, radius),), C=every_output(x), method="CROWN-Optimized")
    sets = {len(values[0]) for node in network.nodes() if hasattr(node, "ranges") for values in node.alpha.values()}
    assert (1 in sets) == shared
    with torch.no_grad():
        found = model(points(x, radius)).flatten(1)
    assert (lower.flatten(1) <= found + 1e-9).all() and (found <= upper.flatten(1) + 1e-9).all()


@pytest.mark.skipif(IS_03, reason="batches of parts are for auto_LiRPA 0.7")
@pytest.mark.parametrize("change", ["weights", "centre"])
@pytest.mark.parametrize("seed", range(2))
def test_forms_of_an_earlier_state_say_nothing_of_rows_nearby(change, seed):
    torch.manual_seed(seed)
    model, x, radius = TwoBlocks(), torch.randn(1, N, D), 0.02
    network = convert(model, x)
    attn_bounds_lirpa.attach(network, max_rows=40)
    bound(network, x, 0.002)  # many rows: forms are kept
    if change == "weights":
        model.first.attention.out.bias.data += torch.randn(D)
    else:
        x = torch.randn(1, N, D)
    fresh, few, many = convert(model, x), torch.randn(1, 1, N, D), torch.randn(2, 3, N, D)
    attn_bounds_lirpa.attach(fresh, max_rows=40)
    fresh.compute_bounds(x=(region(x, radius),), C=few, method="CROWN")
    known = {node.name: (node.lower.detach(), node.upper.detach()) for node in fresh.layers_requiring_bounds}
    network.compute_bounds(x=(region(x, radius),), C=few, method="CROWN", interm_bounds=known)  # one row: exact
    twice = {name: tuple(end.expand(2, *end.shape[1:]) for end in pair) for name, pair in known.items()}
    both = region(x.expand(2, -1, -1), radius)
    lower, upper = network.compute_bounds(x=(both,), C=many, method="CROWN", interm_bounds=twice)
    with torch.no_grad():
        found = torch.einsum("po,bso->pbs", model(points(x, radius)).flatten(1), many.flatten(2))
    assert (lower <= found + 1e-9).all() and (found <= upper + 1e-9).all()


@pytest.mark.parametrize("norm", [1, 2])
def test_a_region_that_a_caller_changes_in_place_is_another(norm):
    torch.manual_seed(0)
    model, x, eps = TwoBlocks(), torch.randn(1, N, D), torch.tensor(0.001)
    network = convert(model, x)
    attn_bounds_lirpa.attach(network)
    perturbation = PerturbationLpNorm(norm=norm, eps=eps)
    network.compute_bounds(x=(BoundedTensor(x, perturbation),), C=every_output(x), method="CROWN")
    mix = second_mix(network)
    mix.ranges.of(mix.inputs[1], random_rows(), START, False)
    held = mix.ranges.known[START].held
    assert held.still(network) == (norm == 2)  # of an L1 ball nothing is kept
    perturbation.eps.fill_(0.5)
    assert not held.still(network)


@pytest.mark.skipif(IS_03, reason="rows of unstable units alone are for auto_LiRPA 0.7")
@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_balls_are_no_points_to_intervals(norm, as_tensor, sparse):
    torch.manual_seed(0)
    x, eps = torch.randn(1, N, D), 0.1
    network = convert(Block(), x, sparse_intermediate_bounds=sparse)
    attn_bounds_lirpa.attach(network)
    perturbation = PerturbationLpNorm(norm=norm, eps=torch.tensor(eps) if as_tensor else eps)
    network.compute_bounds(x=(BoundedTensor(x, perturbation),), C=every_output(x), method="CROWN")
    relu = next(node.inputs[0] for node in network.nodes() if type(node).__name__ == "BoundRelu")
    lower, upper = relu.lower, relu.upper
    noise = torch.randn(2000, N, D)
    noise = noise / noise.flatten(1).norm(p=norm, dim=1)[:, None, None]
    network(x + eps * noise)
    assert (lower <= relu.forward_value + 1e-9).all() and (relu.forward_value <= upper + 1e-9).all()


def test_a_bound_within_another_is_so_at_each_end():
    from attn_bounds_lirpa.held import bounds_within

    def one(low, high, batch=1):
        return {"node": (torch.full((batch, 1), low), torch.full((batch, 1), high))}

    for more in (1, 2):  # batch elements
        assert bounds_within(one(0.0, 1.0, more), one(-torch.inf, 1.0))
        assert not bounds_within(one(-5.0, 1e6, more), one(-torch.inf, 1.0))
        assert not bounds_within(one(-1e-8, 1e9, more), one(0.0, 1e9))
        assert not bounds_within(one(torch.nan, 1.0, more), one(0.0, 1.0))


@pytest.mark.skipif(IS_03, reason="optimised rows are for auto_LiRPA 0.7")
def test_as_many_rows_as_outputs_and_one_token():
    from attn_bounds_lirpa.optimise import optimised_lower_bound

    for tokens in (2, 1):
        x = torch.randn(1, tokens, D)
        model = torch.nn.Sequential(Block(), Block())
        network = convert(model, x)
        attn_bounds_lirpa.attach(network)
        best, _, first = optimised_lower_bound(network, (region(x, 0.1),), every_output(x), 0, 2)
        assert best.shape == first.shape == (1, tokens * D)
        with torch.no_grad():
            found = model(x + 0.1 * torch.randn(500, tokens, D).sign()).flatten(1)
        assert (best <= found + 1e-9).all()

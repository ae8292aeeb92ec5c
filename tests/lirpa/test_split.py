"""Splits on ReLU inputs: they prove what no single pass proves, and never more than what is true."""

from __future__ import annotations

import time

import pytest
import torch
from attn_bounds_lirpa.compat import IS_03
from auto_LiRPA import BoundedTensor, PerturbationLpNorm

from .conftest import convert

if IS_03:
    pytest.skip("splits need auto_LiRPA 0.7", allow_module_level=True)

from attn_bounds_lirpa.optimise import optimised_lower_bound
from attn_bounds_lirpa.split import split_rows

from attn_bounds.errors import MethodNotApplicableError

pytestmark = pytest.mark.lirpa


def relu_network(seed):
    """Two inputs, two hidden layers, three outputs; its box, rows, and the rows' least values on a fine grid."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    low, high = torch.full((1, 2), -1.0), torch.full((1, 2), 1.5)
    x = BoundedTensor((low + high) / 2, PerturbationLpNorm(norm=float("inf"), x_L=low, x_U=high))
    C = torch.tensor([[[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]])
    side = torch.linspace(-1, 1.5, 201)
    with torch.no_grad():
        least = (model(torch.cartesian_prod(side, side)) @ C[0].T).amin(0, keepdim=True)
    return convert(model, torch.zeros(1, 2)), (x,), C, least


@pytest.mark.parametrize("seed", range(3))
def test_splits_close_the_gap_that_the_root_leaves(seed):
    network, x, C, least = relu_network(seed)
    _, bounds, first = optimised_lower_bound(network, x, C, 0, 0)
    gap = least - first
    limits = least - 0.3 * gap
    root = split_rows(network, x, C, limits, bounds, max_leaves=1)
    assert root.leaves == 2 and (root.lower < limits).any()
    split = split_rows(network, x, C, limits, bounds)
    assert (split.lower > limits).all() and (split.lower <= least + 1e-9).all()
    assert split.leaves > root.leaves
    assert all(getattr(node, "sparse_betas", None) is None for node in network.nodes())


@pytest.mark.parametrize("seed", range(3))
def test_splits_never_prove_what_is_false(seed):
    network, x, C, least = relu_network(seed)
    _, bounds, _ = optimised_lower_bound(network, x, C, 0, 0)
    split = split_rows(network, x, C, least + 1e-3, bounds, max_leaves=60)
    assert (split.lower <= least + 1e-9).all()


def test_splits_stop_at_their_deadline():
    network, x, C, least = relu_network(0)
    _, bounds, _ = optimised_lower_bound(network, x, C, 0, 0)
    split = split_rows(network, x, C, least - 1e-9, bounds, deadline=time.monotonic() - 1)
    assert split.leaves == 2 and torch.isfinite(split.lower).all()


def test_not_a_number_is_no_bound():
    network, x, C, _ = relu_network(0)
    C = C.clone()
    C[0, 1, 0] = float("nan")
    _, bounds, _ = optimised_lower_bound(network, x, C[:, :1], 0, 0)
    split = split_rows(network, x, C, torch.full((1, 2), 1e9), bounds, max_leaves=8)
    assert torch.isfinite(split.lower[0, 0]) and split.lower[0, 1] == -torch.inf


def test_regions_and_networks_that_have_nothing_to_split():
    network, (box,), C, least = relu_network(0)
    centre, limits = box.detach(), torch.full((1, 2), 1e9)
    by_radius = BoundedTensor(centre, PerturbationLpNorm(norm=float("inf"), eps=1.25))
    _, bounds, _ = optimised_lower_bound(network, (by_radius,), C, 0, 0)
    lower = split_rows(network, (by_radius,), C, limits, bounds, max_leaves=8).lower
    assert torch.isfinite(lower).all() and (lower <= least).all()
    with pytest.raises(MethodNotApplicableError, match="box"):
        split_rows(network, (BoundedTensor(centre, PerturbationLpNorm(norm=2, eps=1.0)),), C, limits, bounds)
    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 3)
    network = convert(linear, centre)
    _, bounds, _ = optimised_lower_bound(network, (box,), C, 0, 0)
    corners = centre + 1.25 * torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    lower = split_rows(network, (box,), C, limits, bounds, max_leaves=8).lower
    assert torch.allclose(lower, (linear(corners) @ C[0].T).amin(0, keepdim=True), atol=1e-5)

"""Inputs that once went wrong: zero tokens, masks that scores beat, rows and weights that change between calls."""

from __future__ import annotations

import attn_bounds_lirpa
import numpy as np
import pytest
import torch
from attn_bounds_lirpa.compat import IS_03
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
from torch import Tensor, nn

from attn_bounds.errors import ArgumentError

pytestmark = pytest.mark.lirpa
N, D = 3, 4
OPTIONS = {**attn_bounds_lirpa.OPTIONS, "optimize_bound_args": {"iteration": 3, "lr_alpha": 0.3}}


class Attention(nn.Module):
    """z + attention of scale * z, one head; the value weights (1, d, d) may be an input."""

    def __init__(self, mask: Tensor | None = None, scale: Tensor | None = None, gain: float = 1.0):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(gain * torch.randn(D, D, dtype=torch.float64) / 2) for _ in range(3))
        self.mask = torch.zeros(N, N, dtype=torch.float64) if mask is None else mask
        self.scale = torch.ones(N, 1, dtype=torch.float64) if scale is None else scale

    def forward(self, z: Tensor, value: Tensor | None = None) -> Tensor:
        x = z * self.scale
        q, k, v = (
            x.matmul(weight).reshape(-1, N, 1, D).permute(0, 2, 1, 3)
            for weight in (self.q, self.k, self.v if value is None else value)
        )
        mixed = torch.softmax(q.matmul(k.transpose(-1, -2)) + self.mask, -1).matmul(v)
        return z + mixed.permute(0, 2, 1, 3).reshape(-1, N, D)


def bounded(model: nn.Module, *inputs: Tensor, **options) -> BoundedModule:
    network = BoundedModule(model.eval(), inputs, bound_opts=OPTIONS, verbose=False)
    assert attn_bounds_lirpa.attach(network, **options)["fused"]
    return network


def box(z: Tensor, radius: float) -> BoundedTensor:
    return BoundedTensor(z, PerturbationLpNorm(norm=np.inf, x_L=z - radius, x_U=z + radius))


def assert_holds(network, model, z: Tensor, radius: float, C: Tensor, *rest: Tensor, method: str = "CROWN") -> None:
    region = box(z, radius)
    with torch.set_grad_enabled(method == "CROWN-Optimized"):
        lower, upper = network.compute_bounds(x=(region, *rest), C=C, method=method)
    points = z + radius * torch.sign(torch.randn(500, N, D))
    with torch.no_grad():
        found = model(points, *rest).flatten(1) @ C[0].flatten(1).T
    slack = 1e-9 * (1 + found.abs().max())
    assert (lower[0] <= found + slack).all() and (found <= upper[0] + slack).all()  # fails on NaN too


def test_zero_tokens_do_not_hide_that_a_map_tells_tokens_apart() -> None:
    model = Attention(scale=torch.tensor([[1.0], [-1.0], [0.5]]), gain=2)
    zero = torch.zeros(1, N, D)
    network = bounded(model, zero)
    assert not any(type(node).__name__ == "BoundReadHeads" for node in network.nodes())
    for z in (zero, torch.randn(1, N, D)):
        assert_holds(network, model, z, 0.3, torch.randn(1, 3, N, D))


@pytest.mark.parametrize("low", [-1e9, -float("inf")])
@pytest.mark.parametrize("size", [1.0, 1e5])  # scores of 1e10 beat a mask of -1e9
def test_a_mask_takes_out_what_it_takes_out(low: float, size: float) -> None:
    mask = torch.tensor([0.0, 0.0, low]).expand(N, N).clone()
    model = Attention(mask)
    z = size * torch.randn(1, N, D)
    assert_holds(bounded(model, z), model, z, 1e-2 * size, torch.randn(1, 3, N, D))


def test_a_row_that_blocks_every_key_blocks_none() -> None:
    mask = torch.full((N, N), -1e9).triu(1)
    mask[0] = -1e9
    model = Attention(mask)
    z = torch.randn(1, N, D)
    C = torch.zeros(1, 2, N, D)
    C[:, :, 0] = torch.randn(2, D)
    network = bounded(model, z)
    assert_holds(network, model, z, 0.1, C)
    if IS_03:  # there it stays two operators, which never see a mask as a whole
        return
    with pytest.raises(ArgumentError, match="mask"):
        bounded(Attention(torch.full((N, N), -float("inf"))), z)


@pytest.mark.skipif(IS_03, reason="its alpha mode keeps no parameters between calls")
def test_alpha_mode_on_one_query_then_on_another() -> None:
    model = Attention(torch.full((N, N), -1e9).triu(1))
    z = torch.randn(1, N, D)
    network = bounded(model, z)
    for query in (2, 1, 0):  # which read three keys, two and one
        C = torch.zeros(1, 1, N, D)
        C[:, :, query] = torch.randn(D)
        assert_holds(network, model, z, 0.1, C, method="CROWN-Optimized")


@pytest.mark.skipif(IS_03, reason="needs several inputs")
def test_weights_of_the_other_sign_have_the_same_bounds_and_other_forms() -> None:
    model = Attention()
    zero, value = torch.zeros(1, N, D), torch.randn(1, D, D)
    network = bounded(model, zero, value, max_rows=0)
    C = torch.randn(1, 3, N, D)
    for sign in (1, -1):
        assert_holds(network, model, zero, 0.4, C, sign * value * torch.tensor([1.0, sign, 1, 1]))
    (forms,) = [node.ranges.forms for node in network.nodes() if hasattr(node, "ranges")]
    weights = next(node for node in network.roots() if not node.perturbed and node.value is not None)
    assert forms.held.still(network)
    weights.value = -weights.value
    assert not forms.held.still(network)


@pytest.mark.parametrize("heads, scale, mask", [(0, None, None), (1, float("nan"), None), (1, None, torch.eye(N) > 0)])
def test_heads_say_what_they_do_not_take(heads, scale, mask) -> None:
    layers = [nn.Linear(D, D) for _ in range(3)]
    with pytest.raises(ArgumentError):
        attn_bounds_lirpa.AttentionHeads(*layers, heads, scale, mask)


class Learned(nn.Module):
    """Attention whose scale and mask are parameters, behind a layer or on the input itself."""

    def __init__(self, behind: bool):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(D, D), nn.ReLU()) if behind else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        self.scale, self.mask = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(N, N))

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z)
        q, k, v = (layer(x).reshape(-1, N, 1, D).permute(0, 2, 1, 3) for layer in self.layers)
        mixed = torch.softmax(q.matmul(k.transpose(-1, -2)) * self.scale + self.mask, -1).matmul(v)
        return mixed.permute(0, 2, 1, 3).reshape(-1, N, D)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("behind", [True, False])
def test_a_scale_and_a_mask_that_are_learned_after_the_swap(behind: bool, pairs: bool) -> None:
    model, z, C = Learned(behind), torch.randn(1, N, D), torch.randn(1, 3, N, D)
    network = bounded(model, z, max_differences=2000 if pairs else 0)
    assert_holds(network, model, z, 0.05, C)
    for scale, mask in ((3.0, 0.0), (-2.0, 1.0), (1.0, 4.0)):
        model.scale.data.fill_(scale)  # the network's own
        model.mask.data.copy_(mask * torch.randn(N, N))
        with torch.no_grad():
            torch.testing.assert_close(network(z), model(z))
        assert_holds(network, model, z, 0.05, C)
        low, high = network.compute_bounds(x=(box(z, 0.05),), method="IBP")
        assert (low <= model(z)).all() and (model(z) <= high).all()

"""Shared pieces of the auto_LiRPA tests; without auto_LiRPA they are skipped."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("auto_LiRPA") is None:
    pytest.skip("auto_LiRPA is not installed", allow_module_level=True)

import attn_bounds_lirpa  # repairs an old auto_LiRPA before it is imported
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm


class Attention(torch.nn.Module):
    """softmax(q k^T scale + mask) v of projected tokens (b, n, d), heads split, then a projection."""

    def __init__(self, d=6, heads=2, d_head=3, scale=None, mask=None, gain=1.0):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(d, heads * d_head) for _ in range(3))
        self.out = torch.nn.Linear(heads * d_head, d)
        self.heads, self.d_head = heads, d_head
        self.scale = d_head**-0.5 if scale is None else scale
        self.mask = mask
        for layer in (self.q, self.k):
            layer.weight.data *= gain

    def split(self, x):
        return x.reshape(-1, x.shape[1], self.heads, self.d_head).permute(0, 2, 1, 3)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        s = q.matmul(k.transpose(-1, -2)) * self.scale
        if self.mask is not None:
            s = s + self.mask
        o = torch.softmax(s, -1).matmul(v).permute(0, 2, 1, 3)
        return self.out(o.reshape(-1, x.shape[1], self.heads * self.d_head))


class Block(torch.nn.Module):
    """A pre-norm block with batch-norm-like scaling, ReLU MLP and residuals."""

    def __init__(self, d=6, hidden=10, **kwargs):
        super().__init__()
        self.attention = Attention(d, **kwargs)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(d, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, d))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def convert(model, x, **options):
    """A BoundedModule of `model`, with the options that hold outside a verifier."""
    return BoundedModule(model.eval(), x, bound_opts={**attn_bounds_lirpa.OPTIONS, **options}, verbose=False)


def shaped(C, tokens=4, d=6):
    """Rows over flat outputs (b, s, tokens * d) in the shape of the output, which auto_LiRPA 0.3 asks for."""
    return C.unflatten(-1, (tokens, d))


def every_output(x):
    """The identity rows (b, n d, n, d) for a model whose output has the shape of its input x (b, n, d)."""
    return torch.eye(x[0].numel(), dtype=x.dtype).view(1, -1, *x.shape[1:]).expand(x.shape[0], -1, *x.shape[1:])


def ball(x, eps, norm=np.inf):
    return BoundedTensor(x, PerturbationLpNorm(norm=norm, eps=eps))


def attained(model, x, eps, norm=np.inf, C=None, samples=200, steps=20):
    """Smallest and largest values of C . model found in the ball around x (batch 1) by sampling and signed ascent."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(samples, *x.shape[1:], generator=generator, dtype=x.dtype)
    half = samples // 2
    if norm == np.inf:
        noise[:half] = noise[:half].sign()
        noise = noise.clamp(-1, 1)
    else:
        noise = noise / noise.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))

    def outputs(delta):
        y = model(x + eps * delta).flatten(1)
        return y if C is None else y @ C.T

    low, high = (outputs(noise).amin(0).detach(), outputs(noise).amax(0).detach())
    for row in range(len(low)):
        for sign in (-1, 1):
            best = noise[(sign * outputs(noise)[:, row]).argmax()][None].clone()
            for _ in range(steps):
                best.requires_grad_(True)
                (grad,) = torch.autograd.grad(sign * outputs(best)[0, row], best)
                with torch.no_grad():
                    if norm == np.inf:
                        best = (best + 0.3 * grad.sign()).clamp(-1, 1)
                    else:
                        best = best + 0.5 * grad / grad.norm().clamp(min=1e-12)
                        best = best / best.norm().clamp(min=1)
                value = outputs(best)[0, row].detach()
                low[row], high[row] = torch.minimum(low[row], value), torch.maximum(high[row], value)
    return low, high


@pytest.fixture(autouse=True)
def double_precision():
    """auto_LiRPA builds constants in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)

"""CROWN's bound on the remainder of a transformer block (see attn_bounds.residual), with softmax whole or in parts."""

from __future__ import annotations

import math

import torch
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
from torch import Tensor
from torch.func import grad

from attn_bounds.errors import MissingDependencyError
from attn_bounds.residual import BlockReadout

from .fuse import repair_softmax
from .heads import double_precision
from .options import OPTIONS

try:
    from auto_LiRPA.operators.gelu import GELUOp
except ImportError:
    raise MissingDependencyError("crown on blocks needs auto_LiRPA 0.7 or newer, which bounds GELU") from None


class _Remainder(torch.nn.Module):
    """f(w) = g(w) - g(0) - g'(0).w of a batch w (b, n, d), in operations that auto_LiRPA knows."""

    def __init__(self, readout: BlockReadout, split_softmax: bool) -> None:
        super().__init__()
        self.readout, self.split_softmax = readout, split_softmax
        zero = torch.zeros_like(readout.stream)
        self.register_buffer("slope", grad(readout)(zero).detach().reshape(-1, 1))
        self.register_buffer("base", readout(zero).detach())

    def forward(self, w: Tensor) -> Tensor:
        g = self.readout.traced(w, self._known)
        return g.unsqueeze(-1) - self.base - w.flatten(1) @ self.slope

    def _known(self, name: str, kind: str, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if kind == "inverse root":
            return 1 / torch.sqrt(inputs[0])
        if kind == "gelu":
            return GELUOp.apply(inputs[0])
        if kind == "gelu tanh":  # auto_LiRPA has no operator for it: tanh, a power and a product
            h = inputs[0]
            return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3))))
        if kind == "softmax" and self.split_softmax:
            e = torch.exp(inputs[0])
            return e * (1 / e.sum(-1, keepdim=True))
        return out


def crown_upper(readout: BlockReadout, radius: float, split_softmax: bool = False) -> float:
    """CROWN's upper bound of f on the joint ball |w| <= radius; infinity where it is not finite."""
    n, d = readout.stream.shape
    with double_precision():
        zero = torch.zeros(1, n, d)
        network = BoundedModule(_Remainder(readout, split_softmax).eval(), zero, bound_opts=OPTIONS, verbose=False)
        if not split_softmax:
            repair_softmax(network)
        x = BoundedTensor(zero, PerturbationLpNorm(norm=2, eps=radius))
        upper = float(network.compute_bounds(x=(x,), method="CROWN", bound_lower=False)[1].detach())
    return upper if math.isfinite(upper) else math.inf

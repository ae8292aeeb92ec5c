"""Input regions for auto_LiRPA that it does not have itself."""

from __future__ import annotations

import math

import torch
from auto_LiRPA.linear_bound import LinearBound
from auto_LiRPA.perturbations import PerturbationLpNorm
from torch import Tensor

from attn_bounds.errors import RegionError, ShapeError


class PerturbationTokenBall(PerturbationLpNorm):
    """One L2 ball per token: |z_i - x_i| <= r_i for the tokens x (b, n, d) of a BoundedTensor.

    radius: a number, or one per token (n,) or (b, n); with `relative=True` in units of each token's own norm.
    frozen: positions that do not move. A radius of 0 is allowed. Bounds of linear functions are exact:
    max a.z = a.x + sum_i r_i |a_i|. Interval propagation uses the enclosing box.
    """

    def __init__(self, radius: float | Tensor, relative: bool = False, frozen: list[int] | None = None):
        super().__init__(norm=math.inf, eps=0.0)
        self.radius = torch.as_tensor(radius, dtype=torch.float64)
        if not torch.isfinite(self.radius).all() or (self.radius < 0).any():
            raise RegionError(f"radius: expected finite numbers >= 0, got {radius}")
        self.relative = relative
        self.frozen = list(frozen or [])

    def radii(self, x: Tensor) -> Tensor:
        """Radius of each token, (b, n)."""
        if x.ndim != 3:
            raise ShapeError(f"x: expected tokens (batch, n, d), got {tuple(x.shape)}")
        n = x.shape[1]
        if self.radius.ndim and self.radius.shape[-1] != n:
            raise ShapeError(f"radius: expected one number or {n}, got {tuple(self.radius.shape)}")
        if any(not -n <= position < n for position in self.frozen):
            raise RegionError(f"frozen: expected positions below {n}, got {self.frozen}")
        radii = self.radius.to(x).expand(x.shape[0], n).clone()
        if self.relative:
            radii = radii * x.norm(dim=-1)
        radii[:, self.frozen] = 0
        return radii

    def concretize(self, x, A, sign=-1, aux=None):
        """max (sign 1) or min (sign -1) of A . z over the region; A (b, s, n, d) or (b, s, n d), result (b, s)."""
        if A is None:
            return None
        if not isinstance(A, Tensor):
            eye = torch.eye(x[0].numel(), dtype=x.dtype, device=x.device)
            A = eye.expand(x.shape[0], *eye.shape)
        A = A.reshape(x.shape[0], -1, *x.shape[1:])
        spread = (A.norm(dim=-1) * self.radii(x).unsqueeze(1)).sum(-1)
        return torch.einsum("bsnd,bnd->bs", A, x) + sign * spread

    def init(self, x, aux=None, forward=False):
        radii = self.radii(x).unsqueeze(-1)
        self.x_L, self.x_U = x - radii, x + radii
        if not forward:
            return LinearBound(None, None, None, None, self.x_L, self.x_U), x, None
        batch, size = x.shape[0], x[0].numel()
        eye = torch.eye(size, dtype=x.dtype, device=x.device).expand(batch, size, size)
        lw, lb = eye.reshape(batch, size, *x.shape[1:]), torch.zeros_like(x)
        return LinearBound(lw, lb, lw.clone(), lb.clone(), self.x_L, self.x_U), x, None

    def __repr__(self):
        return f"PerturbationTokenBall(radius={self.radius.tolist()}, relative={self.relative}, frozen={self.frozen})"

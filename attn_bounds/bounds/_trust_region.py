"""Upper bound of a quadratic over a ball cut by slabs: the Lagrangian dual, minimised by a damped Newton method.

    max q0 + g.eta + eta.T eta / 2   over |y + eta| <= R,  low_i <= e_i.(y + eta) <= high_i

One multiplier for the ball, one per slab for (e.y - low)(high - e.y) >= 0. Every multiplier >= 0 whose matrix passes a
Cholesky test gives a bound, so the minimiser need not converge. Without slabs nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MARGIN = 1e-11  # relative margin of the positive-definiteness test


@dataclass(frozen=True)
class Quadratic:
    """q0 + g.eta + eta.T eta / 2 around y, in units of the radius; slabs in the same units."""

    q0: torch.Tensor  # (B,)
    g: torch.Tensor  # (B, k)
    T: torch.Tensor  # (B, k, k)
    y: torch.Tensor  # (B, k), |y| <= 1
    directions: torch.Tensor  # (B, L, k)
    low: torch.Tensor  # (B, L)
    high: torch.Tensor  # (B, L)

    def __getitem__(self, rows: torch.Tensor) -> Quadratic:
        return Quadratic(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Bounded:
    """The dual's value (B,), infinite where the test failed, the maximiser y + eta, and what Newton needs."""

    value: torch.Tensor
    w: torch.Tensor  # (B, k)
    gradient: torch.Tensor  # (B, 1 + L)
    hessian: torch.Tensor  # (B, 1 + L, 1 + L)


def evaluate(quad: Quadratic, mult: torch.Tensor, derivatives: bool = True) -> Bounded:
    """Evaluate the dual at multipliers (B, 1 + L), the ball's first."""
    lam, mu = mult[:, 0], mult[:, 1:]
    e, y = quad.directions, quad.y
    k = y.shape[1]
    if not k:  # the query stands still
        value = torch.where(torch.isfinite(quad.q0), quad.q0, torch.full_like(quad.q0, torch.inf))
        return Bounded(value, y, torch.zeros_like(mult), torch.zeros_like(mult[:, :, None] * mult[:, None]))
    eye = torch.eye(k, dtype=y.dtype, device=y.device)
    A = lam[:, None, None] * eye - quad.T
    g = quad.g - lam[:, None] * y
    room = lam * (1 - (y * y).sum(-1))
    if mu.shape[1]:
        sigma = torch.einsum("blk,bk->bl", e, y)
        A = A + (e * mu[..., None]).transpose(1, 2) @ e
        g = g + torch.einsum("bl,blk->bk", mu * (quad.low + quad.high - 2 * sigma) / 2, e)
        room = room + (mu * (sigma - quad.low) * (quad.high - sigma)).sum(1)
    size = torch.linalg.matrix_norm(A)
    sane = torch.isfinite(size) & torch.isfinite(g).all(1) & (mult >= 0).all(1)
    A = torch.where(sane[:, None, None], A, eye)
    g = torch.where(sane[:, None], g, torch.zeros_like(g))
    shrunk = A - (MARGIN * torch.where(sane, size, torch.zeros_like(size)))[:, None, None] * eye
    factor, info = torch.linalg.cholesky_ex(shrunk)
    good = sane & (info == 0)
    factor = torch.where(good[:, None, None], factor, eye)
    # The factor is of a slightly smaller matrix: the bound is slightly larger, and sound.
    eta = torch.cholesky_solve(g[..., None], factor)[..., 0]
    value = quad.q0 + ((g * eta).sum(-1) + room) / 2
    value = torch.where(good & torch.isfinite(value), value, torch.full_like(value, torch.inf))
    w = y + eta
    if not derivatives:
        return Bounded(value, w, mult, mult)
    at = torch.einsum("blk,bk->bl", e, w)
    gradient = torch.cat([1 - (w * w).sum(-1, keepdim=True), (at - quad.low) * (quad.high - at)], 1) / 2
    v = torch.cat([-w[:, None], ((quad.low + quad.high) / 2 - at)[..., None] * e], 1)
    hessian = v @ torch.cholesky_solve(v.transpose(1, 2), factor)
    return Bounded(value, w, gradient, hessian)


def minimise(quad: Quadratic, start: torch.Tensor, steps: int, target: float = 0.0) -> tuple[torch.Tensor, Bounded]:
    """Improve multipliers (B, 1 + L) from `start`; stop where the value is at most `target`. Returns the best found."""
    mult = _feasible(quad, start)
    best = evaluate(quad, mult)
    damping = torch.zeros_like(best.value)
    for _ in range(steps):
        rows = (best.value > target).nonzero()[:, 0]
        if not len(rows):
            break
        x, g, H = mult[rows], best.gradient[rows], best.hessian[rows]
        # In logarithms of the multipliers: positive by construction, and well scaled.
        gx = g * x
        Hx = H * x[:, :, None] * x[:, None] + torch.diag_embed(gx.clamp_min(0))
        scale = torch.diagonal(Hx, dim1=1, dim2=2)
        ridge = damping[rows, None] * scale + 1e-12 * scale.amax(1, keepdim=True) + 1e-300
        step, info = torch.linalg.solve_ex(Hx + torch.diag_embed(ridge), gx[..., None])
        step = torch.where((info == 0)[:, None], torch.nan_to_num(step[..., 0]), torch.zeros_like(gx))
        tried = x * torch.exp(-step.clamp(-2.5, 2.5))
        found = evaluate(quad[rows], tried)
        better = found.value < best.value[rows]
        damping[rows] = torch.where(better, damping[rows] / 8, (damping[rows] * 8).clamp_min(0.05))
        keep = rows[better]
        mult[keep] = tried[better]
        for name in Bounded.__dataclass_fields__:
            getattr(best, name)[keep] = getattr(found, name)[better]
    return mult, best


def _feasible(quad: Quadratic, start: torch.Tensor) -> torch.Tensor:
    """Raise the ball's multiplier, where needed, until the matrix is positive definite."""
    mult = start.clone()
    rows = torch.arange(mult.shape[0], device=mult.device)
    top = torch.linalg.matrix_norm(quad.T) * 1.01
    for _ in range(4):
        rows = rows[torch.isinf(evaluate(quad[rows], mult[rows], derivatives=False).value)]
        if not len(rows):
            return mult
        lam = mult[rows, 0]
        mult[rows, 0] = torch.minimum(torch.maximum(lam * 1.5, 0.25 * top[rows]), torch.maximum(top[rows], lam))
    mult[rows, 0] = torch.maximum(top[rows], mult[rows, 0])
    return mult

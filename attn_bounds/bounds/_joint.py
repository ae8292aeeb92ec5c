"""Boxes: one quadratic majorant in all tokens at the maximiser, one multiplier per coordinate."""

from __future__ import annotations

import torch

from ._branch import recentring
from ._majorant import Centre, Majorant, constants, majorant, radii, ranges, reach
from ._multipliers import Dual, dual

RECENTRINGS = (0.05, 0.15, 0.0)


class Best:
    """The smallest bound so far of every problem of a batch, with what proves it."""

    def __init__(self, upper: torch.Tensor, shift: torch.Tensor, key_mult: torch.Tensor, query_mult: torch.Tensor):
        self.upper, self.shift, self.key_mult, self.query_mult = upper, shift, key_mult, query_mult

    def update(self, rows: torch.Tensor, other: Best) -> None:
        """Take over, on the batch's `rows`, what is better in `other`."""
        better = other.upper < self.upper[rows]
        rows = rows[better]
        for name in ("upper", "shift", "key_mult", "query_mult"):
            getattr(self, name)[rows] = getattr(other, name)[better]


def joint(centre: Centre, tolerance: torch.Tensor, rounds: int) -> Best:
    """Try the recentrings in turn on the units still open, then optimise the multipliers of those left."""
    best = None
    rows = torch.arange(len(centre.t), device=centre.t.device)
    for tau in RECENTRINGS:
        here = centre if best is None else _take(centre, rows)
        found = _first_try(here, tau)
        if best is None:
            best = found
        else:
            best.update(rows, found)
        rows = (best.upper > centre.t + tolerance).nonzero()[:, 0]
        if not len(rows):
            return best
    assert best is not None
    best.update(rows, _optimised(_take(centre, rows), RECENTRINGS[0], rounds))
    return best


def _take(centre: Centre, rows: torch.Tensor) -> Centre:
    return Centre(**{name: getattr(centre, name)[rows] for name in centre.__dataclass_fields__})


def tangent_multipliers(maj: Majorant) -> tuple[torch.Tensor, torch.Tensor]:
    """The multipliers |g_j| at which a maximiser on the boundary is stationary, a little above zero."""
    rx, ry = maj.key_radius, maj.query_radius
    if rx.shape[-1] == 1 and maj.g.shape[-1] != 1:
        key, query = reach(maj.g, rx)[..., None], reach(maj.gq, ry)[:, None]
    else:
        key, query = maj.g.abs() * rx, maj.gq.abs() * ry
    floor = 1e-14 * (key.flatten(1).sum(1) + query.sum(1)) + 1e-300
    return torch.maximum(key, floor[:, None, None]), torch.maximum(query, floor[:, None])


def _first_try(centre: Centre, tau: float) -> Best:
    shift = recentring(centre, tau)
    maj = majorant(centre, shift, constants(centre, shift, ranges(centre, shift)))
    key, query = tangent_multipliers(maj)
    return Best(_bound(centre, shift, dual(maj, key, query)), shift, key, query)


def _bound(centre: Centre, shift: torch.Tensor, found: Dual) -> torch.Tensor:
    """t + max(D, 0) / Zmin."""
    over = found.value.clamp_min(0)
    upper = centre.t + torch.where(over > 0, over * torch.exp(-log_z_low(centre, shift)), over)
    return torch.where(torch.isfinite(upper), upper, torch.full_like(upper, torch.inf))


def log_z_low(centre: Centre, shift: torch.Tensor) -> torch.Tensor:
    """Lower bound of log sum_j p_j e^{x_j} by Jensen: sum_j p_j x_j, whose query part is taken together."""
    bounds = ranges(centre, shift)
    K = centre.reduced.n - centre.reduced.own
    ry = radii(centre.reduced)[1]
    mean = torch.einsum("bn,bnk->bk", centre.p, centre.beta) - shift
    query = -reach(mean, ry) - (mean * centre.y).sum(-1)
    apart = (centre.p * bounds.score[0]).sum(1)
    together = query + (centre.p[:, :K] * bounds.key[0]).sum(1) + (centre.p * bounds.bilinear[0]).sum(1)
    return torch.maximum(apart, together)


def _optimised(centre: Centre, tau: float, rounds: int) -> Best:
    """Minimise D: each multiplier grows where the maximiser leaves its interval, shrinks where it stays inside."""
    shift = recentring(centre, tau)
    maj = majorant(centre, shift, constants(centre, shift, ranges(centre, shift)))
    key, query = tangent_multipliers(maj)
    best = Best(torch.full_like(centre.t, torch.inf), shift, key.clone(), query.clone())
    rows = torch.arange(len(centre.t), device=key.device)
    low = torch.maximum(key, maj.rest[..., None])
    for _ in range(rounds):
        found = dual(maj, key, query)
        best.update(rows, Best(_bound(centre, shift, found), shift, key, query))
        ok = torch.isfinite(found.value)
        size_k = _size(maj.at[0] + _over(found.step_keys, maj.key_radius), key)
        size_q = _size(maj.at[1] + _over(found.step_query, maj.query_radius), query)
        key = torch.where(ok[:, None, None], key * size_k.clamp(0.5, 2), torch.maximum(key, low) * 1.4)
        query = torch.where(ok[:, None], query * size_q.clamp(0.5, 2), query * 1.4)
    return best


def _size(w: torch.Tensor, mult: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(w, dim=-1, keepdim=True) if mult.shape[-1] == 1 else w.abs()


def _over(step: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return torch.where(radius > 0, step / radius.clamp_min(1e-300), torch.zeros_like(step))

"""Lagrangian certificate: proves that the maximiser found by ascent is the global one, or bounds how far from it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..reduced import Reduced
from ..search import ascend
from ._majorant import Centre, Majorant, centre_at, constants, majorant, radii, ranges, reach
from ._multipliers import Dual, dual

RECENTRINGS = (0.05, 0.15, 0.0)
from .result import BatchBound


def lagrangian(
    reduced: Reduced,
    point: tuple[torch.Tensor, torch.Tensor] | None = None,
    starts: int = 2,
    seed: int = 0,
    rounds: int = 40,
    chunk: int | None = None,
) -> BatchBound:
    """Bound max f for a batch by a quadratic majorant, tangent at the maximiser, and one multiplier per token.

    f <= t  iff  Phi_t(w) = sum_j p_j e^{s_j - s_j*} (v_j - t) <= 0 on the region; with a majorant q0 + g.d + d.H d / 2
    of Phi_t and Lambda - H > 0,  f <= t + max(D(lambda), 0) / Zmin.  Where D = 0 at t = f(w*) the bound is exact.

    Args:
        point: displacements x (B, n - own, m), y (B, k) to centre at; default: ascent with `starts` and `seed`.
        rounds: multiplier updates for the units that the first try leaves open.
        chunk: problems solved together; default: what fits comfortably in memory.

    Returns: BatchBound; `upper` is infinite, with a reason, where no multipliers pass the test.
    """
    size = chunk or max(1, min(256, int(2e7) // max(1, reduced.n * reduced.u.shape[1] + reduced.b.shape[2] ** 2)))
    parts = []
    for start in range(0, reduced.size, size):
        piece = slice(start, start + size)
        at = None if point is None else (point[0][piece], point[1][piece])
        parts.append(_solve(reduced[piece], at, starts, seed, rounds))
    return _joined(parts)


def _solve(
    reduced: Reduced, point: tuple[torch.Tensor, torch.Tensor] | None, starts: int, seed: int, rounds: int
) -> BatchBound:
    x, y = ascend(reduced, starts, seed)[:2] if point is None else point
    found = certify_at(reduced, x, y, rounds)
    margin = reduced.rounding
    upper = found.upper + margin
    known = torch.isfinite(upper)
    upper = torch.where(known, upper, torch.full_like(upper, torch.inf))
    reason = [
        None if good else "lagrangian: no multipliers make the quadratic majorant concave; use method='best'"
        for good in known.tolist()
    ]
    witness = {
        "t": upper, "x": x, "y": y, "shift": found.shift, "key_multipliers": found.key_mult,
        "query_multipliers": found.query_mult,
    }
    return BatchBound(upper, torch.where(known, margin, torch.zeros_like(margin)), witness, (x, y), reason)


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


def certify_at(reduced: Reduced, x: torch.Tensor, y: torch.Tensor, rounds: int) -> Best:
    """Try the recentrings in turn on the units still open, then optimise the multipliers of those left."""
    centre = centre_at(reduced, x, y)
    scale = (centre.t - reduced.nominal).abs() + 1e-6 * reduced.rounding
    best = None
    rows = torch.arange(reduced.size, device=x.device)
    for tau in RECENTRINGS:
        here = centre if best is None else _take(centre, rows)
        found = _first_try(here, tau)
        if best is None:
            best = found
        else:
            best.update(rows, found)
        rows = (best.upper > centre.t + 1e-12 * scale).nonzero()[:, 0]
        if not len(rows):
            return best
    assert best is not None
    for tau in RECENTRINGS[:1]:
        best.update(rows, _optimised(_take(centre, rows), tau, rounds))
    return best


def _take(centre: Centre, rows: torch.Tensor) -> Centre:
    parts = {name: getattr(centre, name)[rows] for name in centre.__dataclass_fields__}
    return Centre(**parts)


def recentring(centre: Centre, tau: float) -> torch.Tensor:
    """Linear function (B, k) taken off all scores: the softmax average, plus a little of the query's own gradient."""
    shift = torch.einsum("bn,bnk->bk", centre.p, centre.beta)
    if centre.reduced.query_fixed or tau == 0:
        return shift
    rx, ry = radii(centre.reduced)
    g = centre.query_gradient
    pull = reach(g, ry)
    ratio = (pull / reach(centre.key_gradient, rx).sum(1).clamp_min(1e-300)).clamp(max=tau)
    unit = g / pull.clamp_min(1e-300)[:, None]
    return shift + torch.where(pull > 0, ratio, torch.zeros_like(ratio))[:, None] * unit


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
    bounds = ranges(centre, shift)
    maj = majorant(centre, shift, constants(centre, shift, bounds))
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
    joint = query + (centre.p[:, :K] * bounds.key[0]).sum(1) + (centre.p * bounds.bilinear[0]).sum(1)
    return torch.maximum(apart, joint)


def _optimised(centre: Centre, tau: float, rounds: int) -> Best:
    """Minimise D over the multipliers: each grows where the maximiser leaves its ball, shrinks where it stays inside."""
    shift = recentring(centre, tau)
    bounds = ranges(centre, shift)
    maj = majorant(centre, shift, constants(centre, shift, bounds))
    key, query = tangent_multipliers(maj)
    key, query = key.clone(), query.clone()
    best = Best(torch.full_like(centre.t, torch.inf), shift, key.clone(), query.clone())
    rows = torch.arange(len(centre.t), device=key.device)
    low = torch.maximum(key, maj.rest[..., None])
    for _ in range(rounds):
        found = dual(maj, key, query)
        now = Best(_bound(centre, shift, found), shift, key, query)
        best.update(rows, now)
        ok = torch.isfinite(found.value)
        wk = maj.at[0] + _over(found.step_keys, maj.key_radius)
        wq = maj.at[1] + _over(found.step_query, maj.query_radius)
        if key.shape[-1] == 1:
            gk = torch.linalg.vector_norm(wk, dim=-1, keepdim=True)
        else:
            gk = wk.abs()
        gq = torch.linalg.vector_norm(wq, dim=-1, keepdim=True) if query.shape[-1] == 1 else wq.abs()
        key = torch.where(ok[:, None, None], key * gk.clamp(0.5, 2), torch.maximum(key, low) * 1.4)
        query = torch.where(ok[:, None], query * gq.clamp(0.5, 2), query * 1.4)
    return best


def _over(step: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return torch.where(radius > 0, step / radius.clamp_min(1e-300), torch.zeros_like(step))


def _joined(parts: list[BatchBound]) -> BatchBound:
    first = parts[0]
    if len(parts) == 1:
        return first
    points = [part.point for part in parts if part.point is not None]
    return replace(
        first,
        upper=torch.cat([part.upper for part in parts]),
        inflation=torch.cat([part.inflation for part in parts]),
        witness={name: torch.cat([part.witness[name] for part in parts]) for name in first.witness},
        point=(torch.cat([p[0] for p in points]), torch.cat([p[1] for p in points])),
        reason=[why for part in parts for why in (part.reason or [])],
    )

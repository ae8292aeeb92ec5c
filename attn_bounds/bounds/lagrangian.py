"""Lagrangian certificate: proves that the maximiser found by ascent is the global one, or bounds how far from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._options import checked
from ..reduced import Reduced
from ..search import ascend
from ._branch import bound_pieces, branch, cut_directions
from ._elimination import climb
from ._joint import joint
from ._majorant import centre_at
from .result import BatchBound

RECENTRINGS = (0.05, 0.15, 0.5, 0.0)
DIRECTIONS = 6  # along which the query's ball may be cut
CLOSED = 1e-11  # excess, relative to the movement, at which a piece counts as closed
REASON = "lagrangian: no multipliers make the quadratic majorant concave here; use method='best'"


@checked
def lagrangian(
    reduced: Reduced,
    point: tuple[torch.Tensor, torch.Tensor] | None = None,
    starts: int = 2,
    seed: int = 0,
    max_pieces: int = 1,
    steps: int = 12,
    chunk: int | None = None,
    retry: bool = True,
    rounds: int = 60,
) -> BatchBound:
    """Bound max f for a batch by a quadratic majorant tangent at the maximiser, and Lagrange multipliers.

    f <= t  iff  Phi_t(w) = sum_j p_j e^{s_j - s_j*} (v_j - t) <= 0 on the region. Balls: the keys are eliminated
    exactly and one quadratic in the query is left. Boxes: one quadratic in all tokens, a multiplier per coordinate.
    With D the dual bound of the quadratic at t = f(w*):  f <= t + max(D, 0) / Zmin, exact where D = 0.

    Args:
        point: displacements x (B, n - own, m), y (B, k) to centre at; default: ascent with `starts` and `seed`.
        max_pieces: pieces that the query's ball may be cut into where the first try leaves a gap (balls).
        steps: Newton steps on the multipliers of units that the first try leaves open.
        retry: whether units that the first try leaves open are tried again from other starts and centres (balls).
        rounds: at most, of the ascent to the maximiser (balls).
        chunk: problems solved together; default: what keeps the working set near 100 MB.

    Returns: BatchBound; `upper` is infinite, with a reason, where no multipliers pass the test.
    Raises: ArgumentError.
    """
    each = reduced.n * (reduced.u.shape[1] + 100) + 3 * reduced.b.shape[2] * min(reduced.b.shape[2], 400)
    size = chunk or max(1, min(256, int(4e6) // each))
    parts = []
    for start in range(0, reduced.size, size):
        piece = reduced[start : start + size]
        at = None if point is None else (point[0][start : start + size], point[1][start : start + size])
        if reduced.kind == "ball":
            parts.append(_ball(piece, at, starts, seed, max_pieces, steps, retry, rounds))
        else:
            x, y = ascend(piece, starts, seed)[:2] if at is None else at
            parts.append(_box(piece, x, y, steps))
    return _joined(parts)


def _ball(
    reduced: Reduced,
    point: tuple[torch.Tensor, torch.Tensor] | None,
    starts: int,
    seed: int,
    max_pieces: int,
    steps: int,
    retry: bool,
    rounds: int,
) -> BatchBound:
    x, y, t = climb(reduced, torch.zeros_like(reduced.b[:, 0]) if point is None else point[1], rounds)
    owner = torch.arange(reduced.size, device=t.device)
    none = t.new_zeros(reduced.size, 0)
    uncut = t.new_zeros(reduced.size, 0, y.shape[1])
    pieces = bound_pieces(reduced, t, uncut, none, none, y, owner, RECENTRINGS[:1], 0)
    rest = (pieces.excess > CLOSED * (t - reduced.nominal).abs()).nonzero()[:, 0]
    if retry and len(rest):
        if point is None:  # perhaps there is more to attain: several starts for these
            again = climb(reduced[rest], ascend(reduced[rest], starts, seed)[1])
            better = again[2] > t[rest]
            for old, new in zip((x, y, t), again, strict=True):
                old[rest[better]] = new[better]
            pieces.excess[rest[better]] = torch.inf  # it was relative to the smaller t
        slabs = (uncut[rest], none[rest], none[rest])
        pieces.replace(rest, bound_pieces(reduced[rest], t[rest], *slabs, y[rest], rest, RECENTRINGS, steps))
    tolerance = CLOSED * (t - reduced.nominal).abs()
    centre = centre_at(reduced, x, y, t)
    E = uncut
    if max_pieces > 1 and not reduced.query_fixed:
        E = cut_directions(centre, DIRECTIONS)
        pieces = branch(reduced, t, pieces.along(centre, E), E, max_pieces, tolerance, steps)
    excess = torch.full_like(t, -torch.inf).scatter_reduce(0, pieces.owner, pieces.excess, "amax")
    margin = reduced.rounding + 1e-13 * (centre.p * centre.V.abs()).sum(1)
    order = pieces.owner.argsort(stable=True)
    counts = torch.bincount(pieces.owner, minlength=reduced.size).tolist()

    def split(values: torch.Tensor) -> Sequence[torch.Tensor]:
        return values[order].split(counts)

    witness: dict[str, Any] = {
        "directions": E,
        "low": split(pieces.proof_low),
        "high": split(pieces.proof_high),
        "centre": split(pieces.centre),
        "shift": split(pieces.shift),
        "multipliers": split(pieces.mult),
    }
    return _result(t, excess, margin, witness, x, y)


def _box(reduced: Reduced, x: torch.Tensor, y: torch.Tensor, steps: int) -> BatchBound:
    centre = centre_at(reduced, x, y)
    tolerance = CLOSED * (centre.t - reduced.nominal).abs()
    found = joint(centre, tolerance, rounds=4 * steps)
    margin = reduced.rounding + 1e-13 * (centre.p * centre.V.abs()).sum(1)
    witness = {
        "x": x,
        "y": y,
        "shift": found.shift,
        "key_multipliers": found.key_mult,
        "query_multipliers": found.query_mult,
    }
    return _result(centre.t, found.upper - centre.t, margin, witness, x, y)


def _result(
    t: torch.Tensor,
    excess: torch.Tensor,
    margin: torch.Tensor,
    witness: dict[str, Any],
    x: torch.Tensor,
    y: torch.Tensor,
) -> BatchBound:
    upper = t + margin + excess * (1 + 1e-11)  # so that rounding in a large excess does not fail the audit
    known = torch.isfinite(upper)
    upper = torch.where(known, upper, torch.full_like(upper, torch.inf))
    witness = {"base": t + margin, **witness}  # proved to fail by `excess` at most
    reason = [None if good else REASON for good in known.tolist()]
    return BatchBound(upper, torch.where(known, margin, torch.zeros_like(margin)), witness, (x, y), reason)


def _joined(parts: list[BatchBound]) -> BatchBound:
    first = parts[0]
    if len(parts) == 1:
        return first
    witness: dict[str, Any] = {}
    for name, value in first.witness.items():
        all_parts = [part.witness[name] for part in parts]
        witness[name] = torch.cat(all_parts) if isinstance(value, torch.Tensor) else [v for p in all_parts for v in p]
    points = [part.point for part in parts if part.point is not None]
    return BatchBound(
        upper=torch.cat([part.upper for part in parts]),
        inflation=torch.cat([part.inflation for part in parts]),
        witness=witness,
        point=(torch.cat([p[0] for p in points]), torch.cat([p[1] for p in points])),
        reason=[why for part in parts for why in (part.reason or [])],
    )

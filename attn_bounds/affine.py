"""Affine upper bounds of a head: readout . head(z) <= slope . z + offset on the region, for any slope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._arrays import as_float64
from .bounds._majorant import centre_at, radii
from .bounds._remainder import remainder, smooth_reach
from .bounds.vertex import vertex
from .errors import ArgumentError, MethodNotApplicableError
from .problem import HeadProblem
from .reduced import Reduced, centre_and_spread, coordinates, reduce
from .regions import Lists


@dataclass(frozen=True)
class AffineWitness:
    """What proves an affine bound: the multipliers of the reduced problem, and the rounding margin in the offset."""

    key_multipliers: torch.Tensor
    query_multipliers: torch.Tensor
    inflation: float


def gradient_slope(reduced: Reduced) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of f at the centre, keys (B, n - own, m) and query (B, k): the default slope."""
    x = reduced.u.new_zeros(reduced.size, reduced.n - reduced.own, reduced.u.shape[1])
    centre = centre_at(reduced, x, torch.zeros_like(reduced.b[:, 0]))
    return centre.key_gradient, centre.query_gradient


def affine_upper_bounds(
    reduced: Reduced,
    slope_keys: torch.Tensor,
    slope_query: torch.Tensor,
    outside_keys: torch.Tensor | None = None,
    outside_query: torch.Tensor | None = None,
    multipliers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Offsets (B,) with f(w) <= slope . w + offset for all displacements w in the region; gradients flow to the slopes.

    The own key's token is the query's: its slope is `slope_query`. Infinite where no bound was found.

    Args:
        slope_keys: (B, n - own, m). slope_query: (B, k). In the coordinates of `reduced`.
        outside_keys, outside_query: (B, n - own), (B,): norms of the slopes' parts outside those coordinates (balls);
            None is zero.
        multipliers: of an earlier call at nearby slopes, to save choosing them anew.

    Returns: offsets and the multipliers used.
    """
    if outside_keys is not None or outside_query is not None:
        if reduced.kind != "ball":
            raise MethodNotApplicableError("outside_keys: a box's coordinates are the token's own, nothing is outside")
        outside_keys = slope_keys.new_zeros(slope_keys.shape[:2]) if outside_keys is None else outside_keys
        outside_query = slope_query.new_zeros(slope_query.shape[0]) if outside_query is None else outside_query
        slope_keys = torch.cat([slope_keys, outside_keys[..., None]], -1)
        if reduced.query_fixed:
            reduced = _padded(reduced, query=False)
        else:
            reduced = _padded(reduced, query=True)
            slope_query = torch.cat([slope_query, outside_query[..., None]], -1)
    offsets, multipliers = remainder(reduced, slope_keys, slope_query, multipliers)
    rx, ry = radii(reduced)
    # At large radii the majorant fails: then the largest f and the least G.w, each on its own.
    with torch.no_grad():
        apart = vertex(reduced).upper
    moved = smooth_reach(slope_keys, rx).sum(1) + smooth_reach(slope_query, ry)
    rounding = 1e-15 * (1 + slope_keys[0].numel() + slope_query.shape[1]) ** 0.5 * moved.detach()
    return torch.minimum(offsets + reduced.rounding, apart + moved) + rounding, multipliers


def _padded(reduced: Reduced, query: bool) -> Reduced:
    """The same problems with one more coordinate, in which nothing but a slope can point."""

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.zeros_like(tensor[..., :1])], -1)

    changes: dict[str, Any] = {name: pad(getattr(reduced, name)) for name in ("a", "u", "fk")}
    if query:
        changes |= {name: pad(getattr(reduced, name)) for name in ("b", "fq")}
    return replace(reduced, **changes)


def affine_upper_bound(problem: HeadProblem, slope: Any = None) -> tuple[torch.Tensor, float, AffineWitness]:
    """Bound c . head(z) <= slope . z + offset for every z in the region.

    Args: slope (n, d), or (n + 1, d) where an outside query moves (the last row is the query's); None: the gradient at
    the region's centre, for which offset is second order in the radius.

    Returns: slope, offset (infinite where no bound was found), witness.
    Raises: MethodNotApplicableError for substitutions; ShapeError.
    """
    if not isinstance(problem, HeadProblem):
        raise ArgumentError(f"problem: expected a HeadProblem, got {type(problem).__name__}")
    if isinstance(problem.placed, Lists):
        raise MethodNotApplicableError("region: expected balls or boxes, got TokenSubstitutions; use method='exact'")
    centres, _ = centre_and_spread(problem)
    if slope is not None:
        slope = as_float64("slope", slope, tuple(centres.shape), centres.device)[None]
    slopes, offsets, multipliers, rounding = affine_upper_bounds_of([problem], slope)
    offset = float(offsets[0])
    witness = AffineWitness(multipliers[0][0], multipliers[1][0], float(rounding[0]))
    return slopes[0], math.inf if math.isnan(offset) else offset, witness


def affine_upper_bounds_of(
    problems: Sequence[HeadProblem],
    slopes: torch.Tensor | None = None,
    multipliers: tuple[torch.Tensor, torch.Tensor] | None = None,
    tilts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Bound c . head(z) <= slope . z + offset for many problems alike (one `reduced.group_key`), in tokens as given.

    Args:
        slopes: (B, p, d) for the p placed points of each problem; None: the gradients at the centres. Gradients flow
            from the offsets to the slopes.
        multipliers: of an earlier call at nearby slopes, to save choosing them anew.
        tilts: (B, p, d), added to the slopes.

    Returns: slopes (B, p, d), offsets (B,), infinite where no bound was found, multipliers, and the part (B,) of the
    offsets that pays for rounding.
    """
    reduced = reduce(problems)
    placed = [centre_and_spread(problem) for problem in problems]
    centres, spread = (torch.stack(part) for part in zip(*placed, strict=True))
    bases = [coordinates(problem) for problem in problems]
    basis = None if bases[0] is None else torch.stack([part for part in bases if part is not None])
    first = problems[0]
    orders = [problem.key_order[:-1] if problem.has_own_key else problem.key_order for problem in problems]
    order = torch.tensor(orders, dtype=torch.long, device=centres.device).reshape(len(problems), -1)
    rows = torch.arange(len(problems), device=centres.device)
    moves = not first.query_is_fixed
    query = torch.tensor([problem.query_place if moves else 0 for problem in problems], device=centres.device)
    if slopes is None:
        keys, at_query = gradient_slope(reduced)
        slopes = torch.zeros_like(centres)
        slopes[rows[:, None], order] = keys if basis is None else keys @ basis.transpose(1, 2)
        if moves:
            slopes[rows, query] = at_query if basis is None else (basis @ at_query[..., None])[..., 0]
    if tilts is not None:
        slopes = slopes + tilts
    used = slopes[rows[:, None], order]
    used_query = slopes[rows, query] if moves else slopes.new_zeros(len(problems), 0)
    outside: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if basis is not None:
        inside = used @ basis
        beyond = _length(used - inside @ basis.transpose(1, 2))
        used = inside
        beyond_query = slopes.new_zeros(len(problems))
        if moves:
            inside_query = (used_query[:, None] @ basis)[:, 0]
            beyond_query = _length(used_query - (basis @ inside_query[..., None])[..., 0])
            used_query = inside_query
        if float((beyond.sum() + beyond_query.sum()).detach()) > 0:
            outside = (beyond, beyond_query)
    offsets, multipliers = affine_upper_bounds(reduced, used, used_query, *outside, multipliers=multipliers)
    idle = torch.ones(centres.shape[:2], dtype=torch.bool, device=centres.device)
    idle[rows[:, None], order] = False
    if moves:
        idle[rows, query] = False
    radius = spread[..., None] if spread.dim() == 2 else spread
    still = (smooth_reach(slopes, radius) * idle).sum(1)  # of tokens that f does not read, but the slope does
    moved = (slopes * centres).flatten(1).sum(1)
    size = torch.linalg.vector_norm((slopes * centres).detach().flatten(1), dim=1)
    rounding = 4e-16 * slopes[0].numel() ** 0.5 * size + 4e-16 * still.detach()
    return slopes, offsets + still - moved + rounding, multipliers, reduced.rounding + rounding


def _length(vectors: torch.Tensor) -> torch.Tensor:
    """Norm over the last axis with a gradient at zero; exactly zero there."""
    square = vectors.square().sum(-1)
    return torch.where(square > 0, torch.where(square > 0, square, torch.ones_like(square)).sqrt(), square)

"""Affine upper bounds of a head: readout . head(z) <= slope . z + offset on the region, for any slope."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._arrays import as_float64
from .bounds._majorant import centre_at, radii, reach
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
    reduced = reduce([problem])
    centres, spread = centre_and_spread(problem)
    basis = coordinates(problem)
    order = problem.key_order[:-1] if problem.has_own_key else problem.key_order
    if slope is None:
        keys, query = gradient_slope(reduced)
        slope = torch.zeros_like(centres)
        slope[order] = keys[0] if basis is None else keys[0] @ basis.T
        if not problem.query_is_fixed:
            slope[problem.query_place] = query[0] if basis is None else basis @ query[0]
    slope = as_float64("slope", slope, tuple(centres.shape), centres.device)
    used = slope[order]
    used_query = slope[problem.query_place] if not problem.query_is_fixed else slope.new_zeros(0)
    outside: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if basis is not None:
        inside = used @ basis
        outside_keys = torch.linalg.vector_norm(used - inside @ basis.T, dim=-1)[None]
        outside_query = slope.new_zeros(1)
        used = inside
        if not problem.query_is_fixed:
            inside_query = basis.T @ used_query
            outside_query = torch.linalg.vector_norm(used_query - basis @ inside_query)[None]
            used_query = inside_query
        if float(outside_keys.sum() + outside_query.sum()) > 0:
            outside = (outside_keys, outside_query)
    offsets, multipliers = affine_upper_bounds(reduced, used[None], used_query[None], *outside)
    taken = torch.zeros(len(centres), dtype=torch.bool, device=centres.device)
    taken[order] = True
    if not problem.query_is_fixed:
        taken[problem.query_place] = True
    radius = spread[:, None] if spread.dim() == 1 else spread
    idle = reach(slope[~taken], radius[~taken]).sum()  # tokens that f does not read, but the slope does
    moved = (slope * centres).sum()
    rounding = 4e-16 * slope.numel() ** 0.5 * (slope * centres).norm() + 4e-16 * idle
    offset = float(offsets[0] + idle - moved + rounding)
    if math.isnan(offset):
        offset = math.inf
    witness = AffineWitness(multipliers[0][0], multipliers[1][0], float(reduced.rounding[0] + rounding))
    return slope, offset, witness

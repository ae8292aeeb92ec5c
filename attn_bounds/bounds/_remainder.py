"""Upper bound of f(w) - G.w over the region, for any slope G: what a linear relaxation of the head needs.

f - G.w <= t  iff  sum_j p_j e^{x_j} (V_j + y_j - G.w) <= 0: the majorant of `_majorant`, centred at the nominal tokens,
with V + y - G.w in the place of V + y. Its Hessian gains -(G X^T + X G^T), X = sum_j p_j grad x_j, of rank two.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..reduced import Reduced
from ._majorant import Centre, Constants, Majorant, Ranges, centre_at, majorant, phi, radii, ranges, reach
from ._multipliers import apply, dual

GROWTH = (1e-5, 1e-3, 1e-2, 0.03, 0.08, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 100.0)


def remainder(
    reduced: Reduced,
    slope_keys: torch.Tensor,
    slope_query: torch.Tensor,
    multipliers: tuple[torch.Tensor, torch.Tensor] | None = None,
    rounds: int = 12,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Bound max of f - G.w, (B,), infinite where none was found, and the multipliers used.

    Args: slope_keys (B, n - own, m), slope_query (B, k), in the coordinates of `reduced`; gradients flow through both.
    multipliers: of an earlier call, to be used as they are.
    """
    zero_x = reduced.u.new_zeros(reduced.size, reduced.n - reduced.own, reduced.u.shape[1])
    zero_y = torch.zeros_like(reduced.b[:, 0])
    centre = centre_at(reduced, zero_x, zero_y)
    shift = torch.einsum("bn,bnk->bk", centre.p, centre.beta)
    with torch.no_grad():
        bounds = ranges(centre, shift)
    maj = _with_slope(centre, shift, bounds, slope_keys, slope_query)
    if multipliers is None:
        with torch.no_grad():
            multipliers = choose_multipliers(maj, rounds)
    found = dual(maj, *multipliers)
    log_z = (centre.p * bounds.score[0]).sum(1)
    K = reduced.n - reduced.own
    together = (centre.p[:, :K] * bounds.key[0]).sum(1) + (centre.p * bounds.bilinear[0]).sum(1)
    over = found.value.clamp_min(0) * torch.exp(-torch.maximum(log_z, together))
    upper = centre.t + over
    return torch.where(torch.isfinite(upper), upper, torch.full_like(upper, torch.inf)), multipliers


def _with_slope(
    centre: Centre, shift: torch.Tensor, bounds: Ranges, slope_keys: torch.Tensor, slope_query: torch.Tensor
) -> Majorant:
    red, p, V = centre.reduced, centre.p, centre.V
    K = red.n - red.own
    rx, ry = radii(red)
    each = smooth_reach(slope_keys, rx)
    query = smooth_reach(slope_query, ry)
    total = each.sum(1) + query
    value = smooth_reach(red.u[:, None] - slope_keys, rx) + total[:, None] - each
    if red.own:
        value = torch.cat([value, (smooth_reach(red.own_u - slope_query, ry) + total - query)[:, None]], 1)
    high = V + value  # of V + y - G.w
    kappa = high * phi(torch.where(high > 0, bounds.score[1], bounds.score[0]))
    most = torch.maximum(-bounds.bilinear[0], bounds.bilinear[1]).clamp_min(0)
    e_query = 2 * kappa[..., None] * (centre.beta - shift[:, None])
    if red.own:
        e_query = torch.cat([e_query[:, :K], e_query[:, K:] + red.own_u[:, None]], 1)
    moved = smooth_reach(e_query, ry[:, None])
    keys = smooth_reach(red.u[:, None] + 2 * kappa[:, :K, None] * centre.alpha[:, None], rx)
    moved = moved + torch.cat([keys, keys.new_zeros(keys.shape[0], red.n - K)], 1)
    spare = torch.where(most > 0, moved + kappa.abs() * most + total[:, None], torch.zeros_like(moved))
    nothing = (torch.zeros_like(slope_keys), torch.zeros_like(slope_query), torch.zeros_like(query))
    const = Constants(kappa, V, spare, *nothing)
    maj = majorant(centre, shift, const)
    mean_keys = p[:, :K, None] * centre.alpha[:, None]  # the query's part is taken off by the shift
    U = (
        torch.stack([slope_keys, mean_keys.expand_as(slope_keys)], 1),
        torch.stack([slope_query, torch.zeros_like(slope_query)], 1),
        -torch.eye(2, dtype=V.dtype, device=V.device).flip(0).expand(V.shape[0], 2, 2),
    )
    return replace(maj, g=maj.g - slope_keys, gq=maj.gq - slope_query, low_rank=U)


def smooth_reach(vector: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """`reach`, with a gradient at zero, and never below it."""
    if radius.shape[-1] == 1 and vector.shape[-1] != 1:
        return (vector.square().sum(-1) + 1e-60).sqrt() * radius[..., 0]
    return reach(vector, radius)


def choose_multipliers(maj: Majorant, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Multipliers of a local maximiser of the quadratic itself, grown until the test passes."""
    rx, ry = maj.key_radius, maj.query_radius
    wk, wq = _start(maj)
    for _ in range(rounds):
        gk, gq = (g + h for g, h in zip((maj.g, maj.gq), apply(maj, rx * wk, ry * wq), strict=True))
        # half way to where the gradient points: without it the iteration jumps about where H has negative curvature
        wk, wq = _argmax(_argmax(gk * rx, rx) + wk, rx), _argmax(_argmax(gq * ry, ry) + wq, ry)
    gk, gq = (g + h for g, h in zip((maj.g, maj.gq), apply(maj, rx * wk, ry * wq), strict=True))
    key, query = _size(gk * rx, rx), _size(gq * ry, ry)
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    value = torch.full_like(maj.q0, torch.inf)
    for least in (torch.zeros_like(key), _own_curvature(maj)):  # the second: every key's block positive by itself
        grown, found = _grown(maj, torch.maximum(key, least), query)
        if best is None:
            best, value = grown, found
        else:
            better = found < value
            best = (
                torch.where(better[:, None, None], grown[0], best[0]),
                torch.where(better[:, None], grown[1], best[1]),
            )
            value = torch.where(better, found, value)
    assert best is not None
    return best


def _own_curvature(maj: Majorant) -> torch.Tensor:
    """A little above the largest curvature of each key's own block, in units of the radii, (B, K, 1 or m)."""
    K = maj.block
    if maj.key_radius.shape[-1] == 1:
        gram = maj.plane @ maj.plane.transpose(1, 2)
        M = gram[:, None] @ K
        half = (M[..., 0, 0] + M[..., 1, 1]) / 2
        det = M[..., 0, 0] * M[..., 1, 1] - M[..., 0, 1] * M[..., 1, 0]
        top = half + (half * half - det).clamp_min(0).sqrt()
        return 1.001 * (top[..., None] * maj.key_radius.square() + maj.rest[..., None]).clamp_min(0)
    reach_1, reach_2 = ((maj.plane[:, i, None].abs() * maj.key_radius).sum(-1)[..., None] for i in (0, 1))
    one, two = ((maj.plane[:, i, None].abs() * maj.key_radius) for i in (0, 1))
    first, mixed = K[..., 0, 0].abs()[..., None], K[..., 0, 1].abs()[..., None]
    return first * one * reach_1 + mixed * (one * reach_2 + two * reach_1) + maj.rest[..., None]


def _grown(
    maj: Majorant, key: torch.Tensor, query: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The first of growing multiples that passes the test, and its value (B,)."""
    mean = (key.flatten(1).sum(1) + query.sum(1)) / (key[0].numel() + query[0].numel())
    best = (key.clone(), query.clone())
    value = torch.full_like(maj.q0, torch.inf)
    rows = torch.arange(len(value), device=value.device)
    for growth in GROWTH:
        part = _rows(maj, rows)
        floor = mean[rows] * min(1.0, growth) * 0.1 + 1e-300
        tried = ((1 + growth) * key[rows] + floor[:, None, None], (1 + growth) * query[rows] + floor[:, None])
        found = dual(part, *tried).value
        good = torch.isfinite(found)
        value[rows[good]] = found[good]
        for kept, new in zip(best, tried, strict=True):
            kept[rows[good]] = new[good]
        rows = rows[~good]
        if not len(rows):
            break
    return best, value


def _rows(maj: Majorant, rows: torch.Tensor) -> Majorant:
    def take(value):  # type: ignore[no-untyped-def]
        if isinstance(value, tuple):
            return tuple(v[rows] for v in value)
        return None if value is None else value[rows]

    return Majorant(**{name: take(getattr(maj, name)) for name in maj.__dataclass_fields__})


def _start(maj: Majorant) -> tuple[torch.Tensor, torch.Tensor]:
    """A start of no special direction: one pass over the gradient where there is one, and the score gradients else."""
    spread = torch.linspace(1, 2, maj.gq.shape[1], dtype=maj.gq.dtype, device=maj.gq.device)
    wq = maj.gq + 1e-3 * (1 + torch.linalg.vector_norm(maj.gq, dim=1, keepdim=True)) * spread
    wk = maj.g + maj.plane.sum(1)[:, None]
    return _argmax(wk * maj.key_radius, maj.key_radius), _argmax(wq * maj.query_radius, maj.query_radius)


def _argmax(g: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    if radius.shape[-1] == 1 and g.shape[-1] != 1:
        return g / torch.linalg.vector_norm(g, dim=-1, keepdim=True).clamp_min(1e-300)
    return torch.sign(g)


def _size(g: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    if radius.shape[-1] == 1 and g.shape[-1] != 1:
        return torch.linalg.vector_norm(g, dim=-1, keepdim=True)
    return g.abs()

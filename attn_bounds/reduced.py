"""The reduced problem, the one thing that every bound reads: a batch of problems in as few coordinates as are exact.

With displacements x_j of the keys and y of the query from the centre of their regions,

    s_j = s0_j + a . x_j + b_j . y + (Fq y) . (Fk x_j)        v_j = v0_j + u . x_j
    own key (the moving query's token, last):  s = s0 + b . y + (Fq y) . (Fk y),   v = v0 + u . y

and f = sum_j softmax(s)_j v_j. The key bias adds one number to all scores and is dropped. For balls the coordinates
are an orthonormal basis of span(rows of W_Q, rows of W_K, u) (query fixed: of the plane span(a, u)), so a ball stays a
ball of the same radius and nothing is lost; for boxes they are the token's own coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from .errors import MethodNotApplicableError
from .problem import HeadProblem
from .regions import Balls, Boxes, Lists

EPS = 2.0**-53
DROPPED = 1e-14  # part of u outside the basis that counts as rounding; `_rounding` pays for it


@dataclass(frozen=True)
class Reduced:
    """A batch of B alike problems: n keys (own key last), m key coordinates, k query coordinates (0: fixed)."""

    kind: Literal["ball", "box"]
    own: bool  # the last key is the moving query's own token
    s0: torch.Tensor  # (B, n) scores at the centre
    v0: torch.Tensor  # (B, n) values at the centre
    a: torch.Tensor  # (B, m) gradient of a score in its key
    u: torch.Tensor  # (B, m) gradient of a value in its key
    b: torch.Tensor  # (B, n, k) gradient of a score in the query
    fq: torch.Tensor  # (B, h, k) query's factor of the bilinear part, scale included
    fk: torch.Tensor  # (B, h, m) keys' factor
    key_radius: torch.Tensor  # (B, n - own) ball, or (B, n - own, m) box half-widths
    query_radius: torch.Tensor  # (B,) ball, or (B, k) box
    norm: torch.Tensor  # (B,) spectral norm of the bilinear part
    own_low: torch.Tensor  # (B,) least and greatest eigenvalue of its symmetric part
    own_high: torch.Tensor  # (B,)
    nominal: torch.Tensor  # (B,) f at the nominal tokens
    rounding: torch.Tensor  # (B,) bound of the float64 error of f, see `_rounding`

    @property
    def size(self) -> int:
        """Number of problems."""
        return self.s0.shape[0]

    @property
    def n(self) -> int:
        """Number of keys, the own one included."""
        return self.s0.shape[1]

    @property
    def query_fixed(self) -> bool:
        """Whether the query stands still."""
        return self.b.shape[2] == 0

    @property
    def own_u(self) -> torch.Tensor:
        """Gradient (B, k) of the own key's value in the query's coordinates, which are then the keys' too."""
        return self.u

    def __getitem__(self, index: torch.Tensor | slice) -> Reduced:
        """The batch restricted to some problems."""
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        taken: dict[str, Any] = {k: v[index] if isinstance(v, torch.Tensor) else v for k, v in parts.items()}
        return Reduced(**taken)

    def scores_values(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute scores and values (B, *, n) at displacements x (B, *, n - own, m) and y (B, *, k)."""
        lead = (slice(None),) + (None,) * (x.dim() - 3)
        qy = torch.einsum("bhk,b...k->b...h", self.fq, y)
        direction = self.a[lead] + torch.einsum("bhm,b...h->b...m", self.fk, qy)
        s = self.s0[lead] + torch.einsum("bnk,b...k->b...n", self.b, y)
        moved = (x @ direction.unsqueeze(-1)).squeeze(-1)
        shift = torch.einsum("b...nm,bm->b...n", x, self.u)
        if self.own:
            moved = torch.cat([moved, (qy * torch.einsum("bhm,b...m->b...h", self.fk, y)).sum(-1, keepdim=True)], -1)
            shift = torch.cat([shift, torch.einsum("b...k,bk->b...", y, self.own_u).unsqueeze(-1)], -1)
        return s + moved, self.v0[lead] + shift

    def value(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute f (B, *) at displacements x (B, *, n - own, m) and y (B, *, k)."""
        s, v = self.scores_values(x, y)
        return (torch.softmax(s, -1) * v).sum(-1)


def group_key(problem: HeadProblem) -> tuple:
    """Problems with equal keys can share one batch."""
    kind = type(problem.placed).__name__
    head = problem.head
    order = len(problem.key_order)
    return (kind, head.d, head.d_head, order, problem.query_is_fixed, problem.has_own_key, str(head.device))


def reduce(problems: Sequence[HeadProblem]) -> Reduced:
    """Build the reduced batch of problems with one `group_key`. Raises: MethodNotApplicableError for substitutions."""
    pieces = [_piece(problem) for problem in problems]
    first = pieces[0]
    stacked = {
        name: torch.stack([piece[name] for piece in pieces])
        for name, value in first.items()
        if isinstance(value, torch.Tensor)
    }
    kind: Literal["ball", "box"] = "ball" if isinstance(problems[0].placed, Balls) else "box"
    return Reduced(kind=kind, own=problems[0].has_own_key, **stacked)


def centre_and_spread(problem: HeadProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Centres (p, d) of the placed points' regions, and their radii (p,) or half-widths (p, d)."""
    placed = problem.placed
    if isinstance(placed, Lists):
        raise MethodNotApplicableError(
            "region: the reduced problem holds balls and boxes, got TokenSubstitutions; use method='exact'"
        )
    if isinstance(placed, Balls):
        return placed.centre, placed.radius
    centre = torch.minimum(torch.maximum((placed.lower + placed.upper) / 2, placed.lower), placed.upper)
    half = torch.maximum(placed.upper - centre, centre - placed.lower)
    # The midpoint and the half-width round; one unit outwards keeps the box inside centre +- half.
    return centre, torch.where(placed.lower == placed.upper, half, half * (1 + 4 * EPS))


def coordinates(problem: HeadProblem) -> torch.Tensor | None:
    """Basis (d, m) whose columns span the coordinates of the reduced problem; None for the token's own (boxes)."""
    head = problem.head
    u, _ = head.value_direction(problem.readout)
    if isinstance(problem.placed, Boxes):
        return None
    if not problem.query_is_fixed:
        if head.basis is None:
            return None
        rest = u - head.basis @ (head.basis.T @ u)
        rest = rest - head.basis @ (head.basis.T @ rest)  # twice: the first leaves a rounding of u along the basis
        if float(torch.linalg.vector_norm(rest)) <= DROPPED * float(torch.linalg.vector_norm(u)):
            rest = torch.zeros_like(rest)  # u lies in the span: what is left is rounding, and has no direction
        return torch.cat([head.basis, _unit(rest)[:, None]], dim=1)
    q = head.scale * (head.W_Q @ problem.query_point + head.b_Q)
    first = _unit(head.W_K.T @ q)
    second = u - first * (first @ u)
    second = _unit(second - first * (first @ second))  # twice is enough for orthogonality to rounding
    return torch.stack([first, second], dim=1)


def _unit(vector: torch.Tensor) -> torch.Tensor:
    size = torch.linalg.vector_norm(vector)
    return vector / size if float(size) > 0 else torch.zeros_like(vector)


def _piece(problem: HeadProblem) -> dict[str, torch.Tensor]:
    head = problem.head
    centres, spread = centre_and_spread(problem)
    order = problem.key_order
    own = problem.has_own_key
    row = problem.query_place
    u, const = head.value_direction(problem.readout)
    zq = problem.query_point if row is None else centres[row]
    z = centres[order]
    q = head.scale * (head.W_Q @ zq + head.b_Q)
    k = z @ head.W_K.T
    s0 = k @ q
    v0 = z @ u + const
    basis = coordinates(problem)
    fixed = problem.query_is_fixed
    if isinstance(problem.placed, Balls) and not fixed and basis is not None:
        assert head.basis is not None
        zero = head.W_Q.new_zeros(head.d_head, 1)  # the column of u's part outside the basis
        fq, fk = (torch.cat([f, zero], dim=1) for f in head.rotated)
    else:
        fq, fk = head.scale * head.W_Q, head.W_K
        if basis is not None:
            fq, fk = fq @ basis, fk @ basis
    if fixed:
        fq = fq[:, :0]
    a = fk.T @ q
    b = k @ fq
    if own:
        b = torch.cat([b[:-1], b[-1:] + a])
    norm, low, high = (0.0, 0.0, 0.0) if fixed else (head.bilinear_norm, *head.own_range)
    others = order[:-1] if own else order
    query_radius = spread.new_zeros((0,) if spread.dim() == 2 else ()) if fixed else spread[row]
    number = s0.new_tensor
    return {
        "s0": s0,
        "v0": v0,
        "a": a,
        "u": u if basis is None else basis.T @ u,
        "b": b,
        "fq": fq,
        "fk": fk,
        "key_radius": spread[others],
        "query_radius": query_radius,
        "norm": number(norm * (1 + 1e-12)),
        "own_low": number(low - 1e-12 * norm),
        "own_high": number(high + 1e-12 * norm),
        "nominal": number(problem.nominal),
        "rounding": _rounding(problem, zq, z, q, k, u, spread),
    }


def _rounding(
    problem: HeadProblem,
    zq: torch.Tensor,
    z: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    u: torch.Tensor,
    spread: torch.Tensor,
) -> torch.Tensor:
    """Bound the error that float64 makes in f, anywhere on the region.

    An inner product of length d errs by lambda sqrt(d) eps |x| |y| with overwhelming probability (Higham and Mary
    2019; lambda = 3 here). A score's error delta moves f by at most delta (max v - min v), a value's by itself. The
    audit re-proves certificates in ball arithmetic, so this margin need only be right in practice.
    """
    head, size = problem.head, torch.linalg.vector_norm
    order, row = problem.key_order, problem.query_place
    reach = spread if spread.dim() == 1 else size(spread, dim=-1)
    query_reach = 0.0 if row is None else float(reach[row])
    key_reach = float(reach[order].max())
    token, query = float(size(z, dim=-1).max()) + key_reach, float(size(zq)) + query_reach
    unit = (8 + 3 * math.sqrt(head.d + head.d_head + problem.n)) * EPS
    root, root_v = math.sqrt(head.d_head), math.sqrt(head.W_V.shape[0])
    norm_q, norm_k = abs(head.scale) * head.norms[0], head.norms[1]
    q_norm = float(size(q)) + norm_q * query_reach
    k_norm = float(size(k, dim=-1).max()) + norm_k * key_reach
    q_size = abs(head.scale) * head.norms[2] * query / root + abs(head.scale) * float(size(head.b_Q))
    score = unit * (q_norm * k_norm + q_size * k_norm + head.norms[3] * token / root * q_norm)
    v = z @ u
    value_spread = float(v.max() - v.min()) + 2 * float(size(u)) * key_reach
    # A value is read through W_V, then W_O and the readout: intermediate sizes count, not only the result's.
    mixed = problem.readout if head.W_O is None else head.W_O.T @ problem.readout
    outer = float(size(mixed)) + (0.0 if head.W_O is None else float(size(problem.readout)) * head.norms[5] / root_v)
    value = unit * (outer * (head.norms[4] * token / root_v + float(size(head.b_V))) + float(v.abs().max()))
    value += 2 * DROPPED * float(size(u)) * key_reach
    return u.new_tensor(score * value_spread + value)


def lift(problem: HeadProblem, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Map displacements x (n - own, m), y (k,) to tokens (n, d) and, where an outside query moves, that query (d,).

    The result lies in the region: balls are shrunk, boxes clipped, by the rounding of the map.
    """
    centres, spread = centre_and_spread(problem)
    basis = coordinates(problem)
    points = centres.clone()
    if problem.placed_count == problem.n:  # rows without a key stay at the nominal token
        points[: problem.n] = torch.where(_row_mask(problem)[:, None], points, problem.tokens)
    order = problem.key_order[:-1] if problem.has_own_key else problem.key_order
    rows = list(zip(order, x if basis is None else x @ basis.T, strict=True))
    if not problem.query_is_fixed:
        rows.append((problem.query_place, y if basis is None else basis @ y))  # type: ignore[arg-type]
    for j, delta in rows:
        if isinstance(problem.placed, Boxes):
            points[j] = torch.clamp(centres[j] + delta, problem.placed.lower[j], problem.placed.upper[j])
        else:
            points[j] = _inside(centres[j], delta, float(spread[j]))
    return points[: problem.n], (points[problem.n] if points.shape[0] > problem.n else None)


def _row_mask(problem: HeadProblem) -> torch.Tensor:
    mask = torch.zeros(problem.n, dtype=torch.bool, device=problem.tokens.device)
    mask[problem.key_order] = True
    if problem.query_index is not None:
        mask[problem.query_index] = True
    return mask


def _inside(centre: torch.Tensor, delta: torch.Tensor, radius: float) -> torch.Tensor:
    """centre + delta, shrunk by a growing number of roundings of the token until it measures at most `radius`."""
    size = torch.linalg.vector_norm
    shrink = EPS * (1 + float(size(centre)) / radius) if radius > 0 else 0.0
    for _ in range(60):
        point = centre + delta
        if float(size(point - centre)) <= radius:
            return point
        delta = delta * (1 - min(shrink, 0.5))
        shrink *= 2
    return centre.clone()

"""Moment relaxations with exponential cones, second and third order, as proved upper bounds."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch

from .._options import checked
from ..reduced import Reduced
from ..search import ascend
from ..solvers import resolve, solve
from ._centred import Centred, centre
from ._cones import Programme, multipliers, nothing
from ._recovery import WIDEST, recover
from .result import BatchBound

FLOORS = (1e-4, 0.1)  # a box's ellipsoid follows the gradient at the point closely, and loosely


@checked
def moment(
    reduced: Reduced,
    order: Literal[2, 3] = 2,
    blocks: Literal["reduced", "full"] = "reduced",
    solver: str | None = None,
    products: bool = True,
    pulls: tuple[float, ...] = (0.0,),
    point: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> BatchBound:
    """Bound f from above by a level-1 moment relaxation of the attention weights, proved through its dual.

    With e_j the exponential of a score's deviation and tau = 1 / sum_j p_j e_j, the unknowns are the moments L[.] =
    tau E[.] of the query's displacement w_q, a key's w_j and e_j; one positive semidefinite block per key over
    (1, w_q, w_j, e_j), so the cost is linear in the number of keys:

        maximise  sum_j p_j L[e_j value_j]   subject to   sum_j p_j L[e_j] = 1,   L|w|^2 <= tau,
        tau exp(L[s_j] / tau) <= L[e_j] <= L[chord(s_j)],   L[e_j^2] <= (e^low + e^high) L[e_j] - e^(low + high) tau,
        |L[e_j w]| <= L[e_j],
        products    |L[(e_j - 1 - s_j) w]| <= L[e_j - 1 - s_j],   |L[(chord(s_j) - e_j) w]| <= L[chord(s_j) - e_j],
        order 3     L[e_j] log(L[e_j] / tau) <= L[e_j s_j]        (e s = e log e)

    Everything is written around the best point found. The bilinear score of a moving query leaves third moments in
    the last two lines; what a block cannot hold is bounded by the masses |w_q - w_q*|^2 and |w_j - w_j*|^2, which
    vanish at that point. A box is held by the ellipsoid sum_i weight_i w_i^2 <= 1 through its corners, weights in
    proportion to the gradient at the point, two of them tried (blocks="full": entry by entry). What bounds the
    relaxation's gap: `slack.gap_bound`.

    `upper` is not what the solver says but the value of its dual, made feasible: see `_recovery`. Order 3 also tries
    order 2 and keeps the lesser bound, so it is never above it.

    Args:
        blocks: "reduced" keeps the span of {w_j*, alpha_j, u_j} and {w_q*, beta_j} in each block; "full" keeps all
            coordinates (small dimensions only: it grows with their fourth power).
        solver: "clarabel", "mosek", "scs"; None is MOSEK where its licence checks out, else Clarabel.
        products: include the products of exp's tangent and chord with the region.
        pulls: weightings of the common function that is taken off all scores (softmax at the point plus a multiple of
            f's gradient in the query); all are sound, the best is kept. Only a moving query is affected.
        point: displacements x (B, K, m), y (B, k) to centre at; None lets `search.ascend` find them.
    Returns: bounds (B,); witness: the multipliers, `solver_value` and `status`. Infinite, with a reason, where a solve
        failed or a score moves by more than 200.
    Raises: ArgumentError.
    """
    name = resolve(solver)
    x, y = ascend(reduced)[:2] if point is None else point
    best = _Least()
    for pull in pulls:
        for floor in FLOORS if reduced.kind == "box" else FLOORS[:1]:
            c = centre(reduced, x, y, pull, floor)
            for one in (2, 3) if order == 3 else (2,):
                best.offer(_once(c, one, blocks, name, products), pull, floor)
    # All bounds hold, so the third order, which also tries the second, is never above it.
    return best.result(reduced, (x, y))


def _once(c: Centred, order: int, blocks: str, solver: str, products: bool) -> BatchBound:
    wide = ((c.high > WIDEST) | (c.low < -WIDEST)).any(-1)
    parts, values, status = [], [], []
    for index in range(c.size):
        one = {name: value[index].cpu().numpy() for name, value in vars(c).items() if isinstance(value, torch.Tensor)}
        if wide[index]:
            parts.append(nothing(one))
            values.append(math.nan)
            status.append(f"not tried: a score moves by more than {WIDEST:g}")
            continue
        programme = Programme(one, c.box, c.own, order, blocks == "full", products)
        solution = solve(programme.conic, solver)
        parts.append(multipliers(programme, solution))
        values.append(programme.nominal - programme.scale * solution.value)
        status.append(solution.status)
    given = {name: torch.as_tensor(np.stack([part[name] for part in parts]), device=c.f.device) for name in parts[0]}
    upper, error, kept = recover(c, given)
    kept["solver_value"] = torch.tensor(values, dtype=torch.float64, device=c.f.device)
    return BatchBound(upper, error, {**kept, "status": status})


class _Least:
    """The least of several bounds, problem by problem, with its witness."""

    def __init__(self) -> None:
        self.best: BatchBound | None = None

    def offer(self, bound: BatchBound, pull: float, floor: float) -> None:
        where = {"pull": torch.full_like(bound.upper, pull), "floor": torch.full_like(bound.upper, floor)}
        witness = {**bound.witness, **where}
        if self.best is None:
            self.best = BatchBound(bound.upper, bound.inflation, witness)
            return
        old, better = self.best, bound.upper < self.best.upper
        kept = {
            name: torch.where(better.reshape(-1, *(1,) * (value.dim() - 1)), value, old.witness[name])
            if isinstance(value, torch.Tensor)
            else [new if b else was for b, new, was in zip(better.tolist(), value, old.witness[name], strict=True)]
            for name, value in witness.items()
        }
        self.best = BatchBound(
            torch.where(better, bound.upper, old.upper), torch.where(better, bound.inflation, old.inflation), kept
        )

    def result(self, reduced: Reduced, point: tuple[torch.Tensor, torch.Tensor]) -> BatchBound:
        assert self.best is not None
        best = self.best
        witness = {**best.witness, "x": point[0], "y": point[1]}
        finite = torch.isfinite(best.upper).tolist()
        reason = [None if ok else why for ok, why in zip(finite, witness["status"], strict=True)]
        return BatchBound(best.upper + reduced.rounding, best.inflation + reduced.rounding, witness, point, reason)

"""Moment relaxations with exponential cones, second and third order, as proved upper bounds."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch

from ..errors import ArgumentError
from ..reduced import Reduced
from ..search import ascend
from ..solvers import resolve, solve
from ._centred import Centred, centre
from ._cones import Programme, multipliers, nothing
from ._recovery import WIDEST, recover
from .result import BatchBound


def moment(
    reduced: Reduced,
    order: Literal[2, 3] = 2,
    blocks: Literal["reduced", "full"] = "reduced",
    solver: str | None = None,
    products: bool = True,
    pulls: tuple[float, ...] = (0.0,),
    point: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> BatchBound:
    """Bound f from above by a level-1 moment relaxation of the weights tau e_j, proved through its dual."""
    if order not in (2, 3):
        raise ArgumentError(f"order: expected 2 or 3, got {order!r}")
    if blocks not in ("reduced", "full"):
        raise ArgumentError(f"blocks: expected 'reduced' or 'full', got {blocks!r}")
    name = resolve(solver)
    x, y = ascend(reduced)[:2] if point is None else point
    orders = (2, 3) if order == 3 else (2,)
    best = _Least()
    for pull in pulls:
        c = centre(reduced, x, y, pull)
        for one in orders:
            best.offer(_once(c, one, blocks, name, products), pull)
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

    def offer(self, bound: BatchBound, pull: float) -> None:
        witness = {**bound.witness, "pull": torch.full_like(bound.upper, pull)}
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
        return BatchBound(
            best.upper + reduced.rounding, best.inflation + reduced.rounding, witness, point, reason
        )

"""Moment relaxations with exponential cones, second and third order, as proved upper bounds."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from ..errors import ArgumentError
from ..reduced import Reduced
from ..search import ascend
from ..solvers import resolve, solve
from ._centred import Centred, centre
from ._cones import build, multipliers
from ._recovery import recover
from .result import BatchBound


def moment(
    reduced: Reduced,
    order: Literal[2, 3] = 2,
    blocks: Literal["reduced", "full"] = "reduced",
    solver: str | None = None,
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
    best: BatchBound | None = None
    for pull in pulls:
        found = _once(centre(reduced, x, y, pull), reduced, order, blocks, name)
        best = found if best is None else _least(best, found)
    return BatchBound(best.upper, best.inflation, best.witness, (x, y), best.reason)


def _once(c: Centred, reduced: Reduced, order: int, blocks: str, solver: str) -> BatchBound:
    parts, values, status = [], [], []
    for index in range(c.size):
        one = {
            name: value[index].numpy() for name, value in vars(c).items() if isinstance(value, torch.Tensor)
        }
        built = build(one, c.box, c.own, order, blocks == "full")
        solution = solve(built.conic, solver)
        parts.append(multipliers(built, solution, one, c.box, blocks == "full"))
        values.append(built.nominal - built.scale * solution.value)
        status.append(solution.status)
    given = {name: torch.as_tensor(np.stack([part[name] for part in parts])) for name in parts[0]}
    upper, margin, kept = recover(c, given)
    witness = {**kept, "solver_value": torch.tensor(values, dtype=torch.float64), "status": status}
    return BatchBound(upper + reduced.rounding, margin + reduced.rounding, witness)


def _least(one: BatchBound, two: BatchBound) -> BatchBound:
    raise NotImplementedError

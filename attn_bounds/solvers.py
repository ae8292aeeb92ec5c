"""Conic solvers by name: one standard form in, a primal and a dual point out. What they say is never taken as a proof.

    minimise  q . x   subject to   A x + s = b,   s in K1 x K2 x ...        dual:  z in K1* x K2* x ...,  A^T z + q = 0

Cones, in the order their rows come: "zero", "nonneg", "soc" (first entry the largest), "exp" ((x, y, z) with
y e^(x/y) <= z) and "psd" (upper triangle by columns, off-diagonal entries times sqrt 2; the dimension given is the
matrix's).

The batched solver Moreau 0.4.1 was tried on the moment programmes: on one core as fast as Clarabel (which it
resembles), equally accurate, and it called one feasible programme in 72 infeasible; it is not among the solvers.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp

from .errors import ArgumentError, MissingDependencyError

log = logging.getLogger("attn_bounds.solvers")

Cone = tuple[Literal["zero", "nonneg", "soc", "exp", "psd"], int]
NAMES = ("clarabel", "mosek", "scs")


@dataclass(frozen=True)
class Conic:
    """A conic programme in the standard form above."""

    q: np.ndarray
    A: sp.csc_matrix
    b: np.ndarray
    cones: tuple[Cone, ...]


@dataclass(frozen=True)
class Solution:
    """What a solver left: the points may be inaccurate, or NaN; `status` is the solver's own word."""

    x: np.ndarray
    z: np.ndarray
    value: float
    status: str
    solver: str
    seconds: float


def rows_of(cone: Cone) -> int:
    """Number of rows of a cone."""
    kind, dim = cone
    return dim * (dim + 1) // 2 if kind == "psd" else dim


def resolve(solver: str | None = None) -> str:
    """Name of the solver that will run: the one asked for, else MOSEK where its licence checks out, else Clarabel.

    Says once in the log which one it is. Raises: ArgumentError for an unknown name.
    """
    if solver is not None and (not isinstance(solver, str) or solver.lower() not in NAMES):
        raise ArgumentError(f"solver: expected one of {', '.join(NAMES)} or None, got {solver!r}")
    wanted = "mosek" if solver is None else solver.lower()
    name, why = _choice(wanted, os.environ.get("MOSEKLM_LICENSE_FILE"))
    _announce(name, why)
    return name


@functools.lru_cache(maxsize=16)
def _choice(wanted: str, licence: str | None) -> tuple[str, str]:
    """(solver, why); `licence` is part of the key so that a changed licence variable is looked at anew."""
    if wanted != "mosek":
        return wanted, "asked for"
    failure = _mosek_failure()
    return ("mosek", "its licence checks out") if failure is None else ("clarabel", f"MOSEK is out: {failure}")


@functools.lru_cache(maxsize=16)
def _announce(name: str, why: str) -> None:
    log.info("conic solver: %s (%s)", name, why)


def _mosek_failure() -> str | None:
    """Why MOSEK cannot be used, in a few words; None where it can."""
    try:
        import mosek
    except ImportError:
        return "not installed"
    try:
        with mosek.Env() as env:
            env.checkoutlicense(mosek.feature.pton)
    except mosek.Error as error:
        return str(error.errno).removeprefix("rescode.") if getattr(error, "errno", None) else type(error).__name__
    return None


def solve(conic: Conic, solver: str | None = None, tolerance: float = 1e-9, max_iter: int = 200) -> Solution:
    """Solve one programme; a failure inside the solver comes back as a status with NaN points, not as an exception."""
    name = solver if solver in ("clarabel", "scs") else resolve(solver)
    start = time.perf_counter()
    if name == "clarabel":
        x, z, value, status = _clarabel(conic, tolerance, max_iter)
    elif name == "scs":
        x, z, value, status = _scs(conic, tolerance)
    else:
        x, z, value, status = through_cvxpy(conic, "MOSEK")
    return Solution(x, z, value, status, name, time.perf_counter() - start)


def _clarabel(conic: Conic, tolerance: float, max_iter: int) -> tuple[np.ndarray, np.ndarray, float, str]:
    import clarabel

    make = {
        "zero": clarabel.ZeroConeT,
        "nonneg": clarabel.NonnegativeConeT,
        "soc": clarabel.SecondOrderConeT,
        "psd": clarabel.PSDTriangleConeT,
    }
    cones = [clarabel.ExponentialConeT() if kind == "exp" else make[kind](dim) for kind, dim in conic.cones]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_iter = max_iter
    if hasattr(settings, "max_threads"):  # younger versions thread by themselves
        settings.max_threads = 1
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = tolerance
    settings.chordal_decomposition_enable = False
    size = conic.q.size
    solution = clarabel.DefaultSolver(sp.csc_matrix((size, size)), conic.q, conic.A, conic.b, cones, settings).solve()
    return np.array(solution.x), np.array(solution.z), float(solution.obj_val), str(solution.status)


def _scs(conic: Conic, tolerance: float) -> tuple[np.ndarray, np.ndarray, float, str]:
    try:
        import scs
    except ImportError:
        raise MissingDependencyError("solver='scs' needs the package scs: pip install scs") from None
    order, cone = _scs_layout(conic.cones)
    data = {"A": conic.A[order].tocsc(), "b": conic.b[order], "c": conic.q}
    eps = max(tolerance, 1e-8)
    solution = scs.SCS(data, cone, verbose=False, eps_abs=eps, eps_rel=eps, max_iters=20_000).solve()
    z = np.empty_like(solution["y"])
    z[order] = solution["y"]
    return solution["x"], z, float(solution["info"]["pobj"]), str(solution["info"]["status"])


def _scs_layout(cones: tuple[Cone, ...]) -> tuple[np.ndarray, dict[str, Any]]:
    """Row order and cone description of SCS: zero, nonneg, soc, psd (lower triangle by columns), exp."""
    groups: dict[str, list[np.ndarray]] = {"zero": [], "nonneg": [], "soc": [], "psd": [], "exp": []}
    start = 0
    for kind, dim in cones:
        rows = np.arange(start, start + rows_of((kind, dim)))
        start += rows.size
        if kind == "psd":
            place = np.empty((dim, dim), dtype=int)
            upper = [(i, j) for j in range(dim) for i in range(j + 1)]
            for row, (i, j) in zip(rows, upper, strict=True):
                place[i, j] = place[j, i] = row
            rows = np.array([place[i, j] for j in range(dim) for i in range(j, dim)])
        groups[kind].append(rows)
    cone = {
        "z": sum(r.size for r in groups["zero"]),
        "l": sum(r.size for r in groups["nonneg"]),
        "q": [r.size for r in groups["soc"]],
        "s": [dim for kind, dim in cones if kind == "psd"],
        "ep": len(groups["exp"]),
    }
    return np.concatenate([r for kind in ("zero", "nonneg", "soc", "psd", "exp") for r in groups[kind]]), cone


def through_cvxpy(conic: Conic, solver: str) -> tuple[np.ndarray, np.ndarray, float, str]:
    """Solve through cvxpy by a solver's cvxpy name (the way to MOSEK); dual signs and orders as in the standard
    form."""
    import cvxpy as cp

    x = cp.Variable(conic.q.size)
    constraints, readers, start = [], [], 0
    for kind, dim in conic.cones:
        rows = slice(start, start + rows_of((kind, dim)))
        start = rows.stop
        s = conic.b[rows] - conic.A[rows] @ x
        constraint, reader = _cvxpy_cone(cp, kind, dim, s)
        constraints.append(constraint)
        readers.append(reader)
    problem = cp.Problem(cp.Minimize(conic.q @ x), constraints)
    nothing = np.full(conic.q.size, math.nan), np.full(conic.b.size, math.nan), math.nan
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "solution may be inaccurate": the status says so
            problem.solve(solver=solver)
    except (cp.SolverError, ArithmeticError, ValueError) as error:
        return *nothing, f"{type(error).__name__}: {error}"
    if x.value is None or any(c.dual_value is None for c in constraints):
        return *nothing, str(problem.status)
    z = np.concatenate([read(c.dual_value) for read, c in zip(readers, constraints, strict=True)])
    return x.value, z, float(problem.value), str(problem.status)


def _cvxpy_cone(cp: Any, kind: str, dim: int, s: Any) -> tuple[Any, Any]:
    """The constraint s in cone, and how to read its dual in our order."""
    if kind == "zero":
        return s == 0, lambda dual: -np.atleast_1d(dual)
    if kind == "nonneg":
        return s >= 0, np.atleast_1d
    if kind == "soc":
        return cp.SOC(s[0], s[1:]), lambda dual: np.concatenate([np.ravel(part) for part in dual])
    if kind == "exp":
        return cp.ExpCone(s[0], s[1], s[2]), lambda dual: np.array([float(np.ravel(part)[0]) for part in dual])
    upper = [(i, j) for j in range(dim) for i in range(j + 1)]
    pick = np.zeros((dim * dim, len(upper)))
    for row, (i, j) in enumerate(upper):
        pick[i * dim + j, row] = pick[j * dim + i, row] = 1.0 if i == j else math.sqrt(0.5)
    matrix = cp.reshape(pick @ s, (dim, dim), order="C")
    return matrix >> 0, lambda dual: np.array([dual[i, j] * (1.0 if i == j else math.sqrt(2)) for i, j in upper])

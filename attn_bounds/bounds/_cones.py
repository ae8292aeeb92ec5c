"""Conic data of the moment relaxation of one centred problem, and its dual read back as certificate multipliers.

Unknowns are pseudo-moments L[.] = tau E[.] of (d_q, d_j, x_j), x_j = e_j - 1 (scaled by its range): tau, L[d_q], the mass
M_q = L|d_q|^2, and per key L[x], L[d], M = L|d|^2 and the entries of one positive semidefinite block over (1, query
head, key head, x). `reduced` blocks hold the span of {w_j*, alpha_j, u_j} and of {w_q*, beta_j}; what the bilinear score
has outside them is a free number bounded by the tail masses (rotated second-order cones). `full` blocks hold all
coordinates and share the query's second moments. Soundness does not rest on this module: see `_recovery`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..solvers import Conic, Solution

SQRT2 = math.sqrt(2.0)


@dataclass
class Built:
    """The programme, and where the dual of each constraint sits."""

    conic: Conic
    scale: float  # of the objective
    where: dict[tuple[str, int], slice]
    heads: list[dict[str, Any]]
    nominal: float


@dataclass
class _Rows:
    """Rows of s = b - A x, cone after cone; a row is a constant and a list of (column, coefficient)."""

    cols: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    vals: list[float] = field(default_factory=list)
    const: list[float] = field(default_factory=list)
    cones: list[tuple[str, int]] = field(default_factory=list)
    where: dict[tuple[str, int], slice] = field(default_factory=dict)
    unknowns: int = 0

    def new(self, count: int) -> np.ndarray:
        self.unknowns += count
        return np.arange(self.unknowns - count, self.unknowns)

    def add(self, name: str, key: int, kind: str, rows: list[dict[int, float]], dim: int | None = None) -> None:
        start = len(self.const)
        for row in rows:
            index = len(self.const)
            self.const.append(0.0)
            for column, value in row.items():
                self.cols.append(column)
                self.vals.append(-value)
                self.rows.append(index)
        self.where[name, key] = slice(start, len(self.const))
        self.cones.append((kind, len(rows) if dim is None else dim))


def _sum(*terms: tuple[dict[int, float], float]) -> dict[int, float]:
    """Linear combination of rows."""
    total: dict[int, float] = {}
    for row, factor in terms:
        if factor != 0.0:
            for column, value in row.items():
                total[column] = total.get(column, 0.0) + factor * value
    return total


def _dot(coefficients: np.ndarray, rows: list[dict[int, float]]) -> dict[int, float]:
    return _sum(*((row, float(c)) for c, row in zip(coefficients, rows, strict=True)))


def orthonormal(vectors: list[np.ndarray], size: int, tolerance: float = 1e-7) -> np.ndarray:
    """Orthonormal basis (size, r) of the span of the vectors, those that add less than `tolerance` left out."""
    kept: list[np.ndarray] = []
    for vector in vectors:
        norm = np.linalg.norm(vector)
        if norm == 0 or len(kept) == size:
            continue
        rest = vector / norm
        for _ in range(2):
            for q in kept:
                rest = rest - q * (q @ rest)
        left = np.linalg.norm(rest)
        if left > tolerance:
            kept.append(rest / left)
    return np.stack(kept, 1) if kept else np.zeros((size, 0))


def build(c: dict[str, np.ndarray], box: bool, own: bool, order: int, full: bool) -> Built:
    """Assemble the programme of one problem; `c` holds the fields of `Centred` without their leading dimension."""
    n, K, k = c["p"].size, c["wk"].shape[0], c["wq"].size
    scale = float(c["movement"])
    r = _Rows()
    tau = {int(r.new(1)[0]): 1.0}

    root_q = np.ones(k) if full else np.sqrt(c["weight_q"])
    wq, fq = c["wq"] * root_q, c["fq"] / root_q
    beta = c["beta"] / root_q
    own_u = c["own_u"] / root_q / scale
    heads_q = [np.eye(k) if full else orthonormal([wq, beta[j], *([own_u] if own and j == n - 1 else [])], k)
               for j in range(n)]
    common_q = np.eye(k) if full else orthonormal([wq, *beta, own_u], k)
    first_q = [{int(i): 1.0} for i in r.new(common_q.shape[1])]  # L[d_q] in the common basis
    shared_qq = r.new(k * (k + 1) // 2) if full else None
    mass_q = {int(r.new(1)[0]): 1.0} if k else {}

    objective: dict[int, float] = {}
    norm_row = dict(tau)
    heads: list[dict[str, Any]] = []
    blocks: list[tuple[int, int, list[dict[int, float]]]] = []
    for j in range(n):
        low, high = float(c["low"][j]), float(c["high"][j])
        moving = j < K
        root = (np.ones(c["wk"].shape[1]) if full else np.sqrt(c["weight_k"][j])) if moving else np.ones(0)
        w = c["wk"][j] * root if moving else np.zeros(0)
        alpha = c["alpha"][j] / root if moving else np.zeros(0)
        u = c["u"][j] / root / scale if moving else np.zeros(0)
        size = w.size
        basis = np.eye(size) if full else orthonormal([w, alpha, u], size)
        bq = heads_q[j]
        kq, mk = bq.shape[1], basis.shape[1]
        s_x = max(math.expm1(min(high, 300.0)), -math.expm1(low), 1e-12)
        v = (float(c["v"][j]) - float(c["f"])) / scale
        p = float(c["p"][j])
        heads.append({"s_x": s_x, "lift_q": bq * root_q[:, None], "lift_k": basis * root[:, None]})

        # Unknowns of the block over (1, query head, key head, x).
        x1 = {int(r.new(1)[0]): 1.0}
        d1 = [{int(i): 1.0} for i in r.new(mk)]
        q1 = [_dot(row, first_q) for row in bq.T @ common_q]
        qq_id = shared_qq if full else r.new(kq * (kq + 1) // 2)
        dim = 1 + kq + mk + 1
        entry: dict[tuple[int, int], dict[int, float]] = {(0, 0): tau}
        for i in range(kq):
            entry[0, 1 + i] = q1[i]
            for l in range(i + 1):
                entry[1 + l, 1 + i] = {int(qq_id[i * (i + 1) // 2 + l]): 1.0}
        for i in range(mk):
            entry[0, 1 + kq + i] = d1[i]
            for l in range(kq + i + 1):
                entry[1 + l, 1 + kq + i] = {int(r.new(1)[0]): 1.0}
        entry[0, dim - 1] = x1
        for l in range(1, dim):
            entry[l, dim - 1] = {int(r.new(1)[0]): 1.0}
        xx = entry[dim - 1, dim - 1]
        xq = [entry[1 + i, dim - 1] for i in range(kq)]
        xd = [entry[1 + kq + i, dim - 1] for i in range(mk)]
        rows = [
            {col: val * (1.0 if a == b else SQRT2) for col, val in entry[a, b].items()}
            for b in range(dim) for a in range(b + 1)
        ]
        blocks.append((j, dim, rows))

        # Value and normalisation.
        pi = _sum((tau, 1.0), (x1, s_x))  # L[e]
        head_u = basis.T @ u
        value = [(x1, p * s_x * v), (_dot(head_u, d1), p), (_dot(head_u, xd), p * s_x)]
        if not moving:
            head_o = bq.T @ own_u
            value += [(_dot(head_o, q1), p), (_dot(head_o, xq), p * s_x)]
        objective = _sum((objective, 1.0), *value)
        norm_row = _sum((norm_row, 1.0), (x1, p * s_x))

        # Region of the key.
        mass = mass_q
        tail_k: dict[int, float] = {}
        if moving:
            weight = c["weight_k"][j] if full else np.ones(size)
            diag = [entry[1 + kq + i, 1 + kq + i] for i in range(mk)]
            mass = _dot(weight, diag) if full else {int(r.new(1)[0]): 1.0}
            if full and box:
                region = [_sum((tau, 1 - w[i] ** 2), (d1[i], -2 * w[i]), (diag[i], -1.0)) for i in range(size)]
            elif full:
                region = [_sum((tau, 1 - w @ w), (_dot(w, d1), -2.0), (_dot(np.ones(mk), diag), -1.0))]
            else:
                region = [_sum((tau, 1 - w @ w), (_dot(basis.T @ w, d1), -2.0), (mass, -1.0))]
                tail_k = _sum((mass, 1.0), (_dot(np.ones(mk), diag), -1.0))
                r.add("tail_k", j, "nonneg", [tail_k])
            r.add("ball_k", j, "nonneg", region)
            moment = [_sum((pi, float(wi)), (d, 1.0), (xdi, s_x))
                      for wi, d, xdi in zip(basis.T @ w, d1, xd, strict=True)]
            _add_norm(r, "norm_k", j, pi, moment, full and box)
        tail_q: dict[int, float] = {}
        if k:
            diag_q = [entry[1 + i, 1 + i] for i in range(kq)]
            if not full:
                tail_q = _sum((mass_q, 1.0), (_dot(np.ones(kq), diag_q), -1.0))
                r.add("tail_q", j, "nonneg", [tail_q])
            moment = [_sum((pi, float(wi)), (d, 1.0), (xdi, s_x)) for wi, d, xdi in zip(bq.T @ wq, q1, xq, strict=True)]
            _add_norm(r, "norm_q", j, pi, moment, full and box)

        # The score: linear parts in the heads, the bilinear part's head exactly, its tail by rotated cones.
        head_a, head_b = basis.T @ alpha, bq.T @ beta[j]
        bilinear: dict[int, float] = {}
        bend = float(c["bend"][j])
        if k:
            fk = (c["fk"][j] / root) if moving else c["fo"] / root_q
            other = basis if moving else bq
            core = (fq @ bq).T @ (fk @ other)
            if moving:
                bilinear = _sum(*((entry[1 + a, 1 + kq + b], float(core[a, b])) for a in range(kq) for b in range(mk)))
            else:
                bilinear = _sum(*((entry[1 + min(a, b), 1 + max(a, b)], float(core[a, b]))
                                  for a in range(kq) for b in range(kq)))
            if not full and bend > 0:
                head_mass = _dot(np.ones(kq), diag_q)
                if moving:
                    cross = (fq @ bq).T @ fk
                    cross = cross - (cross @ basis) @ basis.T
                    pieces = [(bend, tail_q, mass), (float(np.linalg.norm(cross, 2)), head_mass, tail_k)]
                else:
                    whole = (fq.T @ fk + fk.T @ fq) @ bq
                    whole = whole - bq @ (bq.T @ whole)
                    pieces = [(bend, tail_q, tail_q), (float(np.linalg.norm(whole, 2)), head_mass, tail_q)]
                for number, (nu, one, two) in enumerate(pieces):
                    if nu > 1e-14 * bend:
                        rest = {int(r.new(1)[0]): 1.0}
                        _add_product(r, f"rest{number}", j, rest, one, two)
                        bilinear = _sum((bilinear, 1.0), (rest, nu))
        score = _sum((_dot(head_a, d1), 1.0), (_dot(head_b, q1), 1.0), (bilinear, 1.0))
        slope, start = chord(low, high)
        r.add("secant", j, "nonneg", [_sum((tau, (start - slope * low) / s_x), (score, slope / s_x), (x1, -1.0))])
        xl, xu = math.expm1(low), math.expm1(min(high, 300.0))
        r.add("square", j, "nonneg", [
            _sum((xx, -1.0), (x1, (xl + xu) / s_x), (tau, -(xl / s_x) * (xu / s_x)))
        ])
        r.add("exp", j, "exp", [score, tau, pi])
        if order == 3:
            half, mid = (xu - xl) / 2, 1 + (xu + xl) / 2
            weighted = _sum(
                (_dot(head_a, d1), 1.0), (_dot(head_a, xd), s_x),
                (_dot(head_b, q1), 1.0), (_dot(head_b, xq), s_x), (bilinear, mid),
            )
            if k and bend > 0:
                if moving:
                    rest = {int(r.new(1)[0]): 1.0}
                    _add_product(r, "cubic", j, rest, mass_q, mass)
                    weighted = _sum((weighted, 1.0), (rest, half * bend))
                else:
                    weighted = _sum((weighted, 1.0), (mass_q, half * bend))
            r.add("entropy", j, "exp", [_sum((weighted, -1.0)), pi, tau])

    if k:
        if full:
            diagonal = [{int(shared_qq[i * (i + 1) // 2 + i]): 1.0} for i in range(k)]
            if box:
                region = [_sum((tau, 1 - wq[i] ** 2), (first_q[i], -2 * wq[i]), (diagonal[i], -1.0)) for i in range(k)]
            else:
                region = [_sum((tau, 1 - wq @ wq), (_dot(wq, first_q), -2.0), (_dot(np.ones(k), diagonal), -1.0))]
            r.add("mass_q", n, "zero", [_sum((mass_q, 1.0), (_dot(c["weight_q"], diagonal), -1.0))])
        else:
            region = [_sum((tau, 1 - wq @ wq), (_dot(common_q.T @ wq, first_q), -2.0), (mass_q, -1.0))]
            _add_norm(r, "first_q", n, _sum((mass_q, 1.0), (tau, 1.0)),
                      [_sum((mass_q, 1.0), (tau, -1.0)), *(_sum((row, 2.0)) for row in first_q)], False)
        r.add("ball_q", n, "nonneg", region)
    for j, dim, rows in blocks:
        r.add("block", j, "psd", rows, dim)
    r.add("total", n, "zero", [norm_row])
    r.const[r.where["total", n].start] = -1.0

    q = np.zeros(r.unknowns)
    for column, coefficient in objective.items():
        q[column] = -coefficient
    A = sp.csc_matrix((r.vals, (r.rows, r.cols)), shape=(len(r.const), r.unknowns))
    return Built(Conic(q, A, np.array(r.const), tuple(r.cones)), scale, r.where, heads, float(c["f"]))  # type: ignore[arg-type]


def chord(low: float, high: float) -> tuple[float, float]:
    """Slope of exp's chord over [low, high], and its value at `low` minus 1."""
    high = min(high, 300.0)
    width = high - low
    slope = math.exp(low) * (math.expm1(width) / width if width > 1e-8 else 1 + width / 2)
    return slope, math.expm1(low)


def _add_norm(r: _Rows, name: str, j: int, top: dict, rows: list[dict], box: bool) -> None:
    if not rows:
        return
    if box:
        r.add(name, j, "nonneg", [_sum((top, 1.0), (row, sign)) for row in rows for sign in (1.0, -1.0)])
    else:
        r.add(name, j, "soc", [top, *rows])


def _add_product(r: _Rows, name: str, j: int, rest: dict, one: dict, two: dict) -> None:
    """rest^2 <= one * two."""
    r.add(name, j, "soc", [_sum((one, 1.0), (two, 1.0)), _sum((one, 1.0), (two, -1.0)), _sum((rest, 2.0))])


def multipliers(built: Built, solution: Solution, c: dict[str, np.ndarray], box: bool, full: bool) -> dict[str, np.ndarray]:
    """Read the dual as multipliers of the certificate (see `_recovery`), in the units of the problem."""
    n, K, m, k = c["p"].size, *c["wk"].shape, c["wq"].size
    z, scale, where = solution.z, built.scale, built.where
    out = {
        "t": np.array(built.nominal - scale * z[where["total", n]][0]),
        "ball_k": np.zeros((K, m)),
        "ball_q": np.zeros(k),
        "norm_k": np.zeros((K, m)),
        "norm_q": np.zeros((n, k)),
        "ratio": np.ones(n),
        **{name: np.zeros(n) for name in ("exp", "exp_at", "secant", "square", "entropy", "entropy_at")},
    }
    weights = 1.0 if full else c["weight_k"]
    weight_q = 1.0 if full else c["weight_q"]
    if k:
        out["ball_q"] = scale * z[where["ball_q", n]] * weight_q
    for j in range(n):
        head = built.heads[j]
        out["secant"][j] = scale * z[where["secant", j]][0] / head["s_x"]
        out["square"][j] = scale * z[where["square", j]][0] / head["s_x"] ** 2
        score, _, top = z[where["exp", j]]
        out["exp"][j], out["exp_at"][j] = scale * top, _log_ratio(-score, top)
        if j < K:
            out["ball_k"][j] = scale * z[where["ball_k", j]] * (weights if full else weights[j])
            out["norm_k"][j] = scale * (head["lift_k"] @ _norm_dual(z, where.get(("norm_k", j)), full and box))
        if k and ("norm_q", j) in where:
            out["norm_q"][j] = scale * (head["lift_q"] @ _norm_dual(z, where["norm_q", j], full and box))
        if ("entropy", j) in where:
            weighted, _, at = z[where["entropy", j]]
            out["entropy"][j], out["entropy_at"][j] = -scale * weighted, _log_ratio(at, -weighted)
        if ("cubic", j) in where:
            plus, minus, _ = z[where["cubic", j]]
            out["ratio"][j] = math.sqrt(max(plus + minus, 1e-300) / max(plus - minus, 1e-300))
    return out


def _norm_dual(z: np.ndarray, rows: slice | None, box: bool) -> np.ndarray:
    """The vector g of the term rho e - g . (e w)."""
    if rows is None:
        return np.zeros(0)
    part = z[rows]
    return part[1::2] - part[0::2] if box else -part[1:]


def _log_ratio(above: float, below: float) -> float:
    return math.log(above / below) if above > 0 and below > 0 and math.isfinite(above / below) else 0.0

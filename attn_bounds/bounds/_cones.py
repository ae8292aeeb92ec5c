"""Conic data of the moment relaxation of one centred problem, and its dual read back as certificate multipliers.

Unknowns are pseudo-moments L[.] = tau E[.] of the query's d_q, the keys' d_j and x_j = (e_j - 1) / width_j: tau,
L[d_q], the mass L|d_q|^2, and per key L[x], L[d], the mass L|d|^2 and one positive semidefinite block over (1, query
head, key head, x). Reduced blocks hold the spans of {w_j*, alpha_j, u_j} and of {w_q*, beta_j}; what the bilinear
score has outside them is a free number bounded by the tail masses (rotated second-order cones). Full blocks hold all
coordinates and share the query's second moments. Whether a bound is sound does not rest on this module, only how
tight it is: see `_recovery`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..solvers import Conic, Solution

SQRT2 = math.sqrt(2.0)
NARROW = 0.3  # below this width exp and entropy cones lose their curvature to rounding: quadratic cones stand in
STILL = 1e-13  # a score whose range is narrower counts as still
Row = dict[int, float]  # an affine expression of the unknowns: column -> coefficient


@dataclass
class _Rows:
    """Rows of s = b - A x, cone after cone, and where each named constraint sits."""

    cols: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    vals: list[float] = field(default_factory=list)
    count: int = 0
    unknowns: int = 0
    cones: list[tuple[str, int]] = field(default_factory=list)
    where: dict[tuple[str, int], slice] = field(default_factory=dict)

    def new(self) -> Row:
        self.unknowns += 1
        return {self.unknowns - 1: 1.0}

    def add(self, name: str, key: int, kind: str, rows: list[Row], dim: int | None = None) -> None:
        start = self.count
        for row in rows:
            self.cols.extend(row.keys())
            self.vals.extend(-value for value in row.values())
            self.rows.extend([self.count] * len(row))
            self.count += 1
        self.where[name, key] = slice(start, self.count)
        self.cones.append((kind, len(rows) if dim is None else dim))

    def add_norm(self, name: str, key: int, top: Row, rows: list[Row], box: bool) -> None:
        """|rows| <= top: Euclidean, or entry by entry for a box."""
        if rows and box:
            self.add(name, key, "nonneg", [total((top, 1.0), (row, sign)) for row in rows for sign in (1.0, -1.0)])
        elif rows:
            self.add(name, key, "soc", [top, *rows])

    def add_product(self, name: str, key: int, rest: Row, one: Row, two: Row) -> None:
        """rest^2 <= one * two."""
        self.add(name, key, "soc", [total((one, 1.0), (two, 1.0)), total((one, 1.0), (two, -1.0)), total((rest, 2.0))])


def total(*terms: tuple[Row, float]) -> Row:
    """Linear combination of rows."""
    out: Row = {}
    for row, factor in terms:
        if factor != 0.0:
            for column, value in row.items():
                out[column] = out.get(column, 0.0) + factor * value
    return out


def dot(coefficients: np.ndarray, rows: list[Row]) -> Row:
    """Inner product of numbers and rows."""
    return total(*zip(rows, coefficients.tolist(), strict=True))


def orthonormal(vectors: list[np.ndarray], size: int, tolerance: float = 1e-7) -> np.ndarray:
    """Orthonormal basis (size, r) of the span of the vectors, those that add less than `tolerance` left out."""
    kept = np.zeros((0, size))
    for vector in vectors:
        norm = np.linalg.norm(vector)
        if norm == 0 or len(kept) == size:
            continue
        rest = vector / norm
        for _ in range(2):
            rest = rest - (kept @ rest) @ kept
        left = np.linalg.norm(rest)
        if left > tolerance:
            kept = np.concatenate([kept, rest[None] / left])
    return kept.T


@dataclass
class _Block:
    """One key's part: its heads, its moments and its scale."""

    j: int
    moving: bool
    still: bool  # the score does not move: x is zero, and no part of the block
    head_q: np.ndarray
    head_k: np.ndarray
    w: np.ndarray
    root: np.ndarray
    low: float
    high: float
    width: float
    q1: list[Row]
    d1: list[Row]
    second: dict[tuple[int, int], Row]  # over query head, key head and x, in this order
    x1: Row = field(default_factory=dict)
    bulge: Row = field(default_factory=dict)  # L[e - 1 - s] / width^2
    bulge_w: list[Row] = field(
        default_factory=list
    )  # L[(e - 1 - linear part of s) d] / width^2, query head then key head
    with_s: list[Row] = field(default_factory=list)  # L[linear part of s times d]
    score: Row = field(default_factory=dict)
    bilinear: Row = field(default_factory=dict)
    cubic: Row = field(default_factory=dict)
    mass: Row = field(default_factory=dict)
    tail: Row = field(default_factory=dict)
    tail_q: Row = field(default_factory=dict)

    @property
    def narrow(self) -> bool:
        return self.width < NARROW

    @property
    def kq(self) -> int:
        return len(self.q1)

    @property
    def size(self) -> int:
        return len(self.q1) + len(self.d1) + (not self.still)

    def qq(self, a: int, b: int) -> Row:
        return self.second[min(a, b), max(a, b)]

    def qd(self, a: int, b: int) -> Row:
        return self.second[a, self.kq + b]

    def dd(self, a: int, b: int) -> Row:
        return self.second[self.kq + min(a, b), self.kq + max(a, b)]

    def xq(self) -> list[Row]:
        return [] if self.still else [self.second[a, self.size - 1] for a in range(self.kq)]

    def xd(self) -> list[Row]:
        return [] if self.still else [self.second[self.kq + b, self.size - 1] for b in range(len(self.d1))]

    def trace_q(self) -> Row:
        return total(*((self.qq(a, a), 1.0) for a in range(self.kq)))

    def trace_k(self) -> Row:
        return total(*((self.dd(b, b), 1.0) for b in range(len(self.d1))))


class Programme:
    """The programme of one problem; `c` holds the fields of `Centred` without their leading dimension."""

    def __init__(self, c: dict[str, np.ndarray], box: bool, own: bool, order: int, full: bool, products: bool) -> None:
        self.c, self.box, self.own, self.order, self.full, self.products = c, box, own, order, full, products
        self.n, self.k = c["p"].size, c["wq"].size
        self.scale, self.nominal = float(c["movement"]), float(c["f"])
        self.r = _Rows()
        self.tau = self.r.new()
        self._query()
        self.blocks = [self._block(j) for j in range(self.n)]
        objective, mean = [], [(self.tau, 1.0)]
        for block in self.blocks:
            objective += self._value(block)
            mean.append((block.x1, float(c["p"][block.j]) * block.width))
            self._key_region(block)
            if not block.still:
                self._weight(block)
        self._query_region()
        for block in self.blocks:
            self._semidefinite(block)
        self.r.add("total", self.n, "zero", [total(*mean)])
        self.conic = self._data(total(*objective))

    def _data(self, objective: Row) -> Conic:
        r = self.r
        q, b = np.zeros(r.unknowns), np.zeros(r.count)
        for column, coefficient in objective.items():
            q[column] = -coefficient
        b[r.where["total", self.n]] = -1.0
        A = sp.csc_matrix((r.vals, (r.rows, r.cols)), shape=(r.count, r.unknowns))
        return Conic(q, A, b, tuple(r.cones))  # type: ignore[arg-type]

    def _query(self) -> None:
        c, k, r = self.c, self.k, self.r
        self.root_q = np.ones(k) if self.full else np.sqrt(c["weight_q"])
        self.wq, self.fq = c["wq"] * self.root_q, c["fq"] / self.root_q
        self.beta, self.own_u = c["beta"] / self.root_q, c["own_u"] / self.root_q / self.scale
        self.common = np.eye(k) if self.full else orthonormal([self.wq, *self.beta, self.own_u], k)
        self.first = [r.new() for _ in range(self.common.shape[1])]
        self.shared = {(a, b): r.new() for b in range(k) for a in range(b + 1)} if self.full else {}
        self.mass_q: Row = r.new() if k else {}

    def _block(self, j: int) -> _Block:
        c, r, full = self.c, self.r, self.full
        moving = j < c["wk"].shape[0]
        weight = c["weight_k"][j] if moving else np.ones(0)
        root = np.ones_like(weight) if full else np.sqrt(weight)
        w = c["wk"][j] * root if moving else np.zeros(0)
        alpha, u = (c["alpha"][j] / root, c["u"][j] / root) if moving else (w, w)
        head_k = np.eye(w.size) if full else orthonormal([w, alpha, u], w.size)
        seen = [self.wq, self.beta[j]] + ([] if moving else [self.own_u])
        head_q = np.eye(self.k) if full else orthonormal(seen, self.k)
        kq, mk = head_q.shape[1], head_k.shape[1]
        low, high = float(c["low"][j]), float(c["high"][j])
        still = high - low < STILL
        second = {}
        for b in range(kq + mk):
            for a in range(b + 1):
                second[a, b] = self.shared[a, b] if full and b < kq else r.new()
        block = _Block(
            j, moving, still, head_q, head_k, w, root, low, high, max(math.expm1(high), -math.expm1(low)),
            [dot(row, self.first) for row in head_q.T @ self.common], [r.new() for _ in range(mk)], second,
        )  # fmt: skip
        self._masses(block)
        if still:
            return block
        block.score = self._score(block)
        self._exponent(block)
        self._exponential(block)
        return block

    def _exponent(self, block: _Block) -> None:
        """L[x], L[x d], L[x d_q] and L[x^2]; narrow keys have L[x - s] as the unknown, times width^2, for accuracy."""
        r, width, last = self.r, block.width, block.size - 1
        a_head = block.head_k.T @ (self.c["alpha"][block.j] / block.root) if block.moving else np.zeros(0)
        b_head = block.head_q.T @ self.beta[block.j]
        mk, kq = len(a_head), block.kq
        sides = [([block.qd(b, a) for a in range(mk)], [block.qq(a, b) for a in range(kq)]) for b in range(kq)]
        sides += [([block.dd(a, b) for a in range(mk)], [block.qd(a, b) for a in range(kq)]) for b in range(mk)]
        block.with_s = [total((dot(a_head, keys), 1.0), (dot(b_head, query), 1.0)) for keys, query in sides]
        if block.narrow:
            block.bulge = r.new()
            block.x1 = total((block.score, 1 / width), (block.bulge, width))
            block.bulge_w = [r.new() for _ in range(last)]
            for b in range(last):
                block.second[b, last] = total((block.with_s[b], 1 / width), (block.bulge_w[b], width))
        else:
            block.x1 = r.new()
            block.bulge = total((block.x1, 1 / width), (block.score, -1 / width**2))
            for b in range(last):
                block.second[b, last] = r.new()
                block.bulge_w.append(total((block.second[b, last], 1 / width), (block.with_s[b], -1 / width**2)))
        block.second[last, last] = r.new()

    def _masses(self, block: _Block) -> None:
        r = self.r
        if block.moving and self.full:
            weights = self.c["weight_k"][block.j]
            block.mass = dot(weights, [block.dd(b, b) for b in range(weights.size)])
        elif block.moving:
            block.mass = r.new()
            block.tail = total((block.mass, 1.0), (block.trace_k(), -1.0))
            r.add("tail_k", block.j, "nonneg", [block.tail])
        if self.k and not self.full:
            block.tail_q = total((self.mass_q, 1.0), (block.trace_q(), -1.0))
            r.add("tail_q", block.j, "nonneg", [block.tail_q])

    def _score(self, block: _Block) -> Row:
        """L[s]: linear parts in the heads, the bilinear part's head exactly, its tail by rotated cones."""
        c, j = self.c, block.j
        linear = [(dot(block.head_q.T @ self.beta[j], block.q1), 1.0)]
        if block.moving:
            linear.append((dot(block.head_k.T @ (c["alpha"][j] / block.root), block.d1), 1.0))
        block.bilinear = self._bilinear(block) if self.k else {}
        return total(*linear, (block.bilinear, 1.0))

    def _bilinear(self, block: _Block) -> Row:
        c, j, kq = self.c, block.j, block.kq
        left = self.fq @ block.head_q
        fk = c["fk"][j] / block.root if block.moving else c["fo"] / self.root_q
        if block.moving:
            core = left.T @ (fk @ block.head_k)
            terms = [(block.qd(a, b), float(core[a, b])) for a in range(kq) for b in range(core.shape[1])]
        else:
            core = left.T @ (fk @ block.head_q)
            terms = [(block.qq(a, b), float(core[a, b])) for a in range(kq) for b in range(kq)]
        bend = float(c["bend"][j])
        if self.full or bend == 0:
            return total(*terms)
        if block.moving:
            cross = left.T @ fk
            cross = cross - (cross @ block.head_k) @ block.head_k.T
            pieces = [(bend, block.tail_q, block.mass), (_size(cross), block.trace_q(), block.tail)]
        else:
            cross = (self.fq.T @ (fk @ block.head_q) + fk.T @ left).T
            cross = cross - (cross @ block.head_q) @ block.head_q.T
            pieces = [(bend, block.tail_q, block.tail_q), (_size(cross), block.trace_q(), block.tail_q)]
        for number, (size, one, two) in enumerate(pieces):
            if size > 1e-14 * bend:
                rest = self.r.new()
                self.r.add_product(f"rest{number}", j, rest, one, two)
                terms.append((rest, size))
        return total(*terms)

    def _exponential(self, block: _Block) -> None:
        """exp between its tangents and its chord, and the square of x below its chord."""
        r, j, width, score = self.r, block.j, block.width, block.score
        low, high = block.low, block.high
        slope, start = bulge_chord(low, high)
        if block.narrow:
            r.add_product("bulge", j, total((score, math.sqrt(phi(low)) / width)), block.bulge, self.tau)
        else:
            r.add("exp", j, "exp", [score, self.tau, total((self.tau, 1.0), (block.x1, width))])
        below = total((self.tau, start / width**2), (score, slope / width**2), (block.bulge, -1.0))
        r.add("secant", j, "nonneg", [below])
        xl, xu = math.expm1(low) / width, math.expm1(high) / width
        square = block.second[block.size - 1, block.size - 1]
        r.add("square", j, "nonneg", [total((square, -1.0), (block.x1, xl + xu), (self.tau, -xl * xu))])

    def _weight(self, block: _Block) -> None:
        """|L[e w]| <= L[e] for key and query, and the coupling through entropy, e s = e log e."""
        r, j, width = self.r, block.j, block.width
        pi = total((self.tau, 1.0), (block.x1, width))
        flat = self.full and self.box
        if block.moving:
            at = block.head_k.T @ block.w
            r.add_norm("norm_k", j, pi, _shifted(at, pi, block.d1, block.xd(), width), flat)
        if self.k:
            at = block.head_q.T @ self.wq
            r.add_norm("norm_q", j, pi, _shifted(at, pi, block.q1, block.xq(), width), flat)
        if self.k and float(self.c["bend"][j]) > 0:
            block.cubic = r.new() if block.moving else self.mass_q
            if block.moving:
                r.add_product("cubic", j, block.cubic, self.mass_q, block.mass)
        if self.products:
            kq = block.kq
            if block.moving:
                self._products(block, "k", block.head_k.T @ block.w, block.d1, slice(kq, None))
            if self.k:
                self._products(block, "q", block.head_q.T @ self.wq, block.q1, slice(0, kq))
        if self.order == 3:
            self._entropy(block, pi)

    def _products(self, block: _Block, side: str, at: np.ndarray, first: list[Row], part: slice) -> None:
        """|L[(e - 1 - s) w]| <= L[e - 1 - s], the same for chord - e: products of two inequalities, in units of
        width^2.

        With a moving query the bilinear part of s times w is of third degree: its middle value and a bounded remainder.
        """
        r, j, scale = self.r, block.j, 1 / block.width**2
        slope, start = bulge_chord(block.low, block.high)
        linear = total((block.score, 1.0), (block.bilinear, -1.0))
        straight = total((block.bulge, 1.0), (block.bilinear, scale))  # L[e - 1 - linear part of s]
        over_w, under_w = [], []
        for w, d, over, along in zip(at.tolist(), first, block.bulge_w[part], block.with_s[part], strict=True):
            over_w.append(total((straight, w), (over, 1.0)))
            chord = [
                (self.tau, w * start * scale),
                (d, start * scale),
                (linear, w * slope * scale),
                (along, slope * scale),
            ]
            under_w.append(total(*chord, (over_w[-1], -1.0)))
        under = total((self.tau, start * scale), (block.score, slope * scale), (block.bulge, -1.0))
        rest, flat = float(self.c["bend"][j]) * scale, self.full and self.box
        r.add_norm(f"over_{side}", j, total((block.bulge, 1.0), (block.cubic, rest)), over_w, flat)
        r.add_norm(f"under_{side}", j, total((under, 1.0), (block.cubic, rest * (1 + slope))), under_w, flat)

    def _entropy(self, block: _Block, pi: Row) -> None:
        """L[e s] >= L[e] log(L[e] / tau); the third moment e d_q N d_j is its middle value plus a bounded remainder."""
        c, r, j, width = self.c, self.r, block.j, block.width
        xl, xu = math.expm1(block.low), math.expm1(block.high)
        linear = [(dot(block.head_q.T @ self.beta[j], block.xq()), 1.0)]
        if block.moving:
            linear.append((dot(block.head_k.T @ (c["alpha"][j] / block.root), block.xd()), 1.0))
        # L[e s] - L[s] in units of the width: L[x s], with e = middle + (e - middle) in the bilinear part.
        excess = [*linear, (block.bilinear, (xu + xl) / 2 / width)]
        spread = (xu - xl) / 2 / width * float(c["bend"][j])
        if spread > 0:
            excess.append((block.cubic, spread))
        if block.narrow:
            over = total(*((row, value / width) for row, value in excess), (block.bulge, -1.0))
            half = math.sqrt(0.5 * math.exp(-block.high))
            r.add_product("flat entropy", j, total((block.x1, half)), over, self.tau)
        else:
            score = total(*((row, value * width) for row, value in excess), (block.score, 1.0))
            r.add("entropy", j, "exp", [total((score, -1.0)), pi, self.tau])

    def _value(self, block: _Block) -> list[tuple[Row, float]]:
        """L[p e (value - f)] without its constant part (which sums to zero), in units of the scale."""
        c, j, width = self.c, block.j, block.width
        p, v = float(c["p"][j]), (float(c["v"][j]) - self.nominal) / self.scale
        if block.moving:
            u = block.head_k.T @ (c["u"][j] / block.root) / self.scale
            first, cross = block.d1, block.xd()
        else:
            u, first, cross = block.head_q.T @ self.own_u, block.q1, block.xq()
        terms = [(dot(u, first), p)]
        return terms if block.still else [*terms, (dot(u, cross), p * width), (block.x1, p * width * v)]

    def _key_region(self, block: _Block) -> None:
        if not block.moving:
            return
        w = block.w
        if self.full and self.box:
            region = [
                total((self.tau, 1 - w[b] ** 2), (block.d1[b], -2 * w[b]), (block.dd(b, b), -1.0))
                for b in range(w.size)
            ]
        else:
            mass = block.trace_k() if self.full else block.mass
            region = [total((self.tau, 1 - float(w @ w)), (dot(block.head_k.T @ w, block.d1), -2.0), (mass, -1.0))]
        self.r.add("ball_k", block.j, "nonneg", region)

    def _query_region(self) -> None:
        if not self.k:
            return
        r, w, k = self.r, self.wq, self.k
        if self.full:
            diagonal = [self.shared[a, a] for a in range(k)]
            r.add("mass_q", self.n, "zero", [total((self.mass_q, 1.0), (dot(self.c["weight_q"], diagonal), -1.0))])
        if self.full and self.box:
            region = [
                total((self.tau, 1 - w[a] ** 2), (self.first[a], -2 * w[a]), (diagonal[a], -1.0)) for a in range(k)
            ]
        else:
            mass = total(*((row, 1.0) for row in diagonal)) if self.full else self.mass_q
            region = [total((self.tau, 1 - float(w @ w)), (dot(self.common.T @ w, self.first), -2.0), (mass, -1.0))]
        if not self.full:  # |L[d_q]|^2 <= tau L|d_q|^2
            sides = total((self.mass_q, 1.0), (self.tau, 1.0)), total((self.mass_q, 1.0), (self.tau, -1.0))
            r.add("first_q", self.n, "soc", [*sides, *(total((row, 2.0)) for row in self.first)])
        r.add("ball_q", self.n, "nonneg", region)

    def _semidefinite(self, block: _Block) -> None:
        first = [self.tau, *block.q1, *block.d1] + ([] if block.still else [block.x1])
        rows = []
        for b in range(len(first)):
            for a in range(b + 1):
                row = first[b] if a == 0 else block.second[a - 1, b - 1]
                rows.append(row if a == b else total((row, SQRT2)))
        self.r.add("block", block.j, "psd", rows, len(first))


def _size(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2)) if matrix.size else 0.0


def _shifted(at: np.ndarray, pi: Row, first: list[Row], cross: list[Row], width: float) -> list[Row]:
    """L[e (w* + d)], entry by entry."""
    return [total((pi, float(w)), (one, 1.0), (two, width)) for w, one, two in zip(at, first, cross, strict=True)]


def phi(s: float) -> float:
    """(e^s - 1 - s) / s^2, increasing; 1/2 at 0."""
    if abs(s) < 1e-2:
        return 1 / 2 + s * (1 / 6 + s * (1 / 24 + s * (1 / 120 + s * (1 / 720 + s / 5040))))
    return (math.expm1(s) - s) / s**2


def bulge_chord(low: float, high: float) -> tuple[float, float]:
    """Slope, and value at 0, of the chord over [low, high] of e^s - 1 - s."""
    left, right = low * low * phi(low), high * high * phi(high)
    slope = (right - left) / (high - low)
    return slope, left - low * slope


def nothing(c: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Multipliers that prove nothing: what stands where there is no dual."""
    n, K, m, k = c["p"].size, *c["wk"].shape, c["wq"].size
    return {
        "t": np.array(math.nan),
        "ball_k": np.zeros((K, m)),
        "ball_q": np.zeros(k),
        "norm_k": np.zeros((K, m)),
        "over_k": np.zeros((K, m)),
        "under_k": np.zeros((K, m)),
        "over_q": np.zeros((n, k)),
        "under_q": np.zeros((n, k)),
        "norm_q": np.zeros((n, k)),
        "ratio": np.ones(n),
        **{name: np.zeros(n) for name in ("exp", "exp_at", "secant", "square", "entropy", "entropy_at")},
    }


def multipliers(programme: Programme, solution: Solution) -> dict[str, np.ndarray]:
    """Read the dual as multipliers of the certificate (see `_recovery`), in the units of the problem."""
    c, full, scale, where = programme.c, programme.full, programme.scale, programme.r.where
    n, flat, z = programme.n, programme.full and programme.box, solution.z
    out = nothing(c)
    out["t"] = np.array(programme.nominal - scale * z[where["total", n]][0])
    if programme.k:
        out["ball_q"] = scale * z[where["ball_q", n]] * (1.0 if full else c["weight_q"])
    for block in programme.blocks:
        j, width = block.j, block.width
        if block.moving:
            out["ball_k"][j] = scale * z[where["ball_k", j]] * (1.0 if full else c["weight_k"][j])
        if block.still:
            continue
        out["secant"][j] = scale * z[where["secant", j]][0] / width**2
        out["square"][j] = scale * z[where["square", j]][0] / width**2
        out["exp"][j], out["exp_at"][j] = _exp_dual(z, block, where, scale)
        if block.moving:
            out["norm_k"][j] = scale * block.root * (block.head_k @ _norm_dual(z, where.get(("norm_k", j)), flat))
        if programme.k and ("norm_q", j) in where:
            out["norm_q"][j] = scale * programme.root_q * (block.head_q @ _norm_dual(z, where["norm_q", j], flat))
        _product_dual(z, block, programme, out)
        if programme.order == 3:
            out["entropy"][j], out["entropy_at"][j] = _entropy_dual(z, block, where, scale)
        if ("cubic", j) in where:
            plus, minus, _ = z[where["cubic", j]]
            out["ratio"][j] = math.sqrt(max(plus + minus, 1e-300) / max(plus - minus, 1e-300))
    return out


def _product_dual(z: np.ndarray, block: _Block, programme: Programme, out: dict[str, np.ndarray]) -> None:
    """Vectors of the products' multipliers; what a multiplier has beyond its vector belongs to the inequality
    itself."""
    j, scale, flat = block.j, programme.scale / block.width**2, programme.full and programme.box
    spare = {"over": 0.0, "under": 0.0}
    sides = {"k": (block.root, block.head_k), "q": (programme.root_q, block.head_q)}
    for name in spare:
        for side, (root, head) in sides.items():
            rows = programme.r.where.get((f"{name}_{side}", j))
            if rows is None:
                continue
            vector = scale * root * (head @ _norm_dual(z, rows, flat))
            out[f"{name}_{side}"][j] = vector
            whole = z[rows].sum() if flat else z[rows][0]
            spare[name] += max(scale * whole - np.linalg.norm(vector, 1 if programme.box else 2), 0.0)
    out["secant"][j] += spare["under"]
    was, at = max(out["exp"][j], 0.0), out["exp_at"][j]
    if spare["over"] > 0:  # one tangent in place of two, with the same slopes and a value at least as large
        out["exp"][j] = was + spare["over"]
        out["exp_at"][j] = math.log1p(was / (was + spare["over"]) * math.expm1(at))


def _exp_dual(z: np.ndarray, block: _Block, where: dict[Any, slice], scale: float) -> tuple[float, float]:
    """Multiplier of exp's tangent, and the point where it touches."""
    if not block.narrow:
        score, _, top = z[where["exp", block.j]]
        return scale * top, _log_ratio(-score, top)
    plus, minus, rest = z[where["bulge", block.j]]
    weight = plus + minus
    tilt = 1 - 2 * rest * math.sqrt(phi(block.low)) * block.width / weight if weight > 0 else 1.0
    return scale * weight / block.width**2, _log_ratio(tilt, 1.0)


def _entropy_dual(z: np.ndarray, block: _Block, where: dict[Any, slice], scale: float) -> tuple[float, float]:
    """Multiplier of the tangent of e log e, and the log of the point where it touches."""
    if not block.narrow:
        weighted, _, at = z[where["entropy", block.j]]
        return -scale * weighted, _log_ratio(at, -weighted)
    # over = L[e s] - L[x] in units of the width squared, against x^2 / (2 e^high).
    plus, minus, rest = z[where["flat entropy", block.j]]
    weight = plus + minus
    at = -2 * rest * math.sqrt(0.5 * math.exp(-block.high)) * block.width / weight if weight > 0 else 0.0
    return scale * weight / block.width**2, at


def _norm_dual(z: np.ndarray, rows: slice | None, flat: bool) -> np.ndarray:
    """The vector g of the term rho e - g . (e w)."""
    if rows is None:
        return np.zeros(0)
    part = z[rows]
    return part[1::2] - part[0::2] if flat else -part[1:]


def _log_ratio(above: float, below: float) -> float:
    return math.log(above / below) if above > 0 and below > 0 and math.isfinite(above / below) else 0.0

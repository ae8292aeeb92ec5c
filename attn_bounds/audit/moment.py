"""Proof of a moment bound from its multipliers, in ball arithmetic and in the tokens' own coordinates.

The certificate P of `bounds._recovery` is set up again from the weights, tokens and region: ranges, norms, weights of
the softmax and all inner products. From the code that found the bound come only numbers that may be anything: the
point to expand around, the multipliers, the common function and the weights of the remainder's norms. A wrong one can
make the proof fail, not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flint import arb, arb_mat

from ..bounds._centred import Centred, centre
from ..bounds.result import whole
from ..problem import HeadProblem
from ..reduced import coordinates, reduce
from ..regions import Balls
from .facts import Facts, dot, exact_matrix, larger, root, size

Vector = list[arb]


def prove(problem: HeadProblem, witness: dict[str, Any], upper: float) -> arb:
    """Upper bound of max f that the witness's multipliers prove; `upper` stands where it is at most that.

    Infinite where a matrix could not be shown to be positive definite.
    """
    facts, witness = Facts(problem), whole(witness)
    if bool(witness["mean"]):
        return _largest_value(facts)
    y = {name: value.unsqueeze(0) for name, value in witness.items() if isinstance(value, torch.Tensor)}
    c = centre(reduce([problem]), y["x"], y["y"], float(witness["pull"]), float(witness["floor"]))
    proof = _Proof(facts, c, y)
    eps, least, most = proof.maximum(), proof.mass(proof.low), proof.mass(proof.high)
    t = arb(float(witness["t"]))
    return t + larger(eps / least, eps / most)


def _largest_value(facts: Facts) -> arb:
    """The largest value of any token: f is a mean of values."""
    best: arb | None = None
    for place, j in enumerate(facts.order):
        value = facts.v0[place] + _support(facts, _times(_spread(facts, j), facts.u))
        best = value if best is None else larger(best, value)
    assert best is not None
    return best


def _spread(facts: Facts, row: int | None) -> Vector:
    """Radius, repeated, or half-widths of a placed point."""
    if row is None:
        return [arb(0)] * facts.problem.head.d
    if isinstance(facts.problem.placed, Balls):
        return [facts.radius[row]] * facts.problem.head.d
    return facts.half[row]


def _support(facts: Facts, g: Vector) -> arb:
    """Largest value of g . w over the unit ball, or box."""
    return size(g) if isinstance(facts.problem.placed, Balls) else sum((abs(x) for x in g), arb(0))


def _times(x: Vector, y: Vector) -> Vector:
    return [a * b for a, b in zip(x, y, strict=True)]


def _add(*terms: tuple[arb, Vector]) -> Vector:
    """Linear combination of vectors."""
    out = [arb(0)] * len(terms[0][1])
    for factor, vector in terms:
        out = [a + factor * b for a, b in zip(out, vector, strict=True)]
    return out


def _scaled(factor: arb, x: Vector) -> Vector:
    return [factor * a for a in x]


def _apply(matrix: arb_mat, x: Vector) -> Vector:
    product = matrix * arb_mat([[a] for a in x])
    return [product[i, 0] for i in range(product.nrows())]


def _by_columns(matrix: arb_mat, spread: Vector) -> arb_mat:
    """matrix diag(spread)."""
    rows, columns = matrix.nrows(), matrix.ncols()
    return arb_mat([[matrix[i, j] * spread[j] for j in range(columns)] for i in range(rows)])


def _outer(x: Vector, y: Vector) -> arb_mat:
    return arb_mat([[a] for a in x]) * arb_mat([y])


@dataclass
class _Key:
    """One key in ball arithmetic; coordinates are the token's, in units of its radius or half-widths."""

    own: bool
    s: arb  # score at the point
    v: arb  # value there
    alpha: Vector
    beta: Vector
    u: Vector  # of the key's displacement, or of the query's where it is the own key
    factor: arb_mat  # (h, d)
    w: Vector
    weight: Vector
    bend: arb
    low: arb
    high: arb


class _Proof:
    def __init__(self, facts: Facts, c: Centred, y: dict[str, torch.Tensor]) -> None:
        self.facts, self.c, self.y = facts, c, y
        problem = facts.problem
        self.ball = isinstance(problem.placed, Balls)
        self.moves = not problem.query_is_fixed
        basis = coordinates(problem)
        self.basis = None if basis is None else exact_matrix(basis)
        d = problem.head.d
        row = problem.query_place if self.moves else None
        self.spread_q = _spread(facts, row)
        self.wq = self._token(c.wq[0]) if self.moves else [arb(0)] * d
        self.at_q = _times(self.spread_q, self.wq)
        self.weight_q = self._weights(c.weight_q[0] if self.moves else None)
        self.common = self._token(c.common[0]) if self.moves else [arb(0)] * d
        self.fq = _by_columns(facts.fq, self.spread_q)
        self.image = _apply(facts.fq, self.at_q)
        self.keys = [self._key(place, j) for place, j in enumerate(facts.order)]
        shift = max((key.s for key in self.keys), key=float).mid()
        weights = [(key.s - shift).exp() for key in self.keys]
        whole = sum(weights, arb(0))
        self.p = [w / whole for w in weights]
        self.low, self.high = [key.low for key in self.keys], [key.high for key in self.keys]

    def mass(self, at: Vector) -> arb:
        """sum_j p_j e^{at_j}."""
        return sum((p * s.exp() for p, s in zip(self.p, at, strict=True)), arb(0))

    def _token(self, x: torch.Tensor) -> Vector:
        """A vector of the reduced problem in the token's coordinates."""
        exact = [arb(value) for value in x.tolist()]
        return exact if self.basis is None else _apply(self.basis, exact)

    def _weights(self, x: torch.Tensor | None) -> Vector:
        """Weights of a box's ellipsoid, with sum at most 1; ones for a ball."""
        if self.ball or x is None:
            return [arb(1)] * self.facts.problem.head.d
        exact = [arb(value) for value in x.tolist()]
        whole = sum(exact, arb(0))
        return [value / whole for value in exact]

    def _key(self, place: int, row: int) -> _Key:
        facts, c = self.facts, self.c
        own = c.own and place == len(facts.order) - 1
        spread = self.spread_q if own else _spread(facts, row)
        w = self.wq if own else self._token(c.wk[0, place])
        at = _times(spread, w)
        image = _apply(facts.fk, at)
        pull = dot(self.image, image)
        b = facts.b[place] if self.moves else [arb(0)] * len(at)
        s, v = facts.s0[place] + dot(b, self.at_q) + pull, facts.v0[place] + dot(facts.u, at)
        turned = _apply(facts.fq.transpose(), image)
        back = _apply(facts.fk.transpose(), self.image)
        if own:
            turned, alpha = _add((arb(1), turned), (arb(1), back)), [arb(0)] * len(at)
        else:
            s += dot(facts.a, at)
            alpha = _times(spread, _add((arb(1), facts.a), (arb(1), back)))
        beta = _add((arb(1), _times(self.spread_q, _add((arb(1), b), (arb(1), turned)))), (arb(-1), self.common))
        weight = self.weight_q if own else self._weights(c.weight_k[0, place])
        factor = _by_columns(facts.fk, spread)
        bend = self._bend(factor, weight, place, row) if self.moves else arb(0)
        straight = _add((arb(1), _times(self.spread_q, b)), (arb(-1), self.common))
        reach = _support(facts, straight) if self.moves else arb(0)
        here, up, down = dot(straight, self.wq) + pull, bend, bend
        if own and self.ball:
            least, most = facts.own_range
            square = self.spread_q[0] ** 2
            up, down = most * square, -least * square
        if not own:
            slope = _times(spread, facts.a)
            reach += _support(facts, slope)
            here += dot(slope, w)
        low, high = (-reach - down - here).lower(), (reach + up - here).upper()
        return _Key(own, s, v, alpha, beta, _times(spread, facts.u), factor, w, weight, bend, low, high)

    def _bend(self, factor: arb_mat, weight: Vector, place: int, row: int) -> arb:
        """Bound of |(Fq d_q) . (F d)| over |d_q|_weight |d|_weight."""
        if self.ball:
            return self.facts.bilinear_norm * self.spread_q[0] * _spread(self.facts, row)[0]
        left = _by_columns(self.fq, [1 / x for x in self.weight_q]) * self.fq.transpose()
        right = _by_columns(factor, [1 / x for x in weight]) * factor.transpose()
        return _product_norm(left, right, arb(float(self.c.bend[0, place])))

    def _multiplier(self, name: str, place: int) -> Vector:
        """A vector multiplier in token coordinates."""
        return self._token(self.y[name][0, place])

    def _number(self, name: str, place: int) -> arb:
        return arb(float(self.y[name][0, place]))

    def _positive(self, name: str, place: int) -> arb:
        return arb(max(float(self.y[name][0, place]), 0.0))

    def _region(self, lam: torch.Tensor, w: Vector) -> tuple[Vector, arb]:
        """Multiplier as a diagonal, and its value lam . (1 - w^2) at the point."""
        if not self.ball:
            exact = [arb(max(value, 0.0)) for value in lam.tolist()]
            return exact, sum((x * (1 - a * a) for x, a in zip(exact, w, strict=True)), arb(0))
        one = arb(max(float(lam[0]), 0.0)) if lam.numel() else arb(0)
        return [one] * len(w), one * (1 - dot(w, w))

    def maximum(self) -> arb:
        """Upper bound of the maximum of P over all real d_q, d_j, x_j."""
        d = self.facts.problem.head.d
        total = arb(0)
        linear, pairs = [arb(0)] * d, []
        product = arb_mat(d, d)
        spent = arb(0)  # of lam_q, in units of weight_q
        core = arb_mat(self.fq.nrows(), self.fq.nrows())
        for place, key in enumerate(self.keys):
            part = self._eliminate(place, key)
            total += part.const
            linear = _add((arb(1), linear), (arb(1), part.linear))
            if self.moves:
                core += part.core
                pairs += part.pairs
                product = product if part.product is None else product + part.product
            spent += part.spent
        if not self.moves:
            return total
        left, right = (arb_mat([pair[side] for pair in pairs]) for side in range(2))
        product += left.transpose() * right
        quadratic = (product + product.transpose()) * arb("0.5") + self.fq.transpose() * core * self.fq
        lam, region = self._region(self.y["ball_q"][0], self.wq)
        linear = _add((arb(1), linear), (arb(-2), _times(lam, self.wq)))
        held = quadratic * arb(-1)
        for i in range(d):
            held[i, i] += lam[i] - spent * self.weight_q[i]
        return total + region + concave_maximum(held, linear)

    def _eliminate(self, place: int, key: _Key) -> _Part:
        """Maximise one key's terms over d_j and x_j."""
        facts, moving = self.facts, not key.own
        y, p, V = self.y, self.p[place], key.v - arb(float(self.y["t"][0]))
        xl, xu = key.low.exp() - 1, key.high.exp() - 1
        slope = (xu - xl) / (key.high - key.low) if key.high > key.low else key.low.exp()
        start = xl - slope * key.low
        mu, nu, kappa, eta = (self._positive(name, place) for name in ("exp", "secant", "square", "entropy"))
        at, at_log = self._number("exp_at", place), self._number("entropy_at", place)
        none = [arb(0)] * facts.problem.head.d
        names = ("norm", "over", "under")
        g_q = {n: self._multiplier(f"{n}_q", place) if self.moves else none for n in names}
        g_k = {n: self._multiplier(f"{n}_k", place) if moving else none for n in names}
        whole = {n: _support(facts, g_q[n]) + _support(facts, g_k[n]) for n in names}
        left = {n: whole[n] - dot(g_q[n], self.wq) - (dot(g_k[n], key.w) if moving else arb(0)) for n in names}
        in_s = slope * nu - mu * at.exp() - left["over"] + slope * left["under"]
        twist = slope * nu - mu * at.exp() - whole["over"] + slope * whole["under"] + eta * (1 + (xl + xu) / 2)
        const = p * V + left["norm"] + mu - mu * at.exp() * (1 - at) + nu * start - kappa * xl * xu
        const += eta * (at_log.exp() - 1 - at_log) + left["under"] * start
        in_x = p * V + left["norm"] + mu - nu + kappa * (xl + xu) - eta * (1 + at_log) + left["over"] - left["under"]
        cost = (eta * (xu - xl) / 2 + whole["over"] + slope * whole["under"]) * key.bend
        ratio = arb(float(y["ratio"][0, place]))
        linear = _add((in_s + eta, key.beta), (arb(-1), g_q["norm"]), (-start, g_q["under"]))
        in_xq = _add((eta, key.beta), (arb(-1), g_q["norm"]), (arb(-1), g_q["over"]), (arb(1), g_q["under"]))
        tilt_q = _add((arb(1), g_q["over"]), (-slope, g_q["under"]))
        product: arb_mat | None = None
        pairs: list[tuple[Vector, Vector]] = []
        core = arb_mat(self.fq.nrows(), self.fq.nrows())
        if self.moves:
            pairs.append((tilt_q, key.beta))
        spent = cost * ratio / 2 if moving else cost
        if moving:
            lam, region = self._region(y["ball_k"][0, place], key.w)
            curve = [x - cost / ratio / 2 * weight for x, weight in zip(lam, key.weight, strict=True)]
            tilt = _add((arb(1), g_k["over"]), (-slope, g_k["under"]))
            if not all(x > 0 for x in curve):
                return _Part(arb("inf"), linear, pairs, product, core, spent)
            inverse = _Inverse(curve, tilt, key.alpha)
            if not inverse.positive:
                return _Part(arb("inf"), linear, pairs, product, core, spent)
            terms = [(p, key.u), (arb(-2), _times(lam, key.w)), (in_s + eta, key.alpha), (arb(-1), g_k["norm"])]
            direct = _add(*terms, (-start, g_k["under"]))
            cross = _add(
                (p, key.u), (arb(-1), g_k["norm"]), (eta, key.alpha), (arb(-1), g_k["over"]), (arb(1), g_k["under"])
            )
            solved, solved_x = inverse(direct), inverse(cross)
            const += region + dot(direct, solved) / 4
            in_x += dot(cross, solved) / 2
            kappa -= dot(cross, solved_x) / 4
            if self.moves:
                carry = self._carry(key, twist, tilt, tilt_q)
                linear = _add((arb(1), linear), (arb("0.5"), carry(solved)))
                in_xq = _add((arb(1), in_xq), (arb("0.5"), carry(solved_x)))
                core += inverse.gram(key.factor) * (twist * twist / 4)
                pairs += self._bent(key, inverse, twist, ((tilt, key.beta), (key.alpha, tilt_q)))
        else:
            linear = _add((arb(1), linear), (p, key.u))
            in_xq = _add((arb(1), in_xq), (p, key.u))
            product = self.fq.transpose() * key.factor * twist
        if not kappa > 0:
            return _Part(arb("inf"), linear, pairs, product, core, spent)
        # Any nonnegative numbers will do for the linear terms in e_j - e^low and e^high - e_j.
        over = larger((in_x - 2 * kappa * xu).mid(), arb(0))
        under = larger((2 * kappa * xl - in_x).mid(), arb(0))
        in_x = in_x - over + under
        const += over * xu - under * xl + in_x * in_x / (4 * kappa)
        if self.moves:
            linear = _add((arb(1), linear), (in_x / (2 * kappa), in_xq))
            pairs.append((_scaled(1 / (4 * kappa), in_xq), in_xq))
        return _Part(const, linear, pairs, product, core, spent)

    def _carry(self, key: _Key, twist: arb, tilt: Vector, tilt_q: Vector) -> Any:
        """B^T g with B = twist N^T + tilt beta^T + alpha tilt_q^T."""

        def carry(g: Vector) -> Vector:
            image = _apply(self.fq.transpose(), _apply(key.factor, g))
            return _add((twist, image), (dot(tilt, g), key.beta), (dot(key.alpha, g), tilt_q))

        return carry

    def _bent(self, key: _Key, inverse: _Inverse, twist: arb, sides: Any) -> list[tuple[Vector, Vector]]:
        """The parts of B^T M^{-1} B / 4 that hold a vector of rank one."""
        pairs = []
        for key_side, query_side in sides:
            solved = inverse(key_side)
            bent = _apply(self.fq.transpose(), _apply(key.factor, solved))
            pairs.append((_scaled(twist / 2, bent), query_side))
            for other_key, other_query in sides:
                pairs.append((_scaled(dot(other_key, solved) / 4, other_query), query_side))
        return pairs


@dataclass
class _Part:
    """What is left of one key, and what it takes of lam_q.

    const + linear . d_q + sum over pairs (x . d_q)(y . d_q) + d_q^T (product + Fq^T core Fq) d_q
    """

    const: arb
    linear: Vector
    pairs: list[tuple[Vector, Vector]]
    product: arb_mat | None
    core: arb_mat
    spent: arb


class _Inverse:
    """The inverse of diag(curve) - (tilt alpha^T + alpha tilt^T) / 2."""

    def __init__(self, curve: Vector, tilt: Vector, alpha: Vector) -> None:
        self.curve = curve
        self.scaled = [[a / x for a, x in zip(side, curve, strict=True)] for side in (tilt, alpha)]
        hh, ha, aa = dot(tilt, self.scaled[0]), dot(tilt, self.scaled[1]), dot(alpha, self.scaled[1])
        self.positive = bool((ha + root(hh * aa)) / 2 < 1)
        det = hh * aa - (2 - ha) * (2 - ha)
        self.core = [[-aa / det, (ha - 2) / det], [(ha - 2) / det, -hh / det]] if self.positive else None
        self.pair = (tilt, alpha)

    def __call__(self, x: Vector) -> Vector:
        assert self.core is not None
        inner = [dot(side, x) for side in self.scaled]
        one, two = (self.core[i][0] * inner[0] + self.core[i][1] * inner[1] for i in range(2))
        straight = [a / b for a, b in zip(x, self.curve, strict=True)]
        return _add((arb(1), straight), (one, self.scaled[0]), (two, self.scaled[1]))

    def gram(self, factor: arb_mat) -> arb_mat:
        """factor inverse factor^T."""
        assert self.core is not None
        out = _by_columns(factor, [1 / x for x in self.curve]) * factor.transpose()
        images = [_apply(factor, side) for side in self.scaled]
        for i in range(2):
            for j in range(2):
                out += _outer(images[i], images[j]) * self.core[i][j]
        return out


def concave_maximum(held: arb_mat, linear: Vector) -> arb:
    """Upper bound of max over real z of linear . z - z^T held z; infinite where held is not shown positive definite.

    With X near held^{-1/2}, X held X^T = 1 + E and |E| < 1 shows it; the maximum is the value at any z plus
    r^T held^{-1} r, r = linear / 2 - held z, and held^{-1} <= X^T X / (1 - |E|).
    """
    n = held.nrows()
    middle = np.array([[float(held[i, j].mid()) for j in range(n)] for i in range(n)])
    middle = (middle + middle.T) / 2
    if not np.isfinite(middle).all():
        return arb("inf")
    scale = 1 / np.sqrt(np.maximum(np.abs(np.diag(middle)), 1e-300))
    try:
        factor = np.linalg.cholesky(middle * scale[:, None] * scale)
    except np.linalg.LinAlgError:
        return arb("inf")
    X = np.linalg.inv(factor) * scale
    Xm = arb_mat(X.tolist())
    close = Xm * held * Xm.transpose()
    rest = arb(0)
    for i in range(n):
        for j in range(n):
            gap = close[i, j] - (1 if i == j else 0)
            rest += gap * gap
    rest = root(rest)
    if not rest < 1:
        return arb("inf")
    target = [x / 2 for x in linear]
    z = X.T @ (X @ np.array([float(x.mid()) for x in target]))
    point = [arb(value) for value in z.tolist()]
    image = _apply(held, point)
    left = _add((arb(1), target), (arb(-1), image))
    moved = _apply(Xm, left)
    return dot(_add((arb(1), linear), (arb(-1), image)), point) + dot(moved, moved) / (1 - rest)


def _product_norm(left: arb_mat, right: arb_mat, guess: arb) -> arb:
    """Upper bound of sqrt of the top eigenvalue of left right (Gram matrices): `guess` where it can be shown, else
    cruder.

    right <= K K^T for a float64 K, and guess^2 - K^T left K is positive definite: then the eigenvalue is below guess^2.
    """
    n = right.nrows()
    middle = np.array([[float(right[i, j].mid()) for j in range(n)] for i in range(n)])
    values, vectors = np.linalg.eigh((middle + middle.T) / 2)
    top = max(float(values[-1]), 1e-300)
    K = arb_mat((vectors * np.sqrt(np.maximum(values, 0) + 1e-12 * top)).tolist())
    zero = [arb(0)] * n
    if bool(concave_maximum(K * K.transpose() - right, zero) < 1):  # positive definite, so not infinite
        core = K.transpose() * left * K
        for factor in ("1", "1.0000001", "1.001"):
            bound = guess * arb(factor)
            held = arb_mat(
                n, n, [(bound * bound if i == j else arb(0)) - core[i, j] for i in range(n) for j in range(n)]
            )
            if bool(concave_maximum(held, zero) < 1):
                return bound
    return root(sum(((left * right)[i, i] for i in range(n)), arb(0)))  # the trace

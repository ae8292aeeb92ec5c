"""Proof of a Lagrangian certificate in ball arithmetic, in the original coordinates, from the weights up.

Vectors of the query are combinations F^T c of the rows of F = [scale W_Q; W_K; u]; their inner products come from the
Gram matrix W = F F^T. The witness only proposes: a centre, a recentring, slabs and multipliers. Each is taken as exact
numbers, and the inequality they prove is evaluated anew; see `bounds/_elimination.py` for the inequalities.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from flint import arb, arb_mat

from ..bounds._elimination import Circles
from ..bounds.result import whole
from ..problem import HeadProblem
from ..reduced import coordinates, reduce
from ..regions import Balls
from .exact import key_terms
from .facts import Facts, dot, root

ZERO, ONE = arb(0), arb(1)
INFINITE = arb("inf")


def prove(problem: HeadProblem, witness: dict[str, Any], upper: float) -> arb:
    """Upper bound of max f that could be proved; infinite where the proof fails."""
    facts, witness = Facts(problem), whole(witness)
    if problem.query_is_fixed:
        return arb(upper) if sum(key_terms(facts, arb(upper)), ZERO) <= 0 else INFINITE
    if not isinstance(problem.placed, Balls):
        from .lagrangian_box import prove_box  # here: it is built on this module

        return prove_box(facts, witness)
    pieces, cuts = witness["multipliers"].shape[0], witness["directions"].shape[0]
    shapes = {"low": (pieces, cuts), "high": (pieces, cuts), "multipliers": (pieces, 1 + cuts)}
    size = tuple(witness["directions"].shape[1:])
    shapes |= {"directions": (cuts, *size), "centre": (pieces, *size), "shift": (pieces, *size)}
    if any(tuple(witness[name].shape) != shape for name, shape in shapes.items()):
        return INFINITE
    low, high = witness["low"].tolist(), witness["high"].tolist()
    if not _covers(low, high):
        return INFINITE
    frame = Frame(facts)
    directions = [frame.combination(e) for e in _lifted(problem, witness["directions"])]
    base = arb(float(witness["base"]))
    best = base
    done = set()
    for i, (y, shift) in enumerate(
        zip(_lifted(problem, witness["centre"]), _lifted(problem, witness["shift"]), strict=True)
    ):
        key = (tuple(low[i]), tuple(high[i]), tuple(y.tolist()))
        if key in done:  # several pieces may rest on the proof of the piece they were cut from
            continue
        done.add(key)
        slabs = [
            Slab(e, arb(a) if a > -1 else None, arb(b) if b < 1 else None, arb(m))
            for e, a, b, m in zip(directions, low[i], high[i], witness["multipliers"][i, 1:].tolist(), strict=True)
        ]
        piece = Piece(frame, base, witness["centre"][i], y, shift, slabs, arb(float(witness["multipliers"][i, 0])))
        bound = piece.excess()
        if bound is None:
            return INFINITE
        best = best.max(base + bound)
    return best


def _lifted(problem: HeadProblem, vectors: torch.Tensor) -> torch.Tensor:
    """Vectors (P, k) of the reduced coordinates as vectors (P, d)."""
    basis = coordinates(problem)
    return vectors if basis is None else vectors @ basis.T


def _covers(low: list[list[float]], high: list[list[float]]) -> bool:
    """Whether boxes [low, high] cover [-1, 1]^L."""
    boxes = list(zip(low, high, strict=True))
    if not boxes:
        return False
    size = len(low[0])

    def covered(bottom: list[float], top: list[float], among: list[tuple[list[float], list[float]]]) -> bool:
        meeting = [
            (a, b) for a, b in among if all(x < t and y > s for x, y, s, t in zip(a, b, bottom, top, strict=True))
        ]
        for a, b in meeting:
            if all(x <= s and y >= t for x, y, s, t in zip(a, b, bottom, top, strict=True)):
                return True
        for a, b in meeting:
            for i in range(size):
                for cut in (a[i], b[i]):
                    if bottom[i] < cut < top[i]:
                        left, right = list(top), list(bottom)
                        left[i] = right[i] = cut
                        return covered(bottom, left, meeting) and covered(right, top, meeting)
        return False

    return covered([-1.0] * size, [1.0] * size, boxes)


@dataclass(frozen=True)
class Slab:
    """low R <= e.y <= high R, for a combination e; None where the ball's own bound stands. One multiplier."""

    e: list[arb]
    low: arb | None
    high: arb | None
    mult: arb


class Frame:
    """The rows of F, their Gram matrix, and norms of the bilinear part."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        fq, fk, u = facts.fq, facts.fk, facts.u
        self.h, d = fq.nrows(), fq.ncols()
        rows = [[f[i, j] for j in range(d)] for f in (fq, fk) for i in range(self.h)] + [list(u)]
        self.F = arb_mat(rows)
        self.W = self.F * self.F.transpose()
        self.N = 2 * self.h + 1
        self.float_F = np.array([[float(x) for x in row] for row in rows])
        trace = sum((self.W[i, i] for i in range(self.N)), ZERO)
        # A little on the diagonal makes the rows independent; the bound only grows (the ball gains dimensions).
        tiny = arb(float(trace) * 2.0**-70)
        self.W_up = arb_mat(
            self.N, self.N, [self.W[i, j] + (tiny if i == j else 0) for i in range(self.N) for j in range(self.N)]
        )
        approx = np.array([[float(self.W[i, j]) for j in range(self.N)] for i in range(self.N)])
        values, vectors = np.linalg.eigh(approx)
        self.P = arb_mat((vectors / np.sqrt(np.maximum(values, values[-1] * 1e-15 + 1e-300))).tolist())
        self.PW = self.P.transpose() * self.W_up
        self.gram = self.PW * self.P  # nearly the identity
        self.row = problem_row(facts)
        h = self.h
        self.norm = self._norm(self._inner(0, h), self._inner(h, 2 * h))
        swap = [[ZERO] * self.N for _ in range(self.N)]
        for i in range(h):
            swap[i][h + i] = swap[h + i][i] = ONE / 2
        self.swap = arb_mat(swap)
        self.own = self.norm
        if facts.problem.has_own_key:
            self.own = self._own_norm()

    def _inner(self, a: int, b: int) -> arb_mat:
        return arb_mat([[self.W[i, j] for j in range(a, b)] for i in range(a, b)])

    def _norm(self, gq: arb_mat, gk: arb_mat) -> arb:
        """Upper bound of |Fq^T Fk|: c^2 - L^T G_Q L > 0 for a float L with L L^T >= G_K."""
        h = self.h
        approx = np.array([[float(gk[i, j]) for j in range(h)] for i in range(h)])
        top = np.linalg.eigvalsh(approx)[-1]
        raised = approx + np.eye(h) * (abs(top) * 1e-13 + 1e-300)
        L = np.linalg.cholesky(raised)
        L_arb = arb_mat(L.tolist())
        slack = L_arb * L_arb.transpose() - gk
        grown = ONE
        while not is_positive(slack):
            grown *= 4
            L = np.linalg.cholesky(raised + np.eye(h) * abs(top) * 1e-13 * float(grown))
            L_arb = arb_mat(L.tolist())
            slack = L_arb * L_arb.transpose() - gk
            if float(grown) > 1e10:
                return root(sum((gq[i, i] for i in range(h)), ZERO)) * root(sum((gk[i, i] for i in range(h)), ZERO))
        B = L_arb.transpose() * gq * L_arb
        size = max(0.0, np.linalg.eigvalsh(np.array([[float(B[i, j]) for j in range(h)] for i in range(h)]))[-1])
        for growth in (1e-12, 1e-10, 1e-6, 1.0):
            square = arb(size) * (1 + arb(growth)) + arb(1e-290)
            if is_positive(arb_mat(h, h, [(square if i == j else 0) - B[i, j] for i in range(h) for j in range(h)])):
                return square.sqrt()
        return root(sum((B[i, i] for i in range(h)), ZERO))

    def _own_norm(self) -> arb:
        """Upper bound of |sym(Fq^T Fk)|, by testing c - sym on the span of the rows."""
        inner = self.PW * self.swap * self.PW.transpose()
        N = self.N
        approx = np.linalg.eigvalsh(np.array([[float(inner[i, j]) for j in range(N)] for i in range(N)]))
        top = max(-approx[0], approx[-1], 0.0)
        for growth in (1e-11, 1e-9, 1e-6):
            c = arb(top) * (1 + arb(growth)) + arb(1e-290)
            if is_positive(self.gram * c - inner) and is_positive(self.gram * c + inner):
                return c
        return self.norm

    def combination(self, vector: torch.Tensor) -> list[arb]:
        """Coefficients c with F^T c close to a vector (d,); whatever they are, they are then taken as exact."""
        c = np.linalg.lstsq(self.float_F.T, vector.numpy(), rcond=1e-13)[0]
        return [arb(float(x)) for x in c]

    def times(self, c: list[arb]) -> list[arb]:
        """W c."""
        out = self.W * arb_mat([[x] for x in c])
        return [out[i, 0] for i in range(self.N)]


def problem_row(facts: Facts) -> int:
    """The moving query's row among the placed points."""
    row = facts.problem.query_place
    assert row is not None
    return row


def is_positive(matrix: arb_mat) -> bool:
    """Whether a symmetric matrix is proved positive definite."""
    return preconditioned(matrix) is not None


def preconditioned(matrix: arb_mat) -> tuple[arb_mat, arb] | None:
    """G and delta < 1 with |G A G^T - I| <= delta, for a float G: then A > 0 and A^{-1} <= G^T G / (1 - delta)."""
    n = matrix.nrows()
    approx = np.array([[float(matrix[i, j]) for j in range(n)] for i in range(n)])
    if not np.isfinite(approx).all():
        return None
    try:
        G = np.linalg.inv(np.linalg.cholesky((approx + approx.T) / 2))
    except np.linalg.LinAlgError:
        return None
    G_arb = arb_mat(G.tolist())
    E = G_arb * matrix * G_arb.transpose()
    delta = ZERO
    for i in range(n):
        delta = delta.max(sum((abs(E[i, j] - (1 if i == j else 0)) for j in range(n)), ZERO))
    return (G_arb, delta) if delta < 1 else None


def phi(x: arb) -> arb:
    """(e^x - 1 - x) / x^2 at an exact number."""
    if abs(x) < arb(1e-12):
        return ONE / 2 + x / 6 + x * x / 24 + arb(0, 1e-36)
    return (x.exp() - 1 - x) / (x * x)


def top_of(x: arb) -> arb:
    """The upper end as an exact number."""
    return x.upper()


class Piece:
    """One slab-cut piece of the query's ball, with the quadratic that the witness proposes for it."""

    def __init__(
        self,
        frame: Frame,
        t: arb,
        y_reduced: torch.Tensor,
        y: torch.Tensor,
        shift: torch.Tensor,
        slabs: list[Slab],
        mult: arb,
    ) -> None:
        self.frame, self.t, self.mult = frame, t, mult
        facts = frame.facts
        self.R = facts.radius[frame.row]
        self.y, self.shift = frame.combination(y), frame.combination(shift)
        self.Wy = frame.times(self.y)
        self.yy = dot(self.y, self.Wy)
        self.slabs = slabs
        self.We = [frame.times(s.e) for s in slabs]
        h = frame.h
        self.fqy, self.fky, self.uy = self.Wy[:h], self.Wy[h : 2 * h], self.Wy[2 * h]
        self.alpha = [ZERO] * h + [a + b for a, b in zip(facts.q, self.fqy, strict=True)] + [ZERO]
        self.Walpha = frame.times(self.alpha)
        self.Wu = [frame.W[i, 2 * h] for i in range(frame.N)]
        self.aa, self.au, self.uu = dot(self.alpha, self.Walpha), self.Walpha[2 * h], frame.W[2 * h, 2 * h]
        self._keys(y_reduced)

    def _keys(self, y_reduced: torch.Tensor) -> None:
        """Key maximisers as combinations c1 alpha + c2 u, scores, values and weights at the centre."""
        facts, frame = self.frame.facts, self.frame
        problem, h = facts.problem, self.frame.h
        own = problem.has_own_key
        reduced = reduce([problem])
        circles = Circles(reduced, y_reduced[None])
        angles = circles.best(reduced.nominal.new_tensor([float(self.t)]))[0].tolist()
        a, au, uu = float(self.aa) ** 0.5, float(self.au), float(self.uu)
        u1 = au / a if a > 0 else 0.0
        u2 = max(uu - u1 * u1, 0.0) ** 0.5
        self.c: list[tuple[arb, arb]] = []
        self.radii: list[arb] = []
        for j, angle in zip(facts.order, angles, strict=False):
            R = float(facts.radius[j]) * (1 + 1e-14)
            c2 = R * np.sin(angle) / u2 if u2 > 1e-12 * uu**0.5 else 0.0
            c1 = (R * np.cos(angle) - c2 * u1) / a if a > 0 else 0.0
            self.c.append((arb(float(c1)), arb(float(c2))))
            self.radii.append(facts.radius[j])
        scores, values, self.beta = [], [], []
        Fk_alpha, Fk_u = self.Walpha[h : 2 * h], self.Wu[h : 2 * h]
        fqy_y = [dot(k, self.fqy) for k in facts.k]
        for place, (c1, c2) in enumerate(self.c):
            scores.append(facts.s0[place] + c1 * self.aa + c2 * self.au + fqy_y[place])
            values.append(facts.v0[place] + c1 * self.au + c2 * self.uu)
            seen = [k + c1 * x + c2 * z for k, x, z in zip(facts.k[place], Fk_alpha, Fk_u, strict=True)]
            self.beta.append(seen + [ZERO] * (h + 1))
        if own:
            aq = dot(facts.q, self.fky)  # b_own also counts the key's role of the query's token
            scores.append(facts.s0[-1] + fqy_y[-1] + aq + dot(self.fqy, self.fky))
            values.append(facts.v0[-1] + self.uy)
            seen = [k + x for k, x in zip(facts.k[-1], self.fky, strict=True)]
            self.beta.append(seen + self.alpha[h : 2 * h] + [ZERO])
        self.beta = [[b - s for b, s in zip(beta, self.shift, strict=True)] for beta in self.beta]
        middle = max(scores, key=float).mid()
        weights = [(s - middle).exp() for s in scores]
        total = sum(weights, ZERO)
        self.p = [w / total for w in weights]
        self.V = [top_of(v - self.t) for v in values]  # a larger value only raises the bound
        self.Wbeta = frame.W * arb_mat(self.beta).transpose()  # (N, n)

    def _column(self, j: int) -> list[arb]:
        return [self.Wbeta[i, j] for i in range(self.frame.N)]

    def top(self, c: list[arb], Wc: list[arb]) -> arb:
        """Upper bound of (F^T c).y on the piece: R |c - nu e| + nu (high or low), with a good nu per slab."""
        cc = dot(c, Wc)
        best = self.R * root(cc)
        for slab, We in zip(self.slabs, self.We, strict=True):
            if slab.low is None and slab.high is None:
                continue
            ee, ce = dot(slab.e, We), dot(c, We)
            size = float(ee) ** 0.5
            along = float(ce) / size
            across = max(float(cc) - along * along, 0.0) ** 0.5
            full = float(cc) ** 0.5
            s = along / full if full > 0 else 0.0
            low = float(slab.low) if slab.low is not None else -1.0
            high = float(slab.high) if slab.high is not None else 1.0
            at = min(max(s, low), high)
            if at == s:
                continue
            nu = arb((along - across * at / max(1 - at * at, 1e-12) ** 0.5) / size)
            end = slab.high if nu > 0 else slab.low
            if end is None:
                continue
            rest = root(cc - 2 * nu * ce + nu * nu * ee)
            best = best.min(self.R * rest + nu * end * self.R)
        return top_of(best)

    def range_of(self, c: list[arb], Wc: list[arb]) -> tuple[arb, arb]:
        """Bounds of (F^T c).(y' - y) on the piece, as exact numbers."""
        here = dot(c, self.Wy)
        minus = ([-x for x in c], [-x for x in Wc])
        return (-self.top(*minus) - here).lower(), (self.top(c, Wc) - here).upper()

    def excess(self) -> arb | None:
        """Upper bound of f - t on the piece, at least 0; None where the proof fails."""
        frame, facts = self.frame, self.frame.facts
        N, h, K = frame.N, frame.h, len(self.c)
        own = facts.problem.has_own_key
        far = self.R + root(self.yy)
        Z = frame.norm * far
        q0, lift = ZERO, ZERO
        weights, ranges = [], []
        for j in range(K):
            low, high = self.range_of(self.beta[j], self._column(j))
            found = self._curvature(j, Z)
            if found is None:
                return None
            k, cost = found
            V, p = self.V[j], self.p[j]
            weights.append(2 * p * V * phi(high if V > 0 else low))
            lift += p * k * high.exp()
            q0 += p * (V + cost * high.exp())
            ranges.append(low)
        g = [sum((p * V * b[i] for p, V, b in zip(self.p, self.V, self.beta, strict=True)), ZERO) for i in range(N)]
        T = [[ZERO] * N for _ in range(N)]
        for i in range(h):
            for l in range(h):
                T[i][l] += lift * frame.W[h + i, h + l]
        if own:
            q0 += self.p[-1] * self.V[-1]
            g[2 * h] += self.p[-1]
            weight, paid = self._own(T, g, far)
            weights.append(weight)
            q0 += paid
        B = arb_mat(self.beta)
        scaled = arb_mat([[w * x for x in b] for w, b in zip(weights, self.beta, strict=True)])
        T_mat = arb_mat(T) + B.transpose() * scaled
        D = self._dual(q0, g, T_mat)
        if D is None:
            return None
        if D <= 0:
            return ZERO
        return top_of(D / self._z_low(far).exp())

    def _dual(self, q0: arb, g: list[arb], T: arb_mat) -> arb | None:
        frame, R = self.frame, self.R
        lam = self.mult / (R * R)
        if not lam > 0:
            return None
        A = frame.gram * lam - frame.PW * T * frame.PW.transpose()
        h = [x - lam * y for x, y in zip(g, self.y, strict=True)]
        room = lam * (R * R - self.yy)
        for slab, We in zip(self.slabs, self.We, strict=True):
            mu = slab.mult / (R * R)
            if not mu >= 0:
                return None
            if mu == 0:
                continue
            reach = R * root(dot(slab.e, We))
            low = -reach if slab.low is None else slab.low * R
            high = reach if slab.high is None else slab.high * R
            sigma = dot(slab.e, self.Wy)
            Pe = frame.PW * arb_mat([[x] for x in slab.e])
            A += Pe * Pe.transpose() * mu
            h = [x + mu * (low + high - 2 * sigma) / 2 * e for x, e in zip(h, slab.e, strict=True)]
            room += mu * (sigma - low) * (high - sigma)
        found = preconditioned(A)
        if found is None:
            return None
        G, delta = found
        v = G * (frame.PW * arb_mat([[x] for x in h]))
        square = sum((v[i, 0] * v[i, 0] for i in range(v.nrows())), ZERO)
        return q0 + (square / (1 - delta) + room) / 2

    def _z_low(self, far: arb) -> arb:
        """Lower bound of log sum_j p_j e^{x_j}: Jensen, with the query's part taken together."""
        frame, facts = self.frame, self.frame.facts
        mean = [sum((p * b[i] for p, b in zip(self.p, self.beta, strict=True)), ZERO) for i in range(frame.N)]
        low = self.range_of(mean, frame.times(mean))[0]
        for j, (c1, c2) in enumerate(self.c):
            R = self.radii[j]
            here = c1 * self.aa + c2 * self.au
            length = root(c1 * c1 * self.aa + 2 * c1 * c2 * self.au + c2 * c2 * self.uu)
            low -= self.p[j] * (R * root(self.aa) + here + frame.norm * far * (R + length))
        if facts.problem.has_own_key:
            low -= self.p[-1] * frame.own * far * far
        return low

    def _own(self, T: list[list[arb]], g: list[arb], far: arb) -> tuple[arb, arb]:
        """Add the own key's terms to T and g; return its weight 2 p kappa on beta, and a constant."""
        frame, h = self.frame, self.frame.h
        p, V, beta = self.p[-1], self.V[-1], self.beta[-1]
        u = [ZERO] * (2 * h) + [ONE]
        y_high = self.range_of(u, self.Wu)[1]
        Wbeta = self._column(len(self.c))
        x_low, x_high = self.range_of(beta, Wbeta)
        most = top_of(frame.own * far * far)
        high = top_of(V + y_high)
        kappa = top_of(high * phi((x_high + most).upper() if high > 0 else (x_low - most).lower()))
        e = [a + 2 * kappa * b for a, b in zip(u, beta, strict=True)]
        length = root(self.yy)
        cost = ZERO
        left = e
        if length > arb(0.999) * self.R and length > 0:
            Wy_e = dot(e, self.Wy) / self.yy  # e = (e.y / |y|^2) y + left
            along = abs(Wy_e)
            left = [a - Wy_e * b for a, b in zip(e, self.y, strict=True)]
            for i in range(frame.N):
                g[i] -= p * most * along * self.y[i]
            cost = p * most * 2 * along * length * (self.R - length).max(ZERO)
        low, high = self.range_of(left, frame.times(left))
        low, high = low - abs(kappa) * most, high + abs(kappa) * most
        c, spare = V + (low + high) / 2, (high - low) / 2
        add_own_products(T, frame, p, c, spare, beta)
        return 2 * p * kappa, cost

    def _curvature(self, j: int, Z: arb) -> tuple[arb, arb] | None:
        """k and cost with G_j(alpha + zeta) <= V + cost + k |zeta|^2 / 2 for |zeta| <= Z."""
        V, R = self.V[j], self.radii[j]
        c1, c2 = self.c[j]
        if R == 0:
            return ZERO, ZERO
        aa, au, uu = self.aa, self.au, self.uu
        if V > 0:
            steep = root(aa + 2 * au / V + uu / (V * V))
            if not steep > 0:
                return None
            d1, d2 = R / steep - c1, R / (steep * V) - c2
            off = root(d1 * d1 * aa + 2 * d1 * d2 * au + d2 * d2 * uu)
            at = c1 * aa + c2 * au + (c1 * au + c2 * uu) / V
            eps = (R * steep - at).max(ZERO) + off * Z
            top = R * Z * Z / (2 * steep)
            growth = (top.exp() - 1) / top if top > arb(1e-15) else 1 + top
            return top_of(V * eps.exp() * growth * R / steep), top_of(V * eps.expm1())
        length = root(c1 * c1 * aa + 2 * c1 * c2 * au + c2 * c2 * uu)
        if not length >= R:
            return None
        R = length  # the ball that the centre lies on holds the key's own
        rate = self._rate(R, -V, c1, c2)
        if rate is None:
            return None
        c, left = rate
        if V == 0 and c >= 0 and left * R == 0:
            return ZERO, ZERO
        if not c > 0:
            return None
        return top_of(V * V * R / (c * (-2 * R * Z).exp())), top_of(left * left * R * 32 / c)

    def _rate(self, R: arb, size: arb, c1: arb, c2: arb) -> tuple[arb, arb] | None:
        """c and left: e^{alpha.delta} (u.delta - |V|) <= -|V| + left |delta| - c s, s the depth below the centre."""
        aa, au, uu = self.aa, self.au, self.uu
        a1, u1 = (c1 * aa + c2 * au) / R, (c1 * au + c2 * uu) / R
        a_t = root(aa - a1 * a1)
        # tangential part of u - |V| alpha: |u - |V| alpha|^2 less its normal part
        v1 = u1 - size * a1
        stray = root(uu - 2 * size * au + size * size * aa - v1 * v1)
        reach_x = R * root(aa)
        x_low, x_high = (-reach_x - R * a1).lower(), (reach_x - R * a1).upper()
        left = stray * x_high.exp()
        y_high = R * root(uu) - R * u1
        least = (size - y_high).lower()
        kappa = (least * phi(x_low if least >= 0 else x_high)).lower()
        A = -a1 * u1 + kappa * a1 * a1
        B = a_t * (a1 * size + u1 - 2 * kappa * a1)
        D = (a_t * a_t * (kappa - size)).min(ZERO)
        first = (v1 + R * (A + D) - R * root((A - D) * (A - D) + B * B)).lower()
        best = first
        w = top_of(a_t * R)
        b_max = 1 - w.exp() * (1 - w)
        curve = b_max / (w * w) if w > arb(1e-6) else ONE / 2 + w
        second = u1.max(ZERO) * x_low.exp() + u1.min(ZERO) * x_high.exp() - 2 * R * size * curve * a_t * a_t
        if a1 > 0:
            best = best.max((second - size * a1).lower())
        elif b_max <= 1:
            best = best.max((second - size * a1.min(ZERO) * (1 - b_max) - size * a1.max(ZERO)).lower())
        if best < v1 / 2:
            best = best.max(self._sliced(R, size, a1, u1, a_t))
        return (best * (1 - ONE / 64)).lower(), left

    @staticmethod
    def _sliced(R: arb, size: arb, a1: arb, u1: arb, a_t: arb, count: int = 96, first: float = 0.01) -> arb:
        """The same rate from slices of the depth: for a fixed depth the least value lies at an end of the chord."""
        ends = [arb(first ** (1 - i / count)) * 2 * R for i in range(count)] + [2 * R]
        rate: arb | None = None
        for s0, s1 in pairwise(ends):
            chord = [(s * (2 * R - s)).max(ZERO) for s in (s0, s1)]
            inside = s0 <= R and R <= s1
            w0, w1 = a_t * root(chord[0].min(chord[1])), a_t * (R if inside else root(chord[0].max(chord[1])))
            if not (inside or s1 <= R or s0 >= R):
                w1 = a_t * R
            W = size + (u1 * s0).min(u1 * s1)
            least = min(((w.exp() * (W - size * w)).lower() for w in (w0, w1, -w0, -w1)), key=float)
            N = min(((least * (-a1 * s).exp()).lower() for s in (s0, s1)), key=float)
            here = ((N - size) / (s1 if N >= size else s0)).lower()
            rate = here if rate is None else rate.min(here)
        s = ends[0]
        across = a_t * root(2 * R * s)
        reach_x = top_of(abs(a1) * s + across)
        least = (size - abs(u1) * s - size * across).lower()
        kappa = (least * phi(-reach_x if least >= 0 else reach_x)).lower()
        A = (-a1 * u1 + kappa * a1 * a1).min(ZERO)
        B = abs(a_t * (a1 * size + u1 - 2 * kappa * a1))
        D = (a_t * a_t * (kappa - size)).min(ZERO)
        near = (u1 - size * a1 + 2 * R * D + A * s - B * root(2 * R * s)).lower()
        assert rate is not None
        return rate.min(near).lower()


def add_own_products(T: list[list[arb]], frame: Frame, p: arb, c: arb, spare: arb, beta: list[arb]) -> None:
    """Add the own key's bilinear part to the query's Hessian T: c of it exactly, `spare` by its squares; and x y."""
    h = frame.h
    size = [root(sum((frame.W[i, i] for i in rows), ZERO)) for rows in (range(h), range(h, 2 * h))]
    even = arb(float(size[1]) / max(float(size[0]), 1e-300)) if size[1] > 0 else ONE
    for i in range(h):
        T[i][h + i] += p * c
        T[h + i][i] += p * c
        T[i][i] += p * spare * even
        T[h + i][h + i] += p * spare / even
    for i in range(frame.N):
        T[i][2 * h] += p * beta[i]
        T[2 * h][i] += p * beta[i]

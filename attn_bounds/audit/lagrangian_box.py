"""Proof of a Lagrangian certificate of a box, query moving, in ball arithmetic: `bounds/_majorant.py` evaluated anew.

The witness proposes a centre, a recentring and one multiplier per coordinate; they are taken as exact numbers. The
query's quadratic lives in the span of the rows of F = [scale W_Q; W_K; u], the keys' in the plane of alpha and u.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flint import arb, arb_mat

from .facts import Facts, column, dot, root, size
from .lagrangian import INFINITE, ONE, ZERO, Frame, add_own_products, phi, preconditioned, problem_row, top_of

Vector = list[arb]


def prove_box(facts: Facts, witness: dict[str, Any]) -> arb:
    """Upper bound of max f that could be proved; infinite where the proof fails."""
    problem = facts.problem
    own, d = problem.has_own_key, problem.head.d
    keys = len(facts.order) - own
    shapes = {"x": (keys, d), "y": (d,), "shift": (d,), "key_multipliers": (keys, d), "query_multipliers": (d,)}
    if any(tuple(witness[name].shape) != shape for name, shape in shapes.items()):
        return INFINITE
    return _Box(facts, witness).bound()


def times(matrix: arb_mat, vector: Vector) -> Vector:
    """Matrix times vector."""
    return column(matrix * arb_mat([[x] for x in vector]))


def reach(vector: Vector, half: Vector) -> arb:
    """Largest vector . d over |d_c| <= half_c."""
    return sum((abs(v) * h for v, h in zip(vector, half, strict=True)), ZERO)


def ends(vector: Vector, half: Vector, at: Vector) -> tuple[arb, arb]:
    """Range of vector . (d - at)."""
    far, here = reach(vector, half), dot(vector, at)
    return -far - here, far - here


class _Box:
    def __init__(self, facts: Facts, witness: dict[str, Any]) -> None:
        self.facts = facts
        self.frame = Frame(facts)
        self.t = arb(float(witness["base"]))
        self.own = facts.problem.has_own_key
        self.K = len(facts.order) - self.own
        self.rx = [facts.half[j] for j in facts.order[: self.K]]
        self.ry = facts.half[problem_row(facts)]

        def inside(values: list[float], half: Vector) -> Vector:
            return [arb(v) if h > 0 else ZERO for v, h in zip(values, half, strict=True)]

        self.x = [inside(row, half) for row, half in zip(witness["x"].tolist(), self.rx, strict=True)]
        self.y = inside(witness["y"].tolist(), self.ry)
        self.key_mult = [[arb(v) for v in row] for row in witness["key_multipliers"].tolist()]
        self.query_mult = [arb(v) for v in witness["query_multipliers"].tolist()]
        self.shift = self.frame.combination(witness["shift"])
        self._centre()
        self._ranges()
        self._constants()

    def _rows(self, coefficients: list[Vector]) -> list[Vector]:
        """F^T c for several c, as vectors (d,)."""
        product = arb_mat(coefficients) * self.frame.F
        return [[product[i, j] for j in range(product.ncols())] for i in range(product.nrows())]

    def _centre(self) -> None:
        facts, h = self.facts, self.frame.h
        fk_t = facts.fk.transpose()
        self.fqy, self.fky = times(facts.fq, self.y), times(facts.fk, self.y)
        turned = [a + b for a, b in zip(facts.q, self.fqy, strict=True)]
        self.alpha = times(fk_t, turned)
        self.fkx = [times(facts.fk, x) for x in self.x]
        scores, values, beta, plain = [], [], [], []
        for j in range(self.K):
            scores.append(facts.s0[j] + dot(self.alpha, self.x[j]) + dot(facts.k[j], self.fqy))
            values.append(facts.v0[j] + dot(facts.u, self.x[j]))
            beta.append([a + b for a, b in zip(facts.k[j], self.fkx[j], strict=True)] + [ZERO] * (h + 1))
            plain.append(list(facts.k[j]) + [ZERO] * (h + 1))
        if self.own:
            k = facts.k[-1]
            score = facts.s0[-1] + dot(k, self.fqy) + dot(facts.q, self.fky) + dot(self.fqy, self.fky)
            scores.append(score)
            values.append(facts.v0[-1] + dot(facts.u, self.y))
            beta.append([a + b for a, b in zip(k, self.fky, strict=True)] + turned + [ZERO])
            plain.append(list(k) + list(facts.q) + [ZERO])
        self.coef = [[a - b for a, b in zip(row, self.shift, strict=True)] for row in beta]
        plain = [[a - b for a, b in zip(row, self.shift, strict=True)] for row in plain]
        self.beta, self.plain = self._rows(self.coef), self._rows(plain)
        middle = max(scores, key=float).mid()
        weights = [(s - middle).exp() for s in scores]
        total = sum(weights, ZERO)
        self.p = [w / total for w in weights]
        self.V = [top_of(v - self.t) for v in values]

    def _ranges(self) -> None:
        """Ranges of the parts of every score's change, as `_majorant.ranges`."""
        facts, frame = self.facts, self.frame
        absolute = [
            arb_mat([[abs(f[i, j]) for j in range(f.ncols())] for i in range(f.nrows())]) for f in (facts.fq, facts.fk)
        ]
        qy = times(absolute[0], self.ry)
        m_y = times(facts.fk.transpose(), self.fqy)
        fq_t = facts.fq.transpose()
        self.key = [ends(self.alpha, r, x) for r, x in zip(self.rx, self.x, strict=True)]
        self.value = [ends(facts.u, r, x) for r, x in zip(self.rx, self.x, strict=True)]
        self.query = [ends(b, self.ry, self.y) for b in self.beta]
        self.bilinear, self.score = [], []
        q_length = size(self.ry)
        for j in range(len(self.beta)):
            if j < self.K:
                r, x = self.rx[j], self.x[j]
                entrywise = dot(times(absolute[1], r), qy)
                most = entrywise.min(frame.norm * size(r) * q_length)
                here = dot(x, m_y)
                stray = reach(m_y, r) + reach(times(fq_t, self.fkx[j]), self.ry)
                far, moved = reach(facts.a, r), dot(facts.a, x) + here
                key = self.key[j]
            else:
                most = dot(times(absolute[1], self.ry), qy).min(frame.own * q_length * q_length)
                here = dot(self.fqy, self.fky)
                both = [a + b for a, b in zip(m_y, times(fq_t, self.fky), strict=True)]
                stray = reach(both, self.ry)
                far, moved, key = ZERO, here, (ZERO, ZERO)
                self.value.append(ends(facts.u, self.ry, self.y))
            low, high = -most - stray + here, most + stray + here
            far = far + reach(self.plain[j], self.ry) + most
            moved = moved + dot(self.plain[j], self.y)
            self.bilinear.append((low, high))
            self.score.append(
                (
                    (-far - moved).max(key[0] + self.query[j][0] + low).lower(),
                    (far - moved).min(key[1] + self.query[j][1] + high).upper(),
                )
            )

    def _constants(self) -> None:
        """kappa, c and spare of every key, the linear charges and their cost, as `_majorant.constants`."""
        u, d = self.facts.u, len(self.y)
        self.kappa, self.c, self.spare = [], [], []
        self.charge: list[Vector] = []
        self.charge_query = [ZERO] * d
        self.cost = ZERO
        for j, (V, p, beta) in enumerate(zip(self.V, self.p, self.beta, strict=True)):
            high = top_of(V + self.value[j][1])
            kappa = top_of(high * phi(self.score[j][1] if high > 0 else self.score[j][0]))
            most = top_of((-self.bilinear[j][0]).max(self.bilinear[j][1]).max(ZERO))
            low, high = V - abs(kappa) * most, V + abs(kappa) * most
            if j < self.K:
                e = [a + 2 * kappa * b for a, b in zip(u, self.alpha, strict=True)]
                along, left, slack = _split(e, self.x[j], self.rx[j])
                self.charge.append([p * most * a for a in along])
                self.cost += p * most * slack
                ends_left = ends(left, self.rx[j], self.x[j])
                low, high = low + ends_left[0], high + ends_left[1]
            e = [2 * kappa * b for b in beta]
            if j >= self.K:
                e = [a + b for a, b in zip(e, u, strict=True)]
            along, left, slack = _split(e, self.y, self.ry)
            self.charge_query = [a + p * most * b for a, b in zip(self.charge_query, along, strict=True)]
            self.cost += p * most * slack
            ends_left = ends(left, self.ry, self.y)
            low, high = low + ends_left[0], high + ends_left[1]
            self.kappa.append(kappa)
            self.c.append((low + high) / 2)
            self.spare.append(top_of((high - low) / 2) if most > 0 else ZERO)

    def bound(self) -> arb:
        """base + max(D, 0) / Zmin."""
        D = self._dual()
        if D is None:
            return INFINITE
        return self.t if D <= 0 else self.t + D / self._z_low().exp()

    def _z_low(self) -> arb:
        apart = sum((p * s[0] for p, s in zip(self.p, self.score, strict=True)), ZERO)
        mean = [sum((p * b[i] for p, b in zip(self.p, self.beta, strict=True)), ZERO) for i in range(len(self.y))]
        low = ends(mean, self.ry, self.y)[0]
        low += sum((p * k[0] for p, k in zip(self.p, self.key, strict=False)), ZERO)
        low += sum((p * b[0] for p, b in zip(self.p, self.bilinear, strict=True)), ZERO)
        return apart.max(low)

    def _dual(self) -> arb | None:
        facts, frame, K, h, N, d = self.facts, self.frame, self.K, self.frame.h, self.frame.N, len(self.y)
        u, p, V = facts.u, self.p, self.V
        total = sum((a * b for a, b in zip(p, V, strict=True)), self.cost)  # D, term by term
        T = [[ZERO] * N for _ in range(N)]
        spread = [ZERO] * d
        onto = [ZERO] * N
        summed = [ZERO] * d
        inner = arb_mat(h, h)
        plane = arb_mat([self.alpha, list(u)])
        weights = [2 * a * k for a, k in zip(p, self.kappa, strict=True)]
        for j in range(K):
            r = self.rx[j]
            rho = frame.norm * root(sum((a * a for a in self.ry), ZERO) / d * sum((a * a for a in r), ZERO) / d)
            pay = p[j] * self.spare[j]
            if pay > 0 and not rho > 0:
                return None
            rest = top_of(pay * rho)
            mu = [m - rest for m in self.key_mult[j]]
            if not all(m > 0 for m in mu):
                return None
            d_inv = [a * a / m for a, m in zip(r, mu, strict=True)]
            c = p[j] * self.c[j]
            spread = [
                s + c * c * i + (pay / rho * a * a if pay > 0 else ZERO)
                for s, i, a in zip(spread, d_inv, r, strict=True)
            ]
            scaled = arb_mat([[a * i for a, i in zip(v, d_inv, strict=True)] for v in (self.alpha, u)])
            G = plane * scaled.transpose()
            block = arb_mat([[2 * p[j] * self.kappa[j], p[j]], [p[j], ZERO]])
            M = arb_mat([[ONE, ZERO], [ZERO, ONE]]) - G * block
            det = M[0, 0] * M[1, 1] - M[0, 1] * M[1, 0]
            if not (det > 0 and M[0, 0] + M[1, 1] > 0):
                return None
            Y = block * arb_mat([[M[1, 1], -M[0, 1]], [-M[1, 0], M[0, 0]]]) * (1 / det)
            seen = facts.fk * scaled.transpose()  # (h, 2)
            inner += seen * Y * seen.transpose() * (c * c)
            couple = arb_mat([[2 * p[j] * self.kappa[j]], [p[j]]])
            across = column(seen * (couple + Y * G * couple))
            inside = G + G * Y * G
            weights[j] += (couple.transpose() * inside * couple)[0, 0]
            for i in range(N):
                for l in range(h):
                    term = c * self.coef[j][i] * across[l]
                    T[i][l] += term
                    T[l][i] += term
            residual = [
                p[j] * (a + V[j] * b) - q - (m * x / (s * s) if s > 0 else ZERO)
                for a, b, q, m, x, s in zip(u, self.alpha, self.charge[j], self.key_mult[j], self.x[j], r, strict=True)
            ]
            first = [a * i for a, i in zip(residual, d_inv, strict=True)]
            seen_first = [dot(self.alpha, first), dot(u, first)]
            pushed = times(Y, seen_first)
            total += (dot(residual, first) + dot(seen_first, pushed)) / 2
            solved = [
                f + i * (pushed[0] * a + pushed[1] * b) for f, i, a, b in zip(first, d_inv, self.alpha, u, strict=True)
            ]
            gain = 2 * p[j] * self.kappa[j] * dot(self.alpha, solved) + p[j] * dot(u, solved)
            onto = [o + gain * b for o, b in zip(onto, self.coef[j], strict=True)]
            summed = [s + c * v for s, v in zip(summed, solved, strict=True)]
            total += _room(self.key_mult[j], self.x[j], r)
        inner += arb_mat([[facts.fk[i, j] * spread[j] for j in range(d)] for i in range(h)]) * facts.fk.transpose()
        for i, value in enumerate(times(facts.fk, summed)):
            onto[i] += value
        for i in range(h):
            for l in range(h):
                T[i][l] += inner[i, l]
        if self.own:
            self._own(T)
        B = arb_mat(self.coef)
        weighted = arb_mat([[w * a for a in b] for w, b in zip(weights, self.coef, strict=True)])
        T_mat = arb_mat(T) + B.transpose() * weighted
        gq = [
            sum((a * v * b[i] for a, v, b in zip(p, V, self.beta, strict=True)), ZERO) - self.charge_query[i]
            for i in range(d)
        ]
        if self.own:
            gq = [a + p[-1] * b for a, b in zip(gq, u, strict=True)]
        query = self._query(gq, onto, T_mat)
        if query is None:
            return None
        return total + query + _room(self.query_mult, self.y, self.ry)

    def _query(self, gq: Vector, onto: Vector, T: arb_mat) -> arb | None:
        """Half of h . S^{-1} h for the query's Schur complement S = diag(mult / R^2) - F^T T F."""
        if not all(m > 0 for m in self.query_mult):
            return None
        frame, d = self.frame, len(gq)
        inverse = [r * r / m for r, m in zip(self.ry, self.query_mult, strict=True)]
        lifted = self._rows([onto])[0]
        h = [
            g + l - (m * y / (r * r) if r > 0 else ZERO)
            for g, l, m, y, r in zip(gq, lifted, self.query_mult, self.y, self.ry, strict=True)
        ]
        first = [a * i for a, i in zip(h, inverse, strict=True)]
        v = times(frame.F, first)
        scaled = arb_mat([[frame.F[i, j] * inverse[j] for j in range(d)] for i in range(frame.N)])
        W = scaled * frame.F.transpose()
        P = _whitener(W)
        trace = sum((W[i, i] for i in range(frame.N)), ZERO)
        tiny = arb(float(trace) * 2.0**-70)  # extra dimensions, in which the right-hand side has no part
        N = frame.N
        W = arb_mat(N, N, [W[i, j] + (tiny if i == j else 0) for i in range(N) for j in range(N)])
        PW = P.transpose() * W
        gram = PW * P
        found, plain = preconditioned(gram - PW * T * PW.transpose()), preconditioned(gram)
        if found is None or plain is None:
            return None
        seen = P.transpose() * arb_mat([[a] for a in v])

        def square(G: arb_mat) -> arb:
            out = column(G * seen)
            return dot(out, out)

        return (dot(h, first) + square(found[0]) / (1 - found[1]) - square(plain[0]) / (1 + plain[1])) / 2

    def _own(self, T: list[Vector]) -> None:
        add_own_products(T, self.frame, self.p[-1], self.c[-1], self.spare[-1], self.coef[-1])


def _split(e: Vector, at: Vector, half: Vector) -> tuple[Vector, Vector, arb]:
    """Per coordinate: |e| along the face the centre sits on, and what is left, as `_majorant.split`."""
    along, left, slack = [], [], ZERO
    for a, x, r in zip(e, at, half, strict=True):
        if r > 0 and abs(x) > arb(0.999) * r:
            along.append(abs(a) if x > 0 else -abs(a))
            left.append(ZERO)
            slack += 2 * abs(a) * (r - abs(x)).max(ZERO)
        else:
            along.append(ZERO)
            left.append(a)
    return along, left, slack


def _room(mult: Vector, at: Vector, half: Vector) -> arb:
    """Half of sum mult (1 - (at / half)^2)."""
    return sum((m * (1 - (x / r) ** 2) if r > 0 else m for m, x, r in zip(mult, at, half, strict=True)), ZERO) / 2


def _whitener(W: arb_mat) -> arb_mat:
    """A float P with P^T W P near the identity, in two rounds since W may be ill-conditioned."""
    n = W.nrows()
    P = arb_mat(np.eye(n).tolist())
    for _ in range(3):
        now = P.transpose() * W * P
        approx = np.array([[float(now[i, j]) for j in range(n)] for i in range(n)])
        values, vectors = np.linalg.eigh((approx + approx.T) / 2)
        step = vectors / np.sqrt(np.maximum(values, values[-1] * 1e-14 + 1e-300))
        P = P * arb_mat(step.tolist())
        P = arb_mat([[float(P[i, j]) for j in range(n)] for i in range(n)])
    return P

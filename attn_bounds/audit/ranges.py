"""Proof of the interval, first-order and vertex bounds: their ranges again, in ball arithmetic."""

from __future__ import annotations

from flint import arb

from ..regions import Balls
from .facts import Facts, larger, size


class ProvedRanges:
    """Ranges of scores (up to a function common to all) and upper ends of values, as lists of arb numbers."""

    def __init__(self, facts: Facts) -> None:
        problem = facts.problem
        n, own = len(facts.order), problem.has_own_key
        row = None if problem.query_is_fixed else problem.query_place
        shift = max(facts.s0, key=float)
        weights = [(s - shift).exp() for s in facts.s0]
        total = sum(weights, arb(0))
        # Any weights that sum to 1 may be used to subtract a common function of the query.
        p = [(w / total).mid() for w in weights]
        p[-1] = 1 - sum(p[:-1], arb(0))
        common = (
            [sum((p[j] * facts.b[j][i] for j in range(n)), arb(0)) for i in range(problem.head.d)]
            if row is not None
            else []
        )
        self.s_low, self.s_high, self.v_high = [], [], []
        for place, j in enumerate(facts.order):
            mine = own and place == n - 1
            if isinstance(problem.placed, Balls):
                parts = self._ball(facts, place, j, row, mine, common)
            else:
                parts = self._box(facts, place, j, row, mine, common)
            down, up, value = parts
            self.s_low.append(facts.s0[place] - down)
            self.s_high.append(facts.s0[place] + up)
            self.v_high.append(facts.v0[place] + value)

    @staticmethod
    def _ball(facts: Facts, place: int, j: int, row: int | None, mine: bool, common: list[arb]) -> tuple[arb, arb, arb]:
        radius = facts.radius[j]
        rq = facts.radius[row] if row is not None else arb(0)
        linear = rq * size([x - y for x, y in zip(facts.b[place], common, strict=True)]) if row is not None else arb(0)
        if mine:
            low, high = facts.own_range
            return linear - low * rq * rq, linear + high * rq * rq, facts.u_size * rq
        reach = linear + radius * facts.a_size + (facts.bilinear_norm * radius * rq if row is not None else arb(0))
        return reach, reach, facts.u_size * radius

    @staticmethod
    def _box(facts: Facts, place: int, j: int, row: int | None, mine: bool, common: list[arb]) -> tuple[arb, arb, arb]:
        h = facts.half[j]
        hq = facts.half[row] if row is not None else []
        linear = arb(0)
        if row is not None:
            linear = sum((x * abs(b - c) for x, b, c in zip(hq, facts.b[place], common, strict=True)), arb(0))
        value = sum((x * abs(u) for x, u in zip(h, facts.u, strict=True)), arb(0))
        product = _product_reach(facts, h, hq) if row is not None else arb(0)
        if mine:
            low, high = facts.own_range
            square = sum((x * x for x in hq), arb(0))
            return linear + product.min(-low * square), linear + product.min(high * square), value
        reach = linear + product + sum((x * abs(a) for x, a in zip(h, facts.a, strict=True)), arb(0))
        return reach, reach, value


def _product_reach(facts: Facts, h: list[arb], hq: list[arb]) -> arb:
    """|(Fq y).(Fk x)| over the two boxes: by rows of the factors, or by the norms, whichever is less."""
    rows = arb(0)
    for i in range(facts.fq.nrows()):
        left = sum((x * abs(facts.fq[i, c]) for c, x in enumerate(hq)), arb(0))
        right = sum((x * abs(facts.fk[i, c]) for c, x in enumerate(h)), arb(0))
        rows += left * right
    return rows.min(facts.bilinear_norm * size(h) * size(hq))


def price_sum(r: ProvedRanges, t: arb) -> arb:
    """t + sum_j max(p_low_j (v_high_j - t), p_high_j (v_high_j - t))."""
    shift = max(r.s_high, key=float).mid()
    low, high = ([(s - shift).exp() for s in g] for g in (r.s_low, r.s_high))
    other_low, other_high = _others(low), _others(high)
    total = t
    for j, v in enumerate(r.v_high):
        p_low, p_high = low[j] / (low[j] + other_high[j]), high[j] / (high[j] + other_low[j])
        total += larger(p_low * (v - t), p_high * (v - t))
    return total


def _others(terms: list[arb]) -> list[arb]:
    """sum_{k != j} terms_k, without subtracting."""
    before, after = [arb(0)], [arb(0)]
    for x, y in zip(terms[:-1], terms[:0:-1], strict=True):
        before.append(before[-1] + x)
        after.append(after[-1] + y)
    return [x + y for x, y in zip(before, reversed(after), strict=True)]


def vertex_sum(r: ProvedRanges, t: arb) -> arb:
    """sum_j max over the score's range of e^{s_j} (v_high_j - t), up to a positive factor: t is a bound iff <= 0."""
    shift = max(r.s_high, key=float).mid()
    return sum(
        (
            larger((lo - shift).exp() * (v - t), (hi - shift).exp() * (v - t))
            for lo, hi, v in zip(r.s_low, r.s_high, r.v_high, strict=True)
        ),
        arb(0),
    )

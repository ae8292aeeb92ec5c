"""Proof of the scalar equation F(t) = sum_j max e^{s_j} (v_j - t) <= 0 for a fixed query, and for lists.

A key's (s, v) stays under every support line of its region: v <= m s + c(m), c(m) = v0 - m s0 + R |u - m a| (for a
box sum_k h_k |u_k - m a_k|). On a segment of scores e^s (m s + c - t) has its maximum at an end or, for m < 0, where
m s + c - t = -m. So any choice of slopes and segments proves a bound; float64 is only used to choose them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from flint import arb, arb_mat

from ..problem import HeadProblem
from ..regions import Balls
from .facts import Facts, column, dot, exact_matrix


def key_terms(facts: Facts, t: arb) -> list[arb]:
    """Upper bounds of max e^{s_j - s0_max} (v_j - t) for every key."""
    shift = max(facts.s0, key=float).mid()
    return [_key_term(facts, place, t, shift) for place in range(len(facts.order))]


def _key_term(facts: Facts, place: int, t: arb, shift: arb) -> arb:
    j = facts.order[place]
    s0, v0 = facts.s0[place] - shift, facts.v0[place]
    if isinstance(facts.problem.placed, Balls):
        radius = facts.radius[j]
        s_reach, v_reach = radius * facts.a_size, radius * facts.u_size

        def spread(m: arb) -> arb:
            square = (facts.uu - 2 * m * facts.au + m * m * facts.aa).upper()  # |u - m a|^2
            return radius * square.sqrt() if square > 0 else arb(0)

        def contacts() -> list[Contact]:
            return _ellipse(float(s0), float(v0), float(s_reach), float(v_reach), facts.cosine, float(t))
    else:
        h = facts.half[j]
        s_reach = sum((x * abs(a) for x, a in zip(h, facts.a, strict=True)), arb(0))
        v_reach = sum((x * abs(u) for x, u in zip(h, facts.u, strict=True)), arb(0))

        def spread(m: arb) -> arb:
            return sum((x * abs(u - m * a) for x, u, a in zip(h, facts.u, facts.a, strict=True)), arb(0))

        def contacts() -> list[Contact]:
            return _zonotope(float(s0), float(v0), (h, facts.a, facts.u), float(t))

    low, high = (s0 - s_reach).lower(), (s0 + s_reach).upper()
    top = (v0 + v_reach - t).upper()
    crude = top * (high if top > 0 else low).exp()
    if float(s_reach) < 1e-30:
        return crude
    lines = contacts()
    if not lines:
        return crude
    cuts = [arb(_crossing(x, y)) for x, y in pairwise(lines)]
    edges = [low, *cuts, high]
    bound: arb | None = None
    for (_, _, slope), left, right in zip(lines, edges[:-1], edges[1:], strict=True):
        m = arb(slope)
        term = _segment(m, v0 - m * s0 + spread(m) - t, left, right)
        bound = term if bound is None else bound.max(term)
    assert bound is not None
    return bound.min(crude)


def _segment(m: arb, c: arb, left: arb, right: arb) -> arb:
    """Upper bound of e^s (m s + c) between two scores, in whichever order they are."""
    ends = (left.exp() * (m * left + c)).max(right.exp() * (m * right + c))
    if m < 0:
        peak = -c / m - 1
        if not (peak < left.min(right) or peak > left.max(right)):
            return ends.max(peak.exp() * -m)
    return ends


Contact = tuple[float, float, float]  # s, v, slope of a support line, by rising s


def _crossing(x: Contact, y: Contact) -> float:
    """Where two neighbouring support lines meet (anywhere between their contacts would do)."""
    (s1, v1, m1), (s2, v2, m2) = x, y
    cut = (v2 - v1 + m1 * s1 - m2 * s2) / (m1 - m2) if m1 != m2 else (s1 + s2) / 2
    return min(max(cut, s1), s2) if math.isfinite(cut) else (s1 + s2) / 2


def _floats(lists: Sequence[list[arb]]) -> list[torch.Tensor]:
    return [torch.tensor([float(x) for x in g], dtype=torch.float64) for g in lists]


def _ellipse(s0: float, v0: float, alpha: float, beta: float, cosine: float, t: float) -> list[Contact]:
    """Contacts on s = s0 + alpha cos, v = v0 + beta cos(theta - phi): one at the maximum of s + log(v - t) where v
    exceeds t somewhere (concave there, so one support line proves it), else many, dense around the two minima of
    s + log(t - v)."""
    phi = math.acos(max(-1.0, min(1.0, cosine)))

    def rising(theta: float) -> float:
        excess = v0 + beta * math.cos(theta - phi) - t
        return -alpha * math.sin(theta) * excess - beta * math.sin(theta - phi)

    def bisect(low: float, high: float, above: bool) -> float:
        for _ in range(70):
            middle = (low + high) / 2
            up = rising(middle) > 0 or (above and v0 + beta * math.cos(middle - phi) <= t)
            low, high = (middle, high) if up else (low, middle)
        return (low + high) / 2

    if v0 + beta > t:
        angles = [min(max(bisect(0.0, phi, True), 1e-13), math.pi - 1e-13)]
    else:
        fine = [0.5**k for k in range(1, 45)]
        grid = sorted({k * math.pi / 96 for k in range(1, 96)} | set(fine) | {math.pi - f for f in fine} | {phi})
        size = [s0 + alpha * math.cos(g) + math.log(max(t - v0 - beta * math.cos(g - phi), 1e-300)) for g in grid]
        basins = [
            i
            for i in range(len(grid))
            if (i == 0 or size[i] <= size[i - 1]) and (i + 1 == len(grid) or size[i] <= size[i + 1])
        ]
        angles = list(grid)
        for i in basins:
            found = bisect(grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)], False)
            angles += [found, *(found + f * 0.1 for f in fine), *(found - f * 0.1 for f in fine)]
    out = []
    for theta in sorted({g for g in angles if 0 < g < math.pi}, reverse=True):
        slope = beta * math.sin(theta - phi) / (alpha * math.sin(theta))
        # At the optimum the slope is t - v. Much steeper lines are of no use, and float64 misplaces their crossings.
        if len(angles) > 1 and abs(slope) > 1e4 * (abs(t - v0) + beta):
            continue
        out.append((s0 + alpha * math.cos(theta), v0 + beta * math.cos(theta - phi), slope))
    return out


def _zonotope(s0: float, v0: float, terms: Sequence[list[arb]], t: float) -> list[Contact]:
    """Contacts on the edges of the upper chain: one where v exceeds t somewhere, else the edges, thinned far from
    the vertices where s + log(t - v) is least."""
    h, a, u = _floats(terms)
    p, q = h * a.abs(), h * u * torch.where(a >= 0, 1.0, -1.0)
    live = p > 0
    start = v0 + float((h * u.abs())[~live].sum()) - float(q[live].sum())
    p, q = p[live], q[live]
    if len(p) == 0:
        return []
    order = (q / p).argsort(descending=True)
    p, q = p[order], q[order]
    slope = (q / p).tolist()
    s = (s0 - float(p.sum()) + torch.cat([p.new_zeros(1), 2 * p.cumsum(0)])).tolist()
    v = (start + torch.cat([p.new_zeros(1), 2 * q.cumsum(0)])).tolist()
    if max(v) > t:
        # s + log(v - t) is concave where v > t: its slope 1 + m / (v - t) changes sign at the maximum.
        for i in range(len(s)):
            left, right = (slope[i - 1] if i else math.inf), (slope[i] if i < len(slope) else -math.inf)
            if v[i] > t and right <= t - v[i] <= left:
                return [(s[i], v[i], t - v[i])]
            if i < len(slope) and v[i] + right > t >= v[i + 1] + right:
                return [(s[i], v[i], right)]
        return []
    size = [s[i] + math.log(max(t - v[i], 1e-300)) for i in range(len(s))]
    near = sorted(range(len(s)), key=size.__getitem__)[:3]
    step = max(1, len(slope) // 100)
    keep = {0, len(slope) - 1, *range(0, len(slope), step)}
    for i in near:
        keep |= {k for k in range(i - 10, i + 10) if 0 <= k < len(slope)}
    return [(s[k], v[k], slope[k]) for k in sorted(keep)]


def _list_blocks(facts: Facts) -> tuple[list[list[arb]], list[tuple[int, arb_mat, list[arb]]]]:
    """The rotated candidates of the query; per attended key its row, its candidates' keys and their values."""
    problem = facts.problem
    lists = problem.placed.candidates  # type: ignore[union-attr]
    row = problem.query_place
    queries = problem.query_point[None] if row is None else lists[row]
    bias = exact_matrix(problem.head.b_Q) * arb(problem.head.scale)
    rotated = [column(facts.fq * exact_matrix(q) + bias) for q in queries]
    blocks = []
    for j in facts.order:
        z = exact_matrix(lists[j])
        values = [v + facts.v_const for v in column(z * arb_mat([[x] for x in facts.u]))]
        blocks.append((j, z * facts.fk.transpose(), values))
    return rotated, blocks


def list_scores_and_values(problem: HeadProblem) -> tuple[list[arb], list[arb]]:
    """The scores of all candidates for the query's first candidate, and their values."""
    rotated, blocks = _list_blocks(Facts(problem))
    scores = [_score(rotated[0], keys, r) for _, keys, _ in blocks for r in range(keys.nrows())]
    return scores, [v for _, _, values in blocks for v in values]


def _score(q: list[arb], keys: arb_mat, r: int) -> arb:
    return dot(q, [keys[r, c] for c in range(keys.ncols())])


def list_terms(problem: HeadProblem, t: arb) -> list[arb]:
    """F(t), up to a positive factor, for every candidate of the query."""
    rotated, blocks = _list_blocks(Facts(problem))
    row = problem.query_place
    out = []
    for i, q in enumerate(rotated):
        scored = []
        for j, keys, values in blocks:
            pick = [i] if j == problem.query_index and row is not None else range(keys.nrows())
            scored.append([(_score(q, keys, r), values[r] - t) for r in pick])
        shift = max((s for key in scored for s, _ in key), key=float).mid()
        total = arb(0)
        for key in scored:
            terms = [(s - shift).exp() * excess for s, excess in key]
            best = terms[0]
            for term in terms[1:]:
                best = best.max(term)
            total += best
        out.append(total)
    return out

"""Exact worst cases: the query fixed (balls and boxes, polynomial time), or every token one of a finite list.

t is at least max f iff F(t) = sum_j max_{x_j} e^{s_j} (v_j - t) <= 0. F is convex and decreasing, its root is max f,
and Newton's step from t is the value f of the inner maximisers (Dinkelbach), so the iterates rise to the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .bounds.result import BatchBound
from .errors import MethodNotApplicableError
from .problem import HeadProblem
from .reduced import EPS, Reduced
from .regions import Lists

EXACT_NEEDS = (
    "method: 'exact' needs a query that stands still (query_moves=False) or TokenSubstitutions; where the query moves "
    "use method='best' or 'lagrangian', which is exact at small radii"
)

# s, v at the inner maximum of every key, and where it is (an angle, or a position on the zonotope's upper chain).
Inner = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def exact(reduced: Reduced) -> BatchBound:
    """Solve a batch of problems whose query is fixed; upper - value is a few roundings (`reduced.rounding`).

    Raises: MethodNotApplicableError where the query moves.
    """
    if not reduced.query_fixed:
        raise MethodNotApplicableError(EXACT_NEEDS)
    inner, point = _ball(reduced) if reduced.kind == "ball" else _box(reduced)
    centre = (torch.softmax(reduced.s0, -1) * reduced.v0).sum(-1)
    t, good, where = _root(inner, centre, reduced.rounding)
    upper = t + 2 * reduced.rounding
    good &= torch.isfinite(upper)
    reason = [None if ok else "the scalar equation was not solved to rounding" for ok in good.tolist()]
    upper = torch.where(good, upper, math.inf)
    return BatchBound(
        upper, 2 * reduced.rounding, {"t": upper}, (point(where), reduced.b.new_zeros(reduced.size, 0)), reason
    )


def _root(
    inner: Inner, start: torch.Tensor, margin: torch.Tensor, at_start: torch.Tensor | None = None, steps: int = 400
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raise t to the root: t, whether t + 2 margin was seen to be a bound, and where the best value is attained.

    Newton's steps shrink to 1 / (range of scores) on saturated heads: bisection helps there. And where a key of huge
    weight has v = t to rounding, a step rounds to nothing below the root: so a stall only counts if the step from
    t + 2 margin comes back by at least `margin`. `at_start` is where `start` is attained, if an inner point does.
    """
    t, s, v, where = start, *inner(start)
    best, best_where = (_weighted(s, v), where) if at_start is None else (start, at_start)
    high: torch.Tensor | None = None
    done = torch.zeros_like(t, dtype=torch.bool)

    def look(at: torch.Tensor) -> torch.Tensor:
        nonlocal best, best_where
        s, v, where = inner(at)
        reached = _weighted(s, v)
        better = reached > best
        best = torch.where(better, reached, best)
        best_where = torch.where(better[:, None], where, best_where)
        return reached

    for step in range(steps):
        rising = look(t)
        still = ~(rising > t)
        t = torch.where(done, t, torch.maximum(t, rising))
        if bool((still & ~done).any()):
            upper = t + 2 * margin
            reached = look(upper)
            done = done | (still & (reached <= upper - margin))
            t = torch.where(still & ~done, torch.maximum(t + margin, reached), t)
        if bool((done | ~torch.isfinite(t)).all()):
            break
        if step >= 8:
            if high is None:
                high = _top(inner, t)
            middle = (t + high) / 2
            reached = look(middle)
            # reached > middle: the root is above; else middle is an upper bound. `reached` is attained either way.
            high = torch.where(reached > middle, high, middle)
            t = torch.where(done, t, torch.maximum(t, reached))
    return t, done, best_where


def _top(inner: Inner, t: torch.Tensor) -> torch.Tensor:
    """An upper bound of the root: doubling steps up from t until F is negative."""
    step = (t.abs() + 1.0) * 1e-3
    high = t + step
    for _ in range(200):
        above = _weighted(*inner(high)[:2]) > high
        if not bool(above.any()):
            break
        step = torch.where(above, step * 2, step)
        high = torch.where(above, high + step, high)
    return high


def _weighted(s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """sum_j softmax(s)_j v_j."""
    return (torch.softmax(s, -1) * v).sum(-1)


def _best_signed(log_size: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """Index on the last axis of the largest of +-exp(log_size), computed without leaving the logarithms."""
    top = torch.where(positive, log_size, -math.inf).argmax(-1)
    low = torch.where(positive, math.inf, log_size).argmin(-1)
    return torch.where(positive.any(-1), top, low)


def _bisect(
    low: torch.Tensor, high: torch.Tensor, up: Callable[[torch.Tensor], torch.Tensor], steps: int = 40
) -> torch.Tensor:
    """The point of [low, high] where `up` turns false. An error of 1e-12 in it is one of 1e-24 in the maximum."""
    for _ in range(steps):
        middle = (low + high) / 2
        right = up(middle)
        low, high = torch.where(right, middle, low), torch.where(right, high, middle)
    return (low + high) / 2


def _ball(reduced: Reduced) -> tuple[Inner, Callable[[torch.Tensor], torch.Tensor]]:
    """Inner maxima on the ellipse s = s0 + alpha cos(theta), v = v0 + beta cos(theta - phi), 0 <= phi <= pi.

    The maximum of e^s (v - t) lies on the boundary of the disc and on its upper arc. Where some v exceeds t, the log
    is concave in cos(theta) and the maximum lies in [0, phi]: bisection on the derivative's sign. Where none does,
    it lies in [phi, pi] and there may be two local maxima: both are refined and compared.
    """
    size_a = torch.linalg.vector_norm(reduced.a, dim=-1)
    size_u = torch.linalg.vector_norm(reduced.u, dim=-1)
    alpha, beta = reduced.key_radius * size_a[:, None], reduced.key_radius * size_u[:, None]
    along = reduced.u[:, 0]  # the first coordinate runs along a
    across = reduced.u[:, 1]
    phi = torch.where(size_u > 0, torch.atan2(across.abs(), torch.where(size_u > 0, along, 1.0)), 0.0)
    phi = torch.where(size_a > 0, phi, math.pi / 2)[:, None].expand_as(alpha)
    turn = torch.where(across < 0, -1.0, 1.0)

    s0, v0 = reduced.s0, reduced.v0

    def at(theta: torch.Tensor, pick: Any = ...) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and values at angles, of all keys (B, n) or some; a further last axis holds several angles."""
        terms = [g[pick] for g in (s0, v0, alpha, beta, phi)]
        s, v, a, b, f = (g.unsqueeze(-1) if theta.dim() > g.dim() else g for g in terms)
        return s + a * torch.cos(theta), v + b * torch.cos(theta - f)

    def rising(theta: torch.Tensor, t: torch.Tensor, pick: Any = ...) -> torch.Tensor:
        """d/dtheta e^s (v - t), up to a positive factor."""
        excess = v0[pick] + beta[pick] * torch.cos(theta - phi[pick]) - t
        return -alpha[pick] * torch.sin(theta) * excess - beta[pick] * torch.sin(theta - phi[pick])

    # Where some value exceeds t: bisection on [0, phi].
    def above(t: torch.Tensor) -> torch.Tensor:
        def climb(theta: torch.Tensor) -> torch.Tensor:
            excess = v0 + beta * torch.cos(theta - phi) - t
            return (excess <= 0) | (rising(theta, t) > 0)

        theta = _bisect(torch.zeros_like(phi), phi, climb)
        # The end phi = argmax v is tried beside: there v - t may be a rounding above 0.
        s, v = at(torch.stack([theta, phi], -1))
        excess = v - t[..., None]
        best = _best_signed(s + torch.log(excess.abs()), excess > 0)
        return torch.where(best == 0, theta, phi)

    # Where none does: minimise s + log(t - v) on [phi, pi], from the two best local minima of a grid that is fine
    # at both ends, where large scores make narrow basins.
    uniform = torch.linspace(0, 1, 33, dtype=torch.float64, device=alpha.device)
    fine = 2.0 ** -torch.arange(5.5, 30.0, 1.5, dtype=torch.float64, device=alpha.device)
    grid = torch.unique(torch.cat([uniform, fine, 1 - fine]))

    def below(t: torch.Tensor, pick: torch.Tensor) -> torch.Tensor:
        nodes = phi[pick][:, None] + (math.pi - phi[pick])[:, None] * grid  # (picked, nodes)

        def log_size(theta: torch.Tensor) -> torch.Tensor:
            s, v = at(theta, pick)
            return s + torch.log((t[:, None] - v).clamp_min(0.0))

        size = log_size(nodes)
        edge = torch.full_like(size[:, :1], math.inf)
        left, right = torch.cat([edge, size[:, :-1]], -1), torch.cat([size[:, 1:], edge], -1)
        basins = torch.where((size <= left) & (size <= right), size, math.inf).topk(2, dim=-1, largest=False).indices
        found = [nodes.gather(-1, basins)]
        for which in range(2):
            index = basins[:, which : which + 1]
            low = nodes.gather(-1, (index - 1).clamp_min(0)).squeeze(-1)
            high = nodes.gather(-1, (index + 1).clamp_max(len(grid) - 1)).squeeze(-1)
            found.append(_bisect(low, high, lambda theta: rising(theta, t, pick) > 0)[:, None])
        candidates = torch.cat(found, -1)
        return candidates.gather(-1, log_size(candidates).argmin(-1, keepdim=True)).squeeze(-1)

    def inner(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        t = t[:, None].expand_as(phi)
        theta = above(t)
        pick = v0 + beta <= t
        if bool(pick.any()):
            theta = theta.masked_scatter(pick, below(t[pick], pick))
        s, v = at(theta)
        return s, v, theta

    def point(theta: torch.Tensor) -> torch.Tensor:
        # In the plane (a, u) the first axis is a's direction; without a it carries nothing and u is the second.
        plane = torch.stack([torch.cos(theta), turn[:, None] * torch.sin(theta)], -1)
        no_a = (size_a == 0)[:, None, None]
        to_u = reduced.u / size_u.clamp_min(1e-300)[:, None]
        return torch.where(no_a, to_u[:, None], plane) * reduced.key_radius[..., None]

    return inner, point


def _box(reduced: Reduced) -> tuple[Inner, Callable[[torch.Tensor], torch.Tensor]]:
    """Inner maxima on the upper chain of the zonotope {(s, v)}: vertices, and edges that fall in v.

    Generators (p_k, q_k) = h_k (a_k, u_k), turned so that p_k >= 0, sorted by falling slope q_k / p_k = u_k / a_k: the
    order is the same for every key. On an edge of slope m the maximum of e^s (v - t) is inside iff m < 0 and there
    v - t = -m.
    """
    a, u = reduced.a, reduced.u
    sign = torch.where((a > 0) | ((a == 0) & (u >= 0)), 1.0, -1.0)
    p, q = a * sign, u * sign
    slope = torch.where(p > 0, q / torch.where(p > 0, p, 1.0), torch.where(q > 0, math.inf, 0.0))
    slope, order = slope.sort(dim=-1, descending=True)
    half = reduced.key_radius.gather(-1, order[:, None].expand_as(reduced.key_radius))
    p, q = (2 * half * g.gather(-1, order)[:, None] for g in (p, q))  # (B, n, d) edges of the chain
    start_s, start_v = reduced.s0 - p.sum(-1) / 2, reduced.v0 - q.sum(-1) / 2
    chain_s = torch.cat([start_s[..., None], start_s[..., None] + p.cumsum(-1)], -1)  # (B, n, d + 1)
    chain_v = torch.cat([start_v[..., None], start_v[..., None] + q.cumsum(-1)], -1)
    count = a.shape[1]

    def inner(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        excess = chain_v - t[:, None, None]
        here, there = excess[..., :-1], excess[..., 1:]
        falling = slope[:, None] < 0
        inside = falling & (here > -slope[:, None]) & (there < -slope[:, None])
        part = torch.where(inside, (here + slope[:, None]) / (here - there).clamp_min(1e-300), 0.0)
        edge_s = chain_s[..., :-1] + part * p
        # Off the inside edges `part` is 0 and the edge repeats its first vertex.
        edge_v = torch.where(inside, t[:, None, None] - slope[:, None].clamp(min=-1e300), chain_v[..., :-1])
        s, v = torch.cat([chain_s, edge_s], -1), torch.cat([chain_v, edge_v], -1)
        distance = v - t[:, None, None]
        best = _best_signed(s + torch.log(distance.abs()), distance > 0)[..., None]
        position = torch.cat(
            [
                torch.arange(count + 1.0, device=t.device).expand_as(chain_s).double(),
                torch.arange(0.0, count, device=t.device).double() + part,
            ],
            -1,
        )
        return tuple(g.gather(-1, best).squeeze(-1) for g in (s, v, position))  # type: ignore[return-value]

    def point(position: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(float(count), dtype=torch.float64, device=position.device)
        turned = (2 * (position[..., None] - steps) - 1).clamp(-1, 1)
        x = torch.zeros_like(reduced.key_radius).scatter(-1, order[:, None].expand_as(half), turned)
        return x * sign[:, None] * reduced.key_radius

    return inner, point


@dataclass(frozen=True)
class ListMaximum:
    """Exact maximum over substitutions: the sound upper end, its rounding margin, and the tokens that attain it."""

    upper: float
    inflation: float
    tokens: torch.Tensor
    query: torch.Tensor | None


def exact_lists(problem: HeadProblem) -> ListMaximum:
    """Solve a problem over TokenSubstitutions: for every candidate of the query one fixed-query root, all in a batch.

    Cost: (candidates of the query) x (candidates of all keys), not the product of the lists.
    """
    placed, head = problem.placed, problem.head
    if not isinstance(placed, Lists):
        raise MethodNotApplicableError("region: expected TokenSubstitutions, got a ball or box; use exact()")
    lists, row, order = placed.candidates, problem.query_place, problem.key_order
    queries = problem.query_point[None] if row is None else lists[row]
    u, const = head.value_direction(problem.readout)
    width = max(lists[j].shape[0] for j in order)
    m = queries.shape[0]
    scores = u.new_full((m, len(order), width), -math.inf)
    values = u.new_zeros(len(order), width)
    tied = problem.query_index if row is not None else None
    for place, j in enumerate(order):
        size = lists[j].shape[0]
        block = head.scores(lists[j][None].expand(m, -1, -1), queries)
        if j == tied:  # the query's own token is one choice, not two
            block = block.masked_fill(~torch.eye(m, dtype=torch.bool, device=u.device), -math.inf)
        scores[:, place, :size] = block
        values[place, :size] = lists[j] @ u + const
    there = scores > -math.inf

    def inner(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        excess = values - t[:, None, None]
        log_size = scores + torch.log(excess.abs())
        positive = there & (excess > 0)
        best = _best_signed(torch.where(there, log_size, torch.where(positive, -math.inf, math.inf)), positive)[
            ..., None
        ]
        return (
            scores.gather(-1, best).squeeze(-1),
            values.expand_as(scores).gather(-1, best).squeeze(-1),
            best.squeeze(-1),
        )

    first = there.double().argmax(-1, keepdim=True)
    start = _weighted(scores.gather(-1, first).squeeze(-1), values.expand_as(scores).gather(-1, first).squeeze(-1))
    used = values[there.any(0)]
    unit = (16 + 3 * math.sqrt(head.d + head.d_head + len(order))) * EPS
    largest_token = max(float(torch.linalg.vector_norm(lists[j], dim=-1).max()) for j in order)
    k_size = float(torch.linalg.vector_norm(head.W_K)) * largest_token
    q = queries @ head.W_Q.T + head.b_Q
    q_size = float(torch.linalg.vector_norm(head.W_Q)) * float(torch.linalg.vector_norm(queries, dim=-1).max())
    q_norm = float(torch.linalg.vector_norm(q, dim=-1).max()) + q_size / math.sqrt(head.d_head)
    score_error = unit * abs(head.scale) * q_norm * k_size
    value_error = unit * (float(torch.linalg.vector_norm(u)) * largest_token + float(used.abs().max()))
    margin = score_error * float(used.max() - used.min()) + value_error
    t, good, choice = _root(inner, start, start.new_full((m,), margin), first.squeeze(-1))
    solved = bool(good.all()) and bool(torch.isfinite(t).all())
    upper = float(t.max()) + 2 * margin if solved else math.inf
    chosen = (g.gather(-1, choice[..., None]).squeeze(-1) for g in (scores, values.expand_as(scores)))
    attained = _weighted(*chosen)
    top = int(attained.argmax())
    points = [c[0] for c in lists]
    for place, j in enumerate(order):
        points[j] = lists[j][int(choice[top, place])]
    if row is not None:
        points[row] = queries[top]
    tokens = torch.stack(points)
    return ListMaximum(upper, 2 * margin, tokens[: problem.n], tokens[problem.n] if len(lists) > problem.n else None)

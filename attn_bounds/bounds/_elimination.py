"""Balls, keys eliminated exactly: what is left is one quadratic in the query alone.

For a query displaced by eta from the centre, key j contributes p_j e^{beta_j.eta} G_j(alpha + zeta), zeta = M^T eta,

    G_j(d) = max over |x* + delta| <= R of e^{d.delta} (V_j + u.delta),      x* the maximiser at zeta = 0

Every delta has |delta|^2 <= 2 R s with s = -n.delta >= 0 the depth below x* = R n. Hence, for |zeta| <= Z,

    V > 0:   log(V + u.delta) <= log V + u.delta / V, so G <= V exp(R |zeta|^2 / (2 a)),  a = |alpha + u / V|
    V <= 0:  where e^{alpha.delta} (V + u.delta) <= V - c s, G <= V + V^2 R |zeta|^2 / (2 c e^{-2 R Z})

and e^{beta.eta} <= 1 + beta.eta + phi(top) (beta.eta)^2 on its range. No range of a key's own motion enters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..reduced import Reduced
from ._majorant import Centre, Majorant, phi, radii, split

ROUNDING = 1e-14  # of a sum, relative to its terms: a rate must not be positive by cancellation alone
FIRST_ROUNDS = 12  # of the ascent, for all; the rest only for those that still climb


@dataclass(frozen=True)
class QueryRegion:
    """The query's ball, cut by slabs low <= e.y <= high with unit directions e."""

    radius: torch.Tensor  # (B, 1)
    directions: torch.Tensor  # (B, L, k)
    low: torch.Tensor  # (B, L)
    high: torch.Tensor  # (B, L)

    @classmethod
    def whole(cls, reduced: Reduced) -> QueryRegion:
        """The ball without cuts."""
        none = reduced.b.new_zeros(reduced.size, 0)
        return cls(radii(reduced)[1], reduced.b.new_zeros(reduced.size, 0, reduced.b.shape[2]), none, none)

    def __getitem__(self, rows: torch.Tensor) -> QueryRegion:
        return QueryRegion(self.radius[rows], self.directions[rows], self.low[rows], self.high[rows])

    def top(self, vector: torch.Tensor) -> torch.Tensor:
        """Upper bound of vector.y over the region, for vectors (B, n, k): the best of the ball and of each slab."""
        size = torch.linalg.vector_norm(vector, dim=-1)
        best = size * self.radius
        if not self.low.shape[1]:
            return best
        along = vector @ self.directions.transpose(1, 2)  # (B, n, L)
        across = ((size * size)[..., None] * (1 + 1e-14) - along * along).clamp_min(0).sqrt()
        R = self.radius[..., None]
        s = R * along / size.clamp_min(1e-300)[..., None]
        s = torch.minimum(torch.maximum(s, self.low[:, None]), self.high[:, None])
        return torch.minimum(best, (along * s + across * (R * R - s * s).clamp_min(0).sqrt()).amin(-1))

    def around(self, vector: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Range of vector.(y - at)."""
        here = (vector * at[:, None]).sum(-1)
        return -self.top(-vector) - here, self.top(vector) - here


class Circles:
    """Each key's ball seen in the plane (d, u), d = a + M^T y: there its maximisers lie on a circle."""

    def __init__(self, reduced: Reduced, y: torch.Tensor) -> None:
        K = reduced.n - reduced.own
        self.qy = torch.einsum("bhk,bk->bh", reduced.fq, y)
        d = reduced.a + torch.einsum("bhm,bh->bm", reduced.fk, self.qy)
        self.e1 = _direction(d)
        rest = reduced.u - self.e1 * (self.e1 * reduced.u).sum(-1, keepdim=True)
        self.e2 = _direction(rest - self.e1 * (self.e1 * rest).sum(-1, keepdim=True))
        self.R = reduced.key_radius
        self.v0 = reduced.v0[:, :K]
        pairs = ((d, self.e1), (reduced.u, self.e1), (reduced.u, self.e2))
        self.d1, self.u1, self.u2 = ((v * e).sum(-1)[:, None] * self.R for v, e in pairs)

    def best(self, t: torch.Tensor, grid: int = 32, steps: int = 8) -> torch.Tensor:
        """Angles (B, K) of the global maximisers of e^{d.x} (v0 + u.x - t), by a grid and Newton's method."""
        gap = self.v0 - t[:, None]
        angles = torch.arange(grid, dtype=gap.dtype, device=gap.device) * (2 * torch.pi / grid)
        cos, sin = torch.cos(angles), torch.sin(angles)
        values = torch.exp(self.d1[..., None] * (cos - 1)) * (
            gap[..., None] + self.u1[..., None] * cos + self.u2[..., None] * sin
        )
        start = angles[values.argmax(-1)]
        angle = self.refine(start, gap, steps, torch.pi / grid)
        return torch.where(self._value(angle, gap) >= self._value(start, gap), angle, start)

    def refine(self, angle: torch.Tensor, gap: torch.Tensor, steps: int, most: float) -> torch.Tensor:
        """Newton steps on V d.x' + u.x' = 0, which is the derivative of the logarithm times V."""
        for _ in range(steps):
            cos, sin = torch.cos(angle), torch.sin(angle)
            value = self.u1 * cos + self.u2 * sin
            V = gap + value
            turn_u, turn_d = self.u2 * cos - self.u1 * sin, -self.d1 * sin
            slope = V * turn_d + turn_u
            curve = turn_u * turn_d - V * self.d1 * cos - value
            step = torch.where(curve < 0, -slope / curve.clamp_max(-1e-300), torch.sign(slope) * most)
            angle = angle + step.clamp(-most, most)
        return angle

    def _value(self, angle: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.exp(self.d1 * (cos - 1)) * (gap + self.u1 * cos + self.u2 * sin)

    def points(self, angle: torch.Tensor) -> torch.Tensor:
        """The displacements (B, K, m)."""
        first, second = self.R * torch.cos(angle), self.R * torch.sin(angle)
        return first[..., None] * self.e1[:, None] + second[..., None] * self.e2[:, None]


def key_maximisers(reduced: Reduced, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Global maximisers x (B, K, m) of e^{d.x} (v0 + u.x - t) over each key's ball."""
    circles = Circles(reduced, y)
    return circles.points(circles.best(t))


def climb(reduced: Reduced, y: torch.Tensor, rounds: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximise f from y (B, k): keys at their exact maximisers, the query stepping to where its gradient points.

    Returns x (B, K, m), y (B, k) and f (B,). A round is linear in n, and free of the keys' dimension.
    """
    y, t, more = _climb(reduced, y, reduced.nominal, min(rounds, FIRST_ROUNDS))
    rows = more.nonzero()[:, 0]
    if len(rows) and rounds > FIRST_ROUNDS:
        better, t_better, _ = _climb(reduced[rows], y[rows], t[rows], rounds - FIRST_ROUNDS)
        y, t = y.index_copy(0, rows, better), t.index_copy(0, rows, t_better)
    circles = Circles(reduced, y)
    x = circles.points(circles.best(t))
    f = reduced.value(x[:, None], y[:, None])[:, 0]
    return x, y, f


def _climb(
    reduced: Reduced, y: torch.Tensor, t: torch.Tensor, rounds: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best y seen, f there, and whether it was still improving; t (B,) is a value known to be attained."""
    K = reduced.n - reduced.own
    R = reduced.query_radius[:, None]
    best_f = torch.full_like(t, -torch.inf)
    gained = torch.ones_like(t, dtype=torch.bool)
    best_y, gradient = y, torch.zeros_like(y)
    pace = torch.ones_like(t)
    angle = torch.zeros_like(reduced.key_radius)
    for turn in range(rounds):
        circles = Circles(reduced, y)
        gap = circles.v0 - t[:, None]
        angle = circles.best(t) if turn == 0 else circles.refine(angle, gap, 2, 0.2)
        cos, sin = torch.cos(angle), torch.sin(angle)
        s = reduced.s0 + (reduced.b @ y[..., None])[..., 0]
        keys = s[:, :K] + circles.d1 * cos
        values = circles.v0 + circles.u1 * cos + circles.u2 * sin
        if reduced.own:
            ky = torch.einsum("bhk,bk->bh", reduced.fk, y)
            keys = torch.cat([keys, (s[:, -1] + (circles.qy * ky).sum(-1))[:, None]], 1)
            values = torch.cat([values, (reduced.v0[:, -1] + (reduced.own_u * y).sum(-1))[:, None]], 1)
        p = torch.softmax(keys, -1)
        f = (p * values).sum(-1)
        weight = p * (values - f[:, None])
        moved = weight[:, :K] * circles.R
        mean = (moved * cos).sum(1)[:, None] * circles.e1 + (moved * sin).sum(1)[:, None] * circles.e2
        g = torch.einsum("bn,bnk->bk", weight, reduced.b)
        head = torch.einsum("bhm,bm->bh", reduced.fk, mean)
        if reduced.own:
            head = head + weight[:, -1:] * ky
            g = g + torch.einsum("bhm,bh->bm", reduced.fk, weight[:, -1:] * circles.qy) + p[:, -1:] * reduced.own_u
        g = g + torch.einsum("bhk,bh->bk", reduced.fq, head)
        better = f > best_f
        gained = (f - best_f) > 1e-13 * (f - reduced.nominal).abs()
        best_f, best_y = torch.where(better, f, best_f), torch.where(better[:, None], y, best_y)
        gradient = torch.where(better[:, None], g, gradient)
        pace = torch.where(better, (2 * pace).clamp(max=1.0), pace / 4)
        t = torch.maximum(t, best_f)
        if turn > 4 and not bool((gained | (pace > 1e-3)).any()):
            break
        size = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        target = torch.where(size > 0, R * gradient / size.clamp_min(1e-300), best_y)
        y = best_y + pace[:, None] * (target - best_y)
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        y = torch.where(pace[:, None] < 1, y * torch.where(length > 0.5 * R, R / length.clamp_min(1e-300), 1.0), y)
        if bool(((y - best_y).abs() <= 1e-15 * R).all()):
            break
    return best_y, best_f, gained | (pace < 1)


def _direction(v: torch.Tensor) -> torch.Tensor:
    size = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return torch.where(size > 0, v / size.clamp_min(1e-300), torch.zeros_like(v))


def eliminated(centre: Centre, shift: torch.Tensor, region: QueryRegion) -> tuple[Majorant, torch.Tensor]:
    """Majorant in the query alone, and a flag (B,) that is False where some key's elimination failed."""
    red = centre.reduced
    K = red.n - red.own
    p, V, y = centre.p, centre.V, centre.y
    beta = centre.beta - shift[:, None]
    low, high = region.around(beta[:, :K], y)
    rise = torch.where(V[:, :K] > 0, high, low)
    ry = region.radius
    far = ry[:, 0] + torch.linalg.vector_norm(y, dim=-1)
    Z = (red.norm * far)[:, None]
    k, cost = _curvature(centre, Z)
    good = torch.isfinite(k).all(1) & torch.isfinite(cost).all(1)
    k, cost = torch.nan_to_num(k, 0, 0, 0), torch.nan_to_num(cost, 0, 0, 0)
    pk, Vk = p[:, :K], V[:, :K]
    T = (beta[:, :K] * (2 * pk * Vk * phi(rise))[..., None]).transpose(1, 2) @ beta[:, :K]
    lift = (pk * k * torch.exp(high)).sum(1)
    mk = red.fk @ red.fk.transpose(1, 2)
    T = T + lift[:, None, None] * (red.fq.transpose(1, 2) @ mk @ red.fq)
    q0 = (p * V).sum(1) + (pk * cost * torch.exp(high)).sum(1)
    gq = torch.einsum("bn,bnk->bk", p * V, beta)
    if red.own:
        gq = gq + p[:, -1:] * red.own_u
        T_own, charge, paid = _own(centre, beta[:, -1], region)
        T, gq, q0 = T + T_own, gq - charge, q0 + paid
    empty = T.new_zeros(red.size, 0, red.u.shape[1])
    none = T.new_zeros(red.size, 0)
    maj = Majorant(
        q0=q0,
        g=empty,
        gq=gq,
        plane=torch.stack([centre.alpha, red.u], 1),
        block=T.new_zeros(red.size, 0, 2, 2),
        rest=none,
        couple=T.new_zeros(red.size, 0, 2),
        c=none,
        beta=T.new_zeros(red.size, 0, T.shape[1]),
        features=None,
        T=T,
        spread=T.new_zeros(red.size, 1),
        fq=red.fq,
        fk=red.fk,
        key_radius=T.new_zeros(red.size, 0, 1),
        query_radius=ry,
        at=(empty, torch.where(ry > 0, y / ry.clamp_min(1e-300), torch.zeros_like(y))),
    )
    return maj, good


def _curvature(centre: Centre, Z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and cost (B, K) with G_j(alpha + zeta) <= V + cost + k |zeta|^2 / 2 for |zeta| <= Z (B, 1)."""
    red = centre.reduced
    K = red.n - red.own
    R, V, x = red.key_radius, centre.V[:, :K], centre.x
    alpha, u = centre.alpha[:, None], red.u[:, None]
    # V > 0
    safe = torch.where(V > 0, V, torch.ones_like(V))
    steep = alpha + u / safe[..., None]
    a = torch.linalg.vector_norm(steep, dim=-1)
    a_safe = a.clamp_min(1e-300)
    off = torch.linalg.vector_norm(R[..., None] * steep / a_safe[..., None] - x, dim=-1)
    eps = (R * a - (steep * x).sum(-1)).clamp_min(0) + off * Z
    top = R * Z * Z / (2 * a_safe)
    growth = torch.where(top > 1e-8, torch.expm1(top) / top.clamp_min(1e-300), 1 + top)
    k_up, cost_up = V * torch.exp(eps) * growth * R / a_safe, V * torch.expm1(eps)
    # V <= 0
    c, left = _depth_rate(centre, R, V, x, alpha, u)
    decay = c * torch.exp(-2 * R * Z)
    k_down = V * V * R / decay
    cost_down = left * left * R * 32 / c.clamp_min(1e-300)
    still = (R == 0) | ((V == 0) & (c >= 0))
    k_down = torch.where(still, torch.zeros_like(k_down), torch.where(c > 0, k_down, torch.full_like(c, torch.inf)))
    cost_down = torch.where(still & (left * R == 0), torch.zeros_like(c), cost_down)
    k = torch.where(V > 0, torch.where(R == 0, torch.zeros_like(k_up), k_up), k_down)
    return k, torch.where(V > 0, cost_up, cost_down)


def _depth_rate(centre, R, V, x, alpha, u):  # type: ignore[no-untyped-def]
    """c (B, K) with e^{alpha.delta} (V + u.delta) <= V + (rounding) - c s for V <= 0, and the tangential residual."""
    normal = torch.where(R[..., None] > 0, x / R.clamp_min(1e-300)[..., None], torch.zeros_like(x))
    absV = -V
    a1, u1 = (alpha * normal).sum(-1), (u * normal).sum(-1)
    at = alpha - a1[..., None] * normal
    ut = u - u1[..., None] * normal
    a_t = torch.linalg.vector_norm(at, dim=-1)
    size = R * torch.linalg.vector_norm(alpha.expand_as(x), dim=-1)
    here = (alpha * x).sum(-1)
    x_low, x_high = -size - here, size - here
    left = torch.linalg.vector_norm(ut - absV[..., None] * at, dim=-1) * torch.exp(x_high)
    y_high = R * torch.linalg.vector_norm(u.expand_as(x), dim=-1) - (u * x).sum(-1)
    least = absV - y_high
    kappa = least * phi(torch.where(least >= 0, x_low, x_high))
    A = -a1 * u1 + kappa * a1 * a1
    B = a_t * (a1 * absV + u1 - 2 * kappa * a1)
    D = (a_t * a_t * (kappa - absV)).clamp_max(0)
    first = u1 - absV * a1 + R * (A + D) - R * torch.sqrt((A - D) ** 2 + B * B)
    first = first - ROUNDING * (u1.abs() + absV * a1.abs() + R * (A.abs() + D.abs() + B.abs()))
    w = a_t * R
    b_max = 1 - torch.exp(w) * (1 - w)
    curve = torch.where(w > 1e-4, b_max / (w * w).clamp_min(1e-300), 0.5 + w)
    parts = (
        u1.clamp_min(0) * torch.exp(x_low) + u1.clamp_max(0) * torch.exp(x_high),
        -2 * R * absV * curve * a_t * a_t,
        -absV * torch.where(a1 > 0, a1, a1 * (1 - b_max).clamp_min(0)),
    )
    second = sum(parts) - ROUNDING * sum(part.abs() for part in parts)
    second = torch.where((a1 < 0) & (b_max > 1), torch.full_like(second, -torch.inf), second)
    c = torch.maximum(first, second)
    hard = (V <= 0) & (R > 0) & (c < 0.5 * (u1 - absV * a1))
    if bool(hard.any()):
        full = R.expand_as(V)
        finer = _sliced(full[hard], absV[hard], a1[hard], u1[hard], a_t[hard])
        c = c.masked_scatter(hard, torch.maximum(c[hard], finer))
    return c * (1 - 1 / 64), left


def _sliced(R, absV, a1, u1, a_t, count: int = 96, first: float = 0.01):  # type: ignore[no-untyped-def]
    """The same c, (N,), from slices of the depth s; for a fixed s the least value lies at an end of the chord.

    With w = alpha_t . delta in +-a_t sqrt(s (2R - s)),  N = e^{w - a1 s} (|V| + u1 s - |V| w) >= |V| + c s.
    """
    ends = first ** torch.linspace(1, 0, count + 1, dtype=R.dtype, device=R.device) * 2 * R[:, None]
    s0, s1 = ends[:, :-1], ends[:, 1:]
    V, a1, u1, a_t, R = absV[:, None], a1[:, None], u1[:, None], a_t[:, None], R[:, None]
    chord = [s * (2 * R - s).clamp_min(0) for s in (s0, s1)]
    top = torch.where((s0 <= R) & (s1 >= R), R * R, torch.maximum(chord[0], chord[1]))
    w0, w1 = a_t * torch.minimum(chord[0], chord[1]).sqrt(), a_t * top.sqrt() * (1 + 1e-12)
    W = V + torch.minimum(u1 * s0, u1 * s1)
    ends_of_chord = [torch.exp(w) * (W - V * w) for w in (w0, w1, -w0, -w1)]
    least = torch.stack(ends_of_chord).amin(0)
    decay = torch.stack([torch.exp(-a1 * s) for s in (s0, s1)])
    N = (least * decay).amin(0) * (1 - 1e-13) - 1e-13 * V
    rate = torch.where(N >= V, (N - V) / s1, (N - V) / s0).amin(1)
    s = ends[:, :1]
    reach_x = a1.abs() * s + a_t * (2 * R * s).sqrt()
    reach_y = u1.abs() * s + V * a_t * (2 * R * s).sqrt()
    least_V = V - reach_y
    kappa = least_V * phi(torch.where(least_V >= 0, -reach_x, reach_x))
    A = (-a1 * u1 + kappa * a1 * a1).clamp_max(0)
    B = (a_t * (a1 * V + u1 - 2 * kappa * a1)).abs()
    D = (a_t * a_t * (kappa - V)).clamp_max(0)
    near = u1 - V * a1 + 2 * R * D + A * s - B * (2 * R * s).sqrt()
    return torch.minimum(rate, near[:, 0])


def _own(centre: Centre, beta: torch.Tensor, region: QueryRegion) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hessian (B, k, k), charge (B, k) and cost (B,) of the own key p e^x (V + u.eta), x = beta.eta + eta.M eta."""
    red, y = centre.reduced, centre.y
    p, V = centre.p[:, -1], centre.V[:, -1]
    u, ry = red.own_u, region.radius
    values, linear = region.around(u[:, None], y), region.around(beta[:, None], y)
    y_high, x_low, x_high = values[1][:, 0], linear[0][:, 0], linear[1][:, 0]
    far = ry[:, 0] + torch.linalg.vector_norm(y, dim=-1)
    most = torch.maximum(red.own_high, -red.own_low) * far * far
    high = V + y_high
    kappa = high * phi(torch.where(high > 0, x_high + most, x_low - most))
    e = u + 2 * kappa[:, None] * beta
    along, left, slack = split(e, y, ry)
    weight = p * most
    lo, hi = region.around(left[:, None], y)
    lo, hi = lo[:, 0] - kappa.abs() * most, hi[:, 0] + kappa.abs() * most
    c, spare = V + (lo + hi) / 2, torch.where(most > 0, (hi - lo) / 2, torch.zeros_like(hi))
    qk = red.fq.transpose(1, 2) @ red.fk * (p * c)[:, None, None]
    cross = p[:, None, None] * beta[:, :, None] * u[:, None]
    sizes = [torch.linalg.matrix_norm(f).clamp_min(1e-300) for f in (red.fq, red.fk)]
    even = (sizes[1] / sizes[0])[:, None, None]
    T = (2 * p * kappa)[:, None, None] * beta[:, :, None] * beta[:, None]
    T = T + cross + cross.transpose(1, 2) + qk + qk.transpose(1, 2)
    T = T + (p * spare)[:, None, None] * (
        even * red.fq.transpose(1, 2) @ red.fq + red.fk.transpose(1, 2) @ red.fk / even
    )
    return T, weight[:, None] * along, weight * slack

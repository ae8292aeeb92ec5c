"""A proved upper bound from any multipliers, however they were found: weak duality done by hand.

For a number t and multipliers of the right signs, the certificate

    P = sum_j p_j e_j (value_j - t)
      + sum_j { lam_j . (1 - w_j^2)                                    the region           (|w_j| <= 1, or entrywise)
              + mu_j (e_j - e^{c_j} (1 + s_j - c_j))                   exp above a tangent
              + nu_j (chord_j(s_j) - e_j)                              exp below its chord on [low_j, high_j]
              + kappa_j (e_j - e^{low_j}) (e^{high_j} - e_j)           and linear terms in e - e^{low}, e^{high} - e
              + e_j (rho(g_j) - g_j . w_j)                             rho the support function of the region; as the
              + (rho(g'_j) - g'_j . w_j) (e_j - 1 - s_j)               next two, also with w_q in place of w_j
              + (rho(g''_j) - g''_j . w_j) (chord_j(s_j) - e_j)
              + eta_j (e_j s_j - (1 + c'_j) e_j + e^{c'_j}) }          e log e above a tangent, e_j s_j = e_j log e_j
      + lam_q . (1 - w_q^2)

(s_j is the score's deviation from the point that the problem is centred at) is at least sum_j p_j e_j (value_j - t)
at every point of the region, since each added term is nonnegative there. Where the bilinear part b_j = d_q^T N_j d_j
of s_j meets e_j or w, it is replaced by its middle value and a remainder: with e^ = (e^{low} + e^{high}) / 2, D =
(e^{high} - e^{low}) / 2 and any r_j > 0,

    e_j b_j <= e^ b_j + D rest,   +-(rho(g) - g . w) b_j <= +-rho(g) b_j + rho(g) rest,
    rest = bend_j (r_j |d_q|^2 + |d_j|^2 / r_j) / 2 >= |b_j|

so P is a quadratic in (d_q, d_j, x_j = e_j - 1), and its maximum over ALL real values is a Schur complement: first d_j
(diagonal and a part of rank two), then x_j (scalar), then d_q. With eps that maximum and Z = sum_j p_j e_j in
[Zmin, Zmax],

    f(w) = t + (sum_j p_j e_j (value_j - t)) / Z <= t + eps / Zmin   (eps > 0),   t + eps / Zmax   (eps <= 0).

Nothing here trusts the solver: wrong signs are clipped; lam, kappa and lam_q are raised where the quadratic would not
be negative definite; a residual that is left costs what the maximum says. Multipliers in full coordinates are handled
exactly, so the subspaces that the solver worked in do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..reduced import EPS
from ._centred import Centred, largest_values, support

LIFTS = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
GUARD = 256
GOLDEN = (3 - 5**0.5) / 2
NAMES = (
    "t", "ball_k", "ball_q", "norm_k", "norm_q", "over_k", "under_k", "over_q", "under_q", "ratio", "exp", "exp_at",
    "secant", "square", "entropy", "entropy_at"
)  # fmt: skip
STEPS = (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-10)
WIDEST = 200.0  # score deviations beyond e^200 are left to other methods


def recover(c: Centred, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Upper bounds (B,) of f from multipliers, the part of them (B,) that pays for rounding, and the projected
    multipliers.

    Infinite where the multipliers are not finite or the range of a score is too wide. The bound is the best over a few
    amounts by which the diagonal is lifted off singularity.
    """
    best = _Best(c)
    for lift in LIFTS if c.wq.shape[1] <= 128 else LIFTS[::3]:  # wide boxes: an eigendecomposition a try
        best.offer(project(c, given, lift))
    first, reach = best.kept["t"], best.upper - best.kept["t"]
    reach = torch.where(torch.isfinite(reach), reach, torch.zeros_like(reach))
    if bool((reach > 1e-6 * c.movement).any()):
        for fraction in STEPS:  # t + eps / Zmin charges a residual at the worst Z; a larger t need not
            best.offer({**best.kept, "t": torch.maximum(first + reach * fraction, best.kept["t"])})
    best.offer_mean()
    return best.upper, best.error, best.kept


class _Best:
    """The least bound offered so far, problem by problem."""

    def __init__(self, c: Centred) -> None:
        self.c = c
        self.upper = torch.full_like(c.f, torch.inf)
        self.error = torch.zeros_like(c.f)
        self.kept: dict[str, torch.Tensor] = {}
        self.mean = torch.zeros_like(c.f, dtype=torch.bool)

    def offer(self, y: dict[str, torch.Tensor]) -> None:
        upper, error, y = evaluate(self.c, y)
        better = upper < self.upper
        self.upper, self.error = torch.where(better, upper, self.upper), torch.where(better, error, self.error)
        self.kept = {
            name: torch.where(better.reshape(-1, *(1,) * (value.dim() - 1)), value, self.kept.get(name, value))
            for name, value in y.items()
        }

    def offer_mean(self) -> None:
        """f is a mean of the values, so no larger than the largest of them; offered where the multipliers were
        finite."""
        c = self.c
        top = largest_values(c)
        error = 64 * EPS * (c.v.abs().amax(-1) + support(c, c.u).flatten(1).sum(-1) + support(c, c.own_u))
        upper = top.amax(-1) + error
        self.mean = torch.isfinite(self.upper) & (upper < self.upper)
        self.upper, self.error = torch.where(self.mean, upper, self.upper), torch.where(self.mean, error, self.error)
        self.kept = {**self.kept, "mean": self.mean}


def project(c: Centred, given: dict[str, torch.Tensor], lift: float) -> dict[str, torch.Tensor]:
    """Clip multipliers to their signs and raise lam_j and kappa_j so that each key's quadratic is negative definite."""
    y = {name: torch.nan_to_num(given[name], nan=0.0, posinf=0.0, neginf=0.0) for name in NAMES}
    y["t"] = given["t"]
    y["lift"] = torch.full_like(given["t"], lift)
    if not c.box:  # one multiplier per ball
        y["ball_k"], y["ball_q"] = (
            y[name].clamp_min(0.0).mean(-1, keepdim=True).expand_as(y[name]) if y[name].shape[-1] else y[name]
            for name in ("ball_k", "ball_q")
        )
    for name in ("ball_k", "ball_q", "exp", "secant", "square", "entropy"):
        y[name] = y[name].clamp_min(0.0)
    y["ratio"] = y["ratio"].clamp(1e-6, 1e6)
    y["exp_at"] = torch.minimum(torch.maximum(y["exp_at"], c.low), c.high)
    y["entropy_at"] = torch.minimum(torch.maximum(y["entropy_at"], c.low), c.high)
    unit = c.movement.reshape(-1, 1, 1)
    K = c.keys
    spent = _cubic(c, y)[0]
    step = lift * unit * c.weight_k
    curve = torch.maximum(y["ball_k"] - spent, step)
    tilt = _Tilted(curve, _tilt(c, y), c.alpha)
    curve = curve * torch.maximum(tilt.share * (1 + 1e-9), torch.ones_like(tilt.share)).unsqueeze(-1) + step
    y["ball_k"] = (spent + curve) * (1 + 4 * EPS)
    xl, xu = torch.expm1(c.low), torch.expm1(c.high)
    size = torch.maximum(-xl, xu).clamp_min(1e-9)
    floor = lift * c.movement.unsqueeze(-1) / size**2
    need = torch.zeros_like(y["square"])
    coupling = _coupling(c, y)
    tilt = _Tilted(curve, _tilt(c, y), c.alpha)
    need[:, :K] = (tilt.half(coupling) ** 2).sum(-1) / 4
    y["square"] = torch.maximum(y["square"], need * (1 + 1e-8 + lift) + floor)
    return y


def _cubic(c: Centred, y: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cubic remainder takes from ball_k (B, K, m) and, summed over keys, from ball_q (B, k)."""
    half = (torch.expm1(c.high) - torch.expm1(c.low)) / 2 * (1 + 8 * EPS)
    K = c.keys
    slope = chord(c)[0]
    cost = y["entropy"] * half
    cost = cost + support(c, y["over_q"]) + slope * support(c, y["under_q"])
    cost[:, :K] += support(c, y["over_k"]) + slope[:, :K] * support(c, y["under_k"])
    cost = cost * c.bend * (1 + 8 * EPS)
    from_k = (cost / y["ratio"] / 2)[:, :K, None] * c.weight_k
    share = (cost * y["ratio"] / 2)[:, :K].sum(-1) + (cost[:, -1] if c.own else 0.0)
    return from_k, share.unsqueeze(-1) * c.weight_q


def _coupling(c: Centred, y: dict[str, torch.Tensor]) -> torch.Tensor:
    """Coefficient (B, K, m) of x_j d_j."""
    K = c.keys
    return c.p[:, :K, None] * c.u - y["norm_k"] + y["entropy"][:, :K, None] * c.alpha - y["over_k"] + y["under_k"]


def _tilt(c: Centred, y: dict[str, torch.Tensor]) -> torch.Tensor:
    """The vector (B, K, m) of (tilt . d)(alpha . d), from the products of a tangent or chord with the region."""
    return y["over_k"] - chord(c)[0][:, : c.keys, None] * y["under_k"]


@dataclass
class _Quadratic:
    """Coefficients of P in (d_q, d_j, x_j), without the query's own region term; `size_*` bound their rounding."""

    const: torch.Tensor  # (B, n)
    x: torch.Tensor  # (B, n)
    xx: torch.Tensor  # (B, n), P holds -xx x^2
    d: torch.Tensor  # (B, K, m)
    xd: torch.Tensor  # (B, K, m)
    curve: torch.Tensor  # (B, K, m), P holds -curve . d^2 + (tilt . d)(alpha . d)
    tilt: torch.Tensor  # (B, K, m)
    tilt_q: torch.Tensor  # (B, n, k), P holds (tilt_q . d_q)(alpha . d + beta . d_q) besides (tilt . d)(beta . d_q)
    q: torch.Tensor  # (B, k)
    xq: torch.Tensor  # (B, n, k)
    twist: torch.Tensor  # (B, n) of d_q^T N_j d_j
    spent_q: torch.Tensor  # (B, k), taken from lam_q
    size: torch.Tensor  # (B,)
    size_d: torch.Tensor  # (B, K)
    size_x: torch.Tensor  # (B, n)


class _Tilted:
    """The inverse of diag(curve) - (tilt alpha^T + alpha tilt^T) / 2 for each key, as half^T half.

    Scaled by the diagonal, the correction has two eigenvectors: the sum and the difference of the two directions.
    """

    def __init__(self, curve: torch.Tensor, tilt: torch.Tensor, alpha: torch.Tensor) -> None:
        self.root = curve.clamp_min(1e-300).sqrt()  # (B, K, m)
        h, a = tilt / self.root, alpha / self.root
        size_h, size_a = torch.linalg.vector_norm(h, dim=-1), torch.linalg.vector_norm(a, dim=-1)
        both = size_h * size_a
        h, a = (x / size.clamp_min(1e-300).unsqueeze(-1) for x, size in ((h, size_h), (a, size_a)))
        cosine = (h * a).sum(-1)
        self.share = (cosine + 1) / 2 * both  # the larger eigenvalue: positive definite below 1
        lower = (cosine - 1) / 2 * both
        self.sides = []
        for vector, value in ((h + a, self.share), (h - a, lower)):
            size = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
            unit = torch.where(size > 1e-15, vector / size.clamp_min(1e-300), torch.zeros_like(vector))
            self.sides.append((unit, (1 - value).clamp_min(1e-300).rsqrt() - 1))
        self.stretch = (1 - self.share).clamp_min(1e-300).rsqrt()  # (B, K), norm of the scaled half
        self.amplify = (1 + both) * self.stretch**2  # of a relative rounding error

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        for unit, factor in self.sides:
            if x.dim() > unit.dim():
                unit, factor = unit.unsqueeze(2), factor.unsqueeze(2)
            x = x + unit * ((unit * x).sum(-1) * factor).unsqueeze(-1)
        return x

    def half(self, x: torch.Tensor) -> torch.Tensor:
        """half x for x (B, K, m) or (B, K, h, m)."""
        root = self.root if x.dim() == self.root.dim() else self.root.unsqueeze(2)
        return self._turn(x / root)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """half^T x for x (B, K, m)."""
        return self._turn(x) / self.root

    def error(self, half: torch.Tensor, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Rounding error (B, K) of |half x| in units of EPS, x itself holding terms of total size (B, K)."""
        scaled = torch.linalg.vector_norm(x / self.root, dim=-1) + size / self.root.amin(-1)
        return scaled * self.stretch + self.amplify * half


def evaluate(c: Centred, y: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Bound t + eps / Z (B,) for multipliers of the right signs, and the part of it that pays for rounding.

    lam_q is moved here to its best value that leaves the query's quadratic negative definite, and the linear terms in
    e_j are set; the multipliers come back with both. Rounding is followed to first order, term by term, and charged
    `GUARD` times over; the audit proves the bound anew.
    """
    P = _collect(c, y)
    tilted = _Tilted(P.curve, P.tilt, c.alpha)
    K = c.keys
    # Keys: maximise (d + x xd + B d_q) . d_j - d_j^T (curve, tilt) d_j over d_j.
    half_d, half_x = tilted.half(P.d), tilted.half(P.xd)
    from_d, from_xd = tilted.back(half_d), tilted.back(half_x)
    size_d, size_xd = (torch.linalg.vector_norm(half, dim=-1) for half in (half_d, half_x))
    error_d = tilted.error(size_d, P.d, P.size_d)
    error_xd = tilted.error(size_xd, P.xd, P.size_d)
    const, in_x, xx = P.const.clone(), P.x.clone(), P.xx.clone()
    const[:, :K] += size_d**2 / 4
    in_x[:, :K] += (half_d * half_x).sum(-1) / 2
    xx[:, :K] -= size_xd**2 / 4
    error_x, error_xx = P.size_x.clone(), P.xx.clone()
    error_x[:, :K] += (size_d * error_xd + size_xd * error_d) / 2
    error_xx[:, :K] += size_xd * error_xd / 2
    bad = (xx <= 4 * GUARD * EPS * error_xx).any(-1) | (tilted.share >= 1).any(-1) | (P.curve <= 0).any(-1).any(-1)
    xx = xx.clamp_min(1e-300)
    # x stays in [xl, xu]: a slope that would lead outside is bought back at the end of the range.
    xl, xu = torch.expm1(c.low), torch.expm1(c.high)
    over, under = (in_x - 2 * xx * xu).clamp_min(0.0), (2 * xx * xl - in_x).clamp_min(0.0)
    in_x = in_x - over + under
    const = const + over * xu - under * xl + in_x**2 / (4 * xx)
    at_x = in_x.abs() / (2 * xx)  # where the maximum over x lies
    size = P.size + (size_d * error_d / 2 + size_d**2 / 4).sum(-1)
    size = size + (over * xu - under * xl + in_x**2 / (4 * xx) + at_x * error_x + at_x**2 * error_xx).sum(-1)
    total, kept = const.sum(-1), {**y, "edge_high": over, "edge_low": under}
    if c.wq.shape[1]:
        loose = (error_xx / xx, error_x / (2 * xx))
        top, size_q, good, kept["ball_q"] = _query_part(c, y, P, tilted, from_d, from_xd, in_x, xx, loose)
        total, size, bad = total + top, size + size_q, bad | ~good
    error = GUARD * EPS * size
    kept["eps"] = eps = total + error
    Zmin = torch.exp(torch.maximum((c.p * c.low).sum(-1), torch.logsumexp(torch.log(c.p) + c.low, -1))) * (1 - 1e-13)
    Zmax = (c.p * torch.exp(c.high)).sum(-1) * (1 + 1e-13)
    Z = torch.where(eps > 0, Zmin, Zmax)
    upper = y["t"] + eps / Z
    last = 8 * EPS * (y["t"].abs() + upper.abs())
    upper, inflation = upper + last, error / Z + last
    wide = (c.high > WIDEST).any(-1) | (c.low < -WIDEST).any(-1)
    dead = bad | wide | ~torch.isfinite(upper) | ~torch.isfinite(inflation)
    return torch.where(dead, torch.inf, upper), torch.where(dead, torch.zeros_like(upper), inflation), kept


def _collect(c: Centred, y: dict[str, torch.Tensor]) -> _Quadratic:
    K, full = c.keys, torch.zeros_like(c.p)

    def widen(x: torch.Tensor) -> torch.Tensor:
        out = full.clone()
        out[:, :K] = x
        return out

    V = c.v - y["t"].unsqueeze(-1)
    xl, xu = torch.expm1(c.low), torch.expm1(c.high)
    slope, start = chord(c)
    mu, nu, kappa, eta = y["exp"], y["secant"], y["square"], y["entropy"]
    touch, touch_log = torch.exp(y["exp_at"]), torch.exp(y["entropy_at"])
    spent_k, spent_q = _cubic(c, y)
    rho = widen(support(c, y["norm_k"]) - (y["norm_k"] * c.wk).sum(-1))
    rho = rho + support(c, y["norm_q"]) - torch.einsum("bnk,bk->bn", y["norm_q"], c.wq)
    over, whole_over = _beyond(c, y["over_k"], y["over_q"])
    under, whole_under = _beyond(c, y["under_k"], y["under_q"])
    in_s = slope * nu - mu * touch - over + slope * under  # of the linear part of s_j
    in_s_bilinear = slope * nu - mu * touch - whole_over + slope * whole_under
    ball_k = y["ball_k"]
    region = (
        widen((ball_k * (1 - c.wk**2)).sum(-1))
        if c.box
        else widen(ball_k[..., 0] * (1 - (c.wk**2).sum(-1)) if ball_k.shape[-1] else ball_k.sum(-1))
    )
    terms = torch.stack([
        c.p * V, rho, mu, -mu * touch * (1 - y["exp_at"]), nu * start, -kappa * xl * xu, -eta * (1 + y["entropy_at"]),
        eta * touch_log, (under * start), region,
    ])  # fmt: skip
    in_x = torch.stack([c.p * V, rho, mu, -nu, kappa * (xl + xu), -eta * (1 + y["entropy_at"]), over, -under])
    pu, key = c.p[:, :K, None] * c.u, (slice(None), slice(0, K), None)
    d = pu - 2 * ball_k * c.wk + (in_s + eta)[key] * c.alpha - y["norm_k"] - start[key] * y["under_k"]
    length = torch.linalg.vector_norm
    of_s = slope * nu + mu * touch + whole_over + slope * whole_under + eta
    size_d = length(pu, dim=-1) + 2 * length(ball_k * c.wk, dim=-1) + of_s[:, :K] * length(c.alpha, dim=-1)
    for name in ("norm_k", "over_k", "under_k"):
        size_d = size_d + length(y[name], dim=-1)
    q = torch.einsum("bn,bnk->bk", in_s + eta, c.beta) - (y["norm_q"] + start.unsqueeze(-1) * y["under_q"]).sum(1)
    xq = eta.unsqueeze(-1) * c.beta - y["norm_q"] - y["over_q"] + y["under_q"]
    if c.own:
        q = q + c.p[:, -1:] * c.own_u
        xq = torch.cat([xq[:, :-1], xq[:, -1:] + c.p[:, -1:, None] * c.own_u.unsqueeze(1)], 1)
    return _Quadratic(
        const=terms.sum(0),
        x=in_x.sum(0),
        xx=kappa,
        d=d,
        xd=_coupling(c, y),
        curve=ball_k - spent_k,
        tilt=_tilt(c, y),
        q=q,
        xq=xq,
        tilt_q=y["over_q"] - slope.unsqueeze(-1) * y["under_q"],
        twist=in_s_bilinear + eta * (1 + (xl + xu) / 2),
        spent_q=spent_q,
        size=terms.abs().sum((0, 2)),
        size_d=size_d,
        size_x=in_x.abs().sum(0) + kappa * (xu - xl),
    )


def _raise(
    held: torch.Tensor, linear: torch.Tensor, at: torch.Tensor, least: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """What to add to the query's multiplier: the best that leaves its quadratic positive definite by `step`.

    Adding delta (1 - |w_q|^2) turns held into held + delta and linear into linear - 2 delta at: one convex function of
    delta, cheap in held's eigenvectors. held (B, k, k), linear and at (B, k), least and step (B,).
    """
    values, vectors = torch.linalg.eigh(held)
    a, b = (torch.einsum("bkl,bk->bl", vectors, x).unsqueeze(1) for x in (linear, at))
    low = torch.maximum(step - values[:, 0], -least).unsqueeze(-1)  # (B, 1)
    rest = 1 - (b**2).sum(-1)

    def total(delta: torch.Tensor) -> torch.Tensor:
        kept = (values.unsqueeze(1) + delta.unsqueeze(-1)).clamp_min(1e-300)
        return torch.nan_to_num(
            delta * rest + ((a - 2 * delta.unsqueeze(-1) * b) ** 2 / (4 * kept)).sum(-1), nan=torch.inf
        )

    grid = torch.cat([torch.zeros(1, dtype=held.dtype), torch.logspace(-13, 1, 43, dtype=held.dtype)]).to(held.device)
    grid = low + values.abs().amax(-1, keepdim=True) * grid
    place = total(grid).argmin(-1, keepdim=True)
    left, right = (grid.gather(-1, (place + side).clamp(0, grid.shape[1] - 1)) for side in (-1, 1))
    for _ in range(50):  # golden section
        inner = left + (right - left) * GOLDEN, right - (right - left) * GOLDEN
        less = total(inner[0]) <= total(inner[1])
        left, right = torch.where(less, left, inner[0]), torch.where(less, inner[1], right)
    tried = torch.cat([(left + right) / 2, torch.zeros_like(low), low], -1)
    tried = torch.where(tried >= low, tried, low)
    return tried.gather(-1, total(tried).argmin(-1, keepdim=True)).squeeze(-1)


def _beyond(c: Centred, g_k: torch.Tensor, g_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rho(g) - g . w* and rho(g), (B, n), for both sides together."""
    whole = support(c, g_q)
    whole[:, : c.keys] += support(c, g_k)
    at = torch.einsum("bnk,bk->bn", g_q, c.wq)
    at[:, : c.keys] += (g_k * c.wk).sum(-1)
    return whole - at, whole


def chord(c: Centred) -> tuple[torch.Tensor, torch.Tensor]:
    """Slope of exp's chord over [low, high], and its value at 0 minus 1; both (B, n)."""
    width = c.high - c.low
    slope = torch.exp(c.low) * torch.where(width > 1e-8, torch.expm1(width) / width.clamp_min(1e-300), 1 + width / 2)
    return slope, torch.expm1(c.low) - slope * c.low


def _query_part(
    c: Centred,
    y: dict[str, torch.Tensor],
    P: _Quadratic,
    tilted: _Tilted,
    from_d: torch.Tensor,
    from_xd: torch.Tensor,
    in_x: torch.Tensor,
    xx: torch.Tensor,
    loose: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum over d_q of what is left: (B,), the magnitude of its terms, whether it is finite, and the raised
    lam_q."""
    K, turn = c.keys, P.twist[:, : c.keys]
    beta, tilt_q = c.beta[:, :K], P.tilt_q[:, :K]

    def carry(g: torch.Tensor) -> torch.Tensor:
        """B^T g with B = twist N^T + tilt beta^T + alpha tilt_q^T, the keys' coupling to d_q: (B, K, m) -> (B, K,
        k)."""
        image = torch.einsum("bnhm,bnm->bnh", c.fk, g) * turn.unsqueeze(-1)
        return image @ c.fq + (P.tilt * g).sum(-1, keepdim=True) * beta + (c.alpha * g).sum(-1, keepdim=True) * tilt_q

    carried = carry(from_d) / 2
    linear = P.q + carried.sum(1)
    xq = P.xq.clone()
    xq[:, :K] += carry(from_xd) / 2
    linear = linear + ((in_x / (2 * xx)).unsqueeze(-1) * xq).sum(1)
    halves = tilted.half(c.fk) * turn[..., None, None]  # (B, K, h, m)
    gram = (halves @ halves.transpose(-1, -2)).sum(1)
    quadratic = c.fq.transpose(1, 2) @ gram @ c.fq  # B^T M^{-1} B, its parts of rank one apart
    sides = ((tilted.half(P.tilt), beta), (tilted.half(c.alpha), tilt_q))
    for key_side, query_side in sides:
        bent = torch.einsum("bnhm,bnm->bnh", halves, key_side) @ c.fq
        mixed = bent.transpose(1, 2) @ query_side
        quadratic = quadratic + mixed + mixed.transpose(1, 2)
        for other_key, other_query in sides:
            weights = (other_key * key_side).sum(-1, keepdim=True)
            quadratic = quadratic + (other_query * weights).transpose(1, 2) @ query_side
    straight = P.tilt_q.transpose(1, 2) @ c.beta
    quadratic = quadratic / 4 + (straight + straight.transpose(1, 2)) / 2
    quadratic = quadratic + (xq / (4 * xx).unsqueeze(-1)).transpose(1, 2) @ xq
    if c.own:
        product = c.fq.transpose(1, 2) @ c.fo
        quadratic = quadratic + P.twist[:, -1, None, None] / 2 * (product + product.transpose(1, 2))

    weight, k = c.weight_q, c.wq.shape[1]
    lam = y["ball_q"]
    root = weight.sqrt()
    held = torch.diag_embed(lam - P.spent_q) - quadratic
    outer = root.unsqueeze(-1) * root.unsqueeze(-2)
    finite = torch.isfinite(held).all(-1).all(-1) & torch.isfinite(linear).all(-1)
    held = torch.where(finite[:, None, None], held, torch.diag_embed(weight))
    # What rounding can have done to the matrix, and to the vector.
    length = torch.linalg.vector_norm
    worst = 1 + tilted.amplify.amax(-1) if K else torch.ones_like(c.f)
    norms = torch.linalg.matrix_norm(held / outer) + worst * (
        torch.linalg.matrix_norm(quadratic / outer)
        + (length(P.tilt_q / root.unsqueeze(1), dim=-1) * length(c.beta / root.unsqueeze(1), dim=-1)).sum(-1)
    )
    weights = length(xq / root.unsqueeze(1), dim=-1)
    safety = GUARD * EPS * (k * norms + (weights**2 / (4 * xx) * (worst.unsqueeze(-1) + loose[0])).sum(-1))
    shaken = length(P.q, dim=-1) + worst * length(carried, dim=-1).sum(-1)
    at_x = in_x.abs() / (2 * xx)
    shaken = shaken + (length(xq, dim=-1) * (at_x * (worst.unsqueeze(-1) + loose[0]) + loose[1])).sum(-1)
    safety = torch.where(finite, safety, torch.zeros_like(safety))
    linear = torch.where(finite.unsqueeze(-1), linear, torch.zeros_like(linear))
    step = 1e-13 * c.movement + safety
    raised = _raise(held / outer, (linear - 2 * lam * c.wq) / root, root * c.wq, (lam / weight).amin(-1), step)
    lam = lam + raised.unsqueeze(-1) * weight
    linear = linear - 2 * lam * c.wq
    region = (lam * (1 - c.wq**2)).sum(-1) if c.box else lam[:, 0] * (1 - (c.wq**2).sum(-1))
    # A matrix below the true one by more than the rounding of its entries: its maximum is an upper bound.
    held = held + torch.diag_embed((raised - safety / 2).unsqueeze(-1) * weight)
    factor, info = torch.linalg.cholesky_ex(held)
    z = torch.cholesky_solve(linear.unsqueeze(-1) / 2, factor).squeeze(-1)
    image = (held @ z.unsqueeze(-1)).squeeze(-1)
    left = linear / 2 - image
    top = ((linear - image) * z).sum(-1) + (left**2 / weight).sum(-1) / (step / 2).clamp_min(1e-300)
    size = (
        region.abs() + (linear.abs() * z.abs()).sum(-1) + (shaken + length(2 * lam * c.wq, dim=-1)) * length(z, dim=-1)
    )
    return region + top, size, finite & (info == 0), lam

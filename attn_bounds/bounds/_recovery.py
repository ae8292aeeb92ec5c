"""A proved upper bound from any multipliers, however they were found: weak duality done by hand.

For a number t and multipliers of the right signs, the certificate

    P = sum_j p_j e_j (value_j - t)
      + sum_j { lam_j . (1 - w_j^2)                                    the region           (|w_j| <= 1, or entrywise)
              + mu_j (e_j - e^{c_j} (1 + s_j - c_j))                   exp above a tangent
              + nu_j (chord_j(s_j) - e_j)                              exp below its chord on [low_j, high_j]
              + kappa_j (e_j - e^{low_j}) (e^{high_j} - e_j),  and linear terms in e_j - e^{low_j}, e^{high_j} - e_j
              + e_j (rho(g_j) - g_j . w_j) + e_j (rho(h_j) - h_j . w_q)        rho the support function of the region
              + eta_j (e_j s_j - (1 + c'_j) e_j + e^{c'_j}) }          e log e above a tangent, e_j s_j = e_j log e_j
      + lam_q . (1 - w_q^2)

is at least sum_j p_j e_j (value_j - t) at every point of the region, since each added term is nonnegative there. In
e_j s_j the cubic part is replaced, with e^ = (e^{low} + e^{high}) / 2, D = (e^{high} - e^{low}) / 2 and any r_j > 0, by

    e_j d_q^T N_j d_j <= e^ d_q^T N_j d_j + D bend_j (r_j |d_q|^2 + |d_j|^2 / r_j) / 2

so P is a quadratic in (d_q, d_j, x_j = e_j - 1), and its maximum over ALL real values is a Schur complement: first d_j
(diagonal), then x_j (scalar), then d_q. With eps that maximum and Z = sum_j p_j e_j in [Zmin, Zmax],

    f(w) = t + (sum_j p_j e_j (value_j - t)) / Z <= t + eps / Zmin   (eps > 0),   t + eps / Zmax   (eps <= 0).

Nothing here trusts the solver: wrong signs are clipped; lam, kappa and lam_q are raised where the quadratic would not be
negative definite; a residual that is left costs what the maximum says. Multipliers in full coordinates are handled
exactly, so the subspaces that the solver worked in do not matter.
"""

from __future__ import annotations

import torch

from ..reduced import EPS
from ._centred import Centred, largest_values, support

LIFTS = (1e-13, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)
NAMES = (
    "t", "ball_k", "ball_q", "norm_k", "norm_q", "ratio", "exp", "exp_at", "secant", "square", "entropy", "entropy_at"
)  # fmt: skip
STEPS = (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-10)
WIDEST = 200.0  # score deviations beyond e^200 are left to other methods


def recover(c: Centred, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Upper bounds (B,) of f from multipliers, the part of them (B,) that pays for rounding, and the projected multipliers.

    Infinite where the multipliers are not finite or the range of a score is too wide. The bound is the best over a few
    amounts by which the diagonal is lifted off singularity.
    """
    best = _Best(c)
    for lift in LIFTS:
        best.offer(project(c, given, lift))
    first, reach = best.kept["t"], best.upper - best.kept["t"]
    for fraction in STEPS:  # t + eps / Zmin charges a residual at the worst Z; a larger t need not
        step = torch.where(torch.isfinite(reach), reach * fraction, torch.zeros_like(reach))
        best.offer({**best.kept, "t": torch.maximum(first + step, best.kept["t"])})
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
        upper, error = evaluate(self.c, y)
        better = upper < self.upper
        self.upper, self.error = torch.where(better, upper, self.upper), torch.where(better, error, self.error)
        self.kept = {
            name: torch.where(better.reshape(-1, *(1,) * (value.dim() - 1)), value, self.kept.get(name, value))
            for name, value in y.items()
        }

    def offer_mean(self) -> None:
        """f is a mean of the values, so no larger than the largest of them; offered where the multipliers were finite."""
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
    for name in ("ball_k", "ball_q", "exp", "secant", "square", "entropy"):
        y[name] = y[name].clamp_min(0.0)
    y["ratio"] = y["ratio"].clamp(1e-6, 1e6)
    y["exp_at"] = torch.minimum(torch.maximum(y["exp_at"], c.low), c.high)
    y["entropy_at"] = torch.minimum(torch.maximum(y["entropy_at"], c.low), c.high)
    unit = c.movement.reshape(-1, 1, 1)
    K = c.keys
    spent = _cubic(c, y)[0]
    y["ball_k"] = torch.maximum(y["ball_k"], spent + lift * unit * c.weight_k) * (1 + 4 * EPS)
    xl, xu = torch.expm1(c.low), torch.expm1(c.high)
    size = torch.maximum(-xl, xu).clamp_min(1e-9)
    floor = lift * c.movement.unsqueeze(-1) / size**2
    need = torch.zeros_like(y["square"])
    coupling = _coupling(c, y)
    need[:, :K] = (coupling**2 / (4 * (y["ball_k"] - spent))).sum(-1)
    y["square"] = torch.maximum(y["square"], need * (1 + 1e-10) + floor)
    return y


def _cubic(c: Centred, y: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cubic remainder takes from ball_k (B, K, m) and, summed over keys, from ball_q (B, k)."""
    half = (torch.expm1(c.high) - torch.expm1(c.low)) / 2 * (1 + 8 * EPS)
    cost = y["entropy"] * half * c.bend * (1 + 8 * EPS)
    K = c.keys
    from_k = (cost / y["ratio"] / 2)[:, :K, None] * c.weight_k
    share = (cost * y["ratio"] / 2)[:, :K].sum(-1) + (cost[:, -1] if c.own else 0.0)
    return from_k, share.unsqueeze(-1) * c.weight_q


def _coupling(c: Centred, y: dict[str, torch.Tensor]) -> torch.Tensor:
    """Coefficient (B, K, m) of x_j d_j."""
    K = c.keys
    return c.p[:, :K, None] * c.u - y["norm_k"] + y["entropy"][:, :K, None] * c.alpha


def evaluate(c: Centred, y: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound t + eps / Z for multipliers of the right signs: (B,), with the part that pays for rounding; see the module.

    lam_q is raised here, by what the least eigenvalue of the query's quadratic asks for.
    """
    K = c.keys
    t = y["t"]
    V = c.v - t.unsqueeze(-1)
    xl, xu = torch.expm1(c.low), torch.expm1(c.high)
    width = c.high - c.low
    slope = torch.exp(c.low) * torch.where(width > 1e-8, torch.expm1(width) / width.clamp_min(1e-300), 1 + width / 2)
    mu, nu, kappa, eta = y["exp"], y["secant"], y["square"], y["entropy"]
    touch = torch.exp(y["exp_at"])
    touch_log = torch.exp(y["entropy_at"])
    spent_k, spent_q = _cubic(c, y)

    rho_g = torch.zeros_like(V)
    rho_g[:, :K] = support(c, y["norm_k"]) - (y["norm_k"] * c.wk).sum(-1)
    rho = rho_g + support(c, y["norm_q"]) - torch.einsum("bnk,bk->bn", y["norm_q"], c.wq)
    in_s = slope * nu - mu * touch  # coefficient of s_j
    terms = torch.stack([
        c.p * V, rho, mu, -mu * touch * (1 - y["exp_at"]), nu * (xl - slope * c.low), -kappa * xl * xu,
        -eta * (1 + y["entropy_at"]), eta * touch_log,
    ])  # fmt: skip
    const = terms.sum(0)  # the value of P at d = 0, x = 0, key by key, without the region's terms
    in_x = c.p * V + rho + mu - nu + kappa * (xl + xu) - eta * (1 + y["entropy_at"])
    region = (y["ball_k"] * (1 - c.wk**2)).sum(-1)
    if not c.box:  # one multiplier per ball: lam (1 - |w|^2)
        lam = y["ball_k"].amax(-1) if c.wk.shape[2] else region
        region = lam * (1 - (c.wk**2).sum(-1))
        ball_k = lam.unsqueeze(-1).expand_as(y["ball_k"])
    else:
        ball_k = y["ball_k"]
    const[:, :K] += region
    magnitude = terms.abs().sum(0).sum(-1) + region.abs().sum(-1)

    # Keys' own coordinates: maximise (ell + c x + n N^T d_q) . d - curve . d^2.
    curve = (ball_k - spent_k).clamp_min(1e-300)
    pull = in_s[:, :K, None]
    ell = c.p[:, :K, None] * c.u - 2 * ball_k * c.wk + (pull + eta[:, :K, None]) * c.alpha - y["norm_k"]
    cross = _coupling(c, y)
    const[:, :K] += (ell**2 / (4 * curve)).sum(-1)
    in_x[:, :K] += (ell * cross / (2 * curve)).sum(-1)
    bend = kappa.clone()
    bend[:, :K] -= (cross**2 / (4 * curve)).sum(-1)
    bad = (bend <= 0).any(-1)
    bend = bend.clamp_min(1e-300)
    # x stays in [xl, xu]: a slope that would lead outside is bought back at the end of the range.
    over, under = (in_x - 2 * bend * xu).clamp_min(0.0), (2 * bend * xl - in_x).clamp_min(0.0)
    const = const + over * xu - under * xl
    magnitude = magnitude + (over * xu - under * xl).sum(-1)
    in_x = in_x - over + under
    const = const + in_x**2 / (4 * bend)
    magnitude = magnitude + (ell**2 / (4 * curve)).sum((-1, -2)) + (in_x**2 / (4 * bend)).sum(-1)
    # Rounding of in_x is divided by bend: charge it through its own magnitude.
    size_x = (c.p * V).abs() + rho.abs() + mu + nu + kappa * (xu - xl) + eta * (1 + y["entropy_at"].abs())
    size_x[:, :K] = size_x[:, :K] + (ell * cross / (2 * curve)).abs().sum(-1)
    magnitude = magnitude + (size_x * in_x.abs() / bend).sum(-1) + 1e-15 * (size_x**2 / bend).sum(-1)

    total = const.sum(-1)
    if c.wq.shape[1]:
        twist = in_s + eta * (1 + (xl + xu) / 2)  # coefficient of d_q^T N_j d_j
        gain, size, floor_ok = _query_part(c, y, ell, cross, curve, bend, in_x, in_s, twist, spent_q)
        total, magnitude, bad = total + gain, magnitude + size, bad | ~floor_ok
    error = 512 * EPS * magnitude
    eps = total + error
    Zmin = torch.exp(torch.maximum((c.p * c.low).sum(-1), torch.logsumexp(torch.log(c.p) + c.low, -1))) * (1 - 1e-13)
    Zmax = (c.p * torch.exp(c.high)).sum(-1) * (1 + 1e-13)
    Z = torch.where(eps > 0, Zmin, Zmax)
    upper = t + eps / Z
    inflation = error / Z + 8 * EPS * (t.abs() + upper.abs())
    upper = upper + 8 * EPS * (t.abs() + upper.abs())
    wide = (c.high > WIDEST).any(-1) | (c.low < -WIDEST).any(-1)
    dead = bad | wide | ~torch.isfinite(upper) | ~torch.isfinite(inflation)
    return torch.where(dead, torch.inf, upper), torch.where(dead, torch.zeros_like(upper), inflation)


def _query_part(
    c: Centred,
    y: dict[str, torch.Tensor],
    ell: torch.Tensor,
    cross: torch.Tensor,
    curve: torch.Tensor,
    bend: torch.Tensor,
    in_x: torch.Tensor,
    in_s: torch.Tensor,
    twist: torch.Tensor,
    spent_q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum over d_q of what is left: (B,), the magnitude of its terms, and whether it is finite."""
    K, eta = c.keys, y["entropy"]
    turn = twist[:, :K]
    image_ell = torch.einsum("bnhm,bnm->bnh", c.fk, ell / (2 * curve))
    image_cross = torch.einsum("bnhm,bnm->bnh", c.fk, cross / (2 * curve))
    linear = torch.einsum("bn,bnk->bk", in_s + eta, c.beta) - y["norm_q"].sum(1)
    linear = linear + torch.einsum("bh,bhk->bk", (turn.unsqueeze(-1) * image_ell).sum(1), c.fq)
    in_xq = eta.unsqueeze(-1) * c.beta - y["norm_q"]
    in_xq[:, :K] += torch.einsum("bnh,bhk->bnk", turn.unsqueeze(-1) * image_cross, c.fq)
    if c.own:
        linear = linear + c.p[:, -1:] * c.own_u
        in_xq[:, -1] += c.p[:, -1:] * c.own_u
    linear = linear + ((in_x / (2 * bend)).unsqueeze(-1) * in_xq).sum(1)
    gram = torch.einsum("bnhm,bngm->bhg", c.fk * (turn**2).unsqueeze(-1).unsqueeze(-1) / (4 * curve).unsqueeze(2), c.fk)
    quadratic = c.fq.transpose(1, 2) @ gram @ c.fq
    quadratic = quadratic + torch.einsum("bnk,bnl->bkl", in_xq / (4 * bend).unsqueeze(-1), in_xq)
    if c.own:
        product = c.fq.transpose(1, 2) @ c.fo
        quadratic = quadratic + twist[:, -1, None, None] / 2 * (product + product.transpose(1, 2))

    weight = c.weight_q
    lam = y["ball_q"] if c.box else y["ball_q"].amax(-1, keepdim=True).expand_as(y["ball_q"])
    lift = y["lift"].unsqueeze(-1)
    root = weight.clamp_min(1e-300).sqrt()
    held = torch.diag_embed(lam - spent_q) - quadratic
    scaled = held / root.unsqueeze(-1) / root.unsqueeze(-2)
    finite = torch.isfinite(scaled).all(-1).all(-1)
    scaled = torch.where(finite[:, None, None], scaled, torch.eye(weight.shape[1], dtype=scaled.dtype))
    least = torch.linalg.eigvalsh(scaled)[:, 0]
    biggest = torch.linalg.matrix_norm(scaled)
    k = weight.shape[1]
    safety = 64 * k * EPS * (biggest + torch.linalg.matrix_norm(quadratic / root.unsqueeze(-1) / root.unsqueeze(-2)))
    raised = (lift[:, 0] * c.movement + safety - least).clamp_min(0.0)
    lam = lam + raised.unsqueeze(-1) * weight
    held = torch.diag_embed(lam - spent_q) - quadratic
    linear = linear - 2 * lam * c.wq
    region = (lam * (1 - c.wq**2)).sum(-1) if c.box else lam[:, 0] * (1 - (c.wq**2).sum(-1))
    # A matrix below the true one by more than the rounding of its entries: its maximum is an upper bound.
    held = held - torch.diag_embed(safety.unsqueeze(-1) * weight / 2)
    factor, info = torch.linalg.cholesky_ex(torch.where(finite[:, None, None], held, torch.eye(k, dtype=held.dtype)))
    z = torch.cholesky_solve(linear.unsqueeze(-1) / 2, factor).squeeze(-1)
    left = linear / 2 - (held @ z.unsqueeze(-1)).squeeze(-1)
    best = (linear * z).sum(-1) - (z * (held @ z.unsqueeze(-1)).squeeze(-1)).sum(-1)
    floor = (lift[:, 0] * c.movement).clamp_min(1e-300)
    rest = (left**2 / weight.clamp_min(1e-300)).sum(-1) / floor.clamp_min(1e-300)
    size = region.abs() + (linear.abs() * z.abs()).sum(-1) + (c.p.abs().unsqueeze(-1) * c.beta.abs() * z.abs().unsqueeze(1)).sum((-1, -2))
    return region + best + rest, size, finite & (info == 0)

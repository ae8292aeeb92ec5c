"""A quadratic that lies above Phi_t on the region and touches it at the centre.

With x the change of a (recentred) score from the centre w*, y the change of a value, V = v* - t, p the softmax at w*:

    e^x (V + y) = V + y + V x + x y + (V + y) phi(x) x^2,        phi(x) = (e^x - 1 - x) / x^2, increasing
               <= V + y + V x + x y + kappa x^2,                  kappa >= (V + y) phi(x) on the ranges of x and y

x is a linear part plus the bilinear one, beta = dq.M dx. What multiplies beta ranges over an interval: its middle is
kept exactly, the rest pays |beta| <= (rho |dx|^2 + |M^T dq|^2 / rho) / 2. The Hessian is then block-arrow (keys couple
to the query only), each key's block is 2 x 2 in the plane (alpha, u) plus a multiple of the identity, and a low-rank
term U J U^T carries what couples all tokens (a slope, a recentring by scores).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..reduced import Reduced


@dataclass(frozen=True)
class Ranges:
    """Bounds, over the region, of the changes from the centre; n keys, own key last."""

    key: tuple[torch.Tensor, torch.Tensor]  # (B, n - own) of alpha . dx
    value: tuple[torch.Tensor, torch.Tensor]  # (B, n) of the value
    query: tuple[torch.Tensor, torch.Tensor]  # (B, n) of (beta - r) . dy
    bilinear: tuple[torch.Tensor, torch.Tensor]  # (B, n)
    score: tuple[torch.Tensor, torch.Tensor]  # (B, n) of their sum


@dataclass(frozen=True)
class Majorant:
    """q0 + g.d + d.H d / 2 >= Phi_t(w* + d); K = n - own keys, f query features. Multiplying p is in every entry."""

    q0: torch.Tensor  # (B,)
    g: torch.Tensor  # (B, K, m)
    gq: torch.Tensor  # (B, k)
    plane: torch.Tensor  # (B, 2, m): alpha, u
    block: torch.Tensor  # (B, K, 2, 2): a key's Hessian in the plane
    rest: torch.Tensor  # (B, K): ... plus rest / R^2 times the identity
    couple: torch.Tensor  # (B, K, 2): coupling beta_j (plane^T couple_j)^T + c_j M
    c: torch.Tensor  # (B, K)
    beta: torch.Tensor  # (B, K, f)
    features: torch.Tensor | None  # (B, f, k); None: the query's own coordinates
    T: torch.Tensor  # (B, f, f): the query's Hessian in the features, without ...
    spread: torch.Tensor  # (B, 1 or m): ... Fq^T Fk diag(spread) Fk^T Fq
    fq: torch.Tensor  # (B, h, f): in the features
    fk: torch.Tensor  # (B, h, m)
    key_radius: torch.Tensor  # (B, K, 1 or m)
    query_radius: torch.Tensor  # (B, 1 or k)
    at: tuple[torch.Tensor, torch.Tensor]  # the centre in units of the radii, (B, K, m) and (B, k)
    low_rank: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # U: (B, r, K, m), (B, r, k); J (B, r, r)


def phi(x: torch.Tensor) -> torch.Tensor:
    """(e^x - 1 - x) / x^2, without cancellation at small x."""
    small = x.abs() < 0.5
    safe = torch.where(small, torch.ones_like(x), x)
    near = torch.where(small, x, torch.zeros_like(x))
    series = torch.ones_like(x)
    for k in range(17, 2, -1):  # Horner: 1/2 (1 + x/3 (1 + x/4 (1 + ...)))
        series = 1.0 + near / k * series
    return torch.where(small, series / 2, (torch.expm1(safe) - safe) / (safe * safe))


def radii(reduced: Reduced) -> tuple[torch.Tensor, torch.Tensor]:
    """Radii (B, K, 1), (B, 1) of balls or half-widths (B, K, m), (B, k) of boxes."""
    if reduced.kind == "ball":
        return reduced.key_radius[..., None], reduced.query_radius[:, None]
    return reduced.key_radius, reduced.query_radius


def reach(vector: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Largest vector . d over the ball or box of that radius (last dimension 1) or half-widths."""
    if radius.shape[-1] == 1 and vector.shape[-1] != 1:
        return torch.linalg.vector_norm(vector, dim=-1) * radius[..., 0]
    return (vector.abs() * radius).sum(-1)


@dataclass(frozen=True)
class Centre:
    """Everything that is evaluated once at the centre w* = (x, y)."""

    reduced: Reduced
    x: torch.Tensor  # (B, K, m)
    y: torch.Tensor  # (B, k)
    t: torch.Tensor  # (B,) the value to prove
    p: torch.Tensor  # (B, n) softmax
    V: torch.Tensor  # (B, n) values minus t
    alpha: torch.Tensor  # (B, m)
    beta: torch.Tensor  # (B, n, k)
    key_gradient: torch.Tensor  # (B, K, m) of Phi
    query_gradient: torch.Tensor  # (B, k)


def centre_at(reduced: Reduced, x: torch.Tensor, y: torch.Tensor, t: torch.Tensor | None = None) -> Centre:
    """Evaluate scores, values and gradients at displacements x (B, K, m), y (B, k); t defaults to f there."""
    s, v = reduced.scores_values(x, y)
    p = torch.softmax(s, -1)
    if t is None:
        t = (p * v).sum(-1)
    V = v - t[:, None]
    qy = torch.einsum("bhk,bk->bh", reduced.fq, y)
    alpha = reduced.a + torch.einsum("bhm,bh->bm", reduced.fk, qy)
    kx = x @ reduced.fk.transpose(1, 2)
    if reduced.own:
        ky = torch.einsum("bhk,bk->bh", reduced.fk, y)
        kx = torch.cat([kx, ky[:, None]], 1)
    beta = reduced.b + kx @ reduced.fq
    if reduced.own:
        beta = torch.cat([beta[:, :-1], beta[:, -1:] + torch.einsum("bhk,bh->bk", reduced.fk, qy)[:, None]], 1)
    K = reduced.n - reduced.own
    gx = p[:, :K, None] * (reduced.u[:, None] + V[:, :K, None] * alpha[:, None])
    gy = torch.einsum("bn,bnk->bk", p * V, beta)
    if reduced.own:
        gy = gy + p[:, -1:] * reduced.own_u
    return Centre(reduced, x, y, t, p, V, alpha, beta, gx, gy)


def ranges(centre: Centre, shift: torch.Tensor) -> Ranges:
    """Bound every part of the change from the centre; `shift` (B, k) is the linear function taken off all scores."""
    red = centre.reduced
    rx, ry = radii(red)

    def around(vector: torch.Tensor, radius: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size, here = reach(vector, radius), (vector * at).sum(-1)
        return -size - here, size - here

    key = around(centre.alpha[:, None], rx, centre.x)
    value = around(red.u[:, None], rx, centre.x)
    beta = centre.beta - shift[:, None]
    query = around(beta, ry[:, None], centre.y[:, None])
    bilinear, score = _bilinear_ranges(centre, shift, rx, ry)
    key_all = key
    if red.own:
        own_value = around(red.own_u, ry, centre.y)
        value = tuple(torch.cat([a, b[:, None]], 1) for a, b in zip(value, own_value, strict=True))  # type: ignore
        key_all = tuple(torch.cat([a, a.new_zeros(a.shape[0], 1)], 1) for a in key)  # type: ignore
    summed = tuple(a + b + c for a, b, c in zip(key_all, query, bilinear, strict=True))
    score = (torch.maximum(score[0], summed[0]), torch.minimum(score[1], summed[1]))
    return Ranges(key, value, query, bilinear, score)


def _bilinear_ranges(
    centre: Centre, shift: torch.Tensor, rx: torch.Tensor, ry: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Ranges of dq.M dx, and of the whole score change with the bilinear part centred at the nominal tokens."""
    red = centre.reduced
    if red.query_fixed:
        zero = torch.zeros_like(centre.p)
        infinite = torch.full_like(zero, torch.inf)
        return (zero, zero), (-infinite, infinite)
    most = bilinear_reach(red, rx, ry)  # (B, n): |y.M x| over the region
    K = red.n - red.own
    x, y = centre.x, centre.y
    m_y = torch.einsum("bhm,bh->bm", red.fk, torch.einsum("bhk,bk->bh", red.fq, y))  # M^T y*
    m_x = (x @ red.fk.transpose(1, 2)) @ red.fq  # M x*
    here = (x * m_y[:, None]).sum(-1)
    # (y - y*).M (x - x*) = y.M x - y*.M x - y.M x* + y*.M x*
    size = reach(m_y[:, None], rx) + reach(m_x, ry[:, None])
    if red.own:
        nn_y = m_y + torch.einsum("bhk,bh->bk", red.fq, torch.einsum("bhm,bm->bh", red.fk, y))  # (M + M^T) y*
        here = torch.cat([here, (y * m_y).sum(-1, keepdim=True)], 1)
        size = torch.cat([size, reach(nn_y, ry)[:, None]], 1)
    low, high = -most - size + here, most + size + here
    if red.kind == "ball" and K:  # the displacements themselves have bounded length
        length = rx[..., 0] + torch.linalg.vector_norm(x, dim=-1)
        direct = red.norm[:, None] * length * (ry + torch.linalg.vector_norm(y, dim=-1)[:, None])
        if red.own:
            far = (ry[:, 0] + torch.linalg.vector_norm(y, dim=-1)) ** 2
            direct = torch.cat([direct, (torch.maximum(red.own_high, -red.own_low) * far)[:, None]], 1)
        low, high = torch.maximum(low, -direct), torch.minimum(high, direct)
    # x_j - x_j* - shift.(y - y*) = a.x + (b_j - shift).y + y.M x - (the same at the centre)
    a = red.a[:, None]
    size = reach(a, rx)
    moved = (a * x).sum(-1) + here[:, :K]
    if red.own:
        size = torch.cat([size, torch.zeros_like(most[:, :1])], 1)
        moved = torch.cat([moved, here[:, K:]], 1)
    b = red.b - shift[:, None]
    size = size + reach(b, ry[:, None]) + most
    moved = moved + (b * y[:, None]).sum(-1)
    return (low, high), (-size - moved, size - moved)


def bilinear_reach(red: Reduced, rx: torch.Tensor, ry: torch.Tensor) -> torch.Tensor:
    """Bound (B, n) of |y.M x| over the region: spectral norm times lengths, or entry by entry where that is smaller."""
    length_q = reach_of_length(ry, red.kind)
    most = red.norm[:, None] * reach_of_length(rx, red.kind) * length_q[:, None]
    own = torch.maximum(red.own_high, -red.own_low) * length_q * length_q
    if red.kind == "box":
        q = (red.fq.abs() * ry[:, None]).sum(-1)  # (B, h)
        most = torch.minimum(most, ((rx @ red.fk.abs().transpose(1, 2)) * q[:, None]).sum(-1))
        if red.own:
            own = torch.minimum(own, (q * (red.fk.abs() * ry[:, None]).sum(-1)).sum(-1))
    return torch.cat([most, own[:, None]], 1) if red.own else most


def reach_of_length(radius: torch.Tensor, kind: str) -> torch.Tensor:
    """Largest |d|_2 over the ball or box."""
    return radius[..., 0] if kind == "ball" else torch.linalg.vector_norm(radius, dim=-1)


def majorant(centre: Centre, shift: torch.Tensor, const: Constants, balance: torch.Tensor | None = None) -> Majorant:
    """Build the majorant of Phi_t around a centre, with `shift` (B, k) taken off all scores."""
    red, p, V = centre.reduced, centre.p, centre.V
    K = red.n - red.own
    rx, ry = radii(red)
    kappa, c, spare = const.kappa, const.c, const.spare
    beta = centre.beta - shift[:, None]
    features = None
    if red.kind == "box" and not red.query_fixed:
        features = query_features(red)
    fq, own_u, fk_q = red.fq, red.own_u if red.own else None, red.fk if red.own else None
    if features is not None:
        back = features.transpose(1, 2)
        beta, fq = beta @ back, fq @ back
        if own_u is not None and fk_q is not None:
            own_u, fk_q = (own_u[:, None] @ back)[:, 0], fk_q @ back
    T = (beta * (2 * p * kappa)[..., None]).transpose(1, 2) @ beta
    gq = centre.query_gradient - (p * V).sum(-1, keepdim=True) * shift
    if own_u is not None and fk_q is not None:
        cross = p[:, -1:, None] * beta[:, -1, :, None] * own_u[:, None, :]
        qk = fq.transpose(1, 2) @ fk_q * (p[:, -1] * c[:, -1])[:, None, None]
        sizes = [torch.linalg.matrix_norm(f).clamp_min(1e-300) for f in (fq, fk_q)]
        even = (sizes[1] / sizes[0])[:, None, None]
        pay = (p[:, -1] * spare[:, -1])[:, None, None]
        T = T + cross + cross.transpose(1, 2) + qk + qk.transpose(1, 2)
        T = T + pay * (even * fq.transpose(1, 2) @ fq + fk_q.transpose(1, 2) @ fk_q / even)
    pk = p[:, :K]
    rho = red.norm[:, None] * (_mean_square(ry)[:, None] * _mean_square(rx)).sqrt()
    if balance is not None:
        rho = rho * balance
    pay = pk * spare[:, :K]
    spread = ((pay / rho.clamp_min(1e-300))[..., None] * rx * rx).sum(1)
    two, one = 2 * pk * kappa[:, :K], pk
    block = torch.stack([torch.stack([two, one], -1), torch.stack([one, torch.zeros_like(one)], -1)], -1)
    return Majorant(
        q0=(p * V).sum(-1) + const.cost,
        g=centre.key_gradient - const.charge,
        gq=gq - const.charge_query,
        plane=torch.stack([centre.alpha, red.u], 1),
        block=block,
        rest=pay * rho,
        couple=torch.stack([two, one], -1),
        c=pk * c[:, :K],
        beta=beta[:, :K],
        features=features,
        T=T,
        spread=spread,
        fq=fq,
        fk=red.fk,
        key_radius=rx,
        query_radius=ry,
        at=(_unit(centre.x, rx), _unit(centre.y, ry)),
    )


@dataclass(frozen=True)
class Constants:
    """The numbers that make the majorant one: kappa_j, what multiplies the bilinear part, and the linear charges."""

    kappa: torch.Tensor  # (B, n)
    c: torch.Tensor  # (B, n) middle of the coefficient of the bilinear part
    spare: torch.Tensor  # (B, n) half-width of what is left of it
    charge: torch.Tensor  # (B, K, m) linear term -charge . dx
    charge_query: torch.Tensor  # (B, k)
    cost: torch.Tensor  # (B,) constant


def constants(centre: Centre, shift: torch.Tensor, bounds: Ranges) -> Constants:
    """Bound (V + y) phi(x), and the coefficient V + y + kappa (2 linear + bilinear) of the bilinear part beta.

    Where the centre sits on the boundary, s = -n.d >= 0 along its normal n, so the part e (n.d) beta of the coefficient
    is at most |e| max|beta| s: linear. Only what is left of the coefficient needs an interval.
    """
    red, V, p = centre.reduced, centre.V, centre.p
    K = red.n - red.own
    rx, ry = radii(red)
    high = V + bounds.value[1]
    kappa = high * phi(torch.where(high > 0, bounds.score[1], bounds.score[0]))
    most = torch.maximum(-bounds.bilinear[0], bounds.bilinear[1]).clamp_min(0)
    low, high = V - kappa.abs() * most, V + kappa.abs() * most
    e_key = red.u[:, None] + 2 * kappa[:, :K, None] * centre.alpha[:, None]
    e_query = 2 * kappa[..., None] * (centre.beta - shift[:, None])
    if red.own:
        e_query = torch.cat([e_query[:, :K], e_query[:, K:] + red.own_u[:, None]], 1)
    weight = p * most
    e1, left, slack = split(e_key, centre.x, rx)
    charge = weight[:, :K, None] * e1
    cost = (weight[:, :K] * slack).sum(1)
    low, high = _widen(low, high, left, centre.x, rx, K)
    e1, left, slack = split(e_query, centre.y[:, None], ry[:, None])
    cost = cost + (weight * slack).sum(1)
    low, high = _widen(low, high, left, centre.y[:, None], ry[:, None], red.n)
    spare = torch.where(most > 0, (high - low) / 2, torch.zeros_like(low))
    return Constants(kappa, (low + high) / 2, spare, charge, (weight[..., None] * e1).sum(1), cost)


def _widen(low, high, vector, at, radius, count):  # type: ignore[no-untyped-def]
    size, here = reach(vector, radius), (vector * at).sum(-1)
    zero = low.new_zeros(low.shape[0], low.shape[1] - count)
    return low + torch.cat([-size - here, zero], 1), high + torch.cat([size - here, zero], 1)


def split(e: torch.Tensor, at: torch.Tensor, radius: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Charge c >= 0 along the normals with |(e - left).d| <= -c'.d + slack; and left.

    Returns (the vector c', left, slack).
    """
    if radius.shape[-1] == 1 and at.shape[-1] != 1:
        length = torch.linalg.vector_norm(at, dim=-1, keepdim=True)
        on = (length > 0.999 * radius) & (length > 0)
        normal = torch.where(on, at / length.clamp_min(1e-300), torch.zeros_like(at))
        along = (e * normal).sum(-1, keepdim=True)
        left = e - along * normal
        slack = torch.where(on, (radius - length).clamp_min(0) + 1e-15 * radius, torch.zeros_like(length))
        return along.abs() * normal, left, 2 * (along.abs() * slack)[..., 0]
    on = (at.abs() > 0.999 * radius) & (radius > 0)
    normal = torch.where(on, torch.sign(at), torch.zeros_like(at))
    along = torch.where(on, e, torch.zeros_like(e)).abs()
    slack = (radius - at.abs()).clamp_min(0) + 1e-15 * radius
    return along * normal, torch.where(on, torch.zeros_like(e), e), 2 * (along * slack).sum(-1)


def query_features(reduced: Reduced) -> torch.Tensor:
    """Orthonormal rows (B, f, k) spanning every vector by which the query enters quadratically."""
    rows = [reduced.fq]
    if reduced.own:
        rows += [reduced.fk, reduced.own_u[:, None]]
    return torch.linalg.qr(torch.cat(rows, 1).transpose(1, 2))[0].transpose(1, 2)


def _mean_square(radius: torch.Tensor) -> torch.Tensor:
    return radius.square().sum(-1) / max(1, radius.shape[-1])


def _unit(x: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return torch.where(radius > 0, x / radius.clamp_min(1e-300), torch.zeros_like(x))

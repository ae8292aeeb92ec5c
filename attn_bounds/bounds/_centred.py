"""A batch of reduced problems written around a feasible point, in units of the radii: what the moment bounds read.

With w_j the key's and w_q the query's displacement in units of their radii (unit ball, or unit box), d = w - w*,

    score - score* - common = alpha_j . d_j + beta_j . d_q + (Fq d_q) . (Fk_j d_j)  in [low_j, high_j]
    value = v_j + u_j . d_j,      p = softmax(score*),      f(w) - t = sum_j p_j e_j (value_j - t) / sum_j p_j e_j

with e_j the exponential of the first line. `common` is linear in d_q and the same for all keys (softmax does not see
it). The own key depends on d_q alone: alpha and u of its own are absent, its quadratic is (Fq d_q) . (Fo d_q).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..reduced import EPS, Reduced

OUT = 1 + 1e-12  # outward factor for norms and ranges


@dataclass(frozen=True)
class Centred:
    """Batch of B problems; K = n - own keys that move on their own, m and k coordinates of a key and of the query."""

    box: bool
    own: bool
    p: torch.Tensor  # (B, n) softmax of the scores at the point
    v: torch.Tensor  # (B, n) values there
    f: torch.Tensor  # (B,) their mean, f at the point
    alpha: torch.Tensor  # (B, K, m)
    beta: torch.Tensor  # (B, n, k)
    u: torch.Tensor  # (B, K, m)
    own_u: torch.Tensor  # (B, k), zero where no own key
    fq: torch.Tensor  # (B, h, k)
    fk: torch.Tensor  # (B, K, h, m)
    fo: torch.Tensor  # (B, h, k) the keys' factor on the query's coordinates, for the own key
    wk: torch.Tensor  # (B, K, m) the point, keys
    wq: torch.Tensor  # (B, k) the point, query
    low: torch.Tensor  # (B, n) range of the score's deviation from the point
    high: torch.Tensor  # (B, n)
    weight_k: torch.Tensor  # (B, K, m) sum_i weight_i w_i^2 <= 1 holds on the region (ball: weight 1)
    weight_q: torch.Tensor  # (B, k)
    bend: torch.Tensor  # (B, n) |(Fq d_q).(Fk d_j)| <= bend |d_q|_weight |d_j|_weight; own key: bend |d_q|_weight^2
    common: torch.Tensor  # (B, k) what was taken off every beta
    movement: torch.Tensor  # (B,) scale of the objective: f at the point minus f at the centre of the region

    @property
    def size(self) -> int:
        """Number of problems."""
        return self.p.shape[0]

    @property
    def n(self) -> int:
        """Number of keys."""
        return self.p.shape[1]

    @property
    def keys(self) -> int:
        """Number of keys that move on their own."""
        return self.wk.shape[1]


def centre(reduced: Reduced, x: torch.Tensor, y: torch.Tensor, pull: float = 0.0, floor: float = 1e-4) -> Centred:
    """Write `reduced` around displacements x (B, K, m), y (B, k).

    `pull` adds a multiple of f's gradient to `common`; `floor` evens out the weights of a box's ellipsoid.
    """
    K, box = reduced.n - reduced.own, reduced.kind == "box"
    radius_k = reduced.key_radius if box else reduced.key_radius.unsqueeze(-1).expand(-1, -1, reduced.u.shape[1])
    k = reduced.b.shape[2]
    radius_q = reduced.query_radius if box else reduced.query_radius.unsqueeze(-1).expand(-1, k)
    wk = torch.where(radius_k > 0, x / radius_k.clamp_min(1e-300), torch.zeros_like(x))
    wq = torch.where(radius_q > 0, y / radius_q.clamp_min(1e-300), torch.zeros_like(y))
    s, v = reduced.scores_values(x.unsqueeze(1), y.unsqueeze(1))
    p, v = torch.softmax(s[:, 0], -1), v[:, 0]
    f = (p * v).sum(-1)

    fq = reduced.fq * radius_q.unsqueeze(1)
    fk = reduced.fk.unsqueeze(1) * radius_k.unsqueeze(2)
    fo = reduced.fk * radius_q.unsqueeze(1) if reduced.own else torch.zeros_like(fq)
    u = reduced.u.unsqueeze(1) * radius_k
    a = reduced.a.unsqueeze(1) * radius_k
    b = reduced.b * radius_q.unsqueeze(1)
    own_u = reduced.own_u * radius_q if reduced.own else torch.zeros_like(wq)
    image_q = torch.einsum("bhk,bk->bh", fq, wq)
    alpha = a + torch.einsum("bnhm,bh->bnm", fk, image_q)
    beta = b.clone()
    beta[:, :K] += torch.einsum("bhk,bnh->bnk", fq, torch.einsum("bnhm,bnm->bnh", fk, wk))
    if reduced.own:
        image_o = torch.einsum("bhk,bk->bh", fo, wq)
        beta[:, -1] += torch.einsum("bhk,bh->bk", fo, image_q) + torch.einsum("bhk,bh->bk", fq, image_o)

    pv = p * (v - f.unsqueeze(-1))
    slope_q = torch.einsum("bn,bnk->bk", pv, beta) + p[:, -1:] * own_u
    common = torch.einsum("bn,bnk->bk", p, beta)
    if pull and k:
        size = torch.linalg.vector_norm(slope_q, dim=-1)
        others = torch.linalg.vector_norm(pv.unsqueeze(-1) * beta, dim=-1).sum(-1)
        scale = torch.linalg.vector_norm(common, dim=-1) / size.clamp_min(1e-300)
        common = common + (pull * scale * size / others.clamp_min(1e-300)).unsqueeze(-1) * slope_q
    beta = beta - common.unsqueeze(1)

    slope_k = pv[:, :K, None] * alpha + p[:, :K, None] * u
    weight_k = _profile(slope_k, floor) if box else torch.ones_like(wk)
    weight_q = _profile(slope_q, floor) if box else torch.ones_like(wq)
    bend = _bend(reduced, fq, fk, fo, weight_k, weight_q, radius_k, radius_q)
    low, high = _range(reduced, a, b - common.unsqueeze(1), wk, wq, alpha, beta, fq, fk, fo, radius_q, bend)
    start = _value_at_centre(reduced)
    least = 1e-9 * (v.abs().amax(-1) + 1e-300)
    return Centred(
        box,
        reduced.own,
        p,
        v,
        f,
        alpha,
        beta,
        u,
        own_u,
        fq,
        fk,
        fo,
        wk,
        wq,
        low,
        high,
        weight_k,
        weight_q,
        bend,
        common,
        torch.maximum(f - start, least),
    )


def support(c: Centred, g: torch.Tensor) -> torch.Tensor:
    """Largest value of g . w over the unit ball, or box: g (..., m) -> (...), rounded outward."""
    size = g.abs().sum(-1) if c.box else torch.linalg.vector_norm(g, dim=-1)
    return size * (1 + 1e-13)


def largest_values(c: Centred) -> torch.Tensor:
    """Largest value (B, n) of each token."""
    K = c.keys
    top = c.v.clone()
    top[:, :K] += support(c, c.u) - (c.u * c.wk).sum(-1)
    if c.own:
        top[:, -1] += support(c, c.own_u) - (c.own_u * c.wq).sum(-1)
    return top


def _value_at_centre(reduced: Reduced) -> torch.Tensor:
    return (torch.softmax(reduced.s0, -1) * reduced.v0).sum(-1)


def _profile(slope: torch.Tensor, floor: float) -> torch.Tensor:
    """Weights with sum 1 of an ellipsoid through the box's corners, in proportion to the multipliers the point
    suggests."""
    size = slope.abs()
    size = size + floor * size.mean(-1, keepdim=True) + 1e-300
    return size / size.sum(-1, keepdim=True)


def _bend(
    reduced: Reduced,
    fq: torch.Tensor,
    fk: torch.Tensor,
    fo: torch.Tensor,
    weight_k: torch.Tensor,
    weight_q: torch.Tensor,
    radius_k: torch.Tensor,
    radius_q: torch.Tensor,
) -> torch.Tensor:
    if reduced.query_fixed:
        return torch.zeros_like(reduced.s0)
    if reduced.kind == "ball":
        every = torch.cat([reduced.key_radius, reduced.query_radius.unsqueeze(-1)], -1)[:, : reduced.n]
        return reduced.norm.unsqueeze(-1) * reduced.query_radius.unsqueeze(-1) * every * OUT
    left = torch.linalg.qr((fq / weight_q.sqrt().unsqueeze(1)).transpose(1, 2))[1].unsqueeze(1)
    pieces = [torch.linalg.qr((fk / weight_k.sqrt().unsqueeze(2)).transpose(2, 3))[1]]
    if reduced.own:
        pieces.append(torch.linalg.qr((fo / weight_q.sqrt().unsqueeze(1)).transpose(1, 2))[1].unsqueeze(1))
    right = torch.cat(pieces, 1)
    # The spectral norm of Fq^T Fk from its h x h core; the factor covers the rounding of QR and SVD.
    return torch.linalg.matrix_norm(left @ right.transpose(2, 3), ord=2) * (1 + 1e-10)


def _range(
    reduced: Reduced,
    a: torch.Tensor,
    b: torch.Tensor,
    wk: torch.Tensor,
    wq: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    fq: torch.Tensor,
    fk: torch.Tensor,
    fo: torch.Tensor,
    radius_q: torch.Tensor,
    bend: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Range of the deviation from the point: linear parts by their dual norms, the bilinear part by its norm."""
    K = reduced.n - reduced.own

    def dual(g: torch.Tensor) -> torch.Tensor:
        return g.abs().sum(-1) if reduced.kind == "box" else torch.linalg.vector_norm(g, dim=-1)

    linear = dual(b)
    linear[:, :K] += dual(a)
    up, down = bend.clone(), bend.clone()
    if reduced.own and reduced.kind == "ball":
        square = reduced.query_radius**2
        up[:, -1] = reduced.own_high.clamp_min(0) * square
        down[:, -1] = (-reduced.own_low).clamp_min(0) * square
    # The score at the point relative to the centre's: by the same expansion, backwards from the point.
    at = torch.einsum("bnk,bk->bn", b, wq)
    image_q = torch.einsum("bhk,bk->bh", fq, wq)
    at[:, :K] += torch.einsum("bnm,bnm->bn", a, wk) + torch.einsum(
        "bnh,bh->bn", torch.einsum("bnhm,bnm->bnh", fk, wk), image_q
    )
    if reduced.own:
        at[:, -1] += (image_q * torch.einsum("bhk,bk->bh", fo, wq)).sum(-1)
    slack = 64 * EPS * (linear + bend)
    low, high = -linear - down - at, linear + up - at
    return torch.minimum(low, -slack) - slack, torch.maximum(high, slack) + slack

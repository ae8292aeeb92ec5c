"""Ranges of scores and values over the region: what interval, first-order and vertex bounds share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..reduced import Reduced


@dataclass(frozen=True)
class Ranges:
    """Ranges (B, n): scores (up to one common function of all tokens) in [s_low, s_high], values at most v_high."""

    s_low: torch.Tensor
    s_high: torch.Tensor
    v_low: torch.Tensor
    v_high: torch.Tensor


def ranges(reduced: Reduced) -> Ranges:
    """Bound scores and values, term by term.

    |a.x| <= |a| R, |(b_j - sum_k p_k b_k).y| <= |.| R_q, |(Fq y).(Fk x)| <= ||N|| R R_q (boxes: the dual norms). The
    softmax does not see sum_k p_k b_k . y, which is common to all scores.
    """
    p = torch.softmax(reduced.s0, -1)
    b = reduced.b - (p.unsqueeze(-1) * reduced.b).sum(1, keepdim=True)
    if reduced.kind == "ball":
        key, query = reduced.key_radius, reduced.query_radius
        size = torch.linalg.vector_norm
        a_part = key * size(reduced.a, dim=-1)[:, None]
        u_part = key * size(reduced.u, dim=-1)[:, None]
        b_part = size(b, dim=-1) * query[:, None]
        n_part = key * (reduced.norm * query)[:, None]
        own_u = (size(reduced.u, dim=-1) * query)[:, None]
        own_low, own_high = (
            (e * query**2)[:, None] for e in (reduced.own_low.clamp_max(0.0), reduced.own_high.clamp_min(0.0))
        )
    else:
        key, query = reduced.key_radius, reduced.query_radius
        a_part = (key * reduced.a.abs()[:, None]).sum(-1)
        u_part = (key * reduced.u.abs()[:, None]).sum(-1)
        b_part = (b.abs() * query[:, None]).sum(-1)
        # |(Fq y).(Fk x)| <= sum_h |Fq y|_h |Fk x|_h, or the spectral norm times the half-widths' norms.
        reach = (reduced.fk.abs()[:, None] * key[:, :, None]).sum(-1)  # (B, n, h)
        reach_q = (reduced.fq.abs() * query[:, None]).sum(-1) if query.shape[1] else torch.zeros_like(reach[:, 0])
        by_norm = (
            torch.linalg.vector_norm(key, dim=-1) * (reduced.norm * torch.linalg.vector_norm(query, dim=-1))[:, None]
        )
        n_part = torch.minimum((reach * reach_q[:, None]).sum(-1), by_norm)
        own_u = own_low = own_high = a_part.new_zeros(reduced.size, 1)
        if reduced.own:
            own_u = (reduced.u.abs() * query).sum(-1, keepdim=True)
            own_reach = ((reduced.fk.abs() * query[:, None]).sum(-1) * reach_q).sum(-1, keepdim=True)
            square = (query**2).sum(-1, keepdim=True)
            own_high = torch.minimum(own_reach, reduced.own_high.clamp_min(0.0)[:, None] * square)
            own_low = torch.maximum(-own_reach, reduced.own_low.clamp_max(0.0)[:, None] * square)
    up, down = a_part + n_part, a_part + n_part
    if reduced.own:
        up, down, u_part = torch.cat([up, own_high], 1), torch.cat([down, -own_low], 1), torch.cat([u_part, own_u], 1)
    return Ranges(reduced.s0 - b_part - down, reduced.s0 + b_part + up, reduced.v0 - u_part, reduced.v0 + u_part)


def weight_ranges(r: Ranges) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds (B, n) of each attention weight: p_j in [1 / (1 + sum_{k != j} e^{high_k - low_j}), and the reverse]."""
    return torch.sigmoid(r.s_low - _others(r.s_high)), torch.sigmoid(r.s_high - _others(r.s_low))


def price_bound(r: Ranges, low: torch.Tensor, high: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """f <= t + sum_j max(p_low_j (v_high_j - t), p_high_j (v_high_j - t)) for every t (B,), since sum_j p_j = 1."""
    excess = r.v_high - t[:, None]
    return t + torch.maximum(low * excess, high * excess).sum(1)


def _others(s: torch.Tensor) -> torch.Tensor:
    """log sum_{k != j} e^{s_k} for every j, without subtracting (B, n)."""
    edge = s.new_full((s.shape[0], 1), -torch.inf)
    before = torch.cat([edge, torch.logcumsumexp(s, 1)[:, :-1]], 1)
    after = torch.cat([torch.logcumsumexp(s.flip(1), 1).flip(1)[:, 1:], edge], 1)
    return torch.logaddexp(before, after)

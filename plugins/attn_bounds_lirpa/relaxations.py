"""Affine relaxations of softmax and of softmax-weighted sums, as plain torch functions (no verifier needed).

Shapes: `...` stands for any leading dimensions, n_k is the number of keys. Differences d[..., j, k] = s_k - s_j of
scores s have d[..., j, j] = 0, and the attention weight of key j is p_j = 1 / sum_k exp(d_jk).
An affine bound of p_j is a pair (const, coef) with coef[..., j, k] the slope in d_jk.
"""

from __future__ import annotations

import torch
from torch import Tensor

# rho, tau and the tangent points of the lower and the upper bounds in one pass of `weighted_sum_upper`. rho = 0 is the
# facet p w <= p_lo w + p w_hi - p_lo w_hi: narrower than the middle plane on whole networks by 1 to 8 %.
MIX_DEFAULTS = (0.0, 0.0, 0.6, 0.4)
FAR = 1e100  # differences of scores from which on products overflow


def chord_of_exp(lower: Tensor, upper: Tensor) -> Tensor:
    """Slope of the chord of exp over [lower, upper]; exp(lower) where the interval is a point."""
    width = (upper - lower).clamp(min=0)
    small, wide = width < 1e-3, width > 10
    # expm1(x)/x <= 1 + x/2 + x^2/6 + x^3/18 for 0 <= x <= 1e-3; the branches not taken get harmless arguments
    series = 1 + width / 2 * (1 + width / 3 * (1 + width / 3))
    near = torch.where(small | wide, torch.ones_like(width), width)
    far = torch.where(wide, width, torch.ones_like(width))
    ratio = torch.where(small, series, torch.expm1(near) / near)
    return torch.where(wide, (torch.exp(upper) - torch.exp(lower)) / far, torch.exp(lower) * ratio)


def far(d_lower: Tensor, d_upper: Tensor) -> Tensor:
    """Whether differences (b, ...) reach where affine bounds overflow, (b,); intervals still hold there."""
    return ~((d_lower.abs() < FAR) & (d_upper.abs() < FAR)).flatten(1).all(1)


def log_softmax_interval(d_lower: Tensor, d_upper: Tensor) -> tuple[Tensor, Tensor]:
    """Interval of log p_j from intervals of the differences.

    -log sum_k exp(d_upper_jk) <= log p_j <= -log sum_k exp(d_lower_jk)

    d_lower, d_upper: (..., n_k, n_k), zero on the diagonal. Returns two tensors (..., n_k), both <= 0.
    Differences that are infinite or not known at all count as very large: exp does not tell them apart.
    """
    d_lower = torch.nan_to_num(d_lower, nan=-FAR, posinf=FAR, neginf=-FAR)
    d_upper = torch.nan_to_num(d_upper, nan=FAR, posinf=FAR, neginf=-FAR)
    return -torch.logsumexp(d_upper, -1).clamp(min=0), -torch.logsumexp(d_lower, -1).clamp(min=0)


def softmax_lower(d_lower: Tensor, d_upper: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Affine lower bound of p_j: tangent at `at` of the convex 1 / (1 + sum_{k != j} chord of exp(d_jk)).

    All arguments (..., n_k, n_k) with d_lower <= at <= d_upper. Returns const (..., n_k) and coef (..., n_k, n_k) <= 0.
    """
    shift = d_upper.amax(-1, keepdim=True).clamp(min=0)  # exp(-shift) scales every term below 1: nothing overflows
    lo, hi = d_lower - shift, d_upper - shift
    slope = chord_of_exp(lo, hi)
    total = (torch.exp(lo) + slope * (at - d_lower)).sum(-1, keepdim=True)  # the diagonal adds exp(0 - shift)
    tiny = torch.finfo(total.dtype).tiny ** 0.5
    total = total.clamp(min=tiny)
    value = torch.exp(-shift) / total
    coef = -value * slope / total
    coef = coef - torch.diag_embed(torch.diagonal(coef, dim1=-2, dim2=-1))
    const = value.squeeze(-1) - (coef * at).sum(-1)
    return const, coef


def softmax_upper(d_lower: Tensor, d_upper: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Affine upper bound of p_j: secant of exp over the range of log p, then tangent of log p at `at`.

    p <= pl + b (log p - log pl), b the secant slope; log p = -log sum_k exp(d_jk) is concave.

    All arguments (..., n_k, n_k). Returns const (..., n_k) and coef (..., n_k, n_k).
    """
    log_lo, log_hi = log_softmax_interval(d_lower, d_upper)
    b = chord_of_exp(log_lo, log_hi)
    weights = torch.softmax(at, -1)
    const = torch.exp(log_lo) + b * ((weights * at).sum(-1) - torch.logsumexp(at, -1) - log_lo)
    coef = -b.unsqueeze(-1) * weights
    coef = coef - torch.diag_embed(torch.diagonal(coef, dim1=-2, dim2=-1))
    return const, coef


def softmax_of_scores_lower(lower: Tensor, upper: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Affine lower bound of softmax(s)_j from intervals of the scores: tangent at `at[..., j, :]` of the convex
    exp(s_j) / sum_k chord of exp(s_k).

    lower, upper: (..., n_k); at: (..., n_k, n_k), a tangent point for each j.
    Returns const (..., n_k) and coef (..., j, k).
    """
    shift = upper.amax(-1, keepdim=True)
    slope = chord_of_exp(lower - shift, upper - shift).unsqueeze(-2)
    total = (torch.exp(lower - shift).unsqueeze(-2) + slope * (at - lower.unsqueeze(-2))).sum(-1)
    total = total.clamp(min=torch.finfo(total.dtype).tiny ** 0.5)
    value = torch.exp(torch.diagonal(at, dim1=-2, dim2=-1) - shift) / total
    coef = torch.diag_embed(value) - (value / total).unsqueeze(-1) * slope
    return value - (coef * at).sum(-1), coef


def softmax_of_scores_upper(lower: Tensor, upper: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Affine upper bound of softmax(s)_j: p <= pl + b (log p - log pl), log p = s_j - logsumexp(s) by its tangent.

    Arguments and results as in `softmax_of_scores_lower`.
    """
    log_lo, log_hi = log_softmax_of_scores_interval(lower, upper)
    b = chord_of_exp(log_lo, log_hi)
    weights = torch.softmax(at, -1)
    const = torch.exp(log_lo) + b * ((weights * at).sum(-1) - torch.logsumexp(at, -1) - log_lo)
    return const, torch.diag_embed(b) - b.unsqueeze(-1) * weights


def log_softmax_of_scores_interval(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Interval of log softmax(s)_j from intervals of the scores, both ends <= 0; (..., n_k) each."""
    n = lower.shape[-1]
    own = torch.eye(n, dtype=torch.bool, device=lower.device)
    lowest = torch.where(own, lower.unsqueeze(-2), upper.unsqueeze(-2))  # [j, k]: own score low, the others high
    highest = torch.where(own, upper.unsqueeze(-2), lower.unsqueeze(-2))
    return (
        (lower - torch.logsumexp(lowest, -1)).clamp(max=0),
        (upper - torch.logsumexp(highest, -1)).clamp(max=0),
    )


def product_upper(p_lower: Tensor, p_upper: Tensor, w_lower: Tensor, w_upper: Tensor, rho: Tensor):
    """Affine upper bound of p w on a box, from a weight 0 <= rho <= 1.

    p w <= m w + g p + const with m = pl + rho dp, g = wu - rho dw,
    const = rho (1 - rho) dp dw - m g. Every rho is sound: it mixes the two facets of the concave envelope.
    Returns m, g, const with the arguments' broadcast shape.
    """
    dp, dw = p_upper - p_lower, w_upper - w_lower
    m, g = p_lower + rho * dp, w_upper - rho * dw
    return m, g, rho * (1 - rho) * dp * dw - m * g


def weighted_sum_upper(
    d_lower: Tensor,  # (b, ..., n_k, n_k) intervals of the score differences
    d_upper: Tensor,
    w_lower: Tensor,  # (s, b, ..., n_k) intervals of the values in the propagated direction
    w_upper: Tensor,
    rho: Tensor,  # broadcastable to (s, b, ..., n_k): product weight
    shift: Tensor,  # broadcastable to (s, b, ..., 1): offset of the shift tau, in units of max |g_j - tau|
    theta_lower: Tensor,  # broadcastable to (s, b, ..., n_k): tangent points of softmax, 0 = d_lower, 1 = d_upper
    theta_upper: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Affine upper bound of sum_j p_j w_j in the differences d and the values w.

    sum_j p_j w_j <= const + sum_j m_j w_j + sum_jk a_jk d_jk: the product bound gives m_j w_j + g_j p_j, sum p = 1
    turns sum g_j p_j into tau + sum (g_j - tau) p_j, and each p_j is bounded from the side its coefficient asks for.
    Returns a (s, b, ..., n_k, n_k), m (s, b, ..., n_k), const (s, b, ...).
    """
    log_lo, log_hi = log_softmax_interval(d_lower, d_upper)
    p_lo, p_hi = torch.exp(log_lo), torch.exp(log_hi)
    m, g, const = product_upper(p_lo, p_hi, w_lower, w_upper, rho)
    middle = torch.exp(-torch.logsumexp((d_lower + d_upper) / 2, -1))
    tau = (middle * g).sum(-1, keepdim=True) / middle.sum(-1, keepdim=True)
    tau = tau + shift * (g - tau).detach().abs().amax(-1, keepdim=True)
    c = g - tau
    width = d_upper - d_lower
    lo_const, lo_coef = softmax_lower(d_lower, d_upper, d_lower + theta_lower.unsqueeze(-1) * width)
    up_const, up_coef = softmax_upper(d_lower, d_upper, d_lower + theta_upper.unsqueeze(-1) * width)
    pos, neg = c.clamp(min=0), c.clamp(max=0)
    a = pos.unsqueeze(-1) * up_coef + neg.unsqueeze(-1) * lo_coef
    total = const.sum(-1) + tau.squeeze(-1) + (pos * up_const + neg * lo_const).sum(-1)
    return a, m, total


def attention_interval(d_lower: Tensor, d_upper: Tensor, v_lower: Tensor, v_upper: Tensor) -> tuple[Tensor, Tensor]:
    """Interval of sum_j p_j v_j, coordinate by coordinate: greedy over p_lo <= p <= p_hi, sum p = 1.

    d (..., n_q, n_k, n_k), v (..., n_k, d_v). Returns two tensors (..., n_q, d_v).
    """
    log_lo, log_hi = log_softmax_interval(d_lower, d_upper)
    p_lo, p_hi = torch.exp(log_lo), torch.exp(log_hi)
    upper = _greedy_upper(p_lo, p_hi, v_upper)
    return -_greedy_upper(p_lo, p_hi, -v_lower), upper


def _greedy_upper(p_lo: Tensor, p_hi: Tensor, v: Tensor) -> Tensor:
    """max sum_j p_j v_j over p_lo <= p <= p_hi, sum p = 1, for each query (row of p) and coordinate (column of v)."""
    values, order = v.sort(dim=-2, descending=True)  # (..., n_k, d_v)
    index = order.transpose(-1, -2).unsqueeze(-3)  # (..., 1, d_v, n_k)
    shape = (*p_lo.shape[:-1], v.shape[-1], p_lo.shape[-1])  # (..., n_q, d_v, n_k)
    index = index.expand(shape)
    gap = (p_hi - p_lo).unsqueeze(-2).expand(shape).gather(-1, index)
    budget = (1 - p_lo.sum(-1)).clamp(min=0)[..., None, None]
    filled = torch.minimum(gap.cumsum(-1), budget)
    extra = torch.diff(filled, dim=-1, prepend=torch.zeros_like(filled[..., :1]))
    mass = p_lo.unsqueeze(-2).expand(shape).gather(-1, index) + extra
    return (mass * values.transpose(-1, -2).unsqueeze(-3)).sum(-1)

"""The value-weighted secant slack: a closed-form bound of what a moment relaxation loses, and a training penalty."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..problem import HeadProblem
from ..reduced import Reduced, reduce
from ..search import ascend
from ._centred import Centred, centre, largest_values, support


def secant_slack(problem: HeadProblem, t: float | None = None) -> float:
    """Compute the value-weighted secant slack of a problem: how far chords of exp can lift f above t.

        slack(t) = max over 0 <= y_j <= 1 of  sum_j p_j E_j y_j (vmax_j - t) / (Zmin + sum_j p_j E_j y_j)

    E_j is the largest distance of exp from its chord over the range [low_j, high_j] of the score's deviation, vmax_j the
    largest value of token j, Zmin = sum_j p_j e^{low_j}. A fractional knapsack: sort by value, take a prefix.

    Args:
        t: a value that f attains; None is the best one that the search finds. A smaller t gives a larger slack.
    Returns: the slack, in units of f, at least 0.
    Raises: MethodNotApplicableError for substitutions.
    Source: the secant part of `gap_bound`, which has the proof.
    """
    reduced = reduce([problem])
    x, y, f = ascend(reduced)
    at = f if t is None else torch.full_like(f, float(t))
    return float(_secant(centre(reduced, x, y), at)[0])


def gap_bound(
    reduced: Reduced, point: tuple[torch.Tensor, torch.Tensor] | None = None, t: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Bound, without solving anything, how far the second-order relaxation lies above max f: parts of shape (B,).

    Let L be pseudo-moments that are feasible for the relaxation, tau = L[1], bars its means (w = L[w] / tau, e_j =
    L[e_j] / tau), cov its covariances, t = max f. The means lie in the region. Since sum_j p_j L[e_j] = 1,

        objective - t = sum_j p_j L[e_j (value_j - t)] = tau sum_j p_j { e_j (value_j(w) - t) + cov(e_j, u_j . w_j) }

    Split e_j = exp(s_j(w)) + eps_j. The first part of the sum is Phi_t(w) <= 0 for t = max f. Then

      secant     0 <= eps_j <= E_j where L[s_j] = tau s_j(w) (exp cone and chord): tau sum_j p_j eps_j (vmax_j - t), with
                 tau (Zmin + sum_j p_j eps_j) <= sum_j p_j L[e_j] = 1: at most `secant_slack(t)`
      coupling   cov(e_j, u_j . w_j) <= sd(e_j) sd(u_j . w_j) (the block is positive semidefinite); the square's chord gives
                 sd(e_j) <= D_j = (e^{high_j} - e^{low_j}) / 2, the region gives sd(u_j . w_j) <= |u_j|:
                 at most sum_j p_j D_j |u_j| / Zmin
      bilinear   query moving only: L[s_j] = tau (s_j(w) + delta_j), |delta_j| = |<N_j, cov(w_q, w_j)>| <= bend_j (the own key:
                 bend_j too), which multiplies each weight by e^{delta_j}: sum_j p_j e^{high_j} (e^{bend_j} - 1) times
                 max |vmax_j - t|, |vmin_j - t|, over Zmin

    The third order only adds constraints, so the sum bounds its gap too; there the entropy constraint L[e s] >= e log e adds
    exp(s_j) log-excess: e_j log(e_j / exp(s_j)) <= cov(e_j, s_j) <= D_j |alpha_j| sqrt(1 - |w_j|^2), so that a gain of second
    order needs a mean inside its ball, which costs first order: that is why its gap is of third order.
    The recovered bound exceeds the relaxation's value by what rounding and the solver's accuracy cost.
    """
    x, y = ascend(reduced)[:2] if point is None else point
    c = centre(reduced, x, y)
    at = c.f if t is None else t
    K = c.keys
    Zmin = _least_mass(c)
    reach = torch.zeros_like(c.p)
    reach[:, :K] = support(c, c.u)
    reach[:, -1] += support(c, c.own_u)
    half = (torch.expm1(c.high) - torch.expm1(c.low)) / 2
    coupling = (c.p * half * reach).sum(-1) / Zmin
    top = largest_values(c)
    furthest = torch.maximum(top - at.unsqueeze(-1), at.unsqueeze(-1) - (top - 2 * reach)).clamp_min(0.0)
    bilinear = (c.p * torch.exp(c.high) * torch.expm1(c.bend) * furthest).sum(-1) / Zmin
    secant = _secant(c, at)
    return {"secant": secant, "coupling": coupling, "bilinear": bilinear, "total": secant + coupling + bilinear}


def secant_slack_loss(
    tokens: torch.Tensor,
    W_Q: torch.Tensor,
    W_K: torch.Tensor,
    W_V: torch.Tensor,
    readout: torch.Tensor,
    query: int,
    radius: float | torch.Tensor,
    W_O: torch.Tensor | None = None,
    b_Q: torch.Tensor | None = None,
    b_V: torch.Tensor | None = None,
    scale: float | None = None,
    relative: bool = True,
    query_moves: bool = True,
) -> torch.Tensor:
    """Compute the secant slack at t = f(tokens), differentiable in tokens (n, d), weights, readout: a scalar tensor.

    The same quantity as `secant_slack(problem, t=problem.nominal)` for L2 balls (up to where the moving query's scores are
    recentred: here at the nominal tokens). W_Q, W_K (d_head, d), W_V (d_v, d), W_O (d_out, d_v) or None, readout (d_out,).
    Works in the tensors' own dtype and device. It is piecewise smooth: the knapsack's prefix and ties are held still.
    """
    if not 0 <= query < tokens.shape[0]:
        raise ArgumentError(f"query: expected an index in 0..{tokens.shape[0] - 1}, got {query}")
    factor = W_Q.shape[0] ** -0.5 if scale is None else scale
    u = W_V.T @ (readout if W_O is None else W_O.T @ readout)
    size = torch.linalg.vector_norm(tokens, dim=-1) if relative else torch.ones_like(tokens[:, 0])
    r = radius * size
    q = factor * (W_Q @ tokens[query] + (0.0 if b_Q is None else b_Q))
    s = (tokens @ W_K.T) @ q
    p = torch.softmax(s, -1)
    v = tokens @ u
    if b_V is not None:
        v = v + b_V @ (readout if W_O is None else W_O.T @ readout)
    f = p @ v
    a = torch.linalg.vector_norm(W_K.T @ q)
    if query_moves:
        spread, bend = _moving_ranges(tokens, W_Q, W_K, p, a, r, query, factor, q)
        reach = spread + bend
    else:
        still = torch.ones_like(r)
        still[query] = 0.0
        r = r * still
        reach = r * a
    low, high = -reach, reach
    return _knapsack(p, low, high, v + r * torch.linalg.vector_norm(u) - f)


def _moving_ranges(
    tokens: torch.Tensor,
    W_Q: torch.Tensor,
    W_K: torch.Tensor,
    p: torch.Tensor,
    a: torch.Tensor,
    r: torch.Tensor,
    query: int,
    factor: float,
    q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-ranges (n,) of the scores' linear parts, and of their bilinear parts, for a moving query."""
    own = torch.zeros_like(r)
    own[query] = 1.0
    b = factor * (tokens @ W_K.T) @ W_Q + own[:, None] * (W_K.T @ q)
    b = (b - p @ b) * r[query]
    left, right = torch.linalg.qr(W_Q.T)[1], torch.linalg.qr(W_K.T)[1]
    norm = abs(factor) * torch.linalg.matrix_norm(left @ right.T, ord=2)
    return torch.linalg.vector_norm(b, dim=-1) + (1 - own) * r * a, norm * r[query] * r


def _least_mass(c: Centred) -> torch.Tensor:
    return (c.p * torch.exp(c.low)).sum(-1)


def _secant(c: Centred, t: torch.Tensor) -> torch.Tensor:
    return _knapsack(c.p, c.low, c.high, largest_values(c) - t.unsqueeze(-1))


def _knapsack(p: torch.Tensor, low: torch.Tensor, high: torch.Tensor, excess: torch.Tensor) -> torch.Tensor:
    """Largest prefix ratio, keys sorted by excess: p, low, high, excess (..., n) -> (...)."""
    weight = p * secant_error(low, high)
    order = excess.detach().argsort(-1, descending=True)
    weight, gain = weight.gather(-1, order), excess.clamp_min(0.0).gather(-1, order)
    Zmin = (p * torch.exp(low)).sum(-1, keepdim=True)
    ratio = (weight * gain).cumsum(-1) / (Zmin + weight.cumsum(-1))
    return ratio.amax(-1)


def secant_error(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Largest distance between exp and its chord over [low, high]: with m = e^low, h = high - low, c = (e^h - 1) / h,

    it is m (1 + c (log c - 1)), attained at low + log c; a series (h^2 / 8 to leading order) where h is small.
    """
    h = high - low
    wide = h > 1e-2
    safe = torch.where(wide, h, torch.ones_like(h))
    c = torch.expm1(safe) / safe
    exact = 1 + c * (torch.log(c) - 1)
    series = h**2 / 8 * (1 + h * (1 / 2 + h * (11 / 72 + h * (5 / 144))))
    return torch.exp(low) * torch.where(wide, exact, series)

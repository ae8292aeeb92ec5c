"""The value-weighted secant slack: a closed-form bound of what a moment relaxation loses, and a training penalty."""

from __future__ import annotations

from typing import Literal

import torch

from ..errors import ArgumentError, MethodNotApplicableError
from ..problem import HeadProblem
from ..reduced import Reduced, reduce
from ..search import ascend
from ._centred import Centred, centre, largest_values, support


def secant_slack(problem: HeadProblem, t: float | None = None) -> float:
    """Compute the value-weighted secant slack of a problem: how far chords of exp can lift f above t.

        slack(t) = max over 0 <= y_j <= 1 of  sum_j p_j E_j y_j (vmax_j - t) / (Zmin + sum_j p_j E_j y_j)

    E_j is the largest distance of exp from its chord over the range [low_j, high_j] of the score's deviation, vmax_j
    the largest value of token j, Zmin = sum_j p_j e^{low_j}. A fractional knapsack: sort by value, take a prefix.

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
    reduced: Reduced,
    point: tuple[torch.Tensor, torch.Tensor] | None = None,
    t: torch.Tensor | None = None,
    blocks: Literal["reduced", "full"] = "reduced",
) -> dict[str, torch.Tensor]:
    """Bound, without solving anything, how far the moment relaxations lie above t = max f: parts of shape (B,).

        value of the relaxation - t <= secant + coupling + bilinear

    Proof. Let L be feasible pseudo-moments, tau = L[1], w their means L[w] / tau (which lie in the region), e_j and cov
    means and covariances likewise. Since sum_j p_j L[e_j] = 1, the objective less t is

        sum_j p_j L[e_j (value_j - t)] = tau sum_j p_j { e_j (value_j(w) - t) + cov(e_j, u_j . w_j) }.

    Query fixed: L[s_j] = tau s_j(w), so exp cone and chord give e_j = exp(s_j(w)) + eps_j with 0 <= eps_j <= E_j, the
    largest distance of exp from its chord. sum_j p_j exp(s_j(w)) (value_j(w) - t) <= 0 by the choice of t. What is
    left:

      secant    tau sum_j p_j eps_j (vmax_j - t), where tau (Zmin + sum_j p_j eps_j) <= sum_j p_j L[e_j] = 1:
                that is at most `secant_slack`
      coupling  cov(e_j, u_j . w_j) <= sd(e_j) sd(u_j . w_j), as the block is positive semidefinite; the chord of the
                square gives sd(e_j) <= D_j = (e^{high_j} - e^{low_j}) / 2, the region sd(u_j . w_j) <= |u_j|
                sqrt(1 - |w_j|^2): at most sum_j p_j D_j |u_j| / Zmin
      bilinear  query moving: L[s_j] = tau (s_j(w) + delta_j). |delta_j| <= bend_j for full blocks (a covariance of
                vectors in unit balls), <= 12 bend_j for reduced ones (head, tail and cross parts, and the mean's own,
                at |d| <= 2). It multiplies e_j by e^{delta_j}: at most sum_j p_j e^{high_j} (e^{delta_j} - 1)
                max |value_j - t| / Zmin

    With the products of exp's tangent and chord with the region (the default of `moment`) the coupling is smaller: with
    T = 1 + s, |L[(e - T) w]| <= L[e - T] gives L[e (value - t)] <= L[T (value - t)] + L[e - T] (vmax - t), that is,

        coupling  sum_j p_j { cov(s_j, u_j . w_j) + (e^{s_j} - 1 - s_j) (vmax_j - value_j(w)) } tau,

    and cov(s_j, u_j . w_j) <= |alpha_j| |u_j| (1 - |w_j|^2). This vanishes at the maximiser and has to be paid for in
    Phi_t(w), to first order, by a mean inside its ball or away from w*: where the radii are small the secant part
    alone is left. The entropy constraint of the third order, e_j log(e_j / exp(s_j)) <= cov(e_j, s_j) <= D_j |alpha_j|
    sqrt(1 - |w_j|^2), makes eps_j pay in the same way: without products its gap is of third order, with them it
    vanishes to the solver's accuracy where the radii are small (measured, not proved). Either only adds constraints,
    so the sum above bounds the gap at both orders. A recovered bound lies above the relaxation's value by what the
    solver's accuracy costs.

    Args: t, (B,) the maxima, None for the best values found. blocks as in `moment`.
    Raises: MethodNotApplicableError for boxes with reduced blocks, whose means lie in an ellipsoid around the box only.
    """
    if reduced.kind == "box" and blocks == "reduced":
        raise MethodNotApplicableError(
            "blocks: the bound of the gap holds for balls, for boxes only with blocks='full'"
        )
    x, y = ascend(reduced)[:2] if point is None else point
    c = centre(reduced, x, y)
    at = c.f if t is None else t
    Zmin = _least_mass(c)
    reach = torch.zeros_like(c.p)
    reach[:, : c.keys] = support(c, c.u)
    reach[:, -1] += support(c, c.own_u)
    half = (torch.expm1(c.high) - torch.expm1(c.low)) / 2
    coupling = (c.p * half * reach).sum(-1) / Zmin
    top = largest_values(c)
    furthest = torch.maximum(top - at.unsqueeze(-1), at.unsqueeze(-1) - (top - 2 * reach)).clamp_min(0.0)
    delta = c.bend * (1.0 if blocks == "full" else 12.0)
    bilinear = (c.p * torch.exp(c.high) * torch.expm1(delta) * furthest).sum(-1) / Zmin
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

    The same quantity as `secant_slack(problem, t=problem.nominal)` for L2 balls (up to where the moving query's
    scores are recentred: here at the nominal tokens). W_Q, W_K (d_head, d), W_V (d_v, d), W_O (d_out, d_v) or None,
    readout (d_out,). Works in the tensors' own dtype and device. It is piecewise smooth: the knapsack's prefix and
    ties are held still.
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

"""Heads that read tokens: where the tokens may lie, and affine bounds of the heads' output in them for wide ranges.

With displacements dz of the tokens from the centre of their balls or boxes, a score is

    s_ij = s0_ij + A_i . dz_j + B_j . dz_i + scale (W_Q dz_i) . (W_K dz_j)

whose last term is bounded by the coordinates' ranges, and in balls by the spectral norm of scale W_Q^T W_K as well.
Differences of scores get ranges of their own, so what two scores share cancels; the sum of values is then relaxed by
`relaxations.weighted_sum_upper` and pulled back to the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from auto_LiRPA.perturbations import PerturbationLpNorm
from torch import Tensor

from attn_bounds.errors import ArgumentError
from attn_bounds.head import AttentionHead

from .regions import PerturbationTokenBall
from .relaxations import MIX_DEFAULTS, attention_interval, far, weighted_sum_upper

BLOCKED = -1e8  # masks at least this low are meant to take a key out
NOTHING = -1e3  # and do where its score lies this far below another: a weight of exp(-1000) is zero
_OUT = 1 + 4 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Place:
    """Tokens (b, n, d) in balls of radii `spread` (b, n), or in boxes of half-widths `spread` (b, n, d); float64."""

    centre: Tensor
    spread: Tensor
    ends: tuple[Tensor, Tensor] | None = None  # of a box: its own ends, which centre +- spread only encloses

    @property
    def balls(self) -> bool:
        """Whether the tokens lie in balls."""
        return self.spread.ndim == 2

    @classmethod
    def of(cls, node) -> Place:
        """Where the value (b, n, d) of a node of a bounded network lies: its balls, or the box of its bounds."""
        region = getattr(node, "perturbation", None)
        if isinstance(region, PerturbationTokenBall):
            centre = node.center.detach().double()
            return cls(centre, region.radii(centre))
        if isinstance(region, PerturbationLpNorm) and 1 <= region.norm < math.inf:
            # the ball of all tokens together lies in one L2 ball each, for norms beyond 2 of a larger radius
            centre = node.center.detach().double()
            larger = centre[0].numel() ** max(0.0, 0.5 - 1 / region.norm)
            eps = larger * torch.as_tensor(region.eps, dtype=centre.dtype, device=centre.device)
            return cls(centre, eps.amax() * torch.ones_like(centre[..., 0]))
        return cls.box(node.lower, node.upper)

    @classmethod
    def box(cls, lower: Tensor, upper: Tensor) -> Place:
        """The box lower <= z <= upper, (b, n, d) each."""
        low, high = lower.detach().double(), upper.detach().double()
        centre = torch.minimum(torch.maximum((low + high) / 2, low), high)
        half = torch.maximum(high - centre, centre - low)
        return cls(centre, torch.where(low == high, half, half * _OUT), (low, high))

    def same(self, other: Place) -> bool:
        """Whether both are the same region."""
        return self.balls == other.balls and all(
            a.shape == b.shape and torch.equal(a, b)
            for a, b in ((self.centre, other.centre), (self.spread, other.spread))
        )

    def reach(self, rows: Tensor) -> Tensor:
        """Largest rows . dz over the region, rows (..., b, n, d) -> (..., b)."""
        if self.balls:
            return (smooth_norm(rows) * self.spread).sum(-1)
        return (rows.abs() * self.spread).flatten(-2).sum(-1)

    def upper(self, slope: Tensor, constant: Tensor) -> Tensor:
        """Largest slope . z + constant over the region, slope (s, b, n, d), constant (s, b) -> (s, b)."""
        return constant + torch.einsum("sbnd,bnd->sb", slope, self.centre) + self.reach(slope)


def smooth_norm(vectors: Tensor) -> Tensor:
    """Euclidean norm over the last axis, never below it, with a gradient at zero."""
    return (vectors.square().sum(-1) + 1e-60).sqrt()


def normal_mask(mask: Tensor | None) -> Tensor | None:
    """An added mask (..., n) in float64, less the largest entry of each row, which softmax does not see; None: nothing.

    Raises: ArgumentError for a query that may read no key at all.
    """
    if mask is None:
        return None
    mask = mask.detach().double()
    most = mask.amax(-1, keepdim=True)
    if not bool(torch.isfinite(most).all()):
        raise ArgumentError("mask: expected a finite number in every row and no NaN, got a row without; softmax is NaN")
    mask = mask - most
    return mask if bool((mask != 0).any()) else None


@dataclass(frozen=True)
class TokenHeads:
    """Weights (h, c, d) and (h, c) of heads that read the same tokens; `mask` (n, n) is added to the scores.

    The mask is one of `normal_mask`.
    """

    W_Q: Tensor
    b_Q: Tensor
    W_K: Tensor
    b_K: Tensor
    W_V: Tensor
    b_V: Tensor
    scale: float
    mask: Tensor | None = None

    @cached_property
    def single(self) -> list[AttentionHead]:
        """Each head as the library's."""
        parts = (self.W_Q, self.W_K, self.W_V, self.b_Q, self.b_K, self.b_V)
        return [
            AttentionHead(q, k, v, None, b_q, b_k, b_v, scale=self.scale)
            for q, k, v, b_q, b_k, b_v in zip(*(part.detach() for part in parts), strict=True)
        ]

    def attended(self, n: int) -> Tensor | None:
        """Which keys each query reads, (n, n) of bool; None for a mask that does more than take keys out.

        Whether a mask does take a key out depends on the scores: see `Scores.takes_out`.
        """
        if self.mask is None:
            return torch.ones(n, n, dtype=torch.bool, device=self.W_Q.device)
        rows = self.mask.reshape(-1, self.mask.shape[-2] if self.mask.ndim > 1 else 1, self.mask.shape[-1])
        if rows.shape[0] != 1 or not ((rows == 0) | (rows <= BLOCKED)).all():
            return None
        return (rows[0] == 0).expand(n, n)

    @cached_property
    def bilinear_norm(self) -> Tensor:
        """Spectral norm (h,) of scale W_Q^T W_K."""
        left, right = (torch.linalg.qr(w.transpose(1, 2), mode="r")[1] for w in (self.W_Q, self.W_K))
        return abs(self.scale) * torch.linalg.matrix_norm(left @ right.transpose(1, 2), ord=2) * (1 + 1e-10)


class Scores:
    """Scores and their ranges for heads whose tokens lie in one place; see the module's first lines."""

    def __init__(self, heads: TokenHeads, place: Place):
        self.heads, self.place = heads, place
        z = place.centre.unsqueeze(1)  # (b, 1, n, d)
        q = heads.scale * (z @ heads.W_Q.transpose(1, 2) + heads.b_Q.unsqueeze(1))
        k = z @ heads.W_K.transpose(1, 2)  # the key bias is common to all scores: softmax does not see it
        self.A, self.B = q @ heads.W_K, heads.scale * k @ heads.W_Q  # (b, h, n, d)
        self.s0 = q @ k.transpose(-1, -2)
        half_q, half_k = self._spread(heads.W_Q), self._spread(heads.W_K)  # (b, h, n, c)
        self.slack = abs(heads.scale) * half_q @ half_k.transpose(-1, -2)
        if place.balls:  # by the spectral norm
            by_norm = place.spread.unsqueeze(-1) * place.spread.unsqueeze(-2)
            together = heads.bilinear_norm.view(-1, 1, 1) * by_norm.unsqueeze(1)
        else:
            together = abs(heads.scale) * self._joint(heads.W_Q, heads.W_K)
        self.slack = torch.minimum(self.slack, together)
        if heads.mask is not None:
            self.s0 = self.s0 + heads.mask.clamp(min=self._lowest(heads.mask))

    def _lowest(self, mask: Tensor) -> float:
        """A finite stand-in for minus infinity in the mask: far enough below all scores for a weight of zero."""
        if bool(torch.isfinite(mask).all()):
            return -torch.inf
        sizes = self.s0, self._reach(self.A), self._reach(self.B), self.slack, mask[torch.isfinite(mask)]
        return 10 * NOTHING - 4 * sum(float(size.abs().max()) for size in sizes)

    def takes_out(self, keys: Tensor) -> bool:
        """Whether every key that `keys` (n, n) leaves out has no weight anywhere in the region."""
        apart = self.differences[1].masked_fill(~keys.unsqueeze(-1), torch.inf).amin(-2)  # (b, h, i, k)
        return bool(((apart <= NOTHING) | keys).all())

    def _joint(self, left: Tensor, right: Tensor) -> Tensor:
        """Bound (b, h, i, j) of |(left dz_i) . (right dz_j)| over boxes, all coordinates together.

        |t . A^T B t'| <= |D^1/2 t| |E^1/2 t'| sigma(D^-1/2 A^T B E^-1/2) for weights D, E > 0, here the columns' norms,
        and |D^1/2 t|^2 <= sum D in the unit box. The spectral norm is that of a product of two triangles (c, c).
        """
        parts = []
        for weight in (left, right):
            columns = (weight.unsqueeze(1) * self.place.spread[:, None, :, None]).transpose(-1, -2)  # (b, h, n, d, c)
            size = columns.norm(dim=-1).clamp(min=1e-150)
            triangle = torch.linalg.qr(columns / size.sqrt().unsqueeze(-1), mode="r")[1]  # R^T R = A D^-1 A^T
            parts.append((triangle, size.sum(-1).sqrt()))
        (first, one), (second, other) = parts
        product = first.unsqueeze(3) @ second.transpose(-1, -2).unsqueeze(2)  # (b, h, i, j, c, c)
        if not bool(torch.isfinite(product).all()):
            return torch.full_like(product[..., 0, 0], torch.inf)
        sigma = torch.linalg.matrix_norm(product, ord=2) * (1 + 1e-10)
        return sigma * one.unsqueeze(-1) * other.unsqueeze(-2)

    def _spread(self, weight: Tensor) -> Tensor:
        """Half-width (b, h, n, c) of the rows of weight (h, c, d) times dz."""
        if self.place.balls:
            return self.place.spread[:, None, :, None] * weight.norm(dim=-1)[None, :, None]
        return self.place.spread.unsqueeze(1) @ weight.abs().transpose(1, 2)

    def _reach(self, vectors: Tensor) -> Tensor:
        """Largest v . dz_i at each token i, vectors (b, h, m, d) -> (b, h, m, n)."""
        if self.place.balls:
            return vectors.norm(dim=-1).unsqueeze(-1) * self.place.spread[:, None, None]
        return vectors.abs() @ self.place.spread.transpose(1, 2).unsqueeze(1)

    @cached_property
    def differences(self) -> tuple[Tensor, Tensor]:
        """Ranges (b, h, i, j, k) of s_ik - s_ij, zero where j = k."""
        n = self.s0.shape[-1]
        middle = self.s0.unsqueeze(-2) - self.s0.unsqueeze(-1)
        turned = self.B.unsqueeze(-3) - self.B.unsqueeze(-2)  # (b, h, j, k, d): what multiplies dz_i
        moved = self._reach(turned.flatten(2, 3)).unflatten(2, (n, n)).movedim(-1, 2)  # (b, h, i, j, k)
        keys = self._reach(self.A)  # (b, h, i, j): A_i . dz_j
        radius = moved + keys.unsqueeze(-1) + keys.unsqueeze(-2)
        # where the query is one of the two keys, its token's two slopes add up before they are measured
        own = torch.arange(n, device=middle.device)
        joint = (self.B.unsqueeze(-2) - self.B.unsqueeze(-3) + self.A.unsqueeze(-2)).flatten(2, 3)  # (b, h, i n + j, d)
        joint = self._reach(joint).unflatten(2, (n, n))[:, :, own, :, own].movedim(0, 2) + keys
        radius[:, :, own, own, :] = joint
        radius[:, :, own, :, own] = joint.movedim(2, 0)
        radius = (radius + self.slack.unsqueeze(-1) + self.slack.unsqueeze(-2)) * (1 + 1e-13)
        same = torch.eye(n, dtype=torch.bool, device=middle.device)
        radius = radius + 1e-15 * middle.abs()
        return (middle - radius).masked_fill(same, 0), (middle + radius).masked_fill(same, 0)

    def interval(self) -> tuple[Tensor, Tensor]:
        """Interval (b, h, n, c) of the heads' outputs."""
        heads = self.heads
        v = self.place.centre.unsqueeze(1) @ heads.W_V.transpose(1, 2) + heads.b_V.unsqueeze(1)
        half = self._spread(heads.W_V)
        return attention_interval(*self.differences, v - half, v + half)

    def upper(self, rows: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Affine upper bound of rows . output, rows (s, b, h, i, c): slopes (s, b, n, d) and constants (s, b).

        parameters (..., b, h, i, j, 4): rho, tau and the two tangent points of `weighted_sum_upper`.
        """
        heads, z = self.heads, self.place.centre
        u = torch.einsum("sbhic,hcd->sbhid", rows, heads.W_V)
        fixed = torch.einsum("sbhic,hc->sbhi", rows, heads.b_V).unsqueeze(-1)
        w = torch.einsum("sbhid,bjd->sbhij", u, z) + fixed
        if self.place.balls:
            half = u.norm(dim=-1, keepdim=True) * self.place.spread[None, :, None, None]
        else:
            half = torch.einsum("sbhid,bjd->sbhij", u.abs(), self.place.spread)
        rho, shift, theta_low, theta_high = parameters.unbind(-1)
        a, m, constant = weighted_sum_upper(
            *self.differences, w - half, w + half, rho, shift.mean(-1, keepdim=True), theta_low, theta_high
        )
        on_scores = a.sum(-2) - a.sum(-1)  # (s, b, h, i, j)
        slope = (
            torch.einsum("sbhij,bhid->sbjd", on_scores, self.A)
            + torch.einsum("sbhij,bhjd->sbid", on_scores, self.B)
            + torch.einsum("sbhij,sbhid->sbjd", m, u)
        )
        here = (on_scores * self.s0 + on_scores.abs() * self.slack + m * w).sum(-1)
        constant = (constant + here).flatten(2).sum(-1) - torch.einsum("sbnd,bnd->sb", slope, z)
        return slope, constant.masked_fill(far(*self.differences), torch.nan)


def default_parameters(n_heads: int, n: int, like: Tensor) -> Tensor:
    """The middle of every parameter of `Scores.upper`, (h, n, n, 4)."""
    return like.new_tensor(MIX_DEFAULTS).expand(n_heads, n, n, 4)

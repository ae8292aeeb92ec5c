"""Where tokens may move: L2 balls, boxes, lists of substitutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._arrays import as_float64
from .errors import RegionError, ShapeError


@dataclass(frozen=True)
class Balls:
    """One L2 ball per point: |z_j - centre_j| <= radius_j. centre (p, d), radius (p,)."""

    centre: torch.Tensor
    radius: torch.Tensor


@dataclass(frozen=True)
class Boxes:
    """One box per point: lower_j <= z_j <= upper_j. Both (p, d)."""

    lower: torch.Tensor
    upper: torch.Tensor


@dataclass(frozen=True)
class Lists:
    """One finite list per point: z_j in candidates[j], each (m_j, d)."""

    candidates: tuple[torch.Tensor, ...]


class TokenBall:
    """Each token in a ball around itself: |z_j - tokens_j| <= radius_j (times |tokens_j| when `relative`).

    Args:
        radius: a number, or one per token (an outside query that moves is one point more, the last); 0 holds still.
        relative: in units of the token's own norm.
        norm: 2, or float("inf") for a box of that half-width (relative to the token's largest entry).

    Raises: RegionError.
    """

    def __init__(self, radius: Any, relative: bool = True, norm: float = 2) -> None:
        self.radius = as_float64("radius", radius)
        if self.radius.dim() > 1:
            raise ShapeError(f"radius: expected a number or one per token, got shape {tuple(self.radius.shape)}")
        if (self.radius < 0).any():
            raise RegionError(f"radius: expected at least 0, got {float(self.radius.min()):g}")
        if not isinstance(norm, (int, float)) or norm not in (2, float("inf")):
            raise RegionError(f"norm: expected 2 or inf, got {norm!r}")
        self.relative = bool(relative)
        self.norm = norm

    def place(self, points: torch.Tensor, count: int) -> Balls | Boxes:
        """Place the region on points (p, d), the first `count` of which are the tokens."""
        radius = self.radius.to(points.device)
        if radius.dim() == 1 and radius.shape[0] != points.shape[0]:
            raise ShapeError(f"radius: expected a number or {points.shape[0]} of them, got {radius.shape[0]}")
        if self.relative:
            radius = radius * torch.linalg.vector_norm(points, ord=self.norm, dim=-1)
        radius = radius.expand(points.shape[0])
        if self.norm == 2:
            return Balls(points, radius)
        return Boxes(points - radius[:, None], points + radius[:, None])

    def __repr__(self) -> str:
        shown = f"{self.radius.item():g}" if self.radius.dim() == 0 else f"[{self.radius.numel()} radii]"
        return f"TokenBall({shown}, relative={self.relative}, norm={self.norm})"


class TokenBox:
    """Each token in a box: lower_j <= z_j <= upper_j, both (n, d) (an outside query that moves is one row more).

    Raises: RegionError where lower exceeds upper.
    """

    def __init__(self, lower: Any, upper: Any) -> None:
        self.lower = as_float64("lower", lower, ("n", "d"))
        self.upper = as_float64("upper", upper, tuple(self.lower.shape), self.lower.device)
        if (self.lower > self.upper).any():
            j, k = (int(i) for i in (self.lower > self.upper).nonzero()[0])
            raise RegionError(
                f"lower: expected at most upper, got {self.lower[j, k]:g} > {self.upper[j, k]:g} "
                f"at token {j}, entry {k}"
            )
        self._radius: torch.Tensor | None = None

    @classmethod
    def around(cls, tokens: Any, radius: Any) -> TokenBox:
        """Build the box of half-width `radius` (a number, or what broadcasts to (n, d)) around tokens (n, d)."""
        z = as_float64("tokens", tokens, ("n", "d"))
        half = as_float64("radius", radius, device=z.device)
        if (half < 0).any():
            raise RegionError(f"radius: expected at least 0, got {float(half.min()):g}")
        try:
            half_full = half.expand_as(z)
        except RuntimeError:
            raise ShapeError(f"radius: expected to broadcast to {tuple(z.shape)}, got {tuple(half.shape)}") from None
        box = cls(z - half_full, z + half_full)
        if half.dim() == 0:  # then an outside query has the same half-width
            box._radius = half
        return box

    def place(self, points: torch.Tensor, count: int) -> Boxes:
        """Place the region on points (p, d), the first `count` of which are the tokens."""
        lower, upper = self.lower.to(points.device), self.upper.to(points.device)
        if self._radius is not None and lower.shape[0] == count < points.shape[0]:
            half = self._radius.to(points.device)
            lower = torch.cat([lower, points[count:] - half])
            upper = torch.cat([upper, points[count:] + half])
        if lower.shape != points.shape:
            more = "" if points.shape[0] == count else " (one row more for the outside query, which moves)"
            raise ShapeError(f"region: expected a box of shape {tuple(points.shape)}{more}, got {tuple(lower.shape)}")
        outside = (points < lower) | (points > upper)
        if outside.any():
            j, k = (int(i) for i in outside.nonzero()[0])
            raise RegionError(
                f"region: expected a box that holds the tokens, got [{lower[j, k]:g}, {upper[j, k]:g}] "
                f"around {points[j, k]:g} at token {j}, entry {k}"
            )
        return Boxes(lower, upper)

    def __repr__(self) -> str:
        return f"TokenBox{tuple(self.lower.shape)}"


class TokenSubstitutions:
    """Each token is one of a finite list of candidates: n arrays (m_j, d); a token itself counts only where listed.

    Raises: RegionError for an empty list.
    """

    def __init__(self, candidates: Sequence[Any]) -> None:
        if not isinstance(candidates, Sequence) and not hasattr(candidates, "shape"):
            raise RegionError(f"candidates: expected a list of arrays (m, d), got {type(candidates).__name__}")
        if len(candidates) == 0:
            raise RegionError("candidates: expected one list per token, got none")
        self.candidates = tuple(as_float64(f"candidates[{j}]", c, ("m", "d")) for j, c in enumerate(candidates))
        for j, c in enumerate(self.candidates):
            if c.shape[0] == 0:
                raise RegionError(f"candidates[{j}]: expected at least one candidate, got none")

    def place(self, points: torch.Tensor, count: int) -> Lists:
        """Place the region on points (p, d), the first `count` of which are the tokens."""
        if len(self.candidates) != points.shape[0]:
            raise ShapeError(f"candidates: expected {points.shape[0]} lists, got {len(self.candidates)}")
        for j, c in enumerate(self.candidates):
            if c.shape[1] != points.shape[1]:
                raise ShapeError(f"candidates[{j}]: expected (m, {points.shape[1]}), got {tuple(c.shape)}")
        return Lists(tuple(c.to(points.device) for c in self.candidates))

    def __repr__(self) -> str:
        return f"TokenSubstitutions({len(self.candidates)} lists)"

"""One question: how large can readout . head(tokens) become while the tokens move in their region?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ._arrays import as_float64, as_mask, checked_device, checked_index
from .errors import ArgumentError, NotFiniteError, RegionError
from .head import AttentionHead
from .regions import Balls, Boxes, Lists, TokenBall, TokenBox, TokenSubstitutions


@dataclass(frozen=True)
class SearchResult:
    """An attained value of f, the tokens (n, d) that attain it, and the outside query (d,) where one moves."""

    value: float
    tokens: torch.Tensor
    query: torch.Tensor | None = None


class HeadProblem:
    """Maximise f(z) = readout . head(z) at one query over a region of the tokens.

    Args:
        head: the AttentionHead.
        tokens: (n, d), the nominal tokens.
        query: index of the query's token (which is then query and, unless masked, key: one shared variable), or a
            vector (d,) outside the keys (cross attention).
        readout: (d_out,), the linear functional of the head's output.
        region: TokenBall, TokenBox or TokenSubstitutions.
        query_moves: False holds the query's token still, as query and as key.
        keys: optional bool mask (n,): the keys that are attended to (causal or padding mask).

    Raises: ShapeError, NotFiniteError, RegionError, ArgumentError.
    """

    def __init__(
        self,
        head: AttentionHead,
        tokens: Any,
        query: Any,
        readout: Any,
        region: TokenBall | TokenBox | TokenSubstitutions,
        query_moves: bool = True,
        keys: Any = None,
    ) -> None:
        if not isinstance(head, AttentionHead):
            raise ArgumentError(f"head: expected an AttentionHead, got {type(head).__name__}")
        self.head = head
        self.tokens = as_float64("tokens", tokens, ("n", head.d), head.device)
        if self.n == 0:
            raise ArgumentError("tokens: expected at least one token, got none")
        self.query = self._checked_query(query)
        self.readout = as_float64("readout", readout, (head.d_out,), head.device)
        if not isinstance(region, (TokenBall, TokenBox, TokenSubstitutions)):
            raise RegionError(
                f"region: expected TokenBall, TokenBox or TokenSubstitutions, got {type(region).__name__}"
            )
        self.region = region
        if not isinstance(query_moves, (bool, np.bool_)):
            raise ArgumentError(f"query_moves: expected True or False, got {query_moves!r}")
        self.query_moves = bool(query_moves)
        self.keys = None if keys is None else as_mask("keys", keys, self.n, head.device)
        if self.keys is not None and not self.keys.any():
            raise ArgumentError("keys: expected at least one attended key, got an all-false mask")
        self.placed = self._place()
        self.found: SearchResult | None = None  # the best attained value that any method has come across

    def _checked_query(self, query: Any) -> int | torch.Tensor:
        index = checked_index("query", query, self.n)
        return as_float64("query", query, (self.head.d,), self.head.device) if index is None else index

    def _place(self) -> Balls | Boxes | Lists:
        outside_moves = self.query_index is None and self.query_moves
        points = torch.cat([self.tokens, self.query_point[None]]) if outside_moves else self.tokens
        placed = self.region.place(points, self.n)
        if self.query_index is None or self.query_moves:
            return placed
        i, token = self.query_index, self.tokens[self.query_index]
        if isinstance(placed, Balls):
            radius = placed.radius.clone()
            radius[i] = 0.0
            return Balls(placed.centre, radius)
        if isinstance(placed, Boxes):
            lower, upper = placed.lower.clone(), placed.upper.clone()
            lower[i] = upper[i] = token
            return Boxes(lower, upper)
        lists = list(placed.candidates)
        lists[i] = token[None]
        return Lists(tuple(lists))

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.tokens.shape[0]

    @property
    def query_index(self) -> int | None:
        """Index of the query's token; None for a query outside the tokens."""
        return self.query if isinstance(self.query, int) else None

    @property
    def query_point(self) -> torch.Tensor:
        """The nominal query token, (d,)."""
        return self.tokens[self.query] if isinstance(self.query, int) else self.query

    @property
    def query_place(self) -> int | None:
        """Row of the query among the placed points; None where an outside query stands still."""
        if self.query_index is not None:
            return self.query_index
        return self.n if self.query_moves else None

    @cached_property
    def query_is_fixed(self) -> bool:
        """Whether the query cannot move: held still, or its region is a single point."""
        row = self.query_place
        if row is None:
            return True
        if isinstance(self.placed, Balls):
            return bool(self.placed.radius[row] == 0)
        if isinstance(self.placed, Boxes):
            return bool((self.placed.lower[row] == self.placed.upper[row]).all())
        return self.placed.candidates[row].shape[0] == 1

    @cached_property
    def key_order(self) -> list[int]:
        """Indices of the attended keys; where the moving query's own token is one of them, it comes last."""
        live = range(self.n) if self.keys is None else [int(j) for j in self.keys.nonzero()[:, 0]]
        if not self.has_own_key:
            return list(live)
        return [j for j in live if j != self.query_index] + [self.query_index]  # type: ignore[list-item]

    @cached_property
    def has_own_key(self) -> bool:
        """Whether the query moves and its own token is one of the attended keys."""
        i = self.query_index
        return i is not None and not self.query_is_fixed and (self.keys is None or bool(self.keys[i]))

    def value(self, tokens: torch.Tensor, query: torch.Tensor | None = None) -> torch.Tensor:
        """Compute f at tokens (..., n, d); `query` (..., d) moves an outside query. Returns (...), float64."""
        at = self.query_index if self.query_index is not None else (self.query_point if query is None else query)
        return self.head.forward(tokens, at, self.keys) @ self.readout

    @cached_property
    def nominal(self) -> float:
        """f at the nominal tokens."""
        value = float(self.value(self.tokens))
        if not math.isfinite(value):
            raise NotFiniteError(f"tokens: expected scores and values in float64's range, got a nominal value {value}")
        return value

    def note(self, result: SearchResult) -> None:
        """Remember an attained value if it is the best so far."""
        if self.found is None or result.value > self.found.value:
            self.found = result

    def contains(self, tokens: torch.Tensor, query: torch.Tensor | None = None) -> bool:
        """Whether tokens (n, d), and an outside query that moves, lie in the region (to one part in 1e12 for balls)."""
        points = tokens
        if self.placed_count > self.n:
            points = torch.cat([tokens, (self.query_point if query is None else query)[None]])
        if isinstance(self.placed, Balls):
            distance = torch.linalg.vector_norm(points - self.placed.centre, dim=-1)
            # A difference of two nearby vectors carries the rounding of the vectors themselves.
            slack = 1e-12 * self.placed.radius + 1e-15 * torch.linalg.vector_norm(points, dim=-1)
            return bool((distance <= self.placed.radius + slack).all())
        if isinstance(self.placed, Boxes):
            return bool(((points >= self.placed.lower) & (points <= self.placed.upper)).all())
        return all(bool((c == z).all(dim=-1).any()) for c, z in zip(self.placed.candidates, points, strict=True))

    @property
    def placed_count(self) -> int:
        """Number of points the region places: the tokens, and an outside query that moves."""
        return len(self.placed.candidates) if isinstance(self.placed, Lists) else self._first(self.placed).shape[0]

    @staticmethod
    def _first(placed: Balls | Boxes) -> torch.Tensor:
        return placed.centre if isinstance(placed, Balls) else placed.lower

    def flipped(self) -> HeadProblem:
        """The minimisation: the same problem with the readout's sign changed."""
        return self._copy(readout=-self.readout)

    def to(self, device: Any) -> HeadProblem:
        """The same problem with its tensors on `device`."""
        return self if checked_device(device) == self.head.device else self._copy(head=self.head.to(device))

    def _copy(self, **changes: Any) -> HeadProblem:
        fields = ("head", "tokens", "query", "readout", "region", "query_moves", "keys")
        return HeadProblem(**{name: changes.get(name, getattr(self, name)) for name in fields})

    def __repr__(self) -> str:
        where = self.query_index if self.query_index is not None else "outside"
        return (
            f"HeadProblem(n={self.n}, d={self.head.d}, query={where}, moves={not self.query_is_fixed}, {self.region})"
        )

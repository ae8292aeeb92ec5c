"""One attention head: its weights, its forward pass, and the few products of weights that every bound needs."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ._arrays import as_float64, as_mask, checked_device, checked_index
from .errors import ArgumentError, ShapeError


class AttentionHead:
    """Weights of one softmax attention head, in `torch.nn.Linear.weight` layout, held in float64.

    s_j = scale (W_Q z_i + b_Q) . (W_K z_j + b_K),  p = softmax(s),  h = W_O sum_j p_j (W_V z_j + b_V)

    Args:
        W_Q, W_K: (d_head, d). W_V: (d_v, d). W_O: (d_out, d_v), or None for the identity (d_out = d_v).
        b_Q, b_K: (d_head,). b_V: (d_v,). None is zero.
        scale: of the scores; None is 1 / sqrt(d_head).

    Raises: ShapeError, NotFiniteError, ArgumentError.
    """

    def __init__(
        self,
        W_Q: Any,
        W_K: Any,
        W_V: Any,
        W_O: Any = None,
        b_Q: Any = None,
        b_K: Any = None,
        b_V: Any = None,
        scale: float | None = None,
    ) -> None:
        self.W_Q = as_float64("W_Q", W_Q, ("d_head", "d"))
        device = self.W_Q.device
        d_head, d = self.W_Q.shape
        if d_head == 0 or d == 0:
            raise ShapeError(f"W_Q: expected (d_head, d) with both at least 1, got {(d_head, d)}")
        key = as_float64("W_K", W_K, ("d_head", "d"), device)
        if key.shape != self.W_Q.shape:
            raise ShapeError(
                f"W_K: expected {(d_head, d)} like W_Q, got {tuple(key.shape)}; with grouped key/value heads pass "
                "the d_head rows of the key group that serves this query head"
            )
        self.W_K = key
        self.W_V = as_float64("W_V", W_V, ("d_v", d), device)
        d_v = self.W_V.shape[0]
        if d_v == 0:
            raise ShapeError(f"W_V: expected (d_v, {d}) with d_v at least 1, got (0, {d})")
        self.W_O = None if W_O is None else as_float64("W_O", W_O, ("d_out", d_v), device)
        self.b_Q = self._bias("b_Q", b_Q, d_head, device)
        self.b_K = self._bias("b_K", b_K, d_head, device)
        self.b_V = self._bias("b_V", b_V, d_v, device)
        try:
            self.scale = 1.0 / math.sqrt(d_head) if scale is None else float(scale)
        except (TypeError, ValueError):
            raise ArgumentError(f"scale: expected a number or None, got {scale!r}") from None
        if not math.isfinite(self.scale):
            raise ArgumentError(f"scale: expected a finite number or None, got {scale}")

    @staticmethod
    def _bias(name: str, value: Any, size: int, device: torch.device) -> torch.Tensor:
        if value is None:
            return torch.zeros(size, dtype=torch.float64, device=device)
        return as_float64(name, value, (size,), device)

    @property
    def d(self) -> int:
        """Width of a token."""
        return self.W_Q.shape[1]

    @property
    def d_head(self) -> int:
        """Width of queries and keys."""
        return self.W_Q.shape[0]

    @property
    def d_out(self) -> int:
        """Width of the head's output."""
        return self.W_V.shape[0] if self.W_O is None else self.W_O.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.W_Q.device

    def to(self, device: Any) -> AttentionHead:
        """Return the same head with its weights on `device`."""
        device = checked_device(device)
        if device == self.device:
            return self
        weights = (self.W_Q, self.W_K, self.W_V, self.W_O, self.b_Q, self.b_K, self.b_V)
        q, k, v, o, b_q, b_k, b_v = (None if w is None else w.to(device) for w in weights)
        return AttentionHead(q, k, v, o, b_q, b_k, b_v, self.scale)

    def forward(self, tokens: Any, query: Any, keys: Any = None) -> Any:
        """Compute the head's output at one query.

        Args: tokens (..., n, d); query an index into the tokens, or a vector (..., d); keys an optional bool mask (n,).
        Returns: (..., d_out), float64; a numpy array where `tokens` is one, else a tensor.
        """
        z = as_float64("tokens", tokens, device=self.device, copy=False)
        if z.dim() < 2 or z.shape[-1] != self.d:
            raise ShapeError(f"tokens: expected (n, {self.d}), got {tuple(z.shape)}")
        index = checked_index("query", query, z.shape[-2])
        if index is not None:
            zq = z[..., index, :]
        else:
            zq = as_float64("query", query, device=self.device, copy=False)
            if zq.shape[-1:] != (self.d,):
                raise ShapeError(f"query: expected an index or a vector ({self.d},), got {tuple(zq.shape)}")
        scores = self.scores(z, zq)
        if keys is not None:
            mask = as_mask("keys", keys, z.shape[-2], self.device)
            if not mask.any():
                raise ArgumentError("keys: expected at least one attended key, got an all-false mask")
            scores = scores.masked_fill(~mask, -math.inf)
        p = torch.softmax(scores, dim=-1)
        values = z @ self.W_V.T + self.b_V
        out = (p.unsqueeze(-2) @ values).squeeze(-2)
        out = out if self.W_O is None else out @ self.W_O.T
        return out.cpu().numpy() if isinstance(tokens, np.ndarray) else out

    def scores(self, tokens: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Compute the scores (..., n) of tokens (..., n, d) for a query (..., d), up to what b_K adds to them all.

        The softmax does not see a number common to all scores, and a large one would only cost digits.
        """
        q = query @ self.W_Q.T + self.b_Q
        k = tokens @ self.W_K.T
        return self.scale * (k @ q.unsqueeze(-1)).squeeze(-1)

    def value_direction(self, readout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (u, const) with readout . W_O (W_V z + b_V) = u . z + const; u is (d,), const a scalar tensor."""
        c = readout if self.W_O is None else self.W_O.T @ readout
        return self.W_V.T @ c, self.b_V @ c

    @cached_property
    def basis(self) -> torch.Tensor | None:
        """Orthonormal basis (d, 2 d_head) of the span of the rows of W_Q and W_K; None when that may be all of R^d."""
        if 2 * self.d_head + 1 >= self.d:
            return None
        return torch.linalg.qr(torch.cat([self.W_Q, self.W_K]).T)[0]

    @cached_property
    def rotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale W_Q B, W_K B) in the basis B (or the plain weights without one): the two factors of the score."""
        if self.basis is None:
            return self.scale * self.W_Q, self.W_K
        return self.scale * self.W_Q @ self.basis, self.W_K @ self.basis

    @cached_property
    def bilinear_norm(self) -> float:
        """Spectral norm of scale W_Q^T W_K."""
        fq, fk = self.rotated
        return float(torch.linalg.matrix_norm(fq.T @ fk, ord=2))

    @cached_property
    def norms(self) -> tuple[float, ...]:
        """Spectral norms of W_Q and W_K, then Frobenius norms of W_Q, W_K, W_V and W_O (1 where there is none)."""
        spectral = [float(torch.linalg.matrix_norm(w, ord=2)) for w in (self.W_Q, self.W_K)]
        frobenius = [float(torch.linalg.vector_norm(w)) for w in (self.W_Q, self.W_K, self.W_V)]
        return (*spectral, *frobenius, 1.0 if self.W_O is None else float(torch.linalg.vector_norm(self.W_O)))

    @cached_property
    def own_range(self) -> tuple[float, float]:
        """Smallest and largest eigenvalue of the symmetric part of scale W_Q^T W_K (zero included: rank < d)."""
        fq, fk = self.rotated
        product = fq.T @ fk
        eigenvalues = torch.linalg.eigvalsh((product + product.T) / 2)
        low, high = float(eigenvalues[0]), float(eigenvalues[-1])
        return (low, high) if self.basis is None else (min(low, 0.0), max(high, 0.0))

    @staticmethod
    def from_bert(model: Any, layer: int, head: int) -> AttentionHead:
        """See `attn_bounds.loaders.from_bert`."""
        from . import loaders  # here, since the loaders build heads

        return loaders.from_bert(model, layer, head)

    @staticmethod
    def from_gpt2(model: Any, layer: int, head: int) -> AttentionHead:
        """See `attn_bounds.loaders.from_gpt2`."""
        from . import loaders

        return loaders.from_gpt2(model, layer, head)

    @staticmethod
    def from_vit(model: Any, layer: int, head: int) -> AttentionHead:
        """See `attn_bounds.loaders.from_vit`."""
        from . import loaders

        return loaders.from_vit(model, layer, head)

    @staticmethod
    def from_multihead_attention(module: torch.nn.MultiheadAttention, head: int) -> AttentionHead:
        """See `attn_bounds.loaders.from_multihead_attention`."""
        from . import loaders

        return loaders.from_multihead_attention(module, head)

    def __repr__(self) -> str:
        return f"AttentionHead(d={self.d}, d_head={self.d_head}, d_out={self.d_out}, scale={self.scale:g})"

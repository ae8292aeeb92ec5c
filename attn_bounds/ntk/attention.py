"""Parameter-free linearized attention as a scikit-learn transformer, differentiable when it is given tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.exceptions import NotFittedError
from torch import Tensor

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk._arrays import ArrayLike, choice, like, matrix, positive, whole

_SCALES = ("none", "samples", "trace")


class _SymmetricFunction(torch.autograd.Function):
    """V f(w) V^T for a symmetric matrix, f(w) -> (values, slopes), with the Daleckii-Krein derivative.

    dF = V (Q * (V^T dC V)) V^T with Q_ij = (f(w_i) - f(w_j)) / (w_i - w_j), which stays finite at repeated
    eigenvalues, where differentiating an eigendecomposition gives NaN.
    """

    @staticmethod
    def forward(ctx: Any, C: Tensor, f: Callable[[Tensor], tuple[Tensor, Tensor]], cap: float) -> Tensor:
        w, V = torch.linalg.eigh(C)
        w = w.clamp(min=0)
        fw, slope = f(w)
        ctx.save_for_backward(w, V, fw, slope)
        ctx.cap = cap
        return (V * fw) @ V.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (grad,) = grads
        w, V, fw, slope = ctx.saved_tensors
        gap = w[:, None] - w[None, :]
        close = gap.abs() <= 1e-9 * w.max().clamp(min=1e-300)
        quotient = (fw[:, None] - fw[None, :]) / torch.where(close, torch.ones_like(gap), gap)
        quotient = torch.where(close, (slope[:, None] + slope[None, :]) / 2, quotient).clamp(-ctx.cap, ctx.cap)
        return V @ (quotient * (V.mT @ grad @ V)) @ V.mT, None, None


class LinearizedAttention(TransformerMixin, BaseEstimator):
    """Attended features z -> z g(C), C = X^T X of the training inputs: linearized attention X X^T X without parameters.

    fit(X) computes the mean and g(C); transform(Z) returns normalise((Z - mean) g(C)). Labels never enter. Rows
    are examples. With `power=0`, `clip=None`, `rank=None` the map is the identity: that is the plain baseline.

    Args:
        centre: subtract the training mean first.
        normalize: scale each attended row to unit length. A row that is exactly zero stays zero.
        scale: "none": C = X^T X; "samples": C / n; "trace": C / trace(C). Without effect under `normalize`.
        power: g(C) = C^power, on the support of C (0 gives the identity).
        clip: spectral clipping: eigenvalues of C above `clip` times the median of the positive ones are lowered to it.
        rank: keep only the `rank` largest eigenvalues of C.
        shrinkage: penalty on C: (1 - shrinkage) C + shrinkage trace(C)/d I, in [0, 1].

    Attributes after fit: mean_ (d,), preconditioner_ (d, d), n_features_in_.
    Arrays give arrays, tensors give tensors, on their device and differentiable (also through fit).
    Errors: ShapeError (fewer than 2 rows), NotFiniteError, ArgumentError (a bad option; all rows the same while
    `centre` is set, which leaves nothing to attend to).
    Source: arXiv 2603.13085.
    """

    def __init__(
        self,
        *,
        centre: bool = True,
        normalize: bool = True,
        scale: str = "none",
        power: float = 1.0,
        clip: float | None = None,
        rank: int | None = None,
        shrinkage: float = 0.0,
    ) -> None:
        self.centre = centre
        self.normalize = normalize
        self.scale = scale
        self.power = power
        self.clip = clip
        self.rank = rank
        self.shrinkage = shrinkage

    def fit(self, X: ArrayLike, y: object = None) -> LinearizedAttention:
        data = matrix("X", X, min_rows=2)
        choice("scale", self.scale, _SCALES)
        positive("power", self.power, zero=True)
        mean = data.mean(0) if self.centre else data.new_zeros(data.shape[1])
        centred = data - mean
        size = float(centred.detach().abs().max())
        if size <= 1e-14 * max(1.0, float(data.detach().abs().max())):
            raise ArgumentError(
                "X: every row is the same (or zero), so nothing is left to attend to"
                + ("; pass centre=False or rows that differ" if self.centre else "")
            )
        C = centred.mT @ centred
        if self.scale == "samples":
            C = C / data.shape[0]
        elif self.scale == "trace":
            C = C / C.trace()
        self.mean_ = like(X, mean)
        self.preconditioner_ = like(X, self._preconditioner(C))
        self.n_features_in_ = data.shape[1]
        return self

    def _preconditioner(self, C: Tensor) -> Tensor:
        d = C.shape[0]
        if self.shrinkage:
            if not 0 <= self.shrinkage <= 1:
                raise ArgumentError(f"shrinkage: expected a number in [0, 1], got {self.shrinkage!r}")
            C = (1 - self.shrinkage) * C + self.shrinkage * C.trace() / d * torch.eye(d, dtype=C.dtype, device=C.device)
        if self.rank is None and self.clip is None:
            if self.power == 1:
                return C
            if self.power == 0:
                return torch.eye(d, dtype=C.dtype, device=C.device)
        rank = None if self.rank is None else whole("rank", self.rank, 1, d)
        clip = None if self.clip is None else positive("clip", self.clip)
        power = float(self.power)

        def g(w: Tensor) -> tuple[Tensor, Tensor]:
            support = w > 1e-12 * w.max()
            level = w.max() if clip is None else clip * w[support].median()
            if rank is not None:
                keep = torch.zeros_like(support)
                keep[w.topk(rank).indices] = True
                support = support & keep
            base = torch.where(support, w, torch.ones_like(w)).clamp(max=float(level))
            value = torch.where(support, base**power, torch.zeros_like(w))
            slope = torch.where(support & (w <= level), power * base ** (power - 1), torch.zeros_like(w))
            return value, slope

        top = float(torch.linalg.matrix_norm(C.detach(), 2))
        # C^a with a < 1 has an unbounded slope at 0; the cap only limits the gradient that an attack follows.
        return _SymmetricFunction.apply(C, g, 1e3 * max(top, 1e-300) ** (power - 1))

    def transform(self, X: ArrayLike) -> Any:
        if not hasattr(self, "preconditioner_"):
            raise NotFittedError("LinearizedAttention: call fit(X) on the training inputs before transform")
        data = matrix("X", X, columns=self.n_features_in_)
        mean, g = (torch.as_tensor(a).to(data) for a in (self.mean_, self.preconditioner_))
        out = (data - mean) @ g
        if self.normalize:
            out = unit_rows(out)
        return like(X, out)


def unit_rows(A: Tensor) -> Tensor:
    """Scale each row of A (n, d) to unit length; a zero row stays zero."""
    norm = A.norm(dim=1, keepdim=True)
    return A / torch.where(norm > 0, norm, torch.ones_like(norm))

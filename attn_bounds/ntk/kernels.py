"""Kernels of infinitely wide ReLU networks in closed form, and kernels that attention or the Gram matrix induces.

Every kernel is called k(x1, x2=None) with matrices whose rows are examples; x2=None means x1 with itself. Arrays
give arrays; tensors give tensors and gradients.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk._arrays import ArrayLike, choice, like, matrix, positive
from attn_bounds.ntk.attention import LinearizedAttention

# Cosines this close to 1 differ from 1 by rounding only: the angle is then 0 (duplicate rows get the diagonal's value).
_ROUNDING = 4e-16


class Kernel(Protocol):
    """A kernel function of two matrices of rows."""

    def __call__(self, x1: ArrayLike, x2: ArrayLike | None = None) -> Any: ...


def _pair(x1: ArrayLike, x2: ArrayLike | None) -> tuple[Tensor, Tensor]:
    a = matrix("x1", x1)
    return (a, a) if x2 is None else (a, matrix("x2", x2, columns=a.shape[1]).to(a.device))


def _angle(cosine: Tensor) -> Tensor:
    """arccos with its argument clipped; 0 exactly where the cosine is 1 up to rounding (with zero gradient)."""
    parallel = cosine >= 1 - _ROUNDING
    inside = torch.where(parallel, torch.zeros_like(cosine), cosine.clamp(-1 + _ROUNDING, 1))
    return torch.where(parallel, torch.zeros_like(cosine), torch.arccos(inside))


def _cosine(inner: Tensor, norms1: Tensor, norms2: Tensor, same: bool) -> Tensor:
    product = norms1[:, None] * norms2[None, :]
    cosine = inner / torch.where(product > 0, product, torch.ones_like(product))
    if same:  # an exact 1 on the diagonal: arccos turns 1e-16 there into 1e-8
        eye = torch.eye(len(cosine), dtype=torch.bool, device=cosine.device)
        cosine = torch.where(eye, torch.ones_like(cosine), cosine)
    return cosine


def two_layer_ntk(x1: ArrayLike, x2: ArrayLike | None = None, *, train: str = "first") -> Any:
    """Compute the infinite-width NTK of f(x) = m^(-1/2) sum_r a_r relu(w_r.x), w ~ N(0, I), a = +-1.

        train="first" (a held fixed):  <x, x'> (pi - theta) / (2 pi)
        train="both":                  that + |x||x'| (sin theta + (pi - theta) cos theta) / (2 pi)

    x1 (n1, d), x2 (n2, d) -> (n1, n2). theta is the angle between x and x'; a zero row has kernel 0.
    """
    choice("train", train, ("first", "both"))
    a, b = _pair(x1, x2)
    inner, na, nb = a @ b.mT, _norms(a), _norms(b)
    theta = _angle(_cosine(inner, na, nb, x2 is None))
    K = inner * (math.pi - theta) / (2 * math.pi)
    if train == "both":
        product = na[:, None] * nb[None, :]
        K = K + product * (torch.sin(theta) + (math.pi - theta) * torch.cos(theta)) / (2 * math.pi)
    return like(x1, K)


def _norms(A: Tensor) -> Tensor:
    """Row norms whose gradient at a zero row is 0 instead of NaN."""
    square = (A * A).sum(1)
    return torch.where(square > 0, torch.where(square > 0, square, torch.ones_like(square)).sqrt(), square)


@dataclasses.dataclass(frozen=True)
class InfiniteReLU:
    """NNGP and NTK kernels of a fully connected ReLU network of any depth at infinite width (float64).

        S_0 = weight_std^2 <x, x'>/d + bias_std^2,                       T_0 = S_0
        S_l = weight_std^2 sqrt(S_l-1(x,x) S_l-1(x',x')) k1(theta) + bias_std^2
        T_l = S_l + weight_std^2 k0(theta) T_l-1
        k0 = (pi - theta)/(2 pi),   k1 = (sin theta + (pi - theta) cos theta)/(2 pi),   l = 1..depth

    depth: hidden layers (0: a linear model). All layers are trained, parameters scaled as in the NTK parameterisation.
    Call it k(x1, x2=None, get="ntk"); get may be "ntk", "nngp" or a tuple of both, as in neural-tangents.
    Source: Jacot et al. 2018; Cho and Saul 2009.
    """

    depth: int = 1
    weight_std: float = math.sqrt(2.0)
    bias_std: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.depth, int) or self.depth < 0:
            raise ArgumentError(f"depth: expected an integer >= 0, got {self.depth!r}")
        positive("weight_std", self.weight_std)
        positive("bias_std", self.bias_std, zero=True)

    def __call__(self, x1: ArrayLike, x2: ArrayLike | None = None, get: str | tuple[str, ...] = "ntk") -> Any:
        names = (get,) if isinstance(get, str) else tuple(get)
        for name in names:
            choice("get", name, ("ntk", "nngp"))
        a, b = _pair(x1, x2)
        w2, b2 = self.weight_std**2, self.bias_std**2
        d = a.shape[1]
        S = w2 * (a @ b.mT) / d + b2
        na, nb = ((w2 * (x * x).sum(1) / d + b2) for x in (a, b))
        T = S
        for _ in range(self.depth):
            ra, rb = na.clamp(min=1e-300).sqrt(), nb.clamp(min=1e-300).sqrt()
            theta = _angle(_cosine(S, ra, rb, x2 is None))
            k0 = (math.pi - theta) / (2 * math.pi)
            k1 = (torch.sin(theta) + (math.pi - theta) * torch.cos(theta)) / (2 * math.pi)
            S = w2 * ra[:, None] * rb[None, :] * k1 + b2
            T = S + w2 * k0 * T
            na, nb = w2 * na / 2 + b2, w2 * nb / 2 + b2
        out = {"nngp": like(x1, S), "ntk": like(x1, T)}
        return out[get] if isinstance(get, str) else tuple(out[name] for name in names)


class AttendedKernel:
    """A kernel on linearized-attention features: k(g(x), g(x')), where g was fitted on the training inputs.

    fit(X) fits the attention; afterwards call it like any kernel. Refitting on other inputs moves every value: that
    is the data dependence which malleability measures.
    """

    def __init__(self, attention: LinearizedAttention | None = None, kernel: Kernel = two_layer_ntk) -> None:
        self.attention = LinearizedAttention() if attention is None else attention
        self.kernel = kernel

    def fit(self, X: ArrayLike) -> AttendedKernel:
        self.attention.fit(X)
        return self

    def __call__(self, x1: ArrayLike, x2: ArrayLike | None = None) -> Any:
        second = None if x2 is None else self.attention.transform(x2)
        return self.kernel(self.attention.transform(x1), second)


class GramKernel:
    """The Gram-induced kernel phi(x)^T G^power phi(x'), phi(x) = X x, G = X X^T of the training inputs.

    Since X^T G^p X = C^(p+1), it is x^T C^(p+1) x' with C = X^T X: power=-1 (pseudo-inverse) gives the linear kernel
    on the span of the training inputs, power=1 the attended kernel.
    """

    def __init__(self, power: float = 1.0) -> None:
        if not power >= -1:
            raise ArgumentError(f"power: expected a number >= -1, got {power!r}")
        self.power = float(power)

    def fit(self, X: ArrayLike) -> GramKernel:
        _, s, Vt = torch.linalg.svd(matrix("X", X, min_rows=2), full_matrices=False)
        if float(s[0]) == 0:
            raise ArgumentError("X: every entry is zero")
        keep = s > s[0] * 1e-12
        self._factor = (Vt[keep].mT * s[keep] ** (self.power + 1)) @ Vt[keep]
        return self

    def __call__(self, x1: ArrayLike, x2: ArrayLike | None = None) -> Any:
        if not hasattr(self, "_factor"):
            raise ArgumentError("GramKernel: call fit(X) on the training inputs first")
        a, b = _pair(x1, x2)
        return like(x1, (a @ self._factor.to(a)) @ (b @ self._factor.to(a)).mT)

"""How a ridge parameter is chosen: always an explicit rule, because the rule decides the outcome of comparisons."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk._arrays import choice, positive

_KINDS = ("value", "relative", "dof", "accuracy")


@dataclasses.dataclass(frozen=True)
class Ridge:
    """A rule that turns a kernel matrix K (n, n) into a ridge lambda.

    kind "value": lambda = amount. "relative": amount times the mean diagonal of K. "dof": the lambda at which
    tr K (K + lambda)^-1 = amount (effective degrees of freedom). "accuracy": the largest lambda of a logarithmic
    grid whose leave-one-out accuracy reaches amount.
    """

    kind: str
    amount: float

    def __post_init__(self) -> None:
        choice("ridge", self.kind, _KINDS)
        object.__setattr__(self, "amount", positive("ridge", self.amount, zero=self.kind in ("value", "relative")))
        if self.kind == "accuracy" and self.amount > 1:
            raise ArgumentError(f"ridge: expected an accuracy in (0, 1], got {self.amount:g}")

    @classmethod
    def parse(cls, text: str) -> Ridge:
        """Read "dof:50", "value:0.1", "relative:0.01" or "accuracy:0.9"."""
        kind, colon, amount = text.partition(":")
        try:
            return cls(kind, float(amount)) if colon else cls("value", float(text))
        except ValueError as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                f"ridge: expected KIND:NUMBER with KIND one of {', '.join(_KINDS)}, got {text!r}"
            ) from error

    def __str__(self) -> str:
        return f"{self.kind}:{self.amount:g}"

    def resolve(self, K: Tensor, Y: Tensor | None = None) -> float:
        """Return lambda for K (n, n); Y (n, outputs) is needed by "accuracy" only.

        Errors: ArgumentError if the degrees of freedom exceed the rank of K, or no lambda reaches the accuracy.
        """
        if self.kind == "value":
            return float(self.amount)
        if self.kind == "relative":
            return float(self.amount * K.diagonal().mean())
        w, V = torch.linalg.eigh(K)
        w = w.clamp(min=0)
        if self.kind == "dof":
            rank = int((w > len(w) * 2.3e-16 * w[-1]).sum())
            if self.amount >= rank:
                raise ArgumentError(
                    f"ridge: expected fewer degrees of freedom than the rank of K ({rank}), got {self.amount:g}"
                )
            low, high = w[-1].log10() - 18, w[-1].log10() + 18
            for _ in range(100):
                middle = (low + high) / 2
                too_many = bool((w / (w + 10**middle)).sum() > self.amount)
                low, high = (middle, high) if too_many else (low, middle)
            return float(10 ** ((low + high) / 2))
        if Y is None:
            raise ArgumentError("ridge: the rule accuracy needs the targets Y")
        best = 0.0
        for exponent in torch.linspace(3, -9, 97, dtype=K.dtype):
            lam = float(w[-1] * 10**exponent)
            B = (V / (w + lam)) @ V.mT
            loo = Y - (B @ Y) / B.diagonal()[:, None]
            accuracy = float((decide(loo) == decide(Y)).double().mean())
            best = max(best, accuracy)
            if accuracy >= self.amount:
                return lam
        raise ArgumentError(f"ridge: no ridge reaches leave-one-out accuracy {self.amount:g}; the best is {best:.4f}")


def decide(F: Tensor) -> Tensor:
    """Turn outputs (n, outputs) into class indices: the largest, or for one output its sign."""
    return (F[:, 0] > 0).long() if F.shape[1] == 1 else F.argmax(1)

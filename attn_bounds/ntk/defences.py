"""What makes linearized attention less malleable: spectral defences, robust losses, clipping, aligned starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk._arrays import ArrayLike, positive
from attn_bounds.ntk.attention import LinearizedAttention
from attn_bounds.ntk.data import Split, encode_labels
from attn_bounds.ntk.influence import RidgeInfluence
from attn_bounds.ntk.kernels import AttendedKernel, _angle, _cosine
from attn_bounds.ntk.malleability import Attack, accuracy, attack_inputs, fitted, flip_rate
from attn_bounds.ntk.poisoning import NetworkTraining, choose_flips
from attn_bounds.ntk.ridge import Ridge


class AlignedKernel:
    """Infinite-width NTK of attended features when the first layer starts aligned with the labels.

        w ~ N(0, M),  M = (1 - beta) I + beta d T T^T / trace(T T^T),  T = (A^T A + trace(A^T A)/100 I)^-1 A^T Y
        k(x, x') = <x, x'> (pi - theta_M) / (2 pi),   theta_M the angle between M^(1/2) x and M^(1/2) x'

    A (n, d) are the attended training inputs, Y (n, outputs) their targets, 0 <= beta < 1 (0: the usual start). T holds
    the linear predictors of the targets; class means in their place LOWER the alignment of the kernel with Y Y^T.
    """

    def __init__(self, attention: LinearizedAttention, Y: Tensor, beta: float = 0.5) -> None:
        if not 0 <= beta < 1:
            raise ArgumentError(f"beta: expected a number in [0, 1), got {beta!r}")
        self.attention, self.Y, self.beta = attention, Y, beta

    def fit(self, X: ArrayLike) -> AlignedKernel:
        A = self.attention.fit(X).transform(X)
        d = A.shape[1]
        eye = torch.eye(d, dtype=A.dtype, device=A.device)
        C = A.mT @ A
        T = torch.linalg.solve(C + C.trace() / 100 * eye, A.mT @ self.Y)
        M = T @ T.mT
        self.covariance_ = (1 - self.beta) * eye + self.beta * d / M.trace() * M
        return self

    def __call__(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        a = self.attention.transform(x1)
        b = a if x2 is None else self.attention.transform(x2)
        # The angle under M from inner products x^T M x': no square root of M is needed.
        MA = a @ self.covariance_
        na, nb = ((x @ self.covariance_ * x).sum(1).clamp(min=0).sqrt() for x in (a, b))
        theta = _angle(_cosine(MA @ b.mT, na, nb, x2 is None))
        return (a @ b.mT) * (torch.pi - theta) / (2 * torch.pi)


def huber_weights(K: Tensor, Y: Tensor, ridge: float, *, quantile: float = 0.5, iterations: int = 20) -> Tensor:
    """Compute weights (n,) that make weighted kernel ridge minimise a Huber loss of the leave-one-out residuals.

        w_i = min(1, delta / |y_i - f_without_i(x_i)|),   delta the given quantile of these lengths at the start

    Iteratively reweighted; leave-one-out residuals, because a flexible model fits a wrong label and hides it.
    """
    weights = torch.ones(len(K), dtype=K.dtype, device=K.device)
    delta = None
    for _ in range(iterations):
        residual = (Y - RidgeInfluence(K, K[:1], Y, ridge, weights=weights).leave_one_out).norm(dim=1)
        if delta is None:
            delta = positive("quantile of the residuals", float(residual.quantile(quantile)))
        weights = (delta / residual.clamp(min=1e-300)).clamp(max=1.0)
    return weights


@dataclasses.dataclass(frozen=True)
class Defence:
    """A model with one defence: a kernel, and optionally robust weights or a trained network instead of its limit."""

    name: str
    kernel: Any
    robust: bool = False
    network: NetworkTraining | None = None


def standard_defences(split: Split, network: NetworkTraining | None = None) -> list[Defence]:
    """Return the defences under comparison, the undefended model first; with `network`, the trained ones too.

    Ranks that the inputs do not exceed are left out.
    """

    def attention(**options: Any) -> AttendedKernel:
        return AttendedKernel(LinearizedAttention(**options))

    out = [
        Defence("none", attention()),
        Defence("power 1/2", attention(power=0.5)),
        Defence("power 1/4", attention(power=0.25)),
        Defence("clip at 10x median", attention(clip=10.0)),
        Defence("clip at median", attention(clip=1.0)),
        Defence("penalty on C, 0.1", attention(shrinkage=0.1)),
        Defence("penalty on C, 0.5", attention(shrinkage=0.5)),
        *(Defence(f"rank {r}", attention(rank=r)) for r in (10, 20) if r < split.X.shape[1]),
        Defence("Huber loss", attention(), robust=True),
        Defence("aligned start", AlignedKernel(LinearizedAttention(), split.Y)),
        Defence("power 1/4 and Huber loss", attention(power=0.25), robust=True),
        Defence("ReLU baseline (no attention)", attention(power=0.0)),
    ]
    if network is not None:
        clipped = dataclasses.replace(network, clip=0.5)
        out += [
            Defence("network: none", attention(), network=network),
            Defence("network: gradient clipping", attention(), network=clipped),
            Defence("network: aligned start", AlignedKernel(LinearizedAttention(), split.Y), network=network),
            Defence("network: power 1/4", attention(power=0.25), network=network),
        ]
    return out


def defences(
    split: Split,
    ridge: Ridge,
    attack: Attack | None = None,
    *,
    candidates: list[Defence] | None = None,
    poison_fraction: float = 0.01,
    poison_method: str = "greedy",
) -> pd.DataFrame:
    """Measure each defence: adversarial flip rate, accuracy lost to poisoning, and clean accuracy.

    The ridge rule is resolved for each model on its clean inputs and kept. Each model is attacked by PGD through its
    own infinite-width kernel ridge regression (the robust weights and the trained network inherit that attack).
    Returns one row a defence: flip_rate, flip_rate_prediction, clean, poison_drop, ridge, dof.
    """
    attack = Attack() if attack is None else attack
    candidates = standard_defences(split) if candidates is None else candidates
    budget = max(1, round(poison_fraction * len(split.y)))
    classes = 2 if split.Y.shape[1] == 1 else split.Y.shape[1]
    rows = []
    for defence in candidates:
        clean = fitted(defence.kernel, split.X)
        K = clean(split.X)
        lam = ridge.resolve(K, split.Y)
        moved = attack_inputs(defence.kernel, split.X, split.Y, lam, attack)
        flips = choose_flips(
            RidgeInfluence(K, clean(split.X_test, split.X), split.Y, lam), split, budget, poison_method
        )
        model = _Model(defence, split, ridge, lam)
        before, base = model.fit(split.X, split.Y)
        after, _ = model.fit(moved, split.Y)
        _, poisoned = model.fit(split.X, encode_labels(flips, classes))
        rows.append(
            {
                "defence": defence.name,
                "flip_rate": flip_rate(before.hat(), after.hat()),
                "flip_rate_prediction": flip_rate(before.prediction(), after.prediction()),
                "clean": accuracy(base, split),
                "poison_drop": accuracy(base, split) - accuracy(poisoned, split),
                "ridge": before.ridge,
                "dof": before.degrees_of_freedom,
            }
        )
    return pd.DataFrame(rows)


class _Model:
    """One defended model, fitted on clean or moved inputs and on clean or poisoned targets."""

    def __init__(self, defence: Defence, split: Split, ridge: Ridge, lam: float) -> None:
        self.defence, self.split, self.rule, self.lam = defence, split, ridge, lam
        self._network_ridge: float | None = None

    def fit(self, X: Tensor, Y: Tensor) -> tuple[RidgeInfluence, Tensor]:
        """Return the solved influence problem and the predictions on the test points."""
        kernel = fitted(self.defence.kernel, X)
        if self.defence.network is not None:
            A, B = (kernel.attention.transform(x) for x in (X, self.split.X_test))
            start, end = self.defence.network.train(A, Y, getattr(kernel, "covariance_", None))
            K = end.ntk(A)
            if self._network_ridge is None:  # resolved once, on the clean inputs
                self._network_ridge = self.rule.resolve(K, Y)
            return RidgeInfluence(K, end.ntk(B, A), Y, self._network_ridge), end(B) - start(B)
        K = kernel(X)
        weights = huber_weights(K, Y, self.lam) if self.defence.robust else None
        solved = RidgeInfluence(K, kernel(self.split.X_test, X), Y, self.lam, weights=weights)
        return solved, solved.predictions


def best_defence(table: pd.DataFrame, reference: str = "none") -> pd.DataFrame:
    """Return the defences that at least halve the reference's flip rate at no loss of clean accuracy."""
    base = table[table.defence == reference]
    if len(base) != 1:
        raise ArgumentError(f"reference: expected one row named {reference!r}, got {len(base)}")
    good = (table.flip_rate <= base.flip_rate.iloc[0] / 2) & (table.clean >= base.clean.iloc[0])
    return table[good & (table.defence != reference)].sort_values("flip_rate")
